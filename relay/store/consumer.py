"""A consumer of a log: delivers its messages to workers, at least once, until each is settled (sans-IO).

A record is sealed as a whole and is dispatched as a whole, with a bitmap of the messages that are
meant for the worker: no more than it asked for, so that other workers get the rest. Acks are per
message. Messages that were read but are not settled are in the table of `unsettled`; their layout
on disk is in `cursor`.

In a shared consumer, the records of one key are processed in order: each waits until those before it are
settled or dead, so a failed record is delivered again first. A deferred record joins its key's
queue when it is due. Records without a key have no order.

A consumer that is not shared dispatches to one worker only, the first of its `line`.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from typing import Final

from msgspec import Struct, structs

from relay.store import cursor
from relay.store.clock import Clock
from relay.store.cursor import Counts, CursorDamaged, Dead, Settings, State
from relay.store.cursors import MAX_CURSOR_NAME_BYTES
from relay.store.dispatch import MAX_BLOCKED, Dispatcher, Taken
from relay.store.errors import LogDamaged
from relay.store.line import Lease, Line
from relay.store.log import Log
from relay.store.parts import OpenRecord
from relay.store.records import MAX_OFFSET, Reason, Record
from relay.store.unsettled import Unsettled

MAX_DELAY_US: Final = 30 * 86_400_000_000
MAX_FORMER: Final = 8
"""Replaced settings that a consumer remembers. Workers that state older ones are refused."""


class Redrive(Enum):
    """What became of a dead letter's message."""

    WAITING = 1
    """It will be delivered."""
    GONE = 2
    """The log no longer has it."""
    FULL = 3
    """There is no room for it until others are settled."""


class Info(Struct, frozen=True):
    """The state of a consumer. Numbers are messages, except where they are offsets."""

    floor: int
    """Offset below which all messages are settled, except deferred ones."""
    position: int
    """Offset of the next new message."""
    lag: int
    """Messages up to the end of the log that are not settled.

    Computed from offsets, so holes ahead count too.
    """
    pending: int
    """Messages held by workers."""
    redelivering: int
    dead: int
    workers: int
    """Workers that hold messages or wait for some."""
    counts: Counts


class Consumer:
    """One consumer of a log; use it from one thread at a time.

    `now_us` is `Clock.elapsed_us`; `clock` says how the other clocks differ from it. What `take`
    returns is dispatched. After a crash, messages that were settled since the last `save` are
    delivered again.
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
        self.paused = False
        """Its owner dispatches nothing; workers may settle what they hold."""
        self.former: list[Settings] = []
        """Settings that were replaced, oldest first."""
        self.line = Line()
        """The workers of a consumer that is not shared; empty if it is."""
        self._oldest = 0

    @classmethod
    def load(
        cls, log: Log, name: str, now_us: int | None = None, clock: Clock | None = None
    ) -> Consumer:
        """Return the consumer that was saved as `name`. Messages that it had dispatched are delivered again.

        No delay lasts longer than what was left of it at the save, even if the wall clock was set
        since. With `now_us` None, due times are taken as they were saved.

        Raises:
            KeyError: there is no consumer of this name.
            CursorDamaged: its stored state is not what was saved.
            LogDamaged: its row cannot be read.
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
        consumer.paused, consumer.former = state.paused, state.former
        return consumer

    # Dispatching

    def take(self, worker: bytes, max_bytes: int, max_messages: int, now_us: int) -> Taken:
        """Dispatch messages to `worker`: first those to redeliver, then deferred records that are due, then
        new ones.

        Dispatches at least one message if one is available. A record that does not fit into
        `max_messages` is divided, and the rest is next for whichever worker takes next. A record
        larger than `max_bytes` is dispatched only as the first of a call. A worker that stands by gets nothing.

        Raises:
            ValueError: a limit is below 1.
            LogDamaged: the log cannot be read at the next record, and nothing was dispatched.
            RecordsAway, RecordsUnreachable: the same, because the record is in the bucket.
        """
        if max_bytes < 1 or max_messages < 1:
            raise ValueError(
                f"max_bytes ({max_bytes}) and max_messages ({max_messages}) must be at least 1"
            )
        if len(self.line) and worker != self.line.active:
            return Taken([], 0, 0)
        self.expire(now_us)
        return self._dispatcher.take(worker, max_bytes, max_messages)

    # The line of workers

    def join(
        self, worker: bytes, lease: Lease, label: str, now_us: int, *, was_active: bool = False
    ) -> list[bytes]:
        """Give a worker of a consumer that is not shared a place in the line; see `Line.join`."""
        over = self.line.join(worker, lease, label, self._awake_us(now_us), was_active=was_active)
        self._seat()
        return over

    def expire_line(self, now_us: int) -> list[bytes]:
        """Replace workers whose lease has ended; return them. What they hold is redelivered."""
        over = self.line.expire(self._awake_us(now_us))
        self._seat()
        return over

    def hand_over(self, now_us: int) -> bool:
        """Let the next worker of the line be active; return whether there is one."""
        done = self.line.hand_over(self._awake_us(now_us))
        self._seat()
        return done

    def may_settle(self, worker: bytes) -> bool:
        """Return whether what this worker settles counts: no other worker is active."""
        return self.line.active in (None, worker)

    def _awake_us(self, now_us: int) -> int:
        """Return the time of leases. It does not advance the table, so that what comes due is still seen to."""
        return now_us + self._clock.awake_ahead_us

    def _seat(self) -> None:
        """Redeliver what other workers hold than the active one."""
        active = self.line.active
        if active is not None:
            for worker in [worker for worker in self._table.held if worker != active]:
                self._table.worker_left(worker)

    # Settling

    def ack(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Settle the messages from `first` until `next`, whichever worker holds them; return how many were
        not settled before.

        An ack counts even if the ack timeout of the message ended, because the work is done. If another
        worker holds the message by now, the work is done twice, as at-least-once delivery allows. Acks of
        settled messages count as late. Whether the worker may settle anything is for `may_settle` to say.

        Raises:
            ValueError: one of the messages was never dispatched; nothing was settled. That includes
                messages dispatched after the last `save` before a crash.
        """
        self._table.update_time(now_us)
        found = self._dispatched(first, next)
        self._confirm(worker, found)
        settled = sum(self._table.settle(record, mask) for record, mask in found)
        self._table.tidy(first, next)
        self.counts.late += next - first - settled
        return settled

    def ack_through(self, worker: bytes, offset: int, now_us: int) -> int:
        """Settle the dispatched messages up to and including `offset`, and return how many.

        In a shared consumer, only those that `worker` holds. A deferred record is delivered later than its
        offset suggests, so it is settled only if it contains `offset`. Raises ValueError if
        `offset` was never dispatched.
        """
        self._table.update_time(now_us)
        self._dispatched(offset, offset + 1)
        settled = 0
        for record in self._table.within(0, offset + 1):
            if record.deferred and offset >= record.next:
                continue
            mask = record.mask(0, offset + 1) & ~record.fresh
            if self.settings.shared:
                mask &= record.bits([part for part in record.parts if part.worker == worker])
            settled += self._table.settle(record, mask)
        self._table.tidy(0, offset + 1)
        self.counts.late += not settled
        return settled

    def nack(
        self, worker: bytes, first: int, next: int, delay_us: int, reason: str, now_us: int
    ) -> int:
        """Redeliver, after `delay_us`, the messages from `first` until `next` that `worker` holds; return
        how many.

        After `max_deliver` deliveries they become dead letters with `reason`, cut at 1024 bytes.
        Messages that other workers hold are not affected.

        Raises:
            ValueError: a message was never dispatched, or `delay_us` is not between 0 and 30 days.
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

    def give_back(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Redeliver at once the messages from `first` until `next` that `worker` holds and has not begun with.

        Their last dispatch does not count. Returns how many; raises ValueError if one was never dispatched.
        """
        self._table.update_time(now_us)
        count = 0
        for record, mask in self._dispatched(first, next):
            for part in self._table.split(record, mask, worker):
                count += part.bits.bit_count()
                self._table.give_back(part)
        return count

    def touch(self, worker: bytes, first: int, next: int, now_us: int) -> int:
        """Restart the ack timeout of the messages from `first` until `next` that `worker` holds; return how
        many.

        Raises ValueError if one was never dispatched.
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
        """Count the messages from `first` until `next` as delivered to `worker`.

        Raises ValueError if one was never dispatched.
        """
        self._table.update_time(now_us)
        self._confirm(worker, self._dispatched(first, next))

    def confirm(self, worker: bytes) -> None:
        """Count everything dispatched to `worker` as delivered, because it asks for more."""
        self._table.confirm(worker)

    def _confirm(self, worker: bytes, found: list[tuple[OpenRecord, int]]) -> None:
        for record, mask in found:
            for part in record.parts:
                if part.worker == worker and part.bits & mask:
                    self._table.mark_delivered(part)

    # Failing

    def expire(self, now_us: int) -> None:
        """End the leases and delays that have passed at `now_us`."""
        self._table.update_time(now_us)
        self._table.expire()
        if self._log.oldest > self._oldest:
            self._oldest = self._log.oldest
            for record in self._table.within(0, self._oldest):
                self._dispatcher.record_removed(record, Reason.RETENTION)

    def worker_left(self, worker: bytes, now_us: int) -> None:
        """Redeliver everything that `worker` holds at once. What it had confirmed counts as a delivery."""
        self._table.update_time(now_us)
        self._table.worker_left(worker)
        self.line.leave(worker, self._table.awake_us)

    def answer_lost(self, worker: bytes, now_us: int, *, counted: bool = True) -> None:
        """Redeliver at once what the last answer to `worker` contained, because it did not arrive.

        `counted`: count it as a try, because a message may crash every worker that receives it.
        """
        self._table.update_time(now_us)
        self._table.answer_lost(worker, counted=counted)

    def letter(self, offset: int, now_us: int) -> Record | None:
        """Return the record with the message at `offset`, without its body; None if it is gone.

        Changes nothing. Raises RecordsAway, RecordsUnreachable.
        """
        self._table.update_time(now_us)
        if offset >= self._log.next:
            return None
        try:
            item = self._log.read(offset, 1, now_us=self._table.wall_us).items[0]
        except LogDamaged:
            return None  # readers of the stream get the error
        if not isinstance(item, Record) or item.count > cursor.MAX_COUNT:
            return None
        return structs.replace(item, body=b"")

    def redrive(self, offset: int, item: Record | None, now_us: int) -> Redrive:
        """Make the message at `offset`, which became a dead letter, deliverable again with no deliveries counted.

        `item` is what `letter` returned for it. A message that waits or is held already, or that was not read yet, is
        left as it is.
        """
        self._table.update_time(now_us)
        if item is None or offset < self._log.oldest:
            return Redrive.GONE
        record = self._table.records.get(item.first)
        bit = 1 << (offset - item.first)
        if self._dispatcher.will_deliver(item, offset) or (record and record.open & bit):
            return Redrive.WAITING
        if not item.deferred and item.next > self.position:
            return Redrive.FULL  # the rest of the record is read first
        key = item.key_hash[: cursor.KEY_BYTES] if self.settings.shared and item.key_hash else None
        if record is None:
            weight = self._table.weight + cursor.weight(item.count, key)
            if self._table.records and weight > cursor.MAX_RECORDS_BYTES:
                return Redrive.FULL
            record = OpenRecord(item.first, item.count, key, item.deferred)
        if self._table.must_wait(key) and self._table.blocked >= MAX_BLOCKED:
            return Redrive.FULL
        self._table.revive(record, bit)
        self.counts.redriven += 1
        return Redrive.WAITING

    def change(
        self, *, ack_timeout_us: int | None, max_deliver: int | None, paused: bool | None, now_us: int
    ) -> None:  # fmt: skip
        """Change settings, or pause or resume; None leaves one as it is. Raises ValueError.

        `shared` decides which messages wait for each other and `durable` where the state is, so they never change.
        """
        self._table.update_time(now_us)
        given = {"ack_timeout_us": ack_timeout_us, "max_deliver": max_deliver}
        new = structs.replace(
            self.settings, **{name: value for name, value in given.items() if value is not None}
        )
        if new != self.settings:
            kept = [one for one in self.former if one != new]
            self.former = [*kept, self.settings][-MAX_FORMER:]
            self.settings = new
            self._table.change(new)
        if paused is not None and paused != self.paused:
            self.paused = paused
            self._table.dirty = True

    @property
    def position(self) -> int:
        """The offset of the next new message."""
        return self._dispatcher.position

    def dead_letters(self) -> list[Dead]:
        """Return the listed dead letters, oldest first. Only `forget_dead` settles them."""
        return list(self._table.dead)

    def forget_dead(self, n: int) -> None:
        """Settle the first `n` dead letters, which are now stored elsewhere.

        Raises ValueError if there are fewer.
        """
        self._table.forget_dead(n)

    @property
    def deadline_us(self) -> int | None:
        """When the next lease or delay ends or the next deferred record is due; then call `expire`, and let
        workers take.

        None if nothing changes with time alone. After `expire` it is in the future. Raises LogDamaged.
        """
        coming = self._dispatcher.next_deferred()
        high_us = self._table.high_us
        if (
            coming is not None and coming[0] <= high_us
        ):  # due already: these wait for a worker, not for time
            later = self._log.due(MAX_OFFSET, after=(high_us, MAX_OFFSET), limit=1)
            coming = later[0] if later else None
        times = [self._table.next_us, coming[0] - high_us + self._now if coming else None]
        return min((time for time in times if time is not None), default=None)

    # State

    @property
    def dirty(self) -> bool:
        """Whether `save` has something to write."""
        return self._table.dirty and self.settings.durable

    def save(self, sync: bool = False) -> None:
        """Write the cursor if it changed. Without `sync`, a power cut may restore the previous one.

        Raises CursorsFull or LogWriteFailed; the consumer is then still dirty.
        """
        if self.dirty:
            state = State(
                self.settings,
                self._dispatcher.start,
                self._dispatcher.position,
                self._dispatcher.due,
                self._table.stored_records(self._clock.wall_ahead_us),
                list(self._table.dead),
                self.counts,
                max(0, self._table.wall_us),
                self.paused,
                self.former,
            )
            self._log.cursors.put(self.name, cursor.encode(state), sync=sync)
            self._table.dirty = False

    def info(self, waiting: Set[bytes] = frozenset()) -> Info:
        """Return the state of this consumer, for which the workers `waiting` wait."""
        table = self._table
        return Info(
            floor=table.floor(self.position),
            position=self.position,
            lag=max(0, self._log.shown - self.position) + table.open,
            pending=table.pending,
            redelivering=table.dispatched - table.pending - table.given_up,
            dead=table.given_up,
            workers=len(table.held.keys() | waiting),
            counts=self.counts,
        )

    @property
    def _now(self) -> int:
        return self._table.now_us

    # Inside

    def _dispatched(self, first: int, end: int) -> list[tuple[OpenRecord, int]]:
        """Return (record, bitmap) for the messages from `first` until `end`.

        Raises ValueError if one was never dispatched.
        """
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
