"""Registering and unregistering at every turn of the loop while a client moves from one session to the next."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib

import pytest
from integration.kit import Collector, echo_service, named, port_of
from support.waiting import until

import iris
from iris.testing import LocalCluster

TURNS = 25
"""Turns of the loop that a reconnect or a reload takes, and some."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def moving(cluster: LocalCluster, client: iris.Client, how: str):  # type: ignore[no-untyped-def]
    """Start a move to another session, and wait for its end on the way out."""
    if how == "reconnect":
        port_of(cluster, client.config.label).abort("cut by the test")
        yield
        await until(
            lambda: [p for p in cluster.relay.hub.ports if p.session.label == client.config.label]
        )
        await client.request("ready", b"", timeout=5, idempotent=True)
    else:
        task = asyncio.create_task(client.reload_keys(cluster.keyring))
        yield
        await task


@pytest.mark.parametrize("how", ["reconnect", "reload"])
async def test_a_subscription_begun_at_any_turn_of_a_move_is_registered(how: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), named(cluster, "mover") as mover:
            for turn in range(TURNS):
                got = Collector()
                async with moving(cluster, mover, how):
                    await turns(turn)
                    subscription = mover.subscribe("t.*", got)
                    await asyncio.wait_for(subscription.ready(), 5)
                await mover.flush()
                await other.publish("t.a", b"x")
                await other.flush()
                await cluster.settle()
                assert got.payloads == [b"x"], f"at turn {turn}"
                await subscription.close()


@pytest.mark.parametrize("how", ["reconnect", "reload"])
async def test_a_subscription_ended_at_any_turn_of_a_move_is_forgotten(how: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), named(cluster, "mover") as mover:
            for turn in range(TURNS):
                subscription = await mover.subscribe("t.*", Collector()).ready()
                async with moving(cluster, mover, how):
                    await turns(turn)
                    await asyncio.wait_for(subscription.close(), 5)
                await mover.flush()
                await cluster.settle()
                assert port_of(cluster, "mover").session.subscriptions == {}, f"at turn {turn}"


@pytest.mark.parametrize("how", ["reconnect", "reload"])
async def test_a_service_begun_at_any_turn_of_a_move_is_a_member_once(how: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), named(cluster, "mover") as mover:
            for turn in range(TURNS):
                async with moving(cluster, mover, how):
                    await turns(turn)
                    serving = mover.serve(echo_service("db"))
                    try:
                        await asyncio.wait_for(serving.__aenter__(), 5)
                    except iris.ConnectionLost:
                        assert how == "reconnect", f"at turn {turn}"
                        serving = mover.serve(echo_service("db"))
                        await asyncio.wait_for(serving.__aenter__(), 5)
                await mover.flush()
                assert await other.request("db", b"x", timeout=5) == b"x", f"at turn {turn}"
                assert len(await other.members("db")) == 1, f"at turn {turn}"
                await serving.__aexit__(None, None, None)
                assert len(await other.members("db")) == 0, f"at turn {turn}"


@pytest.mark.parametrize("how", ["reconnect", "reload"])
async def test_a_service_ended_at_any_turn_of_a_move_leaves_no_member_behind(how: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), named(cluster, "mover") as mover:
            for turn in range(TURNS):
                serving = mover.serve(echo_service("db"))
                await serving.__aenter__()
                async with moving(cluster, mover, how):
                    await turns(turn)
                    await asyncio.wait_for(serving.__aexit__(None, None, None), 5)
                await mover.flush()
                await cluster.settle()
                assert len(await other.members("db")) == 0, f"at turn {turn}"


@pytest.mark.parametrize("how", ["reconnect", "reload"])
async def test_a_watch_begun_at_any_turn_of_a_move_sees_what_follows(how: str) -> None:
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), named(cluster, "mover") as mover:
            for turn in range(TURNS):
                async with moving(cluster, mover, how):
                    await turns(turn)
                    waiting = asyncio.create_task(mover.wait_for_members("db", 1, timeout=5))
                    await asyncio.sleep(0)
                async with other.serve(echo_service("db")):
                    assert len(await waiting) == 1, f"at turn {turn}"


@pytest.mark.parametrize("how", ["reconnect", "reload"])
async def test_publications_at_any_turn_of_a_move_keep_their_order(how: str) -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), other.subscribe("t", got, on_loss=got.gap):
            async with named(cluster, "mover") as mover:
                sent = 0
                for turn in range(TURNS):
                    await mover.flush()
                    async with moving(cluster, mover, how):
                        for _ in range(turn + 1):
                            await mover.publish("t", b"%d" % sent)
                            sent += 1
                            await asyncio.sleep(0)
                await mover.flush()
                await cluster.settle()
                assert got.numbers == sorted(set(got.numbers))
                if how == "reload":
                    assert got.numbers == list(range(sent))
                    assert not got.gaps


async def test_requests_at_any_turn_of_a_reload_are_answered() -> None:
    async with LocalCluster() as cluster, cluster.client() as other:
        async with other.serve(echo_service("ready")), named(cluster, "mover") as mover:
            for turn in range(TURNS):
                async with moving(cluster, mover, "reload"):
                    await turns(turn)
                    assert await mover.request("ready", b"%d" % turn, timeout=5) == b"%d" % turn


@pytest.mark.parametrize("turn", range(TURNS))
async def test_a_reload_cancelled_at_any_turn_leaves_one_session_that_works(turn: int) -> None:
    got = Collector()
    async with LocalCluster() as cluster, named(cluster, "mover") as mover:
        async with mover.serve(echo_service("db")), mover.subscribe("t", got):
            task = asyncio.create_task(mover.reload_keys(cluster.keyring))
            await turns(turn)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await cluster.settle()
            await until(lambda: len(cluster.relay.hub.ports) == 1)
            assert await mover.request("db", b"x", timeout=5) == b"x"
            await mover.publish("t", b"y")
            await mover.flush()
            await cluster.settle()
            assert got.payloads == [b"y"]
            assert len(await mover.members("db")) == 1


@pytest.mark.parametrize("turn", range(TURNS))
async def test_a_relay_lost_at_any_turn_of_a_reload_is_found_again_with_one_session(
    turn: int,
) -> None:
    got = Collector()
    async with LocalCluster() as cluster, named(cluster, "mover") as mover:
        async with mover.serve(echo_service("db")), mover.subscribe("t", got):
            task = asyncio.create_task(mover.reload_keys(cluster.keyring))
            await turns(turn)
            await cluster.stop_relay()
            await cluster.start_relay()
            with contextlib.suppress(iris.IrisError):
                await asyncio.wait_for(task, 10)
            await mover.wait_for_members("db", 1, timeout=5)
            await until(lambda: len(cluster.relay.hub.ports) == 1)
            assert await mover.request("db", b"x", timeout=5) == b"x"
            await mover.publish("t", b"y")
            await until(lambda: got.messages)
            await cluster.settle()
            assert got.payloads == [b"y"]
            assert len(await mover.members("db")) == 1


@pytest.mark.parametrize("turn", range(TURNS))
async def test_a_session_lost_at_any_turn_of_its_reload_leaves_one_that_works(turn: int) -> None:
    got = Collector()
    async with LocalCluster() as cluster, named(cluster, "mover") as mover:
        async with mover.serve(echo_service("db")), mover.subscribe("t", got):
            old = port_of(cluster, "mover")
            task = asyncio.create_task(mover.reload_keys(cluster.keyring))
            await turns(turn)
            old.abort("cut by the test")
            with contextlib.suppress(iris.IrisError):
                await asyncio.wait_for(task, 10)
            await until(lambda: old not in cluster.relay.hub.ports)
            await mover.wait_for_members("db", 1, timeout=5)
            await cluster.settle()
            await until(lambda: len(cluster.relay.hub.ports) == 1)
            assert await mover.request("db", b"x", timeout=5) == b"x"
            await mover.publish("t", b"y")
            await until(lambda: got.messages)
            await cluster.settle()
            assert got.payloads == [b"y"]
            assert len(await mover.members("db")) == 1
