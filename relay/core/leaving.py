"""Notifies members, stores and relays with a call in flight that its caller has left.

No handler is stopped: it runs to its end unless it reacts itself, and a store takes back a call that waits.
No table lists the calls that a connection waits for, so they are searched: once for all callers that left
since the last search. The more calls there are, the less often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from iris.wire.frames import MAX_CREDIT, CallerLeft
from iris.wire.kinds import NEVER_US, Kind
from relay.core.neighbor import Neighbor

LEFT_MINOR: Final = 2
"""Minor version of sessions and relays that CALLER_LEFT is sent to."""
REST_US: Final = 100_000
"""Shortest time between two searches."""
REST_PER_CALL_US: Final = 2
"""Added to that for each call looked at, so that a thousand sessions that end one by one do not stop a relay."""
_NOTIFIED_KINDS: Final = frozenset({Kind.REQUEST, Kind.SURVEY, Kind.STREAM})
"""Kinds whose callers wait for an answer. A push runs even if its sender left; a tunnel ends by itself."""


class Leaving:
    """Notifies holders of calls whose callers left. `due_us` is when `expire` is due."""

    def __init__(self, neighbors: Mapping[int, Neighbor], limit: int) -> None:
        self._neighbors = neighbors
        self._limit = limit
        self._rest_until_us = 0
        """Time before which no search is made."""
        self._down: set[Neighbor] = set()
        """Neighbors that disconnected since the last search."""
        self.due_us = NEVER_US
        self.notified = 0
        """Calls for which CALLER_LEFT was sent to a member, store or relay."""

    def neighbor_down(self, neighbor: Neighbor, now_us: int) -> None:
        """Note a closed session or connection; if it waits for answers, search for its calls."""
        neighbor.left_hops = set()  # all of its callers left
        if neighbor.pending > 0:
            self._down.add(neighbor)
            self._look(now_us)

    def callers_left(self, neighbor: Neighbor, left: CallerLeft, now_us: int) -> None:
        """Note hop ids of callers behind a relay that have left.

        Ids of calls that were answered meanwhile are ignored.
        """
        room = self._limit - len(neighbor.left_hops)
        neighbor.left_hops.update(left.hops[:room])
        neighbor.dropped_entries += max(0, len(left.hops) - room)
        if neighbor.left_hops:
            self._look(now_us)

    def expire(self, now_us: int) -> None:
        """Search the calls of callers that left, and send CALLER_LEFT to their holders."""
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
