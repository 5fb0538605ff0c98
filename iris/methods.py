"""Methods: several handlers of one service for one kind of message, of which each call names one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from iris.awaiting import finished, is_late
from iris.core.faults import NoMethod
from iris.core.interfaces import Delivery
from iris.core.message import Message
from iris.errors import ConfigError, InvalidName
from iris.handlers import Deferred, Handler, Request
from iris.parameters import Parameter, Provided
from iris.tally import Tally
from iris.wire.kinds import Kind
from iris.wire.names import RESERVED_METHODS, check_method

_SHOWN = 20
"""Methods that the error of a call without its method lists."""


class Methods(Handler):
    """The handlers of one kind of message as one handler, which runs the one that the message names.

    The handler of messages that name no method has the name "".
    """

    __slots__ = ("handlers", "kind", "service", "tallies")

    def __init__(self, service: str, kind: Kind, handlers: dict[str, Handler]) -> None:
        self.service = service
        self.kind = kind
        self.handlers = handlers
        self.tallies = {method: Tally() for method in handlers}
        """Method -> counts and times of its handler."""
        self.is_coroutine = any(handler.is_coroutine for handler in handlers.values())
        takes_request = any(handler.wanted is Request for handler in handlers.values())
        run: Callable[..., Any] = _await if self.is_coroutine else _call
        super().__init__(
            run,
            [Parameter("message", Request if takes_request else Message)],
            name=kind.name.lower(),
            is_coroutine=self.is_coroutine,
        )
        self.cancels = any(handler.cancels for handler in handlers.values())

    @property
    def in_loop(self) -> list[Callable[..., Any]]:
        return [function for handler in self.handlers.values() for function in handler.in_loop]

    def with_method(self, method: str, handler: Handler) -> Methods:
        """Return these handlers and one more. Raises ConfigError if there is one of this name."""
        if method in self.handlers:
            what = f"the method {method!r}" if method else "requests without a method"
            raise ConfigError(
                f"service {self.service} already has a handler for {what} ({self.kind.name.lower()}); it can have only one"
            )
        return Methods(self.service, self.kind, {**self.handlers, method: handler})

    def resolved(self, provided: Provided, *, has_message: bool = True) -> Methods:
        """Return these handlers, each resolved."""
        handlers = {
            method: handler.resolved(provided, has_message=has_message)
            for method, handler in self.handlers.items()
        }
        return Methods(self.service, self.kind, handlers)

    def awaiting(self) -> Methods:
        """Run as a coroutine function from now on, because one of the functions returned an awaitable."""
        self.is_coroutine, self.function = True, _await
        return self

    def chosen(self, message: Message) -> Handler:
        """Return the handler of the method that a message names; all of them if there is none."""
        return self.handlers.get(message.method, self)

    def _handler(self, message: Message) -> tuple[Handler, Tally]:
        method = message.method
        handler = self.handlers.get(method)
        if handler is None:
            raise no_method(self.service, self.kind, method, self.handlers)
        return handler, self.tallies[method]

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        """Return the handler of the method, its counts, and its argument. Raises NoMethod or ArgumentError."""
        handler, tally = self._handler(delivery.message)
        return handler, tally, handler.argument(delivery, defer)

    def convert(self, message: Message, defer: Callable[[], Deferred] | None = None) -> Any:
        """Return the handler of the method, its counts, and its argument. Raises NoMethod or ArgumentError."""
        handler, tally = self._handler(message)
        return handler, tally, handler.convert(message, defer)


def check_served(method: str) -> str:
    """Return the name of a method that a service may have. Raises InvalidName."""
    if check_method(method).startswith(RESERVED_METHODS):
        raise InvalidName(
            f"{method!r} is reserved: methods beginning with {RESERVED_METHODS!r} are answered by the library; "
            "choose another name"
        )
    return method


def no_method(service: str, kind: int, method: str, handlers: dict[str, Handler]) -> NoMethod:
    """Return the answer to a call of a method that a member does not have."""
    plural = f"{Kind(kind).name.lower()}s" if kind != Kind.PUSH else "pushes"
    names = sorted(name for name in handlers if name)
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    if not method:
        return NoMethod(f"{plural} to {service} must name a method: {shown}")
    there = f"its methods are {shown}" if names else "it has no methods"
    return NoMethod(f"this member of {service} has no method {method!r} for {plural}; {there}")


def _call(call: tuple[Handler, Tally, Any]) -> Any:
    handler, tally, argument = call
    started_ns = time.monotonic_ns()
    value = handler.function(argument)
    if value is not None and type(value) is not bytes and is_late(value):
        return _counted(value, tally, started_ns)
    tally.returned(started_ns)
    return value


async def _counted(value: Any, tally: Tally, started_ns: int) -> Any:
    """Await what a function returned, and count the call."""
    value = await finished(value)
    tally.returned(started_ns)
    return value


async def _await(call: tuple[Handler, Tally, Any]) -> Any:
    handler, tally, argument = call
    started_ns = time.monotonic_ns()
    value = handler.function(argument)
    if handler.is_coroutine:
        value = await value
    if value is not None and type(value) is not bytes and is_late(value):
        value = await finished(value)
    tally.returned(started_ns)
    return value
