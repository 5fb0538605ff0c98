"""Answers the calls of staged batches at one stream: Stage, Plan, Commit and Discard.

Staged records are written with the next batch of appended ones. They become visible when a Commit names them.
"""

from __future__ import annotations

from collections.abc import Sequence

from iris.wire import streams
from iris.wire.streams import Commit, Discard, Plan, Stage
from relay.store.records import Entry
from relay.store.session import IncomingCall
from relay.store.staging import Staging


class StageCalls:
    """The Stage, Plan, Commit and Discard calls of one stream.

    Methods raise StagingRefused, ValueError or LogError; the store refuses the call with it.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._unanswered: list[IncomingCall] = []

    @property
    def waiting(self) -> bool:
        """Whether a Stage call waits for the next write."""
        return bool(self._unanswered)

    def stage(
        self, incoming: IncomingCall, call: Stage, entries: Sequence[Entry], now_us: int
    ) -> int:
        """Queue the entries of a Stage call and return their bytes. `written` or `refuse` answers the call."""
        if any(new.expect is not None for new in call.records):
            raise ValueError(
                "expect: a staged record has no offset until it is committed; stage it without `expect`"
            )
        numbered = [(new.sequence, entry) for new, entry in zip(call.records, entries, strict=True)]
        size = self._staging.stage(call.writer, call.batch, call.attempt, numbered, now_us)
        self._unanswered.append(incoming)
        return size

    def commit(self, incoming: IncomingCall, call: Commit, now_us: int) -> None:
        """Append the staged records of a Commit call, and answer it."""
        attempts = [(one.attempt, one.records) for one in call.attempts]
        done = self._staging.commit(call.writer, call.batch, attempts, now_us)
        incoming.answer(streams.Committed(done.first, done.next, done.replayed))

    def plan(self, incoming: IncomingCall, call: Plan, now_us: int) -> None:
        """Store what a batch commits in all partitions, and answer with the plan in force."""
        incoming.answer(self._staging.plan(call.writer, call.batch, call.parts, now_us))

    def discard(self, incoming: IncomingCall, call: Discard) -> None:
        """Delete the staged records that a Discard call names, and answer it."""
        dropped = self._staging.discard(call.writer, call.batch, call.attempts)
        incoming.answer(streams.Settled(dropped))

    def written(self) -> None:
        """Answer the waiting Stage calls: their records are on disk."""
        unanswered, self._unanswered = self._unanswered, []
        for incoming in unanswered:
            incoming.answer(streams.Staged())

    def refuse(self, code: str, reason: str) -> None:
        """Refuse the waiting Stage calls: their records were not written."""
        unanswered, self._unanswered = self._unanswered, []
        for incoming in unanswered:
            incoming.refuse(code, reason)
