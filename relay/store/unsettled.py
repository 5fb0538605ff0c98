"""The messages that a consumer has read but not settled: which worker holds them, which wait, and
the queue of each key (sans-IO).

Every step moves bitmaps between the parts of a record (see `parts`), never single messages, except
for dead letters. At most 128 KiB of dead letters are listed; further ones are neither delivered nor
listed until some are stored elsewhere.

A dispatch counts as a *try* until the worker confirms it, by asking for more or by settling or
touching these messages. Then it counts as a *delivery*. So messages sent to a worker that had
already left do not come closer to being dead letters.

The records of a key queue in the order in which they were added, and only the first may be
dispatched. The next one follows when it is settled or dead. Records without a key have no order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from relay.store import cursor
from relay.store.clock import Clock
from relay.store.cursor import Dead, Settings, StoredRecord
from relay.store.parts import OpenRecord, Part, lowest

TIMED_OUT: Final = "not acknowledged in time"
WORKER_LEFT: Final = "not acknowledged: the worker left"
MAX_TRIES: Final = 10
"""If a consumer has dead letters, a message dispatched this often and never confirmed becomes one:
it may crash its workers.
"""
DISPATCHED_US: Final = 1
"""The due time, on disk, of messages that were dispatched and not yet delivered."""


class Unsettled:
    """The table of unsettled messages of one consumer.

    `now_us` and `awake_us` never go back; delays use the first, leases the second (see `clock`).
    `dirty`: the stored records or `dead` changed.
    """

    def __init__(self, settings: Settings, now_us: int, clock: Clock) -> None:
        self.now_us = now_us
        self.awake_us = now_us + clock.awake_ahead_us
        self._clock = clock
        self.dirty = True
        self.records: dict[int, OpenRecord] = {}
        """First offset -> record."""
        self.firsts: list[int] = []
        """The keys of `records`, sorted."""
        self.ready: list[int] = []
        """Heap of the first offsets of records that may have something to dispatch.

        Each is in it at most once.
        """
        self.held: dict[bytes, int] = {}
        """Worker -> number of messages that it holds."""
        self.dead: deque[Dead] = deque()
        self.open = 0
        """Messages in the table."""
        self.dispatched = 0
        """Messages in the table that were dispatched at least once."""
        self.weight = 0
        """Upper bound of the bytes that the records can take in the cursor."""
        self.blocked = 0
        """Records that wait behind another of the same key."""
        self._ack_timeout_us = settings.ack_timeout_us
        self._max_deliver = settings.max_deliver
        self._keys: dict[bytes, deque[OpenRecord]] = {}
        self._timers: list[tuple[int, int]] = []
        self._max_timers = 1024
        self._leases: OrderedDict[Part, None] = (
            OrderedDict()
        )  # all leases last equally long, so they are in order of their end
        self._unconfirmed: dict[bytes, list[Part]] = {}
        """Worker -> parts dispatched since it last confirmed.

        Some may be settled or held by another worker by now.
        """
        self._doomed: deque[Part] = deque()
        """Parts that are given up, but not listed as dead letters yet."""
        self._dead_bytes = 0

    @property
    def pending(self) -> int:
        """Number of messages that workers hold."""
        return sum(self.held.values())

    @property
    def given_up(self) -> int:
        """Number of dead letters, listed or not."""
        return len(self.dead) + sum(part.bits.bit_count() for part in self._doomed)

    @property
    def next_us(self) -> int | None:
        """When the next lease or delay ends, on the clock of `now_us`; None if there is none."""
        times = [self._timers[0][0]] if self._timers else []
        if self._leases:
            times.append(next(iter(self._leases)).due_us - self.awake_us + self.now_us)
        return min(times, default=None)

    # Time

    @property
    def wall_us(self) -> int:
        """The time of the wall clock."""
        return self.now_us + self._clock.wall_ahead_us

    @property
    def high_us(self) -> int:
        """The time of the wall clock if it had never been set back."""
        return self.now_us + self._clock.high_ahead_us

    def update_time(self, now_us: int) -> None:
        """Advance to `now_us`, a value of `Clock.elapsed_us`."""
        self.now_us = max(self.now_us, now_us)
        self.awake_us = max(self.awake_us, self.now_us + self._clock.awake_ahead_us)

    # Finding

    def within(self, first: int, end: int) -> list[OpenRecord]:
        """Return the records that contain offsets from `first` until `end`, in order."""
        low = max(bisect_right(self.firsts, first) - 1, 0)
        firsts = self.firsts[low : bisect_left(self.firsts, end)]
        return [self.records[first] for first in firsts if self.records[first].next > first]

    def requeue(self, record: OpenRecord) -> None:
        """Make the rest of `record` available to the next `take`, or queue it behind its key."""
        self._requeue(record)

    def revive(self, record: OpenRecord, bits: int) -> None:
        """Make messages of `record` that are settled deliverable again, as if they were new.

        A record with a key queues behind those of its key that wait.
        """
        if record.first in self.records:
            record.parts.append(Part(record, bits, 0, 0))
            self.open += bits.bit_count()
            if record.key is not None:
                queue = self._keys.setdefault(record.key, deque())
                if record not in queue:
                    self.blocked += len(queue) > 0
                    queue.append(record)
        else:
            self.add(record, [(bits, 0, 0, 0)])
        self._requeue(record)
        self.dirty = True

    def change(self, settings: Settings) -> None:
        """Apply other settings. The ack timeout of everything that workers hold starts again."""
        self._ack_timeout_us = settings.ack_timeout_us
        self._max_deliver = settings.max_deliver
        for part in self._leases:
            part.due_us = self.awake_us + self._ack_timeout_us
        self.dirty = True

    def must_wait(self, key: bytes | None) -> bool:
        """Return whether a new record of `key` would have to wait behind another."""
        return key in self._keys

    # Dispatching

    def add(self, record: OpenRecord, parts: list[tuple[int, int, int, int]]) -> None:
        """Add `record`, whose waiting messages are given as (bits, deliveries, due time, tries)."""
        self.records[record.first] = record
        insort(self.firsts, record.first)
        self.weight += cursor.weight(record.count, record.key)
        for bits, deliveries, due_us, tries in parts:
            record.parts.append(Part(record, bits, deliveries, due_us, tries))
            self.open += bits.bit_count()
            if deliveries or tries:
                self.dispatched += bits.bit_count()
            if due_us > self.now_us:
                self._time(due_us, record)
        if record.key is not None and record.parts:
            queue = self._keys.setdefault(record.key, deque())
            self.blocked += len(queue) > 0
            queue.append(record)

    def eligible(self, record: OpenRecord) -> list[Part]:
        """Return the parts that may be dispatched now.

        A keyed record is dispatched with all its waiting parts, or not at all.
        """
        waiting = [part for part in record.parts if part.waiting]
        if record.key is None or not waiting:
            return [part for part in waiting if part.due_us <= self.now_us]
        if self._keys[record.key][0] is not record:
            return []
        held = any(part.worker is not None for part in record.parts)
        if held or any(part.due_us > self.now_us for part in waiting):
            return []
        return waiting

    def cut(self, record: OpenRecord, parts: list[Part], most: int) -> list[Part]:
        """Return the first `most` messages of the waiting `parts`, split from the rest, which
        continues to wait.
        """
        bits = record.bits(parts)
        wanted = lowest(bits, most)
        if wanted == bits:
            return parts
        found = []
        for part in parts:
            rest = part.bits & ~wanted
            if rest == part.bits:
                continue
            if rest:
                part.split_off(rest)
            found.append(part)
        return found

    def dispatch(self, record: OpenRecord, parts: Sequence[Part], worker: bytes) -> list[Part]:
        """Dispatch `parts` of `record` to `worker`.

        Parts with the same number of deliveries are merged. Returns them in the order of their messages.
        """
        by_count: dict[int, Part] = {}
        for part in list(parts):
            same = by_count.setdefault(part.deliveries, part)
            if not part.dispatched:
                self.dispatched += part.bits.bit_count()
            if same is not part:
                same.bits |= part.bits
                same.tries = max(same.tries, part.tries)
                record.parts.remove(part)
        unconfirmed = self._unconfirmed.setdefault(worker, [])
        for part in by_count.values():
            count = part.bits.bit_count()
            part.tries += 1
            part.dispatched = True
            part.confirmed = False
            part.worker = worker
            unconfirmed.append(part)
            self.held[worker] = self.held.get(worker, 0) + count
            self.lease(part)
        self.dirty = True
        return sorted(by_count.values(), key=lambda part: part.bits & -part.bits)

    def lease(self, part: Part) -> None:
        """Restart the ack timeout of `part`, which a worker holds."""
        part.due_us = self.awake_us + self._ack_timeout_us
        self._leases[part] = None
        self._leases.move_to_end(part)

    def confirm(self, worker: bytes) -> None:
        """Count everything that was dispatched to `worker` as delivered."""
        for part in self._unconfirmed.pop(worker, ()):
            if part.worker == worker:
                self.mark_delivered(part)

    def mark_delivered(self, part: Part) -> None:
        """Count the last try of `part` as a delivery, because its worker has confirmed it."""
        if not part.confirmed:
            part.confirmed = True
            part.tries -= 1
            part.deliveries += 1
            self.dirty = True

    # Settling

    def settle(self, record: OpenRecord, mask: int) -> int:
        """Settle messages of `record` that are not given up, and return how many. Call `tidy` afterwards."""
        settled = 0
        for part in list(record.parts):
            bits = part.bits & mask
            if not bits or part.reason is not None:
                continue
            if part.worker is not None:
                self._release(part, bits)
            count = bits.bit_count()
            settled += count
            if part.dispatched:
                self.dispatched -= count
            part.bits ^= bits
            if not part.bits:
                part.worker = None
                record.parts.remove(part)
                self._leases.pop(part, None)
        if settled:
            self.open -= settled
            self.dirty = True
            self._forget_if_settled(record)
            if record.key is not None:
                self._requeue(record)
        return settled

    def tidy(self, first: int, end: int) -> None:
        """Remove from `firsts` the records that were settled between these offsets, in one step
        instead of one by one.
        """
        low = max(bisect_right(self.firsts, first) - 1, 0)
        high = bisect_left(self.firsts, end)
        firsts = self.firsts[low:high]
        self.firsts[low:high] = [first for first in firsts if first in self.records]

    def forget_dead(self, n: int) -> None:
        """Settle the first `n` listed dead letters. Raises ValueError if there are fewer."""
        if not 0 <= n <= len(self.dead):
            raise ValueError(f"n: {n} is not between 0 and {len(self.dead)}")
        for _ in range(n):
            dead = self.dead.popleft()
            self._dead_bytes -= cursor.dead_weight(dead)
            (record,) = self.within(dead.offset, dead.offset + 1)
            record.dead ^= 1 << (dead.offset - record.first)
            self.open -= 1
            self.dispatched -= 1
            self._forget_if_settled(record)
            self.tidy(record.first, record.next)
            self.dirty = True
        self._list_dead_letters()

    def floor(self, position: int) -> int:
        """Return the first unsettled offset that is not in a deferred record; `position` if there is none."""
        for first in self.firsts:
            record = self.records[first]
            if not record.deferred:
                bits = record.open
                return first + (bits & -bits).bit_length() - 1
        return position

    # Failing

    def split(self, record: OpenRecord, mask: int, worker: bytes) -> list[Part]:
        """Return the parts of these messages that `worker` holds, split from the rest, so that they
        can be leased or redelivered.
        """
        found = []
        for part in list(record.parts):
            bits = part.bits & mask
            if part.worker != worker or not bits:
                continue
            if bits != part.bits:
                confirmed = part.confirmed
                part = part.split_off(bits)
                if not confirmed:
                    self._unconfirmed.setdefault(worker, []).append(part)
            found.append(part)
        return found

    def redeliver(self, part: Part, due_us: int, reason: str) -> None:
        """Take `part` from its worker.

        It is due again at `due_us`, or given up with `reason` after too many deliveries.
        """
        self._release(part, part.bits)
        self._leases.pop(part, None)
        part.worker = None
        part.due_us = due_us
        most = self._max_deliver
        if most and part.tries >= max(most, MAX_TRIES):
            reason = f"dispatched {part.tries} times, but no worker confirmed it"
        if most and (part.deliveries >= most or part.tries >= max(most, MAX_TRIES)):
            part.reason = reason
            self._doomed.append(part)
            self._list_dead_letters()
        elif due_us > self.now_us:
            self._time(due_us, part.record)
        self._requeue(part.record)
        self.dirty = True

    def give_back(self, part: Part) -> None:
        """Redeliver `part` at once, and do not count its last dispatch: the worker had not begun with it."""
        if part.confirmed:
            part.deliveries -= 1
        else:
            part.tries -= 1
        self.redeliver(part, 0, WORKER_LEFT)

    def expire(self) -> None:
        """End leases and delays that have passed."""
        while self._leases:
            part = next(iter(self._leases))
            if part.due_us > self.awake_us:
                break
            self.redeliver(part, 0, TIMED_OUT)
        while self._timers and self._timers[0][0] <= self.now_us:
            record = self.records.get(heapq.heappop(self._timers)[1])
            if record is not None:
                self._push_ready(record)

    def worker_left(self, worker: bytes) -> None:
        """Redeliver everything that `worker` holds at once."""
        if worker in self.held:
            for part in [part for part in self._leases if part.worker == worker]:
                self.redeliver(part, 0, WORKER_LEFT)

    def answer_lost(self, worker: bytes, *, counted: bool) -> None:
        """Redeliver at once what was dispatched to `worker` and not confirmed, because it never arrived.

        `counted`: it still counts as a try. Otherwise it is known that the worker did not receive it.
        """
        for part in self._unconfirmed.pop(worker, ()):
            if part.worker == worker and not part.confirmed:
                part.tries -= not counted
                self.redeliver(part, 0, WORKER_LEFT)

    # The cursor

    def stored_records(self, ahead_us: int) -> list[StoredRecord]:
        """Return the records for the cursor, where held messages, and those given up but not listed, are
        stored as waiting.

        Due times are stored in wall clock time, which is `ahead_us` ahead of `now_us`.
        """
        kept = []
        last = 0
        for first in self.firsts:
            record = self.records[first]
            kinds: dict[tuple[int, int], int] = {}
            for part in record.parts:
                due_us = part.due_us + ahead_us if part.waiting and part.due_us else 0
                if not part.deliveries and part.dispatched:
                    due_us = due_us or DISPATCHED_US
                kind = (part.deliveries, max(0, due_us))
                kinds[kind] = kinds.get(kind, 0) | part.bits
            parts = cursor.pack_parts(record.count, kinds)
            kept.append(
                StoredRecord(first - last, record.count, record.deferred, record.key, parts)
            )
            last = first
        return kept

    def restore(
        self, records: list[StoredRecord], dead: list[Dead], end: int, ahead_us: int
    ) -> None:
        """Fill the empty table from a cursor whose due times are `ahead_us` ahead of `now_us`.

        Raises ValueError or LookupError if the records are inconsistent or extend past `end`.
        """
        first = 0
        for kept in records:
            first += kept.gap
            if not 0 < kept.count <= cursor.MAX_COUNT or first + kept.count > end:
                raise ValueError(
                    f"the record at {first} has {kept.count} messages; 1 to {cursor.MAX_COUNT} below offset {end} are possible"
                )
            record = OpenRecord(first, kept.count, kept.key, kept.deferred)
            parts = []
            for bitmap, deliveries, due_us in kept.parts:
                tries = int(due_us == DISPATCHED_US and not deliveries)
                due_us = 0 if tries or not due_us else max(1, due_us - ahead_us)
                parts.append((cursor.unpack_bits(kept.count, bitmap), deliveries, due_us, tries))
            self.add(record, parts)
            if parts:
                self._push_ready(record)
        for letter in dead:
            record = self.records[self.firsts[bisect_right(self.firsts, letter.offset) - 1]]
            record.dead |= record.mask(letter.offset, letter.offset + 1)
            self.dead.append(letter)
            self._dead_bytes += cursor.dead_weight(letter)
            self.open += 1
            self.dispatched += 1
        self.dirty = False

    # Inside

    def _release(self, part: Part, bits: int) -> None:
        assert part.worker is not None
        left = self.held[part.worker] - bits.bit_count()
        if left:
            self.held[part.worker] = left
        else:
            del self.held[part.worker]
            self._unconfirmed.pop(part.worker, None)

    def _time(self, due_us: int, record: OpenRecord) -> None:
        heapq.heappush(self._timers, (due_us, record.first))
        if (
            len(self._timers) > self._max_timers
        ):  # drop the timers of records that were settled since
            self._timers = [
                (part.due_us, each.first)
                for each in self.records.values()
                for part in each.parts
                if part.waiting and part.due_us > self.now_us
            ]
            heapq.heapify(self._timers)
            self._max_timers = 1024 + 2 * len(self._timers)

    def _requeue(self, record: OpenRecord) -> None:
        """Make `record` ready again, or the next of its key if it is done."""
        if record.key is not None:
            queue = self._keys.get(record.key, deque())
            while queue and all(part.reason is not None for part in queue[0].parts):
                queue.popleft()
                self.blocked -= len(queue) > 0
            if not queue:
                self._keys.pop(record.key, None)
                return
            record = queue[0]
        if any(part.waiting for part in record.parts):
            self._push_ready(record)

    def _push_ready(self, record: OpenRecord) -> None:
        if not record.queued:
            record.queued = True
            heapq.heappush(self.ready, record.first)

    def _list_dead_letters(self) -> None:
        """Move given-up messages to the listed dead letters, as far as there is room for them."""
        while self._doomed and self._dead_bytes < cursor.MAX_DEAD_BYTES:
            part = self._doomed[0]
            record = part.record
            bit = part.bits & -part.bits
            part.bits ^= bit
            record.dead |= bit
            dead = Dead(record.first + bit.bit_length() - 1, part.deliveries, part.reason or "")
            self.dead.append(dead)
            self._dead_bytes += cursor.dead_weight(dead)
            if not part.bits:
                self._doomed.popleft()
                record.parts.remove(part)

    def _forget_if_settled(self, record: OpenRecord) -> None:
        if not record.parts and not record.dead:
            del self.records[record.first]
            self.weight -= cursor.weight(record.count, record.key)
