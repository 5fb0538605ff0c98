"""Creates the objects of this store's journals in the bucket, and repeats each request until it succeeds.

A create that is refused is read back: the object may be there from an earlier try. If another one is there, somebody
has ended the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Final

from iris.core.backoff import Backoff
from iris.errors import IrisError
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.pace import Pace
from relay.store.bucket.sealing import journal_key
from relay.store.bucket.whole import holds
from relay.store.bucket.writer import Flying, Writer

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 5.0
AGAIN_MAX_S: Final = 600.0
"""Longest pause until a store that lost its journal begins another one. Two stores with the same `store.key` take each
other's journals, and each leaves objects in the bucket."""
TICK_S: Final = 0.01
CHECK_US: Final = 5_000_000
"""Pause between two checks whether a journal to which nothing is written is still ours."""


class Lost(IrisError):
    """Another store has ended a journal of this one."""


class Puts:
    """The objects of this store that are on their way."""

    def __init__(
        self, objects: Objects, now_us: Callable[[], int], warn: Callable[[Exception], None],
        landed: Callable[[Writer, Flying], None], lost: Callable[[Lost], None],
    ) -> None:  # fmt: skip
        """`landed` is called after an object has reached the bucket, `lost` when another store has ended a journal that
        is written. That is noticed after `CHECK_US` at the latest, also if nothing is written.
        """
        self._objects = objects
        self._now_us = now_us
        self._warn = warn
        self._landed = landed
        self._lost = lost
        self._checks = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, writer: Writer) -> None:
        """Create the objects of a journal as they are due, until it has ended."""
        self._start(writer, writer.flying)
        checked_us, checks = self._now_us(), self._checks
        pace = Pace(writer, self._now_us)
        while not writer.ended:
            self._start(writer)
            await pace.wait(checked_us + CHECK_US)
            if not writer.idle:
                checked_us = self._now_us()
            elif checks != self._checks or self._now_us() >= checked_us + CHECK_US:
                checks, checked_us = self._checks, self._now_us()
                await self._check(writer)

    def check(self, writers: Sequence[Writer]) -> None:
        """Check soon whether these journals are still ours."""
        self._checks += 1
        for writer in writers:
            writer.on_change()

    async def land_all(self, writer: Writer) -> None:
        """Bring everything to the bucket. Raises BucketError, or Lost, which ends the journal."""
        while not writer.idle:  # after tries that failed, more wait than may fly at once
            writer.take_off(self._now_us())
            for flying in writer.flying:
                try:
                    await self._create(writer, flying)
                except Lost as err:
                    writer.end(str(err))
                    raise

    async def drain(self, writers: Sequence[Writer], seconds: float) -> None:
        """Bring everything that was written to the bucket, or what can be brought there in that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                again = not self._tasks
                while any(not writer.idle and not writer.ended for writer in writers):
                    for writer in writers:
                        writer.close_object()
                        self._start(writer, writer.flying if again else ())
                    again = False
                    await asyncio.sleep(TICK_S)
        await self.cancel()

    async def cancel(self) -> None:
        """Create nothing more. Whoever writes a journal again begins with what was on its way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def _start(self, writer: Writer, again: Sequence[Flying] = ()) -> None:
        """Start to create what is due, and `again` what an earlier task left."""
        for flying in (*again, *writer.take_off(self._now_us())):
            put = self._put(writer, flying)
            task = asyncio.get_running_loop().create_task(put, name="iris-put")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _put(self, writer: Writer, flying: Flying) -> None:
        """Create one object, as often as it takes."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        while not writer.ended:
            try:
                await self._create(writer, flying)
            except BucketError as err:
                writer.failing = str(err)
                self._warn(err)
                await asyncio.sleep(backoff.failed())
            except Lost as err:
                self._end(writer, err)
            else:
                writer.failing = ""
                return

    async def _create(self, writer: Writer, flying: Flying) -> None:
        """Create an object, or see that it is there from an earlier try. Raises BucketError or Lost."""
        if not await self._objects.create(flying.key, flying.sealed):
            there = await holds(self._objects, flying.key, flying.sealed)
            if there is None:
                raise BucketError(
                    f"bucket {self._objects.url}: {flying.key} exists, but cannot be read"
                )
            if not there:
                raise self._ended(writer)
        writer.landed(flying)
        self._landed(writer, flying)

    async def _check(self, writer: Writer) -> None:
        """Check whether somebody has ended a journal to which nothing is written now."""
        try:
            taken = await self._objects.exists(journal_key(writer.journal, writer.number))
        except BucketError as err:
            writer.failing = str(err)
            self._warn(err)
            return
        writer.failing = ""
        if taken and writer.idle:
            self._end(writer, self._ended(writer))

    def _ended(self, writer: Writer) -> Lost:
        return Lost(
            f"another store of the bucket has taken over this store's journal {writer.journal}"
        )

    def _end(self, writer: Writer, err: Lost) -> None:
        self._lost(err)
        writer.end(str(err))
