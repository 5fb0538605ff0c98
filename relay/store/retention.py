"""Retention: removes the oldest entries until the limits hold."""

from __future__ import annotations

from collections import deque
from typing import Final

from relay.store.batches import Batch
from relay.store.chain import Chain
from relay.store.records import KEY
from relay.store.segments import Limits, Segment, Slot

FREE_BYTES: Final = 64 << 20
"""Disk space is freed in lumps of this size."""


class Retention:
    """Moves `oldest` of a chain forward, and frees the disk space before it."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.free_bytes = FREE_BYTES
        self._dead_from = chain.database.first_record(chain.local)
        # How much an earlier process left to free is not known, so the first move frees it.
        self._dead_bytes = FREE_BYTES if self._dead_from < chain.local else 0

    def enforce(self, limits: Limits, now_us: int) -> None:
        """See `Log.enforce`."""
        chain = self._chain
        while chain.first.entries:
            head = chain.first
            if chain.moved.every:  # objects are removed whole
                if not self._wants(limits, now_us, head):
                    break
                self._drop_segment(head)
                continue
            if head is not chain.open and not head.indexed and self._wants(limits, now_us, head):
                self._drop_segment(head)
                continue
            over = self._over(limits, now_us)
            if not over:
                break
            self._drop_entries(head, over)
        if self._dead_bytes >= self.free_bytes:
            chain.database.free(KEY.pack(self._dead_from), KEY.pack(chain.local))
            self._dead_from, self._dead_bytes = chain.local, 0

    def moved(self, size: int) -> None:
        """Free the disk space of `size` bytes of records that were moved to the bucket."""
        self._dead_bytes += size

    def _wants(self, limits: Limits, now_us: int, segment: Segment) -> bool:
        """Return whether the limits require removing all of the first `segment`."""
        chain = self._chain
        return (
            (limits.max_bytes is not None and chain.size - segment.size >= limits.max_bytes)
            or (
                limits.max_messages is not None
                and chain.messages - segment.messages >= limits.max_messages
            )
            or (limits.max_age_us is not None and segment.newest_us < now_us - limits.max_age_us)
        )

    def _over(self, limits: Limits, now_us: int) -> list[Slot]:
        """Return the entries of the first segment that are over the limits."""
        chain = self._chain
        max_bytes = chain.size if limits.max_bytes is None else limits.max_bytes
        max_messages = chain.messages if limits.max_messages is None else limits.max_messages
        since_us = 0 if limits.max_age_us is None else now_us - limits.max_age_us
        size, messages = chain.size, chain.messages
        if chain.head is None:
            if size <= max_bytes and messages <= max_messages and limits.max_age_us is None:
                return []
            chain.head = deque(chain.slots_of(chain.first))
        over: list[Slot] = []
        for slot in chain.head:
            if size <= max_bytes and messages <= max_messages and slot.stored_us >= since_us:
                break
            over.append(slot)
            size -= slot.size
            messages -= slot.messages
        return over

    def _drop_segment(self, segment: Segment) -> None:
        chain = self._chain
        batch = chain.database.batch()
        _forget(batch, segment)
        moved = bool(chain.moved.every)
        if moved:
            chain.moved.drop(batch)
        self._move(batch, segment.next, segment.size, segment.messages)
        if moved:
            chain.moved.dropped()
            self._dead_bytes -= segment.size  # it was not on this disk
        chain.segments.popleft()
        chain.head = None

    def _drop_entries(self, segment: Segment, slots: list[Slot]) -> None:
        chain = self._chain
        assert chain.head is not None
        batch = chain.database.batch()
        for slot in slots:
            chain.drop_rows(batch, slot)
        emptied = len(slots) == len(chain.head)
        if emptied and segment is not chain.open:
            _forget(batch, segment)
        size = sum(slot.size for slot in slots)
        self._move(batch, slots[-1].next, size, sum(slot.messages for slot in slots))
        for slot in slots:
            chain.head.popleft()
            segment.drop(slot)
        if emptied:
            chain.head = None
            if segment is chain.open:
                chain.open, chain.open_slots = Segment(chain.oldest), []
            else:
                chain.segments.popleft()
        elif segment is chain.open:
            # Otherwise a log with such small limits would collect the slots of removed entries.
            chain.open_slots = None

    def _move(self, batch: Batch, oldest: int, size: int, messages: int) -> None:
        chain = self._chain
        batch.put(b"o", KEY.pack(oldest))
        chain.write(batch, sync=False)
        chain.oldest = oldest
        chain.size -= size
        chain.messages -= messages
        self._dead_bytes += size


def _forget(batch: Batch, segment: Segment) -> None:
    batch.delete(b"s" + KEY.pack(segment.first))
    batch.delete(b"x" + KEY.pack(segment.first))
