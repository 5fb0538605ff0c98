"""A relay that stops: who has heard of it, and when its members may leave.

    drain ── DRAIN, or an empty interest, and PING ──► every session, link and WAN connection
          ◄── what was sent before they heard, PONG ── heard
    all have heard, or `HEARD_US` is over ──► LEAVEs that came are done, and nothing new comes any more

A call that its sender sent before it heard finds the members that were there: none leaves before all senders have heard. Who speaks an
older minor version is not asked: its sessions do not stop calling, and for its relays twice the round trip is waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from iris.wire import frames
from iris.wire.kinds import NEVER_US
from relay.core.link import Link
from relay.core.neighbor import Neighbor
from relay.core.session import Session
from relay.core.site_routes import Wan

DRAIN_PING: Final = 1
"""The id of the PING of a relay that stops."""
PING_MINOR: Final = 2
"""Of relays that answer PING, and of sessions that begin nothing new after DRAIN."""
DRAIN_WAIT_US: Final = 2_000_000
"""Nobody is waited for any longer; of a short grace a quarter."""
UNASKED_US: Final = 100_000


class Draining:
    """The drain of one relay. `leave` takes the LEAVEs that were held back, `bye` answers the BYE of a session."""

    def __init__(
        self, leave: Callable[[Session, frames.Leave], None], bye: Callable[[Session], None]
    ) -> None:
        self.begun = False
        self.cut_calls = self.cut_tunnels = 0
        """Under way when a session that took part in them said goodbye."""
        self._bye = bye
        self._byes: dict[int, Session] = {}
        self.acknowledged = True
        """Nobody who has not heard of the drain can send anything new."""
        self.deadline_us = NEVER_US
        self._leave = leave
        self._open: set[int] = set()
        """Neighbors that have not answered."""
        self._silent: frozenset[int] = frozenset()
        """Those that had not when time was over."""
        self._unasked_us = 0
        """Until then relays that are not asked may have something on the way."""
        self._until_us = 0
        self._leaving: dict[tuple[int, int], tuple[Session, frames.Leave]] = {}
        """By the numbers of session and member."""

    def begin(self, neighbors: Iterable[Neighbor], grace_ms: int, now_us: int) -> None:
        """Ask everybody who was told of the drain whether they have heard."""
        self.begun, self.acknowledged = True, False
        self._until_us = now_us + min(DRAIN_WAIT_US, 250 * grace_ms)
        for neighbor in neighbors:
            if neighbor.minor >= PING_MINOR:
                self._open.add(neighbor.number)
                neighbor.control(frames.Ping(DRAIN_PING))
            elif isinstance(neighbor, (Link, Wan)):
                unasked_us = now_us + UNASKED_US + 2 * neighbor.beats.rtt_us
                self._unasked_us = max(self._unasked_us, unasked_us)
        self.expire(now_us)

    def answered(self, neighbor: Neighbor, pong: frames.Pong, now_us: int) -> None:
        """A PONG came. Others than to our PING are ignored."""
        if self._open and pong.id == DRAIN_PING:
            self.forget(neighbor, now_us)

    def has_acknowledged(self, neighbor: Neighbor) -> bool:
        """Whether a neighbor of a relay that stops sends nothing new. Of who is not asked that is so when nobody is waited for any more."""
        if not self.begun or neighbor.number in self._open or neighbor.number in self._silent:
            return False
        return self.acknowledged or neighbor.minor >= PING_MINOR

    def forget(self, neighbor: Neighbor, now_us: int) -> None:
        """A neighbor has heard, or is gone."""
        if self._open:
            self._open.discard(neighbor.number)
            self.expire(now_us)

    def keep_bye(self, session: Session) -> bool:
        """Keep the BYE of a session until its pushes have ended, whose failures it is told; False: it is answered now."""
        if not self.begun or session.minor < PING_MINOR or not session.pending:
            return False
        self._byes[session.number] = session
        return True

    def answer_byes(self, *, over: bool = False) -> None:
        """Answer those that wait for nothing more, or all if the grace is `over`."""
        for session in list(self._byes.values()):
            if session.closed or over or not session.pending:
                del self._byes[session.number]
                if not session.closed:
                    self._bye(session)

    def cut(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """The goodbye of a session ended calls and tunnels: what was under way before and after it."""
        self.cut_calls += before[0] - after[0]
        self.cut_tunnels += before[1] - after[1]

    def hold(self, session: Session, leave: frames.Leave) -> bool:
        """Keep the LEAVE of a member until all have heard; False: it goes now. One that is repeated is not kept."""
        key = (session.number, leave.member)
        if self.acknowledged or key in self._leaving:
            return False
        self._leaving[key] = (session, leave)
        return True

    def expire(self, now_us: int) -> None:
        """Go on if all have heard, or time is over."""
        if self.acknowledged:
            return
        until_us = self._until_us if self._open else min(self._unasked_us, self._until_us)
        if now_us < until_us:
            self.deadline_us = until_us
            return
        self.acknowledged, self.deadline_us = True, NEVER_US
        self._silent = frozenset(self._open)
        self._open.clear()
        leaving, self._leaving = self._leaving, {}
        for session, leave in leaving.values():
            if not session.closed:
                self._leave(session, leave)
