"""Publishers wait for slow SP peers, which lose nothing."""

from __future__ import annotations

import asyncio
import contextlib

import pynng
from interop.sp.kit import Bridge, World

import iris

MANY = 3000
BODY = bytes(4000)
"""A payload. nng, the bridge's queue and a publisher's window together hold fewer than `MANY` of them."""


def entry(world: World, protocol: str, more: str) -> str:
    return (
        f'[[socket]]\nprotocol = "{protocol}"\nname = "{protocol}"\ntopics = ["slow.>"]\nqueue_messages = 64\n'
        f'queue_bytes = 4_194_304\nlisten = "{world.ipc(f"waiting-{protocol}-{world.number()}")}"\n{more}\n'
    )


def waiting(world: World) -> iris.Client:
    """Return a client that waits for credit for as long as a test takes."""
    return world.client(stall_s=60.0)


async def publish(client: iris.Client, count: int = MANY) -> None:
    for number in range(count):
        await client.publish("slow.a", b"%d" % number + BODY, when_full="wait")


async def numbers(socket: pynng.Socket, head: bytes, received: list[int]) -> None:
    """Read numbers, slowly until the publisher has had to wait."""
    with contextlib.suppress(pynng.Timeout):
        while len(received) < MANY:
            data = await socket.arecv()
            received.append(int(data.removeprefix(head).rstrip(b"\0")))
            if len(received) < 200:
                await asyncio.sleep(0.002)


async def test_a_sub_program_gets_everything_that_is_published_faster_than_nng_writes(
    world: World,
) -> None:
    """nng reads for a SUB even if its program does not, and drops what exceeds its receive buffer: make that large."""
    bridge = Bridge(world, entry(world, "pub", 'when_full = "wait"'))
    received: list[int] = []
    async with waiting(world) as client:
        with pynng.Sub0(dial=bridge.url("pub"), recv_timeout=20_000, recv_buffer_size=MANY, topics=b"slow") as socket:  # fmt: skip
            await bridge.until_peers("pub", 1)
            reading = asyncio.create_task(numbers(socket, b"slow.a ", received))
            await publish(client)
            await reading
    assert received == list(range(MANY))
    assert bridge.status("pub")["losses"] == {}
    assert await asyncio.to_thread(bridge.end) == 0


async def test_a_slow_pull_program_gets_everything_that_is_published_to_its_topics(
    world: World,
) -> None:
    bridge = Bridge(world, entry(world, "push", ""))
    received: list[int] = []
    async with waiting(world) as client:
        with pynng.Pull0(dial=bridge.url("push"), recv_timeout=20_000, recv_buffer_size=8) as socket:  # fmt: skip
            await bridge.until_peers("push", 1)
            reading = asyncio.create_task(numbers(socket, b"", received))
            await publish(client)
            await reading
    assert received == list(range(MANY))
    assert bridge.status("push")["losses"] == {}
    assert await asyncio.to_thread(bridge.end) == 0


async def test_a_bridge_ends_well_while_a_publisher_waits_for_its_peer(world: World) -> None:
    bridge = Bridge(world, entry(world, "push", ""))
    async with waiting(world) as client:
        with pynng.Pull0(dial=bridge.url("push"), recv_buffer_size=1):
            await bridge.until_peers("push", 1)
            publishing = asyncio.create_task(publish(client))
            async with asyncio.timeout(20):
                while client.offer("slow.a", BODY, when_full="wait"):  # noqa: ASYNC110 - another process decides
                    await asyncio.sleep(0.01)
            assert await asyncio.to_thread(bridge.end) == 0
            await publishing  # nobody is there to be waited for


async def test_without_a_peer_a_pub_entry_holds_nobody_up(world: World) -> None:
    bridge = Bridge(world, entry(world, "pub", 'when_full = "wait"'))
    async with waiting(world) as client:
        await publish(client)
        await bridge.until_lost("pub", "no peer", MANY)
    assert await asyncio.to_thread(bridge.end) == 0
