"""Notifies members, stores and relays with a call in flight that its caller has left.

    session lost, or its CALLER_LEFT ──► search ──► CALLER_LEFT to the members, stores and relays that have its calls
    link lost ──► search for stores and surveys ──► after the dead time, if it did not come back: the other calls

A handler runs to its end unless its member asked for these notes (JOIN, `cancel`), and a store takes back a call
that waits. No table lists the calls that a connection waits for, so they are searched: once for all callers that
left since the last search. The more calls there are, the less often.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sized
from typing import Any, Final

from iris.wire.frames import MAX_CREDIT, CallerLeft
from iris.wire.kinds import NEVER_US, Kind
from relay.core.link import SUSPENDED_US, Link
from relay.core.neighbor import Dispatched, Neighbor
from relay.core.parking import Parking
from relay.core.site_routes import Wan

REST_US: Final = 100_000
"""Shortest time between two searches."""
REST_PER_CALL_US: Final = 2
"""Added to that for each call looked at, so that a thousand sessions that end one by one do not stop a relay."""
SEARCH_STEP: Final = MAX_CREDIT
"""Calls that are looked at in one step of a search, which takes less than a millisecond."""
SEARCH_STEP_US: Final = 2_000
"""Time between two steps."""
_NOTIFIED_KINDS: Final = frozenset({Kind.REQUEST, Kind.SURVEY, Kind.STREAM})
"""Kinds whose callers wait for an answer. A push runs even if its sender left; a tunnel ends by itself."""


class Leaving:
    """Notifies holders of calls whose callers left. `due_us` is when `expire` is due."""

    def __init__(
        self, neighbors: Mapping[int, Neighbor], limit: int, links: Mapping[bytes, Link], wans: Mapping[bytes, Wan],
        parking: Parking,
    ) -> None:  # fmt: skip
        self._neighbors = neighbors
        self._limit = limit
        self._links = links
        self._wans = wans
        self._parking = parking
        self._rest_until_us = 0
        """Time before which no search is made."""
        self._down: set[Neighbor] = set()
        """Neighbors that disconnected since the last search."""
        self._away: dict[Neighbor, int] = {}
        """Lost links and WAN connections -> when their relay is given up, unless it has come back."""
        self._search: Iterator[None] | None = None
        """The rest of a search that is made in parts."""
        self.asked = False
        """A member has ever asked for callers that left."""
        self.due_us = NEVER_US
        self.notified = 0
        """Calls for which CALLER_LEFT was sent to a member, store or relay."""

    def neighbor_down(self, neighbor: Neighbor, now_us: int) -> None:
        """Note a closed session or connection; if it waits for answers, search for its calls."""
        neighbor.left_hops = set()  # all of its callers left
        if neighbor.pending > 0:
            self._down.add(neighbor)
            if neighbor.hop_class:
                self._away[neighbor] = now_us + SUSPENDED_US
                self.due_us = min(self.due_us, now_us + SUSPENDED_US)
            self._look(now_us)

    def callers_left(self, neighbor: Neighbor, left: CallerLeft, now_us: int) -> None:
        """Note hop ids of callers that have left: of a session, or of those behind a relay.

        Ids of calls that were answered meanwhile are ignored.
        """
        if not neighbor.hop_class and not self._matters():
            return
        room = self._limit - len(neighbor.left_hops)
        neighbor.left_hops.update(left.hops[:room])
        neighbor.dropped_entries += max(0, len(left.hops) - room)
        if neighbor.left_hops:
            self._look(now_us)

    def _matters(self) -> bool:
        """Whether anybody may want to know of a caller that left but is still connected."""
        others: tuple[Sized, ...] = (self._links, self._wans, self._parking.waiting)
        return self.asked or any(map(len, others))

    def expire(self, now_us: int) -> None:
        """Search the calls of callers that left, and send CALLER_LEFT to their holders."""
        self.due_us = now_us + SEARCH_STEP_US
        if self._search is None:
            self._search = self._searching(now_us)
        for _ in self._search:
            return
        self._search = None

    def _searching(self, now_us: int) -> Iterator[None]:
        """Search, in parts. What comes meanwhile waits for the next search."""
        left: dict[Neighbor, set[int]] = {}
        for neighbor in self._neighbors.values():
            if neighbor.left_hops:
                left[neighbor], neighbor.left_hops = neighbor.left_hops, set()
                self._parking.callers_left(neighbor, left[neighbor])
        down, self._down = self._down, set()
        gone = {neighbor for neighbor, due_us in self._away.items() if now_us >= due_us}
        for neighbor in gone:
            del self._away[neighbor]
        lost = {neighbor for neighbor in gone if not self._is_back(neighbor)}
        seen = looked_at = 0
        for neighbor in list(self._neighbors.values()):
            if neighbor.closed:
                continue
            every = list(neighbor.in_flight)
            seen += len(every)
            for at in range(0, len(every), SEARCH_STEP):
                part = every[at : at + SEARCH_STEP]
                hops = [
                    hop
                    for hop in part
                    if (dispatched := neighbor.in_flight.get(hop)) is not None
                    and _has_left(dispatched, neighbor, hop, left, down, lost)
                ]
                for hop in hops:
                    _note(neighbor.in_flight[hop], hop)
                self.notified += len(hops)
                for first in range(0, len(hops), MAX_CREDIT):
                    neighbor.control(CallerLeft(hops[first : first + MAX_CREDIT]))
                looked_at += len(part)
                if looked_at >= SEARCH_STEP:
                    looked_at = 0
                    yield
                    if neighbor.closed:
                        break
        self._rest_until_us = now_us + max(REST_US, REST_PER_CALL_US * seen)
        away_us = min(self._away.values(), default=NEVER_US)
        more = bool(self._down) or any(n.left_hops for n in self._neighbors.values())
        self.due_us = (
            max(0 if more else away_us, self._rest_until_us) if more or self._away else NEVER_US
        )

    def _is_back(self, neighbor: Any) -> bool:
        """Whether the relay behind a lost link or WAN connection is connected again."""
        return neighbor.relay_id in (self._links if isinstance(neighbor, Link) else self._wans)

    def _look(self, now_us: int) -> None:
        if self._search is not None:
            return  # its end sees to it that there is another
        if now_us >= self._rest_until_us:
            self.expire(now_us)
        else:
            self.due_us = min(self.due_us, self._rest_until_us)


def was_told(dispatched: Dispatched, hop: int) -> bool:
    """Return whether the holder of a call was told that its caller has left, so that nobody else needs to get it."""
    return hop in getattr(dispatched, "told", ())


def _note(dispatched: Dispatched, hop: int) -> None:
    if hasattr(dispatched, "told"):
        dispatched.told.add(hop)
    else:
        dispatched.told = {hop}


def _has_left(
    dispatched: Dispatched, holder: Neighbor, hop: int,
    left: Mapping[Neighbor, Container[int]], down: Container[Neighbor], lost: Container[Neighbor],
) -> bool:  # fmt: skip
    """Whether the holder of a call is told that its caller has left."""
    origin = dispatched.origin
    if dispatched.load.kind not in _NOTIFIED_KINDS:
        return False
    if origin.closed:
        return origin in (lost if _may_return(dispatched, holder) else down)
    return dispatched.origin_hop(hop) in left.get(origin, ()) and (
        bool(origin.hop_class) or _wants(dispatched, holder)
    )


def _may_return(dispatched: Dispatched, holder: Neighbor) -> bool:
    """Whether a call of a lost link waits for the link's return, because a handler could be cancelled."""
    if not dispatched.origin.hop_class or dispatched.load.kind == Kind.STREAM:
        return False
    return bool(holder.hop_class) or _wants(dispatched, holder)


def _wants(dispatched: Dispatched, holder: Neighbor) -> bool:
    """Whether the holder of a call is told that its caller, which is still connected, has left it."""
    if holder.hop_class:
        return True
    member = dispatched.load.member
    return member is not None and dispatched.load.kind in member.cancels
