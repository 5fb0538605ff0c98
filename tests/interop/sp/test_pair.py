"""PAIR."""

from __future__ import annotations

import asyncio
import contextlib

import pynng
import pytest
from interop.sp.kit import WAIT_S, Bridge, World, eventually, nngcat

import iris


def archive(ended: asyncio.Queue[str]) -> iris.Service:
    """Return a member that answers every message, and puts the outcomes of its tunnels into `ended`."""
    service = iris.Service("archive")

    @service.on_tunnel
    async def carry(tunnel: iris.Tunnel) -> None:
        try:
            async for message in tunnel:
                if message == b"enough":
                    ended.put_nowait("closed here")
                    return
                await tunnel.send(message.upper())
            ended.put_nowait("finished there")
        except iris.TunnelBroken:
            ended.put_nowait("broken")
            raise

    return service


async def test_a_pair_program_talks_to_one_member_through_a_tunnel(
    world: World, bridge: Bridge
) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    async with world.client() as client, client.serve(archive(ended)):
        async with nngcat("--pair0", "--dial", bridge.url("pair-in"), "--data", "hello", "--quoted") as cat:  # fmt: skip
            assert await cat.line() == "HELLO"
        async with asyncio.timeout(WAIT_S):
            assert await ended.get() == "finished there"


async def test_the_connection_ends_with_the_tunnel_and_the_next_is_another(
    world: World, bridge: Bridge
) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    async with world.client() as client, client.serve(archive(ended)):
        with pynng.Pair0(dial=bridge.url("pair-in"), recv_timeout=10_000) as socket:
            gone = asyncio.Event()
            loop = asyncio.get_running_loop()
            socket.add_post_pipe_remove_cb(lambda _: loop.call_soon_threadsafe(gone.set))
            for number in range(200):
                await socket.asend(b"m%d" % number + bytes(10_000))
            for number in range(200):
                assert (await socket.arecv()).startswith(b"M%d\0" % number)
            await socket.asend(b"enough")
            async with asyncio.timeout(WAIT_S):
                assert await ended.get() == "closed here"
                await gone.wait()
            # nng connects again by itself. It may give a message to a connection that the bridge refuses, because the
            # last one has not ended there yet; PAIR does not repeat it.
            socket.recv_timeout = 2_000
            for _ in range(5):
                await socket.asend(b"again")
                with contextlib.suppress(pynng.Timeout):
                    assert await socket.arecv() == b"AGAIN"
                    break
            else:
                pytest.fail("no message got through the next connection")
        async with asyncio.timeout(WAIT_S):
            assert await ended.get() == "finished there"


async def test_a_tunnel_of_the_cluster_reaches_a_pair_program(world: World, bridge: Bridge) -> None:
    async with world.client() as client, nngcat("--pair0", "--dial", bridge.url("pair-out"), "--data", "hello", "--quoted") as cat:  # fmt: skip
        await bridge.until_serving("pair-out")
        await client.wait_for_members("paired", 1, timeout=10)
        async with client.tunnel("paired", timeout=5) as tunnel:
            async with asyncio.timeout(WAIT_S):
                assert await tunnel.recv() == b"hello"
            await tunnel.send(b"well met")
            assert await cat.line() == "well met"
            with pytest.raises(iris.Overloaded):
                await client.open_tunnel("paired", timeout=5)


async def test_without_members_the_connection_is_closed_and_counted(
    world: World, bridge: Bridge
) -> None:
    with pynng.Pair0(dial=bridge.url("pair-in")):
        await bridge.until_lost("pair-in", "NoMembers")


async def test_what_a_member_says_last_reaches_a_program_that_is_slow(
    world: World, bridge: Bridge
) -> None:
    service = iris.Service("archive")

    @service.on_tunnel
    async def talk(tunnel: iris.Tunnel) -> None:
        for number in range(400):
            await tunnel.send(b"%d" % number + bytes(20_000))

    async with world.client() as client, client.serve(service):
        with pynng.Pair0(dial=bridge.url("pair-in"), recv_timeout=20_000, recv_buffer_size=1) as socket:  # fmt: skip
            received = [int((await socket.arecv()).rstrip(b"\0")) for _ in range(400)]
    assert received == list(range(400))


async def test_what_one_program_did_not_read_never_reaches_the_next(world: World) -> None:
    entry = '[[socket]]\nprotocol = "pair"\nname = "one-by-one"\ncluster = "turns"\ndirection = "out"\ntimeout_s = 1\nlisten = "{0}"\n'
    bridge = Bridge(world, entry.format(world.ipc("one-by-one")))
    url = bridge.url("one-by-one")
    async with world.client() as client:
        with pynng.Pair0(dial=url, recv_buffer_size=1):
            await bridge.until_serving("one-by-one")
            await client.wait_for_members("turns", 1, timeout=10)
            first = await client.open_tunnel("turns", timeout=5)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):  # until all that is between us is full
                    while True:
                        await first.send(b"for the first" + bytes(20_000))
        with pynng.Pair0(dial=url, recv_timeout=20_000) as second:
            await eventually(lambda: bridge.status("one-by-one")["peers"])
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        tunnel = await client.open_tunnel("turns", timeout=5)
                        break
                    except iris.RequestError:
                        continue  # the first is not over yet
            await tunnel.send(b"for the second")
            assert await second.arecv() == b"for the second"
            await tunnel.close()
        with pytest.raises((iris.TunnelBroken, iris.Closed, iris.EndOfTunnel)):
            await first.recv()
    assert await asyncio.to_thread(bridge.end) == 0


async def test_what_the_next_program_says_early_waits_for_its_own_tunnel(
    world: World, bridge: Bridge
) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    received: list[list[bytes]] = []
    service = iris.Service("archive")

    @service.on_tunnel
    async def listen(tunnel: iris.Tunnel) -> None:
        mine: list[bytes] = []
        received.append(mine)
        async for message in tunnel:
            mine.append(message)
        ended.put_nowait("finished there")

    async with world.client() as client, client.serve(service):
        for number in range(5):
            with pynng.Pair0(dial=bridge.url("pair-in"), send_timeout=20_000) as socket:
                for _ in range(20):
                    await socket.asend(b"%d" % number)
                await eventually(lambda number=number: len(received) > number and len(received[number]) == 20)  # fmt: skip
        async with asyncio.timeout(WAIT_S):
            for _ in range(5):
                await ended.get()
    assert received == [[b"%d" % number] * 20 for number in range(5)]
