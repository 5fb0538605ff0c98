"""Calls of this relay's sessions that nobody serves now, and that a relay or site which was lost may serve in a moment.

    nobody serves it ── somebody may come back ── waiting ──► somebody serves it, or nobody can come back: back to `unparked`
                                                          ──► its deadline has passed: EXPIRED
                                                          ──► its session is lost, or the tunnel is given up: dropped

What waits is bounded in bytes for each session, each user and all of them; a call over a bound is refused as overloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple, Protocol

from iris.wire.frames import Cause, Fail, Kind
from relay.core.interest import Interest
from relay.core.ports import Accounts
from relay.core.quotas import Table
from relay.core.session import Neighbor, Route, Session

PARKED_BYTES: Final = 16 << 20
"""Most that waits; of one session half as much."""
PARKED_US: Final = 50_000
"""How often what waits is looked at when nothing changes."""


class Prospect(Enum):
    """Who serves an address."""

    SERVED = 1
    HOPED = 2
    """Nobody, but a relay may come back that does."""
    NONE = 3


class Parked(NamedTuple):
    """A call that waits."""

    origin: Session
    route: Route
    hop: int
    deadline_us: int
    frame: bytes


class Unparked(Protocol):
    """Takes what waits no more, and whether somebody serves it."""

    def __call__(self, entry: Parked, *, served: bool) -> None: ...


class Parking:
    """What waits at one relay. `prospect` says who serves the address of a route; `unparked` takes what waits no more."""

    def __init__(
        self,
        accounts: Accounts,
        interest: Interest,
        quota: Table,
        prospect: Callable[[Route], Prospect],
        unparked: Unparked,
    ) -> None:
        self._accounts = accounts
        self._interest = interest
        self._quota = quota
        self._prospect = prospect
        self._unparked = unparked
        self.waiting: deque[Parked] = deque()
        self._openings: set[tuple[int, int]] = set()
        """Tunnel openings that wait: the number of the opener and its hop id."""
        self._version = 0
        """Of the interest, when what waits was last looked at."""
        self._due_us = 0

    def add(self, entry: Parked, now_us: int) -> str:
        """Let a call wait, or return why it may not; an empty text when it does."""
        session, size, quota = entry.origin, len(entry.frame), self._quota
        if session.parked_bytes + size > quota.limit // 2:
            return f"calls of this session already hold {session.parked_bytes} bytes while they wait for a relay to come back; try again later"
        if not quota.has_room(session.user, size):
            return quota.full(session.user, "bytes that wait for a relay to come back")
        quota.take(session.user, size)
        session.parked_bytes += size
        session.pending += 1
        if entry.route.kind == Kind.TUNNEL_OPEN:
            self._openings.add((session.number, entry.hop))
        self._accounts.out += 1  # and held, until it waits no more
        due_us = now_us + PARKED_US
        self._due_us = min(self._due_us, due_us) if self.waiting else due_us
        self.waiting.append(entry)
        return ""

    def holds_opening(self, origin: Neighbor, hop: int) -> bool:
        """Whether the opening of a tunnel waits here."""
        return (origin.number, hop) in self._openings

    def give_up(self, origin: Neighbor, hop: int) -> bool:
        """Drop the opening of a tunnel that its opener wants no more; False if it does not wait here."""
        if not self.holds_opening(origin, hop):
            return False
        for entry in self.waiting:
            if entry.origin is origin and entry.hop == hop and entry.route.kind == Kind.TUNNEL_OPEN:
                self.waiting.remove(entry)
                self._forget(entry)
                self._accounts.drop("given up", 1)
                return True
        return False

    @property
    def deadline_us(self) -> int:
        """When `expire` is due while something waits: at once after a change of the interest."""
        return self._due_us if self._version == self._interest.version else 0

    def expire(self, now_us: int) -> None:
        """Look at all that waits: the interest has changed, or time has passed."""
        self._due_us = now_us + PARKED_US
        self._version = self._interest.version
        prospects: dict[tuple[int, str, bytes, str], Prospect] = {}
        for _ in range(len(self.waiting)):
            entry = self.waiting.popleft()
            origin, route = entry.origin, entry.route
            if origin.closed:
                self._forget(entry)
                self._accounts.drop("session lost", 1)
                continue
            place = (route.kind, route.name, route.key_id, route.site)
            prospect = prospects.get(place)
            if prospect is None:
                prospect = prospects[place] = self._prospect(route)
            late = entry.deadline_us and entry.deadline_us <= now_us
            if prospect is Prospect.HOPED and not late:
                self.waiting.append(entry)
                continue
            self._forget(entry)
            if late:
                self._accounts.expired += 1
                detail = "nobody came back to serve it in time"
                origin.control(Fail(entry.hop, Cause.EXPIRED, detail))
            else:
                self._unparked(entry, served=prospect is Prospect.SERVED)

    def _forget(self, entry: Parked) -> None:
        session, size = entry.origin, len(entry.frame)
        self._quota.give(session.user, size)
        session.parked_bytes -= size
        session.pending -= 1
        self._openings.discard((session.number, entry.hop))
        self._accounts.out -= 1
