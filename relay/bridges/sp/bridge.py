"""Base class of all entries: socket, session, counts, limits, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import iris
from iris import IrisError, RelayUnavailable, RequestError
from relay.bridges.sp.config import SocketConfig
from relay.bridges.sp.sockets import SpSocket
from relay.bridges.sp.tally import Tally

log = logging.getLogger(__name__)

JOIN_AGAIN_S: Final = 0.1
MESSAGE_BYTES: Final = 256
"""Bytes counted for each queued message besides its payload, so that the number of empty messages is
limited as well.
"""
LEAVE_AFTER_S: Final = 1.0
"""Time without an SP peer after which the bridge leaves its cluster.

A peer that reconnects sooner changes no membership.
"""


class Bridge:
    """One entry at work.

    `open`, then `run` until it is cancelled. Call `stop` first to let messages in flight finish.
    """

    def __init__(self, config: SocketConfig, client: iris.Client) -> None:
        self.config = config
        self.client = client
        self.tally = Tally(config.label)
        self.socket = SpSocket(config, self.tally)
        self.ready = asyncio.Event()
        """Set once the relay knows the subscriptions of this entry."""
        if not config.topics:
            self.ready.set()
        self.stopped = asyncio.Event()
        """Set once nothing new is accepted from either side."""
        self.serving: bool | None = None
        """Whether it is a member of its cluster and not about to leave; None if this kind of entry never is."""
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        client.on_loss = self.lost

    async def run(self) -> None:
        """Work until cancelled, or until the socket is closed."""
        raise NotImplementedError

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self.stopped.is_set()

    def stop(self) -> None:
        """Accept nothing new from the SP side, and leave the cluster."""
        self.stopped.set()
        self.socket.peers.changed()

    async def finished(self) -> None:
        """Return when nothing is in flight."""
        while self.in_flight:
            await self._changed()

    def lost(self, lost: iris.Loss) -> None:
        """Count messages that the session reports as lost."""
        cause = type(lost.error).__name__ if lost.error is not None else f"iris: {lost.cause}"
        self.tally.count_lost(cause, lost.error or lost.name, lost.count or 1)

    def report(self) -> dict[str, object]:
        """Return the counts for a log line.

        `expired` requests waited in the member's queue for longer than their sender allowed.
        """
        return self.tally.report(expired=self.client.counters.get("expired", 0))

    # -- bounds ----------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another message may be in flight."""
        return (
            self.in_flight < self.config.concurrency
            and self.in_flight_bytes <= self.config.queue_bytes - self.config.max_message_bytes
        )

    async def room(self) -> None:
        """Return when another message may be in flight."""
        while not self.has_room():
            await self._changed()

    def start(self, work: Coroutine[Any, Any, None], size: int) -> None:
        """Run `work` as a task that counts as `size` bytes in flight."""
        self.in_flight += 1
        self.in_flight_bytes += size

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.ended(size)
            if task.cancelled():
                self.tally.count_lost("stopping")
            elif (error := task.exception()) is not None:
                self.tally.count_lost(type(error).__name__, error)

        task = asyncio.get_running_loop().create_task(work, name=f"sp {self.config.label}")
        self._tasks.add(task)
        task.add_done_callback(done)

    def ended(self, size: int) -> None:
        """Note that a message of `size` bytes is no longer in flight."""
        self.in_flight -= 1
        self.in_flight_bytes -= size
        self._room.set()

    async def _changed(self) -> None:
        self._room.clear()
        await self._room.wait()

    def give_up(self) -> None:
        """Cancel everything in flight."""
        for task in self._tasks:
            task.cancel()

    # -- from and to all SP peers ----------------------------------------------------------------------------

    async def incoming(self) -> AsyncIterator[bytes]:
        """Iterate over messages of SP peers until `stop`."""
        async for data in self.socket.messages():
            if self.stopping:
                self.tally.count_lost("stopping")
                return
            yield data

    def cast(self, data: bytes) -> None:
        """Send to every peer of a pub or bus socket, or count why it was not sent."""
        if self.socket.closed:
            self.tally.count_lost("stopping")
        elif not self.socket.peers:
            self.tally.count_lost("no peer")
        elif not self.socket.send_now(data):
            self.tally.count_lost("slow peer")

    # -- members ---------------------------------------------------------------------------------------------

    async def serve(self, service: iris.Service) -> None:
        """Be a member while there is an SP peer. Without one, callers get `NoMembers` at once."""
        peers = self.socket.peers
        self.serving = False
        while True:
            await peers.wait(lambda: self.stopping or bool(peers))
            if self.stopping:
                return
            self.in_flight += 1  # until it has left and finished what it accepted
            try:
                async with self.client.serve(service):
                    await self._while_peers()
            except (RequestError, RelayUnavailable) as err:  # the relay was lost while joining
                log.info(
                    "bridge.not_joined",
                    extra={"fields": {"socket": self.config.label, "error": str(err)}},
                )
                await asyncio.sleep(JOIN_AGAIN_S)
            finally:
                self.ended(0)

    async def _while_peers(self) -> None:
        """Return when there has been no SP peer for LEAVE_AFTER_S, or `stop` was called."""
        peers = self.socket.peers
        self.serving = True
        try:
            while self.serving:
                await peers.wait(lambda: self.stopping or not peers)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_AFTER_S):
                        await peers.wait(lambda: self.stopping or bool(peers))
                self.serving = bool(peers) and not self.stopping
        finally:
            self.serving = False


class Backlog:
    """Messages of SP peers that Iris does not accept at once.

    They are queued within `queue_bytes` and count as in flight.
    """

    def __init__(self, bridge: Bridge, send: Callable[[str, bytes], Awaitable[None]]) -> None:
        self._bridge = bridge
        self._send = send
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: str, payload: bytes) -> None:
        """Queue a message for a cluster or topic, or count it as lost."""
        bridge, size = self._bridge, len(payload) + MESSAGE_BYTES
        if self._waiting and bridge.in_flight_bytes + size > bridge.config.queue_bytes:
            bridge.tally.count_lost("queue full")
            return
        self._waiting.append((name, payload))
        bridge.in_flight += 1
        bridge.in_flight_bytes += size
        self._added.set()

    async def drain(self) -> None:
        """Send the messages in order until cancelled; count those that are left as lost."""
        bridge, waiting = self._bridge, self._waiting
        try:
            while True:
                while waiting:
                    name, payload = waiting[0]
                    try:
                        await self._send(name, payload)
                    except IrisError as err:
                        bridge.tally.count_lost(type(err).__name__, err)
                    waiting.popleft()
                    bridge.ended(len(payload) + MESSAGE_BYTES)
                self._added.clear()
                await self._added.wait()
        finally:
            if waiting:
                bridge.tally.count_lost("stopping", "", len(waiting))
