"""What a receiver remembers of senders so that nothing is accepted twice or out of order.

Publish and broadcast are guarded by their sequence (per sender and address); requests, pushes and surveys by a replay
window of counters (per sender and key). Both tables are bounded: idle entries past the freshness limit make room, and
a table that is full of fresh ones refuses new senders, counted in `refused_senders`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from iris.crypto.sframe import ReplayWindow
from iris.wire.frames import Kind

MAX_SENDERS: Final = 65_536
MAX_SEQUENCES: Final = 262_144
_K = TypeVar("_K")
Place = tuple[int, int, str, bytes, bytes]
"""kind, number of the service here (0 for subscriptions), name, key id, sender id."""


class Sequence:
    """What is expected next from one sender for one address."""

    __slots__ = ("known", "next", "used_us")

    def __init__(self) -> None:
        self.next = 0
        """Anything below is late or repeated."""
        self.known = False
        """We have followed this sender without a pause, so a jump is a gap."""
        self.used_us = 0


class Sender:
    """One sender under one key: its replay window, made only after something of it opened."""

    __slots__ = ("used_us", "window")

    def __init__(self) -> None:
        self.window = ReplayWindow()
        self.used_us = 0


class Guard:
    """Both tables of one process. They outlive connections, so a replay across a reconnect is refused too."""

    def __init__(
        self,
        freshness_us: int,
        *,
        max_senders: int = MAX_SENDERS,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self.freshness_us = freshness_us
        self._senders: dict[tuple[bytes, bytes, int], Sender] = {}
        self._sequences: dict[Place, Sequence] = {}
        self._max_senders = max_senders
        self._max_sequences = max_sequences
        self.refused_senders = 0
        self._full_until_us: dict[int, int] = {}
        """By table: nothing becomes idle before then."""

    def sender(
        self, key_id: bytes, sender_id: bytes, now_us: int, receiver: int = 0
    ) -> Sender | None:
        """Return the entry of a sender of whom something just opened; None when the table is full of fresh ones.

        `receiver` is the number of the service here for surveys, which reach every member of a process once; else 0.
        """
        place = (key_id, sender_id, receiver)
        entry = self._senders.get(place)
        if entry is None:
            if len(self._senders) >= self._max_senders and not self._make_room(
                self._senders, now_us
            ):
                self.refused_senders += 1
                return None
            entry = self._senders[place] = Sender()
            entry.used_us = now_us
        return entry

    def sequence(self, place: Place, now_us: int) -> Sequence | None:
        """Return the sequence of a sender for an address; None when the table is full of fresh ones."""
        entry = self._sequences.get(place)
        if entry is None:
            if len(self._sequences) >= self._max_sequences and not self._make_room(
                self._sequences, now_us
            ):
                self.refused_senders += 1
                return None
            entry = self._sequences[place] = Sequence()
            entry.used_us = now_us
        return entry

    def resume_topics(self, is_new: Callable[[str], bool]) -> None:
        """Topics that nobody here followed until now: what was missed of them is no gap, and still never repeated."""
        for (kind, _, name, _, _), entry in self._sequences.items():
            if kind == Kind.PUBLISH and entry.known and is_new(name):
                entry.known = False

    def _make_room(self, table: dict[_K, Sender] | dict[_K, Sequence], now_us: int) -> bool:
        """Drop entries idle past the freshness limit: whatever they would refuse is refused as too old anyway.

        A full table is looked through again only when its oldest entry may have become idle: strangers come by the thousand.
        """
        if now_us < self._full_until_us.get(id(table), 0):
            return False
        oldest = now_us - 2 * self.freshness_us
        idle = [place for place, entry in table.items() if entry.used_us < oldest]
        for place in idle:
            del table[place]
        if not idle:
            first = min((entry.used_us for entry in table.values()), default=now_us)
            self._full_until_us[id(table)] = first + 2 * self.freshness_us + 1
        return bool(idle)
