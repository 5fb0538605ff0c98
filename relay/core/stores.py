"""Whether a store of this relay is starting: calls of streams then wait for it, here and at linked relays.

    the relay starts a store, or one was lost ── starting ──► it has joined for every stream: up
                                              ──► nobody starts it, and `BACK_US` has passed: there is none
                                              ──► its directory or key cannot be used: none, and why is advertised
    a store that is up may take over from one that is gone ── starting ──► it has, or there is nothing: up

A store of a bucket asks for the other stores again and again. If one is silent while the relay looks `HUNG_LOOKS`
times, it hangs, and its session is closed: then another store takes over. Looks are counted, and not the time, because
the relay may have been asleep itself.

A store joins for the stores first, then for each stream, in one go. So the relay sends it PING at its first
JOIN: its PONG follows the rest.
"""

from __future__ import annotations

from typing import Final

from iris.wire import frames
from iris.wire.kinds import NEVER_US
from iris.wire.link_frames import MAX_FAILED
from relay.core.advertiser import Advertiser
from relay.core.quotas import RELAYS_STORE
from relay.core.session import Session

BACK_US: Final = 5_000_000
"""How long a lost store that this relay does not start itself is waited for."""
LOOK_US: Final = 1_000_000
HUNG_LOOKS: Final = 20
"""A healthy store may be busy for half of that: with opening hundreds of logs, or with a slow disk."""
STORE_PING: Final = 2
"""Id of the PING to a store; different from that of a drain."""


class StoreWatch:
    """The stores of one relay."""

    def __init__(self, advertiser: Advertiser) -> None:
        self.deadline_us = NEVER_US
        """When a lost store is waited for no more, or the relay looks for stores that hang."""
        self._advertiser = advertiser
        self._starts_one = False
        self._failed = ""
        """Why the store that this relay starts cannot serve; empty if it can."""
        self._final = False
        """It cannot serve until an operator fixes that."""
        self._ended = False
        self._asked: set[int] = set()
        """Numbers of sessions that have not answered our PING."""
        self._up: dict[int, str] = {}
        """Session number -> user, of stores that are up."""
        self._succeeding: set[int] = set()
        """Those of them that may take over from a store that is gone."""
        self._silent: dict[int, int] = {}
        """Session number -> looks since a store of a bucket asked last."""
        self._back_us = self._look_us = NEVER_US

    @property
    def own_store_is_up(self) -> bool:
        """Whether the store that this relay starts has joined for every stream."""
        return RELAYS_STORE in self._up.values()

    @property
    def own_store_failed(self) -> bool:
        """Whether the store that this relay starts cannot serve until an operator fixes what it lacks."""
        return self._final

    def starts_one(self, now_us: int) -> None:
        """Note that this relay has a store, which it starts whenever there is none."""
        self._starts_one = True
        self._advertise(now_us)

    def set_failure(self, why: str, *, final: bool, now_us: int) -> None:
        """Set why the store that this relay starts cannot serve; empty if it can. Unless `final`, it is waited for."""
        self._failed, self._final = why[:MAX_FAILED], final and bool(why)
        self._advertise(now_us)

    def end(self, now_us: int) -> None:
        """Stop waiting for stores, because this relay stops."""
        self._ended, self._back_us = True, NEVER_US
        self._silent.clear()
        self._schedule()
        self._advertise(now_us)

    def joined(self, session: Session, now_us: int) -> None:
        """Note a store that is about to join for its streams. It is up when it answers."""
        self._asked.add(session.number)
        session.control(frames.Ping(STORE_PING))

    def answered(self, session: Session, pong: frames.Pong, now_us: int) -> None:
        """Note a PONG to our PING; others are ignored."""
        if pong.id == STORE_PING and session.number in self._asked:
            self._asked.discard(session.number)
            self._up[session.number] = session.user
            self._back_us = NEVER_US
            self._schedule()
            self._advertise(now_us)

    def succeeds(self, session: Session, may: bool, now_us: int) -> None:
        """Note whether a store may take over from one that is gone, as it says again and again. Of other sessions this
        is ignored.
        """
        if session.number in self._up and not self._ended:
            if not self._silent:
                self._look_us = now_us + LOOK_US
            self._silent[session.number] = 0
            self._schedule()
        if may != (session.number in self._succeeding) and session.number in self._up:
            (self._succeeding.add if may else self._succeeding.discard)(session.number)
            self._advertise(now_us)

    def session_ended(self, session: Session, now_us: int) -> None:
        """Note that a session has ended; if it was a store, wait for it to come back."""
        self._asked.discard(session.number)
        self._succeeding.discard(session.number)
        self._silent.pop(session.number, None)
        if self._up.pop(session.number, None) is not None and not self._ended:
            self._back_us = now_us + BACK_US
            self._advertise(now_us)
        self._schedule()

    def expire(self, now_us: int) -> list[int]:
        """Stop waiting for a store that did not come back; return the session numbers of stores that hang."""
        if now_us >= self._back_us:
            self._back_us = NEVER_US
            self._advertise(now_us)
        hung: list[int] = []
        if now_us >= self._look_us:
            self._look_us = now_us + LOOK_US
            for number in self._silent:
                self._silent[number] += 1
            hung = [number for number, looks in self._silent.items() if looks > HUNG_LOOKS]
        self._schedule()
        return hung

    def _schedule(self) -> None:
        self.deadline_us = min(self._back_us, self._look_us if self._silent else NEVER_US)

    def _advertise(self, now_us: int) -> None:
        ours = self._starts_one and not self._final and not self.own_store_is_up
        back = now_us < self._back_us < NEVER_US
        starting = (ours or back or bool(self._succeeding)) and not self._ended
        self._advertiser.set_store(starting=starting, failed=self._failed, now_us=now_us)
