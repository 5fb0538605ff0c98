"""Room for calls, which sessions hold by the thousand: taken from their user's share in steps, not one by one.

A session begins with a few places that no share counts. With the last of them in use it takes a step of its user's
share. When the share is used up, what the user's other sessions took and do not need goes back first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from relay.core.neighbor import Neighbor
from relay.core.quotas import Table

FIRST: Final = 64
"""Places of each session that no share counts."""
STEP: Final = 1024
SWEEP_US: Final = 1_000_000
"""Shortest time between two looks for places that sessions do not need."""


class Allowances:
    """The places of one kind that the sessions of a relay have.

    `held` returns how many a session uses, `room` how many it may use, and `allow` sets that.
    """

    def __init__(
        self, table: Table, neighbors: Mapping[int, Neighbor], held: Callable[[Neighbor], int],
        room: Callable[[Neighbor], int], allow: Callable[[Neighbor, int], None],
    ) -> None:  # fmt: skip
        self.table = table
        self._neighbors = neighbors
        self._held = held
        self._room = room
        self._allow = allow
        self._swept_us = 0

    def more(self, neighbor: Neighbor, most: int, now_us: int, count: int = 1) -> bool:
        """Let a neighbor use `count` more places, up to `most`. Links and WAN connections have no other limit."""
        wanted = self._held(neighbor) + count
        if wanted > most:
            return False
        room = self._room(neighbor)
        if neighbor.hop_class:
            room = most
        elif wanted > room:
            room = max(room, min(FIRST, most))
            if step := max(0, min(max(STEP, wanted - room), most - room)) if wanted > room else 0:
                if not self.table.fits(neighbor.user, step):
                    self._sweep(neighbor.user, now_us)
                # A run that does not fit is tried again call by call, and then each one counts.
                has_room = self.table.has_room if count == 1 else self.table.fits
                if not has_room(neighbor.user, step):
                    return False
                self.table.take(neighbor.user, step)
                room += step
        self._allow(neighbor, room)
        return True

    def ended(self, neighbor: Neighbor) -> None:
        """Give back what a session had that ended."""
        if (counted := self._room(neighbor) - FIRST) > 0:
            self.table.give(neighbor.user, counted)
        self._allow(neighbor, 0)

    def _sweep(self, user: str, now_us: int) -> None:
        """Take back the steps that the sessions of a user do not need, if that was not done a moment ago."""
        if now_us < self._swept_us:
            return
        self._swept_us = now_us + SWEEP_US
        for neighbor in self._neighbors.values():
            if neighbor.user != user or neighbor.hop_class:
                continue
            spare = self._room(neighbor) - max(FIRST, self._held(neighbor))
            if spare > 0:
                self.table.give(user, spare)
                self._allow(neighbor, self._room(neighbor) - spare)
