"""Handlers inside spans: of services, of subscriptions, and of tunnels."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, StatusCode

from iris.awaiting import finished, is_late
from iris.core.faults import Refusal
from iris.core.interfaces import Delivery
from iris.core.message import Message
from iris.handlers import Deferred, Handler, Request
from iris.parameters import Parameter
from iris.tracing.spans import CODE, ERROR_TYPE, Spans, handler_failed
from iris.tunnel import EndOfTunnel, Tunnel
from iris.wire.texts import encodable


class Processing:
    """The span of a handler, which is the current one inside the block. It ends with the block, unless `later`."""

    __slots__ = ("_context", "_token", "later", "span")

    def __init__(self, span: Span, context: Context) -> None:
        self.span = span
        self.later = False
        """Whether a later reply ends the span."""
        self._context = context

    def __enter__(self) -> None:
        self._token = attach(self._context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        detach(self._token)
        if error is not None:
            handler_failed(self.span, error)
        if not self.later:
            self.span.end()

    def finishing(self, value: object) -> Awaitable[object]:
        """Return what awaits the result of a handler inside the block again, because its work goes on."""
        later, self.later = self.later, True  # the block that is being left does not end the span

        async def finish() -> object:
            self.later = later
            with self:
                return await finished(value)

        return finish()


class _Arrived:
    """A message for a traced handler; `delivery` is None for a cast."""

    __slots__ = ("defer", "delivery", "message")

    def __init__(
        self, message: Message, delivery: Delivery | None, defer: Callable[[], Deferred] | None
    ) -> None:
        self.message = message
        self.delivery = delivery
        self.defer = defer


class TracedHandler(Handler):
    """A resolved handler inside a span. It runs as the handler alone would: as a plain function, or as a coroutine.

    The payload is converted inside the span too, so an error of that is the span's.
    """

    __slots__ = ("_handler", "_loop", "_spans")

    def __init__(self, handler: Handler, spans: Spans) -> None:
        function = handler.function
        self._loop = asyncio.get_running_loop()

        async def run(arrived: _Arrived) -> Any:
            with (processing := self._begin(arrived.message)):
                return await finished(await function(self._argument(arrived, processing)))

        def run_plain(arrived: _Arrived) -> Any:
            with (processing := self._begin(arrived.message)):
                value = function(self._argument(arrived, processing))
                return processing.finishing(value) if is_late(value) else value

        chosen: Callable[..., Any] = run if handler.is_coroutine else run_plain
        _name_as(chosen, function)
        parameters = [Parameter("message", Request)]  # so that it gets `argument`, not the message
        super().__init__(chosen, parameters, name=handler.name, is_coroutine=handler.is_coroutine)
        self.kind_name = handler.kind_name
        self._handler = handler
        self._spans = spans

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        return _Arrived(delivery.message, delivery, defer)

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        return _Arrived(message, None, None)

    def _begin(self, message: Message) -> Processing:
        return Processing(
            *self._spans.process(
                self.kind_name, message.name, message.headers, method=message.method
            )
        )

    def _argument(self, arrived: _Arrived, processing: Processing) -> Any:
        if arrived.delivery is None or arrived.defer is None:
            return self._handler.convert(arrived.message)
        defer = functools.partial(_defer, arrived.defer, processing, self._loop)
        return self._handler.argument(arrived.delivery, defer)


def _defer(
    defer: Callable[[], Deferred], processing: Processing, loop: asyncio.AbstractEventLoop
) -> Deferred:
    """Return a deferred reply that ends the span. Raises as `defer`."""
    reply = defer()
    processing.later = True

    def finish(value: object, error: str | Refusal | None) -> None:
        span = processing.span
        if isinstance(error, Refusal):
            span.set_attribute(CODE, error.code)
        elif error is not None:
            span.set_attribute(ERROR_TYPE, "RemoteError")  # as its caller calls it
            span.set_status(StatusCode.ERROR, encodable(error))
        span.end()
        if error is None:
            reply.reply(value)
        else:
            reply.fail(error)

    return Deferred(finish, loop)


def traced_callback(
    callback: Callable[[Message], object], spans: Spans, pattern: str, group: str
) -> Callable[[Message], object]:
    """Return the handler of a subscription, which takes the message, inside a span."""

    def begin(message: Message) -> Processing:
        shown = {"shown": pattern, "group": group}
        return Processing(*spans.process("publish", message.name, message.headers, **shown))

    async def run(message: Message) -> object:
        with begin(message):
            result: Any = callback(message)
            return await finished(await result)

    def run_plain(message: Message) -> object:
        with (processing := begin(message)):
            value = callback(message)
            return processing.finishing(value) if is_late(value) else value

    chosen: Callable[[Message], object] = (
        run if inspect.iscoroutinefunction(callback) else run_plain
    )
    _name_as(chosen, callback)
    return chosen


class TracedTunnels(Handler):
    """A resolved handler of tunnels inside a span."""

    __slots__ = ()

    def __init__(self, handler: Handler, spans: Spans) -> None:
        async def run(tunnel: Tunnel) -> None:
            with Processing(*spans.process("tunnel", tunnel.name, tunnel.headers)):
                try:
                    await handler.function(tunnel)
                except EndOfTunnel:
                    return  # the service takes it for the end, too

        _name_as(run, handler.function)
        super().__init__(run, handler.parameters, name=handler.name, is_coroutine=True)
        self.kind_name = handler.kind_name


def _name_as(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Give a wrapper the name of a handler, for the log: also of a partial or of an object that is called."""
    if not hasattr(function, "__qualname__"):
        function = getattr(function, "func", type(function))
    functools.update_wrapper(wrapper, function, updated=())
