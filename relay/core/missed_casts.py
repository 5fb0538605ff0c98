"""Casts that disconnected relays and sites may have missed, to report to their receivers when they are back.

A receiver that knows a sender counts missing casts by their sequences. A receiver that does not know the
sender cannot.

    link or site lost ──► disconnected ── each cast sent or declared ──► record
        ── up, interest known ──► reconnected ──► GAP

A relay that was restarted has another id. So an unknown relay may be any of those that disconnected: it
gets the gaps that any of them may have missed, and takes the slot of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.wire.kinds import NEVER_US
from relay.core.neighbor import Neighbor, Route
from relay.core.quotas import all_but_a_quarter

ABSENT_US: Final = 3_600_000_000
"""A relay or site that is disconnected for longer is forgotten."""
SILENT_US: Final = 3_000_000
"""A connection is closed after so much silence. See `UNSURE_US`."""
UNSURE_US: Final = 5_000_000
"""What was sent in the last 5 s over a connection that is lost may not have arrived."""
CLAIMED_US: Final = 300_000_000
"""A lost relay may still come back for this long after an unknown one took its slot."""
LOOK_US: Final = UNSURE_US
"""Interval at which peers and casts are forgotten whose time is over, while there are any."""
MAX_DISCONNECTED: Final = 1024
"""Limit of disconnected relays and sites; over it, the one that disconnected first is forgotten."""
MAX_CASTS: Final = 4096
"""Limit of casts (an address and its sender) that are recorded, of all users.

Over it, losses are counted and not reported.
"""

PeerId = bytes | str | int
"""A relay's id, a site's name, or the number of a peer of this relay's predecessor that is not back."""


class _Disconnected:
    """A relay or site that is disconnected."""

    __slots__ = ("claimed", "final", "since", "until_us")

    def __init__(self, since: int, until_us: int, final: bool) -> None:
        self.since = since
        """Position in the order of casts; it may have missed all later ones."""
        self.until_us = until_us
        """When it is forgotten."""
        self.final = final
        """It said goodbye, so that it comes back under another id, if it does."""
        self.claimed = False
        """An unknown relay took its slot."""


class MissedCasts:
    """The relays and sites that are disconnected from one relay, and the casts that they may have missed."""

    def __init__(self, clock: Callable[[], int], last_received_us: Callable[[], int]) -> None:
        """`last_received_us`: when something was received last over the connection that has been silent for longest."""
        self._clock = clock
        self._last_received_us = last_received_us
        self._disconnected: dict[PeerId, _Disconnected] = {}
        """Peer -> its state, in the order in which they disconnected."""
        self._sent: dict[Route, tuple[int, int]] = {}
        """Cast -> (its position in the order, when it was recorded); the latest comes last."""
        self._users: dict[str, int] = {}
        """User -> number of recorded casts of its senders: all but a quarter of the limit at most."""
        self._order = 0
        self.look_us = NEVER_US
        """When `expire` is due."""
        self.on_due: Callable[[int], None] = _ignore
        """Called with `look_us` when it was set."""
        self.unreported = 0
        """Casts whose loss is not reported because the table was full."""

    def __len__(self) -> int:
        return len(self._disconnected)

    def disconnected(self, peer: PeerId, *, final: bool) -> None:
        """Note that a relay or site is not reachable.

        `final`: it said goodbye, so that it has all that was sent before.
        """
        now_us = self._clock()
        self._disconnected.pop(peer, None)
        if len(self._disconnected) >= MAX_DISCONNECTED:
            del self._disconnected[next(iter(self._disconnected))]
        since = self._order
        if not final:
            since = next((self._sent[route][0] for route in self.unconfirmed()), since + 1) - 1
        self._disconnected[peer] = _Disconnected(since, now_us + ABSENT_US, final)
        self._look_later()

    def record(self, route: Route) -> None:
        """Record a cast that is sent for the first time, for the first time over a connection, or while a peer
        is disconnected.
        """
        self._prune()
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
        if self.look_us == NEVER_US:
            self._look_later()

    def unconfirmed(self) -> list[Route]:
        """Return the casts that a connection which is lost now may not have delivered."""
        since_us = self._sure_us()
        return [route for route, (_, sent_us) in self._sent.items() if sent_us > since_us]

    def reconnected(self, peer: PeerId, *, connected: bool = True) -> list[Route]:
        """Return the casts that a relay or site may have missed.

        An unknown one that is `connected` to this relay may be one that left.
        """
        self.expire()
        since = self._order
        if peer in self._disconnected:
            since = self._disconnected.pop(peer).since
        elif connected:
            since = self._claim(peer)
        record = [route for route, (at, _) in self._sent.items() if at > since]
        self._prune()
        return record

    def _claim(self, peer: PeerId) -> int:
        """Let an unknown relay take the slot of one that left; return the position from which it may have
        missed casts.
        """
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
        """Forget peers that have been disconnected for too long, and casts that none of the others can have missed."""
        now_us = self._clock()
        self._disconnected = {
            peer: entry for peer, entry in self._disconnected.items() if now_us < entry.until_us
        }
        self._prune()
        self.look_us = NEVER_US
        if self._sent or self._disconnected:
            self._look_later()

    def _look_later(self) -> None:
        self.look_us = self._clock() + LOOK_US
        self.on_due(self.look_us)

    def _sure_us(self) -> int:
        """Return the time before which everything sent has arrived or its connection is closed.

        While this process is paused, nothing is received.
        """
        return min(self._clock(), self._last_received_us() + SILENT_US) - UNSURE_US

    def _prune(self) -> None:
        """Remove casts that no disconnected peer can have missed, nor one that disconnects now."""
        first = min((entry.since for entry in self._disconnected.values()), default=self._order)
        unsure_us = self._sure_us() if self._sent else 0
        while self._sent:
            route = next(iter(self._sent))
            at, sent_us = self._sent[route]
            if at > first or sent_us > unsure_us:
                return
            self._drop(route)

    def forget(self, link: Neighbor) -> None:
        """Remove the casts that came over a closed link: their sender's relay reports them."""
        for route in [route for route in self._sent if route.neighbor is link]:
            self._drop(route)

    def _drop(self, route: Route) -> None:
        del self._sent[route]
        user = route.neighbor.user
        self._users[user] -= 1
        if not self._users[user]:
            del self._users[user]


def _ignore(look_us: int) -> None:
    """Default for `on_due`."""
