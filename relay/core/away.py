"""Relays and sites that are away, and the casts that began meanwhile: those behind them hear of the loss when they are back.

Of a sender that was there before, they count what is missing themselves, by its sequence. A sender that began later is unknown to them.
A relay that was started again has another id: the first that is linked and was not known takes the place of the one that left first.
"""

from __future__ import annotations

from typing import Final

from relay.core.quotas import all_but_a_quarter
from relay.core.session import Route

AWAY_US: Final = 3_600_000_000
"""Who stays away for longer does not count as coming back."""
MAX_AWAY: Final = 1024
"""Relays and sites; of more, the one that left first is forgotten."""
MAX_BEGUN: Final = 4096
"""Casts (an address and its sender) that begin while somebody is away, of all users; the loss of more is counted, not told."""

Who = bytes | str | int
"""A relay's id, a site's name, or the number of one that this relay's predecessor was connected to and that is not back."""


class Away:
    """Who is away from one relay, since when, and what began since."""

    def __init__(self) -> None:
        self._since: dict[Who, tuple[int, int]] = {}
        """When it left, as a number of `began` and in µs; who left first comes first."""
        self._begun: dict[Route, int] = {}
        self._users: dict[str, int] = {}
        """User -> how many of these are of its senders: at most all but a quarter."""
        self._order = 0
        self.untold = 0
        """Casts that nobody is told of, for want of room."""

    def __len__(self) -> int:
        return len(self._since)

    def left(self, who: Who, now_us: int) -> None:
        """A relay or site is not reached any more."""
        self._since.pop(who, None)
        if len(self._since) >= MAX_AWAY:
            del self._since[next(iter(self._since))]
        self._since[who] = self._order, now_us

    def began(self, route: Route) -> None:
        """The first message of a cast is being routed while somebody is away."""
        user = route.neighbor.user
        mine = self._users.get(user, 0) + 1
        if len(self._begun) >= MAX_BEGUN or mine > all_but_a_quarter(MAX_BEGUN):
            self.untold += 1
            return
        self._users[user] = mine
        self._order += 1
        self._begun[route] = self._order

    def back(self, who: Who, now_us: int) -> list[Route]:
        """Return what began while a relay or site was away; one that was never here may be one that left, started again."""
        self.expire(now_us)
        if who not in self._since:
            kinds = (int,) if isinstance(who, str) else (bytes, int)
            who = next((other for other in self._since if isinstance(other, kinds)), who)
        since, _ = self._since.pop(who, (self._order, 0))
        began = [route for route, order in self._begun.items() if order > since]
        self._tidy()
        return began

    def expire(self, now_us: int) -> None:
        """Forget who has been away for too long."""
        for who, (_, left_us) in list(self._since.items()):
            if now_us < left_us + AWAY_US:
                break
            del self._since[who]
        self._tidy()

    def _tidy(self) -> None:
        """Forget what nobody who is away has to hear."""
        first = min((order for order, _ in self._since.values()), default=self._order)
        for route, order in list(self._begun.items()):
            if order > first:
                break
            del self._begun[route]
            user = route.neighbor.user
            self._users[user] -= 1
            if not self._users[user]:
                del self._users[user]
