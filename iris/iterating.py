"""What the library's async iterators have in common: `next`, and a cancelled wait takes nothing and ends nothing.

An async generator ends when a wait in it is cancelled. So these are objects whose `__anext__` keeps what it has in the
object, and takes an item only in the step in which it returns it.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable
from typing import Self, TypeVar

from iris import forks
from iris.deadlines import milliseconds
from iris.errors import Closed, RequestTimeout
from iris.one_process import OneProcess

T = TypeVar("T")


class Late(Exception):
    """What was waited for did not come in time."""


async def in_time(waiting: Awaitable[T], timeout: float | None) -> T:
    """Await something for at most `timeout` seconds (None: as long as it takes). Raises Late."""
    if timeout is None:
        return await waiting
    try:
        async with asyncio.timeout(timeout) as limit:
            return await waiting
    except TimeoutError as err:
        if type(err) is not TimeoutError or not limit.expired():  # what is awaited raised it
            raise
    raise Late


def late(name: str, timeout: float) -> RequestTimeout:
    """Return the error of a `next` that got nothing in time from what `name` stands for."""
    error = RequestTimeout(name, f"nothing arrived within {timeout:g} s")
    error.may_have_run = False
    return error


class Items(AsyncIterator[T]):
    """What arrives one after another: iterate over it with `async for`, or take one item at a time with `next`."""

    __slots__ = ()

    @property
    @abstractmethod
    def _of(self) -> str:
        """The topics, stream, cluster or other name that the items belong to."""

    async def next(self, *, timeout: float | None = None) -> T:
        """Return the next item, as `anext` does. Raises StopAsyncIteration at the end.

        Raises RequestTimeout if nothing arrives within `timeout` seconds. That takes and ends nothing: what arrives
        later is returned by the next call.
        """
        if timeout is None:
            return await anext(self)
        milliseconds(timeout)
        with contextlib.suppress(Late):
            return await in_time(anext(self), timeout)
        raise late(self._of, timeout)


class Iteration(OneProcess, Items[T]):
    """An iterator that holds something until it ends: at its end, by an error, by `aclose`, or if nobody refers to it.

    `__anext__` is for the subclass. It calls `_begun` before it holds anything and after each wait, and `_end` before
    it raises anything but a cancellation.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    """The loop in which it began."""
    _generation = 0
    """How often the process had been forked when it began."""
    _over = False

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """End the iteration. Idempotent."""
        self._end()

    def _begun(self) -> None:
        """Note that something is held from now on.

        Raises StopAsyncIteration if the iteration has ended, and Closed in the child of a fork if it began before.
        """
        if self._over:
            raise StopAsyncIteration
        if self._loop is None:
            self._loop, self._generation = asyncio.get_running_loop(), forks.generation
        elif self._generation != forks.generation:
            raise Closed(f"this iteration {forks.FORKED}")

    def _end(self) -> None:
        """Release what is held."""
        if not self._over:
            self._over = True
            if self._generation == forks.generation:  # else it is held by the parent
                self._release()

    def _release(self) -> None:
        """Release what is held; for the subclass. Called once, in the loop."""

    def __del__(self) -> None:
        if not self._over and self._loop is not None and self._generation == forks.generation:
            # The garbage collector may run in any thread, at any point of any code.
            with contextlib.suppress(RuntimeError):  # the loop is closed, and everything with it
                self._loop.call_soon_threadsafe(self._end)


class Waiters:
    """Tasks that wait for a change. All of them are woken, so none is missed if one is cancelled meanwhile."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        """Return what is done at the next change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [one for one in self._waiting if not one.done()]  # others may be cancelled
        self._waiting.append(waiter)
        return waiter

    def wake(self) -> None:
        """Wake all that wait."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
