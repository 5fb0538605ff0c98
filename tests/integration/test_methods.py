"""Services with methods: who runs a call, who refuses it, and what callers get."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from integration.kit import Collector, cut, named
from msgspec import UNSET
from support.waiting import until

import iris
from iris import blocking
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)


def orders(noted: Collector | None = None) -> iris.Service:
    service = iris.Service("orders")

    @service.on_request("place")
    async def place(count: int) -> str:
        return f"placed {count}"

    @service.on_request("cancel")
    def cancel(request: iris.Request) -> str:
        if request.decode(int) < 0:
            raise ValueError("no such order")
        return f"{request.method} {request.decode(int)}"

    @service.on_push("note")
    def note(message: iris.Message) -> None:
        if noted is not None:
            noted(message)

    @service.on_survey("count")
    def count(payload: bytes) -> int:
        return 3

    return service


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster() as made:
        yield made


async def test_a_call_runs_the_handler_of_its_method(cluster: LocalCluster) -> None:
    noted = Collector()
    async with cluster.client() as member, cluster.client() as caller, member.serve(orders(noted)):
        assert await caller.request("orders", 2, timeout=5, method="place") == b"placed 2"
        assert await caller.request("orders", 7, timeout=5, method="cancel") == b"cancel 7"
        many = caller.request_many("orders", [1, 2], timeout=5, method="place")
        assert sorted([one.result() async for one in many]) == [b"placed 1", b"placed 2"]
        asked = caller.survey("orders", b"", timeout=5, method="count", type=int)
        assert [answer async for answer in asked] == [3]
        await caller.push("orders", b"hi", method="note")
        await until(lambda: noted.payloads == [b"hi"])
        assert noted.messages[0].method == "note"


async def test_the_list_of_members_says_how_many_methods_each_has(cluster: LocalCluster) -> None:
    plain = iris.Service("orders")
    plain.on_request(lambda payload: payload)
    async with (
        cluster.client() as member, cluster.client() as caller, member.serve(orders()) as served, member.serve(plain),
    ):  # fmt: skip
        assert [each.methods for each in await caller.members("orders")] == [4, 0]
        await served.leave()
        assert [each.methods for each in await caller.members("orders")] == [0]


def test_a_service_says_how_many_methods_it_has() -> None:
    assert orders().method_count == 4
    assert iris.Service("none").method_count is UNSET


async def test_a_method_that_a_member_does_not_have_is_answered_without_running(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    plain = iris.Service("plain")
    ran = Collector()
    plain.on_request(lambda message: ran.messages.append(message))
    async with (
        cluster.client() as member,
        cluster.client() as caller,
        member.serve(orders()),
        member.serve(plain),
    ):
        for name, method, text in (
            ("orders", "refund", "has no method 'refund' for requests; its methods are cancel, place"),
            ("orders", "note", "has no method 'note' for requests; its methods are cancel, place"),
            ("orders", None, "requests to orders must name a method: cancel, place"),
            ("plain", "refund", "has no method 'refund' for requests; it has no methods"),
        ):  # fmt: skip
            with pytest.raises(iris.RemoteError) as refused:
                await caller.request(name, 1, timeout=5, method=method)
            assert (refused.value.code, refused.value.may_have_run) == ("no_method", False)
            assert text in str(refused.value)
        answers = caller.survey("orders", b"", timeout=5)
        assert [answer async for answer in answers] == []
        assert [error.code for error in answers.errors.values()] == ["no_method"]
        assert member.counters == {}
    assert ran.messages == []
    assert caplog.records == []


async def test_a_push_to_a_method_that_is_not_there_is_reported_as_not_run(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as member, cluster.client() as caller, member.serve(orders()):
        for method in ("refund", "place", None):
            await caller.push("orders", b"", method=method)
        await until(lambda: len(caller.losses) == 3)
        for lost in caller.losses:
            assert isinstance(lost.error, iris.RequestError)
            assert not lost.error.may_have_run


async def test_a_handler_without_a_name_gets_what_names_no_method(cluster: LocalCluster) -> None:
    service = orders()

    @service.on_request
    async def other(payload: bytes) -> bytes:
        return b"no method"

    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        assert await caller.request("orders", b"", timeout=5) == b"no method"
        assert await caller.request("orders", 1, timeout=5, method="place") == b"placed 1"


async def test_a_failed_method_is_logged_with_its_own_function(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster.client() as member, cluster.client() as caller, member.serve(orders()):
        with pytest.raises(iris.RemoteError, match="ValueError: no such order"):
            await caller.request("orders", -1, timeout=5, method="cancel")
        with pytest.raises(iris.RemoteError, match="does not decode as int") as refused:
            await caller.request("orders", {"n": 1}, timeout=5, method="place")
        assert not refused.value.may_have_run
        assert member.counters == {"failed handlers": 1}
    assert ["orders.<locals>.cancel" in r.getMessage() for r in caplog.records] == [True]


async def test_the_methods_of_a_kind_share_the_concurrency_of_the_member(
    cluster: LocalCluster,
) -> None:
    service = iris.Service("narrow", limits=iris.Limits(concurrency=1))
    gate, running = asyncio.Event(), 0
    most = 0

    async def run(payload: bytes) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    service.on_request("a")(run)
    service.on_request("b")(run)
    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        calls = [
            asyncio.ensure_future(caller.request("narrow", b"", timeout=5, method=method))
            for method in "abab"
        ]
        await until(lambda: member.received_messages == 4)
        gate.set()
        await asyncio.gather(*calls)
    assert most == 1


async def test_methods_may_run_in_threads_beside_others_that_do_not(cluster: LocalCluster) -> None:
    service = iris.Service("mixed")

    @service.on_request("thread", threads=2)
    def blocking_one(payload: bytes) -> bool:
        return threading.current_thread() is threading.main_thread()

    @service.on_request("loop")
    def plain(payload: bytes) -> bool:
        return threading.current_thread() is threading.main_thread()

    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        assert await caller.request("mixed", b"", timeout=5, method="thread") is False
        assert await caller.request("mixed", b"", timeout=5, method="loop") is True


async def test_middleware_of_a_service_sees_the_method_and_may_replace_the_request(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    async def watch(request: Any, call_next: iris.CallNext) -> Any:
        seen.append(request.method)
        return await call_next(iris.Request(request.payload, request.name))

    service = iris.Service("watched", middleware=[watch])

    @service.on_request("fail")
    def fail(payload: bytes) -> bytes:
        raise ValueError(payload.decode())

    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        with pytest.raises(iris.RemoteError, match="ValueError: why") as failed:
            await caller.request("watched", b"why", timeout=5, method="fail")
        assert failed.value.may_have_run
    assert seen == ["fail"]
    assert "raised ValueError: why" in caplog.text


async def test_a_deferred_reply_of_a_method_comes_later(cluster: LocalCluster) -> None:
    service = iris.Service("later")
    held: list[iris.Deferred] = []

    @service.on_request("wait")
    def wait(request: iris.Request) -> None:
        held.append(request.defer())

    async with cluster.client() as member, cluster.client() as caller, member.serve(service):
        asked = asyncio.ensure_future(caller.request("later", b"", timeout=5, method="wait"))
        await until(lambda: bool(held))
        held[0].reply("now")
        assert await asked == b"now"


async def test_methods_survive_a_reconnect_and_an_idempotent_call_is_sent_again(
    cluster: LocalCluster,
) -> None:
    service = iris.Service("orders")
    running: asyncio.Queue[str] = asyncio.Queue()

    @service.on_request("place")
    async def place(payload: bytes, client: iris.Client) -> bytes:
        await running.put(client.config.label)
        if client.config.label == lost:
            await asyncio.Event().wait()
        return b"placed"

    lost = ""
    async with (
        named(cluster, "one", drain_timeout_s=0.1) as one,
        named(cluster, "two", drain_timeout_s=0.1) as two,
        cluster.client() as caller,
        one.serve(service),
        two.serve(service),
    ):
        assert await caller.request("orders", b"", timeout=30, method="place") == b"placed"
        lost = {"one": "two", "two": "one"}[await running.get()]
        asked = [
            asyncio.ensure_future(
                caller.request("orders", b"", timeout=30, method="place", idempotent=True)
            )
            for _ in range(2)
        ]
        while await running.get() != lost:
            pass
        await cut(cluster, lost)
        assert await asyncio.gather(*asked) == [b"placed", b"placed"]
        lost = ""
        await caller.wait_for_members("orders", 2, timeout=5)
        assert await caller.request("orders", b"", timeout=5, method="place") == b"placed"


async def test_names_of_methods_are_checked_on_both_sides(cluster: LocalCluster) -> None:
    service = iris.Service("orders")
    for wrong in ("", "a b", "9", "ä", "x" * 65):
        with pytest.raises(iris.InvalidName, match="is not the name of a method"):
            service.on_request(wrong)
    with pytest.raises(iris.InvalidName, match=r"beginning with 'iris\.' are answered by the lib"):
        service.on_push("iris.describe")
    with pytest.raises(iris.ConfigError, match="broadcasts name no method"):
        service.on_broadcast("cleared")  # type: ignore[call-overload]  # what it refuses
    service.on_request("place")(lambda payload: None)
    with pytest.raises(iris.ConfigError, match="already has a handler for the method 'place'"):
        service.on_request("place")(lambda payload: None)
    service.on_request(lambda payload: None)
    with pytest.raises(
        iris.ConfigError,
        match=r"already has a handler for this kind.*give each a method: @service\.on_request",
    ):
        service.on_request(lambda payload: None)
    assert (service.methods, service.handlers.keys()) == (["place"], service.kinds.keys())
    async with cluster.client() as caller:
        with pytest.raises(iris.InvalidName):
            await caller.request("orders", b"", timeout=5, method="a b")
        with pytest.raises(iris.InvalidName):
            await caller.push("orders", b"", method="")
        with pytest.raises(iris.InvalidName):
            caller.request_many("orders", [b""], timeout=5, method="a b")
        with pytest.raises(iris.InvalidName):
            caller.survey("orders", b"", timeout=5, method="a b")


def test_the_blocking_client_calls_methods(capsys: pytest.CaptureFixture[str]) -> None:
    keyring = iris.Keyring.single(iris.ClusterKey(b"k" * 32))
    noted = Collector()
    with blocking.connect(embedded=True, keyring=keyring) as client, client.serve(orders(noted)):
        assert client.request("orders", 1, timeout=5, method="place") == b"placed 1"
        (one,) = client.request_many("orders", [1], timeout=5, method="place")
        assert one.result() == b"placed 1"
        assert client.survey("orders", b"", timeout=5, method="count", type=int) == [3]
        client.push("orders", b"", method="note")
        client.flush()
