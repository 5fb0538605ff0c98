"""Leaves sessions without losing what was accepted: those of a relay that stops, and those that were replaced."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from iris.config import ClientConfig
from iris.core.session import Session
from iris.errors import ConnectionLost, IrisError
from iris.nested import IN_HANDLER, handlers_run_at
from iris.registry import leave, leave_groups
from iris.transport import Pump
from iris.wire import frames

LEAVE_POLL_S: Final = 0.005
"""Interval at which a session that is being left is checked for unfinished work."""


class Leaving:
    """The sessions of one client that are being left because their relay stops. They end by themselves."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.pumps: dict[Pump[Session], asyncio.Task[None]] = {}
        """Session being left -> the task that leaves it gracefully."""
        self._parting: dict[Pump[Session], list[asyncio.Future[None]]] = {}
        """Session being left -> the answers to its leaving of queue groups."""
        self._stopping: Pump[Session] | None = None
        """The latest session being left through which running handlers may still call."""

    def start(self, pump: Pump[Session]) -> None:
        """Leave a session whose relay is stopping. What was accepted is written now, and what runs may finish."""
        pump.session.flush()
        self._parting[pump] = leave_groups(pump.session)
        pump.write()
        self._stopping = pump
        task = asyncio.get_running_loop().create_task(self._leave(pump), name="iris-leaving")
        self.pumps[pump] = task
        task.add_done_callback(lambda _: self._left(pump))

    def _left(self, pump: Pump[Session]) -> None:
        del self.pumps[pump], self._parting[pump]

    def calling(self) -> Pump[Session] | None:
        """Return the session through which the caller may call now, if it is a handler that its relay waits for."""
        pump = self._stopping
        if pump is None or not pump.connected or not IN_HANDLER.get():
            return None
        return pump if self._calls_may_follow(pump) else None

    async def fence_all(self) -> None:
        """Return when everything that these sessions have still to deliver was received."""
        for pump in [*self.pumps]:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await fence(pump)

    def parting(self) -> list[asyncio.Future[None]]:
        """Return what is resolved when nothing more comes for queue groups by these sessions."""
        return [answer for answers in self._parting.values() for answer in answers]

    async def wait(self) -> None:
        """Return when all of these sessions have been left."""
        if self.pumps:
            await asyncio.wait(list(self.pumps.values()))

    def abort(self, reason: str) -> list[asyncio.Task[None]]:
        """End these sessions now, and return their tasks, which end in the next turn of the loop."""
        tasks = list(self.pumps.values())
        for task in tasks:
            task.cancel()
        for pump in [*self.pumps]:
            pump.abort(reason)
        return tasks

    async def _leave(self, pump: Pump[Session]) -> None:
        """Leave a session whose relay is stopping: accept nothing new, finish what runs, and send BYE.

        Handlers have most of the relay's grace period for it, and may still call through this session. When the relay
        answers BYE, it has routed all that was accepted.
        """
        session = pump.session
        grace_s = (session.drain_ms or 0) / 1000
        try:
            with contextlib.suppress(IrisError, TimeoutError):
                # BYE must reach the relay before its grace period ends.
                async with asyncio.timeout(grace_s - min(1.0, grace_s / 5)):
                    await fence(pump)  # after this, every JOIN is answered
                    await _leave_all(pump)
                    await asyncio.gather(*self._parting[pump])
                    while (session.busy or self._calls_may_follow(pump)) and pump.connected:  # noqa: ASYNC110 - no event covers all of it
                        await asyncio.sleep(LEAVE_POLL_S)
            if self._stopping is pump:
                self._stopping = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await bye(pump, "moved on: the relay is about to stop")
        finally:
            pump.abort("the relay was stopped")

    def _calls_may_follow(self, pump: Pump[Session]) -> bool:
        """Whether handlers of this process, for which the relay waits, may still call through a session being left."""
        return pump is self._stopping and handlers_run_at(pump.session.relay_id)


async def leave_replaced(old: Pump[Session], new: Pump[Session], config: ClientConfig) -> None:
    """Leave a session after `new` has taken its place: finish what runs, and send BYE."""
    try:
        with contextlib.suppress(IrisError, TimeoutError):
            async with asyncio.timeout(config.connect_timeout_s):
                # What was registered meanwhile must be in effect before the old session ends.
                await fence(new)
                await fence(old)  # after this, every JOIN on it is answered
                await _leave_all(old)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.drain_timeout_s):
                    while old.session.busy and old.connected:
                        await asyncio.sleep(LEAVE_POLL_S)
                        old.turn()
                        old.flush()  # because `touch` writes only for the session in use
            async with asyncio.timeout(config.connect_timeout_s):
                await bye(old, "moved to another session")
    finally:
        old.abort("replaced")


async def fence(pump: Pump[Session]) -> None:
    """Return when the relay has routed everything that was sent on `pump`."""
    waiter = asyncio.get_running_loop().create_future()
    pump.turn()
    pump.session.flush()
    pump.session.ask(frames.Ping, waiter)
    pump.flush()
    await waiter


async def bye(pump: Pump[Session], reason: str) -> None:
    """Flush a session, send BYE, and return when the relay has ended it."""
    if pump.connected:
        pump.turn()
        pump.session.flush()
        while pump.session.tunnels.queued_bytes and pump.connected:  # noqa: ASYNC110 - as in `Leaving._leave`
            await asyncio.sleep(LEAVE_POLL_S)
        pump.turn()
        pump.session.flush()
        pump.session.out.control(frames.Bye(reason))
        pump.flush()
        await pump.closed.wait()


async def _leave_all(pump: Pump[Session]) -> None:
    """Leave with all members of a session; return when the relay dispatches nothing more to them."""
    pump.turn()
    waiters = [leave(pump.session, member) for member in pump.session.members]
    pump.flush()
    if waiters:
        await asyncio.gather(*waiters)
