"""Draining a relay that stops: which neighbors have acknowledged it, and when its members may leave.

    drain ── DRAIN, or an empty interest, and PING ──► every session, link and WAN connection
          ◄── frames sent before that, PONG ── acknowledged
    all acknowledged, or `DRAIN_WAIT_US` has passed ── nothing new arrives, but from handlers that run
    no call in flight at a member ──► LEAVEs that were held are done

Calls that were sent before their sender knew of the drain still find the members, because none leaves before all
senders have acknowledged. Handlers that run go on calling, so members stay until none runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from iris.wire import frames
from iris.wire.kinds import NEVER_US
from relay.core.neighbor import Neighbor
from relay.core.session import Session

DRAIN_PING: Final = 1
"""Id of the PING of a relay that stops."""
DRAIN_WAIT_US: Final = 2_000_000
"""Longest wait for acknowledgements; at most a quarter of the grace."""
RUNNING_US: Final = 10_000
"""Shortest interval between two looks at whether calls are in flight at members."""


class Draining:
    """The drain of one relay.

    `leave` handles the LEAVEs that were held, `bye` answers the BYE of a session. `running` says whether a call is in
    flight at a member.
    """

    def __init__(
        self,
        leave: Callable[[Session, frames.Leave], None],
        bye: Callable[[Session], None],
        running: Callable[[], bool],
    ) -> None:
        self.begun = False
        self.cut_calls = self.cut_tunnels = 0
        """Calls and tunnels that ended because a session that took part in them said goodbye."""
        self._bye = bye
        self._byes: dict[int, Session] = {}
        """Session number -> session whose BYE is held."""
        self.acknowledged = True
        """No neighbor can send anything new that does not know of the drain."""
        self.deadline_us = NEVER_US
        self._leave = leave
        self._running = running
        self._open: set[int] = set()
        """Numbers of neighbors that have not answered."""
        self._silent: frozenset[int] = frozenset()
        """Numbers of neighbors that had not answered when the wait ended."""
        self._until_us = 0
        """Time at which the wait for acknowledgements ends."""
        self._leaving: dict[tuple[int, int], tuple[Session, frames.Leave]] = {}
        """(session number, member serial) -> LEAVE that is held."""
        self._after: list[Callable[[], None]] = []
        """What waits until all have acknowledged."""
        self._look_us = 0
        """Time of the next look at the calls in flight, because there may be many sessions."""
        self._released = False
        """Set while held LEAVEs are handled."""

    def begin(self, neighbors: Iterable[Neighbor], grace_ms: int, now_us: int) -> None:
        """Send PING to every neighbor, and start waiting."""
        self.begun, self.acknowledged = True, False
        self._until_us = now_us + min(DRAIN_WAIT_US, 250 * grace_ms)
        for neighbor in neighbors:
            self._open.add(neighbor.number)
            neighbor.control(frames.Ping(DRAIN_PING))
        self.expire(now_us)

    def answered(self, neighbor: Neighbor, pong: frames.Pong, now_us: int) -> None:
        """Note a PONG to our PING; others are ignored."""
        if self._open and pong.id == DRAIN_PING:
            self.forget(neighbor, now_us)

    def has_acknowledged(self, neighbor: Neighbor) -> bool:
        """Whether a neighbor of a stopping relay sends nothing new."""
        return (
            self.begun and neighbor.number not in self._open and neighbor.number not in self._silent
        )

    def forget(self, neighbor: Neighbor, now_us: int) -> None:
        """Stop waiting for a neighbor that has acknowledged or disconnected."""
        if self._open:
            self._open.discard(neighbor.number)
            self.expire(now_us)

    def keep_bye(self, session: Session) -> bool:
        """Hold the BYE of a session until its pushes have ended, so that it gets their failures.

        Returns False if it must be answered now.
        """
        if not self.begun or not session.pending:
            return False
        self._byes[session.number] = session
        return True

    def answer_byes(self, *, over: bool = False) -> None:
        """Answer the held BYEs of sessions that wait for nothing more, or all of them if the grace is `over`."""
        for session in list(self._byes.values()):
            if session.closed or over or not session.pending:
                del self._byes[session.number]
                if not session.closed:
                    self._bye(session)

    def cut(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """Count the calls and tunnels that a session's goodbye ended, from (calls, tunnels) in flight before
        and after it.
        """
        self.cut_calls += before[0] - after[0]
        self.cut_tunnels += before[1] - after[1]

    def after(self, done: Callable[[], None]) -> None:
        """Call `done` once nobody can send anything new that does not know of the drain."""
        if self.acknowledged:
            done()
        else:
            self._after.append(done)

    def hold(self, session: Session, leave: frames.Leave, now_us: int) -> bool:
        """Hold the LEAVE of a member until all have acknowledged and no call is in flight at a member.

        Returns False if it leaves now. A repeated LEAVE is not held.
        """
        key = (session.number, leave.member)
        if not self.begun or self._released or key in self._leaving:
            return False
        self._leaving[key] = (session, leave)
        if self.acknowledged:
            self.deadline_us = max(now_us, self._look_us)
        return True

    def expire(self, now_us: int) -> None:
        """Handle the held LEAVEs once the wait for acknowledgements is over and no call is in flight at a member."""
        if not self.acknowledged:
            if self._open and now_us < self._until_us:
                self.deadline_us = self._until_us
                return
            self.acknowledged = True
            self._silent = frozenset(self._open)
            self._open.clear()
            after, self._after = self._after, []
            for done in after:
                done()
        self._look_us = now_us + RUNNING_US
        if self._leaving and self._running():
            self.deadline_us = self._look_us
            return
        self.deadline_us = NEVER_US
        leaving, self._leaving = self._leaving, {}
        self._released = True
        for session, leave in leaving.values():
            if not session.closed:
                self._leave(session, leave)
        self._released = False
