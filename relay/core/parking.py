"""Calls of this relay's sessions that are not served now, but that a lost relay or site may serve again soon.

    it is not served ── a relay may come back ── waiting ──► served again, or no relay can come back: to `unparked`
                                                         ──► its deadline has passed: EXPIRED
                                                         ──► its session is lost, or the tunnel is given up: dropped

Waiting calls are limited in bytes per session, per user and in total. A call over a limit is refused as
overloaded. They are checked in rounds (`relay.core.rounds`), so that those of one session do not delay others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, Protocol

from iris.wire.frames import Fail
from iris.wire.kinds import Cause, Kind
from relay.core.interest import Interest
from relay.core.neighbor import Neighbor, Route
from relay.core.ports import Accounts
from relay.core.quotas import Table
from relay.core.rounds import Rounds
from relay.core.session import Session

PARKED_BYTES: Final = 16 << 20
"""Bytes that may wait in total. One session may have half of them."""
ANSWERED_KINDS: Final = frozenset({Kind.REQUEST, Kind.SURVEY})
"""Kinds of calls that end when their caller leaves while they wait here."""


class Prospect(Enum):
    """Whether an address is served."""

    SERVED = 1
    HOPED = 2
    """Not served, but a relay that served it may come back."""
    NONE = 3


class Parked:
    """A waiting call."""

    __slots__ = ("deadline_us", "frame", "hop", "origin", "route")

    def __init__(
        self, origin: Session, route: Route, hop: int, deadline_us: int, frame: bytes
    ) -> None:
        self.origin = origin
        self.route = route
        self.hop = hop
        self.deadline_us = deadline_us
        self.frame = frame


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
        self.waiting: Rounds[Parked] = Rounds(self._look)
        self._answered: dict[tuple[int, int], Parked] = {}
        """Waiting calls that end when their caller leaves: (number of the session, its hop id) -> the latest one."""
        self._openings: dict[tuple[int, int], Parked] = {}
        """Waiting tunnel openings: (number of the opener, its hop id) -> call."""
        self._prospects: dict[tuple[int, str, bytes, str, bytes, int], Prospect] = {}
        """Address -> prospect, as far as the present step has looked."""

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
            self._openings[(session.number, entry.hop)] = entry
        elif entry.route.kind in ANSWERED_KINDS:
            self._answered[(session.number, entry.hop)] = entry
        self._accounts.out += 1  # and it counts as held until it stops waiting
        self.waiting.add(session.number, entry, self._interest.version, now_us)
        return ""

    def holds_opening(self, origin: Neighbor, hop: int) -> bool:
        """Whether this tunnel opening waits here."""
        return (origin.number, hop) in self._openings

    def give_up(self, origin: Neighbor, hop: int) -> bool:
        """Drop a tunnel opening that its opener gave up. Returns False if it does not wait here."""
        entry = self._openings.get((origin.number, hop))
        if entry is None:
            return False
        self._forget(entry)
        self._accounts.drop("given up", 1)
        return True

    def callers_left(self, origin: Neighbor, hops: Iterable[int]) -> None:
        """Drop the waiting calls of a session with these hop ids, because their callers have left."""
        for hop in hops:
            entry = self._answered.get((origin.number, hop))
            if entry is not None:
                self._forget(entry)
                self._accounts.drop("given up", 1)

    @property
    def deadline_us(self) -> int:
        """When `expire` is due while something waits: after a change of the interest, as soon as it has rested."""
        return self.waiting.deadline_us(self._interest.version)

    def expire(self, now_us: int) -> None:
        """Check some of the waiting calls, because the interest has changed or time has passed."""
        self.waiting.step(self._interest.version, now_us)
        self._prospects.clear()

    def _look(self, entry: Parked, now_us: int) -> int:
        """Check one waiting call. Return the work beyond that of any look."""
        origin, route = entry.origin, entry.route
        if origin.closed:
            self._forget(entry)
            self._accounts.drop("session lost", 1)
            return 0
        address = (route.kind, route.name, route.key_id, route.site, route.relay_id, route.member)
        prospect = self._prospects.get(address)
        if prospect is None:
            prospect = self._prospects[address] = self._prospect(route)
        late = entry.deadline_us and entry.deadline_us <= now_us
        if prospect is Prospect.HOPED and not late:
            return 0
        self._forget(entry)
        if late:
            self._accounts.expired += 1
            origin.control(Fail(entry.hop, Cause.EXPIRED, self._why(route)))
        else:
            self._unparked(entry, served=prospect is Prospect.SERVED)
        return 0

    def _forget(self, entry: Parked) -> None:
        session, size = entry.origin, len(entry.frame)
        self.waiting.discard(session.number, entry)
        self._quota.give(session.user, size)
        session.parked_bytes -= size
        session.pending -= 1
        which = (session.number, entry.hop)
        for table in (self._openings, self._answered):
            if table.get(which) is entry:
                del table[which]
        self._accounts.out -= 1
