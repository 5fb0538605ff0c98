"""Compaction: replaces expired records, and all but the last record of each key, by holes."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

from relay.store.batches import Batch
from relay.store.chain import Chain
from relay.store.records import KEY, Gap, Hole, Reason, Record, encode_hole
from relay.store.segments import Segment, Slot

COMPACT_BYTES: Final = 64 << 20
"""Bytes that one step reads at most, plus one segment."""


class Compaction:
    """Compacts a chain in passes, one step at a time."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._at = self._end = 0
        """Offsets: where the next step of the pass begins, and where the pass ends."""

    def step(self, now_us: int) -> bool:
        """See `Log.compact`."""
        chain = self._chain
        if self._at >= self._end:
            # Records appended from now on wait for the next pass. A record must be removed before
            # the one that supersedes it, or it would become the last of its key again when that one
            # has expired.
            self._at, self._end = chain.oldest, chain.next
        read = 0
        for index, segment in enumerate(chain.every):
            if segment.next <= max(self._at, self._chain.moved.end) or not segment.entries:
                continue  # what was moved to the bucket stays as it is
            if read >= COMPACT_BYTES or segment.first >= self._end:
                break
            if segment.indexed or 0 < segment.expires_us <= now_us:
                read += segment.size
                self._rewrite(index, segment, lambda item: self._reason(item, now_us))
            self._at = segment.next
        else:
            self._at = self._end
        return self._at >= self._end

    def remove(self, offsets: Set[int]) -> None:
        """See `Log.remove`."""
        for index, segment in enumerate(self._chain.every):
            if any(segment.first <= offset < segment.next for offset in offsets):
                self._rewrite(
                    index, segment, lambda item: Reason.COMPACTED if item.first in offsets else None
                )

    def _rewrite(
        self, index: int, segment: Segment, reason_of: Callable[[Record | Gap], Reason | None]
    ) -> None:
        """Replace the records for which `reason_of` returns a reason by holes."""
        chain = self._chain
        batch = chain.database.batch()
        kept = Segment(segment.first)
        hole: Hole | None = None
        removed = False
        for item, size in chain.walk(max(segment.first, chain.oldest), segment.next):
            reason = item.reason if isinstance(item, Hole) else reason_of(item)
            if reason is None:
                _fill(hole, kept, batch)
                hole = None
                kept.add(Slot.of(item, size))
                continue
            if isinstance(item, Record):
                removed = True
                chain.drop_rows(batch, Slot.of(item, size))
            if hole is not None and hole.reason == reason:
                batch.delete_record(KEY.pack(item.first))
                hole = Hole(hole.first, item.next, reason)
            else:
                _fill(hole, kept, batch)
                hole = Hole(item.first, item.next, reason)
        if not removed:
            return
        _fill(hole, kept, batch)
        if segment is not chain.open:
            batch.put(b"s" + KEY.pack(kept.first), kept.pack())
            batch.delete(b"x" + KEY.pack(kept.first))
        chain.write(batch, sync=False)
        if segment is chain.open:
            chain.open, chain.open_slots = kept, None
        else:
            chain.segments[index] = kept
        if index == 0:
            chain.head = None
        chain.size += kept.size - segment.size
        chain.messages += kept.messages - segment.messages

    def _reason(self, item: Record | Gap, now_us: int) -> Reason | None:
        """Return why `item` is removed; None if it stays."""
        if isinstance(item, Gap):
            return None
        if item.key_hash is not None:
            last = self._chain.database.get(b"k" + item.key_hash)
            if last is not None and KEY.unpack(last)[0] > item.first:
                return Reason.COMPACTED
        if 0 < item.expires_us <= now_us and item.first < self._end:
            return Reason.EXPIRED
        return None


def _fill(hole: Hole | None, kept: Segment, batch: Batch) -> None:
    if hole is not None:
        key = KEY.pack(hole.first)
        value = encode_hole(key, hole.reason, hole.next)
        batch.put_record(key, value)
        kept.add(Slot.of(hole, len(key) + len(value)))
