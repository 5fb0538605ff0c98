"""The chain of entries from `oldest` until `next`, on disk and as sums in memory.

Everything that adds, reads or removes entries goes through this module, so that one place
guarantees that they are contiguous.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from copy import copy
from itertools import islice, zip_longest
from typing import Final

from relay.store.batches import Batch
from relay.store.database import Database
from relay.store.errors import LogDamaged
from relay.store.moved import MovedRecords
from relay.store.records import (
    KEY,
    Entry,
    Gap,
    Hole,
    Item,
    Record,
    check_count,
    check_entry,
    decode,
    encode_gap,
    encode_hole,
    encode_record,
)
from relay.store.segments import SEGMENT_BYTES, Segment, Slot, pack_outline, unpack_outline

DUE: Final = struct.Struct(">QQ")
"""(due time, offset): the key of a deferred record in rows `d`."""


class Chain:
    """The entries of one log.

    `oldest` is the offset at which the first one begins, `next` that at which the last one ends.
    """

    def __init__(self, database: Database) -> None:
        """Load the sums. Raises LogDamaged, struct.error or ValueError if the rows on disk are inconsistent."""
        self.database = database
        self.path = database.path
        self.oldest, self.next = self._load_offset(b"o"), self._load_offset(b"n")
        self.moved = MovedRecords(database)
        """What is in objects of the bucket: the first segments, one for each object."""
        self.segment_bytes = SEGMENT_BYTES
        """Size at which a segment is full."""
        self.segments: deque[Segment] = deque()
        """The full segments.

        The first may begin below `oldest`; its sums then cover only the entries from `oldest` on.
        """
        self.open = Segment(self.oldest)
        """The unfinished segment after them."""
        self.open_slots: list[Slot] | None = []
        """The entries of the unfinished segment; None if they are not known because compaction or
        retention changed it.
        """
        self.head: deque[Slot] | None = None
        """The entries of the first segment, loaded when retention needs them."""
        self._load_segments()
        self.size = sum(segment.size for segment in self.every)
        """Bytes of keys and values from `oldest` on."""
        self.messages = sum(segment.messages for segment in self.every)

    @property
    def every(self) -> list[Segment]:
        """All segments in order."""
        return [*self.segments, self.open]

    @property
    def first(self) -> Segment:
        """The segment that holds `oldest`."""
        return self.segments[0] if self.segments else self.open

    @property
    def local(self) -> int:
        """The first offset whose entries are in the database."""
        return max(self.oldest, self.moved.end)

    @property
    def local_bytes(self) -> int:
        """Bytes of keys and values in the database."""
        return self.size - sum(
            segment.size for segment in islice(self.segments, len(self.moved.every))
        )

    def walk(self, start: int, end: int | None = None) -> Iterator[tuple[Item, int]]:
        """Yield each entry and its size on disk, from the entry that contains `start` until `end` (default:
        `next`).

        Raises LogDamaged where the chain of entries breaks. Where entries are in the bucket, raises RecordsAway or
        RecordsUnreachable, also after some entries.
        """
        self.database.check_open()
        end = self.next if end is None else end
        if start < min(end, self.moved.end):
            for item, size in self.moved.walk(start, min(end, self.moved.end)):
                yield item, size
                start = item.next
        if start < end:
            yield from self._walk_local(start, end)

    def _walk_local(self, start: int, end: int) -> Iterator[tuple[Item, int]]:
        at = start
        try:
            rows = self.database.records()
            rows.seek_for_prev(KEY.pack(start))
            if rows.valid():
                at = KEY.unpack(rows.key())[0]
            while at < end:
                if not rows.valid():
                    rows.status()
                    raise LogDamaged(self.path, "entries are missing", at)
                key, value = rows.key(), rows.value()
                if key != KEY.pack(at):
                    raise LogDamaged(self.path, "entries are missing", at)
                item = decode(key, value)
                if item.next <= start or at < self.oldest:
                    raise LogDamaged(self.path, "entries are missing", start)
                yield item, len(key) + len(value)
                at = item.next
                if isinstance(item, Hole):
                    rows.seek(KEY.pack(at))  # skip deleted rows inside the hole
                else:
                    rows.next()
            if at > end:
                raise LogDamaged(self.path, "an entry extends past the end", end)
        except LogDamaged:
            raise
        except Exception as err:  # rocksdict raises nothing narrower
            raise LogDamaged(self.path, str(err), at) from err

    def draft(self, listed_us: int = 0) -> Draft:
        """Return an empty draft that begins at `next`."""
        return Draft(
            self.database, self.next, self.open, self.open_slots, self.segment_bytes, listed_us
        )

    def finish(self, draft: Draft) -> None:
        """Write `draft` to disk with a sync, and add its sums.

        Raises LogWriteFailed; the chain is then unchanged.
        """
        if draft.next == self.next and not draft.rows:
            return
        draft.batch.put(b"n", KEY.pack(draft.next))
        self.database.write(draft.batch, draft.next, sync=True)
        if self.head is not None and not self.segments:
            self.head.extend(draft.slots_of_first())
        if draft.full:
            self.open_slots = draft.slots[draft.since :]
        elif self.open_slots is not None:
            self.open_slots += draft.slots
        self.segments.extend(draft.full)
        self.open = draft.open
        self.next = draft.next
        self.size += sum(slot.size for slot in draft.slots)
        self.messages += sum(slot.messages for slot in draft.slots)

    def slots_of(self, segment: Segment) -> list[Slot]:
        """Return the entries of a segment from `oldest` on, from its outline if it has one.

        Raises LogDamaged.
        """
        slots = self.open_slots if segment is self.open else None
        if segment is not self.open and not segment.indexed:
            row = self.database.get(b"x" + KEY.pack(segment.first))
            slots = unpack_outline(segment, row) if row is not None else None
        if slots is not None:
            return [slot for slot in slots if slot.next > self.oldest]
        walk = self.walk(max(segment.first, self.oldest), segment.next)
        return [Slot.of(item, size) for item, size in walk]

    def write(self, batch: Batch, *, sync: bool) -> None:
        """Write a batch that adds no entries. Raises LogWriteFailed."""
        self.database.write(batch, self.next, sync=sync)

    def drop_rows(self, batch: Batch, slot: Slot) -> None:
        """Delete the rows that the entry of `slot` has outside the records."""
        if slot.key_hash is not None:
            key = b"k" + slot.key_hash
            if self.database.get(key) == KEY.pack(slot.first):
                batch.delete(key)
        if slot.due_us:
            batch.delete(b"d" + DUE.pack(slot.due_us, slot.first))

    def _load_offset(self, name: bytes) -> int:
        row = self.database.get(name)
        if row is None:
            raise LogDamaged(self.path, f"row {name.decode()!r} is missing")
        offset: int = KEY.unpack(row)[0]
        return offset

    def _load_segments(self) -> None:
        at: int | None = None
        for row, summary in self.database.rows(b"s"):
            segment = Segment.unpack(KEY.unpack(row)[0], summary)
            if segment.first != (segment.first if at is None else at):
                raise LogDamaged(self.path, "a segment summary is missing", at)
            at = segment.next
            self.segments.append(segment)
        for segment, moved in zip_longest(
            islice(self.segments, len(self.moved.every)), self.moved.every
        ):
            if segment is None or (segment.first, segment.next) != (moved.first, moved.next):
                raise LogDamaged(self.path, "the summary of moved records is missing", moved.first)
        if self.segments and self.segments[0].first > self.oldest:
            raise LogDamaged(self.path, "a segment summary is missing", self.oldest)
        self.open = Segment(max(self.oldest, at or 0))
        self.open_slots = [Slot.of(item, size) for item, size in self.walk(self.open.first)]
        for slot in self.open_slots:
            self.open.add(slot)
        if self.segments and self.segments[0].first < self.oldest:
            whole = self.segments[0]
            kept = Segment(whole.first)
            for slot in self.slots_of(whole):
                kept.add(slot)
            kept.expires_us = whole.expires_us
            self.segments[0] = kept


class Draft:
    """Entries that are about to be written, and the end of the log after that write."""

    __slots__ = (
        "_before", "_segment_bytes", "batch", "full", "listed_us", "next", "open", "rows", "since", "slots",
    )  # fmt: skip

    def __init__(
        self, database: Database, at: int, segment: Segment, before: list[Slot] | None, segment_bytes: int,
        listed_us: int,
    ) -> None:  # fmt: skip
        """`before` are the entries of `segment`; None if they are not known."""
        self.batch = database.batch()
        self.next = at
        self.open = copy(segment)
        self.full: list[Segment] = []
        self.slots: list[Slot] = []
        self.since = 0
        """How many of `slots` belong to full segments."""
        self._before = before
        self._segment_bytes = segment_bytes
        self.rows = False
        """Write the batch even if it contains no entry."""
        self.listed_us = listed_us
        """Due times up to this one were listed to consumers, so no new deferred record may be due before it."""

    def add_entry(
        self, entry: Entry, first: int, count: int, now_us: int, stored_us: int | None = None, *, deferred: bool | None = None
    ) -> None:  # fmt: skip
        """Add a record. `stored_us` is when it was stored, here or in the copied log (None: now).

        A record that is already due is not deferred. `deferred` says whether it was in the copied log: then it is here,
        too, unless a consumer has passed its due time.
        """
        stored_us = now_us if stored_us is None else stored_us
        if deferred is None:
            deferred = entry.due_us > max(now_us, self.listed_us)
        elif deferred:
            deferred = entry.due_us > self.listed_us
        key = KEY.pack(first)
        value = encode_record(key, entry, stored_us, deferred=deferred)
        if entry.key_hash is not None:
            self.batch.put(b"k" + entry.key_hash, key)
        if deferred:
            self.batch.put(b"d" + DUE.pack(entry.due_us, first), b"")
        self.add(
            key,
            value,
            Slot(
                first,
                first + count,
                len(key) + len(value),
                count,
                stored_us,
                entry.key_hash,
                entry.due_us if deferred else 0,
                entry.expires_us,
            ),
        )

    def add_item(self, item: Item, now_us: int) -> None:
        """Add an item of another log unchanged.

        Raises ValueError if it is malformed or does not begin at `next`.
        """
        if item.first != self.next or item.next <= item.first:
            raise ValueError(
                f"items: expected an item that begins at offset {self.next}, got {item.first} to {item.next}"
            )
        key = KEY.pack(item.first)
        if isinstance(item, Record):
            entry = Entry(
                item.kind, item.name, item.key_id, item.sender_id, item.end, item.body, None,
                item.key_hash, item.tombstone, item.expires_us, item.due_us,
            )  # fmt: skip
            if check_entry(entry) != item.count:
                raise ValueError(
                    f"items: the record at {item.first} has {item.count} messages, but its end fields count others"
                )
            self.add_entry(
                entry, item.first, item.count, now_us, item.stored_us, deferred=item.deferred
            )
            return
        if isinstance(item, Gap):
            check_count(item.count)
            value = encode_gap(key, item.count, item.cause, item.stored_us)
        else:
            value = encode_hole(key, item.reason, item.next)
        self.add(key, value, Slot.of(item, len(key) + len(value)))

    def add_stored(self, key: bytes, value: bytes, item: Item) -> None:
        """Add an entry that was read from this log's files, byte for byte. It must begin at `next`."""
        slot = Slot.of(item, len(key) + len(value))
        if slot.key_hash is not None:
            self.batch.put(b"k" + slot.key_hash, key)
        if slot.due_us:
            self.batch.put(b"d" + DUE.pack(slot.due_us, slot.first), b"")
        self.add(key, value, slot)

    def add(self, key: bytes, value: bytes, slot: Slot) -> None:
        """Add an encoded entry."""
        self.batch.put_record(key, value)
        self.slots.append(slot)
        self.open.add(slot)
        self.next = slot.next
        if self.open.is_full(self._segment_bytes):
            self.batch.put(b"s" + KEY.pack(self.open.first), self.open.pack())
            if self._before is not None and not self.open.indexed:
                outline = pack_outline([*self._before, *self.slots[self.since :]])
                self.batch.put(b"x" + KEY.pack(self.open.first), outline)
            self._before, self.since = [], len(self.slots)
            self.full.append(self.open)
            self.open = Segment(self.next)

    def slots_of_first(self) -> list[Slot]:
        """Return the new entries that belong to the segment that was unfinished before."""
        end = self.full[0].next if self.full else self.next
        return [slot for slot in self.slots if slot.next <= end]
