"""Broadcasts: every member, in each sender's order; who is slow alone misses some, and is told how many."""

from __future__ import annotations

import asyncio

import pytest
from integration.kit import Collector, freeze, named
from support.waiting import until

import iris
from iris.testing import LocalCluster


def listening(got: Collector, *, coroutine: bool = False, **limits: int) -> iris.Service:
    service = iris.Service("all", limits=iris.Limits(**limits))
    if coroutine:

        @service.on_broadcast
        async def later(message: iris.Message) -> None:
            await asyncio.sleep(0)
            got(message)
    else:

        @service.on_broadcast
        def now(message: iris.Message) -> None:
            got(message)

    service.on_loss(got.gap)
    return service


@pytest.mark.parametrize("coroutine", [False, True])
async def test_every_member_gets_every_broadcast_in_the_order_of_each_sender(
    coroutine: bool,
) -> None:
    got = [Collector() for _ in range(3)]
    async with (
        LocalCluster() as cluster,
        cluster.client() as alice,
        cluster.client() as bob,
        cluster.client() as m0,
        cluster.client() as m1,
        cluster.client() as m2,
        m0.serve(listening(got[0], coroutine=coroutine)),
        m1.serve(listening(got[1], coroutine=coroutine)),
        m2.serve(listening(got[2], coroutine=coroutine)),
    ):

        async def send(client: iris.Client) -> None:
            for n in range(300):
                await client.broadcast("all", b"%d" % n)
                if n % 7 == 0:
                    await asyncio.sleep(0)

        await asyncio.gather(send(alice), send(bob))
        await until(lambda: all(len(c.messages) == 600 for c in got))
        await cluster.settle()
        for collector in got:
            by_source: dict[bytes, list[int]] = {}
            for message in collector.messages:
                by_source.setdefault(message.source, []).append(int(message.payload))
            assert list(by_source.values()) == [list(range(300))] * 2
            assert not collector.gaps


async def test_a_sender_that_is_a_member_receives_its_own_broadcasts() -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(listening(got)):
        await client.broadcast("all", b"me")
        await until(lambda: got.messages)
        assert got.payloads == [b"me"]


async def test_a_broadcast_to_nobody_is_not_an_error() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        await client.broadcast("all", b"x")
        await client.flush()
        assert (await client.status())["accounts"]["unwanted"] == 1


async def test_a_handler_that_fails_does_not_stop_the_next_broadcast() -> None:
    service, got = iris.Service("all"), []

    @service.on_broadcast
    def fail_once(payload: bytes) -> None:
        got.append(payload)
        if len(got) == 1:
            raise RuntimeError("first")

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        for n in range(3):
            await client.broadcast("all", b"%d" % n)
        await until(lambda: len(got) == 3)
        assert client.counters["failed handlers"] == 1


async def test_a_slow_coroutine_handlers_overflow_is_reported_as_a_gap_of_the_exact_count() -> None:
    slow, fast = Collector(), Collector()
    release = asyncio.Event()
    service = iris.Service("all", limits=iris.Limits(queue_bytes=2000))

    @service.on_broadcast
    async def wait(message: iris.Message) -> None:
        await release.wait()
        slow(message)

    service.on_loss(slow.gap)
    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        cluster.client() as slow_member,
        cluster.client() as fast_member,
        slow_member.serve(service),
        fast_member.serve(listening(fast)),
    ):
        for n in range(100):
            await sender.broadcast("all", b"%d" % n + bytes(100).replace(b"\0", b" "))
            await sender.flush()
        await until(lambda: len(fast.messages) == 100)
        release.set()
        await until(lambda: len(slow.messages) + slow.lost == 100)
        await cluster.settle()
        assert len(slow.messages) + slow.lost == 100
        assert slow.lost > 50
        assert slow.numbers == sorted(slow.numbers)
        assert {gap.cause for gap in slow.gaps} == {"slow member"}
        assert slow_member.counters["slow member"] == slow.lost
        assert not fast.gaps


async def test_a_member_that_does_not_read_misses_some_and_slows_nobody() -> None:
    stuck, free = Collector(), Collector()
    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        named(cluster, "stuck") as stuck_member,
        cluster.client() as free_member,
        stuck_member.serve(listening(stuck)),
        free_member.serve(listening(free)),
    ):
        limit = cluster.relay.config.port_queue_bytes
        resume = freeze(cluster, "stuck")
        payload = b" " * 60_000
        total = 2 * limit // len(payload)
        for n in range(total):
            await sender.broadcast("all", b"%d" % n + payload)
        await until(lambda: len(free.messages) == total)
        resume()
        await until(lambda: len(stuck.messages) + stuck.lost >= total)
        await cluster.settle()
        assert len(stuck.messages) + stuck.lost == total
        assert stuck.lost > 0
        assert stuck.numbers == sorted(set(stuck.numbers))
        assert not free.gaps


async def test_headers_of_a_broadcast_reach_every_member() -> None:
    got = [Collector(), Collector()]
    async with (
        LocalCluster() as cluster,
        cluster.client() as first,
        cluster.client() as second,
        first.serve(listening(got[0])),
        second.serve(listening(got[1], coroutine=True)),
    ):
        await first.broadcast("all", {"k": 1}, headers={"h": "v"})
        await until(lambda: got[0].messages and got[1].messages)
        for collector in got:
            assert collector.messages[0].headers == {"h": "v"}
            assert collector.messages[0].value == {"k": 1}


async def test_leaving_while_broadcasts_wait_runs_those_that_were_accepted() -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as member:
        async with member.serve(listening(got, coroutine=True)):
            for n in range(50):
                await sender.broadcast("all", b"%d" % n)
            await sender.flush()
            await until(lambda: got.messages)
        assert got.numbers == list(range(50))
