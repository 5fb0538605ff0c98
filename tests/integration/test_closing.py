"""Closing a client is clean in any order, twice, from anywhere, and while it is used."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.relays import KEY, Daemon
from support.waiting import PATIENCE_S, until, wait_until

import iris
from iris import blocking
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(120)
TUNNELS = "tunnels"


def service_of(name: str, ended: list[str]) -> iris.Service:
    """Return a service whose lifespan says when it has ended."""

    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        async with asyncio.TaskGroup():  # which must be left by the task that has entered it
            yield
        ended.append(name)

    service = iris.Service(name, lifespan=lifespan)

    @service.on_request
    async def echo(payload: bytes) -> bytes:
        return payload

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        async for _ in tunnel:
            pass

    @service.on_publish("served.>")
    async def note(payload: bytes) -> None: ...

    return service


async def ignore(message: iris.Message) -> None: ...


BLOCKS: dict[str, Callable[[Any], Any]] = {
    "serve": lambda client: client.serve(service_of("served", [])),
    "subscribe": lambda client: client.subscribe("topic.>"),
    "tunnel": lambda client: client.tunnel(TUNNELS, timeout=PATIENCE_S),
    "watch_losses": lambda client: client.watch_losses(),
    "read": lambda client: client.streams.read("log"),
    "consumer": lambda client: client.streams.consumer("log", "worker"),
    "stage": lambda client: client.streams.stage("log", writer="writer", batch=1),
}
ASYNCHRONOUS = {
    **BLOCKS,
    "subscribe with a handler": lambda client: client.subscribe("topic.>", ignore),
    "mirror": lambda client: client.streams.mirror("log", "copy"),
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with (
        LocalCluster(data=tmp_path / "data") as it,
        it.serve(service_of(TUNNELS, [])),
        it.client() as client,
    ):
        await client.streams.create("log")
        yield it


@pytest.mark.parametrize("block", ASYNCHRONOUS)
@pytest.mark.parametrize("times", [1, 2])
async def test_a_client_may_be_closed_inside_each_block(
    cluster: LocalCluster, block: str, times: int
) -> None:
    before = asyncio.all_tasks()
    async with cluster.client() as client, ASYNCHRONOUS[block](client):
        await asyncio.gather(*(client.close() for _ in range(times)))
        await client.close()
    await cluster.settle()
    assert {task.get_name() for task in asyncio.all_tasks() - before} <= set()


async def test_a_second_close_returns_when_the_first_one_has_ended(cluster: LocalCluster) -> None:
    release = asyncio.Event()
    service = iris.Service("slow")
    running = asyncio.Event()

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        running.set()
        await release.wait()
        return payload

    async with cluster.client() as caller, cluster.client() as client, client.serve(service):
        asked = asyncio.create_task(caller.request("slow", b"done", timeout=PATIENCE_S))
        await running.wait()
        closing = [asyncio.create_task(client.close()) for _ in range(2)]
        await cluster.settle()
        assert not any(task.done() for task in closing)
        release.set()
        assert await asked == b"done"
        await asyncio.gather(*closing)


@pytest.mark.parametrize("kind", ["request", "broadcast", "tunnel", "publish", "topic", "lanes"])
async def test_a_handler_may_close_its_client(cluster: LocalCluster, kind: str) -> None:
    service = iris.Service("ends")
    closed: list[str] = []

    async def end(payload: bytes) -> bytes:
        await client.close()
        closed.append("returned")
        return b"closed"

    async def end_tunnel(tunnel: iris.Tunnel) -> None:
        await end(b"")

    service.on_request(end)
    service.on_broadcast(end)
    service.on_tunnel(end_tunnel)
    service.on_publish("ends.>")(end)

    async with cluster.client() as caller, cluster.client() as client:
        lanes = {"concurrency": 2 if kind == "lanes" else 1}
        async with client.serve(service), client.subscribe("topic.>", end, **lanes):  # type: ignore[arg-type]
            if kind == "request":
                assert await caller.request("ends", b"", timeout=PATIENCE_S) == b"closed"
            elif kind == "broadcast":
                await caller.broadcast("ends", b"")
            elif kind == "tunnel":
                async with caller.tunnel("ends", timeout=PATIENCE_S) as tunnel:
                    with pytest.raises(iris.EndOfTunnel):
                        await tunnel.recv()
            else:
                await caller.publish("ends.now" if kind == "publish" else "topic.now", b"")
            await until(lambda: closed)
            await client.close()  # waits for the one that the handler has begun
            with pytest.raises(iris.Closed):
                await client.request("ends", b"", timeout=1.0)
    assert closed == ["returned"]


# -- for threads -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("relay")
    with Daemon(directory, "--data", str(directory / "data")) as daemon:
        with connected(daemon) as client:
            client.streams.create("log")
        yield daemon
        assert daemon.stop() == 0


def connected(daemon: Daemon) -> blocking.Client:
    return blocking.connect(daemon.socket, keyring=iris.Keyring.single(KEY))


@pytest.fixture
def tunnels(relay: Daemon) -> Iterator[None]:
    with connected(relay) as client, client.serve(service_of(TUNNELS, [])):
        yield


def in_threads(*work: Callable[[], object]) -> list[BaseException | object]:
    """Run functions at once, each in a thread, and return their results or errors."""
    results: list[BaseException | object] = [None] * len(work)

    def run(number: int) -> None:
        try:
            results[number] = work[number]()
        except BaseException as err:
            results[number] = err

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("times", [1, 3])
def test_a_blocking_client_may_be_closed_inside_each_block(
    relay: Daemon, tunnels: None, block: str, times: int
) -> None:
    client = connected(relay)
    with client, BLOCKS[block](client):
        assert in_threads(*[client.close] * times) == [None] * times
        client.close()
    assert not client._thread.is_alive()


def test_the_lifespan_of_a_service_ends_when_its_blocking_client_is_closed(relay: Daemon) -> None:
    ended: list[str] = []
    with connected(relay) as client, client.serve(service_of("served", ended)):
        client.close()
        assert ended == ["served"]
    assert ended == ["served"]


def test_what_a_lifespan_raises_at_its_end_is_raised_by_its_block(relay: Daemon) -> None:
    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        yield
        raise ValueError("the pool did not close")

    def serve(*, close: bool) -> None:
        with connected(relay) as client, client.serve(iris.Service("served", lifespan=lifespan)):
            if close:
                client.close()

    for close in (True, False):
        with pytest.raises(ValueError, match="did not close"):
            serve(close=close)


def test_threads_that_iterate_end_when_the_client_is_closed(relay: Daemon, tunnels: None) -> None:
    client = connected(relay)
    started = threading.Barrier(6)

    def subscribed() -> list[object]:
        with client.subscribe("topic.>") as messages:
            started.wait(PATIENCE_S)
            return list(messages)

    def watched() -> int:
        members = client.watch_members(TUNNELS)
        next(members)
        started.wait(PATIENCE_S)
        return len(list(members))

    def read() -> object:
        with client.streams.read("log") as reader:
            started.wait(PATIENCE_S)
            with pytest.raises(iris.Closed):
                next(reader)

    def consumed() -> object:
        with client.streams.consumer("log", "worker") as work:
            started.wait(PATIENCE_S)
            with pytest.raises(iris.Closed):
                next(work)

    def received() -> object:
        with client.tunnel(TUNNELS, timeout=PATIENCE_S) as tunnel:
            started.wait(PATIENCE_S)
            with pytest.raises((iris.TunnelBroken, iris.EndOfTunnel, iris.Closed)):
                tunnel.recv()

    def close() -> None:
        started.wait(PATIENCE_S)
        client.close()

    assert in_threads(subscribed, watched, read, consumed, received, close) == [[], 0, None, None, None, None]  # fmt: skip


def test_calls_in_flight_raise_when_the_client_is_closed(relay: Daemon) -> None:
    service = iris.Service("never")
    running = threading.Event()

    @service.on_request
    async def never(payload: bytes) -> None:
        running.set()
        await asyncio.Event().wait()

    async def forever(_: iris.Client) -> None:
        running.set()
        await asyncio.Event().wait()

    config = iris.ClientConfig(relay=relay.socket, drain_timeout_s=0.2)
    keyring = iris.Keyring.single(KEY)
    with blocking.connect(keyring=keyring, config=config) as member, member.serve(service):
        calls: list[Callable[[blocking.Client], object]] = [
            lambda client: client.request("never", b"", timeout=PATIENCE_S),
            lambda client: client.call(forever),
            lambda client: client.start(forever).result(),
        ]
        for call in calls:
            client = connected(relay)
            running.clear()

            def close(client: blocking.Client = client) -> None:
                assert running.wait(PATIENCE_S)
                client.close()

            error, closed = in_threads(functools.partial(call, client), close)
            assert closed is None
            assert isinstance(error, (iris.Closed, iris.ConnectionLost, concurrent.futures.CancelledError)), error  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "coroutine", "thread"])
def test_a_handler_may_close_its_blocking_client(relay: Daemon, form: str) -> None:
    service = iris.Service("ends")
    closed = threading.Event()

    def end(payload: bytes) -> bytes:
        client.close()
        closed.set()
        return b"closed"

    async def end_later(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        return end(payload)

    if form == "thread":
        service.on_request(threads=1)(end)
    else:
        service.on_request(end if form == "plain" else end_later)
    client = connected(relay)
    began_s = time.monotonic()
    with connected(relay) as caller, client, client.serve(service):
        assert caller.request("ends", b"", timeout=PATIENCE_S) == b"closed"
        assert closed.is_set()
        client.close()
        with pytest.raises(iris.Closed):
            client.request("ends", b"", timeout=1.0)
    assert time.monotonic() - began_s < iris.ClientConfig().drain_timeout_s
    wait_until(lambda: not client._thread.is_alive())


def test_a_handler_may_use_and_close_a_blocking_client_of_its_own(relay: Daemon) -> None:
    service = iris.Service("asks")

    @service.on_request(threads=1)
    def ask(payload: bytes) -> bool:
        with connected(relay) as own:
            own.publish("topic.new", b"")
        return own._thread.is_alive()

    with connected(relay) as client, client.serve(service):
        assert client.request("asks", b"", timeout=PATIENCE_S) is False


def test_what_was_received_before_the_client_was_closed_is_still_iterated_over(
    relay: Daemon,
) -> None:
    with connected(relay) as client, client.subscribe("topic.>") as messages:
        for number in range(3):
            client.publish("topic.new", b"%d" % number)
        assert next(messages).payload == b"0"
        client.close()
        assert [message.payload for message in messages] == [b"1", b"2"]
