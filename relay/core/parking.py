"""Calls of this relay's sessions that are not served now, but that a lost relay or site may serve again soon.

    it is not served ── a relay may come back ── waiting ──► served again, or no relay can come back: to `unparked`
                                                         ──► its deadline has passed: EXPIRED
                                                         ──► its session is lost, or the tunnel is given up: dropped

Waiting calls are limited in bytes per session, per user and in total. A call over a limit is refused as
overloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple, Protocol

from iris.wire.frames import Fail
from iris.wire.kinds import Cause, Kind
from relay.core.interest import Interest
from relay.core.neighbor import Neighbor, Route
from relay.core.ports import Accounts
from relay.core.quotas import Table
from relay.core.session import Session

PARKED_BYTES: Final = 16 << 20
"""Bytes that may wait in total. One session may have half of them."""
ANSWERED_KINDS: Final = frozenset({Kind.REQUEST, Kind.SURVEY})
"""Kinds of calls that end when their caller leaves while they wait here."""
PARKED_US: Final = 50_000
"""Interval at which waiting calls are checked if the interest does not change."""


class Prospect(Enum):
    """Whether an address is served."""

    SERVED = 1
    HOPED = 2
    """Not served, but a relay that served it may come back."""
    NONE = 3


class Parked(NamedTuple):
    """A waiting call."""

    origin: Session
    route: Route
    hop: int
    deadline_us: int
    frame: bytes


class Unparked(Protocol):
    """Receives a call that stops waiting, and whether a member serves it now."""

    def __call__(self, entry: Parked, *, served: bool) -> None: ...


class Parking:
    """The waiting calls of one relay.

    `prospect` says whether a route is served; `unparked` receives calls that stop waiting; `why` returns
    the error text for a call whose deadline passed.
    """

    def __init__(
        self,
        accounts: Accounts,
        interest: Interest,
        quota: Table,
        prospect: Callable[[Route], Prospect],
        unparked: Unparked,
        why: Callable[[Route], str],
    ) -> None:
        self._accounts = accounts
        self._interest = interest
        self._quota = quota
        self._prospect = prospect
        self._unparked = unparked
        self._why = why
        self.waiting: deque[Parked] = deque()
        self._openings: set[tuple[int, int]] = set()
        """Waiting tunnel openings: (number of the opener, its hop id)."""
        self._version = 0
        """Version of the interest at the last `expire`."""
        self._due_us = 0

    def add(self, entry: Parked, now_us: int) -> str:
        """Let a call wait and return an empty text, or return why it may not wait."""
        session, size, quota = entry.origin, len(entry.frame), self._quota
        if session.parked_bytes + size > quota.limit // 2:
            return (
                f"calls of this session that wait for a relay to come back already hold {session.parked_bytes} bytes, and "
                f"{size} more are over the limit of {quota.limit // 2}; try again later"
            )
        if not quota.has_room(session.user, size):
            return quota.full(session.user, "bytes that wait for a relay to come back")
        quota.take(session.user, size)
        session.parked_bytes += size
        session.pending += 1
        if entry.route.kind == Kind.TUNNEL_OPEN:
            self._openings.add((session.number, entry.hop))
        self._accounts.out += 1  # and it counts as held until it stops waiting
        due_us = now_us + PARKED_US
        self._due_us = min(self._due_us, due_us) if self.waiting else due_us
        self.waiting.append(entry)
        return ""

    def holds_opening(self, origin: Neighbor, hop: int) -> bool:
        """Whether this tunnel opening waits here."""
        return (origin.number, hop) in self._openings

    def give_up(self, origin: Neighbor, hop: int) -> bool:
        """Drop a tunnel opening that its opener gave up. Returns False if it does not wait here."""
        if not self.holds_opening(origin, hop):
            return False
        for entry in self.waiting:
            if entry.origin is origin and entry.hop == hop and entry.route.kind == Kind.TUNNEL_OPEN:
                self.waiting.remove(entry)
                self._forget(entry)
                self._accounts.drop("given up", 1)
                return True
        return False

    def callers_left(self) -> None:
        """Drop the waiting calls whose callers have left (`Neighbor.left_hops`)."""
        for _ in range(len(self.waiting)):
            entry = self.waiting.popleft()
            if entry.hop in entry.origin.left_hops and entry.route.kind in ANSWERED_KINDS:
                self._forget(entry)
                self._accounts.drop("given up", 1)
            else:
                self.waiting.append(entry)

    @property
    def deadline_us(self) -> int:
        """When `expire` is due while something waits: at once after a change of the interest."""
        return self._due_us if self._version == self._interest.version else 0

    def expire(self, now_us: int) -> None:
        """Check all waiting calls, because the interest has changed or time has passed."""
        self._due_us = now_us + PARKED_US
        self._version = self._interest.version
        prospects: dict[tuple[int, str, bytes, str, bytes, int], Prospect] = {}
        for _ in range(len(self.waiting)):
            entry = self.waiting.popleft()
            origin, route = entry.origin, entry.route
            if origin.closed:
                self._forget(entry)
                self._accounts.drop("session lost", 1)
                continue
            to = (route.relay_id, route.member)
            address = (route.kind, route.name, route.key_id, route.site, *to)
            prospect = prospects.get(address)
            if prospect is None:
                prospect = prospects[address] = self._prospect(route)
            late = entry.deadline_us and entry.deadline_us <= now_us
            if prospect is Prospect.HOPED and not late:
                self.waiting.append(entry)
                continue
            self._forget(entry)
            if late:
                self._accounts.expired += 1
                origin.control(Fail(entry.hop, Cause.EXPIRED, self._why(route)))
            else:
                self._unparked(entry, served=prospect is Prospect.SERVED)

    def _forget(self, entry: Parked) -> None:
        session, size = entry.origin, len(entry.frame)
        self._quota.give(session.user, size)
        session.parked_bytes -= size
        session.pending -= 1
        if entry.route.kind == Kind.TUNNEL_OPEN:
            self._openings.discard((session.number, entry.hop))
        self._accounts.out -= 1
