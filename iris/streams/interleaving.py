"""Takes batches of several partitions as they arrive, and goes on with the others while one is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from iris.errors import RequestError, StreamError
from iris.logs import logger

log = logger(__name__)

LAYOUT_S: Final = 10.0
"""Seconds after which a client that appends, reads or consumes looks for partitions that were added."""
RETRY_S: Final = 5.0
"""Seconds after which a partition that was away is tried again."""
T = TypeVar("T")


class Interleaved(Generic[T]):
    """One task for each partition, and which of them has something.

    Each task gets one batch, and the next one is asked for when that batch has been taken. Use it from one task.
    """

    def __init__(
        self, name: str, count: int, fetch: Callable[[int], Awaitable[T]], *, passing: Callable[[Exception], bool],
        look: Callable[[], Awaitable[int]] | None = None,
    ) -> None:  # fmt: skip
        """`fetch` waits for the next batch of a partition, and raises StopAsyncIteration at its end. `passing` says
        whether the others go on when it raises an error; other errors are raised. `look` returns the number of
        partitions, which may have grown.
        """
        self.missing: dict[int, Exception] = {}
        """Partitions that are away -> why."""
        self.count = count
        self._name = name
        self._fetch = fetch
        self._passing = passing
        self._look = look
        self._look_task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._look_s = self._loop.time() + LAYOUT_S
        self._tasks: dict[int, asyncio.Task[T]] = {}
        self._last = -1
        """The partition whose batch was taken last; the next one comes first, so that none is left behind."""
        for partition in range(count):
            self._start(partition, 0.0)

    def ready(self, partition: int) -> T | None:
        """Return the batch of a partition that waits to be taken, if there is one."""
        task = self._tasks.get(partition)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def next(self) -> tuple[int, T]:
        """Return the next batch and its partition. Call `resume` to ask for the batch after it.

        Raises:
            StopAsyncIteration: every partition has ended, or is away and is not tried again.
            StreamError: an error that is not `passing`.
        """
        while self._tasks:
            self._keep_looking()
            count = max(self._tasks) + 1
            for partition in sorted(self._tasks, key=lambda one: (one - self._last - 1) % count):
                task = self._tasks[partition]
                if not task.done():
                    continue
                del self._tasks[partition]
                if task.cancelled():
                    continue
                try:
                    batch = task.result()
                except StopAsyncIteration:
                    self.missing.pop(partition, None)
                    continue
                except (StreamError, RequestError) as err:
                    if not self._passing(err):
                        self._start(partition, RETRY_S)
                        raise
                    self._note_missing(partition, err)
                    self._start(partition, RETRY_S)
                    continue
                if self.missing.pop(partition, None) is not None:
                    fields = {"stream": self._name, "partition": partition}
                    log.info("stream.partition_back", extra={"fields": fields})
                self._last = partition
                return partition, batch
            if self._tasks and len(self.missing) == len(self._tasks):
                raise next(iter(self.missing.values()))
            if not self._tasks:
                break
            waiting: list[asyncio.Task[Any]] = [*self._tasks.values()]
            if self._look_task is not None:
                waiting.append(self._look_task)
            wait_s = LAYOUT_S if self._look is not None else None
            await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        raise StopAsyncIteration

    def resume(self, partition: int) -> None:
        """Ask for the next batch of a partition whose last one was taken."""
        if partition not in self._tasks:
            self._start(partition, 0.0)

    def stop(self) -> None:
        """End: `next` raises StopAsyncIteration."""
        self._look = None
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Stop all tasks."""
        tasks: list[asyncio.Task[Any]] = [*self._tasks.values()]
        if self._look_task is not None:
            tasks.append(self._look_task)
        self._tasks = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep_looking(self) -> None:
        """Look from time to time, in the background, whether partitions were added."""
        if self._look_task is not None and self._look_task.done():
            self._look_task = None
        if self._look is None or self._look_task is not None or self._loop.time() < self._look_s:
            return
        self._look_s = self._loop.time() + LAYOUT_S
        self._look_task = self._loop.create_task(self._grow(self._look), name="iris-partitions")

    async def _grow(self, look: Callable[[], Awaitable[int]]) -> None:
        try:
            count = await look()
        except (StreamError, RequestError):
            return  # partition 0 is away; its own task reports that
        for partition in range(self.count, count):
            self._start(partition, 0.0)
        self.count = max(self.count, count)

    def _start(self, partition: int, pause_s: float) -> None:
        async def work() -> T:
            if pause_s:
                await asyncio.sleep(pause_s)
            return await self._fetch(partition)

        task = self._loop.create_task(work(), name="iris-partition")
        task.add_done_callback(_retrieve_error)
        self._tasks[partition] = task

    def _note_missing(self, partition: int, err: Exception) -> None:
        if partition not in self.missing:
            fields = {"stream": self._name, "partition": partition, "error": str(err)}
            log.warning("stream.partition_away", extra={"fields": fields})
        self.missing[partition] = err


def _retrieve_error(task: asyncio.Task[T]) -> None:
    if not task.cancelled():
        task.exception()
