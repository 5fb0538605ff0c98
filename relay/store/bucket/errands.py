"""Work for streams of a bucket that goes on beside everything else, until it is done or the store stops."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from iris.core.backoff import Backoff
from iris.errors import IrisError

log = logging.getLogger(__name__)

T = TypeVar("T")
ASK_MIN_S: Final = 0.05
ASK_MAX_S: Final = 1.0


class Errands:
    """The tasks of one kind of work. They need a running event loop."""

    def __init__(self, name: str, stream: str, warn: Callable[[Exception], None]) -> None:
        """`name` is that of the tasks; `stream` says in the log what kind of stream an unexpected error concerns."""
        self.stopping = False
        """Whether no errand may begin any more, because nobody would complete it."""
        self._name = name
        self._stream = stream
        self._warn = warn
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin an errand."""
        task = asyncio.get_running_loop().create_task(self._run(work), name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(
        self, ask: Callable[[], Awaitable[T | None]], ended: Callable[[], object]
    ) -> T | None:
        """Ask until there is an answer, whatever fails meanwhile; None if `ended` before."""
        backoff = Backoff(ASK_MIN_S, ASK_MAX_S, random.random)
        while not ended():
            try:
                found = await ask()
            except (IrisError, OSError) as err:
                self._warn(err)
            else:
                if found is not None:
                    return found
            await asyncio.sleep(backoff.failed())
        return None

    async def cancel(self) -> None:
        """End all errands, and begin none."""
        self.stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("store.fault", extra={"fields": {"stream": self._stream}})
