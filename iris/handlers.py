"""Handlers as users write them: what their annotation asks for, and how their answers travel."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from iris.core.bundle import Headers, check_headers
from iris.core.interfaces import Delivery
from iris.core.message import Message, decode_payload, encode_payload
from iris.errors import ConfigError


class Reply:
    """An answer with headers, for handlers that return one."""

    __slots__ = ("headers", "value")

    def __init__(self, value: object, headers: Headers | None = None) -> None:
        self.value = value
        self.headers = headers


class Request(Message, gc=True):
    """A request or survey as its handler may ask for it: the message, and the right to answer later."""

    context: Any = None

    def defer(self) -> Deferred:
        """Answer later than the handler returns: what it returns is then ignored.

        The member's credit is taken until the deferred reply is given; one that is dropped answers with an error.
        """
        if self.context is None:
            raise ConfigError("this message takes no answer")
        deferred: Deferred = self.context()
        return deferred


class Deferred:
    """A reply that is still owed. Ends by `reply` or `fail`, once."""

    __slots__ = ("_finish", "_loop", "done")

    def __init__(
        self, finish: Callable[[object, str | None], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._finish = finish
        self._loop = loop
        self.done = False

    def reply(self, value: object) -> None:
        """Answer with `value`, as a handler's return would."""
        if not self.done:
            self.done = True
            self._finish(value, None)

    def fail(self, detail: str) -> None:
        """Answer with an error: the caller gets RemoteError(detail)."""
        if not self.done:
            self.done = True
            self._finish(None, detail)

    def __del__(self) -> None:
        if not self.done:
            self.done = True
            # The collector runs in whatever thread allocates, and in the middle of anything.
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(
                    self._finish, None, "the handler gave its deferred reply up"
                )


class Handler:
    """One function and what it takes."""

    __slots__ = ("function", "is_coroutine", "wanted")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_coroutine = inspect.iscoroutinefunction(_code(function))
        self.wanted = _annotation(function)

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        """Return what the function is called with; raises DecodeError when the body does not fit."""
        return self.convert(delivery.message, defer)

    def as_callback(self) -> Callable[[Message], object]:
        """Return a subscription's handler that gives the function what its annotation asks for."""
        if self.is_coroutine:

            async def run(message: Message) -> object:
                return await self.function(self.convert(message))

            return run
        return lambda message: self.function(self.convert(message))

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        """Return a message as the function's parameter asks; raises DecodeError."""
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
    """Whether this task is being cancelled; if not, a CancelledError is the handler's own and ends nothing else."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a partial or an object with `__call__`: it has the annotations, and is async or not."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _annotation(function: Callable[..., Any]) -> Any:
    """Return the annotation of the function's only parameter; None if it has none or Any."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None  # a builtin without a signature takes what comes
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1 or not parameters:
        raise ConfigError(
            f"handler {getattr(function, '__name__', function)!r} takes one argument: the message"
        )
    try:
        hints = typing.get_type_hints(_code(function))
    except Exception as err:  # whatever the user's annotations raise when they are evaluated
        raise ConfigError(
            f"handler {getattr(function, '__name__', function)!r}: its annotation: {err}"
        ) from err
    wanted = hints.get(parameters[0].name)
    return None if wanted is Any else wanted
