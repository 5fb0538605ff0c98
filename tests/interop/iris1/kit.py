"""A relay, a bridge and both kinds of programs, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from interop.iris1.binding import WITHOUT_CLOSE, Binding, Handler, Limits, Remote, Tunnel

import iris
from iris.testing import LocalCluster
from relay.bridges.iris1.bridge import Bridge
from relay.bridges.iris1.config import Iris1Config

PATIENCE_S = 20.0


class Side:
    """A LocalCluster with a bridge on it."""

    def __init__(self, cluster: LocalCluster, bridge: Bridge) -> None:
        self.cluster = cluster
        self.bridge = bridge
        self.port = bridge.addresses[0][1]
        self._bindings = AsyncExitStack()

    @property
    def counters(self) -> dict[str, int]:
        """The bridge's counters, by cause."""
        return self.bridge.counters

    async def connect(self) -> Binding:
        """Return a client without a service."""
        return await self._keep(Binding())

    async def register(self, name: str, handler: Handler, **limits: Limits) -> Binding:
        """Return a service."""
        return await self._keep(Binding(name, handler, **limits))

    async def _keep(self, binding: Binding) -> Binding:
        await binding.open(self.port)
        self._bindings.push_async_callback(self._leave, binding)
        return binding

    async def _leave(self, binding: Binding) -> None:
        await binding.hang_up()
        # Some tests end a connection without CLOSE; no test breaks a binding in another way.
        assert not set(binding.broken) - {WITHOUT_CLOSE}, binding.broken

    async def raw(self) -> Raw:
        """Return a socket that sends any bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        raw = Raw(reader, writer)
        self._bindings.push_async_callback(raw.hang_up)
        return raw

    async def finish(self) -> None:
        await self._bindings.aclose()


class Raw:
    """A socket to the bridge, which sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, size: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """Return all bytes until the bridge closes the connection."""
        data = b""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while part := await self.reader.read(65536):
                    data += part
            except ConnectionError:
                return data
        return data

    async def hang_up(self) -> None:
        self.writer.transport.abort()
        try:
            await self.writer.wait_closed()
        except OSError:
            return


@asynccontextmanager
async def bridged(**settings: Any) -> AsyncIterator[Side]:
    """A relay and a bridge. At the end no session may be left, and the account must balance. `session`: settings
    of each client's.
    """
    session: dict[str, Any] = settings.pop("session", {})
    settings = {"drain_s": 1.0, "listen": (("127.0.0.1", 0),), **settings}
    async with LocalCluster() as cluster:
        config = Iris1Config(**settings)

        def connect(label: str) -> iris.Client:
            # fmt: off
            return cluster.client(config=iris.ClientConfig(
                label=label, drain_timeout_s=config.drain_s, connect_timeout_s=2.0, message_limit_bytes=64 << 20,
                reconnect_min_s=0.005, reconnect_max_s=0.02, **session,
            ))
            # fmt: on

        bridge = Bridge(config, connect)
        await bridge.start()
        side = Side(cluster, bridge)
        try:
            yield side
        finally:
            try:
                await side.finish()
            finally:
                await bridge.stop()
        assert not bridge.connections


async def until(true: Callable[[], object]) -> None:
    """Return when `true()` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what it waits for has no event of its own
            await asyncio.sleep(0.001)


class Echo(Handler):
    """Echoes requests and tunnels, and collects broadcasts."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.dropped: list[str] = []

    async def broadcast(self, message: bytes) -> None:
        self.received.append(message)

    async def request(self, request: bytes) -> bytes:
        return request

    async def tunnel(self, tunnel: Tunnel) -> None:
        try:
            while True:
                await tunnel.send(await tunnel.recv())
        except Exception:
            return

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)


def collecting(into: list[bytes]) -> Callable[[bytes], Awaitable[None]]:
    """Return a topic handler that appends all events to `into`."""

    async def receive(event: bytes) -> None:
        into.append(event)

    return receive


__all__ = [
    "Binding",
    "Echo",
    "Handler",
    "Limits",
    "Raw",
    "Remote",
    "Side",
    "Tunnel",
    "bridged",
    "collecting",
    "until",
]
