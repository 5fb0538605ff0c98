"""Handlers that run in threads: plain functions that block, each with a pool of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from iris.core.interfaces import Delivery
from iris.deadlines import carried
from iris.errors import ConfigError
from iris.handlers import Deferred, Expired, Handler, Request
from iris.parameters import Parameter, Provided


class ThreadHandler(Handler):
    """A plain function that is to run in `threads` threads."""

    __slots__ = ("threads",)

    def __init__(self, function: Callable[..., Any], threads: int) -> None:
        super().__init__(function)
        if self.is_coroutine:
            raise ConfigError(
                f"handler {self.name!r} is a coroutine function, so it cannot have threads={threads}; "
                f"define it with `def`, or leave threads out"
            )
        if threads < 1:
            raise ConfigError(f"threads of handler {self.name!r} must be at least 1, not {threads}")
        self.threads = threads

    @property
    def in_loop(self) -> list[Callable[..., Any]]:
        return []

    def filled(self, provided: Provided, *, has_message: bool = True) -> Handler:
        """Return the handler with its pool, which ends with `provided`."""
        for parameter in self.parameters:
            if provided.find(parameter.type) is provided.client:
                raise ConfigError(
                    f"handler {self.name!r} runs in threads, and a client must be used in its event loop; use a "
                    f"coroutine function, or an iris.blocking client of your own"
                )
        plain = super().filled(provided, has_message=has_message)
        pooled = _Pooled(plain, self.threads)
        provided.on_close.append(pooled.close)
        return pooled


class _Timed:
    """The argument of a call with a deadline."""

    __slots__ = ("argument", "deadline_us")

    def __init__(self, argument: Any, deadline_us: int) -> None:
        self.argument = argument
        self.deadline_us = deadline_us


class _Pooled(Handler):
    """A handler whose function runs in its pool. For the service it is a coroutine function.

    A thread cannot be stopped. If its call is cancelled, it goes on, and counts as busy until it has ended.
    """

    __slots__ = ("_free", "_loop", "_plain", "_pool")

    def __init__(self, plain: Handler, threads: int) -> None:
        """Create the pool, which starts a thread when it is needed. `plain` takes one argument."""

        @functools.wraps(plain.function)  # for the log, which names it
        async def run(argument: Any) -> Any:
            return await self._run(argument)

        parameters = [Parameter("message", plain.wanted)]
        super().__init__(run, parameters, name=plain.name, is_coroutine=True)
        self.kind_name = plain.kind_name
        self._plain = plain.function
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"iris-{plain.name}")
        self._free = asyncio.Semaphore(threads)
        self._loop = asyncio.get_running_loop()

    def argument(self, delivery: Delivery, defer: Callable[[], Deferred]) -> Any:
        argument = super().argument(delivery, _cannot_defer)
        if isinstance(argument, Request):
            argument.context = _cannot_defer  # middleware may have made the request
        return _Timed(argument, delivery.deadline_us)

    async def _run(self, argument: Any) -> Any:
        """Wait for a free thread and run the function there. Raises Expired if the deadline has passed by then."""
        await self._free.acquire()
        try:
            if isinstance(argument, _Timed):
                if argument.deadline_us and argument.deadline_us < time.monotonic_ns() // 1000:
                    raise Expired
                argument = argument.argument
            context = contextvars.copy_context()
            running = self._pool.submit(context.run, carried(self._plain), argument)
        except BaseException:
            self._free.release()
            raise
        running.add_done_callback(self._ended)
        return await asyncio.wrap_future(running)

    def _ended(self, _: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for a thread
            self._loop.call_soon_threadsafe(self._free.release)

    def close(self) -> None:
        """Start no further call, and end each thread when it has finished its own. Does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _cannot_defer() -> NoReturn:
    raise ConfigError("a handler that runs in threads cannot defer; return the reply")
