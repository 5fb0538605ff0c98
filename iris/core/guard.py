"""Replay protection: the receiver's memory of its senders, so that no message is accepted twice or out of order.

A sequence per sender and address protects publications and broadcasts. A replay window of counters per sender and key
protects requests, pushes and surveys. Both tables are bounded: entries idle beyond the freshness limit are removed to
make room. A table full of fresh entries refuses new senders, and `refused_senders` counts them. Half of each table is
split equally among the keys of this process, so that a holder of one key cannot fill it for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from iris.crypto.sframe import ReplayWindow
from iris.wire.kinds import Kind

MAX_SENDERS: Final = 65_536
MAX_SEQUENCES: Final = 262_144
MAX_REPORTED: Final = 4096
"""Most senders that are known only because a relay reported losses of theirs."""
SWEEP_US: Final = 1_000_000
_K = TypeVar("_K")
FlowKey = tuple[int, int, str, bytes, bytes]
"""(kind, number of the local service or 0 for subscriptions, name, key id, sender id)."""


class Shares:
    """Number of entries of a bounded table that each key id uses.

    Half of the table is split equally among the keys; the other half is first come, first served. A fresh entry
    is never removed, because messages could be replayed once its window is forgotten.
    """

    __slots__ = ("_limit", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: dict[bytes, int] = {}

    def has_room(self, key_id: bytes, keys: int) -> bool:
        """Return whether `key_id` may use one more entry. `keys` is the number of keys that this process holds."""
        used = self._used
        keys = max(keys, len(used) + (key_id not in used))
        share = max(1, self._limit // (2 * keys))
        if used.get(key_id, 0) < share:
            return True
        beyond = sum(count - share for count in used.values() if count > share)
        return beyond < self._limit - keys * share

    def take(self, key_id: bytes) -> None:
        """Count one more entry."""
        self._used[key_id] = self._used.get(key_id, 0) + 1

    def give_back(self, key_id: bytes) -> None:
        """Count one entry fewer."""
        left = self._used[key_id] - 1
        if left:
            self._used[key_id] = left
        else:
            del self._used[key_id]


class Sequence:
    """Sequence of one sender's messages for one address: the number expected next, and the losses reported."""

    __slots__ = ("known", "next", "reported", "unknown_at", "used_us")

    def __init__(self) -> None:
        self.next = 0
        """Next expected number; lower ones are late or repeated. Only a message that opened moves it."""
        self.reported = 0
        """Losses below this number were reported by a relay. If such a message arrives, the report was
        wrong and is ignored."""
        self.known = False
        """Whether every delivery without a queue group was followed since some message, so that a jump is a gap."""
        self.unknown_at = -1
        """Value of `next` when a loss of unknown count was last reported."""
        self.used_us = 0

    def missing(self, first: int) -> int:
        """Return how many messages before `first`, which has just arrived, are lost and not yet reported."""
        if first < self.reported:
            self.reported = 0
        return first - max(self.next, self.reported)

    def note_unknown(self) -> bool:
        """Note a loss of unknown count from here on.

        Return False if it was already reported and no message came since.
        """
        if self.unknown_at == self.next:
            return False
        self.unknown_at = self.next
        return True

    def note_lost(self, first: int, count: int) -> tuple[int, int]:
        """Note that a relay dropped `count` messages from `first` on.

        Return how many are missing before `first`, and how many of `count` were not reported yet.
        """
        reported = max(self.next, self.reported)
        end = first + count
        if end < reported:
            return 0, 0
        before = max(0, first - reported) if self.known else 0
        self.reported, self.known = end, True
        return before, end - max(first, reported)


class Sender:
    """One sender under one key: its replay window, made only after a message of it opened."""

    __slots__ = ("used_us", "window")

    def __init__(self) -> None:
        self.window = ReplayWindow()
        self.used_us = 0


class Guard:
    """Both tables of one process. They outlive connections, so a replay after a reconnect is refused, too."""

    def __init__(
        self,
        freshness_us: int,
        *,
        max_senders: int = MAX_SENDERS,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self.freshness_us = freshness_us
        self.keys = 1
        """Number of keys that this process holds, among which the tables are divided."""
        self._senders: dict[tuple[bytes, bytes, int], Sender] = {}
        self._sequences: dict[FlowKey, Sequence] = {}
        self._reported: dict[FlowKey, Sequence] = {}
        """Sequences of senders whose losses a relay reported before any message of theirs opened."""
        self._sender_shares = Shares(max_senders)
        self._sequence_shares = Shares(max_sequences)
        self.refused_senders = 0
        """How often a new sender was refused because a table was full."""
        self._full_until_us: dict[int, int] = {}
        """id of a full table -> time before which none of its entries can become idle."""

    def sender(
        self, key_id: bytes, sender_id: bytes, now_us: int, receiver: int = 0
    ) -> Sender | None:
        """Return the entry of a sender whose message just opened, or None if its key's share is full of fresh entries.

        For a survey, which reaches every service of a process once, `receiver` is the number of the service;
        otherwise 0.
        """
        key = (key_id, sender_id, receiver)
        entry = self._senders.get(key)
        if entry is None:
            shares = self._sender_shares
            if not self._room(self._senders, shares, key_id, now_us, lambda key: key[0]):
                return None
            shares.take(key_id)
            entry = self._senders[key] = Sender()
            entry.used_us = now_us
        return entry

    def sequence(self, key: FlowKey, now_us: int) -> Sequence | None:
        """Return the sequence of a sender for an address, or None if its key's share is full of fresh entries."""
        entry = self._sequences.get(key)
        if entry is None:
            shares = self._sequence_shares
            if not self._room(self._sequences, shares, key[3], now_us, lambda key: key[3]):
                return None
            shares.take(key[3])
            entry = self._reported.pop(key, None) or Sequence()
            self._sequences[key] = entry
            entry.used_us = now_us
        return entry

    def known(self, key: FlowKey) -> Sequence | None:
        """Return the sequence of a sender, or None if no message of it has opened."""
        return self._sequences.get(key)

    def reported(self, key: FlowKey) -> Sequence:
        """Return the sequence of a sender whose losses a relay reported.

        If no message of that sender has opened, the sequence is kept in a small separate table, so that a
        relay's reports do not take room from senders.
        """
        entry = self._sequences.get(key) or self._reported.get(key)
        if entry is None:
            if len(self._reported) >= MAX_REPORTED:
                del self._reported[next(iter(self._reported))]
            entry = self._reported[key] = Sequence()
        return entry

    def resume_topics(self, is_new: Callable[[str], bool]) -> None:
        """Handle new topics, for which `is_new` is true: messages missed so far are not a gap.

        Old ones are still refused.
        """
        self._reported.clear()
        for (kind, _, name, _, _), entry in self._sequences.items():
            if kind == Kind.PUBLISH and entry.known and is_new(name):
                entry.known = False

    def _room(
        self, table: dict[_K, Sender] | dict[_K, Sequence], shares: Shares, key_id: bytes, now_us: int,
        key_of: Callable[[_K], bytes],
    ) -> bool:  # fmt: skip
        """Return whether a table has room for a new entry, after removing entries idle beyond the freshness limit.

        Removing those is safe, because everything that they would refuse is refused as too old. A full table is
        searched again only when its oldest entry may have become idle, and at most once a second, because
        unknown senders may come by the thousand.
        """
        if shares.has_room(key_id, self.keys):
            return True
        if now_us >= self._full_until_us.get(id(table), 0):
            oldest = now_us - 2 * self.freshness_us
            for key in [key for key, entry in table.items() if entry.used_us < oldest]:
                del table[key]
                shares.give_back(key_of(key))
            first = min((entry.used_us for entry in table.values()), default=now_us)
            self._full_until_us[id(table)] = max(
                first + 2 * self.freshness_us + 1, now_us + SWEEP_US
            )
            if shares.has_room(key_id, self.keys):
                return True
        self.refused_senders += 1
        return False
