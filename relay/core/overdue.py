"""Calls that end without an answer: their deadline passed long ago, or they have no deadline and waited for too long.

There is no timer per call. Late calls are searched when room is short: at most once a second among all
calls, and once a second for each link or WAN connection. Calls without a deadline are searched when the
first of them is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from iris.wire.frames import Fail
from iris.wire.kinds import NEVER_US, Cause, Kind
from relay.core.neighbor import Dispatched, Neighbor
from relay.core.surveys import Surveys

LATE_US: Final = 10_000_000
"""A call this much past its deadline is given up when room is short."""
LIFE_US: Final = 3_600_000_000
"""A call without a deadline is given up after this time."""
STEP: Final = 256
"""Calls that are looked at in one step."""
SWEPT: Final = 8192
"""The same when a caller has reached its limit."""
STEP_US: Final = 2_000
"""Time between two steps."""
_SWEEP_US: Final = 1_000_000
"""Shortest time between two searches."""


class Overdue:
    """Ends overdue calls. `release` is called for each one, and frees its slot at the member or link."""

    def __init__(
        self,
        neighbors: dict[int, Neighbor],
        surveys: Surveys,
        release: Callable[[Dispatched, int], None],
    ) -> None:
        self._neighbors = neighbors
        self._surveys = surveys
        self._release = release
        self.due_us = NEVER_US
        """Time at which `expire` is due: when the first call without a deadline may reach `LIFE_US`."""
        self._sweep: Iterator[tuple[Neighbor, int]] | None = None
        """The rest of a search for late calls of all origins."""
        self._search: Iterator[None] | None = None
        """The rest of a search for calls that have waited for too long."""
        self._swept_us = 0
        """Time from which all calls may be searched again."""

    def make_room_for(self, origin: Neighbor, limit: int, now_us: int) -> bool:
        """Remove late calls of all origins. Returns True if `origin` then has fewer than `limit` unanswered calls.

        All origins share one search per second: several sessions that each fill their own limit would
        otherwise keep the relay searching. Each call over a limit takes it `SWEPT` calls further. Calls of a
        member that hangs stay in its account, but must not stop the caller from calling other clusters.
        """
        if self._sweep is None:
            if now_us < self._swept_us:
                return False
            self._sweep = self._calls()
        swept = 0
        for neighbor, hop in islice(self._sweep, SWEPT):
            swept += 1
            dispatched = neighbor.in_flight.get(hop)
            if dispatched is None or dispatched.load.kind == Kind.TUNNEL_OPEN:
                continue
            if dispatched.deadline_us and dispatched.deadline_us < now_us:
                (dispatched.survey or dispatched).give_up()
        if swept < SWEPT:
            self._sweep = None
            self._swept_us = now_us + _SWEEP_US
        return origin.pending < limit

    def make_room_at(self, neighbor: Neighbor, now_us: int) -> bool:
        """Forget late calls at a link or WAN connection. Returns False if that was done less than a second ago."""
        if now_us < neighbor.swept_us:
            return False
        neighbor.swept_us = now_us + _SWEEP_US
        for hop, dispatched in list(neighbor.in_flight.items()):
            late = dispatched.deadline_us and dispatched.deadline_us + LATE_US < now_us
            if late and dispatched.survey is None and dispatched.load.kind != Kind.TUNNEL_OPEN:
                self._forget(neighbor, hop, dispatched)
        return True

    def expire(self, now_us: int) -> None:
        """End calls without a deadline that have waited for `LIFE_US`: their callers get LOST.

        Tunnels have no such limit. A call at a member of this relay stays in that member's account until it
        answers.
        """
        if self._search is None:
            self._search = self._ending(now_us)
        for _ in self._search:
            self.due_us = now_us + STEP_US
            return
        self._search = None

    def _ending(self, now_us: int) -> Iterator[None]:
        soonest = NEVER_US
        for looked_at, (neighbor, hop) in enumerate(self._calls(), 1):
            if looked_at % STEP == 0:
                soonest = min(soonest, now_us + LIFE_US)  # of calls that are dispatched meanwhile
                yield
            dispatched = neighbor.in_flight.get(hop)
            if dispatched is not None:
                until_us = dispatched.until_us
                if not until_us or dispatched.load.kind == Kind.TUNNEL_OPEN:
                    continue
                if until_us > now_us:
                    soonest = min(soonest, until_us)
                    continue
                dispatched.until_us = 0
                if dispatched.survey is not None:
                    del neighbor.in_flight[hop]
                    self._surveys.finish_part(dispatched, self._surveys.unanswered(dispatched))
                    continue
                if neighbor.hop_class:
                    self._forget(neighbor, hop, dispatched)
                dispatched.give_up()
                if not dispatched.origin.closed:
                    detail = f"no answer within {LIFE_US // 60_000_000} minutes; the call had no deadline"
                    dispatched.origin.control(
                        Fail(dispatched.origin_hop(hop), Cause.LOST, detail, True)
                    )
        self.due_us = max(soonest, now_us + LIFE_US // 60) if soonest < NEVER_US else NEVER_US

    def _calls(self) -> Iterator[tuple[Neighbor, int]]:
        """Yield every call in flight now: (its holder, hop id). It may have ended."""
        for neighbor in list(self._neighbors.values()):
            for hop in list(neighbor.in_flight):
                yield neighbor, hop

    def _forget(self, neighbor: Neighbor, hop: int, dispatched: Dispatched) -> None:
        """Count a call as ended at a link or WAN connection, whatever arrives from there later."""
        del neighbor.in_flight[hop]
        self._release(dispatched, hop)
