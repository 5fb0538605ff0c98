"""Relays and sites that are away, and the casts that began meanwhile: those behind them hear of the loss when they are back.

Of a sender that was there before, they count what is missing themselves, by its sequence. A sender that began later is unknown to them.
A relay that was started again has another id: one that was not known may be any of those that left, and takes the place of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from relay.core.quotas import all_but_a_quarter
from relay.core.session import Neighbor, Route

AWAY_US: Final = 3_600_000_000
"""Who stays away for longer does not count as coming back."""
UNSURE_US: Final = 5_000_000
"""A connection that is lost may have carried nothing for so long: it is given up after 3 s of silence."""
CLAIMED_US: Final = 300_000_000
"""Who was lost may come back for so long after a relay that was not known took its place: it was another."""
MAX_AWAY: Final = 1024
"""Relays and sites; of more, the one that left first is forgotten."""
MAX_BEGUN: Final = 4096
"""Casts (an address and its sender) that begin while somebody is away, of all users; the loss of more is counted, not told."""

Who = bytes | str | int
"""A relay's id, a site's name, or the number of one that this relay's predecessor was connected to and that is not back."""


class _Left:
    """One that is away."""

    __slots__ = ("claimed", "final", "since", "until_us")

    def __init__(self, since: int, until_us: int, final: bool) -> None:
        self.since = since
        """What began after this place is unknown there."""
        self.until_us = until_us
        """When it is forgotten."""
        self.final = final
        """It said goodbye, or is known by its number alone: it comes back as another."""
        self.claimed = False
        """Another took its place."""


class Away:
    """Who is away from one relay, since when, and what began since."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._left: dict[Who, _Left] = {}
        """Who left first comes first."""
        self._begun: dict[Route, tuple[int, int]] = {}
        """Its place, and when it began: since the first left, or a moment ago."""
        self._users: dict[str, int] = {}
        """User -> how many of these are of its senders: at most all but a quarter."""
        self._order = 0
        self.untold = 0
        """Casts that nobody is told of, for want of room."""

    def __len__(self) -> int:
        return len(self._left)

    def left(self, who: Who, *, final: bool) -> None:
        """A relay or site is not reached any more. Unless that is `final`, for it said goodbye, it may have missed what began before."""
        now_us = self._clock()
        self._left.pop(who, None)
        if len(self._left) >= MAX_AWAY:
            del self._left[next(iter(self._left))]
        since = self._order
        if not final:
            since = next((self._begun[route][0] for route in self.unsure()), since + 1) - 1
        self._left[who] = _Left(since, now_us + AWAY_US, final)

    def began(self, route: Route) -> None:
        """The first message of a cast is being routed, or the first over one more connection."""
        self._tidy()
        if route in self._begun:
            self._drop(route)
        user = route.neighbor.user
        mine = self._users.get(user, 0) + 1
        if len(self._begun) >= MAX_BEGUN or mine > all_but_a_quarter(MAX_BEGUN):
            self.untold += bool(self._left)
            return
        self._users[user] = mine
        self._order += 1
        self._begun[route] = self._order, self._clock()

    def unsure(self) -> list[Route]:
        """Return what began so lately that a connection which is lost now may not have carried it."""
        since_us = self._clock() - UNSURE_US
        return [route for route, (_, began_us) in self._begun.items() if began_us > since_us]

    def back(self, who: Who, *, connected: bool = True) -> list[Route]:
        """Return what was sent while a relay or site was away. If it is `connected` to this relay and was not known, it may be one that left, started again."""
        self.expire()
        since = self._order
        if who in self._left:
            since = self._left.pop(who).since
        elif connected:
            since = self._claim(who)
        began = [route for route, (at, _) in self._begun.items() if at > since]
        self._tidy()
        return began

    def _claim(self, who: Who) -> int:
        """Let one that was not known take the place of one that left; return since when it may have missed anything."""
        kinds = (int,) if isinstance(who, str) else (bytes, int)
        places = [(k, e) for k, e in self._left.items() if isinstance(k, kinds) and not e.claimed]
        if not places:
            return self._order
        since = min(entry.since for _, entry in places)
        place, entry = next((each for each in places if each[1].final), places[0])
        if entry.final:
            del self._left[place]
        else:
            entry.claimed = True
            entry.until_us = min(entry.until_us, self._clock() + CLAIMED_US)
        return since

    def expire(self) -> None:
        """Forget who has been away for too long."""
        now_us = self._clock()
        self._left = {who: entry for who, entry in self._left.items() if now_us < entry.until_us}
        self._tidy()

    def _tidy(self) -> None:
        """Forget what nobody who is away, or leaves in this moment, has to hear."""
        first = min((entry.since for entry in self._left.values()), default=self._order)
        unsure_us = self._clock() - UNSURE_US
        while self._begun:
            route = next(iter(self._begun))
            at, began_us = self._begun[route]
            if at > first or began_us > unsure_us:
                return
            self._drop(route)

    def forget(self, link: Neighbor) -> None:
        """A link is gone, and who sent over it is another relay's to tell of."""
        for route in [route for route in self._begun if route.neighbor is link]:
            self._drop(route)

    def _drop(self, route: Route) -> None:
        del self._begun[route]
        user = route.neighbor.user
        self._users[user] -= 1
        if not self._users[user]:
            del self._users[user]
