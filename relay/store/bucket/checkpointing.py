"""Keeps a bucket from growing: writes again what a journal holds, then deletes what that covers.

The whole of each stream goes into the journal as if it were written again, in parts, between the writes that come
meanwhile. Since writes are absolute, a reader who knows nothing of it reads the same streams. When everything is in the
bucket, a checkpoint says from which object on all of it can be read. What stands before is deleted, of this journal and
of those that it took, except their fences: a store that wakes up must find its journal ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from iris.core.backoff import Backoff
from iris.errors import IrisError
from relay.store.batches import OP_BYTES, Op
from relay.store.bucket.objects import BucketError, Objects, at_once, each_of, patient
from relay.store.bucket.replica import Place
from relay.store.bucket.sealing import (
    Checkpoint,
    Covered,
    Rows,
    Sealer,
    checkpoint_key,
    journal_key,
)
from relay.store.bucket.whole import fetch
from relay.store.bucket.writer import Writer
from relay.store.log import Log

log = logging.getLogger(__name__)

OBJECT_BYTES: Final = 64 << 10
"""Assumed size of an object of a journal that was taken."""
MAX_COVERS: Final = 64
"""A checkpoint is also written when a journal has taken more journals than this: each is read at the next takeover."""
COMPACT_S: Final = 1.0
RETRY_MAX_S: Final = 60.0
BACKLOG_BYTES: Final = 8 << 20
"""Bytes that may wait for the bucket while a checkpoint is written: others must have room."""
PAUSE_S: Final = 0.02
DELETES: Final = 8
"""Objects that are deleted at once."""
NOT_DELETED: Final = "an object that is not needed any more cannot be deleted"


class Checkpoints:
    """The checkpoints of one journal of this store."""

    def __init__(
        self, objects: Objects, sealer: Sealer, writer: Writer, covers: list[Covered], most_bytes: int,
        logs: Callable[[], dict[bytes, Log]], now_us: Callable[[], int], warn: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """`covers`: what the first checkpoint covers of the journals that were taken. `logs` returns the journal's
        logs, uuid -> log, and raises LogError if one is not open."""
        self._objects = objects
        self._sealer = sealer
        self._writer = writer
        self._covers = covers
        self._most_bytes = most_bytes
        self._logs = logs
        self._now_us = now_us
        self._warn = warn
        self.paused: Callable[[], bool] = lambda: False
        """Whether the journal must keep what it has, because another one needs it."""
        self._count = 0
        self._first = 1
        """The first object of the last checkpoint."""
        self._since = 0
        """Bytes that were in the journal when the last checkpoint began."""
        self._size = 0
        """Bytes of the last checkpoint. Indexes and consumers are in it, too, so it can be larger than the logs."""
        self._deleting: list[Covered] = []
        """What the last checkpoint covers and may still be there."""
        self._deletes = Backoff(COMPACT_S, RETRY_MAX_S, random.random)
        self._delete_us = 0
        """Nothing is deleted before."""

    async def run(self) -> None:
        """Write a checkpoint whenever the journal has far more than its streams. Runs until cancelled."""
        backoff = Backoff(COMPACT_S, RETRY_MAX_S, random.random)
        pause_s = COMPACT_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._delete()
                logs = self._logs()
                if not self.paused() and self._is_due(
                    sum(each.local_bytes for each in logs.values())
                ):
                    await self._write(logs)
            except IrisError as err:  # also a log that was closed or deleted meanwhile
                self._warn(err)
                pause_s = backoff.failed()
            except Exception:
                log.exception("store.fault", extra={"fields": {"stream": self._writer.journal}})
                pause_s = backoff.failed()
            else:
                backoff.succeeded()
                pause_s = COMPACT_S

    def _is_due(self, live: int) -> bool:
        taken = sum(each.end - each.first for each in self._covers)
        there = self._writer.written - self._since + taken * OBJECT_BYTES
        return (
            there > max(self._most_bytes, 3 * max(live, self._size))
            or len(self._covers) > MAX_COVERS
        )

    async def _write(self, logs: dict[bytes, Log]) -> None:
        """Write the journal's streams once more, and delete what that covers.

        Raises BucketError, LogError, ObjectDamaged.
        """
        writer, written = self._writer, self._writer.written
        # Nothing is awaited before: a stream that was created meanwhile would be in no part and before `first`.
        parts = {uuid: each.copied() for uuid, each in logs.items()}
        first = await write_all(writer, parts, self._now_us())
        self._logs()  # raises if a log was closed meanwhile: then its parts do not fit together
        there = await remaining(self._objects, [*self._deleting, *self._covers])
        covers = [each for each in there if each.journal != writer.journal]
        ours = [each.first for each in there if each.journal == writer.journal]
        covers.append(Covered(writer.journal, min([*ours, self._first]), first))
        backoff = Backoff(COMPACT_S, RETRY_MAX_S, random.random)
        while not writer.ended:
            try:
                await note(
                    self._objects, self._sealer, writer.journal, first, writer.before_watched, self._count + 1, covers
                )  # fmt: skip
            except BucketError as err:
                # It may be there, or arrive later. Another one under this number would never be taken.
                self._warn(err)
                await asyncio.sleep(backoff.failed())
            else:
                break
        if writer.ended:
            return
        self._count, self._first, self._since = self._count + 1, first, written
        self._size = writer.written - written
        self._covers, self._deleting, self._delete_us = [], covers, 0
        for uuid, each in self._logs().items():
            if uuid in logs:
                each.note_copied(Place(writer.journal, writer.number).pack())
        await self._delete()
        fields = {"journal": writer.journal, "object": first, "bytes": self._size}
        log.info("store.checkpoint", extra={"fields": fields})

    async def _delete(self) -> None:
        """Delete what the last checkpoint covers. A bucket that refuses it, for example because it keeps objects for a
        month, is not in the way of the next checkpoint.
        """
        if not self._deleting or self._now_us() < self._delete_us:
            return
        try:
            await delete(self._objects, self._deleting)
        except BucketError as err:
            self._warn(BucketError(f"{NOT_DELETED}: {err}"))
            self._delete_us = self._now_us() + int(self._deletes.failed() * 1e6)
        else:
            self._deletes.succeeded()
            self._deleting = []


async def write_all(writer: Writer, parts: Mapping[bytes, Iterator[list[Op]]], now_us: int) -> int:
    """Write whole streams (uuid -> parts) to a journal once more; return the number of the first object of it.

    Returns when everything is known to be in the bucket, or the journal has ended. Raises LogDamaged.
    """
    first = writer.watch()
    await write_parts(writer, parts, lambda: now_us)
    return first


async def write_parts(
    writer: Writer, parts: Mapping[bytes, Iterator[list[Op]]], now_us: Callable[[], int]
) -> None:
    """Write streams (uuid -> parts) to a journal. Returns as `write_all`. Raises LogDamaged."""
    for uuid, each in parts.items():
        for ops in each:
            size = sum(len(op.key) + len(op.value) + OP_BYTES for op in ops)
            writer.add(Rows(uuid, ops), size, now_us())
            while writer.backlog > BACKLOG_BYTES and not writer.ended:  # noqa: ASYNC110 - the bucket takes its time
                await asyncio.sleep(PAUSE_S)
    writer.close_object()
    last = writer.number - 1
    while writer.known < last and not writer.ended:  # noqa: ASYNC110 - the same
        await asyncio.sleep(PAUSE_S)


async def note(
    objects: Objects, sealer: Sealer, journal: str, number: int, before: bytes, count: int, covers: list[Covered]
) -> None:  # fmt: skip
    """Create checkpoint `count` of a journal. Raises BucketError, after which it may be repeated."""
    key = checkpoint_key(journal, count)
    sealed = sealer.seal(key, Checkpoint(number, before, covers))
    if not await objects.create(key, sealed):
        there = await fetch(objects, sealer, key)
        if there is None or sealer.open(key, there) != Checkpoint(number, before, covers):
            raise BucketError(
                f"bucket {objects.url}: {key} exists, but is not what this store wrote"
            )


async def remaining(objects: Objects, covers: list[Covered]) -> list[Covered]:
    """Return the ranges of `covers` that were not deleted completely. Raises BucketError."""

    async def is_there(each: Covered) -> bool:
        # Of each range the last object is deleted last.
        return each.end > each.first and await objects.exists(
            journal_key(each.journal, each.end - 1)
        )

    there = await each_of(covers, is_there)
    return [each for each, found in zip(covers, there, strict=True) if found]


async def delete(objects: Objects, covers: list[Covered]) -> None:
    """Delete what a checkpoint covers. Raises BucketError, after which it may be repeated.

    The first object of each range is deleted before all others. Without it the journal is read as empty. Else somebody
    who finds a hole further on, before the fence, could end the journal there and hold what it held then.
    """
    objects = patient(objects)
    for each in await remaining(objects, covers):
        first, *rest = [journal_key(each.journal, one) for one in range(each.first, each.end)]
        await objects.delete(first)
        for at in range(0, len(rest) - 1, DELETES):
            await at_once(objects.delete(key) for key in rest[:-1][at : at + DELETES])
        if rest:
            await objects.delete(rest[-1])
