"""Collects what one log receives until the next commit: publications, broadcasts, pushes and
appends, with gaps in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iris.core.guard import Guard
from iris.wire import frames, streams
from iris.wire.kinds import UNKNOWN_COUNT, Refusal
from relay.store.answers import outcome_to_wire
from relay.store.errors import LogWriteFailed
from relay.store.log import Log
from relay.store.outcomes import Outcome
from relay.store.records import Entry, NewGap, check_entry
from relay.store.session import Bundle, Gate, HeldCredit, IncomingCall

MAX_SENDERS: Final = 65_536
MAX_LOST: Final = 1 << 53
"""Upper bound of a count of lost messages. A larger count can only be invented by a sender."""
DISK_WRITE_FAILED: Final = "disk write failed"
FRESH_US: Final = 600_000_000
"""Senders that were silent for twice as long may be removed from the table of sequences."""


class Pending:
    """An Append call that waits for its records to be on disk."""

    __slots__ = ("incoming", "outcomes")

    def __init__(self, incoming: IncomingCall) -> None:
        self.incoming = incoming
        self.outcomes: list[streams.Outcome] = []


Sink = Bundle | Pending | None
"""Who is notified when an entry is on disk: the sender of a push, a pending Append, or nobody."""

Batch = list[tuple[Entry | NewGap, Sink]]


class Recorder:
    """Collects entries for a log, and notifies their senders after the write."""

    def __init__(self) -> None:
        self.log: Log | None = None
        self.gate: Gate | None = None
        """Holds back the credit of pushes until they are durable; None if a written push is."""
        self.paused = False
        self.lost = 0
        """Messages counted in gap records so far."""
        self.bytes = 0
        """Bytes of bodies in `batch`."""
        self.batch: Batch = []
        self._guard = Guard(FRESH_US, max_sequences=MAX_SENDERS)
        self._unrecorded = 0
        """Messages lost to a failed disk. They are recorded as a gap when the log can be written again."""
        self._unrecorded_more = False
        """More messages were lost to the failed disk, and nobody counted them."""
        self._last_gap = ("", -1)
        """Cause of the last gap of unknown count, and the offset after it."""

    @property
    def complete(self) -> bool:
        """Whether everything received is in the log, as a record or in a gap."""
        return not (self.batch or self._unrecorded or self._unrecorded_more)

    def pause(self, paused: bool) -> None:
        """Stop recording, or start again."""
        if self.paused and not paused:
            self._guard = Guard(
                FRESH_US, max_sequences=MAX_SENDERS
            )  # one gap covers what was missed
        self.paused = paused

    def record(self, bundle: Bundle, elapsed_us: int) -> None:
        """Record a publication or broadcast, unless it is late or repeated.

        Messages missing before it become a gap.
        """
        if self.paused:
            return
        declared = bundle.flow.declared
        key = (declared.kind, 0, declared.name, declared.key_id, declared.sender_id)
        expected = self._guard.sequence(key, elapsed_us)
        if expected is not None:
            if bundle.first < expected.next:
                return
            if expected.known and (missing := expected.missing(bundle.first)):
                self.add_gap(missing, "missing on the way")
            expected.next = bundle.first + bundle.count
            expected.known = True
            expected.used_us = elapsed_us
        self._add(bundle, None)

    def gap(self, gap: frames.Gap, elapsed_us: int) -> None:
        """Record a gap that the relay reported: messages that it dropped on the way here."""
        if gap.count == UNKNOWN_COUNT:
            self.add_gap(None, gap.cause)
            return
        key = (gap.kind, 0, gap.name, gap.key_id, gap.sender_id)
        expected = self._guard.reported(key)
        before, here = expected.note_lost(gap.first, gap.count)
        if before:
            self.add_gap(before, "missing on the way")
        if here:
            self.add_gap(here, gap.cause)
        expected.used_us = elapsed_us

    def add_gap(self, count: int | None, cause: str) -> None:
        """Add a gap of `count` messages (None: unknown) at this point.

        Adjacent gaps with the same cause become one.
        """
        batch = self.batch
        count = None if count is None else min(count, MAX_LOST)
        self.lost = min(self.lost + (count or 0), MAX_LOST)
        if batch and isinstance(last := batch[-1][0], NewGap) and last.cause == cause:
            both = (last.count or 0) + (count or 0)
            known = None if count is None or last.count is None else min(both, MAX_LOST)
            batch[-1] = (NewGap(known, cause), None)
            return
        log = self.log
        if log is not None and not batch and count is None and self._last_gap == (cause, log.next):
            return  # the log already ends with this gap
        batch.append((NewGap(count, cause), None))

    def push(self, bundle: Bundle) -> Refusal | None:
        """Record a push; return None, or the reason for refusing it."""
        if self.paused:
            return Refusal.LEAVING
        if self.log is None or self.log.failed:
            return Refusal.FULL
        return None if self._add(bundle, bundle) else Refusal.UNREADABLE

    def _add(self, bundle: Bundle, sink: Sink) -> bool:
        declared = bundle.flow.declared
        entry = Entry(
            declared.kind,
            declared.name,
            declared.key_id,
            declared.sender_id,
            bundle.end,
            bundle.body,
        )
        try:
            check_entry(entry)
        except ValueError:  # a bundle of no messages
            return False
        self.batch.append((entry, sink))
        self.bytes += len(bundle.body)
        return True

    def append(self, incoming: IncomingCall, entries: Sequence[Entry]) -> None:
        """Record the entries of an Append call."""
        pending = Pending(incoming)
        for entry in entries:
            self.batch.append((entry, pending))
            self.bytes += len(entry.body)

    def take(self) -> Batch:
        """Return the collected batch, and start a new one."""
        batch, self.batch = self.batch, []
        self.bytes = 0
        return batch

    def written(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """Notify the senders of a batch that is on disk."""
        last = batch[-1][0] if batch else None
        if isinstance(last, NewGap) and last.count is None and self.log is not None:
            self._last_gap = (last.cause, self.log.next)
        answered: dict[Pending, None] = {}
        for (_, sink), outcome in zip(batch, outcomes, strict=True):
            if isinstance(sink, Bundle):
                if self.gate is None:
                    sink.session.credit(sink)
                else:
                    self.gate.hold(HeldCredit(sink))
            elif sink is not None:
                sink.outcomes.append(outcome_to_wire(outcome))
                answered[sink] = None
        for pending in answered:
            pending.incoming.answer(streams.Appended(pending.outcomes))

    def without_ids(self, batch: Batch, err: Exception) -> bool:
        """Handle a batch that was not written because the stored message ids cannot be read.

        Refuses the appends with ids and leaves the rest for the next batch. Returns whether there
        were such appends.
        """
        named = dict.fromkeys(
            sink
            for entry, sink in batch
            if isinstance(entry, Entry) and entry.id_hash and isinstance(sink, Pending)
        )
        for pending in named:
            pending.incoming.refuse(
                "disk", f"the stored message ids cannot be read: {err}", sure=True
            )
        if named:
            self.batch = [one for one in batch if one[1] not in named]
        return bool(named)

    def failed(self, batch: Batch, err: LogWriteFailed) -> None:
        """Handle a batch that was not written: refuse its appends and pushes, and count its casts
        for a later gap.
        """
        refused: dict[Pending, None] = {}
        for entry, sink in batch:
            if isinstance(sink, Bundle):
                sink.session.refuse(sink, Refusal.FULL)
            elif sink is not None:
                refused[sink] = None
            elif isinstance(entry, NewGap):
                self._unrecorded += entry.count or 0
                self._unrecorded_more = self._unrecorded_more or entry.count is None
            else:
                count = check_entry(entry)
                self._unrecorded += count
                self.lost += count
        for pending in refused:
            pending.incoming.refuse("disk", err.reason, sure=err.sure)

    def opened(self, log: Log, now_us: int) -> None:
        """Write the gaps for what was lost while the log could not be written. Raises LogError."""
        lost = [NewGap(self._unrecorded, DISK_WRITE_FAILED)] if self._unrecorded else []
        lost += [NewGap(None, DISK_WRITE_FAILED)] if self._unrecorded_more else []
        if lost:
            log.append(lost, now_us)
            self._unrecorded, self._unrecorded_more = 0, False
