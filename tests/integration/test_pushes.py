"""Pushes: exactly one member gets each, a failure is told, and nothing runs out however many there are."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from integration.kit import cut, named, port_of
from support.waiting import until

import iris
from iris.core.requests import Requests
from iris.testing import LocalCluster


def counting(name: str, got: list[bytes], **limits: int) -> iris.Service:
    service = iris.Service(name, limits=iris.Limits(**limits))

    @service.on_push
    def take(payload: bytes) -> None:
        got.append(payload)

    return service


async def test_a_push_is_delivered_to_exactly_one_member() -> None:
    got: list[list[bytes]] = [[], []]
    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        cluster.client() as first,
        cluster.client() as second,
        first.serve(counting("work", got[0])),
        second.serve(counting("work", got[1])),
    ):
        for n in range(100):
            await sender.push("work", b"%d" % n)
        await until(lambda: len(got[0]) + len(got[1]) >= 100)
        await cluster.settle()
        assert sorted(got[0] + got[1], key=int) == [b"%d" % n for n in range(100)]
        assert got[0]
        assert got[1]
        assert not sender.losses


async def test_the_credit_of_pushes_comes_back() -> None:
    got: list[bytes] = []
    async with (
        LocalCluster() as cluster,
        named(cluster, "sender") as sender,
        named(cluster, "member") as member,
        member.serve(counting("work", got, concurrency=1, queue_bytes=1000)),
    ):
        for _ in range(50):
            await sender.push("work", b"x" * 100)
            await sender.flush()
        await cluster.settle()
        assert len(got) == 50
        assert port_of(cluster, "member").session.in_flight == {}
        assert port_of(cluster, "sender").session.pending == 0


@pytest.mark.parametrize("coroutine", [False, True])
async def test_thousands_of_pushes_exhaust_nothing(coroutine: bool) -> None:
    got = 0
    service = iris.Service("work", limits=iris.Limits(concurrency=4))

    @service.on_push
    def take(payload: bytes) -> object:
        nonlocal got
        got += 1
        return None

    if coroutine:
        service = iris.Service("work", limits=iris.Limits(concurrency=4))

        @service.on_push
        async def take_later(payload: bytes) -> None:
            nonlocal got
            got += 1

    async with (
        LocalCluster() as cluster,
        named(cluster, "sender") as sender,
        named(cluster, "member") as member,
        member.serve(service),
    ):
        for n in range(20_000):
            await sender.push("work", b"x")
            if n % 500 == 0:
                await sender.flush()
        await until(lambda: got == 20_000)
        await cluster.settle()
        assert not sender.losses
        assert port_of(cluster, "member").session.in_flight == {}
        assert port_of(cluster, "sender").session.pending == 0
        (load,) = port_of(cluster, "member").session.members.values()
        assert all((k.messages, k.bytes) == (0, 0) for k in load.loads.values())


async def test_a_push_to_nobody_is_reported_by_the_time_flush_returns() -> None:
    reported: list[iris.Loss] = []
    async with LocalCluster() as cluster, cluster.client() as sender:
        sender.on_loss = reported.append
        await sender.push("nobody", b"x")
        await sender.flush()
        assert [(lost.kind, lost.name, lost.count) for lost in reported] == [("push", "nobody", 1)]
        assert "no members have joined under this name" in reported[0].cause
        assert list(sender.losses) == reported


async def test_a_push_to_full_members_is_reported_one_by_one() -> None:
    service = iris.Service("busy", limits=iris.Limits(concurrency=1, queue_bytes=1))
    release, ran = asyncio.Event(), []

    @service.on_push
    async def busy(payload: bytes) -> None:
        ran.append(payload)
        await release.wait()

    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as member:
        async with member.serve(service):
            for n in range(4):
                await sender.push("busy", b"%d" % n)
            await sender.flush()
            await until(lambda: len(sender.losses) == 3)
            release.set()
            await cluster.settle()
            assert ran == [b"0"]
            assert sum(lost.count or 0 for lost in sender.losses) == 3


async def test_pushes_that_a_lost_member_had_not_finished_are_reported() -> None:
    service = iris.Service("doomed", limits=iris.Limits(concurrency=3))
    ran: list[bytes] = []

    @service.on_push
    async def hang(payload: bytes) -> None:
        ran.append(payload)
        await asyncio.Event().wait()

    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        named(cluster, "member") as member,
    ):
        serving = member.serve(service)
        binding = await serving.__aenter__()
        for _ in range(3):
            await sender.push("doomed", b"x")
        await until(lambda: len(ran) == 3)
        await cut(cluster, "member")
        await until(lambda: len(sender.losses) == 3)
        assert {lost.kind for lost in sender.losses} == {"push"}
        await binding.stop()
        await serving.__aexit__(None, None, None)


async def test_pushes_whose_time_passes_in_the_members_queue_are_reported_and_counted() -> None:
    service = iris.Service("work", limits=iris.Limits(concurrency=1))
    go, ran = asyncio.Event(), []

    @service.on_push
    async def work(payload: bytes) -> None:
        await go.wait()
        ran.append(payload)

    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as member:
        async with member.serve(service):
            await sender.push("work", b"first")
            for n in range(3):
                await sender.push("work", b"%d" % n, timeout=0.5)
            await sender.flush()
            await asyncio.sleep(
                0.6
            )  # their time passes, in the queue: nothing is to be seen of that until it is looked at
            go.set()
            await until(lambda: len(sender.losses) == 3)
            await cluster.settle()
        assert ran == [b"first"]
        assert member.counters == {"expired": 3}
        for loss in sender.losses:
            assert isinstance(loss.error, iris.RequestTimeout)
            assert not loss.error.may_have_run


async def test_a_push_handler_that_fails_is_counted_at_the_member_and_costs_no_credit() -> None:
    service = iris.Service("fails", limits=iris.Limits(concurrency=1, queue_bytes=1))

    @service.on_push
    def fail(payload: bytes) -> None:
        raise RuntimeError("no")

    async with (
        LocalCluster() as cluster,
        cluster.client() as sender,
        named(cluster, "member") as member,
        member.serve(service),
    ):
        for _ in range(5):
            await sender.push("fails", b"x")
            await cluster.settle()
        assert member.counters["failed handlers"] == 5
        assert not sender.losses
        assert port_of(cluster, "member").session.in_flight == {}


async def test_a_push_has_no_answer_to_defer() -> None:
    service = iris.Service("work")

    @service.on_push
    def take(request: iris.Request) -> None:
        request.defer()

    async with LocalCluster() as cluster, cluster.client() as sender, sender.serve(service):
        await sender.push("work", b"x")
        await cluster.settle()
        assert sender.counters["failed handlers"] == 1


async def test_headers_of_a_push_reach_its_handler() -> None:
    service = iris.Service("work")
    got: list[iris.Message] = []

    @service.on_push
    def take(message: iris.Message) -> None:
        got.append(message)

    async with LocalCluster() as cluster, cluster.client() as sender, sender.serve(service):
        await sender.push("work", {"a": 1}, headers={"h": "v"})
        await until(lambda: got)
        assert (got[0].headers, got[0].value, got[0].name) == ({"h": "v"}, {"a": 1}, "work")


async def test_time_spent_waiting_for_a_relay_counts_against_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        ready, left = client._ready, []

        async def late(name: str, timeout: float) -> Any:
            await asyncio.sleep(0.1)
            return await ready(name, timeout)

        monkeypatch.setattr(client, "_ready", late)
        monkeypatch.setattr(Requests, "push", lambda *args: left.append(args[-3]))
        await client.push("c", b"x", timeout=5)
        assert left[0] <= 4901
