"""The drain of a relay: every session is read to its end, and what cannot be read is reported as a loss.

DRAIN, PING ──► sessions, links        clients move: BYE, or the end of their stream
all have ended, or the time is over ── GAP for what was not read ──► links, sites
                                    ── BYE ──► stores, last: they have received all that they record
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from relay.net.hub import Hub
from relay.net.ports import Driver
from relay.net.sessions import SessionHub, SessionPort

log = logging.getLogger(__name__)

POLL_S: Final = 0.01
DRAIN_QUIET_POLLS: Final = 10
"""How many polls in a row must find nothing running or waiting at links and at sessions that do not send BYE."""
STORE_S: Final = 5.0
"""How long to wait for a store to read the last frames."""


class Stopping:
    """One drain of a relay."""

    def __init__(self, driver: Driver, sessions: SessionHub, hubs: Sequence[Hub]) -> None:
        self._driver = driver
        self._router = driver.router
        self._sessions = sessions
        self._hubs = hubs

    async def run(self, bound_s: float) -> None:
        """Drain for at most `bound_s`, then end the sessions of stores. The caller closes the others."""
        self._driver.turn()
        self._router.drain(int(bound_s * 1000))
        self._driver.settle()
        until_s = time.monotonic() + bound_s
        quiet, logged = 0, False
        while time.monotonic() < until_s and quiet < DRAIN_QUIET_POLLS:
            self._router.drains.answer_byes()
            self._driver.settle()
            if self._idle and not self._remaining:
                break
            if not logged:
                logged = True  # otherwise a drain looks like a hang
                fields = {
                    "sessions": len(self._sessions.ports),
                    "within_s": bound_s,
                    "try": "a second signal ends it now",
                }
                log.info("relay.draining", extra={"fields": fields})
            await asyncio.sleep(POLL_S)
            quiet = quiet + 1 if self._idle and not self._unfinished else 0
        self._driver.turn()
        ended = self._cut(bound_s)
        await self._end_stores(ended and self._router.alone)

    @property
    def _remaining(self) -> list[SessionPort]:
        """Sessions that have greeted and not ended, except those of stores, which end last."""
        ports = self._sessions.ports
        return [port for port in ports if port.session.greeted and not _is_store_only(port)]

    @property
    def _unfinished(self) -> list[SessionPort]:
        """Sessions that are still read: they end with BYE."""
        return [port for port in self._remaining if not port.session.closed]

    @property
    def _idle(self) -> bool:
        """Whether nothing runs, waits or is in transit, and all peers that can start something know of the drain."""
        acknowledged = self._router.drains.acknowledged
        return acknowledged and self._sessions.idle and all(hub.idle for hub in self._hubs)

    def _cut(self, bound_s: float) -> bool:
        """Cut the remaining sessions, log what was in flight and report what may be lost.

        Return whether all had ended.
        """
        # Stores are notified that their streams are complete, so nothing may be received after that.
        self._sessions.cut_ungreeted()
        drains = self._router.drains
        drains.answer_byes(over=True)
        calls, tunnels = self._router.under_way
        calls, tunnels = calls + drains.cut_calls, tunnels + drains.cut_tunnels
        if calls or tunnels:
            fields = {"calls": calls, "tunnels": tunnels, "after_s": bound_s}
            log.warning("relay.cut", extra={"fields": fields})
        unread = self._unfinished
        if unread:
            missed: dict[str, object] = {"sessions": len(unread), "labels": [p.session.label for p in unread[:8]], "after_s": bound_s}  # fmt: skip
            log.warning("relay.unread", extra={"fields": missed})
        for port in unread:
            self._router.unread(port.session)
            port.abort("the relay stopped before the session ended")
        self._driver.settle()
        return not unread

    async def _end_stores(self, complete: bool) -> None:
        """Send BYE to stores, and return when they have read all and closed, or after `STORE_S`."""
        stores = [port for port in self._sessions.ports if _is_store_only(port)]
        for port in stores:
            self._router.end(port.session, complete=complete and not port.held_messages)
        self._driver.settle()
        until_s = time.monotonic() + STORE_S
        while time.monotonic() < until_s and not self._sessions.ports.isdisjoint(stores):  # noqa: ASYNC110 - closes are the stores' to make
            await asyncio.sleep(POLL_S)


def _is_store_only(port: SessionPort) -> bool:
    """Whether a session is that of a store and ends last. One that also publishes is not: it must be read before."""
    return port.session.stores and not port.session.casts
