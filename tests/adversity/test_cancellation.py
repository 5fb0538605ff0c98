"""Every public awaitable, cancelled at each of its awaits: the client stays usable, and no table keeps an entry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from support.waiting import PATIENCE_S, eventually

import iris
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)
Call = Callable[[iris.Client], Awaitable[object]]
MOST_STEPS = 400


class World:
    """A relay, a member that serves everything, and a caller that is cancelled."""

    def __init__(self, cluster: LocalCluster, member: iris.Client, caller: iris.Client) -> None:
        self.cluster = cluster
        self.member = member
        self.caller = caller

    def traces(self, client: iris.Client) -> dict[str, object]:
        """Return what is in the tables of a client and of its relay."""
        attachment, registry = client._attachment, client._registry
        assert attachment is not None
        session = attachment.session
        assert session is not None
        router = self.cluster.relay.router
        return {
            "pending": dict(session.requests._pending),
            "asked": dict(session._acks),
            "watches": dict(session._watches),
            "tunnels": dict(session.tunnels.ends),
            "half open": dict(session.tunnels._half_open),
            "services": list(registry.services),
            "bindings": dict(registry._bindings),
            "watchers": list(registry.watchers),
            "subscriptions": dict(registry._subscriptions),
            "registered": dict(registry._answers),
            "relay": [
                (
                    len(other.members), len(other.subscriptions), len(other.watches),
                    len(other.in_flight), len(other.tunnels), other.pending,
                )
                for other in router.sessions.values()
            ],
            "clusters": dict(router.interest.cluster_counts()),
            "sessions": len(router.sessions),
        }  # fmt: skip

    async def settled(self, wanted: dict[str, object], client: iris.Client) -> None:
        """Return when the tables are as `wanted`. Fails with the difference."""
        until_s = asyncio.get_running_loop().time() + PATIENCE_S
        while (found := self.traces(client)) != wanted:
            if asyncio.get_running_loop().time() > until_s:
                assert found == wanted
            await asyncio.sleep(0.001)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    service = iris.Service("db")

    @service.on_request
    async def answer(payload: bytes) -> bytes:
        for _ in range(3):
            await asyncio.sleep(0)
        return payload

    @service.on_push
    async def push(payload: bytes) -> None:
        await asyncio.sleep(0)

    @service.on_survey
    async def count(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        return b"1"

    @service.on_broadcast
    def hear(payload: bytes) -> None:
        assert payload

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        with contextlib.suppress(iris.TunnelBroken, iris.Closed):
            async for message in tunnel:
                await tunnel.send(message)

    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        cluster.client() as caller,
        member.serve(service),
    ):
        yield World(cluster, member, caller)
        await cluster.settle()


async def request(client: iris.Client) -> None:
    await client.request("db", b"x", timeout=PATIENCE_S)


async def idempotent_request(client: iris.Client) -> None:
    await client.request("db", b"x", timeout=PATIENCE_S, idempotent=True)


async def push_and_flush(client: iris.Client) -> None:
    await client.push("db", b"x")
    await client.flush()


async def survey(client: iris.Client) -> None:
    async for _ in client.survey("db", b"x", timeout=PATIENCE_S):
        await asyncio.sleep(0)


async def broadcast_and_publish(client: iris.Client) -> None:
    await client.broadcast("db", b"x")
    await client.publish("a.b", b"x")


async def tunnel(client: iris.Client) -> None:
    async with client.tunnel("db", timeout=PATIENCE_S) as tunnel:
        await tunnel.send(bytes(200_000))
        assert len(await tunnel.recv()) == 200_000
        await tunnel.finish()
        with pytest.raises(iris.EndOfTunnel):
            await tunnel.recv()


async def subscription(client: iris.Client) -> None:
    async with client.subscribe("mine.>") as subscription:
        await client.publish("mine.own", b"x")
        async for _ in subscription:
            break


async def bare_iteration(client: iris.Client) -> None:
    async for message in client.subscribe("nobody.speaks"):
        raise AssertionError(message)


async def service(client: iris.Client) -> None:
    service = iris.Service("own")
    service.on_request(lambda payload: payload)
    service.on_publish("own.*")(lambda payload: None)
    async with client.serve(service):
        assert await client.request("own", b"x", timeout=PATIENCE_S) == b"x"


async def members(client: iris.Client) -> None:
    assert len(await client.members("db")) == 1
    assert len(await client.wait_for_members("db", 1, timeout=PATIENCE_S)) == 1


async def watch_members(client: iris.Client) -> None:
    async for members in client.watch_members("db"):
        if members:
            break


async def status(client: iris.Client) -> None:
    await client.status()


async def reload_keys(client: iris.Client) -> None:
    await client.reload_keys(client.keyring)


CALLS: list[Call] = [
    request, idempotent_request, push_and_flush, survey, broadcast_and_publish, tunnel, subscription, service, members,
    watch_members, status, reload_keys,
]  # fmt: skip


async def cancelled_after(steps: int, call: Awaitable[object]) -> bool:
    """Run `call` for `steps` turns of the loop and cancel it; return False if it had ended before."""
    task = asyncio.ensure_future(call)
    for _ in range(steps):
        await asyncio.sleep(0)
        if task.done():
            break
    task.cancel()
    await asyncio.wait((task,))
    if task.cancelled():
        return True
    task.result()  # whatever it raised is a failure
    return False


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_cancelled_at_any_await_leaves_no_trace(call: Call, world: World) -> None:
    await call(world.caller)
    await request(world.caller)
    await world.cluster.settle()
    clean = world.traces(world.caller)
    steps = 0
    while await cancelled_after(steps, call(world.caller)):
        steps += 1
        await request(world.caller)
        await world.settled(clean, world.caller)
        assert steps < MOST_STEPS
    await world.settled(clean, world.caller)
    await call(world.caller)
    assert steps > 0


async def test_an_iteration_left_for_good_leaves_no_trace(world: World) -> None:
    await request(world.caller)
    await world.cluster.settle()
    clean = world.traces(world.caller)
    iteration = bare_iteration(world.caller)
    assert await cancelled_after(50, iteration)
    await world.settled(clean, world.caller)


async def test_a_publish_cancelled_while_it_waits_for_room_sends_nothing(world: World) -> None:
    attachment = world.caller._attachment
    assert attachment is not None
    assert attachment.pump is not None
    received: list[bytes] = []
    async with world.member.subscribe("a", lambda message: received.append(message.payload)):
        attachment.writing_paused(attachment.pump)
        assert not world.caller.offer("a", b"refused")
        calls: list[Call] = [
            lambda client: client.publish("a", b"cancelled"),
            lambda client: client.broadcast("db", b"cancelled"),
            push_and_flush,
        ]
        for call in calls:
            assert await cancelled_after(5, call(world.caller))
        waiting = asyncio.create_task(world.caller.publish("a", b"sent"))
        await asyncio.sleep(0)
        attachment.writing_resumed(attachment.pump)
        await waiting
        await world.caller.flush()
        await world.cluster.settle()
        assert received == [b"sent"]


async def test_a_send_cancelled_at_any_await_is_aborted_and_the_tunnel_goes_on(
    world: World,
) -> None:
    """A message is received whole, or not at all, and the next one follows."""
    steps, cancelled, big = 0, True, bytes(300_000)
    while cancelled:
        async with world.caller.tunnel("db", timeout=PATIENCE_S) as tunnel:
            cancelled = await cancelled_after(steps, tunnel.send(big))
            await tunnel.send(b"next")
            received = await tunnel.recv()
            if received == big:
                received = await tunnel.recv()
            else:
                assert cancelled
            assert received == b"next"
        steps += 1
        assert steps < MOST_STEPS
    assert steps > 2


async def test_a_recv_cancelled_at_any_await_loses_nothing(world: World) -> None:
    async with world.caller.tunnel("db", timeout=PATIENCE_S) as tunnel:
        big = bytes(range(256)) * 1200
        steps, cancelled = 0, True
        while cancelled:
            sending = asyncio.create_task(tunnel.send(big))
            received: list[bytes] = []

            async def receive(received: list[bytes] = received) -> None:
                received.append(await tunnel.recv())

            cancelled = await cancelled_after(steps, receive())
            if not received:
                await receive()
            await sending
            assert received == [big]
            steps += 1
            assert steps < MOST_STEPS
    assert steps > 2


async def test_close_cancelled_at_any_await_closes_at_once(world: World) -> None:
    await world.cluster.settle()
    clean = world.traces(world.member)
    steps, cancelled = 1, True  # after 0 steps close has not begun
    while cancelled:
        client = world.cluster.client()
        await client.open()
        subscription = client.subscribe("a.>")
        own = iris.Service("own")
        own.on_request(lambda payload: payload)
        serving = client.serve(own)
        await serving.__aenter__()
        cancelled = await cancelled_after(steps, client.close())
        with pytest.raises(iris.Closed):
            await client.publish("a", b"")
        with contextlib.suppress(iris.Closed):
            await serving.__aexit__(None, None, None)
        assert [message async for message in ended(subscription)] == []
        await world.settled(clean, world.member)
        steps += 1
        assert steps < MOST_STEPS
    assert steps > 2


async def ended(subscription: iris.Subscription) -> AsyncIterator[iris.Message]:
    """Iterate over the remaining messages of a subscription whose client is closed."""
    try:
        async for message in subscription:
            yield message
    except iris.Closed:
        return


async def test_open_cancelled_at_any_await_leaves_no_session(world: World) -> None:
    await world.cluster.settle()
    clean = world.traces(world.member)
    steps, cancelled = 0, True
    while cancelled:
        client = world.cluster.client()
        cancelled = await cancelled_after(steps, client.open())
        if not cancelled:
            await client.close()
        await client.close()
        await world.settled(clean, world.member)
        steps += 1
        assert steps < MOST_STEPS
    assert steps > 2


async def test_a_call_that_waits_for_the_relay_to_come_back_can_be_cancelled(world: World) -> None:
    attachment = world.caller._attachment
    assert attachment is not None
    await world.cluster.stop_relay()
    await eventually(lambda: attachment.pump is None)  # otherwise a call ends with the session
    for call in (request, push_and_flush, survey, tunnel, status, members):
        task = asyncio.create_task(call(world.caller))
        await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
    await world.cluster.start_relay()
    await world.caller.wait_for_members("db", 1, timeout=PATIENCE_S)
    await request(world.caller)
