"""Connections that break rules, and honest programs beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interop.iris1.binding import blob, hello, number
from interop.iris1.kit import Echo, Raw, Side

import iris
from relay.bridges.iris1.connection import ClientConnection

HASTY = iris.ClientConfig(drain_timeout_s=0.1)
WELCOME = b"\x00" + blob(b"iris-relay-magic") + blob(b"v1.0-draft2")


@asynccontextmanager
async def beside(side: Side) -> AsyncIterator[None]:
    """A service and its caller, which must not be affected."""
    await side.register("well-behaved", Echo())
    caller = await side.connect()
    yield
    assert await caller.request("well-behaved", b"still there", 5000) == b"still there"
    await caller.close()


class Mute(Echo):
    """Collects requests, and never answers."""

    async def request(self, request: bytes) -> bytes:
        self.received.append(request)
        await asyncio.Event().wait()
        raise AssertionError


def connection(side: Side, raw: Raw) -> ClientConnection:
    """Return the bridge's end of a socket."""
    peer = "{}:{}".format(*raw.writer.get_extra_info("sockname")[:2])
    (found,) = (c for c in side.bridge.connections if c.peer == peer)
    return found


async def greeted(side: Side, cluster: bytes = b"") -> Raw:
    raw = await side.raw()
    raw.send(hello(cluster))
    assert await raw.read(len(WELCOME)) == WELCOME
    return raw


async def opened(raw: Raw, id: int, cluster: bytes) -> None:
    """Open a tunnel with raw bytes."""
    raw.send(b"\x09" + number(id) + blob(cluster) + number(20_000))
    assert await raw.read(6) == b"\x0a" + number(id) + b"\x00" + number(65536)
    assert await raw.read(6) == b"\x0b" + number(id) + number(4 << 20)


def sleeper(name: str) -> iris.Service:
    """Return a native service that accepts tunnels and never reads them."""
    service = iris.Service(name)

    @service.on_tunnel
    async def idle(tunnel: iris.Tunnel) -> None:
        await asyncio.Event().wait()

    return service
