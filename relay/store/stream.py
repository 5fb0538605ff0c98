"""One stream of a store: collects what it receives, writes it in batches, and wakes those who wait for
more: readers (`relay.store.readers`) and workers of consumers (`relay.store.consumer_calls`).

    publish, broadcast ─┐                        ┌─► acknowledgements (appends), credit (pushes)
    push, append ───────┴─► batch ── commit ──► log ─► waiting readers ─► consumers
    missing messages ──────► gap records         ▲
    stage ─────────────────► with the batch ─────┤ visible after a Commit call
    copy ────────────────────────────────────────┘ from the source's log; nothing else is written to a copy

Sans-IO except for the log: the store passes in bundles, calls and the time, and calls `commit` soon
after `dirty`. `now_us` is the wall clock, which may be set; waits are measured in elapsed time.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Set
from typing import Final

from msgspec import structs

from iris.errors import DecodeError
from iris.wire import streams
from iris.wire.codec import END
from iris.wire.kinds import Kind
from iris.wire.names import matches
from iris.wire.orders import Definition, Order, SignedOrder
from iris.wire.stream_items import DEAD_KIND, DeadLetter, Item, decode_dead
from iris.wire.stream_items import Record as WireRecord
from iris.wire.streams import (
    Append,
    Carry,
    Commit,
    Copied,
    Copy,
    Described,
    Discard,
    FetchState,
    NewRecord,
    Plan,
    Stage,
)
from relay.store.answers import item_from_wire
from relay.store.authority import NO_CHARTER, Charter
from relay.store.bucket.replica import Replica
from relay.store.clock import Clock
from relay.store.consumer_calls import ConsumerCalls
from relay.store.cursor import Dead
from relay.store.database import check_room_to_open
from relay.store.errors import (
    LogDamaged,
    LogError,
    LogWriteFailed,
    Refuse,
)
from relay.store.ids import MAX_IDS
from relay.store.log import Log
from relay.store.put_off import PutOff
from relay.store.readers import Readers
from relay.store.recorder import Batch, Recorder
from relay.store.records import Entry, Stamp, check_entry
from relay.store.segments import Limits
from relay.store.session import IncomingCall
from relay.store.stage_calls import StageCalls
from relay.store.state import MOST, Carried, rows_behind

REOPEN_MIN_US: Final = 2_000_000
REOPEN_MAX_US: Final = 60_000_000
COMPACT_US: Final = 10_000_000


class Stream:
    """One stream. `log` is None while the log cannot be opened; `failed` then says why."""

    def __init__(
        self,
        path: str,
        uuid: bytes,
        log: Log | None,
        charter: Charter = NO_CHARTER,
        clock: Clock | None = None,
    ) -> None:
        self.path = path
        self.uuid = uuid
        self.log = log
        self.charter = charter
        self._clock = clock or Clock()
        self.failed = ""
        self.name = ""
        self.definition = Definition("?")
        self.recorder = Recorder()
        self.dead = False
        """This stream holds the dead letters of another stream."""
        self.why_superseded = ""
        """Which stream has taken the place of this one, which is only kept; empty if it is served."""
        self._opened_us = 0
        self._stopped = False
        self._carried: Carried | None = None
        """For a copy that is to take its source's place: what it was given so far."""
        self._limits = Limits()
        self.missed_while_closed = False
        """Messages were missed while the log was not open, and nobody counted them."""
        self.put_off = PutOff()
        """Calls that wait for records from the bucket."""
        self.readers = Readers(uuid, self._clock, self.put_off, lambda: self.failed)
        self._compact_us = 0
        self.reopen_us = 0
        """When to reopen a failed log, in elapsed time."""
        self._pause_us = REOPEN_MIN_US
        self.consumer_calls: ConsumerCalls | None = None
        """None while the log is not open."""
        self.stage_calls: StageCalls | None = None
        """None while the log is not open."""
        self._source_next = 0
        """For a copy: the end of its source, as the last Copy call reported it."""
        self._source_seen_us = 0
        """When that call was received."""
        self.write_dead_letters: Callable[[str, list[Dead]], None] = _no_dead_letters
        self.replica: Replica | None = None
        """Copies the log to a bucket, which makes it durable; None if the disk does."""
        self.redefine()
        if log is not None:
            self.opened(log)

    def replicate(self, replica: Replica, grown: Callable[[Stream], None]) -> None:
        """Copy every write to a bucket, and answer when it is there.

        `grown` is called when readers and workers may be shown more; then call `commit`.
        """
        self.replica = self.recorder.gate = self.readers.replica = replica
        replica.tail.on_grown = lambda: grown(self)
        if self.log is not None and self.consumer_calls is not None:
            self._copy(self.log, replica)
            self.consumer_calls.rest_on(replica)

    @property
    def in_bucket(self) -> bool:
        """Whether the stream is in a bucket, which makes it durable."""
        return self.replica is not None

    def _copy(self, log: Log, replica: Replica) -> None:
        replica.tail.begin(log.next, log.oldest, replica.last)
        log.copy_to(replica, replica.tail)
        if replica.reader is not None:
            log.offloading.read_by(replica.reader)

    def opened(self, log: Log) -> None:
        """Use this log, which was opened for the first time or again."""
        self._opened_us = self._clock.wall_us
        self.log = self.recorder.log = self.readers.log = log
        if self.replica is not None:
            self._copy(log, self.replica)
        self.consumer_calls = ConsumerCalls(
            log, lambda consumer, dead: self.write_dead_letters(consumer, dead), self._clock
        )
        self.consumer_calls.rest_on(self.replica)
        self.stage_calls = StageCalls(log.staging)
        self._apply()

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def orders(self) -> dict[bytes, tuple[Order, SignedOrder]]:
        """Key id -> its order."""
        return self.charter.orders

    def redefine(self) -> None:
        """Apply the definition of the order in force."""
        if self.orders:
            self.define(self.charter.definition)

    def define(self, definition: Definition) -> None:
        """Apply a new definition."""
        self._stopped = definition.stopped
        self.recorder.pause(self._stopped)
        self.definition = definition
        self.name = definition.name
        self._limits = Limits(
            max_bytes=definition.max_bytes or None,
            max_messages=definition.max_messages or None,
            max_age_us=definition.max_age_us or None,
        )
        self._apply()

    def _apply(self) -> None:
        """Pass the definition's settings to the log and the consumers."""
        if self.log is not None and self.consumer_calls is not None:
            self.log.ids.window_us = self.definition.dedup_window_us
            self.consumer_calls.paused = self.definition.consuming_paused

    @property
    def key_ids(self) -> list[bytes]:
        """The key ids under which the stream is addressed."""
        return list(self.orders)

    @property
    def recording_ids(self) -> list[bytes]:
        """The key ids under which the stream records.

        Only those whose order names the current source: a copy may be promoted under some of its keys only.
        """
        wanted = self.definition.topic, self.definition.cluster
        if self.why_superseded:
            return []
        return [
            key_id
            for key_id, (order, _) in self.orders.items()
            if (order.definition.topic, order.definition.cluster) == wanted
        ]

    def records(self, topic: str, key_id: bytes) -> bool:
        """Return whether this stream records publications to `topic` under this key."""
        wanted = self.definition.topic
        return bool(wanted) and matches(wanted, topic) and key_id in self.recording_ids

    def shares(self, cluster: str, key_id: bytes) -> bool:
        """Return whether this stream records pushes and broadcasts to `cluster` under this key.

        What the relay claims does not matter.
        """
        return cluster == self.definition.cluster and key_id in self.recording_ids

    def described(self, store: bytes, label: str, holder: bytes) -> Described:
        """Return the description that clients see. `holder` is this store, `store` whom the orders name."""
        log = self.log
        numbers = (
            (
                log.created_us,
                log.oldest,
                log.next if log.limit is None else log.shown,
                log.messages,
                log.size_bytes,
            )
            if log
            else (0,) * 5
        )
        failed = self.why_superseded or self.failed or (log.failed if log else "") or ""
        return Described(
            self.definition, self.uuid, log.epoch if log else 0, [signed for _, signed in self.orders.values()], store, label,
            *numbers, lost=self.recorder.lost, failed=failed[:1024], readable=log is not None,
            source_next=self._source_next, heard_us=self._source_seen_us,
            holder=holder if self.in_bucket else b"",
            moved_bytes=log.size_bytes - log.local_bytes if log else 0, superseded=self.superseded, plans=log.staging.rows.plans.count if log else 0,
            cut=log.cut if log else [], planned=self._opened_us + log.staging.rows.plans.made if log else 0,
        )  # fmt: skip

    @property
    def superseded(self) -> streams.Superseded | None:
        """The log that has taken the place of this one; None if none has."""
        by = self.charter.by
        if by is None or by.definition.replaces is None:
            return None
        return streams.Superseded(by.uuid, by.definition.replaces.next)

    @property
    def movable(self) -> bool:
        """Whether old records may be moved to the bucket. Compaction and redriving rewrite records in place."""
        return self.in_bucket and not self.dead and not self.definition.compact

    @property
    def complete(self) -> bool:
        """Whether everything received is in the log, as a record or in a gap."""
        log = self.log
        return log is not None and not log.failed and self.recorder.complete

    # -- in: what is appended --------------------------------------------------------------------------------

    def append(self, incoming: IncomingCall, call: Append) -> None:
        """Queue an Append call for the next commit, which answers it, or refuse it now. Raises ValueError."""
        if self._writable(incoming) is None:
            return
        producer = call.producer if call.producer != streams.NO_PRODUCER else None
        if (log := self.log) is not None and any(new.id_hash for new in call.records):
            if not self.definition.dedup_window_us:
                incoming.refuse(
                    "invalid",
                    f"stream {self.name!r} has no dedup window, so it remembers no message ids; set one with `iris stream change --dedup-window`",
                )
                return
            if log.ids.count + len(call.records) > MAX_IDS:
                incoming.refuse(
                    "full",
                    f"stream {self.name!r} remembers {log.ids.count} message ids of at most {MAX_IDS}; shorten its dedup window",
                )
                return
        entries = []
        for new in call.records:
            stamp = Stamp(producer, call.epoch, new.sequence) if producer else None
            entries.append(self._entry(incoming, call.sender_id, new, stamp))
        self.recorder.append(incoming, entries)

    def stage(self, incoming: IncomingCall, call: Stage, now_us: int) -> None:
        """Queue a Stage call for the next commit, or refuse it now. Raises StagingRefused, ValueError."""
        if (stage_calls := self._writable(incoming)) is not None:
            entries = [self._entry(incoming, call.sender_id, new) for new in call.records]
            self.recorder.bytes += stage_calls.stage(incoming, call, entries, now_us)

    def commit_or_discard(
        self, incoming: IncomingCall, call: Commit | Plan | Discard, now_us: int
    ) -> None:
        """Answer a Commit, Plan or Discard call, after everything received before it. The next `commit` notifies
        waiting readers.

        Raises StagingRefused or LogError.
        """
        self.commit(now_us)
        if (stage_calls := self._writable(incoming)) is None:
            return
        if isinstance(call, Commit):
            stage_calls.commit(incoming, call, now_us)
        elif isinstance(call, Plan):
            if self.definition.parent:
                incoming.refuse(
                    "invalid",
                    "a commit over several partitions must be planned in partition 0; send the plan there",
                )
                return
            stage_calls.plan(incoming, call, now_us)
        else:
            stage_calls.discard(incoming, call)

    def _writable(self, incoming: IncomingCall) -> StageCalls | None:
        """Return the stage calls if clients may write to this stream; else refuse the call and return None."""
        if self.definition.mirror:
            incoming.refuse(
                "invalid",
                f"stream {self.name!r} is a copy of log {self.definition.mirror} and accepts nothing else until it is promoted (`iris stream promote`)",
            )
        elif self._open(incoming) is None:
            pass
        elif self.dead:
            incoming.refuse("invalid", "only the store itself writes dead letters")
        else:
            return self.stage_calls
        return None

    def _open(self, incoming: IncomingCall) -> Log | None:
        """Return the log if it can be written; else refuse the call and return None."""
        if self._stopped:
            if self.definition.successor:
                incoming.refuse("leaving", handed_over(self.name, self.definition.successor))
            else:
                incoming.refuse(
                    "paused",
                    f"the stream is paused; run `iris stream resume {self.name}` to record again",
                )
        elif self.replica is not None and self.replica.writer.ended:
            incoming.gate = None  # it rests on nothing
            incoming.refuse(
                "leaving",
                "the store is asking the bucket whether it still has the stream; try again",
            )
        elif self.replica is not None and self.replica.writer.full:
            incoming.refuse(
                "full",
                "too many writes wait for the bucket, which does not answer or is too slow; try again later",
            )
        elif self.log is None or self.log.failed:
            failed = self.failed or (self.log.failed if self.log else "")
            # A repeated commit may have been written the first time.
            tried = not isinstance(incoming.call, streams.Append)
            incoming.refuse("disk", failed or "the log is not open", sure=not tried)
        else:
            return self.log
        return None

    # -- in: what is copied ----------------------------------------------------------------------------------

    def copy(self, incoming: IncomingCall, call: Copy, now_us: int) -> None:
        """Write items of this copy's source and answer with the end of the copy. The next `commit` notifies
        waiting readers.

        Raises ValueError, LogError.
        """
        mirror = self.definition.mirror
        if not mirror:
            why = "it was promoted" if self.definition.origins else "it is not a copy"
            incoming.refuse("invalid", f"stream {self.name!r} accepts no copied records: {why}")
        elif call.uuid.hex() != mirror:
            incoming.refuse(
                "invalid",
                f"stream {self.name!r} is a copy of log {mirror}, not of {call.uuid.hex()}",
            )
        elif (log := self._open(incoming)) is not None:
            taken = bool(call.items) and call.start == log.next
            if taken:
                log.copy([item_from_wire(item) for item in call.items], call.next, now_us)
            if call.shown is not None:
                log.limit_to(call.shown, call.cut)
            self._source_next, self._source_seen_us = call.high_water, now_us
            incoming.answer(Copied(log.next, taken))

    # -- handing over ----------------------------------------------------------------------------------------

    def freeze(self, successor: bytes) -> None:
        """Save the consumers, because the stream is being handed over to this log. Raises LogWriteFailed."""
        if self.consumer_calls is not None:
            self.consumer_calls.refuse_waiting(handed_over(self.name, successor))
            self.consumer_calls.clear_lines()
            self.consumer_calls.close()

    def state(self, call: FetchState) -> streams.StateRows:
        """Return rows of what the stream has besides its records. Raises Refuse, LogDamaged."""
        if not self.definition.successor:
            raise Refuse(
                "invalid",
                f"stream {self.name!r} is not being handed over, so its state changes while it is read",
            )
        if self.log is None:
            raise Refuse("damaged", self.failed)
        return rows_behind(self.log.database, call.after)

    def carry(
        self, incoming: IncomingCall, call: Carry, dead: Callable[[], Stream], now_us: int
    ) -> None:
        """Take over state and dead letters of the source, whose place this copy is to take. `dead` returns the stream
        of its dead letters, which it may make.

        Raises ValueError, LogError.
        """
        replaces = self.definition.replaces
        if not self.definition.mirror or replaces is None or replaces.uuid != call.uuid:
            incoming.refuse("invalid", f"stream {self.name!r} is not to take the place of log {call.uuid.hex()}")  # fmt: skip
            return
        log = self._open(incoming)
        if log is None:
            return
        if call.first:
            self._carried = Carried()
        if call.first or call.rows or call.last:
            if self._carried is None:  # the store has started again since
                incoming.answer(Copied(0, taken=False))
                return
            batch = log.database.batch()
            for prefix in MOST if call.first else ():
                batch.delete_range(prefix, bytes([prefix[0] + 1]))
            for row in self._carried.new(call.rows, log.next):
                batch.put(row.key, row.value)
            log.database.write(batch, log.next, sync=True)
        if call.last:
            log.load_state()
            self.opened(log)
        end = 0
        if call.letters:
            letters = dead()
            if letters.log is None or letters.log.failed:
                raise LogWriteFailed(letters.path, letters.failed or "an earlier write failed")
            if call.start == letters.log.next:
                items = [item_from_wire(_readdressed(item, self.uuid)) for item in call.letters]
                letters.log.copy(items, call.next, now_us)
            end = letters.log.next
        incoming.answer(Copied(end, taken=True))

    def _entry(
        self, incoming: IncomingCall, sender_id: bytes, new: NewRecord, stamp: Stamp | None = None
    ) -> Entry:
        entry = Entry(
            Kind.STREAM, self.name, incoming.key_id, sender_id, new.end, new.body, stamp,
            new.key_hash or None, new.tombstone, new.expires_us, new.due_us, new.expect, new.id_hash or None,
        )  # fmt: skip
        check_entry(entry)
        return entry

    def append_dead_letters(
        self, stream: Stream, consumer: str, letters: list[Dead], now_us: int
    ) -> None:
        """Append dead letters of a consumer of `stream` to this log, which holds them.

        Raises LogWriteFailed.
        """
        if self.log is None or self.log.failed:
            raise LogWriteFailed(self.path, self.failed or "an earlier write failed")
        entries = []
        for dead in letters:
            letter = DeadLetter(
                stream.uuid, dead.offset, consumer[:255], dead.deliveries, dead.reason[:1024]
            )
            end = END.pack(now_us, 0, 1, 0)
            entries.append(
                Entry(
                    DEAD_KIND,
                    stream.name,
                    stream.key_ids[0],
                    stream.uuid,
                    end,
                    streams.encode(letter),
                )
            )
        self.log.append(entries, now_us)
        self.log.enforce(self._limits, now_us)
        self.wake(now_us)

    # -- to disk ---------------------------------------------------------------------------------------------

    def commit(self, now_us: int) -> None:
        """Write the collected batch to the log, and notify its senders and the waiting readers."""
        batch = self.recorder.take()
        log, stage_calls = self.log, self.stage_calls
        if not batch and not (stage_calls and stage_calls.waiting):
            self._after_write(now_us)  # a Commit call may have appended records
            return
        try:
            if log is None or log.failed:
                reason = (log.failed if log else self.failed) or "the log is not open"
                raise LogWriteFailed(self.path, reason, sure=True)
            log.ids.now_us = self._elapsed_us(now_us)
            outcomes = log.append([entry for entry, _ in batch], now_us)
        except LogWriteFailed as err:
            self._failed(batch, err)
            return
        except (LogDamaged, struct.error) as err:
            if self.recorder.without_ids(batch, err):
                self.commit(now_us)
            else:
                self._failed(batch, LogWriteFailed(self.path, str(err)))
            return
        except ValueError as err:
            self._failed(batch, LogWriteFailed(self.path, str(err)))
            return
        self.recorder.written(batch, outcomes)
        if stage_calls is not None:
            stage_calls.written()
        self._after_write(now_us)

    def _after_write(self, now_us: int) -> None:
        """Answer waiting readers, and enforce the limits. Raises LogError."""
        if self.log is not None and not self.log.failed:
            self.wake(now_us)
            self.log.enforce(self._limits, now_us)

    def _failed(self, batch: Batch, err: LogWriteFailed) -> None:
        self.recorder.failed(batch, err)
        if self.stage_calls is not None:
            self.stage_calls.refuse("disk", err.reason)

    def reopen(self, now_us: int) -> None:
        """Reopen the log after a failed write; what was lost meanwhile is recorded as a gap first. Raises
        LogError.

        A log that can still be read is not closed while the disk has no room for what reopening it writes.
        """
        self.reopen_us = self._elapsed_us(now_us) + self._pause_us
        self._pause_us = min(2 * self._pause_us, REOPEN_MAX_US)
        if self.log is not None:
            check_room_to_open(self.path)
            if self.consumer_calls is not None:
                self.consumer_calls.refuse_waiting("the log is being reopened")
            if self.stage_calls is not None:
                self.stage_calls.refuse("leaving", "the log is being reopened")
            self._shut(self.log)
        self.failed = "the log is being reopened"
        try:
            log = Log.open(self.path)
        except LogError as err:
            self.failed = str(err)
            raise
        self.failed = ""
        self._pause_us = REOPEN_MIN_US
        self.opened(log)
        self.recorder.opened(log, now_us)

    def _shut(self, log: Log) -> None:
        log.close()
        if self.consumer_calls is not None:
            self.consumer_calls.clear_lines()
        self.log = self.recorder.log = self.readers.log = None
        self.consumer_calls = self.stage_calls = None

    # -- out -------------------------------------------------------------------------------------------------

    def wake(self, now_us: int) -> None:
        """Answer the waiting workers and readers that can be answered."""
        if self.consumer_calls is not None:
            self.consumer_calls.wake(self._elapsed_us(now_us))
        self.readers.answer_waiting(now_us)

    def callers_left(self, hops: Set[int], now_us: int) -> None:
        """Remove waiting calls, by hop id, whose callers no longer wait."""
        self.put_off.callers_left(hops)
        self.readers.callers_left(hops)
        if self.consumer_calls is not None:
            self.consumer_calls.callers_left(hops, self._elapsed_us(now_us))

    def refuse_waiting(self, reason: str, code: str = "leaving") -> None:
        """Refuse all waiting readers and workers, which will try again later."""
        self.readers.refuse(code, reason)
        self.put_off.refuse(code, reason)
        if self.consumer_calls is not None:
            self.consumer_calls.refuse_waiting(reason)

    # -- in between ------------------------------------------------------------------------------------------

    def tend(self, now_us: int) -> int:
        """Enforce age limits, and compact a little. Returns how many staged records were dropped for their age.

        Raises LogError.
        """
        log = self.log
        if log is None:
            return 0
        log.enforce(self._limits, now_us)
        dropped = 0
        if self.consumer_calls is not None and not log.failed and not self.definition.successor:
            self.consumer_calls.tend(self._elapsed_us(now_us))
            dropped = log.staging.tend(now_us)
            log.ids.now_us = self._elapsed_us(now_us)
            log.tend_ids()
        elapsed_us = self._elapsed_us(now_us)
        if self.definition.compact and elapsed_us >= self._compact_us:
            done = log.compact(now_us)
            self._compact_us = elapsed_us + (COMPACT_US if done else COMPACT_US // 100)
        return dropped

    def stepped(self, step_us: int) -> None:
        """The wall clock was set forward (`step_us` > 0) or back (< 0)."""
        if self.log is not None:
            if step_us < 0:
                self.log.steps.back(-step_us, self.log.next)
            else:
                self.log.steps.forward(step_us)

    def _elapsed_us(self, now_us: int) -> int:
        return now_us - self._clock.wall_ahead_us

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self.log is not None:
            if self.consumer_calls is not None and not self.log.failed:
                with contextlib.suppress(
                    LogWriteFailed
                ):  # then the messages that were settled last are delivered again
                    self.consumer_calls.close()
            self._shut(self.log)

    def end(self, reason: str) -> None:
        """Close a deleted stream, and refuse everything that waits for it."""
        self.refuse_waiting(reason, "no-stream")
        self._failed(self.recorder.take(), LogWriteFailed(self.path, reason))
        self.close()


def handed_over(name: str, successor: bytes) -> str:
    """Return why a stream cannot be used while it is being handed over."""
    return (
        f"the stream is being handed over to log {successor.hex()}, which will have its name; if the handover ended early, "
        f"run it again, or give it up with `iris stream resume {name}`"
    )


def _readdressed(item: Item, uuid: bytes) -> Item:
    """Return a dead letter that refers to the log `uuid`. Raises ValueError."""
    if not isinstance(item, WireRecord):
        return item
    if item.kind != DEAD_KIND:
        raise ValueError(f"letters: the record at {item.offset} is not a dead letter")
    try:
        letter = decode_dead(item.body)
    except DecodeError as err:
        raise ValueError(f"letters: {err}") from err
    return structs.replace(
        item, sender_id=uuid, body=streams.encode(structs.replace(letter, uuid=uuid))
    )


def _no_dead_letters(consumer: str, dead: list[Dead]) -> None:
    raise LogWriteFailed("", "the stream has no log for dead letters")
