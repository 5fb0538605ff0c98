"""Handlers: how a user's function receives its message, and how its return value becomes a reply.

The annotation of a parameter chooses what it receives: the whole message, the raw payload, the payload decoded into
a type, or an object that is provided to handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import time
import types
import typing
from collections.abc import Callable
from typing import Any
from warnings import warn as deprecate

import msgspec

from iris import forks
from iris.awaiting import check_function
from iris.core.bundle import Headers, check_headers
from iris.core.faults import Refusal
from iris.core.interfaces import Delivery
from iris.core.message import (
    Message,
    MethodMessage,
    check_decodable,
    decode_payload,
    encode_payload,
)
from iris.errors import ConfigError, DecodeError
from iris.one_process import OneProcess
from iris.parameters import (
    MISSING,
    Parameter,
    Provided,
    UnreadableAnnotation,
    code_of,
    name_of,
    parameters_of,
)


class ArgumentError(DecodeError):
    """The payload of a message does not fit the annotation of its handler, which has not run."""


class Reply:
    """A reply with headers; a handler may return one instead of a plain value."""

    __slots__ = ("headers", "value")

    def __init__(self, value: object, headers: Headers | None = None) -> None:
        self.value = value
        self.headers = headers

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.value, self.headers)


class Request(Message, gc=True):
    """A request, push or survey with its deadline, and with `defer` for handlers that reply later.

    Annotate the parameter with it to receive one.

    `deadline` is the time, as `time.monotonic()` counts it, at which the caller stops waiting, or by which a push must
    have been started. None means that there is no such time.

    `kind` is "request", "push", "survey", "broadcast" or "publish".
    """

    context: Any = None
    deadline: float | None = None
    method: str = ""
    kind: str = ""

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Leave out `context`, because another process cannot reply."""
        whole = self if self.context is None else msgspec.structs.replace(self, context=None)
        return super(Request, whole).__reduce__()

    def remaining(self) -> float:
        """Return the seconds until the deadline, at least 0; `math.inf` if there is none."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def defer(self) -> Deferred:
        """Return a `Deferred` to reply with later. The return value of the handler is then ignored.

        Until you reply, the request counts toward the member's `concurrency`. A Deferred that is garbage-collected
        without a reply answers with an error.

        Raises:
            ConfigError: this is a push or a copy, or was deferred before.
        """
        if self.context is None:
            raise ConfigError(
                "only requests and surveys can be deferred, where they arrived; a push, a cast and a copy of a message "
                "have no reply"
            )
        deferred: Deferred = self.context()
        return deferred


class Deferred(OneProcess):
    """A pending reply. Call `reply` or `fail`; only the first call counts."""

    __slots__ = ("_finish", "_generation", "_loop", "done")
    _why = "it replies over a connection of this process; send what the reply needs, and reply here"

    def __init__(
        self,
        finish: Callable[[object, str | Refusal | None], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._finish = finish
        self._loop = loop
        self._generation = forks.generation
        self.done = False

    def reply(self, value: object) -> None:
        """Send `value` as the reply, as if the handler had returned it."""
        if not self.done:
            self.done = True
            self._finish(value, None)

    def fail(self, error: str | Refusal) -> None:
        """Send an error as the reply; the caller gets a RemoteError with this text, or with this code and details."""
        if not self.done:
            self.done = True
            self._finish(None, error)

    def __del__(self) -> None:
        if not self.done and self._generation == forks.generation:
            self.done = True
            # The garbage collector may run in any thread, at any point of any code.
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no reply can be sent
                self._loop.call_soon_threadsafe(
                    self._finish, None, "the handler discarded its deferred reply without answering"
                )


class Expired(Exception):
    """The deadline of a message passed before its handler was started."""


class Handler:
    """A user's function and its parameters. Once resolved, it takes one argument, of the type `wanted`."""

    __slots__ = ("cancels", "function", "is_coroutine", "kind_name", "name", "parameters", "wanted")

    def __init__(
        self, function: Callable[..., Any], parameters: list[Parameter] | None = None, *, name: str = "",
        is_coroutine: bool | None = None,
    ) -> None:  # fmt: skip
        """Create a handler; what is not given is read from the function.

        Raises ConfigError if the function cannot be a handler.
        """
        if parameters is None:
            check_function(function)
        self.function = function
        self.cancels = False
        """Whether the function is cancelled when its caller leaves."""
        self.kind_name = ""
        """Kind of the messages that it receives, as `Request.kind` has it."""
        self.parameters = parameters_of(function) if parameters is None else parameters
        self.name = name or name_of(function)
        if is_coroutine is None:
            is_coroutine = inspect.iscoroutinefunction(code_of(function))
        self.is_coroutine = is_coroutine
        self.wanted = self.parameters[0].hint
        """Type of the argument; None if it is not annotated."""

    @property
    def in_loop(self) -> list[Callable[..., Any]]:
        """The user's functions that this handler calls in the event loop."""
        return [self.function]

    def replaced(self, function: Callable[[Any], Any], wanted: Any) -> Handler:
        """Return a handler that calls `function` with an argument of the type `wanted`."""
        parameters = [Parameter("message", wanted)]
        functools.update_wrapper(function, self.function)  # for the log, which names it
        handler = Handler(function, parameters, name=self.name, is_coroutine=self.is_coroutine)
        handler.kind_name = self.kind_name
        return handler

    def resolved(self, provided: Provided, *, has_message: bool = True) -> Handler:
        """Return a handler of one argument, inside the middleware if the argument is a message; see `filled`."""
        handler = self.filled(provided, has_message=has_message)
        if has_message and provided.wrap is not None:
            handler = provided.wrap(handler)
        if provided.tracer is not None:
            handler = provided.tracer.trace_handler(handler)
        return handler

    def filled(self, provided: Provided, *, has_message: bool = True) -> Handler:
        """Return a handler of one argument: each parameter has its provided object, or gets the message or payload.

        It is this handler itself if the payload or message is all that it takes. Without `has_message` the argument is
        not a message, so it is passed on as it is.

        Raises ConfigError if nothing fits a parameter, or several objects do.
        """
        fixed: dict[int, Any] = {}
        whole: list[int] = []
        payload: list[int] = []
        for number, parameter in enumerate(self.parameters):
            if has_message and parameter.hint in (Message, Request):
                whole.append(number)
                continue
            try:
                found = provided.find(parameter.type)
            except ConfigError as err:
                raise ConfigError(f"handler {self.name!r}, parameter {parameter}: {err}") from None
            if found is MISSING:
                payload.append(number)
            else:
                fixed[number] = found
        if len(payload) > 1:
            first, second = (self.parameters[number] for number in payload[:2])
            messages = ", Message, Request" if has_message else ""
            raise ConfigError(
                f"handler {self.name!r}: nothing fits parameter {second} ({first} receives the payload); "
                f"available are {provided}{messages}; yield an object of this type from the service's lifespan"
            )
        if has_message and payload and (hint := self.parameters[payload[0]].hint) is not None:
            try:
                check_decodable(hint)
            except ConfigError as err:
                parameter = self.parameters[payload[0]]
                raise ConfigError(
                    f"handler {self.name!r}, parameter {parameter}: {err}; an object of this type can also come from "
                    f"the service's lifespan"
                ) from err.__cause__
        if len(self.parameters) == 1 and not fixed and not self.parameters[0].keyword_only:
            return self
        kinds = [self.parameters[number].hint for number in whole]
        if not kinds:
            wanted = self.parameters[payload[0]].hint if payload else Message
        else:
            wanted = Request if Request in kinds else Message
        return self.replaced(self._filling(fixed, whole, payload), wanted)

    def _filling(
        self, fixed: dict[int, Any], whole: list[int], payload: list[int]
    ) -> Callable[[Any], Any]:
        """Return the function of one argument, which fills the parameters with these numbers.

        If some receive the whole message, so does the function; else it receives the payload.
        """
        function = self.function
        names = {n: p.name for n, p in enumerate(self.parameters) if p.keyword_only}
        positions = [fixed.get(number) for number in range(len(self.parameters))]
        hint = self.parameters[payload[0]].hint if payload else None
        direct = whole or payload

        def fill(argument: Any) -> Any:
            values = positions.copy()
            for number in direct:
                values[number] = argument
            if whole and payload:
                values[payload[0]] = _argument(argument, hint)
            if not names:
                return function(*values)
            first = len(values) - len(names)  # those after it are passed by name
            return function(
                *values[:first], **dict(zip(names.values(), values[first:], strict=True))
            )

        return fill

    def awaiting(self) -> Handler:
        """Return this handler, resolved, as a coroutine function, because its plain function returned an awaitable."""
        return _Awaiting(self)

    def chosen(self, message: Message) -> Handler:
        """Return the handler that runs for a message: this one, unless it stands for several."""
        return self

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        """Return the argument for the function. Raises ArgumentError if the payload does not fit its annotation."""
        if self.wanted is not Request:
            return self.convert(delivery.message)
        request: Request = self.convert(delivery.message, defer)
        if delivery.deadline_us:
            request.deadline = delivery.deadline_us / 1e6
        return request

    def as_callback(self) -> Callable[[Message], object]:
        """Return a handler that takes a Message and calls the function with the converted argument."""
        if self.wanted is Message and self.is_coroutine == inspect.iscoroutinefunction(
            self.function
        ):
            return self.function
        if self.is_coroutine:

            async def run(message: Message) -> object:
                return await self.function(self.convert(message))

            return functools.update_wrapper(run, self.function)
        return functools.update_wrapper(
            lambda message: self.function(self.convert(message)), self.function
        )

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        """Convert a message to the annotated type of the function's parameter. Raises ArgumentError."""
        if self.wanted is Message:
            return message
        if self.wanted is Request:
            if type(message) is Request:  # made for middleware
                return message
            whole = message.payload, message.name, message.headers, message.packed, message.source
            request = Request(*whole, defer)
            request.kind = self.kind_name
            if type(message) is MethodMessage:
                request.method = message.method
            return request
        try:
            return decode_payload(message.payload, message.packed, self.wanted)
        except DecodeError as err:
            raise ArgumentError(str(err)) from err


class _Awaiting(Handler):
    """A resolved handler whose plain function returns awaitables. Whoever runs it awaits what it returns."""

    __slots__ = ("_plain",)

    def __init__(self, plain: Handler) -> None:
        function = plain.function

        async def run(argument: Any) -> Any:
            return function(argument)

        functools.update_wrapper(run, function)  # for the log, which names it
        super().__init__(run, plain.parameters, name=plain.name, is_coroutine=True)
        self.kind_name = plain.kind_name
        self._plain = plain

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        return self._plain.argument(delivery, defer)

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        return self._plain.convert(message, defer)


def _argument(message: Message, wanted: Any) -> Any:
    """Return a message's payload as `wanted`. Raises ArgumentError."""
    try:
        return decode_payload(message.payload, message.packed, wanted)
    except DecodeError as err:
        raise ArgumentError(str(err)) from err


def encode_reply(value: object) -> tuple[bytes, Headers | None, bool]:
    """Return (payload, headers, packed) of what a handler returned."""
    headers: Headers | None = None
    if isinstance(value, Reply):
        headers = check_headers(value.headers) if value.headers else None
        value = value.value
    payload, packed = encode_payload(value)
    return payload, headers, packed


def stopping() -> bool:
    """Return whether this task is being cancelled. If not, a CancelledError came from the handler itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def subscriber(function: Callable[..., object], provided: Provided) -> Callable[[Message], object]:
    """Return what a subscription made with `Client.subscribe` calls for each message.

    It differs from a handler of a service in one point: a parameter without an annotation receives the Message.

    Raises ConfigError if the function cannot be a handler.
    """
    check_function(function)
    try:
        parameters = parameters_of(function)
    except UnreadableAnnotation as err:
        text = f"{err}; it receives the whole message. In the next version this will be an error"
        deprecate(text, DeprecationWarning, stacklevel=3)
        return function
    parameters = [
        parameter._replace(hint=Message) if _takes_message(parameter.hint) else parameter
        for parameter in parameters
    ]
    handler = Handler(function, parameters)
    handler.kind_name = "publish"
    return handler.resolved(provided).as_callback()


def _takes_message(hint: Any) -> bool:
    """Return whether a function that is called with a Message may have this annotation."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_takes_message(each) for each in typing.get_args(hint))
    return hint in (None, Any, object, Message)
