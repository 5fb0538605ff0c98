"""Keeps the streams of a bucket within a limit on this disk: moves their oldest records to segment objects, and
deletes the objects that nobody needs any more.

An object is deleted when the write that took it out of its stream is known to be in the bucket. So a store whose
journal has ended can delete nothing that its successor serves: what the successor does not know, the store does not
know to be there either. Before an object is deleted that was only intended, a write says that it is dropped: the disk
of the store that made it may have the row that names it, and that store must find that somebody went on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from iris.core.backoff import Backoff
from iris.errors import IrisError
from relay.logs import Quiet
from relay.store.bucket.checkpointing import NOT_DELETED
from relay.store.bucket.objects import BucketError, Objects, at_once
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Sealer, hash_of, segment_key
from relay.store.bucket.shelf import Left
from relay.store.errors import LogError
from relay.store.log import Log
from relay.store.moved import INTENDED, Chunk, Moved, Rows
from relay.store.records import Hole, decode
from relay.store.segments import SEGMENT_BYTES, Segment

log = logging.getLogger(__name__)

OBJECT_BYTES: Final = 8 << 20
"""Records in an object, about; at most a quarter of the limit."""
CHUNK_BYTES: Final = 256 << 10
"""Records in a chunk, about. A larger record is a chunk by itself."""
LEAST_SEGMENT_BYTES: Final = 64 << 10
LOOK_S: Final = 0.25
PAUSE_S: Final = 0.02
RETRY_MAX_S: Final = 30.0
LATE_S: Final = 60.0
"""An object that was intended and not used is deleted after this time: the request to make it may arrive late."""
AGAIN_S: Final = 60.0
"""A stream whose records could not be moved is tried again after this time."""
FREE_BYTES: Final = 64 << 20
DELETES: Final = 8
"""Objects that are deleted at once."""


class Tiered(Protocol):
    """A stream in a bucket."""

    log: Log | None
    replica: Replica | None

    @property
    def movable(self) -> bool:
        """Whether its records may be moved."""


class _Due:
    """An object that no stream has any more."""

    __slots__ = ("at_s", "number")

    def __init__(self, number: int, at_s: float) -> None:
        self.number = number
        """The object of the journal that says so."""
        self.at_s = at_s
        """It is not deleted before."""


class Tiers:
    """The disk and the segment objects of one store. Call `run` until it is cancelled."""

    def __init__(
        self, objects: Objects, sealer: Sealer, limit_bytes: int, streams: Callable[[], Iterable[Tiered]],
        *, left: list[Left], now_s: Callable[[], float], entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """`limit_bytes`: 0 is none. `streams` returns those that this store serves from the bucket, `left` is
        `Shelf.left`."""
        self._objects = objects
        self._sealer = sealer
        self._limit_bytes = limit_bytes
        self._streams = streams
        self._now_s = now_s
        self._quiet = Quiet()
        self._entropy = entropy
        self._making: set[str] = set()
        self._failed: dict[Log, float] = {}
        """Stream whose records could not be moved -> when to try again."""
        self._left: dict[tuple[Log, str], _Due] = {}
        self._ended = left
        self._deletes = Backoff(LOOK_S, RETRY_MAX_S, random.random)
        self._delete_s = 0.0
        """Nothing is deleted before."""
        self._late_s: dict[int, float] = {}
        """Number of what a deleted stream has left -> when its intended objects are deleted."""

    async def run(self) -> None:
        """Move and delete whenever there is something to do. Runs until cancelled."""
        backoff = Backoff(LOOK_S, RETRY_MAX_S, random.random)
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._delete_if_due()
                pause_s = PAUSE_S if await self.move() else LOOK_S
                backoff.succeeded()
            except IrisError as err:
                self._warn(self._objects.url, err)
                pause_s = backoff.failed()
            except Exception:
                log.exception(
                    "store.fault", extra={"fields": {"stream": f"all of {self._objects.url}"}}
                )
                pause_s = backoff.failed()

    def _warn(self, what: str, err: IrisError) -> None:
        self._quiet.warning(log, "store.not_moved", what, self._now_s(), {"error": str(err)})

    # -- moving ----------------------------------------------------------------------------------------------

    async def move(self) -> bool:
        """Move some records if the streams are over the limit; return whether any were moved.

        A stream whose records cannot be read is left alone for a while, and the others are moved. Raises BucketError.
        """
        if not self._limit_bytes:
            return False
        streams = [one for one in self._streams() if one.log is not None and not one.log.failed]
        segment_bytes = max(
            LEAST_SEGMENT_BYTES, min(SEGMENT_BYTES, self._limit_bytes // (4 * max(1, len(streams))))
        )
        self._failed = {each: at_s for each, at_s in self._failed.items() if at_s > self._now_s()}
        for one in streams:
            assert one.log is not None
            one.log.offloading.size_segments(segment_bytes, min(FREE_BYTES, self._limit_bytes // 2))
        if sum(one.log.local_bytes for one in streams if one.log) <= self._limit_bytes:
            return False
        for one in sorted(streams, key=lambda one: -(one.log.local_bytes if one.log else 0)):
            ours, replica = one.log, one.replica
            if not one.movable or ours is None or replica is None:
                continue
            if self._failed.get(ours, 0.0) > self._now_s():
                continue
            if segments := ours.offloading.oldest(min(OBJECT_BYTES, self._limit_bytes // 4)):
                try:
                    return await self._move(one, ours, replica, segments)
                except LogError as err:
                    self._failed[ours] = self._now_s() + AGAIN_S
                    self._warn(ours.uuid.hex(), err)
        return False

    async def _move(
        self, stream: Tiered, ours: Log, replica: Replica, segments: list[Segment]
    ) -> bool:
        first, end = max(segments[0].first, ours.oldest), segments[-1].next
        key = segment_key(ours.uuid, first, self._entropy(8))
        self._making.add(key)
        try:
            ours.offloading.intend(key)
            if not await self._known(replica, replica.last) or not _serves(stream, ours):
                return False
            making = _Making(self._sealer, key, first)
            while making.next < end:
                # Between two reads the log goes on.
                rows = ours.offloading.read(making.next, end)
                await asyncio.to_thread(making.add, *rows)
                if not _serves(stream, ours):
                    return False
            moved, sealed = await asyncio.to_thread(making.done)
            if not await self._objects.create(key, sealed):
                raise BucketError(
                    f"bucket {self._objects.url}: {key} exists, but this store did not make it"
                )
            if not _serves(stream, ours):
                await self._objects.delete(key)
                return False
            if not ours.offloading.finish(segments, moved):
                return False
        finally:
            self._making.discard(key)
        fields = {"stream": ours.uuid.hex(), "object": key, "bytes": len(sealed)}
        log.debug("store.records_moved", extra={"fields": fields})
        return True

    async def _known(self, replica: Replica, number: int) -> bool:
        """Wait until an object of a journal is known to be in the bucket; return False if the journal has ended."""
        while replica.writer.known < number and not replica.writer.ended:  # noqa: ASYNC110 - the bucket takes its time
            await asyncio.sleep(PAUSE_S)
        return not replica.writer.ended

    # -- deleting --------------------------------------------------------------------------------------------

    async def _delete_if_due(self) -> None:
        """Delete what can be deleted. A bucket that refuses it is not in the way of moves. Raises LogError."""
        if self._now_s() < self._delete_s:
            return
        try:
            await self.delete()
        except BucketError as err:
            self._warn(self._objects.url, BucketError(f"{NOT_DELETED}: {err}"))
            self._delete_s = self._now_s() + self._deletes.failed()
        else:
            self._deletes.succeeded()

    async def delete(self) -> None:
        """Delete objects that no stream has any more. Raises BucketError, LogError."""
        there = set()
        for stream in list(self._streams()):
            ours, replica = stream.log, stream.replica
            if ours is None or replica is None or not _serves(stream, ours):
                continue
            due: list[str] = []
            late: list[str] = []
            for key, why in ours.offloading.left.items():
                there.add((ours, key))
                late_s = LATE_S if why == INTENDED else 0.0
                left = self._left.get((ours, key))
                if left is None:
                    left = self._left[ours, key] = _Due(replica.last, self._now_s() + late_s)
                known = left.number <= replica.writer.known and self._now_s() >= left.at_s
                if known and key not in self._making:
                    (late if why == INTENDED else due).append(key)
            if late:
                ours.offloading.give_up(late)
                for key in late:
                    self._left[ours, key] = _Due(replica.last, self._now_s())
            for at in range(0, len(due), DELETES):
                some = due[at : at + DELETES]
                await at_once(self._objects.delete(key) for key in some)
                if not _serves(stream, ours):
                    break
                ours.offloading.forget(some)
        self._left = {place: left for place, left in self._left.items() if place in there}
        await self._delete_ended()

    async def _delete_ended(self) -> None:
        for left in list(self._ended):
            await self._delete_all(left.objects)
            if left.intended and self._now_s() >= self._late_s.setdefault(id(left), self._now_s() + LATE_S):  # fmt: skip
                await self._delete_all(left.intended)
            if not left.intended:
                self._late_s.pop(id(left), None)
                self._ended.remove(left)

    async def _delete_all(self, keys: list[str]) -> None:
        while keys:
            some = keys[-DELETES:]
            await at_once(self._objects.delete(key) for key in some)
            del keys[-len(some) :]


def _serves(stream: Tiered, ours: Log) -> bool:
    """Return whether a stream still has this log, and may write it."""
    ended = stream.replica is None or stream.replica.writer.ended
    return stream.log is ours and not ours.failed and not ended


class _Making:
    """A segment object that grows."""

    def __init__(self, sealer: Sealer, key: str, first: int) -> None:
        self._sealer = sealer
        self._key = key
        self._first = first
        self.next = first
        """Offset of the entry that is added next."""
        self._rows: Rows = []
        self._size = 0
        self._newest_us = 0
        self._sealed: list[bytes] = []
        self._chunks: list[Chunk] = []
        self._due: list[tuple[int, int]] = []

    def add(self, rows: Rows, due: list[tuple[int, int]]) -> None:
        """Add the next entries, and which of them are deferred."""
        for key, value in rows:
            item = decode(key, value)
            self._rows.append((key, value))
            self._size += len(key) + len(value)
            if not isinstance(item, Hole):
                self._newest_us = max(self._newest_us, item.stored_us)
            self.next = item.next
            if self._size >= CHUNK_BYTES:
                self._cut()
        self._due += due

    def _cut(self) -> None:
        plain = msgspec.msgpack.encode(self._rows)
        sealed = self._sealer.seal_chunk(self._key, len(self._chunks), plain)
        first = int.from_bytes(self._rows[0][0], "big")
        self._chunks.append(Chunk(first, len(sealed), self._newest_us))
        self._sealed.append(sealed)
        self._rows, self._size, self._newest_us = [], 0, 0

    def done(self) -> tuple[Moved, bytes]:
        """Return the object's row and its content."""
        if self._rows:
            self._cut()
        whole = b"".join(self._sealed)
        return Moved(
            self._first, self.next, self._key, hash_of(whole), self._chunks, self._due
        ), whole
