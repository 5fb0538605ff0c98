"""A consumer of a log: hands its messages to workers until each is settled, at least once (sans-IO).

A record is sealed as a whole and handed out so, with a bitmap of the messages that are meant: no more than the worker asked for, so
that others get the rest. Acks are per message. What is read and not settled is in the table of `unsettled`; its bytes are in `cursor`.

In a group the records of a key go one after the other: each waits until those before it are settled or dead, so a failed one
comes again first. A deferred record queues when it comes due. Records without a key are free.

What is bounded, and what happens at the bound (nothing here waits or raises; `take` hands out less):
- handed out and not settled: `Settings.max_pending` messages; new records wait, redeliveries go on;
- waiting behind a key: `MAX_BLOCKED` records; reading stops until one settles;
- records in the table: by the bytes that they can take in the cursor; reading stops likewise;
- dead letters: 128 KiB; further ones are neither delivered nor listed until some are confirmed.
"""

from __future__ import annotations

import heapq
from typing import Final

from msgspec import Struct

from relay.store import cursor
from relay.store.clock import Clock
from relay.store.cursor import Counts, CursorDamaged, Dead, Settings, State
from relay.store.cursors import MAX_CURSOR_NAME_BYTES
from relay.store.errors import LogDamaged
from relay.store.log import MAX_OFFSET, Log
from relay.store.parts import Open, Part, lowest
from relay.store.records import Gap, Hole, Item, Reason, Record
from relay.store.unsettled import Unsettled

MAX_BLOCKED: Final = 4096
ENVELOPE_BYTES: Final = 448
"""What a record takes in an answer beside its body, at most."""
MAX_FENCED: Final = 1024
"""Workers that were taken over from and are remembered; one that is forgotten can take over again."""
MAX_DELAY_US: Final = 30 * 86_400_000_000
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


class Info(Struct, frozen=True):
    """How far a consumer is, in messages; offsets where it says so."""

    floor: int
    """Offset below which all but deferred messages are settled."""
    position: int
    """Offset of the next new one."""
    lag: int
    """Not settled up to the end of the log; by offsets, so holes ahead count."""
    pending: int
    """Held by workers."""
    redelivering: int
    dead: int
    workers: int
    """Those that hold messages."""
    counts: Counts


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


class Consumer:
    """One consumer of a log, from one thread at a time. `now_us` is `Clock.elapsed_us`; `clock` tells how others differ from it.

    What `take` returned is handed out. A crash between two calls of `save` delivers again what was settled since.
    """

    def __init__(
        self, log: Log, name: str, settings: Settings, start_offset: int, now_us: int, clock: Clock | None = None
    ) -> None:  # fmt: skip
        """Start at `start_offset`; deferred records below it are not delivered. Raises ValueError."""
        if not 0 <= start_offset <= log.next:
            raise ValueError(f"start_offset: {start_offset} is not between 0 and {log.next}")
        if not 0 < len(name.encode()) <= MAX_CURSOR_NAME_BYTES:
            raise ValueError(f"name: not 1 to {MAX_CURSOR_NAME_BYTES} bytes")
        self.name = name
        self.settings = settings
        self.counts = Counts()
        self._log = log
        self._clock = clock or Clock()
        self._start = self._position = start_offset
        self._due = (0, 0)
        self._coming: tuple[tuple[int, int, int], tuple[int, int] | None] | None = None
        self._table = Unsettled(settings, now_us, self._clock)
        self._worker: bytes | None = None
        self._fenced: dict[bytes, None] = {}
        self._untold: list[Hole] = []
        self._oldest = 0

    @classmethod
    def load(
        cls, log: Log, name: str, now_us: int | None = None, clock: Clock | None = None
    ) -> Consumer:
        """Return the consumer that was saved as `name`; what it had handed out is delivered again.

        Delays last no longer than they had to when it was saved, wherever the clock is set. None: `now_us` is by that clock.

        Raises:
            KeyError: there is none.
            CursorDamaged: its state is not what was saved.
            LogDamaged: the row cannot be read.
        """
        data = log.cursors.get(name)
        if data is None:
            raise KeyError(name)
        state = cursor.decode(name, data)
        try:
            consumer = cls(log, name, state.settings, state.start, now_us or 0, clock)
            if not state.start <= state.position <= log.next:
                raise ValueError("it is ahead of its log")
            ahead_us = 0
            if now_us is not None:
                ahead_us = max(consumer._table.wall_us, state.saved_us) - now_us
            consumer._table.restore(state.records, state.dead, log.next, ahead_us)
        except (ValueError, LookupError) as err:
            raise CursorDamaged(name, f"it does not fit together or its log: {err}") from err
        consumer._position = state.position
        consumer._due = state.due
        log.cursors.listed(state.due[0])
        consumer.counts = state.counts
        return consumer

    # Handing out

    def take(self, worker: bytes, max_bytes: int, max_messages: int, now_us: int) -> Taken:
        """Hand messages to `worker`: what failed before, then deferred records that are due, then new ones.

        At least one message if there is any for it. A record of which not all fits into `max_messages` is cut, and what is left of it
        comes next, to whoever takes; one that does not fit into `max_bytes` comes first, or it would never go.

        Raises:
            ValueError: a limit is below 1.
            LogDamaged: the log cannot be read there, and nothing was handed out.
        """
        if max_bytes < 1 or max_messages < 1:
            raise ValueError("max_bytes, max_messages: at least 1")
        self.expire(now_us)
        if not self._admit(worker):
            return Taken([], 0, 0, fenced=True)
        basket = _Basket(worker, max_bytes, max_messages)
        self._tell(basket)
        try:
            if self._take_ready(basket) and self._take_due(basket):
                self._take_new(basket)
        except LogDamaged:
            if not basket.items:
                raise  # else the next call does: these are handed out
        return Taken(basket.items, basket.bytes, basket.messages, basket.more)

    # Settling

    def ack(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Settle the messages from `first` until `next`, whoever holds them, and return how many were not before.

        An ack is a fact, also from a worker that was fenced or whose lease ended: it did the work, and if another has the message
        by now it is done twice, as at least once allows. The rest counts as late.

        Raises:
            ValueError: one of them was never handed out; nothing was settled. That includes messages handed out after
                the last `save` before a crash.
        """
        self._table.tell_time(now_us)
        found = self._handed(first, next)
        self._confirm(worker, found)
        settled = sum(self._table.settle(record, mask) for record, mask in found)
        self._table.tidy(first, next)
        self.counts.late += next - first - settled
        return settled

    def ack_through(self, worker: bytes, offset: int, now_us: int) -> int:
        """Settle what was handed out up to and including `offset`, and return how many messages that were.

        In a group only what `worker` holds. A deferred record comes later than its offset says, so it is settled
        only if `offset` is in it. Raises ValueError if `offset` was never handed out.
        """
        self._table.tell_time(now_us)
        self._handed(offset, offset + 1)
        settled = 0
        for record in self._table.within(0, offset + 1):
            if record.deferred and offset >= record.next:
                continue
            mask = record.mask(0, offset + 1) & ~record.fresh
            if self.settings.group:
                mask &= record.bits([part for part in record.parts if part.worker == worker])
            settled += self._table.settle(record, mask)
        self._table.tidy(0, offset + 1)
        self.counts.late += not settled
        return settled

    def nack(
        self, worker: bytes, first: int, next: int, delay_us: int, reason: str, now_us: int
    ) -> int:
        """Deliver again after `delay_us` what `worker` holds from `first` until `next`; return how many messages.

        After `max_deliver` deliveries they are dead letters with `reason`, cut at 1024 bytes. What others hold stays with them.

        Raises:
            ValueError: never handed out, or `delay_us` is not between 0 and 30 days.
        """
        if not 0 <= delay_us <= MAX_DELAY_US:
            raise ValueError(f"delay_us: {delay_us} is not between 0 and {MAX_DELAY_US}")
        self._table.tell_time(now_us)
        text = reason.encode(errors="replace")[: cursor.MAX_REASON_BYTES].decode(errors="ignore")
        count = 0
        for record, mask in self._handed(first, next):
            for part in self._table.split(record, mask, worker):
                count += part.bits.bit_count()
                self._table.had(part)
                self._table.again(part, self._now + delay_us, text)
        return count

    def touch(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Start the ack timeout anew for what `worker` holds from `first` until `next`; return how many messages.

        Raises ValueError if one was never handed out.
        """
        self._table.tell_time(now_us)
        count = 0
        for record, mask in self._handed(first, next):
            for part in self._table.split(record, mask, worker):
                count += part.bits.bit_count()
                self._table.had(part)
                self._table.lease(part)
        return count

    def had(self, worker: bytes, first: int, next: int, now_us: int) -> None:
        """`worker` has what it was handed from `first` until `next`. Raises ValueError if one was never handed out."""
        self._table.tell_time(now_us)
        self._confirm(worker, self._handed(first, next))

    def confirm(self, worker: bytes) -> None:
        """`worker` asks for more: it has what it was handed."""
        self._table.confirm(worker)

    def _confirm(self, worker: bytes, found: list[tuple[Open, int]]) -> None:
        for record, mask in found:
            for part in record.parts:
                if part.worker == worker and part.bits & mask:
                    self._table.had(part)

    # Failing

    def expire(self, now_us: int) -> None:
        """Let leases end and delays pass, up to `now_us`."""
        self._table.tell_time(now_us)
        self._table.expire()
        if self._log.oldest > self._oldest:
            self._oldest = self._log.oldest
            for record in self._table.within(0, self._oldest):
                self._lose(record, Reason.RETENTION)

    def worker_gone(self, worker: bytes, now_us: int) -> None:
        """What `worker` holds is due again at once. What it has confirmed was delivered, and counts so."""
        self._table.tell_time(now_us)
        self._table.drop(worker)
        self._fenced.pop(worker, None)
        if worker == self._worker:
            self._worker = None

    def again(self, worker: bytes, now_us: int, *, counted: bool = True) -> None:
        """The last answer to `worker` did not reach it: what was in it is due again at once.

        `counted`: it may be that message which breaks whoever gets it.
        """
        self._table.tell_time(now_us)
        self._table.undo(worker, counted=counted)

    @property
    def position(self) -> int:
        """The offset of the next new message."""
        return self._position

    def dead_letters(self) -> list[Dead]:
        """Return the messages that were given up, in that order. They are settled by `forget_dead` only."""
        return list(self._table.dead)

    def forget_dead(self, n: int) -> None:
        """Settle the first `n` dead letters: they are kept elsewhere. Raises ValueError if there are fewer."""
        self._table.forget_dead(n)

    @property
    def deadline_us(self) -> int | None:
        """When the next lease or delay ends or deferred record is due: call `expire`, and let workers take.

        None = not by time alone. After `expire` it lies ahead. Raises LogDamaged.
        """
        coming = self._next_deferred()
        high_us = self._table.high_us
        if coming is not None and coming[0] <= high_us:  # these wait for a worker, not for time
            later = self._log.due(MAX_OFFSET, after=(high_us, MAX_OFFSET), limit=1)
            coming = later[0] if later else None
        times = [self._table.next_us, coming[0] - high_us + self._now if coming else None]
        return min((time for time in times if time is not None), default=None)

    # State

    @property
    def dirty(self) -> bool:
        """`save` has something to write."""
        return self._table.dirty and self.settings.durable

    def save(self, sync: bool = False) -> None:
        """Write the cursor if it changed. Without `sync` a power cut may bring the former one back.

        Raises CursorsFull or LogWriteFailed, and is then still dirty.
        """
        if self.dirty:
            state = State(
                self.settings,
                self._start,
                self._position,
                self._due,
                self._table.kept(self._clock.wall_ahead_us),
                list(self._table.dead),
                self.counts,
                max(0, self._table.wall_us),
            )
            self._log.cursors.put(self.name, cursor.encode(state), sync=sync)
            self._table.dirty = False

    def info(self) -> Info:
        """Return how far it is."""
        table = self._table
        return Info(
            floor=table.floor(self._position),
            position=self._position,
            lag=self._log.next - self._position + table.open,
            pending=table.pending,
            redelivering=table.handed_out - table.pending - table.given_up,
            dead=table.given_up,
            workers=len(table.held),
            counts=self.counts,
        )

    @property
    def _now(self) -> int:
        return self._table.now_us

    def _early_us(self, record: Record) -> int:
        """Return how long `record` has to wait yet; 0 if its time has come, or had when it was stored."""
        if record.due_us <= record.stored_us:
            return 0
        return max(0, record.due_us - self._table.wall_us - self._log.steps.grace_us(record.first))

    # Inside: handing out

    def _admit(self, worker: bytes) -> bool:
        """Return whether `worker` may take; a new one of a consumer that is no group takes over."""
        if self.settings.group or worker == self._worker:
            return True
        if worker in self._fenced:
            return False
        former, self._worker = self._worker, worker
        if former is not None:
            self.worker_gone(former, self._now)
            self._fenced[former] = None
            if len(self._fenced) > MAX_FENCED:
                del self._fenced[next(iter(self._fenced))]
        return True

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
                if fresh and not self._may_hand_out(fresh):
                    # It waits for acks, and those perhaps for redeliveries behind it.
                    aside.append(heapq.heappop(self._table.ready))
                    continue
                if not self._may_hold(basket.worker, wanted.bit_count()):
                    return False
                item = self._log.read(record.first, 1, now_us=self._table.wall_us).items[0]
                if not isinstance(item, Record):
                    assert isinstance(item, Hole)
                    self._lose(record, item.reason)
                    self._tell(basket)
                    continue
                if not basket.fits(len(item.body) + ENVELOPE_BYTES):
                    return False
                parts = self._table.cut(record, parts, basket.room)
                if record.key is not None:
                    heapq.heappop(self._table.ready)
                    record.queued = False
                self._give(item, record, parts, basket)
        finally:
            for first in aside:
                heapq.heappush(self._table.ready, first)
        return not basket.full()

    def _take_due(self, basket: _Basket) -> bool:
        """Hand out deferred records that have come due; return whether the basket has room for others."""
        coming = self._next_deferred()
        if coming is None or coming[0] > self._table.high_us:
            return True
        found = self._log.due(self._table.high_us, after=self._due, limit=DUE_BATCH)
        for pair in found:
            if basket.full():
                return False
            if pair[1] >= self._start:
                item = self._log.read(pair[1], 1, now_us=self._table.wall_us).items[0]
                if isinstance(item, Hole) and item.reason is Reason.DAMAGED:
                    self.counts.missed += 1  # how many it held cannot be read any more
                    basket.items.append(Hole(pair[1], pair[1] + 1, item.reason))
                elif not isinstance(item, Record):
                    self.counts.skipped += item.next - pair[1]
                elif not self._take_record(item, item.first, basket, deferred=True):
                    return False
            self._due = pair
            self._log.cursors.listed(pair[0])
            self._table.dirty = True
        basket.more = len(found) == DUE_BATCH
        return not basket.more

    def _take_new(self, basket: _Basket) -> None:
        size = FIRST_READ_BYTES
        for _ in range(READS):
            if self._position >= self._log.next or basket.full():
                return
            room = min(size, basket.max_bytes - basket.bytes)
            chunk = self._log.read(self._position, room, now_us=self._table.wall_us, deferred=False)
            for item in chunk.items:
                if not self._pass(item, basket):
                    return
                self._position = item.next
                self._table.dirty = True
            size *= 2
        basket.more = self._position < self._log.next

    def _pass(self, item: Item, basket: _Basket) -> bool:
        """Deal with what is at the read position; return whether to go on behind it."""
        first = max(item.first, self._position)
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
            cause = f"not deliverable: a record that claims {item.count} messages"
            basket.items.append(Gap(item.first, item.count, cause, item.stored_us))
            basket.messages += 1
            self.counts.skipped += item.count
            return True
        key = item.key_hash[: cursor.KEY_BYTES] if self.settings.group and item.key_hash else None
        weight = cursor.weight(item.count, key)
        if self._table.records and self._table.weight + weight > cursor.MAX_RECORDS_BYTES:
            return False
        record = Open(item.first, item.count, key, deferred)
        bits = record.mask(start, item.next)
        early_us = self._early_us(item) if item.due_us else 0
        if early_us or self._table.behind(key):
            if self._table.behind(key) and self._table.blocked >= MAX_BLOCKED:
                return False
            # One that was listed before its time, because the clock was set back, waits here as if it had failed.
            self._table.add(record, [(bits, 0, self._now + early_us if early_us else 0, 0)])
            return True
        count = min(bits.bit_count(), basket.room)
        if not self._may_hand_out(count) or not self._may_hold(basket.worker, count):
            return False
        if not basket.fits(len(item.body) + ENVELOPE_BYTES):
            return False
        self._table.add(record, [(bits, 0, 0, 0)])
        self._give(item, record, self._table.cut(record, list(record.parts), count), basket)
        self._table.wait(record)
        return True

    def _may_hand_out(self, count: int) -> bool:
        """Return whether `count` new messages are within `max_pending`; alone, a record always is."""
        return (
            not self._table.handed_out
            or self._table.handed_out + count <= self.settings.max_pending
        )

    def _may_hold(self, worker: bytes, count: int) -> bool:
        held = self._table.held.get(worker, 0)
        return not held or held + count <= self.settings.max_pending_per_worker

    def _give(self, item: Record, record: Open, parts: list[Part], basket: _Basket) -> None:
        self.counts.redelivered += sum(part.bits.bit_count() for part in parts if part.handed)
        for part in self._table.give(record, parts, basket.worker):
            count = part.bits.bit_count()
            basket.items.append(Delivery(item, part.bits, part.deliveries + 1))
            basket.messages += count
            basket.bytes += len(item.body) + ENVELOPE_BYTES

    def _tell(self, basket: _Basket) -> None:
        """Pass on what retention took since the last time."""
        basket.items.extend(self._untold)
        self._untold.clear()

    # Inside: settling

    def _handed(self, first: int, end: int) -> list[tuple[Open, int]]:
        """Return the records of these offsets and their messages. Raises ValueError if one was never handed out."""
        if not 0 <= first < end:
            raise ValueError(f"first, next: from {first} until {end} there is nothing")
        found = []
        known = max(first, self._position)
        for record in self._table.within(first, end):
            mask = record.mask(first, end)
            if mask & record.fresh:
                raise ValueError(f"offsets {first} to {end}: not all of them were handed out")
            found.append((record, mask))
            if record.first <= known < record.next:
                known = record.next
        if known < end and not self._came_due(known, end):
            raise ValueError(f"offsets {first} to {end}: {known} was never handed out")
        return found

    def _came_due(self, first: int, end: int) -> bool:
        """Return whether these offsets, ahead of the read position, are of a deferred record that is settled."""
        if first >= self._log.next:
            return False
        item = self._log.read(first, 1, now_us=0).items[0]
        return (
            isinstance(item, Record)
            and item.deferred
            and item.first >= self._start
            and (item.due_us, item.first) <= self._due
            and end <= item.next
        )

    def _lose(self, record: Open, reason: Reason) -> None:
        """Settle what waits of `record`: it is no longer in the log. What is held may still be acked."""
        gone = record.bits([part for part in record.parts if part.waiting])
        settled = self._table.settle(record, gone)
        self._table.tidy(record.first, record.next)
        if reason not in (Reason.RETENTION, Reason.DAMAGED):
            self.counts.skipped += settled
        elif settled:
            self.counts.missed += settled
            last = self._untold[-1] if self._untold else None
            if last is not None and (last.next, last.reason) == (record.first, reason):
                self._untold[-1] = Hole(last.first, record.next, reason)
            else:
                self._untold.append(Hole(record.first, record.next, reason))

    def _next_deferred(self) -> tuple[int, int] | None:
        """Return (due time, offset) of the first deferred record that was not taken."""
        known = (self._log.next, *self._due)
        if self._coming is None or self._coming[0] != known:
            found = self._log.due(MAX_OFFSET, after=self._due, limit=1)
            self._coming = (known, found[0] if found else None)
        return self._coming[1]
