"""Handlers go on calling other services while their relay drains: relays, and members, in processes of their own."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.links import Site
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
import iris.blocking
from iris.logs import event_of
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)

GRACE_S = 15.0
"""Longer than any of these tests waits for a step, so that a call that waits for the next relay is seen."""
Nested = Callable[[iris.Client], Awaitable[bytes]]


class Back:
    """The second service: what the handlers of the first call."""

    def __init__(self) -> None:
        self.pushed: list[bytes] = []
        self.service = service = iris.Service("back")
        service.on_request(self._request)
        service.on_push(self._push)
        service.on_survey(self._survey)
        service.on_tunnel(self._tunnel)

    async def _request(self, payload: bytes) -> bytes:
        await asyncio.sleep(0)
        return b"back " + payload

    async def _push(self, payload: bytes, one: iris.Client) -> None:
        self.pushed.append(await one.request("last", payload, timeout=PATIENCE_S, type=bytes))

    async def _survey(self, payload: bytes) -> bytes:
        return b"back " + payload

    async def _tunnel(self, tunnel: iris.Tunnel) -> None:
        async for message in tunnel:
            await tunnel.send(b"back " + message)


async def by_request(one: iris.Client) -> bytes:
    return await one.request("back", b"1", timeout=PATIENCE_S, type=bytes)


async def by_request_in_tasks(one: iris.Client) -> bytes:
    first, second = await asyncio.gather(by_request(one), by_request(one))
    assert first == second
    return first


async def by_request_many(one: iris.Client) -> bytes:
    asking = one.request_many("back", [b"1"], timeout=PATIENCE_S, type=bytes)
    [outcome] = [each async for each in asking]
    assert outcome.error is None
    return outcome.reply


async def by_survey(one: iris.Client) -> bytes:
    [answer] = [each async for each in one.survey("back", b"1", timeout=PATIENCE_S)]
    return answer.payload


async def by_tunnel(one: iris.Client) -> bytes:
    async with one.tunnel("back", timeout=PATIENCE_S) as tunnel:
        await tunnel.send(b"1")
        return await tunnel.recv()


async def by_member(one: iris.Client) -> bytes:
    [member] = await one.wait_for_members("back", 1, timeout=PATIENCE_S)
    return await one.request("back", b"1", timeout=PATIENCE_S, member=member.member, type=bytes)


CALLS: dict[str, Nested] = {
    "request": by_request,
    "requests in tasks": by_request_in_tasks,
    "request_many": by_request_many,
    "survey": by_survey,
    "tunnel": by_tunnel,
    "a listed member": by_member,
}


class Front:
    """A service whose handlers wait until `go`, and then call."""

    def __init__(self, call: Nested) -> None:
        self.started, self.go = asyncio.Event(), asyncio.Event()
        self.service = iris.Service("front")
        self._call = call

        @self.service.on_request
        async def front(payload: bytes, one: iris.Client) -> bytes:
            self.started.set()
            await self.go.wait()
            return await self._call(one)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, settings={"IRIS_RELAY_DRAIN_TIMEOUT_S": str(GRACE_S)}) as daemon:
        yield daemon


async def stopping(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, clients: int
) -> asyncio.Task[int]:
    """Stop the relay; return when so many clients of this process have left it, with what returns its exit code."""

    def left() -> bool:
        events = [event_of(record) for record in caplog.records]
        return events.count("client.disconnected") == clients

    caplog.set_level(logging.INFO, "iris")
    stopped = asyncio.create_task(asyncio.to_thread(daemon.stop, signal.SIGTERM))
    await eventually(left)
    return stopped


async def known(relay: Relay) -> None:
    """Return when all neighbors of a relay of this process know that it stops."""
    drains = relay.router.drains
    await eventually(lambda: drains.begun and drains.acknowledged)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_a_handler_that_runs_while_its_relay_stops_reaches_another_service(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, call: Nested
) -> None:
    front, back = Front(call), Back()
    clients = [client(daemon.socket) for _ in range(3)]
    async with clients[0] as one, clients[1] as two, clients[2] as caller:
        async with one.serve(front.service), two.serve(back.service):
            outer = asyncio.create_task(caller.request("front", b"", timeout=PATIENCE_S))
            await front.started.wait()
            stopped = await stopping(daemon, caplog, 3)
            front.go.set()
            assert await outer == b"back 1"
            assert await stopped == 0  # before the next relay is there
            assert not daemon.said("relay.cut")
            await asyncio.to_thread(daemon.start)
            assert await caller.request("front", b"", timeout=PATIENCE_S) == b"back 1"


async def test_members_stay_until_pushes_made_by_handlers_have_called_in_turn(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    async def push(one: iris.Client) -> bytes:
        await one.push("back", b"1", timeout=PATIENCE_S)
        await one.flush()
        return b"pushed"

    front, back, last = Front(push), Back(), iris.Service("last")
    last.on_request(lambda payload: b"last " + payload)
    async with (
        client(daemon.socket) as one,
        client(daemon.socket) as two,
        client(daemon.socket) as three,
    ):
        async with one.serve(front.service), two.serve(back.service), three.serve(last):
            outer = asyncio.create_task(two.request("front", b"", timeout=PATIENCE_S))
            await front.started.wait()
            stopped = await stopping(daemon, caplog, 3)
            front.go.set()
            assert await outer == b"pushed"
            assert await stopped == 0
            assert back.pushed == [b"last 1"]
            assert not [*one.losses, *two.losses]


async def test_a_handler_in_a_thread_calls_by_a_client_of_its_own(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    back, started, go = Back(), asyncio.Event(), asyncio.Event()
    loop, keyring = asyncio.get_running_loop(), iris.Keyring.single(KEY)
    own = await asyncio.to_thread(iris.blocking.connect, daemon.socket, keyring=keyring)
    service = iris.Service("front")

    @service.on_request(threads=1)
    def front(payload: bytes) -> bytes:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(PATIENCE_S)
        return own.request("back", b"1", timeout=PATIENCE_S, type=bytes)

    try:
        async with client(daemon.socket) as one, client(daemon.socket) as two:
            async with one.serve(service), two.serve(back.service):
                outer = asyncio.create_task(two.request("front", b"", timeout=PATIENCE_S))
                await started.wait()
                stopped = await stopping(daemon, caplog, 3)
                go.set()
                assert await outer == b"back 1"
                assert await stopped == 0
    finally:
        await asyncio.to_thread(own.close)


async def test_what_replies_later_calls_too(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    back, service = Back(), iris.Service("front")
    started, go = asyncio.Event(), asyncio.Event()
    tasks = set()

    async with client(daemon.socket) as one, client(daemon.socket) as two:

        @service.on_request
        def front(request: iris.Request) -> None:
            tasks.add(asyncio.create_task(later(request.defer())))
            started.set()

        async def later(deferred: iris.Deferred) -> None:
            await go.wait()
            deferred.reply(await by_request(one))

        async with one.serve(service), two.serve(back.service):
            outer = asyncio.create_task(two.request("front", b"", timeout=PATIENCE_S))
            await started.wait()
            stopped = await stopping(daemon, caplog, 2)
            go.set()
            assert await outer == b"back 1"
            assert await stopped == 0


async def test_what_is_no_handler_waits_for_the_next_relay(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    front, back = Front(by_request), Back()
    async with client(daemon.socket) as one, client(daemon.socket) as two:
        async with one.serve(front.service), two.serve(back.service):
            outer = asyncio.create_task(two.request("front", b"", timeout=PATIENCE_S))
            await front.started.wait()
            stopped = await stopping(daemon, caplog, 2)
            other = asyncio.create_task(by_request(one))
            front.go.set()
            assert await outer == b"back 1"
            assert await stopped == 0
            assert not other.done()
            await asyncio.to_thread(daemon.start)
            assert await other == b"back 1"


async def test_a_handler_appends_to_a_stream_and_what_it_publishes_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def append(one: iris.Client) -> bytes:
        await one.publish("published", b"1")
        await one.streams.append("kept", b"1")
        return b"appended"

    front = Front(append)
    settings = {"IRIS_RELAY_DRAIN_TIMEOUT_S": str(GRACE_S)}
    with Daemon(tmp_path, "--data", str(tmp_path / "data"), settings=settings) as daemon:
        async with client(daemon.socket) as one, client(daemon.socket) as two:
            await one.streams.create("kept", timeout=PATIENCE_S)
            async with one.serve(front.service), two.subscribe("published") as published:
                outer = asyncio.create_task(two.request("front", b"", timeout=PATIENCE_S))
                await front.started.wait()
                stopped = await stopping(daemon, caplog, 2)
                front.go.set()
                assert await outer == b"appended"
                assert await stopped == 0
                await asyncio.to_thread(daemon.start)
                assert (await anext(aiter(published))).payload == b"1"
                async with two.streams.read("kept", "first", follow=False) as kept:
                    assert [message.payload async for message in kept] == [b"1"]


@pytest.mark.parametrize("drains", ["front", "caller"])
async def test_the_second_service_is_on_another_host(site: Site, drains: str) -> None:
    """The relay of the handler stops, or that of the outer caller."""
    front, back = Front(by_request), Back()
    here = await site.start(drain_timeout_s=GRACE_S)
    there = await site.start(here, drain_timeout_s=GRACE_S)
    third = await site.start(here, there, drain_timeout_s=GRACE_S)
    paths = [relay.config.socket_path for relay in (here, there, third)]
    async with client(paths[0]) as one, client(paths[1]) as two, client(paths[2]) as caller:
        async with one.serve(front.service), two.serve(back.service):
            await caller.wait_for_members("front", 1, timeout=PATIENCE_S)
            await one.wait_for_members("back", 1, timeout=PATIENCE_S)
            outer = asyncio.create_task(caller.request("front", b"", timeout=PATIENCE_S))
            await front.started.wait()
            draining = here if drains == "front" else third
            stopped = asyncio.create_task(site.stop(draining, drain_s=GRACE_S))
            await known(draining)
            front.go.set()
            assert await outer == b"back 1"
            await stopped


FRONT = """
import asyncio, pathlib, sys
import iris

async def main(path, started, go):
    service, ended = iris.Service("front"), asyncio.Event()
    @service.on_request
    async def front(payload: bytes, one: iris.Client) -> bytes:
        pathlib.Path(started).touch()
        while not pathlib.Path(go).exists():
            await asyncio.sleep(0.005)
        return await one.request("back", payload, timeout=10, type=bytes)
    keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
    async with iris.connect(path, keyring=keyring) as one, one.serve(service):
        await ended.wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_services_are_in_processes_of_their_own(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started, go, back = tmp_path / "started", tmp_path / "go", Back()
    arguments = [sys.executable, "-c", FRONT, str(daemon.socket), started, go]
    member = await asyncio.to_thread(subprocess.Popen, arguments)
    try:
        async with client(daemon.socket) as two, two.serve(back.service):
            await two.wait_for_members("front", 1, timeout=PATIENCE_S)
            outer = asyncio.create_task(two.request("front", b"1", timeout=PATIENCE_S))
            await eventually(started.exists)
            stopped = await stopping(daemon, caplog, 1)
            go.touch()
            assert await outer == b"back 1"
            assert await stopped == 0
            assert not daemon.said("relay.cut")
    finally:
        member.kill()
        member.wait()
