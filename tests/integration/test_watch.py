"""The model of a live network, from real relays, members and stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.links import Site, linked
from support.relays import KEY, client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.errors import ConfigError
from iris.testing import LocalCluster
from iris.watch import Network, Watch, as_json
from iris.watch.asking import LOST_S

pytestmark = pytest.mark.timeout(60)


def watching(cluster: LocalCluster, **options: Any) -> Watch:
    """Return a quick watch of a cluster in this process."""
    return Watch(interval_s=0.2, opener=lambda _address, _keyed: cluster.client(), **options)


async def seen(watch: Watch, holds: Callable[[Network], object]) -> Network:
    """Return the first network for which something holds."""
    async with asyncio.timeout(PATIENCE_S):
        async for network in watch.updates():
            if holds(network):
                return network
    raise AssertionError("the watch ended")


def orders(gate: asyncio.Event | None = None, **options: Any) -> iris.Service:
    service = iris.Service("orders", version="1.4", **options)

    @service.on_request("place")
    async def place(payload: bytes) -> bytes:
        if payload == b"bad":
            raise ValueError("bad")
        if gate is not None:
            await gate.wait()
        return payload

    return service


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(data=tmp_path / "data") as made:
        yield made


async def test_members_show_their_rates_times_and_queues(cluster: LocalCluster) -> None:
    async with (
        cluster.serve(orders()),
        cluster.client() as caller,
        watching(cluster) as watch,
    ):
        await seen(watch, lambda network: network.clusters)
        for payload in (b"a", b"b", b"bad"):
            await asyncio.gather(
                caller.request("orders", payload, timeout=PATIENCE_S, method="place"),
                return_exceptions=True,
            )
        network = await seen(watch, lambda network: network.clusters[0].p99_ms is not None)
    (member,) = network.clusters[0].members
    assert (member.version, member.state, member.serves) == ("1.4", "up", ["request"])
    assert member.host
    assert member.pid
    assert member.timed == 2, "what raised is not timed"
    (handler,) = member.handlers
    assert (handler.kind, handler.name) == ("request", "place")
    assert network.problems == []
    json.loads(as_json(network))


async def test_calls_that_wait_for_a_handler_are_a_queue(cluster: LocalCluster) -> None:
    gate = asyncio.Event()
    async with (
        cluster.serve(orders(gate, limits=iris.Limits(concurrency=1))),
        cluster.client() as caller,
        watching(cluster) as watch,
    ):
        calls = [
            asyncio.create_task(caller.request("orders", b"x", timeout=PATIENCE_S, method="place"))
            for _ in range(5)
        ]
        network = await seen(watch, lambda network: network.clusters and network.clusters[0].queued)
        assert network.clusters[0].queued <= 4
        later = await seen(watch, lambda network: network.clusters[0].members[0].queued_for_s > 0)
        assert later.clusters[0].members[0].queued_bytes > 0
        gate.set()
        await asyncio.gather(*calls)


async def test_many_viewers_of_one_watch_cost_the_relay_no_more_than_one(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    status = iris.Client.status

    async def counting(self: iris.Client, **options: Any) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return await status(self, **options)

    monkeypatch.setattr(iris.Client, "status", counting)
    async with watching(cluster) as watch:
        third = await asyncio.gather(
            *(seen(watch, lambda network: network.serial >= 3) for _ in range(20))
        )
        assert asked <= max(network.serial for network in third) + 1


async def test_a_relay_that_crashes_is_shown_as_away_and_comes_back(cluster: LocalCluster) -> None:
    async with watching(cluster) as watch:
        before = await seen(watch, lambda network: network.relays[0].state == "up")
        await cluster.stop_relay()
        away = await seen(watch, lambda network: network.relays[0].state == "away")
        assert away.relays[0].id == before.relays[0].id
        assert away.problems
        assert f"within {LOST_S:g} s" in away.relays[0].error, (
            "a lost one is not waited for as long"
        )
        await cluster.start_relay()
        back = await seen(watch, lambda network: network.relays[0].state == "up")
        assert back.relays[0].id != before.relays[0].id
        assert len(back.relays) == 1


async def test_streams_are_shown_with_lag_and_dead_letters(cluster: LocalCluster) -> None:
    async with cluster.client() as user:
        await user.streams.create("log")
        await user.streams.append("log", b"good")
        await user.streams.append("log", b"bad")
        async with user.streams.consumer("log", "work", max_deliver=1) as work:
            async with asyncio.timeout(PATIENCE_S):
                async for message in work:
                    if message.payload == b"bad":
                        work.nack(message, reason="bad")
                        await work.flush()
                        break
            async with watching(cluster) as watch:
                network = await seen(
                    watch, lambda network: network.streams and network.streams[0].dead_letters
                )
    (log,) = network.streams
    assert (log.name, log.messages, log.dead_letters) == ("log", 2, 1)
    (consumer,) = log.consumers
    assert (consumer.name, consumer.workers, consumer.lag, log.lag) == ("work", 1, 1, 1)


async def test_a_network_of_two_relays_shows_both_with_the_members_of_both(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    keyring = iris.Keyring.single(KEY)
    far = iris.Service("far")
    far.on_request(lambda payload: payload)
    foreign = iris.Service("foreign")
    foreign.on_request(lambda payload: payload)
    other_key = type(KEY)(bytes(32))
    async with (
        client(two.config.socket_path) as there,
        client(two.config.socket_path, other_key) as stranger,
        there.serve(far),
        stranger.serve(foreign),
        Watch(
            one.config.socket_path,
            [str(two.config.socket_path)],
            keyring=iris.Keyring({"far": keyring.entries()["default"]}),
            interval_s=0.2,
        ) as watch,
    ):
        network = await seen(watch, lambda network: len(network.clusters) == 2)
        assert {relay.id for relay in network.relays} == {one.router.relay_id.hex(), two.router.relay_id.hex()}  # fmt: skip
        assert {(link.relay, link.peer) for link in network.links} == {
            (one.router.relay_id.hex(), two.router.relay_id.hex()),
            (two.router.relay_id.hex(), one.router.relay_id.hex()),
        }
        assert all(relay.asked for relay in network.relays)
        seen_far, seen_foreign = network.clusters
        assert [member.relay for member in seen_far.members] == [two.router.relay_id.hex()]
        assert (seen_foreign.keyed, seen_foreign.total) == (False, 1)


async def test_one_look_has_rates(cluster: LocalCluster) -> None:
    async with cluster.serve(orders()):
        network = await watching(cluster).once(apart_s=0.01)
    assert network.relays[0].in_rate is not None
    assert network.clusters[0].members[0].handled_rate == 0.0


async def test_a_watch_without_any_relay_says_so_and_goes_on(tmp_path: Path) -> None:
    async with Watch(
        tmp_path / "relay.sock", interval_s=0.2, keyring=iris.Keyring.single(KEY)
    ) as watch:
        network = await seen(watch, lambda network: network.serial >= 2)
    assert network.relays[0].state == "away"
    assert "relay.sock" in network.problems[0]


async def test_the_updates_of_a_watch_end_with_it(cluster: LocalCluster) -> None:
    async with watching(cluster) as watch:
        await seen(watch, lambda network: True)
    assert [network.serial async for network in watch.updates()] == [watch.latest.serial]  # type: ignore[union-attr]  # it has seen one


async def test_what_ends_a_watch_reaches_its_viewers(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    watch = watching(cluster)
    monkeypatch.setattr("iris.watch.model.Model.update", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        async with watch:
            await seen(watch, lambda network: True)


def test_a_watch_is_not_made_to_look_all_the_time() -> None:
    with pytest.raises(ConfigError, match=r"interval_s must be at least 0\.2"):
        Watch(interval_s=0.0)


async def test_a_client_that_is_lent_to_a_watch_stays_open(cluster: LocalCluster) -> None:
    async with cluster.serve(orders()), cluster.client() as lent:
        async with Watch(lent, interval_s=0.2) as watch:
            await seen(watch, lambda network: network.clusters)
        assert len(await lent.members("orders")) == 1
