"""Middleware: functions around the handlers of a service, and around the requests and pushes of a client.

Both have the same form. Where there is none, nothing of this module is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from iris.awaiting import finished
from iris.core.bundle import Headers
from iris.core.interfaces import Delivery
from iris.core.message import Message
from iris.errors import ConfigError
from iris.handlers import Deferred, Handler, Request
from iris.parameters import Parameter, code_of

CallNext: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Passes a request on to the next middleware, or in the end to the handler or the relay, and returns the result."""
Middleware: TypeAlias = Callable[[Any, CallNext], Awaitable[Any]]
"""A coroutine function `async def middleware(request, call_next)` that returns the result."""


def checked(middleware: Iterable[Middleware]) -> tuple[Middleware, ...]:
    """Return middleware in its order, the first outermost. Raises ConfigError if one is not a coroutine function."""
    found = tuple(middleware)
    for each in found:
        if not inspect.iscoroutinefunction(code_of(each)):
            raise ConfigError(
                f"middleware must be coroutine functions, but {each!r} is not; "
                f"define it with `async def middleware(request, call_next)`"
            )
    return found


class Call:
    """A request or push that is about to be sent, as middleware of a client sees it. All attributes can be set.

    Each request of `request_many` is one. Surveys, broadcasts, publications, tunnels and streams have no middleware:
    they have no single result, or `offer` sends them without waiting.

    `timeout` (s) is for each `call_next`, and `options` holds the other arguments of the call, such as `idempotent`.
    `kind`, `name`, `method`, `payload` and `headers` are called as in `iris.Request`.
    """

    __slots__ = ("headers", "kind", "name", "options", "payload", "timeout")

    def __init__(
        self, kind: Literal["request", "push"], name: str, payload: object, headers: Headers | None, timeout: float,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.kind = kind
        self.name = name
        """Cluster to which it is sent."""
        self.payload = payload
        """Bytes or object, as it was passed to the client."""
        self.headers = headers
        self.timeout = timeout
        self.options = options

    @property
    def method(self) -> str:
        """The method that is called; empty if none is named."""
        return self.options.get("method") or ""

    @method.setter
    def method(self, name: str) -> None:
        self.options["method"] = name or None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (
            self.kind,
            self.name,
            self.payload,
            self.headers,
            self.timeout,
            self.options,
        )

    def __repr__(self) -> str:
        return f"Call({self.kind} to {self.name!r})"


class _Next:
    """What one middleware receives as `call_next`."""

    __slots__ = ("_end", "_middleware", "_number")

    def __init__(self, middleware: Sequence[Middleware], number: int, end: CallNext) -> None:
        self._middleware = middleware
        self._number = number
        self._end = end

    def __call__(self, request: Any) -> Awaitable[Any]:
        number = self._number
        if number == len(self._middleware):
            return self._end(request)
        following = _Next(self._middleware, number + 1, self._end)
        return self._middleware[number](request, following)


class _Arrived:
    """A message for a handler with middleware: `delivery` is None for a cast."""

    __slots__ = ("defer", "delivery", "request")

    def __init__(
        self, request: Any, delivery: Delivery | None, defer: Callable[[], Deferred] | None
    ) -> None:
        self.request = request
        self.delivery = delivery
        self.defer = defer


class MiddlewareHandler(Handler):
    """A resolved handler inside middleware. It is a coroutine function, so it runs within the service's concurrency."""

    __slots__ = ("_front", "_handler", "_middleware")

    def __init__(self, handler: Handler, middleware: Sequence[Middleware]) -> None:
        @functools.wraps(handler.function)  # for the log, which names it
        async def run(arrived: _Arrived) -> Any:
            end = functools.partial(self._call, arrived)
            return await _Next(self._middleware, 0, end)(arrived.request)

        parameters = [Parameter("message", Request)]
        super().__init__(run, parameters, name=handler.name, is_coroutine=True)
        self.kind_name = handler.kind_name
        self._front = Handler(run, parameters, name=handler.name, is_coroutine=True)
        self._front.kind_name = handler.kind_name
        """Makes the request that middleware receives."""
        self._handler = handler
        self._middleware = middleware

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        return _Arrived(self._front.argument(delivery, defer), delivery, defer)

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        return _Arrived(self._front.convert(message, defer), None, None)

    async def _call(self, arrived: _Arrived, request: Message) -> Any:
        handler, delivery, defer = self._handler, arrived.delivery, arrived.defer
        if delivery is not None and defer is not None:
            delivery.message = request  # which middleware may have changed
            value = handler.function(handler.argument(delivery, defer))
        else:
            value = handler.function(handler.convert(request))
        if handler.is_coroutine:
            value = await value
        return await finished(value)


def wrap_request(request: Callable[..., Awaitable[Any]], middleware: Sequence[Middleware]) -> Any:
    """Return `Client.request` inside middleware."""

    @functools.wraps(request)
    async def wrapped(
        cluster: str, payload: object, *, timeout: float, headers: Headers | None = None, **options: Any
    ) -> Any:  # fmt: skip
        call = Call("request", cluster, payload, headers, timeout, options)
        return await _Next(middleware, 0, functools.partial(_send, request))(call)

    return wrapped


def wrap_push(push: Callable[..., Awaitable[None]], middleware: Sequence[Middleware]) -> Any:
    """Return `Client.push` inside middleware."""

    @functools.wraps(push)
    async def wrapped(
        cluster: str, payload: object, *, timeout: float = 5.0, headers: Headers | None = None, **options: Any
    ) -> None:  # fmt: skip
        call = Call("push", cluster, payload, headers, timeout, options)
        await _Next(middleware, 0, functools.partial(_send, push))(call)

    return wrapped


def _send(send: Callable[..., Awaitable[Any]], call: Call) -> Awaitable[Any]:
    return send(call.name, call.payload, timeout=call.timeout, headers=call.headers, **call.options)
