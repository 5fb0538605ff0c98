"""PUSH and PULL."""

from __future__ import annotations

import asyncio
import contextlib

import pynng
from interop.sp.kit import Bridge, World, nngcat

import iris


class Worker:
    """A member that collects its messages."""

    def __init__(self, cluster: str) -> None:
        self.service = iris.Service(cluster)
        self.received: list[bytes] = []
        self.come = asyncio.Event()
        self.service.on_push(self.take)

    def take(self, data: bytes) -> None:
        self.received.append(data)
        self.come.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.received) < count:
                self.come.clear()
                await self.come.wait()


async def test_a_push_program_gives_work_to_a_cluster(world: World, bridge: Bridge) -> None:
    worker = Worker("work")
    # Two and no more: a third would be the next test's.
    twice = ("--interval", "1", "--count", "2")
    cat = nngcat("--push", "--dial", bridge.url("pull"), "--data", "job", *twice)
    async with world.client() as client, client.serve(worker.service), cat:
        await worker.until(2)
    assert worker.received == [b"job"] * 2


async def test_work_waits_with_the_push_program_while_nobody_takes_it(
    world: World, bridge: Bridge
) -> None:
    worker = Worker("later")
    with pynng.Push0(dial=bridge.url("pull-later"), send_timeout=300) as socket:
        sent = 0
        with contextlib.suppress(pynng.Timeout):
            while True:
                await socket.asend(b"%d" % sent + bytes(4096))
                sent += 1
        async with world.client() as client, client.serve(worker.service):
            await worker.until(sent)
    assert [int(data.rstrip(b"\0")) for data in worker.received] == list(range(sent))


async def test_a_pull_program_takes_work_of_its_cluster(world: World, bridge: Bridge) -> None:
    async with world.client() as client, nngcat("--pull", "--dial", bridge.url("push"), "--quoted") as cat:  # fmt: skip
        await bridge.until_serving("push")
        await client.wait_for_members("worked", 1, timeout=10)
        for number in range(5):
            await client.push("worked", b"job %d" % number)
        assert [await cat.line() for _ in range(5)] == [f"job {number}" for number in range(5)]


async def test_a_pull_program_that_is_slow_loses_nothing_that_was_taken(world: World) -> None:
    entry = f'[[socket]]\nprotocol = "push"\nname = "push"\ncluster = "slow"\nlisten = "{world.ipc("slow")}"\n'
    bridge = Bridge(world, entry)
    async with world.client() as client:
        with pynng.Pull0(dial=bridge.url("push"), recv_timeout=20_000) as socket:
            await bridge.until_serving("push")
            await client.wait_for_members("slow", 1, timeout=10)
            for number in range(2000):
                await client.push("slow", b"%d" % number + bytes(1024), timeout=30)
            received = []
            with contextlib.suppress(pynng.Timeout):
                while len(received) < 2000:
                    received.append(int((await socket.arecv()).rstrip(b"\0")))
        assert not client.losses
        assert sorted(received) == list(range(2000)), bridge.status("push")
    assert await asyncio.to_thread(bridge.end) == 0


async def test_work_that_waits_too_long_for_a_slow_pull_program_is_reported_and_counted(
    world: World,
) -> None:
    entry = f'[[socket]]\nprotocol = "push"\nname = "push"\ncluster = "late"\nlisten = "{world.ipc("late")}"\n'
    bridge = Bridge(world, entry)
    async with world.client() as client:
        with pynng.Pull0(dial=bridge.url("push"), recv_timeout=20_000, recv_buffer_size=1) as socket:  # fmt: skip
            await bridge.until_serving("push")
            await client.wait_for_members("late", 1, timeout=10)
            for number in range(100):
                await client.push("late", b"%d" % number + bytes(100_000), timeout=2.0)
            await asyncio.sleep(2.1)  # their time passes, in the bridge
            received = []
            while len(received) + len(client.losses) < 100:
                received.append(int((await socket.arecv()).rstrip(b"\0")))
                await client.flush()
        assert received == sorted(received)
        assert client.losses
        assert all(isinstance(loss.error, iris.RequestTimeout) for loss in client.losses)
        assert bridge.status("push")["losses"] == {"expired": len(client.losses)}
    assert await asyncio.to_thread(bridge.end) == 0


async def test_work_that_full_members_refuse_is_counted_and_slows_the_push_program(
    world: World, bridge: Bridge
) -> None:
    limits = iris.Limits(concurrency=1, queue_bytes=20_000)
    service = iris.Service("work", limits=limits)
    received = 0

    @service.on_push
    async def work(data: bytes) -> None:
        nonlocal received
        received += 1
        await asyncio.sleep(0.002)

    before = bridge.status("pull")["losses"].get("Overloaded", 0)
    async with world.client() as client, client.serve(service):
        with pynng.Push0(dial=bridge.url("pull")) as socket:
            for _ in range(1000):
                await socket.asend(bytes(1024))
            await bridge.until_lost("pull", "Overloaded", before + 1)
            async with asyncio.timeout(30):
                while True:
                    refused = bridge.status("pull")["losses"]["Overloaded"] - before
                    if received + refused >= 1000:
                        break
                    await asyncio.sleep(0.1)
        assert received + refused == 1000
