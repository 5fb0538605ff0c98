"""A loss is told in one way, wherever it happened: counted, in `losses`, to `on_loss`, and in the log."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import logging
import os
from datetime import datetime
from typing import Any

import pytest
from integration.kit import Collector, freeze, named, port_of
from support.waiting import until

import iris
from iris.config import Limits
from iris.logs import event_of
from iris.testing import LocalCluster
from iris.wire.kinds import Kind


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of every line of an event."""
    return [r.__dict__["fields"] for r in caplog.records if event_of(r) == event]


async def flood(client: iris.Client, topic: str, bodies: int) -> None:
    """Publish messages that travel one by one."""
    for n in range(bodies):
        await client.publish(topic, b"%d" % n + bytes(1000))
        await client.flush()


async def test_every_loss_of_a_subscriber_that_is_slow_in_its_own_process_is_reported_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    reported: list[iris.Loss] = []
    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        sub.on_loss = reported.append
        async with sub.subscribe("t.>", limit_bytes=2000) as messages:
            await flood(pub, "t.a", 50)
            await cluster.settle()
            assert messages.lost_messages >= 47
            assert sum(lost.count or 0 for lost in sub.losses) == messages.lost_messages
            assert (sub.losses[0].kind, sub.losses[0].name) == ("publish", "t.a")
            assert reported == list(sub.losses)
            assert sub.counters["slow subscriber"] == messages.lost_messages
    lines = logged(caplog, "client.loss")
    assert sum(line["messages"] for line in lines) == messages.lost_messages
    assert len(lines) == 2  # at once, and the rest when it ended
    assert lines[0] == {
        "subscription": "t.>",
        "messages": 1,
        "losses": 1,
        "topic": "t.a",
        "cause": "slow subscriber",
    }


async def test_losses_of_a_subscription_that_handles_gaps_are_not_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as pub, cluster.client() as sub:
        async with sub.subscribe("t", limit_bytes=2000, on_loss=got.gap):
            await flood(pub, "t", 10)
            await cluster.settle()
        assert list(sub.losses) == got.gaps
    assert {r.levelname for r in caplog.records if event_of(r) == "client.loss"} == {"INFO"}


async def test_every_loss_of_a_slow_broadcast_handler_is_reported_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    service = iris.Service("caches", limits=Limits(queue_bytes=2000))
    go = asyncio.Event()

    @service.on_broadcast
    async def slow(payload: bytes) -> None:
        await go.wait()

    reported: list[iris.Loss] = []
    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as member:
        member.on_loss = reported.append
        async with member.serve(service):
            for _ in range(50):
                await sender.broadcast("caches", bytes(1000))
                await sender.flush()
            await cluster.settle()
            lost = member.counters["slow member"]
            assert lost >= 46
            assert sum(each.count or 0 for each in member.losses) == lost
            assert reported == list(member.losses)
            go.set()
    lines = logged(caplog, "client.loss")
    assert sum(line["messages"] for line in lines) == lost
    assert {line["service"] for line in lines} == {"caches"}


async def test_a_relay_that_goes_is_a_loss_of_unknown_count_for_each_subscription(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LocalCluster() as cluster, named(cluster, "sub") as sub:
        async with sub.subscribe("t.*"):
            await cluster.stop_relay()
            await until(lambda: sub.losses)
            (lost,) = sub.losses
            assert (lost.kind, lost.name, lost.count) == ("publish", "t.*", None)
            await cluster.start_relay()
    (line,) = logged(caplog, "client.loss")
    assert (line["subscription"], line.get("messages"), line["unknown"]) == ("t.*", None, 1)
    (text,) = [r.getMessage() for r in caplog.records if event_of(r) == "client.loss"]
    assert text.startswith(
        "client.loss: Subscription t.* missed an unknown number of messages (losses: 1, of unknown size: 1), the last ones on topic t.*: "
    )


async def test_what_a_relay_drops_for_a_slow_subscriber_is_reported_in_the_same_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as pub, named(cluster, "slow") as sub:
        async with sub.subscribe("t", got):
            port: Any = port_of(cluster, "slow")
            port._limit_bytes = 100_000
            go_on = freeze(cluster, "slow")
            for _ in range(400):
                await pub.publish("t", bytes(10_000))
                await pub.flush()
            dropped = cluster.relay.router.accounts.dropped["slow receiver"]
            go_on()
            await until(lambda: len(got.messages) + sum(x.count or 0 for x in sub.losses) >= 400)
            assert sum(lost.count or 0 for lost in sub.losses) == dropped
    assert sum(line["messages"] for line in logged(caplog, "client.loss")) == dropped


async def test_the_relay_names_a_slow_session_in_its_log_and_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as pub:
        async with named(cluster, "slow") as sub, sub.subscribe("t.*", got):
            port: Any = port_of(cluster, "slow")
            port._limit_bytes = 100_000
            go_on = freeze(cluster, "slow")
            for _ in range(200):
                await pub.publish("t.a", bytes(10_000))
                await pub.flush()
            dropped = cluster.relay.router.accounts.dropped["slow receiver"]
            await until(lambda: logged(caplog, "session.slow"))
            go_on()
            await until(lambda: len(got.messages) + dropped == 200)
            assert not (await pub.status())["sessions"][1]["held"]
        (line,) = logged(caplog, "session.slow")
        assert (line["label"], line["pid"], line["dropped"]) == ("slow", os.getpid(), dropped)
        assert (line["user"], line["topics"]) == (f"uid {os.geteuid()}", ["t.a"])
        assert datetime.fromisoformat(line["since"]).tzinfo is not None
        (slow,) = (await pub.status())["slow"]  # also when the session is gone
        assert (slow["label"], slow["dropped"], slow["topics"]) == ("slow", dropped, ["t.a"])
        assert 0 <= slow["last_s"] <= slow["since_s"]


async def test_what_a_coroutine_subscription_cannot_finish_in_time_is_reported_as_lost() -> None:
    first = asyncio.Event()

    async def stay(message: iris.Message) -> None:
        first.set()
        await asyncio.Event().wait()

    async with LocalCluster() as cluster, cluster.client() as sender:
        reader = named(cluster, "reader", drain_timeout_s=0.05)
        async with reader:
            subscription = await reader.subscribe("t", stay).ready()
            for n in range(5):
                await sender.publish("t", b"%d" % n)
            await first.wait()
            await sender.flush()
            await cluster.settle()
        assert subscription.lost_messages == 4
        assert sum(lost.count or 0 for lost in reader.losses) == 4
        assert not reader._runtime.working, "and its task has ended"


async def test_casts_kept_offline_are_reported_by_their_kind_when_the_client_is_closed() -> None:
    async with LocalCluster() as cluster:
        async with named(cluster, "sender") as sender:
            await cluster.stop_relay()
            await until(lambda: sender._attachment.pump is None)  # type: ignore[union-attr]
            await sender.publish("t", b"x")
            await sender.broadcast("c", b"y")
        assert [(lost.kind, lost.name) for lost in sender.losses] == [
            ("publish", "t"),
            ("broadcast", "c"),
        ]


async def test_an_offline_cast_that_cannot_be_sent_is_reported_and_the_rest_goes_on() -> None:
    collector = Collector()
    async with (
        LocalCluster() as cluster,
        cluster.client() as reader,
        named(cluster, "sender") as sender,
    ):
        await cluster.stop_relay()
        await until(lambda: sender._attachment.pump is None)  # type: ignore[union-attr]
        assert sender._attachment is not None
        sender._attachment.held.hold((Kind.BROADCAST, "no name", b"x", None, False))
        await sender.publish("t", b"y")
        await cluster.start_relay()
        await reader.subscribe("t", collector).ready()
        await until(lambda: sender._attachment.pump is not None)  # type: ignore[union-attr]
        assert [lost.kind for lost in sender.losses] == ["broadcast"]
        await sender.publish("t", b"z")
        await until(lambda: b"z" in collector.payloads)


async def test_watched_losses_include_what_was_sent_meanwhile_and_a_relay_that_was_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LocalCluster() as cluster, cluster.client() as sender:
        await sender.push("nobody", b"before")
        await sender.flush()
        logged_before = len(logged(caplog, "client.loss"))
        async with sender.watch_losses() as losses, sender.watch_losses() as others:
            await sender.push("nobody", b"x")
            await sender.publish("t", b"y")
            await sender.flush()
            assert [(lost.kind, lost.name, type(lost.error)) for lost in losses] == [
                ("push", "nobody", iris.NoMembers)
            ]
            assert losses == others
            await cluster.stop_relay()
            await cluster.start_relay()
            await sender.publish("t", b"z")
            await sender.flush()
            assert [lost.kind for lost in losses] == ["push", "relay"]
        await sender.push("nobody", b"after")
        await sender.flush()
        assert len(losses) == 2
        assert [lost.kind for lost in sender.losses] == ["push"] * 3
        assert len(logged(caplog, "client.loss")) == logged_before, (
            "on_loss was set, so nothing is logged"
        )


async def test_losses_are_watched_from_when_there_is_a_relay() -> None:
    async with LocalCluster() as cluster, cluster.client() as sender:
        await cluster.stop_relay()
        await until(lambda: sender._attachment.pump is None)  # type: ignore[union-attr]
        with pytest.raises(iris.ConnectionLost):
            async with sender.watch_losses(timeout=0.05):
                pass
        starting = asyncio.create_task(cluster.start_relay())
        async with sender.watch_losses() as losses:
            await sender.publish("t", b"x")
            await sender.flush()
        await starting
        assert losses == []
