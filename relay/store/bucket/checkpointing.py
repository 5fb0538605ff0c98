"""Keeps a bucket from growing: writes again what a journal holds, then deletes what that covers.

The whole of each stream goes into the journal as if it were written again, in parts, between the writes that come
meanwhile. Since writes are absolute, a reader who knows nothing of it reads the same streams. When everything is in the
bucket, a checkpoint says from which object on all of it can be read. What stands before is deleted, of this journal and
of those that it took, except their fences: a store that wakes up must find its journal ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from relay.store.bucket.objects import BucketError, Objects, at_once
from relay.store.bucket.sealing import (
    Checkpoint,
    Covered,
    Rows,
    Sealer,
    checkpoint_key,
    journal_key,
)
from relay.store.bucket.writer import Writer
from relay.store.database import OP_BYTES, Op

BACKLOG_BYTES: Final = 8 << 20
"""Bytes that may wait for the bucket while a checkpoint is written: others must have room."""
PAUSE_S: Final = 0.02
DELETES: Final = 8
"""Objects that are deleted at once."""


async def write_all(writer: Writer, parts: Mapping[bytes, Iterator[list[Op]]], now_us: int) -> int:
    """Write whole streams (uuid -> parts) to a journal once more; return the number of the first object of it.

    Returns when everything is known to be in the bucket, or the journal has ended. Raises LogDamaged.
    """
    first = writer.watch()
    for uuid, each in parts.items():
        for ops in each:
            size = sum(len(op.key) + len(op.value) + OP_BYTES for op in ops)
            writer.add(Rows(uuid, ops), size, now_us)
            while writer.backlog > BACKLOG_BYTES and not writer.ended:  # noqa: ASYNC110 - the bucket takes its time
                await asyncio.sleep(PAUSE_S)
    writer.close_object()
    last = writer.number - 1
    while writer.known < last and not writer.ended:  # noqa: ASYNC110 - the same
        await asyncio.sleep(PAUSE_S)
    return first


async def note(
    objects: Objects, sealer: Sealer, journal: str, number: int, before: bytes, count: int, covers: list[Covered]
) -> None:  # fmt: skip
    """Create checkpoint `count` of a journal. Raises BucketError, after which it may be repeated."""
    key = checkpoint_key(journal, count)
    sealed = sealer.seal(key, Checkpoint(number, before, covers))
    if not await objects.create(key, sealed):
        there = await objects.get(key)
        if there is None or sealer.open(key, there) != Checkpoint(number, before, covers):
            raise BucketError(
                f"bucket {objects.url}: {key} exists, but is not what this store wrote"
            )


async def remaining(objects: Objects, covers: list[Covered]) -> list[Covered]:
    """Return the ranges of `covers` that were not deleted completely. Raises BucketError."""
    return [
        each
        for each in covers
        # Of each range the last object is deleted last.
        if each.end > each.first and await objects.exists(journal_key(each.journal, each.end - 1))
    ]


async def delete(objects: Objects, covers: list[Covered]) -> None:
    """Delete what a checkpoint covers, from the first object on. Raises BucketError, after which it may be repeated."""
    for each in await remaining(objects, covers):
        for at in range(each.first, each.end, DELETES):
            numbers = range(at, min(at + DELETES, each.end))
            await at_once(
                objects.delete(journal_key(each.journal, number)) for number in numbers[:-1]
            )
            await objects.delete(journal_key(each.journal, numbers[-1]))
