"""One stream as its store keeps it: what comes in is gathered and written as one batch, whoever reads waits here for more.

    publish, broadcast ─┐                        ┌─► acknowledged (appends), credited (pushes)
    push, append ───────┴─► batch ── commit ──► log ─► readers that wait ─► consumers
    what is missing ───────► gap records         ▲
    stage ─────────────────► with the batch ─────┤ a Commit shows it
    copy ────────────────────────────────────────┘ of another log, if this one is a copy: nothing else is written then

Sans-IO but for the log: the store hands in bundles and questions, tells the time, and calls `commit` soon after `dirty`. `now_us` is
the wall clock's, which may be set; what waits goes by time that passes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Set
from typing import Final

from iris.core.conversation import UP
from iris.wire import streams
from iris.wire.codec import END
from iris.wire.kinds import Kind
from iris.wire.names import matches
from iris.wire.orders import Definition, Order, SignedOrder
from iris.wire.streams import (
    DEAD_KIND,
    Append,
    Commit,
    Copied,
    Copy,
    DeadLetter,
    Described,
    Discard,
    Fetch,
    NewRecord,
    Stage,
)
from relay.store.answers import item_from_wire, items_to_wire
from relay.store.authority import NO_CHARTER, Charter
from relay.store.clock import Clock
from relay.store.consumer_calls import ConsumerCalls
from relay.store.cursor import Dead
from relay.store.database import room_to_open
from relay.store.errors import LogDamaged, LogError, LogWriteFailed
from relay.store.ids import MAX_IDS
from relay.store.log import Log
from relay.store.recorder import Batch, Recorder
from relay.store.records import Entry, Stamp, check_entry
from relay.store.segments import Limits
from relay.store.session import IncomingCall
from relay.store.stage_calls import StageCalls

MAX_WAITING: Final = 16_384
"""Readers that wait at one stream; one more is refused."""
REOPEN_MIN_US: Final = 2_000_000
REOPEN_MAX_US: Final = 60_000_000
COMPACT_US: Final = 10_000_000


class Stream:
    """One stream. `log` is None while it cannot be opened; `failed` then says why."""

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
        """Holds the dead letters of another stream."""
        self._limits = Limits()
        self.missed_while_closed = False
        """While its log was not open nothing was recorded, and nobody counted what that was."""
        self._waiting: list[tuple[int, IncomingCall, Fetch]] = []
        self._compact_us = 0
        self.reopen_us = 0
        """A log that failed is opened again then, in elapsed time."""
        self._pause_us = REOPEN_MIN_US
        self.consumer_calls: ConsumerCalls | None = None
        """None while there is no log."""
        self.stage_calls: StageCalls | None = None
        """Likewise."""
        self._source_next = 0
        """Of a copy: where its source ended when a Copy last said so ..."""
        self._source_seen_us = 0
        """... and when that was."""
        self.write_dead_letters: Callable[[str, list[Dead]], None] = _no_dead_letters
        self.redefine()
        if log is not None:
            self.opened(log)

    def opened(self, log: Log) -> None:
        """The log can be used, for the first time or again."""
        self.log = self.recorder.log = log
        self.consumer_calls = ConsumerCalls(
            log, lambda consumer, dead: self.write_dead_letters(consumer, dead), self._clock
        )
        self.stage_calls = StageCalls(log)
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
        """Take up a definition."""
        self.recorder.pause(definition.paused)
        self.definition = definition
        self.name = definition.name
        self._limits = Limits(
            max_bytes=definition.max_bytes or None,
            max_messages=definition.max_messages or None,
            max_age_us=definition.max_age_us or None,
        )
        self._apply()

    def _apply(self) -> None:
        """Have the log and its consumers go by the definition."""
        if self.log is not None and self.consumer_calls is not None:
            self.log.ids.window_us = self.definition.dedup_window_us
            self.consumer_calls.paused = self.definition.consuming_paused

    @property
    def key_ids(self) -> list[bytes]:
        """Under which it is known."""
        return list(self.orders)

    @property
    def recording_ids(self) -> list[bytes]:
        """Under which it records: those that ordered what it records now. A copy may be promoted under some of its keys only."""
        wanted = self.definition.topic, self.definition.cluster
        return [
            key_id
            for key_id, (order, _) in self.orders.items()
            if (order.definition.topic, order.definition.cluster) == wanted
        ]

    def records(self, topic: str, key_id: bytes) -> bool:
        """Whether what is published to `topic` under this key belongs here."""
        wanted = self.definition.topic
        return bool(wanted) and matches(wanted, topic) and key_id in self.recording_ids

    def shares(self, cluster: str, key_id: bytes) -> bool:
        """Whether this stream records what is pushed and broadcast to `cluster` under this key, whatever a relay says."""
        return cluster == self.definition.cluster and key_id in self.recording_ids

    def described(self, store: bytes, label: str) -> Described:
        """Return what users see of it."""
        log = self.log
        numbers = (
            (log.created_us, log.oldest, log.next, log.messages, log.size_bytes)
            if log
            else (0,) * 5
        )
        failed = self.failed or (log.failed if log else "") or ""
        return Described(
            self.definition, self.uuid, log.epoch if log else 0, [signed for _, signed in self.orders.values()], store, label,
            *numbers, lost=self.recorder.lost, failed=failed[:1024], readable=log is not None,
            source_next=self._source_next, heard_us=self._source_seen_us,
        )  # fmt: skip

    @property
    def complete(self) -> bool:
        """Whether all that was to be recorded stands in the log, or is noted there as missing."""
        log = self.log
        return log is not None and not log.failed and self.recorder.complete

    # -- in: what is appended --------------------------------------------------------------------------------

    def append(self, incoming: IncomingCall, call: Append) -> None:
        """Take an Append; it is answered by the next commit, or refused now. Raises ValueError."""
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
        """Take a Stage, likewise. Raises StagingRefused, ValueError."""
        if (stage_calls := self._writable(incoming)) is not None:
            entries = [self._entry(incoming, call.sender_id, new) for new in call.records]
            self.recorder.bytes += stage_calls.stage(incoming, call, entries, now_us)

    def commit_or_discard(
        self, incoming: IncomingCall, call: Commit | Discard, now_us: int
    ) -> None:
        """Answer a Commit or a Discard behind all that has come; `commit` tells who waits for more. Raises StagingRefused, LogError."""
        self.commit(now_us)
        if (stage_calls := self._writable(incoming)) is None:
            return
        if isinstance(call, Commit):
            stage_calls.commit(incoming, call, now_us)
        else:
            stage_calls.discard(incoming, call, now_us)

    def _writable(self, incoming: IncomingCall) -> StageCalls | None:
        """Return what is staged if callers may write here; else refuse."""
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
        """Return the log if it takes writes; else refuse."""
        if self.definition.paused:
            incoming.refuse(
                "paused",
                f"the stream is paused; run `iris stream resume {self.name}` to record again",
            )
        elif self.log is None or self.log.failed:
            failed = self.failed or (self.log.failed if self.log else "")
            # A commit that is repeated may have been written the first time.
            tried = not isinstance(incoming.call, streams.Append)
            incoming.refuse("disk", failed or "the log is not open", sure=not tried)
        else:
            return self.log
        return None

    # -- in: what is copied ----------------------------------------------------------------------------------

    def copy(self, incoming: IncomingCall, call: Copy, now_us: int) -> None:
        """Write what the source of this copy holds, and answer; or say where the copy ends. `commit` tells who waits for more.

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
            self._source_next, self._source_seen_us = call.high_water, now_us
            incoming.answer(Copied(log.next, taken))

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
        """Write dead letters of a consumer of `stream`: this log is theirs. Raises LogWriteFailed."""
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
        """Write what has come and tell everybody whom it concerns."""
        batch = self.recorder.take()
        log, stage_calls = self.log, self.stage_calls
        if not batch and not (stage_calls and stage_calls.waiting):
            self._after_write(now_us)  # by a Commit, perhaps
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
        """Tell who waits for more, and keep no more than the limits. Raises LogError."""
        if self.log is not None and not self.log.failed:
            self.wake(now_us)
            self.log.enforce(self._limits, now_us)

    def _failed(self, batch: Batch, err: LogWriteFailed) -> None:
        self.recorder.failed(batch, err)
        if self.stage_calls is not None:
            self.stage_calls.refuse("disk", err.reason)

    def reopen(self, now_us: int) -> None:
        """Try to write again after a failure; what was lost meanwhile is noted first. Raises LogError.

        A log that can still be read is not given up while the disk has no room for what opening it again writes.
        """
        self.reopen_us = self._elapsed_us(now_us) + self._pause_us
        self._pause_us = min(2 * self._pause_us, REOPEN_MAX_US)
        if self.log is not None:
            room_to_open(self.path)
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
        self.log = self.recorder.log = self.consumer_calls = self.stage_calls = None

    # -- out -------------------------------------------------------------------------------------------------

    def fetch(
        self, incoming: IncomingCall, call: Fetch, now_us: int, *, wait: bool = False
    ) -> None:
        """Answer a Fetch now, or when there is something; or, if it is to `wait`, when `wake` is called next."""
        log = self.log
        if log is None:
            incoming.refuse("damaged", self.failed)
        elif call.start > log.next:
            incoming.refuse("offset", f"offset {call.start} is beyond the end, {log.next}")
        elif wait or (call.start == log.next and call.wait_ms):
            if len(self._waiting) < MAX_WAITING:
                until_us = self._elapsed_us(now_us) + 1000 * call.wait_ms
                self._waiting.append((until_us, incoming, call))
            else:
                incoming.refuse(
                    "leaving", f"{MAX_WAITING} readers already wait for this stream, the maximum"
                )
        else:
            self._answer(incoming, call, now_us)

    def _answer(self, incoming: IncomingCall, call: Fetch, now_us: int) -> None:
        log = self.log
        assert log is not None
        limit = min(incoming.session.message_limit, call.max_bytes)
        try:
            chunk = log.read(call.start, limit, now_us=now_us)
        except LogDamaged as err:
            incoming.refuse("damaged", str(err))
            return
        items, end = items_to_wire(chunk, limit, call.start)
        incoming.answer(streams.Fetched(items, end, log.oldest, log.next, self.uuid))

    def wake(self, now_us: int) -> None:
        """Answer whoever waited for more."""
        if self.consumer_calls is not None:
            self.consumer_calls.wake(self._elapsed_us(now_us))
        self._answer_waiting(now_us)

    def expire(self, now_us: int) -> None:
        """Answer whose time is over, or who waited because the relay did not read."""
        self._answer_waiting(now_us)

    def _answer_waiting(self, now_us: int) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        end = self.log.next if self.log is not None else 0
        elapsed_us = self._elapsed_us(now_us)
        for entry in waiting:
            until_us, incoming, call = entry
            if self.log is None:
                incoming.refuse("damaged", self.failed)
            elif call.start < end or until_us <= elapsed_us:
                self._answer(incoming, call, now_us)
            elif incoming.session.state is UP:
                self._waiting.append(entry)

    def callers_left(self, hops: Set[int], now_us: int) -> None:
        """Whoever made these calls waits no more."""
        gone = [entry for entry in self._waiting if entry[1].hop in hops]
        if gone:
            self._waiting = [entry for entry in self._waiting if entry[1].hop not in hops]
        for _, incoming, call in gone:
            if self.log is not None:  # with nothing: the relay forgets the call then
                log = self.log
                incoming.answer(streams.Fetched([], call.start, log.oldest, log.next, self.uuid))
        if self.consumer_calls is not None:
            self.consumer_calls.callers_left(hops, self._elapsed_us(now_us))

    def refuse_waiting(self, reason: str, code: str = "leaving") -> None:
        """Nobody can wait here now: readers come again later."""
        waiting, self._waiting = self._waiting, []
        for _, incoming, _ in waiting:
            incoming.refuse(code, reason)
        if self.consumer_calls is not None:
            self.consumer_calls.refuse_waiting(reason)

    # -- in between ------------------------------------------------------------------------------------------

    def tend(self, now_us: int) -> int:
        """Enforce what ages, compact a little; return how many staged records were dropped for their age. Raises LogError."""
        log = self.log
        if log is None:
            return 0
        log.enforce(self._limits, now_us)
        dropped = 0
        if self.consumer_calls is not None and not log.failed:
            self.consumer_calls.tend(self._elapsed_us(now_us))
            dropped = log.tend_staged(now_us)
            log.ids.now_us = self._elapsed_us(now_us)
            log.tend_ids()
        elapsed_us = self._elapsed_us(now_us)
        if self.definition.compact and elapsed_us >= self._compact_us:
            done = log.compact(now_us)
            self._compact_us = elapsed_us + (COMPACT_US if done else COMPACT_US // 100)
        return dropped

    def stepped(self, step_us: int) -> None:
        """The wall clock was set, forward or back."""
        if self.log is not None:
            if step_us < 0:
                self.log.steps.back(-step_us, self.log.next)
            else:
                self.log.steps.forward(step_us)

    def _elapsed_us(self, now_us: int) -> int:
        return now_us - self._clock.wall_ahead_us

    def close(self) -> None:
        """Give the files back. Idempotent."""
        if self.log is not None:
            if self.consumer_calls is not None and not self.log.failed:
                with contextlib.suppress(
                    LogWriteFailed
                ):  # then what was settled last is handed out again
                    self.consumer_calls.close()
            self._shut(self.log)

    def end(self, reason: str) -> None:
        """The stream is deleted: whoever waits hears so."""
        self.refuse_waiting(reason, "no-stream")
        self._failed(self.recorder.take(), LogWriteFailed(self.path, reason))
        self.close()


def _no_dead_letters(consumer: str, dead: list[Dead]) -> None:
    raise LogWriteFailed("", "the stream has no log for dead letters")
