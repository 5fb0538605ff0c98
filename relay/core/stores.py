"""Whether a store of this relay is on its way: calls of streams wait for it then, here and at the relays that are linked.

    the relay starts a store, or one was lost ── on its way ──► it has joined for every stream: up
                                                            ──► nobody starts it, and `BACK_US` is over: there is none
                                                            ──► its directory or key cannot be used: there is none, and why is told

A store joins for the stores first, then for each stream, in one go. So the relay asks it by PING at the first: its PONG follows the rest.
"""

from __future__ import annotations

from typing import Final

from iris.wire import frames
from iris.wire.frames import MAX_FAILED
from iris.wire.kinds import NEVER_US
from relay.core.advertiser import Advertiser
from relay.core.draining import PING_MINOR
from relay.core.quotas import RELAYS_STORE
from relay.core.session import Session

BACK_US: Final = 5_000_000
"""A store that this relay does not start itself is waited for so long, once it was lost."""
STORE_PING: Final = 2
"""The id of the PING; of a drain's it is another."""


class StoreWatch:
    """The stores of one relay."""

    def __init__(self, advertiser: Advertiser) -> None:
        self.deadline_us = NEVER_US
        self._advertiser = advertiser
        self._starts_one = False
        self._failed = ""
        """Why the store that this relay starts cannot serve."""
        self._final = False
        """It will not before somebody mends that."""
        self._ended = False
        self._asked: set[int] = set()
        self._up: dict[int, str] = {}
        """Number of its session -> user."""

    @property
    def own_store_is_up(self) -> bool:
        """Whether the store that this relay starts has joined for every stream."""
        return RELAYS_STORE in self._up.values()

    @property
    def own_store_failed(self) -> bool:
        """Whether the store that this relay starts cannot serve before somebody mends what it lacks."""
        return self._final

    def starts_one(self, now_us: int) -> None:
        """This relay has a store that it starts whenever there is none."""
        self._starts_one = True
        self._advertise(now_us)

    def set_failure(self, why: str, *, final: bool, now_us: int) -> None:
        """The store that this relay starts says why it cannot serve; empty: it can. Unless that is `final`, it is waited for."""
        self._failed, self._final = why[:MAX_FAILED], final and bool(why)
        self._advertise(now_us)

    def end(self, now_us: int) -> None:
        """This relay stops: no store comes back to it."""
        self._ended, self.deadline_us = True, NEVER_US
        self._advertise(now_us)

    def joined(self, session: Session, now_us: int) -> None:
        """A store is there, and about to say which streams it holds; one of an older minor version counts as up at once."""
        self._asked.add(session.number)
        if session.minor >= PING_MINOR:
            session.control(frames.Ping(STORE_PING))
        else:
            self.answered(session, frames.Pong(STORE_PING), now_us)

    def answered(self, session: Session, pong: frames.Pong, now_us: int) -> None:
        """A PONG came. Others than to our PING are ignored."""
        if pong.id == STORE_PING and session.number in self._asked:
            self._asked.discard(session.number)
            self._up[session.number] = session.user
            self.deadline_us = NEVER_US
            self._advertise(now_us)

    def session_ended(self, session: Session, now_us: int) -> None:
        """A session has ended."""
        self._asked.discard(session.number)
        if self._up.pop(session.number, None) is not None and not self._ended:
            self.deadline_us = now_us + BACK_US
            self._advertise(now_us)

    def expire(self, now_us: int) -> None:
        """A store did not come back."""
        if now_us >= self.deadline_us:
            self.deadline_us = NEVER_US
            self._advertise(now_us)

    def _advertise(self, now_us: int) -> None:
        ours = self._starts_one and not self._final and not self.own_store_is_up
        back = now_us < self.deadline_us < NEVER_US
        starting = (ours or back) and not self._ended
        self._advertiser.set_store(starting=starting, failed=self._failed, now_us=now_us)
