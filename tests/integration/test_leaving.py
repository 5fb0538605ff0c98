"""Leaving is graceful, and bounded all the same."""

from __future__ import annotations

import asyncio
from typing import Any

from integration.kit import echo_service, named
from support.waiting import until

import iris
from iris.testing import LocalCluster


async def test_leaving_ends_although_an_idle_tunnel_is_still_open() -> None:
    service = iris.Service("db")

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        async for _ in tunnel:
            pass

    config = iris.ClientConfig(drain_timeout_s=0.05)
    async with LocalCluster() as cluster, cluster.client() as opener:
        async with cluster.client(config=config) as member, member.serve(service):
            tunnel = await opener.open_tunnel("db", timeout=5)
        try:
            await tunnel.recv()
        except iris.TunnelBroken:
            broken = True
        assert broken, "and the opener hears of it"


async def test_pushes_that_were_routed_are_not_told_as_lost_when_the_relay_goes() -> None:
    service = iris.Service("work")
    got: list[bytes] = []
    service.on_push(lambda payload: got.append(payload))
    async with LocalCluster() as cluster, cluster.client() as sender:
        async with cluster.client() as member, member.serve(service):
            await sender.push("work", b"x")
            await sender.flush()
        await cluster.settle()
        await cluster.stop_relay()
        await cluster.start_relay()
        await sender.flush()
        assert got == [b"x"]
        assert not [lost for lost in sender.losses if lost.kind == "push"]


async def test_queued_requests_are_answered_as_not_run_when_the_member_stops() -> None:
    service = iris.Service("slow", limits=iris.Limits(concurrency=1))
    running = asyncio.Event()

    @service.on_request
    async def slow(payload: bytes) -> None:
        running.set()
        await asyncio.Event().wait()

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        named(cluster, "member", drain_timeout_s=0.05) as member,
    ):
        async with member.serve(service) as binding:
            calls = [
                asyncio.create_task(caller.request("slow", b"x", timeout=30)) for _ in range(4)
            ]
            await running.wait()
            await until(lambda: binding.running == 4)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(err, iris.RemoteError) for err in errors), errors
        assert [err.may_have_run for err in errors] == [True, False, False, False]  # type: ignore[union-attr]
        assert member.counters["member stopped"] == 3


async def test_a_handler_that_runs_during_the_drain_may_use_the_client() -> None:
    service = iris.Service("front")
    running, go = asyncio.Event(), asyncio.Event()

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as back,
        back.serve(echo_service()),
    ):
        member = cluster.client()

        @service.on_request
        async def ask(payload: bytes) -> Any:
            running.set()
            await go.wait()
            return await member.request("echo", payload, timeout=5)

        await member.open()
        serving = member.serve(service)
        await serving.__aenter__()
        call = asyncio.create_task(caller.request("front", b"x", timeout=30))
        await running.wait()
        closing = asyncio.create_task(member.close())
        await cluster.settle()
        go.set()
        assert await call == b"x"
        await closing


async def test_a_handler_that_swallows_its_cancellation_does_not_hang_close() -> None:
    service = iris.Service("stubborn", limits=iris.Limits(concurrency=1))
    running, stop = asyncio.Event(), asyncio.Event()
    started: list[bytes] = []

    @service.on_push
    async def stubborn(payload: bytes) -> None:
        started.append(payload)
        running.set()
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue

    async with LocalCluster() as cluster, cluster.client() as sender:
        async with (
            named(cluster, "member", drain_timeout_s=0.05) as member,
            member.serve(service) as binding,
        ):
            await sender.push("stubborn", b"0")
            await sender.push("stubborn", b"1")
            await running.wait()
            await until(lambda: binding.running == 2)
        stop.set()
        await cluster.settle()
        assert started == [b"0"], "what was queued is not started after the end"
