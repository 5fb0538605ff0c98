"""Publishing that waits: nothing is lost between a publisher and a subscriber that both ask for it."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from integration.kit import Collector, cut, fill, freeze, named
from support.links import Site
from support.waiting import until

import iris
from iris.core.credit import MIN_QUEUE_BYTES
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.testing import LocalCluster

BODY = b" " * 4000
MANY = 1000
"""Messages of this size to publish: several times what a window holds."""


async def publish(client: iris.Client, topic: str, first: int = 0, after: int = MANY) -> None:
    for n in range(first, after):
        await client.publish(topic, b"%d" % n + BODY, when_full="wait")


def lost(cluster: LocalCluster) -> int:
    dropped = cluster.relay.router.accounts.dropped
    return dropped.get("slow receiver", 0)


class Slow(Collector):
    """A coroutine handler that goes on when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.going = asyncio.Event()

    async def take(self, message: iris.Message) -> None:
        await self.going.wait()
        self.messages.append(message)


@pytest.mark.parametrize("how", ["callback", "coroutine", "several at once", "iterator"])
async def test_everything_comes_in_order_however_it_is_taken(how: str) -> None:
    got = Collector()

    async def take(message: iris.Message) -> None:
        await asyncio.sleep(0)
        got(message)

    async with (
        LocalCluster() as cluster,
        named(cluster, "pub", stall_s=60.0) as pub,
        cluster.client() as sub,
    ):
        handler: Any = {"callback": got, "iterator": None}.get(how, take)
        concurrency = 4 if how == "several at once" else 1
        limit = {"limit_bytes": MIN_QUEUE_BYTES}
        async with sub.subscribe(
            "t", handler, on_loss=got.gap, when_full="wait", concurrency=concurrency, **limit
        ) as messages:
            filling = asyncio.create_task(fill(got.messages, messages)) if handler is None else None
            await publish(pub, "t")
            await until(lambda: len(got.messages) == MANY)
            if filling is not None:
                filling.cancel()
        assert got.numbers == list(range(MANY))
        assert not got.gaps
        assert lost(cluster) == 0


async def test_a_publisher_waits_while_the_queue_is_full_and_its_other_topics_go_on() -> None:
    slow, other = Slow(), Collector()
    async with LocalCluster() as cluster, named(cluster, "pub", stall_s=60.0) as pub:
        async with cluster.client() as sub:
            async with (
                sub.subscribe("t", slow.take, when_full="wait", limit_bytes=MIN_QUEUE_BYTES),
                sub.subscribe("other", other, when_full="wait"),
            ):
                publishing = asyncio.create_task(publish(pub, "t"))
                await until(lambda: cluster.relay.router.credits.waiting == 1)
                await publish(pub, "other")
                await until(lambda: len(other.messages) == MANY)
                assert not publishing.done()
                assert not pub.offer("t", BODY, when_full="wait")
                slow.going.set()
                await publishing
                await until(lambda: len(slow.messages) == MANY)
                assert slow.numbers == list(range(MANY))
                await until(lambda: pub.offer("other", b"0", when_full="wait"))
        assert lost(cluster) == 0


async def test_two_relays_pass_on_what_the_slowest_lets_through(site: Site) -> None:
    first = await site.start()
    second = await site.start(first)
    keyring = Keyring.single(ClusterKey(bytes(32)))
    got, slow = Collector(), Slow()

    def client(relay: Any, **settings: Any) -> iris.Client:
        config = iris.ClientConfig(relay=relay.config.socket_path, **settings)
        return iris.connect(keyring=keyring, config=config)

    async with client(first, stall_s=60.0) as pub, client(second) as one, client(second) as other:
        async with (
            one.subscribe("t", got, when_full="wait"),
            other.subscribe("t", slow.take, when_full="wait", limit_bytes=MIN_QUEUE_BYTES),
        ):
            await pub.wait_for_subscribers("t", 2, timeout=20.0)
            publishing = asyncio.create_task(publish(pub, "t"))
            await until(lambda: first.router.credits.waiting == 1)
            assert len(got.messages) < MANY
            slow.going.set()
            await publishing
            await until(lambda: len(slow.messages) == len(got.messages) == MANY)
            assert slow.numbers == got.numbers == list(range(MANY))


async def test_one_that_stalls_is_dropped_for_and_named_and_the_others_get_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow, other = Slow(), Collector()
    async with LocalCluster() as cluster, named(cluster, "pub", stall_s=0.5) as pub:
        async with named(cluster, "the slow one") as sub, cluster.client() as quick:
            async with (
                sub.subscribe("t", slow.take, on_loss=slow.gap, when_full="wait", limit_bytes=MIN_QUEUE_BYTES),
                quick.subscribe("t", other, on_loss=other.gap, when_full="wait"),
            ):  # fmt: skip
                with caplog.at_level(logging.WARNING, "iris"):
                    await publish(pub, "t")
                await until(lambda: len(other.messages) == MANY)
                assert "client.publish_stalled" in caplog.text
                audience = await pub.audience("t")
                assert [(entry.label, entry.dropped) for entry in audience.slow] == [
                    ("the slow one", lost(cluster))
                ]
                slow.going.set()
                await until(lambda: len(slow.messages) + slow.lost == MANY)
                assert 0 < slow.lost == lost(cluster)
                # Its queue is empty: it takes part again.
                await publish(pub, "t", MANY, 2 * MANY)
                await until(lambda: len(slow.messages) + slow.lost == 2 * MANY)
                assert slow.lost == lost(cluster)
                assert not other.gaps
                assert other.numbers == list(range(2 * MANY))


async def test_one_that_does_not_read_at_all_is_given_up_after_one_wait() -> None:
    got = Collector()
    async with LocalCluster() as cluster, named(cluster, "pub", stall_s=0.05) as pub:
        async with named(cluster, "frozen") as sub, cluster.client() as quick:
            async with (
                sub.subscribe("t", got, on_loss=got.gap, when_full="wait"),
                quick.subscribe("t", lambda message: None, when_full="wait"),
            ):
                resume = freeze(cluster, "frozen")
                await publish(pub, "t")
                resume()
                await until(lambda: len(got.messages) + got.lost == MANY)


async def test_who_publishes_to_itself_while_it_handles_is_not_stuck() -> None:
    """A handler that waits for its own queue waits for `stall_s`, and goes on."""
    handled: list[int] = []
    async with LocalCluster() as cluster, named(cluster, "both", stall_s=0.02) as client:

        async def take(message: iris.Message) -> None:
            handled.append(int(message.payload))
            await client.publish("t", b"%d" % -1 + 40 * BODY, when_full="wait")
            await client.publish("t", b"%d" % -1 + 40 * BODY, when_full="wait")

        async with client.subscribe("t", take, when_full="wait", limit_bytes=MIN_QUEUE_BYTES):
            await client.publish("t", b"0", when_full="wait")
            await until(lambda: len(handled) > 10)


async def test_a_wait_that_is_cancelled_publishes_nothing() -> None:
    slow = Slow()
    async with LocalCluster() as cluster, named(cluster, "pub", stall_s=60.0) as pub:
        async with cluster.client() as sub:
            async with sub.subscribe("t", slow.take, when_full="wait", limit_bytes=MIN_QUEUE_BYTES):
                number = 0
                while pub.offer("t", b"%d" % number + BODY, when_full="wait"):
                    number += 1
                    await pub.flush()
                for _ in range(5):
                    waiting = asyncio.create_task(pub.publish("t", b"-1", when_full="wait"))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                slow.going.set()
                await pub.publish("t", b"%d" % number, when_full="wait")
                await until(lambda: len(slow.messages) == number + 1)
                assert slow.numbers == list(range(number + 1))


async def test_a_lost_relay_ends_the_wait_and_the_message_is_kept_for_the_next() -> None:
    slow = Slow()
    async with LocalCluster() as cluster, named(cluster, "pub", stall_s=60.0) as pub:
        async with named(cluster, "sub") as sub:
            async with sub.subscribe("t", slow.take, when_full="wait", limit_bytes=MIN_QUEUE_BYTES):
                publishing = asyncio.create_task(publish(pub, "t"))
                await until(lambda: cluster.relay.router.credits.waiting == 1)
                await cut(cluster, "pub")
                slow.going.set()
                await publishing
                await until(lambda: slow.numbers[-1:] == [MANY - 1])
                assert len(slow.messages) >= MANY - 400, "what was on the way to the relay is lost"


async def test_a_closed_client_ends_the_wait() -> None:
    slow = Slow()
    async with LocalCluster() as cluster, cluster.client() as sub:
        async with sub.subscribe("t", slow.take, when_full="wait", limit_bytes=MIN_QUEUE_BYTES):
            pub = named(cluster, "pub", stall_s=60.0)
            await pub.open()
            publishing = asyncio.create_task(publish(pub, "t"))
            await until(lambda: cluster.relay.router.credits.waiting == 1)
            await pub.close()
            with pytest.raises(iris.Closed):
                await publishing
            slow.going.set()


async def test_a_service_asks_for_it_likewise() -> None:
    slow = Slow()
    service = iris.Service("s")
    service.on_publish("t", when_full="wait")(slow.take)
    async with LocalCluster() as cluster, named(cluster, "pub", stall_s=60.0) as pub:
        async with cluster.client() as sub, sub.serve(service):
            # Its queue is as long as any: several windows are sent, and then it is waited for.
            number = 0
            while pub.offer("t", b"%d" % number + BODY, when_full="wait"):
                number += 1
                await pub.flush()
            slow.going.set()
            await pub.publish("t", b"%d" % number, when_full="wait")
            await until(lambda: len(slow.messages) == number + 1)


def test_what_is_not_one_of_the_choices_is_refused_with_their_names() -> None:
    async def ask() -> None:
        async with LocalCluster() as cluster, cluster.client() as client:
            wrong: Any
            for wrong in ("block", "drop-new", None, ["wait"]):
                with pytest.raises(iris.ConfigError) as publishing:
                    await client.publish("t", b"", when_full=wrong)
                assert str(publishing.value) == f"when_full must be 'drop' or 'wait', not {wrong!r}"
            for wrong in ("block", "drop", "cut", None, ["wait"]):
                text = f"when_full must be 'drop-new', 'drop-old', 'close' or 'wait', not {wrong!r}"
                with pytest.raises(iris.ConfigError) as subscribing:
                    client.subscribe("t", when_full=wrong)
                assert str(subscribing.value) == text
                service = iris.Service("watchers")
                service.on_publish("t", when_full=wrong)(lambda message: None)
                with pytest.raises(iris.ConfigError) as serving:
                    await client.serve(service).__aenter__()
                assert str(serving.value) == text
            with pytest.raises(iris.ConfigError, match=r"limit_bytes .*4194304 .*1000"):
                client.subscribe("t", when_full="wait", limit_bytes=1000)

    asyncio.run(ask())
