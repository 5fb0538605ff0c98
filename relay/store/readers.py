"""Readers of one stream: answers their Fetch calls, and holds those that wait for new records (sans-IO)."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

from iris.core.conversation import UP
from iris.wire.streams import Fetch, Fetched
from relay.store.answers import items_to_wire
from relay.store.bucket.replica import Replica
from relay.store.clock import Clock
from relay.store.errors import LogDamaged, RecordsAway, RecordsUnreachable
from relay.store.log import Log
from relay.store.put_off import PutOff
from relay.store.session import IncomingCall

MAX_WAITING: Final = 16_384
"""Readers that wait for one stream. One more is refused."""


class Readers:
    """The readers of a stream. Its owner sets `log`, which is None while it is not open, and `replica`."""

    def __init__(
        self, uuid: bytes, clock: Clock, put_off: PutOff, failed: Callable[[], str]
    ) -> None:
        """`failed` returns why the log is not open."""
        self.log: Log | None = None
        self.replica: Replica | None = None
        """Copies the log to a bucket, which makes it durable; None if the disk does."""
        self._uuid = uuid
        self._clock = clock
        self._put_off = put_off
        self._failed = failed
        self._waiting: list[tuple[int, IncomingCall, Fetch]] = []
        """(end of the wait in elapsed time, its call)."""

    def fetch(
        self, incoming: IncomingCall, call: Fetch, now_us: int, *, wait: bool = False
    ) -> None:
        """Answer a Fetch call now, or when there are new records.

        With `wait`, answer at the next `answer_waiting`.
        """
        log = self.log
        if log is None:
            incoming.refuse("damaged", self._failed())
        elif call.start > log.next:
            incoming.refuse("offset", f"offset {call.start} is beyond the end, {log.next}")
        elif wait or (call.start >= log.shown and call.wait_ms):
            if len(self._waiting) < MAX_WAITING:
                until_us = now_us - self._clock.wall_ahead_us + 1000 * call.wait_ms
                self._waiting.append((until_us, incoming, call))
            else:
                incoming.refuse(
                    "leaving",
                    f"{MAX_WAITING} readers already wait for this stream, which is the limit; close some of them",
                )
        else:
            self._answer(incoming, call, now_us)

    def _answer(self, incoming: IncomingCall, call: Fetch, now_us: int) -> None:
        log = self.log
        assert log is not None
        limit = min(incoming.session.message_limit, call.max_bytes)
        oldest, high_water = log.oldest, log.next if log.limit is None else log.shown
        if self.replica is not None and log.oldest <= call.start <= log.shown:
            # What is known to be in the bucket does not wait for what was appended since.
            oldest, high_water = self.replica.tail.oldest, log.shown
            incoming.rests_on = self.replica.tail.changed
        try:
            chunk = log.read(call.start, limit, now_us=now_us, end=high_water)
        except LogDamaged as err:
            incoming.refuse("damaged", str(err))
            return
        except RecordsAway as away:
            self._put_off.add(
                incoming, away, lambda: self.fetch(incoming, call, self._clock.wall_us)
            )
            return
        except RecordsUnreachable as err:
            incoming.refuse("leaving", str(err))
            return
        items, end = items_to_wire(chunk, limit, call.start)
        # A hole may reach further: then its removals are known to be in the bucket, too.
        incoming.answer(Fetched(items, end, oldest, max(end, high_water), self._uuid))

    def answer_waiting(self, now_us: int) -> None:
        """Answer the readers for whom there are records, those whose wait has ended, and those that were held back."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        end = self.log.shown if self.log is not None else 0
        elapsed_us = now_us - self._clock.wall_ahead_us
        for entry in waiting:
            until_us, incoming, call = entry
            if self.log is None:
                incoming.refuse("damaged", self._failed())
            elif call.start < end or until_us <= elapsed_us:
                self._answer(incoming, call, now_us)
            elif incoming.session.state is UP:
                self._waiting.append(entry)

    def callers_left(self, hops: Set[int]) -> None:
        """Remove waiting calls, by hop id, whose callers no longer wait."""
        left = [entry for entry in self._waiting if entry[1].hop in hops]
        if left:
            self._waiting = [entry for entry in self._waiting if entry[1].hop not in hops]
        for _, incoming, call in left:
            if self.log is not None:  # an empty answer, so that the relay forgets the call
                log = self.log
                incoming.answer(Fetched([], call.start, log.oldest, log.next, self._uuid))

    def refuse(self, code: str, reason: str) -> None:
        """Refuse all that wait; they will try again later."""
        waiting, self._waiting = self._waiting, []
        for _, incoming, _ in waiting:
            incoming.refuse(code, reason)
