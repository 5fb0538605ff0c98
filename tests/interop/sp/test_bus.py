"""BUS."""

from __future__ import annotations

import asyncio

import pynng
from interop.sp.kit import Bridge, World, nngcat

import iris


async def test_the_bus_and_the_broadcasts_of_a_cluster_are_one(
    world: World, bridge: Bridge
) -> None:
    received: list[bytes] = []
    come = asyncio.Event()
    service = iris.Service("bus")

    @service.on_broadcast
    def receive(message: bytes) -> None:
        received.append(message)
        come.set()

    url = bridge.url("bus")
    async with world.client() as client, client.serve(service):
        with (
            pynng.Bus0(dial=url, recv_timeout=10_000) as one,
            pynng.Bus0(dial=url, recv_timeout=10_000) as two,
        ):
            await bridge.until_serving("bus", 2)
            await client.wait_for_members("bus", 2, timeout=10)
            await one.asend(b"from the bus")
            async with asyncio.timeout(20):
                await come.wait()
            await client.broadcast("bus", b"from the cluster")
            # This is the first to arrive: a peer's message is not returned to it or to its bus.
            assert await one.arecv() == b"from the cluster"
            assert await two.arecv() == b"from the cluster"
    assert received == [b"from the bus", b"from the cluster"]


async def test_a_bus_program_receives_broadcasts_and_its_own_are_received(
    world: World, bridge: Bridge
) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()
    service = iris.Service("bus")
    service.on_broadcast(received.put_nowait)
    said = ["--data", "hello", "--delay", "1", "--interval", "1"]
    async with world.client() as client, client.serve(service):
        await client.wait_for_members("bus", 1, timeout=10)
        async with nngcat("--bus", "--dial", bridge.url("bus"), "--quoted", *said) as cat:
            async with asyncio.timeout(20):
                assert await received.get() == b"hello"
            await bridge.until_serving("bus")
            await client.wait_for_members("bus", 2, timeout=10)
            await client.broadcast("bus", b"well met")
            assert await cat.line() == "well met"


async def test_a_bus_entry_of_one_direction_forwards_nothing_back(world: World) -> None:
    entry = '[[socket]]\nprotocol = "bus"\nname = "{0}"\ncluster = "way"\ndirection = "{0}"\nlisten = "{1}"\n'
    bridge = Bridge(world, "".join(entry.format(way, world.ipc(way)) for way in ("in", "out")))
    received: asyncio.Queue[bytes] = asyncio.Queue()
    service = iris.Service("way")
    service.on_broadcast(received.put_nowait)
    async with world.client() as client, client.serve(service):
        with pynng.Bus0(dial=bridge.url("in"), recv_timeout=10_000) as into, pynng.Bus0(dial=bridge.url("out"), recv_timeout=10_000) as out:  # fmt: skip
            await bridge.until_serving("out")
            await client.wait_for_members("way", 2, timeout=10)
            await bridge.until_peers("in", 1)
            await out.asend(b"not forwarded")
            await into.asend(b"in")
            async with asyncio.timeout(20):
                assert await received.get() == b"in"
            assert await out.arecv() == b"in"  # as any broadcast
    assert bridge.end() == 0
    status = {line["socket"]: line for line in bridge.events("bridge.status")}
    assert [(s["from_sp"], s["to_sp"], s["losses"]) for s in (status["in"], status["out"])] == [(1, 0, {}), (0, 1, {})]  # fmt: skip
