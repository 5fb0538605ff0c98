"""What a consumer hands out: what failed before, then deferred records that are due, then new ones (sans-IO).

What is bounded, and what happens at the bound (nothing here waits or raises; `take` hands out less):
- handed out and not settled: `Settings.max_pending` messages; new records wait, redeliveries go on;
- waiting behind a key: `MAX_BLOCKED` records; reading stops until one settles;
- records in the table: by the bytes that they can take in the cursor; reading stops likewise;
"""

from __future__ import annotations

import heapq
from typing import Final

from msgspec import Struct

from relay.store import cursor
from relay.store.cursor import Counts, Settings
from relay.store.errors import LogDamaged
from relay.store.log import MAX_OFFSET, Log
from relay.store.parts import OpenRecord, Part, lowest
from relay.store.records import Gap, Hole, Item, Reason, Record
from relay.store.unsettled import Unsettled

MAX_BLOCKED: Final = 4096
ENVELOPE_BYTES: Final = 448
"""What a record takes in an answer beside its body, at most."""
READS: Final = 8
FIRST_READ_BYTES: Final = 16 << 10
"""Of new records; each further read of a `take` is twice the last, so that little is read in vain."""
DUE_BATCH: Final = 256


class Delivery(Struct, frozen=True, gc=False):
    """Messages of `record` for a worker."""

    record: Record
    wanted: int
    """Bitmap: bit i is the message at `record.first + i`. The others are settled, or not for this worker."""
    deliveries: int
    """1 = for the first time, as far as any worker confirmed."""


class Taken(Struct, frozen=True):
    """What a worker gets, in order. Gaps and holes that retention left are told once and need no ack."""

    items: list[Delivery | Gap | Hole]
    bytes: int
    """Of the records, envelopes included."""
    messages: int
    """Gaps count one each."""
    more: bool = False
    """It stopped at the worker's limits, not for want of messages."""
    fenced: bool = False
    """A newer worker has taken over; this one gets nothing any more."""


class _Basket:
    """What a call of `take` has so far."""

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
        """Return whether there is room for a record of so many bytes; the first always has it, or it would never go."""
        self.more = self.room <= 0 or (self.messages > 0 and self.bytes + size > self.max_bytes)
        return not self.more

    @property
    def room(self) -> int:
        """How many messages there is room for."""
        return self.max_messages - self.messages


class Dispatcher:
    """Takes records from a log into the table of what is unsettled, and messages from there to workers."""

    def __init__(self, log: Log, table: Unsettled, settings: Settings, start: int) -> None:
        self._log = log
        self._table = table
        self.counts = Counts()
        self._settings = settings
        self.start = start
        """Deferred records below are not for this consumer."""
        self.position = start
        """The offset of the next new message."""
        self.due = (0, 0)
        """Due time and offset of the last deferred record that was taken."""
        self._coming: tuple[tuple[int, int, int], tuple[int, int] | None] | None = None
        self._unreported: list[Hole] = []

    def take(self, worker: bytes, max_bytes: int, max_messages: int) -> Taken:
        """Hand messages to `worker`. Raises LogDamaged if the log cannot be read there, and nothing was handed out."""
        basket = _Basket(worker, max_bytes, max_messages)
        self._report_lost(basket)
        try:
            if self._take_ready(basket) and self._take_due(basket):
                self._take_new(basket)
        except LogDamaged:
            if not basket.items:
                raise  # else the next call does: these are handed out
        return Taken(basket.items, basket.bytes, basket.messages, basket.more)

    def _take_ready(self, basket: _Basket) -> bool:
        """Hand out what waits; return whether the basket has room for others."""
        aside = []
        try:
            while self._table.ready and not basket.full():
                record = self._table.records.get(self._table.ready[0])
                parts = self._table.eligible(record) if record is not None else []
                if record is not None and record.key is None:
                    # What was delivered as often goes together; the rest of the record comes by itself.
                    parts = [part for part in parts if part.deliveries == parts[0].deliveries]
                if record is None or not parts:
                    heapq.heappop(self._table.ready)
                    if record is not None:
                        record.queued = False
                    continue
                wanted = lowest(record.bits(parts), basket.room)
                fresh = (wanted & record.fresh).bit_count()
                if fresh and not self._may_dispatch(fresh):
                    # It waits for acks, and those perhaps for redeliveries behind it.
                    aside.append(heapq.heappop(self._table.ready))
                    continue
                if not self._may_hold(basket.worker, wanted.bit_count()):
                    return False
                item = self._log.read(record.first, 1, now_us=self._table.wall_us).items[0]
                if not isinstance(item, Record):
                    assert isinstance(item, Hole)
                    self.removed(record, item.reason)
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
        """Hand out deferred records that have come due; return whether the basket has room for others."""
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
                    self.counts.missed += 1  # how many it held cannot be read any more
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
            if self.position >= self._log.next or basket.full():
                return
            room = min(size, basket.max_bytes - basket.bytes)
            chunk = self._log.read(self.position, room, now_us=self._table.wall_us, deferred=False)
            for item in chunk.items:
                if not self._take_item(item, basket):
                    return
                self.position = item.next
                self._table.dirty = True
            size *= 2
        basket.more = self.position < self._log.next

    def _take_item(self, item: Item, basket: _Basket) -> bool:
        """Deal with what is at the read position; return whether to go on behind it."""
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
        """Hand out a record from offset `start` on, or queue it behind its key; return False if there is no room for it."""
        if item.count > cursor.MAX_COUNT:
            cause = f"not deliverable: the record claims {item.count} messages, more than {cursor.MAX_COUNT}"
            basket.items.append(Gap(item.first, item.count, cause, item.stored_us))
            basket.messages += 1
            self.counts.skipped += item.count
            return True
        key = item.key_hash[: cursor.KEY_BYTES] if self._settings.group and item.key_hash else None
        weight = cursor.weight(item.count, key)
        if self._table.records and self._table.weight + weight > cursor.MAX_RECORDS_BYTES:
            return False
        record = OpenRecord(item.first, item.count, key, deferred)
        bits = record.mask(start, item.next)
        early_us = self._early_us(item) if item.due_us else 0
        if early_us or self._table.behind(key):
            if self._table.behind(key) and self._table.blocked >= MAX_BLOCKED:
                return False
            # One that was listed before its time, because the clock was set back, waits here as if it had failed.
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
        self._table.wait(record)
        return True

    def _may_dispatch(self, count: int) -> bool:
        """Return whether `count` new messages are within `max_pending`; alone, a record always is."""
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
        """Pass on what retention took since the last time."""
        basket.items.extend(self._unreported)
        self._unreported.clear()

    def came_due(self, first: int, end: int) -> bool:
        """Return whether these offsets, ahead of the read position, are of a deferred record that is settled."""
        if first >= self._log.next:
            return False
        item = self._log.read(first, 1, now_us=0).items[0]
        return (
            isinstance(item, Record)
            and item.deferred
            and item.first >= self.start
            and (item.due_us, item.first) <= self.due
            and end <= item.next
        )

    def removed(self, record: OpenRecord, reason: Reason) -> None:
        """Settle what waits of `record`: it is no longer in the log. What is held may still be acked."""
        gone = record.bits([part for part in record.parts if part.waiting])
        settled = self._table.settle(record, gone)
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
        """Return how long `record` has to wait yet; 0 if its time has come, or had when it was stored."""
        if record.due_us <= record.stored_us:
            return 0
        return max(0, record.due_us - self._table.wall_us - self._log.steps.grace_us(record.first))

    def next_deferred(self) -> tuple[int, int] | None:
        """Return (due time, offset) of the first deferred record that was not taken."""
        known = (self._log.next, *self.due)
        if self._coming is None or self._coming[0] != known:
            found = self._log.due(MAX_OFFSET, after=self.due, limit=1)
            self._coming = (known, found[0] if found else None)
        return self._coming[1]
