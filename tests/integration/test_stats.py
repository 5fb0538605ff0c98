"""One snapshot has everything that a client sent, received, dropped and holds."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from integration.kit import echo_service, named
from support.waiting import until

import iris
from iris import blocking
from iris.testing import LocalCluster


async def test_a_snapshot_counts_messages_bytes_queues_drops_losses_and_failures() -> None:
    release = asyncio.Event()
    service = iris.Service("work")

    @service.on_push
    async def work(payload: bytes) -> None:
        await release.wait()
        raise ValueError("no")

    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        cluster.client() as member,
        member.serve(service) as binding,
        member.subscribe("t.>", limit_bytes=3000, group="g") as messages,
    ):
        before = member.stats()
        assert (before.dropped, before.losses, before.failed_handlers) == ({}, 0, 0)
        assert [(s.filter, s.group, s.queued_bytes, s.limit_bytes, s.lost_messages) for s in before.subscriptions] == [("t.>", "g", 0, 3000, 0)]  # fmt: skip
        assert [(s.cluster, s.member, s.running) for s in before.services] == [("work", binding.member_id, 0)]  # fmt: skip
        await sender.push("work", bytes(500))
        for _ in range(10):
            await sender.publish("t.a", bytes(1000))
            await sender.flush()
        await until(lambda: member.stats().received_messages == 11)
        full = member.stats()
        assert full.services[0].running == 1
        assert full.services[0].queued_bytes > 500
        (queue,) = full.subscriptions
        assert 1000 < queue.queued_bytes <= 3000
        assert full.queued_bytes == queue.queued_bytes + full.services[0].queued_bytes
        assert (
            queue.lost_messages
            == messages.lost_messages
            == full.dropped["slow subscriber"]
            == full.losses
        )
        assert full.received_bytes - before.received_bytes > 10_000
        assert sender.stats().sent_messages == 11
        assert sender.stats().sent_bytes > 10_000
        assert full.unwritten_bytes == full.held_bytes == full.reconnects == 0
        release.set()
        await until(lambda: member.stats().failed_handlers == 1)
        assert member.stats().services[0].queued_bytes == 0
        assert "failed handlers" not in member.stats().dropped
        with pytest.raises(dataclasses.FrozenInstanceError):
            full.losses = 0  # type: ignore[misc]  # the mistake under test
    with pytest.raises(iris.Closed):
        sender.stats()


async def test_a_snapshot_survives_a_reconnect_and_says_since_when_a_relay_is_there() -> None:
    async with (
        LocalCluster() as cluster,
        named(cluster, "a") as client,
        client.serve(echo_service()),
    ):
        await client.request("echo", b"x", timeout=5)
        first = client.stats()
        assert first.connected_since is not None
        assert abs(datetime.now(UTC) - first.connected_since) < timedelta(minutes=5)
        await cluster.stop_relay()
        await until(lambda: client.stats().connected_since is None)
        await client.publish("t", bytes(100))
        assert client.stats().held_bytes > 100
        await cluster.start_relay()
        await until(lambda: client.stats().reconnects == 1)
        again = client.stats()
        assert again.connected_since is not None
        assert again.connected_since > first.connected_since
        assert again.held_bytes == 0
        assert again.sent_bytes > first.sent_bytes > 0
        assert again.sent_messages >= first.sent_messages == 2
        assert again.received_bytes > first.received_bytes > 0


def test_threads_get_the_same_snapshot() -> None:
    with blocking.connect(embedded=True) as client:
        client.publish("t", b"x")
        assert client.stats().sent_messages == 1
        assert isinstance(client.stats(), iris.Stats)


@pytest.mark.parametrize("wrong", ["a", None, 1.5, True, 0, -1])
async def test_a_number_of_the_wrong_type_or_range_is_refused_by_name(wrong: object) -> None:
    bad: dict[str, object] = {"limit_bytes": wrong}
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.ConfigError, match=r"^limit_bytes must be "):
            client.subscribe("t", **bad)  # type: ignore[arg-type]  # the mistake under test
        with pytest.raises(iris.ConfigError, match=r"^concurrency must be "):
            client.subscribe("t", print, concurrency=wrong)  # type: ignore[arg-type]  # as above
    for setting in ("concurrency", "queue_bytes", "tunnels"):
        with pytest.raises(iris.ConfigError, match=f"^{setting} must be "):
            iris.Limits(**{setting: wrong})  # type: ignore[arg-type]  # as above
    for setting in ("message_limit_bytes", "write_high_bytes"):
        with pytest.raises(iris.ConfigError, match=f"^{setting} must be "):
            iris.ClientConfig(**{setting: wrong})  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("wrong", ["a", None, float("nan"), -1.0])
async def test_a_duration_of_the_wrong_type_or_range_is_refused_by_name(wrong: object) -> None:
    value: float = wrong  # type: ignore[assignment]  # the mistake under test
    refused = pytest.raises(iris.ConfigError, match=r"^timeout must be ")
    async with LocalCluster() as cluster, cluster.client() as client:
        with refused:
            await client.request("a", b"", timeout=value)
        with refused:
            await client.push("a", b"", timeout=value)
        with refused:
            [each async for each in client.survey("a", b"", timeout=value)]
        with refused:
            [each async for each in client.request_many("a", [b""], timeout=value)]
        with refused:
            await client.open_tunnel("a", timeout=value)
        with refused:
            await client.flush(timeout=value)
        with refused:
            await client.status(timeout=value)
        with refused:
            await client.members("a", timeout=value)
        with refused:
            await client.wait_for_subscribers("a", 1, timeout=value)
        with refused:
            await client.streams.describe("a", timeout=value)
        with pytest.raises(iris.ConfigError, match=r"^count must be "):
            await client.wait_for_members("a", wrong, timeout=1)  # type: ignore[arg-type]  # as above
    with pytest.raises(iris.ConfigError, match=r"^stall_s must be "):
        iris.ClientConfig(stall_s=value)


async def test_limits_of_streams_of_the_wrong_type_are_refused_by_name() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        for setting in ("max_bytes", "max_messages", "max_age", "dedup_window"):
            with pytest.raises(iris.ConfigError, match=f"^{setting} must be "):
                await client.streams.create("s", **{setting: "a"})  # type: ignore[arg-type]  # the mistake under test
        for setting in ("ack_timeout", "max_deliver", "prefetch"):
            with pytest.raises(iris.ConfigError, match=f"^{setting} must be "):
                client.streams.consumer("s", "c", **{setting: "a"})  # type: ignore[arg-type]  # as above
