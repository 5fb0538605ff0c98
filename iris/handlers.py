"""Handlers: how a user's function receives its message, and how its return value becomes a reply.

The annotation of a handler's only parameter chooses what it receives: the whole message, the raw payload, or
the payload decoded into a type.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from iris.core.bundle import Headers, check_headers
from iris.core.faults import Refusal
from iris.core.interfaces import Delivery
from iris.core.message import Message, decode_payload, encode_payload
from iris.errors import ConfigError


class Reply:
    """A reply with headers; a handler may return one instead of a plain value."""

    __slots__ = ("headers", "value")

    def __init__(self, value: object, headers: Headers | None = None) -> None:
        self.value = value
        self.headers = headers


class Request(Message, gc=True):
    """A request or survey with `defer`, for handlers that reply later.

    Annotate the parameter with it to receive one.
    """

    context: Any = None

    def defer(self) -> Deferred:
        """Return a `Deferred` to reply with later. The return value of the handler is then ignored.

        Until you reply, the request counts toward the member's `concurrency`. A Deferred that is garbage-collected
        without a reply answers with an error.

        Raises:
            ConfigError: this is a push, or was deferred before.
        """
        if self.context is None:
            raise ConfigError(
                "only requests and surveys can be deferred; this message has no reply"
            )
        deferred: Deferred = self.context()
        return deferred


class Deferred:
    """A pending reply. Call `reply` or `fail`; only the first call counts."""

    __slots__ = ("_finish", "_loop", "done")

    def __init__(
        self,
        finish: Callable[[object, str | Refusal | None], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._finish = finish
        self._loop = loop
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
        if not self.done:
            self.done = True
            # The garbage collector may run in any thread, at any point of any code.
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no reply can be sent
                self._loop.call_soon_threadsafe(
                    self._finish, None, "the handler discarded its deferred reply without answering"
                )


class Handler:
    """A user's function, and the type that its parameter is annotated with."""

    __slots__ = ("function", "is_coroutine", "wanted")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_coroutine = inspect.iscoroutinefunction(_code(function))
        self.wanted = _annotation(function)

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        """Return the argument for the function. Raises DecodeError if the payload does not fit its annotation."""
        return self.convert(delivery.message, defer)

    def as_callback(self) -> Callable[[Message], object]:
        """Return a handler that takes a Message and calls the function with the converted argument."""
        if self.is_coroutine:

            async def run(message: Message) -> object:
                return await self.function(self.convert(message))

            return functools.update_wrapper(run, self.function)
        return functools.update_wrapper(
            lambda message: self.function(self.convert(message)), self.function
        )

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        """Convert a message to the annotated type of the function's parameter. Raises DecodeError."""
        if self.wanted is Message:
            return message
        if self.wanted is Request:
            whole = message.payload, message.name, message.headers, message.packed, message.source
            return Request(*whole, defer)
        return decode_payload(message.payload, message.packed, self.wanted)


def encode_reply(value: object) -> tuple[bytes, Headers | None, bool]:
    """Return (payload, headers, packed) of what a handler returned; None is an empty reply."""
    headers: Headers | None = None
    if isinstance(value, Reply):
        headers = check_headers(value.headers) if value.headers else None
        value = value.value
    if value is None:
        return b"", headers, False
    payload, packed = encode_payload(value)
    return payload, headers, packed


def stopping() -> bool:
    """Return whether this task is being cancelled. If not, a CancelledError came from the handler itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a partial or an object with `__call__`: it has the annotations and the `async`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _annotation(function: Callable[..., Any]) -> Any:
    """Return the annotation of the function's only parameter; None if there is none, or if it is Any."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None  # a builtin without a signature is called with the decoded payload
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1 or not parameters:
        raise ConfigError(
            f"handler {getattr(function, '__name__', function)!r} must take exactly one argument, the message"
        )
    try:
        hints = typing.get_type_hints(_code(function))
    except Exception as err:  # whatever the user's annotations raise when they are evaluated
        raise ConfigError(
            f"cannot evaluate the annotation of handler {getattr(function, '__name__', function)!r}: {err}"
        ) from err
    wanted = hints.get(parameters[0].name)
    return None if wanted is Any else wanted
