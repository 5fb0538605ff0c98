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
_TOLD: Final = frozenset({Kind.REQUEST, Kind.SURVEY, Kind.STREAM})
"""Of these an answer is waited for. A push is to be done whoever sent it; a tunnel ends by itself."""


class Leaving:
    """Tells who has calls of callers that left. `due_us` is when `expire` is to be called."""

    def __init__(self, neighbors: Mapping[int, Neighbor], limit: int) -> None:
        self._neighbors = neighbors
        self._limit = limit
        self._rest_until_us = 0
        self._gone: set[Neighbor] = set()
        """Those that are down since the last look."""
        self.due_us = NEVER_US
        self.told = 0
        """Calls whose callers left, as members, stores and relays were told."""

    def gone(self, neighbor: Neighbor, now_us: int) -> None:
        """A session or connection is down; if it waits for something, that is told."""
        neighbor.left = set()  # all of its callers left
        if neighbor.pending > 0:
            self._gone.add(neighbor)
            self._look(now_us)

    def named(self, neighbor: Neighbor, left: CallerLeft, now_us: int) -> None:
        """A relay says that callers behind it have left. Hop ids of what has been answered meanwhile mean nothing."""
        room = self._limit - len(neighbor.left)
        neighbor.left.update(left.hops[:room])
        neighbor.untaken += max(0, len(left.hops) - room)
        if neighbor.left:
            self._look(now_us)

    def expire(self, now_us: int) -> None:
        """Look for the calls of all that left."""
        self.due_us = NEVER_US
        seen = 0
        gone, self._gone = self._gone, set()
        for neighbor in self._neighbors.values():
            seen += len(neighbor.handed)
            hops = []
            for hop, handed in neighbor.handed.items():
                origin = handed.origin
                left = origin in gone if origin.closed else handed.theirs(hop) in origin.left
                if left and handed.load.kind in _TOLD:
                    hops.append(hop)
            if hops and neighbor.minor >= LEFT_MINOR and not neighbor.closed:
                self.told += len(hops)
                for at in range(0, len(hops), MAX_CREDIT):
                    neighbor.control(CallerLeft(hops[at : at + MAX_CREDIT]))
        for neighbor in self._neighbors.values():
            if neighbor.left:
                neighbor.left = set()
        self._rest_until_us = now_us + max(REST_US, REST_PER_CALL_US * seen)

    def _look(self, now_us: int) -> None:
        if now_us >= self._rest_until_us:
            self.expire(now_us)
        else:
            self.due_us = self._rest_until_us
