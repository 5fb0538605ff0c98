"""What all receivers together may leave unread at a relay: the longest queue gives way, and every loss is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from integration.kit import Collector, echo_service, freeze, named
from support.waiting import until

import iris
from iris.testing import LocalCluster
from relay.core.budget import Budget

LIMIT_BYTES = 4 << 20
BODY = b" " * 30_000
OVER_BYTES = 100_000
"""A budget is exceeded by no more than the frames that every port takes in any case."""


@contextlib.asynccontextmanager
async def small() -> AsyncIterator[tuple[LocalCluster, Budget]]:
    """A cluster whose relay lets little wait; at the end nothing waits, and nothing is counted as waiting."""
    async with LocalCluster() as cluster:
        budget = cluster.relay.driver.budget = Budget(LIMIT_BYTES)
        yield cluster, budget
        await cluster.settle()
        assert budget.bytes == 0
        assert not budget.waiting


async def publish(client: iris.Client, topic: str, first: int, after: int) -> None:
    for n in range(first, after):
        await client.publish(topic, b"%d" % n + BODY)
        await client.flush()


async def test_many_slow_subscribers_cost_no_more_than_the_budget_and_hear_of_every_loss() -> None:
    total = 400
    slow = [Collector() for _ in range(4)]
    witness = Collector()
    async with small() as (cluster, budget), contextlib.AsyncExitStack() as stack:
        pub = await stack.enter_async_context(cluster.client())
        for number, got in enumerate(slow):
            client = await stack.enter_async_context(named(cluster, f"slow {number}"))
            await stack.enter_async_context(client.subscribe("t", got, on_loss=got.gap))
        other = await stack.enter_async_context(cluster.client())
        await stack.enter_async_context(other.subscribe("t", witness, on_loss=witness.gap))
        resumes = [freeze(cluster, f"slow {number}") for number in range(4)]
        await publish(pub, "t", 0, total)
        await until(lambda: len(witness.messages) == total)
        assert LIMIT_BYTES // 2 < budget.bytes <= LIMIT_BYTES + OVER_BYTES
        queues = [port.waiting_bytes for port in cluster.relay.hub.ports if port.waiting_bytes]
        assert len(queues) == 4
        assert max(queues) < 2 * min(queues)
        for resume in resumes:
            resume()
        await until(lambda: all(len(got.messages) + got.lost >= total for got in slow))
        await cluster.settle()
        assert not witness.gaps
        for got in slow:
            assert len(got.messages) + got.lost == total
            assert got.lost > total // 2
            assert got.numbers == sorted(set(got.numbers))
        dropped = cluster.relay.router.accounts.dropped
        assert dropped["slow receiver"] == sum(got.lost for got in slow)
        named_slow = {each["label"] for each in cluster.relay.router.slow.report(0)}
        assert named_slow == {f"slow {number}" for number in range(4)}
        await publish(pub, "t", total, total + 1)
        await until(lambda: all(got.numbers[-1] == total for got in slow))


async def test_the_longest_queue_is_dropped_from_first_newest_first() -> None:
    first, second = Collector(), Collector()
    async with (
        small() as (cluster, budget),
        cluster.client() as pub,
        named(cluster, "first") as one,
        named(cluster, "second") as two,
        one.subscribe("a.*", first, on_loss=first.gap),
        two.subscribe("b", second, on_loss=second.gap),
    ):
        resumes = [freeze(cluster, "first"), freeze(cluster, "second")]
        for n in range(150):
            await publish(pub, f"a.{n % 2}", n, n + 1)
        assert not budget.shed
        assert not budget.full
        await publish(pub, "b", 0, 80)
        assert budget.shed
        assert not budget.full
        for resume in resumes:
            resume()
        await until(lambda: len(first.messages) + first.lost >= 150 and len(second.messages) == 80)
        await cluster.settle()
        assert not second.gaps
        kept = len(first.messages)
        assert sorted(first.numbers) == list(range(kept))
        assert first.lost == 150 - kept == budget.shed
        for topic in ("a.0", "a.1"):
            came = sum(m.name == topic for m in first.messages)
            assert sum(gap.count or 0 for gap in first.gaps if gap.name == topic) == 75 - came


async def test_of_several_losses_in_one_queue_each_is_reported_once() -> None:
    """Dropped as they came, dropped from the queue, taken again: whatever happened in turn, the sums are exact."""
    got, group, other = Collector(), Collector(), Collector()
    async with (
        small() as (cluster, budget),
        cluster.client() as pub,
        named(cluster, "slow") as slow,
        named(cluster, "other") as there,
        slow.subscribe("t", got, on_loss=got.gap),
        slow.subscribe("g", group, group="g", on_loss=group.gap),
        there.subscribe("o", other, on_loss=other.gap),
    ):
        sent = theirs = 0
        for _ in range(4):
            resumes = [freeze(cluster, "slow"), freeze(cluster, "other")]
            for n in range(90):
                await publish(pub, "t", sent + n, sent + n + 1)
                await publish(pub, "g", sent + n, sent + n + 1)
            await publish(pub, "o", theirs, theirs + 60)
            for n in range(90, 120):
                await publish(pub, "t", sent + n, sent + n + 1)
                await publish(pub, "g", sent + n, sent + n + 1)
            sent, theirs = sent + 120, theirs + 60
            for resume in resumes:
                resume()
            for collector, total in ((got, sent), (group, sent), (other, theirs)):
                await until(lambda c=collector, t=total: len(c.messages) + c.lost >= t)  # type: ignore[misc]  # a bound default
            await cluster.settle()
        assert budget.shed
        assert budget.full
        for collector, total in ((got, sent), (group, sent), (other, theirs)):
            assert len(collector.messages) + collector.lost == total
            assert collector.numbers == sorted(set(collector.numbers))
        lost = cluster.relay.router.accounts.dropped["slow receiver"]
        assert lost == got.lost + group.lost + other.lost


async def test_what_waits_for_a_session_that_goes_is_given_back() -> None:
    got = Collector()
    async with (
        small() as (cluster, budget),
        cluster.client() as pub,
        named(cluster, "slow") as slow,
        slow.subscribe("t", got),
    ):
        freeze(cluster, "slow")
        await publish(pub, "t", 0, 100)
        assert budget.bytes > 1 << 20
        port = next(port for port in cluster.relay.hub.ports if port.waiting_bytes)
        port.abort("the test ends it")
        await until(lambda: not budget.bytes)
        assert not budget.waiting


async def test_requests_are_refused_while_the_queue_of_their_member_is_the_longest() -> None:
    async with (
        small() as (cluster, budget),
        cluster.client() as caller,
        named(cluster, "slow") as slow,
        slow.serve(echo_service("echo", limits=iris.Limits(concurrency=1000))),
    ):
        resume = freeze(cluster, "slow")
        calls = [
            asyncio.ensure_future(caller.request("echo", BODY, timeout=30)) for _ in range(300)
        ]
        await until(lambda: sum(call.done() for call in calls) > 50)
        assert budget.bytes <= LIMIT_BYTES + OVER_BYTES
        resume()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, Exception)]
        assert refused
        assert all(isinstance(each, iris.Overloaded) for each in refused)
        assert budget.full
        assert not budget.shed


async def test_what_a_publisher_left_behind_gives_way_as_well() -> None:
    """Its alias is free then, and still stands for what waits."""
    got, second = Collector(), Collector()
    async with (
        small() as (cluster, budget),
        cluster.client() as pub,
        named(cluster, "first") as one,
        named(cluster, "second") as two,
        one.subscribe("a", got, on_loss=got.gap),
        two.subscribe("b", second, on_loss=second.gap),
    ):
        resumes = [freeze(cluster, "first"), freeze(cluster, "second")]
        async with cluster.client() as gone:
            await publish(gone, "a", 0, 150)
        await cluster.settle()
        await publish(pub, "b", 0, 80)
        assert budget.shed
        for resume in resumes:
            resume()
        await until(lambda: len(got.messages) + got.lost >= 150 and len(second.messages) == 80)
        await cluster.settle()
        assert len(got.messages) + got.lost == 150
        assert got.lost == budget.shed
        assert not second.gaps
    assert not any(port.session.aliases._past for port in cluster.relay.hub.ports)
