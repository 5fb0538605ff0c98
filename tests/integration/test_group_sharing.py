"""Subscriptions of one queue group in one client share its messages."""

from __future__ import annotations

import pytest
from integration.kit import Collector
from support.waiting import until

import iris
from iris.core.credit import MIN_QUEUE_BYTES
from iris.testing import LocalCluster


@pytest.mark.parametrize("filters", [("jobs.all", "jobs.all"), ("jobs.all", "jobs.>")])
async def test_two_subscriptions_of_a_group_in_one_client_share_a_burst(
    filters: tuple[str, str],
) -> None:
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as publisher:
        members = [Collector(), Collector()]
        for pattern, member in zip(filters, members, strict=True):
            await client.subscribe(pattern, member, group="workers").ready()
        for number in range(200):
            publisher.offer("jobs.all", b"%d" % number)
        await until(lambda: sum(len(member.messages) for member in members) == 200)
        assert sorted(n for member in members for n in member.numbers) == list(range(200))
        for member in members:
            assert 60 <= len(member.messages) <= 140
            assert member.numbers == sorted(member.numbers)


async def test_single_messages_go_to_the_subscriptions_of_a_group_in_turn() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as publisher:
        members = [Collector() for _ in range(4)]
        for member in members:
            await client.subscribe("jobs", member, group="workers").ready()
        for number in range(40):
            await publisher.publish("jobs", b"%d" % number, count=True)
        await until(lambda: sum(len(member.messages) for member in members) == 40)
        assert [len(member.messages) for member in members] == [10] * 4


async def test_a_full_subscription_of_a_group_loses_its_share_alone() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as publisher:
        free = Collector()
        full = client.subscribe("jobs", group="workers", limit_bytes=1)
        await full.ready()
        await client.subscribe("jobs", free, group="workers").ready()
        for number in range(40):
            await publisher.publish("jobs", b"%d" % number, count=True)
        await until(lambda: len(free.messages) == 20)
        assert full.lost_messages == 19
        await full.close()
        await publisher.publish("jobs", b"40", count=True)
        await until(lambda: len(free.messages) == 21)


async def test_a_publisher_waits_for_the_fullest_of_a_group_in_one_client() -> None:
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as publisher:
        subscriptions = [
            client.subscribe("jobs", group="workers", when_full="wait", limit_bytes=MIN_QUEUE_BYTES)
            for _ in range(2)
        ]
        for subscription in subscriptions:
            await subscription.ready()
        payload = bytes(60_000)
        sent = 0
        while publisher.offer("jobs", payload, when_full="wait"):
            sent += 1
            await publisher.flush()
            await cluster.settle()
        received = 0
        for subscription in subscriptions:
            assert subscription.lost_messages == 0
            assert subscription.queued_bytes
            await subscription.close()
            async for _ in subscription:
                received += 1
        assert received == sent
        assert not [lost for lost in client.losses if isinstance(lost, iris.Loss)]
