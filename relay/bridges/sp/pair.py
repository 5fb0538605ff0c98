"""PAIR: one SP connection is one tunnel. When either ends, the bridge ends the other."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

import iris
from iris import EndOfTunnel, IrisError, MessageTooLarge, TunnelBroken
from iris.core.backoff import Backoff
from relay.bridges.sp.bridge import LEAVE_AFTER_S, Bridge
from relay.bridges.sp.config import SocketConfig
from relay.bridges.sp.sockets import Received

PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0


class PairBridge(Bridge):
    """With `in`, each SP connection opens a tunnel to the cluster. With `out`, a tunnel of the cluster
    uses the SP connection.

    nng accepts the next peer as soon as the last connection is closed, so the sender of every message
    is checked.
    """

    def __init__(self, config: SocketConfig, client: iris.Client) -> None:
        super().__init__(config, client)
        self._early: Received | None = None
        """A message of the next peer that arrived before the tunnel of the last peer was over."""

    async def run(self) -> None:
        """Carry one tunnel after the other."""
        await (self._accept() if self.config.direction == "out" else self._open())

    async def _open(self) -> None:
        peers = self.socket.peers
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while True:
            await peers.wait(lambda: self.stopping or bool(peers))
            if self.stopping:
                return
            peer = next(iter(peers.pipes))
            try:
                tunnel = await self.client.open_tunnel(
                    self.config.cluster, timeout=self.config.timeout_s
                )
            except IrisError as err:
                self.tally.count_lost(type(err).__name__, err)
                await asyncio.sleep(backoff.failed())
                self.socket.hang_up(peer)
                await self._until_disconnected(peer)
                continue
            backoff.succeeded()
            await self._carry(tunnel, peer)

    async def _accept(self) -> None:
        peers = self.socket.peers
        service = iris.Service(self.config.cluster, limits=iris.Limits(tunnels=1))

        @service.on_tunnel
        async def carry(tunnel: iris.Tunnel) -> None:
            with contextlib.suppress(TimeoutError):  # it may reconnect: see LEAVE_AFTER_S
                async with asyncio.timeout(LEAVE_AFTER_S):
                    await peers.wait(lambda: bool(peers))
            if peers:
                await self._carry(tunnel, next(iter(peers.pipes)))
            else:
                self.tally.count_lost("no peer")
                tunnel.fail("no SP peer is connected to the bridge")

        await self.serve(service)

    async def _carry(self, tunnel: iris.Tunnel, peer: int) -> None:
        """Carry messages both ways until one side ends, then end the other."""
        self.in_flight += 1
        idle = asyncio.Event()
        to_tunnel = asyncio.create_task(self._to_tunnel(tunnel, peer, idle))
        to_peer = asyncio.create_task(self._to_peer(tunnel, peer))
        disconnected = asyncio.create_task(self._until_disconnected(peer))
        tasks = (to_tunnel, to_peer, disconnected)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done():
                await self._finish_after_disconnect(tunnel, peer, to_tunnel, to_peer, idle)
            elif to_peer.done() and isinstance(to_peer.exception(), EndOfTunnel):
                await self._until_written(disconnected)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for error in results:
                if isinstance(error, Exception) and not isinstance(error, EndOfTunnel | iris.Closed):  # fmt: skip
                    self.tally.count_lost(type(error).__name__, error)
            if any(isinstance(error, TunnelBroken) for error in results):
                tunnel.fail("the bridge disconnected the SP peer")
            await tunnel.close()
            self.socket.hang_up(peer)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.timeout_s):
                    await self._until_disconnected(peer)
            self.ended(0)

    async def _finish_after_disconnect(
        self,
        tunnel: iris.Tunnel,
        peer: int,
        to_tunnel: asyncio.Task[None],
        to_peer: asyncio.Task[None],
        idle: asyncio.Event,
    ) -> None:
        """Send what the disconnected peer had sent, and let the other side finish reading it."""
        delivered = False
        try:
            async with asyncio.timeout(self.config.timeout_s):
                to_peer.cancel()
                await idle.wait()
                to_tunnel.cancel()
                await asyncio.wait((to_tunnel, to_peer))
                if not (to_tunnel.cancelled() and to_peer.cancelled()):
                    return  # the tunnel is over as well
                while (data := self._receive(peer)) is not None:
                    await tunnel.send(data)
                await tunnel.finish()
                delivered = True
                while not tunnel.closed:
                    await tunnel.recv(limit_bytes=self.config.max_message_bytes)
                    self.tally.count_lost("peer gone")
        except EndOfTunnel:
            return
        except (TimeoutError, IrisError) as err:
            self.tally.count_lost(type(err).__name__, err)
            if not delivered:
                tunnel.fail(
                    "the SP peer disconnected, and its last messages could not be delivered"
                )

    async def _until_written(self, disconnected: asyncio.Task[None]) -> None:
        """Wait until the last messages of the ended tunnel are written, before the connection is closed."""
        written = asyncio.create_task(self.socket.writable())
        await asyncio.wait((written, disconnected), timeout=self.config.timeout_s, return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        if written.cancel() and not disconnected.done():
            self.tally.count_lost("slow peer")

    async def _to_tunnel(self, tunnel: iris.Tunnel, peer: int, idle: asyncio.Event) -> None:
        """Send the peer's messages into the tunnel. `idle` is set while no message is half sent."""
        try:
            while True:
                data = self._receive(peer)
                if data is not None:
                    idle.clear()
                    await tunnel.send(data)
                else:
                    idle.set()
                    await self.socket.readable()
        finally:
            idle.set()

    def _receive(self, peer: int) -> bytes | None:
        """Return the next message of a peer, or None.

        Messages left by an earlier peer are counted as lost. The first message of a later peer waits
        for its tunnel.
        """
        for _ in range(self.config.queue_messages + 1):
            message, self._early = self._early or self.socket.receive_message(), None
            if message is None or message.peer == peer:
                return message.data if message is not None else None
            if self.socket.is_connected(message.peer):
                self._early = message
                return None
            self.tally.count_lost("no tunnel")
        return None

    async def _to_peer(self, tunnel: iris.Tunnel, peer: int) -> None:
        while True:
            try:
                data = await tunnel.recv(limit_bytes=self.config.max_message_bytes)
            except MessageTooLarge as err:
                self.tally.count_lost("MessageTooLarge", err)
                continue
            try:
                while not self.socket.is_connected(peer) or not self.socket.send_now(data):
                    await self.socket.writable()
            except asyncio.CancelledError:
                self.tally.count_lost("stopping" if self.stopping else "peer gone")
                raise

    async def _until_disconnected(self, peer: int) -> None:
        peers = self.socket.peers
        await peers.wait(lambda: peer not in peers.pipes)
