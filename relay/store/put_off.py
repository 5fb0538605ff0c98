"""Calls at one stream that wait for records from the bucket, and are then carried out again from their beginning."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Final

from relay.store.errors import RecordsAway
from relay.store.session import IncomingCall

MAX_PUT_OFF: Final = 16_384
"""Calls that wait for records of one stream. One more is refused."""


class PutOff:
    """What waits, by the order of arrival."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[IncomingCall, Callable[[], None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, incoming: IncomingCall, away: RecordsAway, again: Callable[[], None]) -> None:
        """Call `again` when the records are there, or cannot be had."""
        if len(self._calls) >= MAX_PUT_OFF:
            incoming.refuse(
                "leaving", f"{MAX_PUT_OFF} calls already wait for old records of this stream, which is the limit; try again"
            )  # fmt: skip
            return
        self._count += 1
        self._calls[self._count] = incoming, again
        away.when((self, self._count), partial(self._arrived, self._count))

    def _arrived(self, number: int) -> None:
        found = self._calls.pop(number, None)
        if found is not None:
            found[1]()

    def callers_left(self, hops: Set[int]) -> None:
        """Refuse the calls, by hop id, whose callers no longer wait, so that the relay forgets them."""
        left = [number for number, (incoming, _) in self._calls.items() if incoming.hop in hops]
        for number in left:
            self._calls.pop(number)[0].refuse("leaving", "the caller no longer waits")

    def refuse(self, code: str, reason: str) -> None:
        """Refuse everything that waits."""
        calls, self._calls = self._calls, {}
        for incoming, _ in calls.values():
            incoming.refuse(code, reason)
