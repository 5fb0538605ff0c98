"""What a client does by itself when its relay goes away, comes back, or when members come and go."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
from integration.kit import Collector, cut, echo_service, named
from support.waiting import until

import iris
from iris.core.requests import Requests
from iris.logs import event_of
from iris.testing import LocalCluster


async def test_services_rejoin_and_subscriptions_resubscribe_at_the_next_relay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "iris.attachment")
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "caller") as caller, named(cluster, "member") as member:
            async with (
                member.serve(echo_service()) as binding,
                member.subscribe("t", got, on_loss=got.gap),
            ):
                assert await caller.request("echo", b"1", timeout=5) == b"1"
                before = binding.member_id
                for turn in range(3):
                    await cluster.stop_relay()
                    cluster.check_accounts()
                    await cluster.start_relay()
                    members = await caller.wait_for_members("echo", 1, timeout=10)
                    assert [info.member for info in members] == [binding.member_id]
                    assert binding.member_id != before
                    before = binding.member_id
                    assert await caller.request("echo", b"2", timeout=5) == b"2"
                    await member.flush(timeout=5)
                    await caller.publish("t", b"%d" % turn)
                    await until(lambda turn=turn: len(got.messages) == turn + 1)  # type: ignore[misc]  # a bound default
                assert got.numbers == [0, 1, 2]
                assert [gap.count for gap in got.gaps] == [None] * 3, "nobody knows what was missed"
    logged = [event_of(record) for record in caplog.records]
    for event in ("client.disconnected", "client.connected"):
        assert logged.count(event) == 6, "of two clients three times, and not when they were closed"


async def test_a_client_waits_for_a_relay_within_the_timeout_of_its_call() -> None:
    async with LocalCluster() as cluster:
        async with named(cluster, "a") as client, client.serve(echo_service()):
            await cluster.stop_relay()
            await until(lambda: not cluster.relay.hub.ports)
            with pytest.raises(iris.ConnectionLost, match=r"no relay .*within 0\.05 s") as caught:
                await client.request("echo", b"", timeout=0.05)
            assert not caught.value.may_have_run
            waiting = asyncio.create_task(client.request("echo", b"x", timeout=10))
            await asyncio.sleep(0)
            await cluster.start_relay()
            assert await waiting == b"x"


async def test_everything_in_flight_ends_when_the_relay_goes_away() -> None:
    service = iris.Service("slow")
    release, started = asyncio.Event(), []

    @service.on_request
    async def request(payload: bytes) -> None:
        started.append("request")
        await release.wait()

    @service.on_survey
    async def survey(payload: bytes) -> None:
        started.append("survey")
        await release.wait()

    @service.on_tunnel
    async def tunnel(tunnel: iris.Tunnel) -> None:
        started.append("tunnel")
        with pytest.raises(iris.TunnelBroken):
            await tunnel.recv()
        started.append("broken")

    async with LocalCluster() as cluster:
        async with named(cluster, "caller") as caller, named(cluster, "member") as member:
            async with member.serve(service):
                asking = asyncio.create_task(caller.request("slow", b"", timeout=30))
                surveying = asyncio.create_task(
                    anext(aiter(caller.survey("slow", b"", timeout=30)))
                )
                tunnel_end = await caller.open_tunnel("slow", timeout=5)
                receiving = asyncio.create_task(tunnel_end.recv())
                await until(lambda: len(started) == 3)
                await cluster.stop_relay()
                with pytest.raises(iris.ConnectionLost) as caught:
                    await asking
                assert caught.value.may_have_run
                with pytest.raises(iris.ConnectionLost):
                    await surveying
                with pytest.raises(iris.TunnelBroken):
                    await receiving
                with pytest.raises(iris.TunnelBroken):
                    await tunnel_end.send(b"x")
                await until(lambda: "broken" in started)
                release.set()
                await cluster.start_relay()
                await caller.wait_for_members("slow", 1, timeout=10)


async def test_an_idempotent_request_survives_the_loss_of_its_own_relay() -> None:
    service = iris.Service("db")
    runs: list[bytes] = []
    release = asyncio.Event()

    @service.on_request
    async def run(payload: bytes) -> bytes:
        runs.append(payload)
        if len(runs) == 1:
            await release.wait()
        return payload

    async with LocalCluster() as cluster:
        async with named(cluster, "caller") as caller, named(cluster, "member") as member:
            async with member.serve(service):
                task = asyncio.create_task(caller.request("db", b"x", timeout=10, idempotent=True))
                await until(lambda: runs)
                await cluster.stop_relay()
                await cluster.start_relay()
                await caller.wait_for_members("db", 1, timeout=10)
                try:
                    assert await task == b"x"
                except iris.NoMembers:
                    pytest.fail("the caller was back before the member, and nobody waited for it")
                finally:
                    release.set()
                assert runs == [b"x", b"x"]


async def test_a_reconnect_draws_new_sender_ids_and_repeats_nothing() -> None:
    got = Collector()
    async with LocalCluster() as cluster:
        async with named(cluster, "pub") as pub, named(cluster, "sub") as sub:
            async with sub.subscribe("t", got):
                for n in range(4):
                    await pub.publish("t", b"%d" % n)
                    await until(lambda n=n: len(got.messages) == n + 1)  # type: ignore[misc]  # a bound default
                    await cut(cluster, "pub")
                    await until(
                        lambda: [p for p in cluster.relay.hub.ports if p.session.label == "pub"]
                    )
                    await pub.flush(timeout=5)
                assert got.numbers == [0, 1, 2, 3]
                assert len({message.source for message in got.messages}) == 4
                assert not got.gaps


async def test_a_graceful_leave_loses_nothing_that_was_accepted() -> None:
    service = iris.Service("db", limits=iris.Limits(concurrency=4))

    @service.on_request
    async def run(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as stays,
        stays.serve(service),
    ):
        errors: list[BaseException] = []
        done = 0
        stop = asyncio.Event()

        async def stream() -> None:
            nonlocal done
            while not stop.is_set():
                try:
                    assert await caller.request("db", b"%d" % done, timeout=5)
                    done += 1
                except iris.IrisError as err:
                    errors.append(err)

        tasks = [asyncio.create_task(stream()) for _ in range(30)]
        for _ in range(10):
            async with cluster.client() as leaves, leaves.serve(service):
                before = done
                await until(lambda before=before: done > before + 100)  # type: ignore[misc]  # a bound default
        stop.set()
        await asyncio.gather(*tasks)
        assert errors == []
        assert done >= 1000


async def test_closing_a_client_finishes_what_its_member_accepted() -> None:
    service, release = iris.Service("db"), asyncio.Event()
    started: list[bytes] = []

    @service.on_request
    async def run(payload: bytes) -> bytes:
        started.append(payload)
        await release.wait()
        return payload

    async with LocalCluster() as cluster, cluster.client() as caller:
        member = cluster.client()
        await member.open()
        serving = member.serve(service)
        await serving.__aenter__()
        task = asyncio.create_task(caller.request("db", b"x", timeout=5))
        await until(lambda: started)
        closing = asyncio.create_task(member.close())
        await until(lambda: not cluster.relay.router.interest.names)
        with pytest.raises(iris.NoMembers):
            await caller.request("db", b"later", timeout=5)
        release.set()
        assert await task == b"x"
        await closing
        assert started == [b"x"]
        await serving.__aexit__(None, None, None)


async def test_close_flushes_what_was_published_before_it() -> None:
    got = Collector()
    async with LocalCluster() as cluster, cluster.client() as sub, sub.subscribe("t", got):
        async with cluster.client() as pub:
            for n in range(1000):
                await pub.publish("t", b"%d" % n)
        await until(lambda: len(got.messages) == 1000)


async def test_a_close_that_is_cancelled_closes_at_once() -> None:
    service = iris.Service("db")
    started = asyncio.Event()

    @service.on_request
    async def hang(payload: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    async with LocalCluster() as cluster, cluster.client() as caller:
        member = cluster.client()
        await member.open()
        serving = member.serve(service)
        await serving.__aenter__()
        task = asyncio.create_task(caller.request("db", b"x", timeout=5))
        await started.wait()
        closing = asyncio.create_task(member.close())
        await until(lambda: not cluster.relay.router.interest.names)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        with pytest.raises((iris.ConnectionLost, iris.RemoteError)):
            await task
        await serving.__aexit__(None, None, None)


async def test_a_client_without_a_relay_cannot_be_opened() -> None:
    async with LocalCluster() as cluster:
        config = iris.ClientConfig(relay=Path("/nonexistent/relay.sock"), connect_timeout_s=1)
        with pytest.raises(iris.RelayUnavailable, match="iris relay --dev"):
            async with iris.connect(keyring=cluster.keyring, config=config):
                raise AssertionError("connected to nothing")


async def test_an_idempotent_request_is_sent_on_three_sessions_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        sent = 0

        def lose(*args: Any, waiter: asyncio.Future[Any], **kwargs: Any) -> None:
            nonlocal sent
            sent += 1
            waiter.set_exception(iris.ConnectionLost("c", "lost by the test"))

        monkeypatch.setattr(Requests, "send", lose)
        with pytest.raises(iris.ConnectionLost):
            await caller.request("c", b"x", timeout=5, idempotent=True)
        assert sent == 3
