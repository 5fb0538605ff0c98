"""What waits until the other relays know this relay's members and subscriptions.

    SETTLE from a session, or the last of a queue group leaves
        ──► our changes before it are sent to every link (`Advertiser.ask`), then PING
    PONG from every link, or `SETTLE_US` has passed ──► ACK

What another relay sent before it knew arrives before its PONG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iris.wire import frames
from iris.wire.kinds import NEVER_US
from relay.core.advertiser import Advertiser
from relay.core.draining import DRAIN_PING
from relay.core.link import Link
from relay.core.neighbor import Neighbor
from relay.core.session import Session

SETTLE_US: Final = 1_000_000
"""Longest wait for other relays."""
MAX_SETTLING: Final = 64
"""Limit of waiting SETTLEs of one session; over it they are answered at once."""


class _Round:
    """What waits for the answers to one PING: functions to call then."""

    __slots__ = ("open", "until_us", "waiting")

    def __init__(self, waiting: list[Callable[[], None]], until_us: int) -> None:
        self.waiting = waiting
        self.until_us = until_us
        self.open: set[int] = set()
        """Numbers of the links that have not answered."""


class Settling:
    """What waits at one relay. All whose changes are sent together share a PING."""

    def __init__(
        self, links: dict[bytes, Link], advertiser: Advertiser, clock: Callable[[], int]
    ) -> None:
        self.deadline_us = NEVER_US
        self._links = links
        self._advertiser = advertiser
        self._clock = clock
        self._rounds: dict[int, _Round] = {}
        """Id of a PING -> round, oldest first. There is at most one for each flush."""
        self._last = DRAIN_PING
        advertiser.sent = self._begin

    def ask(self, session: Session, settle: frames.Settle) -> None:
        """Handle SETTLE: answer once the other relays know everything that the session asked for before."""
        if not self._links or self._advertiser.leaving or session.settling >= MAX_SETTLING:
            session.control(frames.Ack(settle.id))
            return
        session.settling += 1

        def done() -> None:
            session.settling -= 1
            if not session.closed:
                session.control(frames.Ack(settle.id))

        self.after(done)

    def after(self, done: Callable[[], None]) -> None:
        """Call `done` once the other relays know everything that was changed before."""
        if not self._links:
            done()
            return
        self._advertiser.ask(done, self._clock())

    def _begin(self, asked: list[Callable[[], None]]) -> None:
        """Send PING, because all changes before what was asked have been sent to the links."""
        self._last = number = (self._last + 1) % (1 << 62) or DRAIN_PING + 1
        begun = self._rounds[number] = _Round(asked, self._clock() + SETTLE_US)
        for link in self._links.values():
            begun.open.add(link.number)
            link.control(frames.Ping(number))
        self.deadline_us = min(self.deadline_us, begun.until_us)
        if not begun.open:
            self._end(number)

    def answered(self, neighbor: Neighbor, pong: frames.Pong) -> None:
        """Note a PONG to one of our PINGs; others are ignored."""
        begun = self._rounds.get(pong.id)
        if begun is not None and neighbor.number in begun.open:
            begun.open.remove(neighbor.number)
            if not begun.open:
                self._end(pong.id)

    def forget(self, neighbor: Neighbor) -> None:
        """Stop waiting for a closed link."""
        for number, begun in list(self._rounds.items()):
            begun.open.discard(neighbor.number)
            if not begun.open:
                self._end(number)

    def expire(self, now_us: int) -> None:
        """End what has waited for `SETTLE_US`."""
        for number, begun in list(self._rounds.items()):
            if now_us >= begun.until_us:
                self._end(number)
        self.deadline_us = min((each.until_us for each in self._rounds.values()), default=NEVER_US)

    def _end(self, number: int) -> None:
        for done in self._rounds.pop(number).waiting:
            done()
