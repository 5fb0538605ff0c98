"""Calls that end without an answer: their deadline passed long ago, or they have none and nobody waits so long.

Nothing is swept by a timer for each call. What is late is looked for where room is short, at most once a second for each
session or connection; what has no deadline is looked for when the first of it is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.wire.frames import Cause, Fail, Kind
from relay.core.mesh import NEVER_US
from relay.core.session import Handed, Neighbor
from relay.core.surveys import Surveys

LATE_US: Final = 10_000_000
"""What is so much later than its deadline is not waited for, where room is short."""
LIFE_US: Final = 3_600_000_000
"""A call without a deadline is waited for no longer."""
_SWEEP_US: Final = 1_000_000


class Overdue:
    """Ends such calls. `release` is told of each that a member, or the relay behind a link, has no more."""

    def __init__(
        self,
        neighbors: dict[int, Neighbor],
        surveys: Surveys,
        release: Callable[[Handed, int], None],
    ) -> None:
        self._neighbors = neighbors
        self._surveys = surveys
        self._release = release
        self.due_us = NEVER_US
        """When `expire` is due: no call without a deadline is older than `LIFE_US` before."""

    def make_room_for(self, origin: Neighbor, limit: int, now_us: int) -> bool:
        """Remove late calls from what `origin` waits for; whether it then waits for less than `limit`.

        What a hung member was handed stays in the member's account, and must not close other clusters to the caller.
        """
        if now_us < origin.swept_us:
            return False
        origin.swept_us = now_us + _SWEEP_US
        for other in self._neighbors.values():
            for handed in other.handed.values():
                late = handed.deadline_us and handed.deadline_us < now_us
                if late and handed.origin is origin and handed.load.kind != Kind.TUNNEL_OPEN:
                    (handed.survey or handed).ended()
        return origin.pending < limit

    def make_room_at(self, neighbor: Neighbor, now_us: int) -> bool:
        """Forget late calls that a link or WAN connection was handed; False if that was done a moment ago."""
        if now_us < neighbor.swept_us:
            return False
        neighbor.swept_us = now_us + _SWEEP_US
        for hop, handed in list(neighbor.handed.items()):
            late = handed.deadline_us and handed.deadline_us + LATE_US < now_us
            if late and handed.survey is None and handed.load.kind != Kind.TUNNEL_OPEN:
                self._forget(neighbor, hop, handed)
        return True

    def expire(self, now_us: int) -> None:
        """Tell callers that have waited `LIFE_US` for a call without a deadline that it is lost; tunnels live as long as their ends want.

        What a member of this relay was handed stays in its account until it says more.
        """
        soonest = NEVER_US
        for neighbor in list(self._neighbors.values()):
            for hop, handed in list(neighbor.handed.items()):
                until_us = handed.until_us
                if not until_us or handed.load.kind == Kind.TUNNEL_OPEN:
                    continue
                if until_us > now_us:
                    soonest = min(soonest, until_us)
                    continue
                handed.until_us = 0
                if handed.survey is not None:
                    del neighbor.handed[hop]
                    self._surveys.less(handed, self._surveys.owing(handed))
                    continue
                if neighbor.hop_class:
                    self._forget(neighbor, hop, handed)
                handed.ended()
                if not handed.origin.closed:
                    detail = f"it had no deadline, and no answer came for {LIFE_US // 60_000_000} minutes"
                    handed.origin.control(Fail(handed.hop, Cause.LOST, detail, True))
        self.due_us = max(soonest, now_us + LIFE_US // 60) if soonest < NEVER_US else NEVER_US

    def _forget(self, neighbor: Neighbor, hop: int, handed: Handed) -> None:
        """What a link or WAN connection was handed counts as ended there, whatever it says later."""
        del neighbor.handed[hop]
        self._release(handed, hop)
