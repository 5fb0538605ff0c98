"""Relays and sites that are away, and the casts that were sent meanwhile. Whoever is behind them hears of the loss when they are back.

A receiver that heard a sender before counts what is missing by its sequence. A receiver that did not cannot know of the loss.

    link or site lost ──► left ── each cast that is sent or declared ──► began ── link or site up, its interest known ──► back ──► GAP

A relay that was started again has another id. So a relay that was not known may be any of those that left: it is told what any of them
may have missed, and takes the place of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from relay.core.neighbor import Neighbor, Route
from relay.core.quotas import all_but_a_quarter

ABSENT_US: Final = 3_600_000_000
"""Who stays away for longer does not count as coming back."""
SILENT_US: Final = 3_000_000
"""A connection is given up after so much silence: ..."""
UNSURE_US: Final = 5_000_000
"""... what it was given in its last 5 s may not have arrived."""
CLAIMED_US: Final = 300_000_000
"""A relay that was lost may still come back, for so long, after one that was not known took its place."""
MAX_DISCONNECTED: Final = 1024
"""Relays and sites; of more, the one that left first is forgotten."""
MAX_CASTS: Final = 4096
"""Casts (an address and its sender) that are remembered, of all users. The loss of more is counted, not told."""

PeerId = bytes | str | int
"""A relay's id, a site's name, or the number of one that this relay's predecessor was connected to and that is not back."""


class _Disconnected:
    """One that is away."""

    __slots__ = ("claimed", "final", "since", "until_us")

    def __init__(self, since: int, until_us: int, final: bool) -> None:
        self.since = since
        """It may have missed all casts after this place in the order."""
        self.until_us = until_us
        """When it is forgotten."""
        self.final = final
        """It comes back under another id, if it does."""
        self.claimed = False
        """Another took its place."""


class MissedCasts:
    """Who is away from one relay, and the casts that they may have missed."""

    def __init__(self, clock: Callable[[], int], last_received_us: Callable[[], int]) -> None:
        """`heard_us`: when the connection that has been silent for longest was heard last."""
        self._clock = clock
        self._last_received_us = last_received_us
        self._disconnected: dict[PeerId, _Disconnected] = {}
        """Who left first comes first."""
        self._sent: dict[Route, tuple[int, int]] = {}
        """Cast -> its place in the order, and when it was noted. The latest comes last."""
        self._users: dict[str, int] = {}
        """User -> how many of these are of its senders: at most all but a quarter."""
        self._order = 0
        self.unreported = 0
        """Casts that nobody is told of, for want of room."""

    def __len__(self) -> int:
        return len(self._disconnected)

    def disconnected(self, peer: PeerId, *, final: bool) -> None:
        """A relay or site is not reached any more. `final`: it said goodbye, so that it has all that was sent before."""
        now_us = self._clock()
        self._disconnected.pop(peer, None)
        if len(self._disconnected) >= MAX_DISCONNECTED:
            del self._disconnected[next(iter(self._disconnected))]
        since = self._order
        if not final:
            since = next((self._sent[route][0] for route in self.unconfirmed()), since + 1) - 1
        self._disconnected[peer] = _Disconnected(since, now_us + ABSENT_US, final)

    def record(self, route: Route) -> None:
        """A cast is being sent for the first time, for the first time over a connection, or while somebody is away."""
        self._tidy()
        if route in self._sent:
            self._drop(route)
        user = route.neighbor.user
        mine = self._users.get(user, 0) + 1
        if len(self._sent) >= MAX_CASTS or mine > all_but_a_quarter(MAX_CASTS):
            self.unreported += bool(self._disconnected)
            return
        self._users[user] = mine
        self._order += 1
        self._sent[route] = self._order, self._clock()

    def unconfirmed(self) -> list[Route]:
        """Return the casts that a connection which is lost now may not have carried."""
        since_us = self._sure_us()
        return [route for route, (_, sent_us) in self._sent.items() if sent_us > since_us]

    def reconnected(self, peer: PeerId, *, connected: bool = True) -> list[Route]:
        """Return the casts that a relay or site may have missed. One that is `connected` to this relay and was not known may be one that left."""
        self.expire()
        since = self._order
        if peer in self._disconnected:
            since = self._disconnected.pop(peer).since
        elif connected:
            since = self._claim(peer)
        record = [route for route, (at, _) in self._sent.items() if at > since]
        self._tidy()
        return record

    def _claim(self, peer: PeerId) -> int:
        """Let one that was not known take the place of one that left; return since when it may have missed anything."""
        kinds = (int,) if isinstance(peer, str) else (bytes, int)
        claimable = [
            (k, e) for k, e in self._disconnected.items() if isinstance(k, kinds) and not e.claimed
        ]
        if not claimable:
            return self._order
        since = min(entry.since for _, entry in claimable)
        peer, entry = next((each for each in claimable if each[1].final), claimable[0])
        if entry.final:
            del self._disconnected[peer]
        else:
            entry.claimed = True
            entry.until_us = min(entry.until_us, self._clock() + CLAIMED_US)
        return since

    def expire(self) -> None:
        """Forget who has been away for too long."""
        now_us = self._clock()
        self._disconnected = {
            peer: entry for peer, entry in self._disconnected.items() if now_us < entry.until_us
        }
        self._tidy()

    def _sure_us(self) -> int:
        """Return until when what was sent has arrived, or its connection is gone. While this process stands still, nothing is heard."""
        return min(self._clock(), self._last_received_us() + SILENT_US) - UNSURE_US

    def _tidy(self) -> None:
        """Forget what nobody who is away, or leaves in this moment, has to hear."""
        first = min((entry.since for entry in self._disconnected.values()), default=self._order)
        unsure_us = self._sure_us() if self._sent else 0
        while self._sent:
            route = next(iter(self._sent))
            at, sent_us = self._sent[route]
            if at > first or sent_us > unsure_us:
                return
            self._drop(route)

    def forget(self, link: Neighbor) -> None:
        """A link is gone, and who sent over it is another relay's to tell of."""
        for route in [route for route in self._sent if route.neighbor is link]:
            self._drop(route)

    def _drop(self, route: Route) -> None:
        del self._sent[route]
        user = route.neighbor.user
        self._users[user] -= 1
        if not self._users[user]:
            del self._users[user]
