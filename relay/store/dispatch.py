"""Chooses what a consumer dispatches: first redeliveries, then deferred records that are due, then
new ones (sans-IO).

Bounds, and what happens at each (nothing here waits or raises; `take` dispatches less):
- dispatched and not settled: `Settings.max_pending` messages; new records wait, redeliveries
  continue;
- waiting behind a key: `MAX_BLOCKED` records; reading stops until one is settled;
- records in the table: bounded by their largest possible size in the cursor; reading stops until
  one is settled.
"""

from __future__ import annotations

import heapq
from typing import Final

from msgspec import Struct

from relay.store import cursor
from relay.store.cursor import Counts, Settings
from relay.store.errors import LogDamaged, RecordsAway, RecordsUnreachable
from relay.store.log import Log
from relay.store.parts import OpenRecord, Part, lowest
from relay.store.records import MAX_OFFSET, Gap, Hole, Item, Reason, Record
from relay.store.unsettled import Unsettled

MAX_BLOCKED: Final = 4096
ENVELOPE_BYTES: Final = 448
"""Upper bound of what a record needs in an answer besides its body."""
READS: Final = 8
FIRST_READ_BYTES: Final = 16 << 10
"""Size of the first read of new records in a `take`.

Each further read is twice as large, so that little is read in vain.
"""
DUE_BATCH: Final = 256


class Delivery(Struct, frozen=True, gc=False):
    """Messages of `record` that are dispatched to a worker."""

    record: Record
    wanted: int
    """Bitmap: bit i is the message at `record.first + i`.

    The other messages are settled, or not for this worker.
    """
    deliveries: int
    """Number of this delivery, counting those that a worker confirmed: 1 is the first."""


class Taken(Struct, frozen=True):
    """What a worker receives from one `take`, in order.

    Gaps and holes left by retention are reported once and need no ack.
    """

    items: list[Delivery | Gap | Hole]
    bytes: int
    """Bytes of the records with their envelopes."""
    messages: int
    """Messages; a gap counts as one."""
    more: bool = False
    """More messages are available: `take` stopped at the worker's limits."""


class _Basket:
    """What one `take` has collected so far."""

    def __init__(self, worker: bytes, max_bytes: int, max_messages: int) -> None:
        self.worker = worker
        self.max_bytes = max_bytes
        self.max_messages = max_messages
        self.items: list[Delivery | Gap | Hole] = []
        self.bytes = 0
        self.messages = 0
        self.more = False

    def full(self) -> bool:
        self.more = self.bytes >= self.max_bytes or self.messages >= self.max_messages
        return self.more

    def fits(self, size: int) -> bool:
        """Return whether a record of `size` bytes fits.

        The first always does, so that a large record is not stuck forever.
        """
        self.more = self.room <= 0 or (self.messages > 0 and self.bytes + size > self.max_bytes)
        return not self.more

    @property
    def room(self) -> int:
        """Messages that still fit."""
        return self.max_messages - self.messages


class Dispatcher:
    """Reads records from a log into the table of unsettled messages, and dispatches messages from
    there to workers.
    """

    def __init__(self, log: Log, table: Unsettled, settings: Settings, start: int) -> None:
        self._log = log
        self._table = table
        self.counts = Counts()
        self._settings = settings
        self.start = start
        """Offset at which the consumer started. It does not deliver deferred records below."""
        self.position = start
        """Offset of the next new message."""
        self.due = (0, 0)
        """(due time, offset) of the last deferred record that was processed."""
        self._next_deferred: tuple[tuple[int, int, int], tuple[int, int] | None] | None = None
        self._unreported: list[Hole] = []

    def take(self, worker: bytes, max_bytes: int, max_messages: int) -> Taken:
        """Dispatch messages to `worker`.

        Raises LogDamaged, RecordsAway or RecordsUnreachable if the log cannot be read and nothing was dispatched.
        """
        basket = _Basket(worker, max_bytes, max_messages)
        self._report_lost(basket)
        try:
            if self._take_ready(basket) and self._take_due(basket):
                self._take_new(basket)
        except (LogDamaged, RecordsAway, RecordsUnreachable):
            if not basket.items:
                raise  # otherwise return what was dispatched; the next call raises
        return Taken(basket.items, basket.bytes, basket.messages, basket.more)

    def _take_ready(self, basket: _Basket) -> bool:
        """Dispatch waiting messages of the table; return whether the basket has room for more."""
        aside = []
        try:
            while self._table.ready and not basket.full():
                record = self._table.records.get(self._table.ready[0])
                parts = self._table.eligible(record) if record is not None else []
                if record is not None and record.key is None:
                    # Messages with the same number of deliveries are dispatched together; the
                    # others follow separately.
                    parts = [part for part in parts if part.deliveries == parts[0].deliveries]
                if record is None or not parts:
                    heapq.heappop(self._table.ready)
                    if record is not None:
                        record.queued = False
                    continue
                wanted = lowest(record.bits(parts), basket.room)
                fresh = (wanted & record.fresh).bit_count()
                if fresh and not self._may_dispatch(fresh):
                    # It must wait for acks, and the acks may depend on redeliveries behind it.
                    aside.append(heapq.heappop(self._table.ready))
                    continue
                if not self._may_hold(basket.worker, wanted.bit_count()):
                    return False
                item = self._log.read(record.first, 1, now_us=self._table.wall_us).items[0]
                if not isinstance(item, Record):
                    assert isinstance(item, Hole)
                    self.record_removed(record, item.reason)
                    self._report_lost(basket)
                    continue
                if not basket.fits(len(item.body) + ENVELOPE_BYTES):
                    return False
                parts = self._table.cut(record, parts, basket.room)
                if record.key is not None:
                    heapq.heappop(self._table.ready)
                    record.queued = False
                self._dispatch(item, record, parts, basket)
        finally:
            for first in aside:
                heapq.heappush(self._table.ready, first)
        return not basket.full()

    def _take_due(self, basket: _Basket) -> bool:
        """Dispatch deferred records that are due; return whether the basket has room for more."""
        coming = self.next_deferred()
        if coming is None or coming[0] > self._table.high_us:
            return True
        found = self._log.due(self._table.high_us, after=self.due, limit=DUE_BATCH)
        for pair in found:
            if basket.full():
                return False
            if pair[1] >= self.start:
                item = self._log.read(pair[1], 1, now_us=self._table.wall_us).items[0]
                if isinstance(item, Hole) and item.reason is Reason.DAMAGED:
                    self.counts.missed += 1  # how many messages it had cannot be read any more
                    basket.items.append(Hole(pair[1], pair[1] + 1, item.reason))
                elif not isinstance(item, Record):
                    self.counts.skipped += item.next - pair[1]
                elif not self._take_record(item, item.first, basket, deferred=True):
                    return False
            self.due = pair
            self._log.cursors.listed(pair[0])
            self._table.dirty = True
        basket.more = len(found) == DUE_BATCH
        return not basket.more

    def _take_new(self, basket: _Basket) -> None:
        size = FIRST_READ_BYTES
        for _ in range(READS):
            end = self._log.shown
            if self.position >= end or basket.full():
                return
            room = min(size, basket.max_bytes - basket.bytes)
            chunk = self._log.read(
                self.position, room, now_us=self._table.wall_us, deferred=False, end=end
            )
            for item in chunk.items:
                if not self._take_item(item, basket):
                    return
                self.position = item.next
                self._table.dirty = True
            size *= 2
        basket.more = self.position < self._log.shown

    def _take_item(self, item: Item, basket: _Basket) -> bool:
        """Process the item at the read position; return whether to continue with the next one."""
        first = max(item.first, self.position)
        match item:
            case Record():
                return self._take_record(item, first, basket, deferred=False)
            case Gap():
                basket.items.append(item)
                basket.messages += 1
            case Hole(reason=Reason.RETENTION | Reason.DAMAGED):
                self.counts.missed += item.next - first
                basket.items.append(Hole(first, item.next, item.reason))
            case Hole(reason=Reason.EXPIRED | Reason.COMPACTED):
                self.counts.skipped += item.next - first
        return True

    def _take_record(self, item: Record, start: int, basket: _Basket, *, deferred: bool) -> bool:
        """Dispatch a record from offset `start` on, or queue it behind its key; return False if
        there is no room for it.
        """
        if item.count > cursor.MAX_COUNT:
            cause = f"not deliverable: the record claims {item.count} messages, more than {cursor.MAX_COUNT}"
            basket.items.append(Gap(item.first, item.count, cause, item.stored_us))
            basket.messages += 1
            self.counts.skipped += item.count
            return True
        key = item.key_hash[: cursor.KEY_BYTES] if self._settings.shared and item.key_hash else None
        weight = cursor.weight(item.count, key)
        if self._table.records and self._table.weight + weight > cursor.MAX_RECORDS_BYTES:
            return False
        record = OpenRecord(item.first, item.count, key, deferred)
        bits = record.mask(start, item.next)
        early_us = self._early_us(item) if item.due_us else 0
        if early_us or self._table.must_wait(key):
            if self._table.must_wait(key) and self._table.blocked >= MAX_BLOCKED:
                return False
            # If the clock was set back, a record may be listed before it is due. It then waits here
            # like a redelivery.
            self._table.add(
                record, [(bits, 0, self._table.now_us + early_us if early_us else 0, 0)]
            )
            return True
        count = min(bits.bit_count(), basket.room)
        if not self._may_dispatch(count) or not self._may_hold(basket.worker, count):
            return False
        if not basket.fits(len(item.body) + ENVELOPE_BYTES):
            return False
        self._table.add(record, [(bits, 0, 0, 0)])
        self._dispatch(item, record, self._table.cut(record, list(record.parts), count), basket)
        self._table.requeue(record)
        return True

    def _may_dispatch(self, count: int) -> bool:
        """Return whether `count` new messages fit into `max_pending`.

        A record always fits if nothing else is dispatched.
        """
        return (
            not self._table.dispatched
            or self._table.dispatched + count <= self._settings.max_pending
        )

    def _may_hold(self, worker: bytes, count: int) -> bool:
        held = self._table.held.get(worker, 0)
        return not held or held + count <= self._settings.max_pending_per_worker

    def _dispatch(
        self, item: Record, record: OpenRecord, parts: list[Part], basket: _Basket
    ) -> None:
        self.counts.redelivered += sum(part.bits.bit_count() for part in parts if part.dispatched)
        for part in self._table.dispatch(record, parts, basket.worker):
            count = part.bits.bit_count()
            basket.items.append(Delivery(item, part.bits, part.deliveries + 1))
            basket.messages += count
            basket.bytes += len(item.body) + ENVELOPE_BYTES

    def _report_lost(self, basket: _Basket) -> None:
        """Add the holes for messages that were lost to retention or damage since the last call."""
        basket.items.extend(self._unreported)
        self._unreported.clear()

    def came_due(self, first: int, end: int) -> bool:
        """Return whether these offsets, ahead of the read position, belong to a deferred record
        that is settled. Also true if that record is in the bucket and not at hand: then nothing is
        left to settle there, or it is in the table.
        """
        if first >= self._log.next:
            return False
        try:
            item = self._log.read(first, 1, now_us=0).items[0]
        except (RecordsAway, RecordsUnreachable):
            return True
        return (
            isinstance(item, Record)
            and item.deferred
            and item.first >= self.start
            and (item.due_us, item.first) <= self.due
            and end <= item.next
        )

    def record_removed(self, record: OpenRecord, reason: Reason) -> None:
        """Settle the waiting messages of `record`, which was removed from the log.

        Messages held by workers may still be acked.
        """
        waiting_bits = record.bits([part for part in record.parts if part.waiting])
        settled = self._table.settle(record, waiting_bits)
        self._table.tidy(record.first, record.next)
        if reason not in (Reason.RETENTION, Reason.DAMAGED):
            self.counts.skipped += settled
        elif settled:
            self.counts.missed += settled
            last = self._unreported[-1] if self._unreported else None
            if last is not None and (last.next, last.reason) == (record.first, reason):
                self._unreported[-1] = Hole(last.first, record.next, reason)
            else:
                self._unreported.append(Hole(record.first, record.next, reason))

    def _early_us(self, record: Record) -> int:
        """Return how long `record` still has to wait; 0 if it is due, or was due when it was stored."""
        if record.due_us <= record.stored_us:
            return 0
        return max(0, record.due_us - self._table.wall_us - self._log.steps.grace_us(record.first))

    def will_deliver(self, record: Record, offset: int) -> bool:
        """Return whether the message at `offset` of `record` was not read yet, and will be delivered for the
        first time.
        """
        if record.deferred and record.first >= self.start:
            return (record.due_us, record.first) > self.due
        return not record.deferred and offset >= self.position

    def next_deferred(self) -> tuple[int, int] | None:
        """Return (due time, offset) of the first deferred record that was not processed yet."""
        known = (self._log.next, *self.due)
        if self._next_deferred is None or self._next_deferred[0] != known:
            found = self._log.due(MAX_OFFSET, after=self.due, limit=1)
            self._next_deferred = (known, found[0] if found else None)
        return self._next_deferred[1]
