"""What a consumer has read and not settled: who holds it, what waits, and what comes next of each key (sans-IO).

Every step moves bitmaps between the parts of a record (see `parts`), never single messages, but for dead letters. Of these
128 KiB are listed; further ones are neither delivered nor listed until some are confirmed.

A hand-out is a *try* until the worker has confirmed it, by asking for more or by a word about these messages; then it is a
*delivery*. So messages that went to a worker that was gone already do not come nearer to being dead letters.

The records of a key queue in the order in which they were added, and only the first may be handed out: the next one's turn comes
when it is settled or dead. A record without a key is free.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from relay.store import cursor
from relay.store.clock import Clock
from relay.store.cursor import Dead, Kept, Settings
from relay.store.parts import OpenRecord, Part, lowest

TIMED_OUT: Final = "not acknowledged in time"
WORKER_LEFT: Final = "not acknowledged: the worker left"
MAX_TRIES: Final = 10
"""Where there are dead letters, what was handed out so often and never confirmed is one, too: it may end whoever gets it."""
DISPATCHED_US: Final = 1
"""The due time, on disk, of what was handed out and not yet delivered. Older stores take it for one that has come."""


class Unsettled:
    """The table. `now_us` and `awake_us` never fall; `dirty` says that `kept` or `dead` changed.

    Delays are by the first, leases by the second (see `clock`).
    """

    def __init__(self, settings: Settings, now_us: int, clock: Clock) -> None:
        self.now_us = self.awake_us = now_us
        self._clock = clock
        self.dirty = True
        self.records: dict[int, OpenRecord] = {}
        """By first offset."""
        self.firsts: list[int] = []
        """The same offsets, sorted."""
        self.ready: list[int] = []
        """Heap of records that may have something to hand out; each once."""
        self.held: dict[bytes, int] = {}
        """Messages by worker."""
        self.dead: deque[Dead] = deque()
        self.open = 0
        """Messages in the table."""
        self.dispatched = 0
        """Of these, handed out at least once."""
        self.weight = 0
        """The most bytes that the records take in the cursor."""
        self.blocked = 0
        """Records behind another of their key."""
        self._ack_timeout_us = settings.ack_timeout_us
        self._max_deliver = settings.max_deliver
        self._keys: dict[bytes, deque[OpenRecord]] = {}
        self._timers: list[tuple[int, int]] = []
        self._max_timers = 1024
        self._leases: OrderedDict[Part, None] = OrderedDict()  # all last equally long: in order
        self._unconfirmed: dict[bytes, list[Part]] = {}
        """By worker: what it was handed since it last asked. Some may be settled, or another's, by now."""
        self._doomed: deque[Part] = deque()
        """Given up, and not listed yet as dead."""
        self._dead_bytes = 0

    @property
    def pending(self) -> int:
        """Messages that workers hold."""
        return sum(self.held.values())

    @property
    def given_up(self) -> int:
        """Messages that are dead letters, listed or not."""
        return len(self.dead) + sum(part.bits.bit_count() for part in self._doomed)

    @property
    def next_us(self) -> int | None:
        """When the next lease or delay ends, by `now_us`."""
        times = [self._timers[0][0]] if self._timers else []
        if self._leases:
            times.append(next(iter(self._leases)).due_us - self.awake_us + self.now_us)
        return min(times, default=None)

    # Time

    @property
    def wall_us(self) -> int:
        """What the wall clock says."""
        return self.now_us + self._clock.wall_ahead_us

    @property
    def high_us(self) -> int:
        """What it would say if it had never been set back."""
        return self.now_us + self._clock.high_ahead_us

    def update_time(self, now_us: int) -> None:
        """It is `now_us` by `Clock.elapsed_us`, or later."""
        self.now_us = max(self.now_us, now_us)
        self.awake_us = max(self.awake_us, self.now_us + self._clock.awake_ahead_us)

    # Finding

    def within(self, first: int, end: int) -> list[OpenRecord]:
        """Return the records that have offsets from `first` until `end`, in order."""
        low = max(bisect_right(self.firsts, first) - 1, 0)
        firsts = self.firsts[low : bisect_left(self.firsts, end)]
        return [self.records[first] for first in firsts if self.records[first].next > first]

    def wait(self, record: OpenRecord) -> None:
        """What is left of `record` waits for whoever takes next, or for its turn."""
        self._requeue(record)

    def behind(self, key: bytes | None) -> bool:
        """Return whether a record of `key` would have to wait."""
        return key in self._keys

    # Dispatcher out

    def add(self, record: OpenRecord, parts: list[tuple[int, int, int, int]]) -> None:
        """Take `record` in, its messages waiting as (bits, deliveries, due time, tries)."""
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
        """Return the parts that may be handed out: of a keyed record all that are left, or none."""
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
        """Return of waiting `parts` those of the first `most` messages, parted from the rest, which goes on waiting."""
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
                part.rest(rest)
            found.append(part)
        return found

    def dispatch(self, record: OpenRecord, parts: Sequence[Part], worker: bytes) -> list[Part]:
        """Hand `parts` of `record` to `worker`; return them by message, those of one count as one."""
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
        """Start the ack timeout of `part`, which a worker holds, anew."""
        part.due_us = self.awake_us + self._ack_timeout_us
        self._leases[part] = None
        self._leases.move_to_end(part)

    def confirm(self, worker: bytes) -> None:
        """`worker` has what it was handed."""
        for part in self._unconfirmed.pop(worker, ()):
            if part.worker == worker:
                self.mark_delivered(part)

    def mark_delivered(self, part: Part) -> None:
        """The worker that holds `part` has it: that was a delivery."""
        if not part.confirmed:
            part.confirmed = True
            part.tries -= 1
            part.deliveries += 1
            self.dirty = True

    # Settling

    def settle(self, record: OpenRecord, mask: int) -> int:
        """Settle messages of `record` that are not given up, and return how many. `tidy` has to follow."""
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
        """Drop the firsts of records that were settled between these offsets: at once, not one by one."""
        low = max(bisect_right(self.firsts, first) - 1, 0)
        high = bisect_left(self.firsts, end)
        firsts = self.firsts[low:high]
        self.firsts[low:high] = [first for first in firsts if first in self.records]

    def forget_dead(self, n: int) -> None:
        """Settle the first `n` dead letters. Raises ValueError if there are fewer."""
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
        """Return the first offset that is not settled and not of a deferred record, else `position`."""
        for first in self.firsts:
            record = self.records[first]
            if not record.deferred:
                bits = record.open
                return first + (bits & -bits).bit_length() - 1
        return position

    # Failing

    def split(self, record: OpenRecord, mask: int, worker: bytes) -> list[Part]:
        """Return what `worker` holds of these messages, parted from the rest: lease it anew or take it away."""
        found = []
        for part in list(record.parts):
            bits = part.bits & mask
            if part.worker != worker or not bits:
                continue
            if bits != part.bits:
                confirmed = part.confirmed
                part = part.rest(bits)
                if not confirmed:
                    self._unconfirmed.setdefault(worker, []).append(part)
            found.append(part)
        return found

    def redeliver(self, part: Part, due_us: int, reason: str) -> None:
        """Take `part` from its worker: it is due at `due_us`, or given up for `reason`."""
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

    def expire(self) -> None:
        """Let leases end and delays pass."""
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
        """What `worker` holds is due again at once."""
        if worker in self.held:
            for part in [part for part in self._leases if part.worker == worker]:
                self.redeliver(part, 0, WORKER_LEFT)

    def answer_lost(self, worker: bytes, *, counted: bool) -> None:
        """What `worker` was handed and did not confirm never reached it: it is due again at once.

        It was tried, and that is `counted`, or known not to have been.
        """
        for part in self._unconfirmed.pop(worker, ()):
            if part.worker == worker and not part.confirmed:
                part.tries -= not counted
                self.redeliver(part, 0, WORKER_LEFT)

    # The cursor

    def kept(self, ahead_us: int) -> list[Kept]:
        """Return the records for the cursor; what is held or given up, and not listed as dead, waits there.

        Due times are by the wall clock, which is `ahead_us`.
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
            kept.append(Kept(first - last, record.count, record.deferred, record.key, parts))
            last = first
        return kept

    def restore(self, records: list[Kept], dead: list[Dead], end: int, ahead_us: int) -> None:
        """Fill the empty table; the clock of its due times is `ahead_us`.

        Raises ValueError or LookupError if it does not fit together or reaches over `end`.
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
        if len(self._timers) > self._max_timers:  # of records that were settled since
            self._timers = [
                (part.due_us, each.first)
                for each in self.records.values()
                for part in each.parts
                if part.waiting and part.due_us > self.now_us
            ]
            heapq.heapify(self._timers)
            self._max_timers = 1024 + 2 * len(self._timers)

    def _requeue(self, record: OpenRecord) -> None:
        """Look again at `record`, or at the first of its key if it is done."""
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
        """List as dead letters what was given up, as far as there is room for them."""
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
