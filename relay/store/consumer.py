"""A consumer of a log: hands its messages to workers until each is settled, at least once (sans-IO).

A record is sealed as a whole and handed out so, with a bitmap of the messages that are meant: no more than the worker asked for, so
that others get the rest. Acks are per message. What is read and not settled is in the table of `unsettled`; its bytes are in `cursor`.

In a group the records of a key go one after the other: each waits until those before it are settled or dead, so a failed one
comes again first. A deferred record queues when it comes due. Records without a key are free.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from relay.store import cursor
from relay.store.clock import Clock
from relay.store.cursor import Counts, CursorDamaged, Dead, Settings, State
from relay.store.cursors import MAX_CURSOR_NAME_BYTES
from relay.store.dispatch import Dispatcher, Taken
from relay.store.log import MAX_OFFSET, Log
from relay.store.parts import OpenRecord
from relay.store.records import Reason
from relay.store.unsettled import Unsettled

MAX_FENCED: Final = 1024
"""Workers that were taken over from and are remembered; one that is forgotten can take over again."""
MAX_DELAY_US: Final = 30 * 86_400_000_000


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
            raise ValueError(
                f"name: {len(name.encode())} bytes; a consumer name has 1 to {MAX_CURSOR_NAME_BYTES}"
            )
        self.name = name
        self.settings = settings
        self._log = log
        self._clock = clock or Clock()
        self._table = Unsettled(settings, now_us, self._clock)
        self._dispatcher = Dispatcher(log, self._table, settings, start_offset)
        self.counts = self._dispatcher.counts
        self._worker: bytes | None = None
        self._fenced: dict[bytes, None] = {}
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
                raise ValueError(
                    f"position {state.position} is not between its start {state.start} and the end of the log {log.next}"
                )
            ahead_us = 0
            if now_us is not None:
                ahead_us = max(consumer._table.wall_us, state.saved_us) - now_us
            consumer._table.restore(state.records, state.dead, log.next, ahead_us)
        except (ValueError, LookupError) as err:
            raise CursorDamaged(name, f"its state is inconsistent: {err}") from err
        consumer._dispatcher.position = state.position
        consumer._dispatcher.due = state.due
        log.cursors.listed(state.due[0])
        consumer.counts = consumer._dispatcher.counts = state.counts
        return consumer

    # Dispatcher out

    def take(self, worker: bytes, max_bytes: int, max_messages: int, now_us: int) -> Taken:
        """Hand messages to `worker`: what failed before, then deferred records that are due, then new ones.

        At least one message if there is any for it. A record of which not all fits into `max_messages` is cut, and what is left of it
        comes next, to whoever takes; one that does not fit into `max_bytes` comes first, or it would never go.

        Raises:
            ValueError: a limit is below 1.
            LogDamaged: the log cannot be read there, and nothing was handed out.
        """
        if max_bytes < 1 or max_messages < 1:
            raise ValueError(
                f"max_bytes ({max_bytes}) and max_messages ({max_messages}) must be at least 1"
            )
        self.expire(now_us)
        if not self._admit(worker):
            return Taken([], 0, 0, fenced=True)
        return self._dispatcher.take(worker, max_bytes, max_messages)

    # Settling

    def ack(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Settle the messages from `first` until `next`, whoever holds them, and return how many were not before.

        An ack is a fact, also from a worker that was fenced or whose lease ended: it did the work, and if another has the message
        by now it is done twice, as at least once allows. The rest counts as late.

        Raises:
            ValueError: one of them was never handed out; nothing was settled. That includes messages handed out after
                the last `save` before a crash.
        """
        self._table.update_time(now_us)
        found = self._dispatched(first, next)
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
        self._table.update_time(now_us)
        self._dispatched(offset, offset + 1)
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
        self._table.update_time(now_us)
        text = reason.encode(errors="replace")[: cursor.MAX_REASON_BYTES].decode(errors="ignore")
        count = 0
        for record, mask in self._dispatched(first, next):
            for part in self._table.split(record, mask, worker):
                count += part.bits.bit_count()
                self._table.mark_delivered(part)
                self._table.redeliver(part, self._now + delay_us, text)
        return count

    def touch(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Start the ack timeout anew for what `worker` holds from `first` until `next`; return how many messages.

        Raises ValueError if one was never handed out.
        """
        self._table.update_time(now_us)
        count = 0
        for record, mask in self._dispatched(first, next):
            for part in self._table.split(record, mask, worker):
                count += part.bits.bit_count()
                self._table.mark_delivered(part)
                self._table.lease(part)
        return count

    def confirm_range(self, worker: bytes, first: int, next: int, now_us: int) -> None:
        """`worker` has what it was handed from `first` until `next`. Raises ValueError if one was never handed out."""
        self._table.update_time(now_us)
        self._confirm(worker, self._dispatched(first, next))

    def confirm(self, worker: bytes) -> None:
        """`worker` asks for more: it has what it was handed."""
        self._table.confirm(worker)

    def _confirm(self, worker: bytes, found: list[tuple[OpenRecord, int]]) -> None:
        for record, mask in found:
            for part in record.parts:
                if part.worker == worker and part.bits & mask:
                    self._table.mark_delivered(part)

    # Failing

    def expire(self, now_us: int) -> None:
        """Let leases end and delays pass, up to `now_us`."""
        self._table.update_time(now_us)
        self._table.expire()
        if self._log.oldest > self._oldest:
            self._oldest = self._log.oldest
            for record in self._table.within(0, self._oldest):
                self._dispatcher.removed(record, Reason.RETENTION)

    def worker_left(self, worker: bytes, now_us: int) -> None:
        """What `worker` holds is due again at once. What it has confirmed was delivered, and counts so."""
        self._table.update_time(now_us)
        self._table.worker_left(worker)
        self._fenced.pop(worker, None)
        if worker == self._worker:
            self._worker = None

    def answer_lost(self, worker: bytes, now_us: int, *, counted: bool = True) -> None:
        """The last answer to `worker` did not reach it: what was in it is due again at once.

        `counted`: it may be that message which breaks whoever gets it.
        """
        self._table.update_time(now_us)
        self._table.answer_lost(worker, counted=counted)

    @property
    def position(self) -> int:
        """The offset of the next new message."""
        return self._dispatcher.position

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
        coming = self._dispatcher.next_deferred()
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
                self._dispatcher.start,
                self._dispatcher.position,
                self._dispatcher.due,
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
            floor=table.floor(self.position),
            position=self.position,
            lag=self._log.next - self.position + table.open,
            pending=table.pending,
            redelivering=table.dispatched - table.pending - table.given_up,
            dead=table.given_up,
            workers=len(table.held),
            counts=self.counts,
        )

    @property
    def _now(self) -> int:
        return self._table.now_us

    # Inside

    def _admit(self, worker: bytes) -> bool:
        """Return whether `worker` may take; a new one of a consumer that is no group takes over."""
        if self.settings.group or worker == self._worker:
            return True
        if worker in self._fenced:
            return False
        former, self._worker = self._worker, worker
        if former is not None:
            self.worker_left(former, self._now)
            self._fenced[former] = None
            if len(self._fenced) > MAX_FENCED:
                del self._fenced[next(iter(self._fenced))]
        return True

    def _dispatched(self, first: int, end: int) -> list[tuple[OpenRecord, int]]:
        """Return the records of these offsets and their messages. Raises ValueError if one was never handed out."""
        if not 0 <= first < end:
            raise ValueError(f"first, next: {first} to {end} is not a range of offsets")
        found = []
        known = max(first, self.position)
        for record in self._table.within(first, end):
            mask = record.mask(first, end)
            if mask & record.fresh:
                raise ValueError(
                    f"offsets {first} to {end}: some of these messages were never dispatched"
                )
            found.append((record, mask))
            if record.first <= known < record.next:
                known = record.next
        if known < end and not self._dispatcher.came_due(known, end):
            raise ValueError(
                f"offsets {first} to {end}: the message at {known} was never dispatched"
            )
        return found
