"""The calls of staged batches at one stream: attempts are staged, gathered and written with what is appended; a commit shows them."""

from __future__ import annotations

from collections.abc import Sequence

from iris.wire import streams
from iris.wire.streams import Commit, Discard, Stage
from relay.store.log import Log
from relay.store.records import Entry
from relay.store.session import IncomingCall


class StageCalls:
    """What is staged in a log. Calls raise what the store refuses them with: StagingRefused, ValueError or LogError."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._unanswered: list[IncomingCall] = []

    @property
    def waiting(self) -> bool:
        """Whether anybody waits for the next write."""
        return bool(self._unanswered)

    def stage(
        self, incoming: IncomingCall, call: Stage, entries: Sequence[Entry], now_us: int
    ) -> int:
        """Take the entries of a Stage: it is answered by `written`, or `refuse`. Return the bytes that wait for it."""
        if any(new.expect is not None for new in call.records):
            raise ValueError(
                "expect: a staged record has no offset until it is committed; stage it without `expect`"
            )
        numbered = [(new.sequence, entry) for new, entry in zip(call.records, entries, strict=True)]
        size = self._log.stage(call.writer, call.batch, call.attempt, numbered, now_us)
        self._unanswered.append(incoming)
        return size

    def commit(self, incoming: IncomingCall, call: Commit, now_us: int) -> None:
        """Append what is staged, and answer."""
        attempts = [(one.attempt, one.records) for one in call.attempts]
        done = self._log.commit(call.writer, call.batch, attempts, now_us)
        incoming.answer(streams.Committed(done.first, done.next, done.replayed))

    def discard(self, incoming: IncomingCall, call: Discard, now_us: int) -> None:
        """Drop what is staged, and answer."""
        dropped = self._log.discard(call.writer, call.batch, call.attempts, now_us)
        incoming.answer(streams.Settled(dropped))

    def written(self) -> None:
        """What was taken is on disk."""
        unanswered, self._unanswered = self._unanswered, []
        for incoming in unanswered:
            incoming.answer(streams.Staged())

    def refuse(self, code: str, reason: str) -> None:
        """What was taken does not get there."""
        unanswered, self._unanswered = self._unanswered, []
        for incoming in unanswered:
            incoming.refuse(code, reason)
