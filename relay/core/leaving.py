"""Callers that have left, while calls of theirs are with members or with other relays: whoever has one is told.

Nobody is made to stop: a member's handler runs to its end unless it wants otherwise, and a store takes back a call that waits. Which
calls a session or connection waits for stands in no table of its own, so they are looked for: once for all that left
meanwhile, and the more there is to look through, the less often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from iris.wire.frames import MAX_CREDIT, CallerLeft
from iris.wire.kinds import NEVER_US, Kind
from relay.core.neighbor import Neighbor

LEFT_MINOR: Final = 2
"""CALLER_LEFT is sent to sessions and relays of this minor version."""
REST_US: Final = 100_000
"""Between two looks, at least, ..."""
REST_PER_CALL_US: Final = 2
"""... and so much for each call that was looked at: a thousand sessions that end one by one do not stop a relay."""
_NOTIFIED_KINDS: Final = frozenset({Kind.REQUEST, Kind.SURVEY, Kind.STREAM})
"""Of these an answer is waited for. A push is to be done whoever sent it; a tunnel ends by itself."""


class Leaving:
    """Tells who has calls of callers that left. `due_us` is when `expire` is to be called."""

    def __init__(self, neighbors: Mapping[int, Neighbor], limit: int) -> None:
        self._neighbors = neighbors
        self._limit = limit
        self._rest_until_us = 0
        self._down: set[Neighbor] = set()
        """Those that are down since the last look."""
        self.due_us = NEVER_US
        self.notified = 0
        """Calls whose callers left, as members, stores and relays were told."""

    def neighbor_down(self, neighbor: Neighbor, now_us: int) -> None:
        """A session or connection is down; if it waits for something, that is told."""
        neighbor.left_hops = set()  # all of its callers left
        if neighbor.pending > 0:
            self._down.add(neighbor)
            self._look(now_us)

    def callers_left(self, neighbor: Neighbor, left: CallerLeft, now_us: int) -> None:
        """A relay says that callers behind it have left. Hop ids of what has been answered meanwhile mean nothing."""
        room = self._limit - len(neighbor.left_hops)
        neighbor.left_hops.update(left.hops[:room])
        neighbor.dropped_entries += max(0, len(left.hops) - room)
        if neighbor.left_hops:
            self._look(now_us)

    def expire(self, now_us: int) -> None:
        """Look for the calls of all that left."""
        self.due_us = NEVER_US
        seen = 0
        neighbor_down, self._down = self._down, set()
        for neighbor in self._neighbors.values():
            seen += len(neighbor.in_flight)
            hops = []
            for hop, dispatched in neighbor.in_flight.items():
                origin = dispatched.origin
                left = (
                    origin in neighbor_down
                    if origin.closed
                    else dispatched.origin_hop(hop) in origin.left_hops
                )
                if left and dispatched.load.kind in _NOTIFIED_KINDS:
                    hops.append(hop)
            if hops and neighbor.minor >= LEFT_MINOR and not neighbor.closed:
                self.notified += len(hops)
                for at in range(0, len(hops), MAX_CREDIT):
                    neighbor.control(CallerLeft(hops[at : at + MAX_CREDIT]))
        for neighbor in self._neighbors.values():
            if neighbor.left_hops:
                neighbor.left_hops = set()
        self._rest_until_us = now_us + max(REST_US, REST_PER_CALL_US * seen)

    def _look(self, now_us: int) -> None:
        if now_us >= self._rest_until_us:
            self.expire(now_us)
        else:
            self.due_us = self._rest_until_us
