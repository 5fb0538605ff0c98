"""Handlers in threads: plain functions that block, without holding up the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from integration.kit import named
from support.waiting import PATIENCE_S, until

import iris
from iris.deadlines import handled_us
from iris.testing import LocalCluster


@pytest.fixture(autouse=True)
def no_thread_stays() -> Any:
    """After each test no thread of a handler is left."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("iris-"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread.name


class Gate:
    """A blocking function that counts who is in it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside = 0
        self.most = 0
        self.passed: list[Any] = []
        self._lock = threading.Lock()

    def __call__(self, payload: Any) -> Any:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.open.wait(PATIENCE_S)
        with self._lock:
            self.inside -= 1
            self.passed.append(payload)
        return payload


async def test_a_blocking_handler_runs_in_as_many_threads_as_it_has() -> None:
    service, gate = iris.Service("slow"), Gate()
    names: set[str] = set()

    @service.on_request(threads=2)
    def wait(number: int, request: iris.Request) -> int:
        names.add(threading.current_thread().name)
        result: int = gate(number)
        return result

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        asked = [
            asyncio.create_task(client.request("slow", n, timeout=PATIENCE_S)) for n in range(5)
        ]
        await until(lambda: gate.inside == 2)
        await client.flush()  # the event loop is free
        gate.open.set()
        assert await asyncio.gather(*asked) == [0, 1, 2, 3, 4]
    assert gate.most == 2
    assert all(name.startswith("iris-") and "wait" in name for name in names)


async def test_what_it_raises_reaches_the_caller() -> None:
    service = iris.Service("slow")

    @service.on_request(threads=1)
    def fail(payload: bytes) -> None:
        raise OSError("disk on fire")

    @service.on_survey(threads=1)
    def answer(number: int) -> int:
        return number + 1

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="OSError: disk on fire"):
            await client.request("slow", b"x", timeout=PATIENCE_S)
        answers = client.survey("slow", 1, timeout=PATIENCE_S)
        assert [message.value async for message in answers] == [2]


async def test_a_request_whose_deadline_passes_before_a_thread_is_free_does_not_run() -> None:
    service, gate = iris.Service("slow"), Gate()
    service.on_request(threads=1)(gate)
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        first = asyncio.create_task(client.request("slow", 1, timeout=PATIENCE_S))
        await until(lambda: gate.inside == 1)
        with pytest.raises(iris.RequestTimeout):
            await client.request("slow", 2, timeout=0.01)
        gate.open.set()
        assert await first == 1
        await until(lambda: client.counters.get("expired") == 1)
    assert gate.passed == [1]


async def test_what_a_thread_calls_has_the_deadline_of_its_request() -> None:
    service = iris.Service("slow")

    @service.on_request(threads=1)
    def wait(request: iris.Request) -> bool:
        return request.deadline == handled_us() / 1e6

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        assert await client.request("slow", b"", timeout=PATIENCE_S) is True


async def test_a_leaving_member_waits_for_its_threads() -> None:
    service, gate = iris.Service("slow"), Gate()
    service.on_request(threads=2)(gate)
    async with LocalCluster() as cluster, cluster.client() as client, cluster.client() as server:
        async with server.serve(service):
            asked = asyncio.create_task(client.request("slow", 7, timeout=PATIENCE_S))
            await until(lambda: gate.inside == 1)
            opened = asyncio.create_task(_open_when_left(client, gate))
        assert gate.passed == [7]
        assert await asked == 7
        await opened


async def _open_when_left(client: iris.Client, gate: Gate) -> None:
    async for members in client.watch_members("slow"):
        if not members:
            gate.open.set()
            return


async def test_a_thread_that_outlasts_the_drain_goes_on_after_its_caller_was_answered() -> None:
    service, gate = iris.Service("slow"), Gate()
    service.on_request(threads=1)(gate)
    async with (
        LocalCluster() as cluster,
        cluster.client() as client,
        named(cluster, "server", drain_timeout_s=0.05) as server,
    ):
        async with server.serve(service):
            asked = asyncio.create_task(client.request("slow", 7, timeout=PATIENCE_S))
            queued = asyncio.create_task(client.request("slow", 8, timeout=PATIENCE_S))
            await until(lambda: gate.inside == 1)
        with pytest.raises(iris.RemoteError, match="stopped before it answered") as caught:
            await asked
        assert caught.value.may_have_run
        with pytest.raises(iris.RequestError):
            await queued
        assert gate.passed == []
        gate.open.set()
        await until(lambda: gate.passed == [7])


async def test_pushes_broadcasts_and_publications_run_in_threads_too() -> None:
    service = iris.Service("slow")
    got: dict[str, list[Any]] = {"push": [], "broadcast": [], "publish": []}
    here = threading.get_ident()
    gate = threading.Barrier(2, timeout=PATIENCE_S)

    @service.on_push(threads=1)
    def push(number: int) -> None:
        got["push"].append(threading.get_ident() != here)

    @service.on_broadcast(threads=1)
    def broadcast(number: int) -> None:
        got["broadcast"].append(number)

    @service.on_publish("numbers.*", threads=2)
    def publish(number: int) -> None:
        gate.wait()  # passed by two at once
        got["publish"].append(number)

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await client.push("slow", 1)
        for number in range(10):
            await client.broadcast("slow", number)
            await client.publish(f"numbers.{number % 2}", number)
        await until(lambda: [*map(len, got.values())] == [1, 10, 10])
    assert got["push"] == [True]
    assert got["broadcast"] == [*range(10)]
    assert [n for n in got["publish"] if n % 2] == [1, 3, 5, 7, 9]


async def test_a_payload_that_does_not_fit_has_not_run() -> None:
    service = iris.Service("slow")

    @service.on_request(threads=1)
    def wait(number: int, request: iris.Request) -> None: ...

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="as int") as caught:
            await client.request("slow", {}, timeout=PATIENCE_S)
        assert not caught.value.may_have_run


async def test_a_handler_in_threads_cannot_defer() -> None:
    service = iris.Service("slow")

    @service.on_request(threads=1)
    def wait(request: iris.Request) -> None:
        request.defer()

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        with pytest.raises(iris.RemoteError, match="runs in threads cannot defer"):
            await client.request("slow", "x", timeout=PATIENCE_S)


async def test_a_handler_in_threads_cannot_receive_the_client() -> None:
    service = iris.Service("slow")

    @service.on_request(threads=1)
    def wait(number: int, client: iris.Client) -> None: ...

    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.ConfigError, match="'wait' runs in threads"):
            async with client.serve(service):
                pytest.fail("it is served")


def test_threads_are_for_plain_functions() -> None:
    service = iris.Service("slow")

    async def coroutine(payload: bytes) -> None: ...
    def plain(payload: bytes) -> None: ...

    with pytest.raises(
        iris.ConfigError, match="'coroutine' is a coroutine function, so it cannot have threads=8"
    ):
        service.on_request(threads=8)(coroutine)
    with pytest.raises(
        iris.ConfigError, match="threads of handler 'plain' must be at least 1, not -1"
    ):
        service.on_request(threads=-1)(plain)
    with pytest.raises(iris.ConfigError, match="threads of a broadcast handler must be 1, not 2"):
        service.on_broadcast(threads=2)
    assert not service.handlers


def test_a_relay_learns_how_many_threads_there_are() -> None:
    service = iris.Service("slow", limits=iris.Limits(concurrency=4))
    for register, threads in ((service.on_request, 2), (service.on_push, 8)):
        register(threads=threads)(lambda payload: None)
    assert [serving.concurrency for serving in service.kinds.values()] == [2, 4]
