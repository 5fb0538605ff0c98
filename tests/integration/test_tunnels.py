"""Tunnels: ordered messages of any size, throttled by the reader, that end in exactly three ways."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from integration.kit import cut, fill, named, port_of
from support.waiting import until

import iris
from iris.core.tunnel import MAX_WINDOW
from iris.testing import LocalCluster


def echoing() -> iris.Service:
    service = iris.Service("echo")

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(message)

    return service


@contextlib.asynccontextmanager
async def pair(
    **headers: str,
) -> AsyncIterator[tuple[LocalCluster, iris.Tunnel, iris.Tunnel]]:
    """Give (cluster, opener's end, member's end) of an open tunnel, between two clients."""
    async with LocalCluster() as cluster:
        async with named(cluster, "opener") as opener, named(cluster, "member") as member:
            async with serving(member, "pair") as ends:
                async with opener.tunnel("pair", timeout=5, headers=headers) as left:
                    await until(lambda: ends)
                    yield cluster, left, ends[0]
        await until(lambda: not cluster.relay.hub.ports)


@contextlib.asynccontextmanager
async def serving(client: iris.Client, name: str) -> AsyncIterator[list[iris.Tunnel]]:
    """Serve tunnels whose member's ends are given, open until the opener ends them."""
    service, ends = iris.Service(name), []

    @service.on_tunnel
    async def keep(tunnel: iris.Tunnel) -> None:
        ends.append(tunnel)
        await until_forever(lambda: tunnel.closed)

    async with client.serve(service):
        yield ends


async def until_forever(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a tunnel's end has no event
        await asyncio.sleep(0.001)


SIZES = [0, 1, 65_513, 65_514, 65_519, 65_520, 65_536, 1 << 20, 5 << 20]


async def test_messages_of_every_size_come_back_whole_and_in_order() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller, cluster.client() as member:
        async with member.serve(echoing()):
            async with caller.tunnel("echo", timeout=5) as tunnel:
                messages = [bytes([n]) * size for n, size in enumerate(SIZES)]

                async def send() -> None:
                    for message in messages:
                        await tunnel.send(message)
                    await tunnel.finish()

                sending = asyncio.create_task(send())
                assert [message async for message in tunnel] == messages
                await sending


async def test_five_thousand_small_messages_stay_in_order() -> None:
    async with pair() as (_, left, right):

        async def send() -> None:
            for n in range(5000):
                await left.send(b"%d" % n)
            await left.finish()

        sending = asyncio.create_task(send())
        assert [int(m) async for m in right] == list(range(5000))
        await sending


async def test_two_tasks_that_send_take_turns_and_never_mix_messages() -> None:
    async with pair() as (_, left, right):

        async def send(mark: bytes) -> None:
            for _ in range(5):
                await left.send(mark * 200_000)

        sending = [asyncio.create_task(send(mark)) for mark in (b"a", b"b", b"c")]
        got = [await right.recv() for _ in range(15)]
        await asyncio.gather(*sending)
        assert all(message == message[:1] * 200_000 for message in got)
        assert sorted(message[:1] for message in got) == [b"a"] * 5 + [b"b"] * 5 + [b"c"] * 5


async def test_text_and_views_are_sent_as_bytes() -> None:
    async with pair() as (_, left, right):
        buffer = bytearray(b"mutable")
        await left.send("text ü")
        await left.send(buffer)
        buffer[:] = b"changed"
        await left.send(memoryview(b"xviewx")[1:5])
        assert [await right.recv() for _ in range(3)] == ["text ü".encode(), b"mutable", b"view"]


async def test_headers_reach_the_handler() -> None:
    async with pair(a="b", ü="☃") as (_, left, right):
        assert right.headers == left.headers == {"a": "b", "ü": "☃"}
        assert right.name == "pair"


async def test_a_slow_reader_throttles_its_sender_to_the_window() -> None:
    async with pair() as (cluster, left, right):
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await left.send(bytes(10_000))
                sent += 10_000

        sending = asyncio.create_task(send())
        await cluster.settle()
        assert sent <= 64 << 10, "nobody reads: one window at most"
        read = 0
        while read < 40 << 20:
            read += len(await right.recv())
        await cluster.settle()
        assert read <= sent <= read + MAX_WINDOW + (64 << 10)
        before = sent
        await cluster.settle()
        assert sent == before, "it stands still again"
        sending.cancel()


async def test_half_close_leaves_the_other_direction_open() -> None:
    async with pair() as (_, left, right):
        await left.send(b"question")
        await left.finish()
        assert [m async for m in right] == [b"question"]
        with pytest.raises(iris.EndOfTunnel):
            await right.recv()
        with pytest.raises(iris.Closed):
            await left.send(b"more")
        for n in range(3):
            await right.send(b"%d" % n)
        await right.finish()
        assert [m async for m in left] == [b"0", b"1", b"2"]
        await until(lambda: left.closed and right.closed)


@pytest.mark.parametrize("side", [0, 1])
async def test_close_by_either_side_ends_both_after_what_was_sent(side: int) -> None:
    async with pair() as (_, *ends):
        closing, other = ends[side], ends[1 - side]
        await closing.send(b"last")
        await closing.close()
        await closing.close()
        assert [m async for m in other] == [b"last"]
        with pytest.raises(iris.Closed):
            await other.send(b"x")
        with pytest.raises(iris.Closed):
            await closing.send(b"x")
        with pytest.raises(iris.EndOfTunnel):
            await closing.recv()


async def test_a_handler_that_returns_closes_and_one_that_raises_breaks_the_tunnel() -> None:
    service = iris.Service("ends")

    @service.on_tunnel
    async def end(tunnel: iris.Tunnel) -> None:
        if await tunnel.recv() == b"raise":
            raise RuntimeError("no")

    async with LocalCluster() as cluster, cluster.client() as caller, cluster.client() as member:
        async with member.serve(service):
            async with caller.tunnel("ends", timeout=5) as tunnel:
                await tunnel.send(b"return")
                assert [m async for m in tunnel] == []
            async with caller.tunnel("ends", timeout=5) as tunnel:
                await tunnel.send(b"raise")
                with pytest.raises(iris.TunnelBroken):
                    await tunnel.recv()
                with pytest.raises(iris.TunnelBroken):
                    await tunnel.send(b"x")
            assert member.counters["failed handlers"] == 1


async def test_an_opener_that_raises_breaks_the_tunnel_at_the_member() -> None:
    service, seen = iris.Service("db"), []

    @service.on_tunnel
    async def read(tunnel: iris.Tunnel) -> None:
        try:
            async for message in tunnel:
                seen.append(message)
        except iris.TunnelBroken:
            seen.append(b"broken")

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):

        async def stop_in_the_middle() -> None:
            async with client.tunnel("db", timeout=5) as tunnel:
                await tunnel.send(b"1")
                raise LookupError

        with pytest.raises(LookupError):
            await stop_in_the_middle()
        await until(lambda: seen and seen[-1] == b"broken")


async def test_a_send_cancelled_in_the_middle_is_discarded_and_the_tunnel_goes_on() -> None:
    async with pair() as (cluster, left, right):
        sending = asyncio.create_task(left.send(b"x" * (1 << 20)))
        await cluster.settle()
        assert not sending.done()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        receiving = asyncio.create_task(right.recv())
        await left.send(b"next")
        assert await receiving == b"next"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await left.send(b"y" * (40 << 20))
        receiving = asyncio.create_task(right.recv())
        await left.send(b"after")
        assert await receiving == b"after"


async def test_a_send_cancelled_while_it_waits_for_its_turn_sends_nothing() -> None:
    async with pair() as (cluster, left, right):
        first = asyncio.create_task(left.send(b"a" * 300_000))
        second = asyncio.create_task(left.send(b"b" * 300_000))
        await cluster.settle()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await right.recv() == b"a" * 300_000
        await first
        await left.send(b"c")
        assert await right.recv() == b"c"


async def test_a_message_over_the_limit_is_skipped_and_the_next_one_is_received() -> None:
    async with pair() as (_, left, right):

        async def send() -> None:
            for size in (200_000, 10, 1001, 1000):
                await left.send(bytes(size))

        sending = asyncio.create_task(send())
        with pytest.raises(iris.MessageTooLarge, match="1000 bytes"):
            await right.recv(limit_bytes=1000)
        assert await right.recv(limit_bytes=1000) == bytes(10)
        with pytest.raises(iris.MessageTooLarge):
            await right.recv(limit_bytes=1000)
        assert await right.recv(limit_bytes=1000) == bytes(1000)
        await sending


async def test_a_recv_cancelled_in_the_middle_of_a_message_loses_nothing() -> None:
    async with pair() as (cluster, left, right):
        message = bytes(range(256)) * 2000
        sending = asyncio.create_task(left.send(message))
        for _ in range(5):
            receiving = asyncio.create_task(right.recv())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await receiving == message
                break
        else:
            assert await right.recv() == message
        await sending
        waiting = asyncio.create_task(right.recv())
        await cluster.settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await left.send(b"next")
        assert await right.recv() == b"next"


async def test_recv_chunks_gives_a_large_message_piece_by_piece() -> None:
    async with pair() as (_, left, right):
        message = bytes(range(256)) * 20_000
        sending = asyncio.create_task(left.send(message))
        chunks = [chunk async for chunk in right.recv_chunks()]
        assert b"".join(chunks) == message
        assert len(chunks) > 10
        await sending
        await left.send(b"")
        assert [chunk async for chunk in right.recv_chunks()] == [b""]
        await left.finish()
        with pytest.raises(iris.EndOfTunnel):
            await fill([], right.recv_chunks())


async def test_what_is_left_of_a_message_read_in_part_is_never_taken_for_a_message() -> None:
    async with pair() as (_, left, right):
        sending = asyncio.create_task(left.send(b"x" * 500_000))
        chunks = right.recv_chunks()
        assert await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]  # it is a generator
        receiving = asyncio.create_task(right.recv())
        await sending
        await left.send(b"next")
        assert await receiving == b"next"


async def test_a_message_begun_by_a_cancelled_recv_may_be_read_on_in_chunks() -> None:
    async with pair() as (_, left, right):
        message = bytes(range(256)) * 2000
        sending = asyncio.create_task(left.send(message))
        receiving = asyncio.create_task(right.recv())
        await until(lambda: right._parts)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert b"".join([chunk async for chunk in right.recv_chunks()]) == message
        await sending
        await left.send(b"next")
        assert await right.recv() == b"next"


async def test_an_aborted_message_is_an_error_in_chunks_and_unseen_by_recv() -> None:
    async with pair() as (cluster, left, right):
        sending = asyncio.create_task(left.send(b"x" * 500_000))
        await cluster.settle()
        chunks = right.recv_chunks()
        assert await anext(chunks)
        sending.cancel()
        with pytest.raises(iris.TunnelBroken, match="aborted this message"):
            await fill([], chunks)
        receiving = asyncio.create_task(right.recv())
        await left.send(b"next")
        assert await receiving == b"next"
        sending = asyncio.create_task(left.send(b"x" * 10_000_000))
        await cluster.settle()
        sending.cancel()
        receiving = asyncio.create_task(right.recv())
        await left.send(b"last")
        assert await receiving == b"last"


@pytest.mark.parametrize("label", ["opener", "member"])
async def test_a_lost_session_breaks_the_tunnel_on_both_ends(label: str) -> None:
    async with pair() as (cluster, left, right):
        receiving = asyncio.create_task(left.recv())
        sending = asyncio.create_task(left.send(bytes(1 << 20)))
        await cluster.settle()
        await cut(cluster, label)
        for call in (receiving, sending, right.recv(), left.recv(), right.send(b"x")):
            with pytest.raises(iris.TunnelBroken):
                await call


async def test_five_hundred_idle_tunnels_stay_open_and_leave_nothing_behind() -> None:
    async with LocalCluster() as cluster:
        async with named(cluster, "opener") as opener, named(cluster, "member") as member:
            async with member.serve(echoing()):
                tunnels = await asyncio.gather(
                    *(opener.open_tunnel("echo", timeout=10) for _ in range(500))
                )
                assert len(port_of(cluster, "member").session.tunnels) == 500
                for n in (0, 250, 499):
                    await tunnels[n].send(b"%d" % n)
                    assert await tunnels[n].recv() == b"%d" % n
                for tunnel in tunnels:
                    await tunnel.close()
                await until(lambda: not port_of(cluster, "member").session.tunnels)
                await cluster.settle()
                for label in ("opener", "member"):
                    session = port_of(cluster, label).session
                    assert (session.tunnels, session.in_flight, session.pending) == ({}, {}, 0)


async def test_a_tunnel_to_nobody_raises_no_members_and_one_beyond_the_limit_overloaded() -> None:
    service, release = iris.Service("one", limits=iris.Limits(tunnels=1)), asyncio.Event()

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        await release.wait()

    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.NoMembers):
            await client.open_tunnel("one", timeout=5)
        async with client.serve(service):
            first = await client.open_tunnel("one", timeout=5)
            with pytest.raises(iris.Overloaded):
                await client.open_tunnel("one", timeout=5)
            release.set()
            with pytest.raises(iris.EndOfTunnel):
                await first.recv()
            await cluster.settle()
            await (await client.open_tunnel("one", timeout=5)).close()


async def test_opening_a_tunnel_that_is_cancelled_leaves_nothing_behind() -> None:
    async with LocalCluster() as cluster:
        async with named(cluster, "opener") as opener, named(cluster, "member") as member:
            async with member.serve(echoing()):
                for turns in range(6):
                    opening = asyncio.create_task(opener.open_tunnel("echo", timeout=5))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if opening.done():
                        await opening.result().close()
                    opening.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await opening
                await cluster.settle()
                for label in ("opener", "member"):
                    session = port_of(cluster, label).session
                    assert (session.tunnels, session.in_flight, session.pending) == ({}, {}, 0)


async def test_a_tunnel_handler_is_a_coroutine_function() -> None:
    with pytest.raises(iris.ConfigError, match="coroutine"):
        iris.Service("x").on_tunnel(lambda tunnel: None)


async def test_a_handler_may_end_by_end_of_tunnel_without_an_error() -> None:
    service = iris.Service("reads")
    done: list[bytes] = []

    @service.on_tunnel
    async def read(tunnel: iris.Tunnel) -> None:
        while True:
            done.append(await tunnel.recv())

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        async with client.tunnel("reads", timeout=5) as tunnel:
            await tunnel.send(b"1")
            await tunnel.finish()
            with pytest.raises(iris.EndOfTunnel):
                await tunnel.recv()
        assert done == [b"1"]
        assert "failed handlers" not in client.counters


async def test_both_ends_may_be_in_one_client() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(echoing()):
        async with client.tunnel("echo", timeout=5) as tunnel:
            await tunnel.send(b"self" * 100_000)
            assert await tunnel.recv() == b"self" * 100_000
            await tunnel.finish()


async def test_empty_tunnel_messages_beyond_the_credit_all_arrive() -> None:
    service = iris.Service("db")
    start, counted = asyncio.Event(), asyncio.get_running_loop().create_future()

    @service.on_tunnel
    async def count(tunnel: iris.Tunnel) -> None:
        await start.wait()
        counted.set_result([message async for message in tunnel])

    async with (
        LocalCluster() as cluster,
        cluster.client() as opener,
        cluster.client() as member,
        member.serve(service),
        opener.tunnel("db", timeout=5) as tunnel,
    ):

        async def send() -> None:
            for _ in range(3000):
                await tunnel.send(b"")
            await tunnel.finish()

        sending = asyncio.create_task(send())
        await until(lambda: tunnel._waiters)
        start.set()
        await sending
        assert await counted == [b""] * 3000
