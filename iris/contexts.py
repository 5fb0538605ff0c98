"""Contexts: each message that a handler receives has context variables of its own.

They begin with the values that they had when the service was served, after its lifespan has started, or when the
subscription was made. What a handler sets is seen by what it calls and starts, and by no other message.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar

from iris.awaiting import drop, finished, is_late
from iris.nested import IN_HANDLER

T = TypeVar("T")


class Contexts:
    """Makes the contexts of the messages of one service or subscription: copies of the one in which this was made.

    A plain function runs in a context from `fresh`, which is used again only while it equals the `first`. Coroutine
    functions run one after the other in the task of a worker. Its context serves for all of them while they set
    nothing, which costs a message almost nothing. Once one of them has set a variable (`changed`), each runs `inside` a
    context of its own.
    """

    __slots__ = ("_nested", "_worker", "first", "fresh", "sets")

    def __init__(self, *, nested: bool = False) -> None:
        """Begin with the current context. `nested`: what coroutine functions call are calls of handlers."""
        context = copy_context()
        self.first: Final = context
        """The context in which this was made. Nothing runs in it."""
        self.fresh: Final[Callable[[], Context]] = context.copy
        """Returns a new context."""
        self._worker = context.copy()
        self._nested = nested
        if nested:
            self._worker.run(IN_HANDLER.set, asyncio.get_running_loop())
        self.sets = False
        """Whether coroutine functions set variables. Set it to what `changed` returns after each."""

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start the task of a worker."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=name, context=self._worker.copy())

    def changed(self) -> bool:
        """Return whether a variable was set in the task of a worker, which should then end when it has nothing to do.

        A variable that was set to an equal value counts as unchanged.
        """
        try:
            return copy_context() != self._worker
        except Exception:  # the values differ, and cannot be compared
            return True

    def inside(self, function: Callable[[Any], Any], argument: Any) -> Awaitable[Any]:
        """Return what awaits `function(argument)`, and what it returns to be awaited, in a new context."""
        return _within(self._worker.copy(), _whole(function, argument))

    def late(self, context: Context, value: Any) -> Late:
        """Return what a plain function that ran in `context` returned to be awaited."""
        if self._nested:
            context.run(IN_HANDLER.set, asyncio.get_running_loop())
        return Late(context, value)


class Late:
    """What a plain function returned to be awaited, and the context in which it ran. Await it once, or drop it."""

    __slots__ = ("_context", "_value")

    def __init__(self, context: Context, value: Any) -> None:
        self._context, self._value = context, value

    def finished(self) -> Awaitable[Any]:
        """Return what awaits the value, in its context, until it is a plain one."""
        return _within(self._context, finished(self._value))

    def drop(self) -> None:
        """Close the value, so that Python does not warn that nobody awaited it."""
        drop(self._value)


async def _whole(function: Callable[[Any], Any], argument: Any) -> Any:
    value = await function(argument)
    return await finished(value) if is_late(value) else value


@types.coroutine
def _within(context: Context, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Await a coroutine in this task, but in another context: make each of its steps there."""
    run = context.run
    try:
        waits_for = run(work.send, None)
        while True:
            try:
                given = yield waits_for
            except BaseException as err:  # the task is cancelled, or this coroutine is closed
                waits_for = run(work.throw, err)
            else:
                waits_for = run(work.send, given)
    except StopIteration as end:
        return end.value
