"""What a review found: what is accepted is answered or told, bounds hold, and no handler costs the session."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from integration.kit import Collector, echo_service, named, until

import iris
from iris.core.asks import Asks
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.dialling import dial
from iris.testing import LocalCluster
from iris.wire.frames import Kind


async def test_empty_tunnel_messages_beyond_the_credit_all_arrive() -> None:
    service = iris.Service("db")
    start, counted = asyncio.Event(), asyncio.get_running_loop().create_future()

    @service.on_tunnel
    async def count(tunnel: iris.Tunnel) -> None:
        await start.wait()
        counted.set_result([message async for message in tunnel])

    async with (
        LocalCluster() as cluster,
        cluster.client() as opener,
        cluster.client() as member,
        member.serve(service),
        opener.tunnel("db", timeout=5) as tunnel,
    ):

        async def send() -> None:
            for _ in range(3000):
                await tunnel.send(b"")
            await tunnel.finish()

        sending = asyncio.create_task(send())
        await until(lambda: tunnel._waiters)
        start.set()
        await sending
        assert await counted == [b""] * 3000


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


async def test_a_move_to_new_keys_waits_for_the_handlers_that_run() -> None:
    service = iris.Service("slow")
    running, go = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        running.set()
        await go.wait()
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        before = binding.member
        call = asyncio.create_task(caller.request("slow", b"x", timeout=30))
        await running.wait()
        moving = asyncio.create_task(member.reload_keys(cluster.keyring))
        await until(lambda: binding.member != before)
        await cluster.settle()
        assert not moving.done()
        go.set()
        assert await call == b"x"
        await moving


async def test_no_free_descriptor_is_a_relay_that_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", full)
        with pytest.raises(iris.RelayUnavailable, match="too many open files"):
            await dial(Path("/nowhere"), "iris")


async def test_a_service_whose_topic_has_no_key_leaves_nothing_behind() -> None:
    service = echo_service()
    service.on_publish("a.>")(lambda payload: None)
    service.on_publish("b.>")(lambda payload: None)
    key = ClusterKey(bytes(32))
    keyring = Keyring({"echo": (key,), "topic:a": (key,)})
    async with LocalCluster() as cluster, cluster.client(keyring=keyring) as member:
        with pytest.raises(iris.KeyringError):
            async with member.serve(service):
                pass
        assert not member._registry.services
        assert not member._registry._subscriptions


async def test_a_coroutine_subscription_finishes_what_it_accepted_when_it_is_closed() -> None:
    got: list[bytes] = []
    first, go = asyncio.Event(), asyncio.Event()

    async def keep(message: iris.Message) -> None:
        first.set()
        await go.wait()
        got.append(message.payload)

    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as reader:
        subscription = await reader.subscribe("t", keep).ready()
        for n in range(5):
            await sender.publish("t", b"%d" % n)
        await sender.flush()
        await first.wait()
        await cluster.settle()
        closing = asyncio.create_task(subscription.close())
        await cluster.settle()
        go.set()
        await closing
        assert got == [b"0", b"1", b"2", b"3", b"4"]
        assert not reader.working


async def test_what_a_coroutine_subscription_cannot_finish_in_time_is_told_as_lost() -> None:
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
        assert subscription.lost == 4
        assert sum(lost.count or 0 for lost in reader.losses) == 4
        assert not reader.working, "and its task has ended"


async def test_casts_kept_offline_are_told_by_their_kind_when_the_client_is_closed() -> None:
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


async def test_an_idempotent_request_is_sent_on_three_sessions_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        sent = 0

        def lose(*args: Any, waiter: asyncio.Future[Any], **kwargs: Any) -> None:
            nonlocal sent
            sent += 1
            waiter.set_exception(iris.ConnectionLost("c", "lost by the test"))

        monkeypatch.setattr(Asks, "send", lose)
        with pytest.raises(iris.ConnectionLost):
            await caller.request("c", b"x", timeout=5, idempotent=True)
        assert sent == 3


async def test_a_plain_handler_that_raises_cancelled_error_does_not_cost_the_session() -> None:
    def cancel(message: iris.Message) -> None:
        raise asyncio.CancelledError

    collector = Collector()
    async with LocalCluster() as cluster, cluster.client() as sender, cluster.client() as reader:
        session = reader._attachment.session  # type: ignore[union-attr]
        await reader.subscribe("t", cancel).ready()
        await reader.subscribe("t", collector).ready()
        await sender.publish("t", b"x")
        await until(lambda: collector.payloads == [b"x"])
        assert reader.counters["failed handlers"] == 1
        assert reader._attachment.session is session  # type: ignore[union-attr]


async def test_a_survey_answer_names_the_member_that_was_asked_though_it_moved() -> None:
    service = iris.Service("c")
    running, go = asyncio.Event(), asyncio.Event()

    @service.on_survey
    async def answer(payload: bytes) -> bytes:
        running.set()
        await go.wait()
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as asker,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        asked = binding.member_id
        survey = asker.survey("c", b"x", timeout=30)

        async def ask() -> list[Any]:
            return [each.payload async for each in survey]

        asking = asyncio.create_task(ask())
        await running.wait()
        moving = asyncio.create_task(member.reload_keys(cluster.keyring))
        await until(lambda: binding.member_id != asked)
        go.set()
        assert await asking == [b"x"]
        await moving
        assert survey.answered == [asked]
        assert survey.missing == []


async def test_time_spent_waiting_for_a_relay_counts_against_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        ready, left = client._ready, []

        async def late(name: str, timeout: float) -> Any:
            await asyncio.sleep(0.1)
            return await ready(name, timeout)

        monkeypatch.setattr(client, "_ready", late)
        monkeypatch.setattr(Asks, "push", lambda *args: left.append(args[-1]))
        await client.push("c", b"x", timeout=5)
        assert left[0] <= 4901


async def test_an_offline_cast_that_cannot_be_sent_is_told_and_the_rest_goes_on() -> None:
    collector = Collector()
    async with (
        LocalCluster() as cluster,
        cluster.client() as reader,
        named(cluster, "sender") as sender,
    ):
        await cluster.stop_relay()
        await until(lambda: sender._attachment.pump is None)  # type: ignore[union-attr]
        assert sender._attachment is not None
        sender._attachment.keep((Kind.BROADCAST, "no name", b"x", None, False))
        await sender.publish("t", b"y")
        await cluster.start_relay()
        await reader.subscribe("t", collector).ready()
        await until(lambda: sender._attachment.pump is not None)  # type: ignore[union-attr]
        assert [lost.kind for lost in sender.losses] == ["broadcast"]
        await sender.publish("t", b"z")
        await until(lambda: b"z" in collector.payloads)


async def test_a_deferred_reply_collected_in_another_thread_fails_on_the_loop() -> None:
    service = iris.Service("later")
    held: list[iris.Deferred] = []
    seen: list[int] = []

    @service.on_request
    def later(request: iris.Request) -> None:
        held.append(request.defer())

    async with (
        LocalCluster() as cluster,
        cluster.client() as caller,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        end_with = binding.end_with

        def noted(*args: Any, **kwargs: Any) -> None:
            seen.append(threading.get_ident())
            end_with(*args, **kwargs)

        binding.end_with = noted  # type: ignore[method-assign]
        call = asyncio.create_task(caller.request("later", b"", timeout=5))
        await until(lambda: held)

        def collect() -> None:
            held.clear()
            gc.collect()

        await asyncio.to_thread(collect)
        with pytest.raises(iris.RemoteError, match="gave its deferred reply up"):
            await call
        assert seen == [threading.get_ident()]
