"""Moves the oldest records of a log to an object of a bucket, in steps between which the log goes on.

    intend ── the row is in the bucket ──► read ──► the object is made ──► finish: one batch

Until `finish` the records are in the log, and afterwards in the object. So an end of the store at any point loses
nothing. At most it leaves an object that row `y` names.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from msgspec import structs

from relay.store.batches import Op
from relay.store.chain import Chain
from relay.store.errors import LogDamaged
from relay.store.moved import Moved, Reader, Rows
from relay.store.records import KEY, Record, decode
from relay.store.retention import Retention
from relay.store.segments import Segment

READ_BYTES: Final = 512 << 10
"""What is read at once."""


class Offloading:
    """What moves the records of one log."""

    def __init__(self, chain: Chain, retention: Retention) -> None:
        self._chain = chain
        self._retention = retention

    @property
    def left(self) -> dict[str, bytes]:
        """Objects that no row names -> whether they were intended or dropped."""
        return self._chain.moved.left

    @property
    def objects(self) -> int:
        """How many objects have records of the log."""
        return len(self._chain.moved.every)

    @property
    def end(self) -> int:
        """Offset up to which everything is in objects; 0 if there are none."""
        return self._chain.moved.end

    def keys(self) -> list[str]:
        """Return the keys of all objects of the log that there may be."""
        return self._chain.moved.keys()

    @property
    def intended(self) -> list[str]:
        """The keys of objects of which nobody knows whether they were made."""
        return self._chain.moved.intended

    def read_by(self, reader: Reader) -> None:
        """Read moved records with this reader."""
        self._chain.moved.reader = reader

    def size_segments(self, segment_bytes: int, free_bytes: int) -> None:
        """Set when a segment is full, and in which lumps disk space is freed."""
        self._chain.segment_bytes, self._retention.free_bytes = segment_bytes, free_bytes

    def oldest(self, max_bytes: int) -> list[Segment]:
        """Return the oldest full segments of the database, up to about `max_bytes`, at least one if there is any."""
        found: list[Segment] = []
        size = 0
        for segment in islice(self._chain.segments, self.objects, None):
            if found and size + segment.size > max_bytes:
                break
            found.append(segment)
            size += segment.size
        return found

    def intend(self, key: str) -> None:
        """Write down that an object is about to be made. Raises LogWriteFailed."""
        batch = self._chain.database.batch()
        self._chain.moved.intend(batch, key)
        self._chain.write(batch, sync=False)

    def read(self, start: int, end: int) -> tuple[Rows, list[tuple[int, int]]]:
        """Return some of the entries from `start` until `end`, and (due time, offset) of deferred records among them.

        Keys of the log's index that point to them are forgotten: only compaction uses them, and it leaves alone what
        was moved. Raises LogDamaged, LogWriteFailed.
        """
        rows: Rows = []
        due: list[tuple[int, int]] = []
        at = start
        ops: list[Op] = self._chain.database.copy_records(KEY.pack(max(start, self._chain.local)), READ_BYTES)  # fmt: skip
        batch = self._chain.database.batch()
        forgotten = False
        for op in ops:
            try:
                item = decode(op.key, op.value)
            except ValueError as err:
                raise LogDamaged(self._chain.path, str(err), at) from err
            if item.first >= end:
                break
            if rows and item.first != at:
                break  # rows inside a hole, or damage: the next read begins at the right place
            rows.append((op.key, op.value))
            at = item.next
            if isinstance(item, Record) and item.deferred:
                due.append((item.due_us, item.first))
            if isinstance(item, Record) and item.key_hash is not None:
                key = b"k" + item.key_hash
                if self._chain.database.get(key) == op.key:
                    batch.delete(key)
                    forgotten = True
        if not rows:
            raise LogDamaged(self._chain.path, "entries are missing", start)
        if forgotten:
            self._chain.write(batch, sync=False)
        return rows, due

    def finish(self, segments: list[Segment], moved: Moved) -> bool:
        """Take what these segments have out of the log: it is in the object now. Returns False if the log has changed
        meanwhile. Raises LogWriteFailed.
        """
        chain = self._chain
        at = self.objects
        there = list(islice(chain.segments, at, at + len(segments)))
        if len(there) != len(segments) or any(
            ours is not theirs for ours, theirs in zip(segments, there, strict=True)
        ):
            return False
        moved = structs.replace(moved, first=max(segments[0].first, chain.oldest))
        if moved.first >= moved.next or moved.next != segments[-1].next:
            return False
        whole = Segment(moved.first)
        batch = chain.database.batch()
        for segment in segments:
            whole.merge(segment)
            batch.delete(b"s" + KEY.pack(segment.first))
            batch.delete(b"x" + KEY.pack(segment.first))
        batch.put(b"s" + KEY.pack(whole.first), whole.pack())
        chain.moved.put(batch, moved)
        chain.write(batch, sync=False)
        chain.moved.added(moved)
        for _ in segments:
            del chain.segments[at]
        chain.segments.insert(at, whole)
        chain.head = None
        self._retention.moved(whole.size)
        return True

    def give_up(self, keys: Iterable[str]) -> None:
        """Write down that these objects, which were intended, will not be used. Raises LogWriteFailed."""
        batch = self._chain.database.batch()
        for key in keys:
            self._chain.moved.give_up(batch, key)
        self._chain.write(batch, sync=False)

    def forget(self, keys: Iterable[str]) -> None:
        """Forget objects that were deleted. Raises LogWriteFailed."""
        batch = self._chain.database.batch()
        for key in keys:
            self._chain.moved.forget(batch, key)
        self._chain.write(batch, sync=False)
