"""The drain of a relay: everybody is read to the end, what that was goes on its way, and where that cannot be had it is told.

DRAIN, PING ──► sessions, links        clients move: BYE, or the end of their stream
all have ended, or the grace is over ── GAP for what was not read ──► links, sites
                                     ── BYE ──► stores, last: what they record has come
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from relay.core.draining import HEARD_MINOR
from relay.net.hub import Hub
from relay.net.ports import Driver
from relay.net.sessions import SessionHub, SessionPort

log = logging.getLogger(__name__)

POLL_S: Final = 0.01
DRAIN_QUIET_POLLS: Final = 10
"""Of sessions that do not say goodbye, and of links, nothing ran and nothing waited so many times in a row."""
STORE_S: Final = 5.0
"""A store that reads no more is not waited for any longer."""


class Stopping:
    """One drain. `run` returns when nothing is left to wait for."""

    def __init__(self, driver: Driver, sessions: SessionHub, hubs: Sequence[Hub]) -> None:
        self._driver = driver
        self._router = driver.router
        self._sessions = sessions
        self._hubs = hubs

    async def run(self, bound_s: float) -> None:
        """Drain for at most `bound_s`, end the sessions of stores, and leave the others to be closed."""
        self._driver.turn()
        self._router.drain(int(bound_s * 1000))
        self._driver.settle()
        until_s = time.monotonic() + bound_s
        quiet, told = 0, False
        while time.monotonic() < until_s and quiet < DRAIN_QUIET_POLLS:
            self._router.drains.answer_byes()
            self._driver.settle()
            if self._idle and not self._remaining:
                break
            if not told:
                told = True  # who watches would take a drain for a hang
                fields = {
                    "sessions": len(self._sessions.ports),
                    "within_s": bound_s,
                    "try": "a second signal ends it now",
                }
                log.info("relay.draining", extra={"fields": fields})
            await asyncio.sleep(POLL_S)
            quiet = quiet + 1 if self._idle and not any(map(self._held, self._remaining)) else 0
        self._driver.turn()
        ended = self._cut(bound_s)
        await self._end_stores(ended and self._router.alone)

    @property
    def _remaining(self) -> list[SessionPort]:
        """Sessions that have not ended, but for those that were never begun and those of stores, which end last."""
        ports = self._sessions.ports
        return [port for port in ports if port.session.greeted and not _is_store_only(port)]

    def _held(self, port: SessionPort) -> bool:
        """Whether a session has to be read until it ends: it says goodbye itself, or it may have sent what nobody would miss."""
        session = port.session
        return not session.closed and (session.minor >= HEARD_MINOR or session.casts)

    @property
    def _idle(self) -> bool:
        """Nothing runs, waits or passes through, and nobody can begin anything new that has not heard of the drain."""
        heard = self._router.drains.heard
        return heard and self._sessions.idle and all(hub.idle for hub in self._hubs)

    def _cut(self, bound_s: float) -> bool:
        """The grace is over: what is still under way is said, and that nobody knows what else was sent. Return whether all had ended."""
        # A store is told that nothing is missing: what is taken after that would be.
        self._sessions.cut_ungreeted()
        drains = self._router.drains
        drains.answer_byes(over=True)
        calls, tunnels = self._router.under_way
        calls, tunnels = calls + drains.cut_calls, tunnels + drains.cut_tunnels
        if calls or tunnels:
            fields = {"calls": calls, "tunnels": tunnels, "after_s": bound_s}
            log.warning("relay.cut", extra={"fields": fields})
        ended = all(port.session.closed for port in self._remaining)
        unread = [port for port in self._remaining if self._held(port)]
        if unread:
            told_of = {"sessions": len(unread), "labels": [p.session.label for p in unread[:8]], "after_s": bound_s}  # fmt: skip
            log.warning("relay.unread", extra={"fields": told_of})
        for port in unread:
            self._router.unread(port.session)
            port.abort("the relay stopped before it had said goodbye")
        self._driver.settle()
        return ended

    async def _end_stores(self, complete: bool) -> None:
        """Say goodbye to stores, and return when they have taken all that was sent to them, or take no more."""
        stores = [port for port in self._sessions.ports if _is_store_only(port)]
        for port in stores:
            self._router.end(port.session, complete=complete and not port.held_messages)
        self._driver.settle()
        until_s = time.monotonic() + STORE_S
        while time.monotonic() < until_s and not self._sessions.ports.isdisjoint(stores):  # noqa: ASYNC110 - closes are the stores' to make
            await asyncio.sleep(POLL_S)


def _is_store_only(port: SessionPort) -> bool:
    """Whether a session is a store's, which ends last. Whoever publishes is none: what it sent is to be read before."""
    return port.session.stores and not port.session.casts
