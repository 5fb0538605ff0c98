"""A process that was killed has left, even while a process that it forked lives and has its connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(120)

MEMBER = """
import asyncio, ctypes, json, multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
import iris
from relay.daemon import Relay

how, relay = sys.argv[1:3]
service = iris.Service("pool", limits=iris.Limits(concurrency=2))

@service.on_request
async def answer(text: str) -> str:
    if text == "wait":
        await asyncio.sleep(3600)
    return str(os.getpid())

@service.on_push
async def push(text: str) -> None:
    await asyncio.sleep(3600)

@service.on_publish("jobs", group="workers")
def job(text: str) -> None: ...

async def main():
    keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    async with iris.connect(relay, keyring=keyring) as client, client.serve(service):
        if how == "pool":
            child = await asyncio.get_running_loop().run_in_executor(pool, os.getpid)
        else:  # a library that is not Python's forks
            child = ctypes.CDLL(None).fork()
            if not child:
                while True:
                    time.sleep(3600)
        print(json.dumps([os.getpid(), child]), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@contextlib.asynccontextmanager
async def member(daemon: Daemon, how: str) -> AsyncIterator[int]:
    """Start a member that forks, and yield its process id. At the end both of its processes are gone."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MEMBER, how, str(daemon.socket), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        pid, child = json.loads(
            await asyncio.wait_for(process.stdout.readline(), PATIENCE_S) or b"null"
        )
        try:
            yield pid
            os.kill(child, 0)  # it has lived all the time
        finally:
            os.kill(child, signal.SIGKILL)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.stdout.read()  # both have ended: nobody has its end
        await process.wait()


async def in_hand(caller: iris.Client, pid: int, count: int) -> None:
    """Return when the member has `count` calls."""

    async def held() -> bool:
        sessions = (await caller.status())["sessions"]
        return any(one["pid"] == pid and one["running"] == count for one in sessions)

    async with asyncio.timeout(PATIENCE_S):
        while not await held():  # noqa: ASYNC110 - the relay has no event for it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["pool", "library"])
async def test_what_a_killed_member_had_in_hand_is_answered_at_once_though_its_child_lives(
    daemon: Daemon, how: str
) -> None:
    lost: list[Any] = []
    async with client(daemon.socket) as caller, member(daemon, how) as pid:
        caller.on_loss = lost.append
        await caller.wait_for_members("pool", 1, timeout=PATIENCE_S)
        waiting = asyncio.create_task(caller.request("pool", "wait", timeout=600.0))
        await caller.push("pool", "begun", timeout=600.0)
        await in_hand(caller, pid, 2)
        await caller.push("pool", "queued", timeout=600.0)
        await caller.flush()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(iris.ConnectionLost) as raised:
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert raised.value.may_have_run
        assert not await caller.members("pool")
        await eventually(lambda: len(lost) == 2)
        assert {(one.kind, one.name) for one in lost} == {("push", "pool")}
        with pytest.raises(iris.NoMembers):
            await caller.request("pool", "who", timeout=600.0)
    said = [line["pid"] for line in daemon.lines() if line["event"] == "session.process_ended"]
    assert said == (
        [pid] if how == "library" else []
    )  # a child of Python lets go of the connection


@pytest.mark.parametrize("how", ["pool", "library"])
async def test_calls_and_messages_of_a_group_go_to_another_member_when_one_was_killed(
    daemon: Daemon, how: str
) -> None:
    got: asyncio.Queue[str] = asyncio.Queue()
    service = iris.Service("pool")

    @service.on_request
    def answer(text: str) -> str:
        return "the other"

    @service.on_publish("jobs", group="workers")
    def job(text: str) -> None:
        got.put_nowait(text)

    async with (
        client(daemon.socket) as caller,
        client(daemon.socket) as other,
        member(daemon, how) as pid,
    ):
        await caller.wait_for_members("pool", 1, timeout=PATIENCE_S)
        asking = [caller.request("pool", "wait", timeout=600.0, idempotent=True, type=str) for _ in range(2)]  # fmt: skip
        waiting = asyncio.gather(*asking)
        await in_hand(caller, pid, 2)
        async with other.serve(service):
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.wait_for(waiting, PATIENCE_S) == ["the other"] * 2
            for number in range(20):
                assert await caller.request("pool", "who", timeout=600.0, type=str) == "the other"
                await caller.publish("jobs", str(number))
                await caller.flush()
            said = [await asyncio.wait_for(got.get(), PATIENCE_S) for _ in range(20)]
            assert said == [str(number) for number in range(20)]


WRITER = """
import asyncio, ctypes, json, os, sys, time
import iris
from relay.daemon import Relay

async def main():
    keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
    async with iris.connect(sys.argv[1], keyring=keyring) as client:
        child = ctypes.CDLL(None).fork()
        if not child:
            while True:
                time.sleep(3600)
        await client.publish("t", "begun")
        await client.flush()
        print(json.dumps([os.getpid(), child]), flush=True)
        sys.stdin.readline()
        for number in range(500):
            await client.publish("t", str(number))
        while True:
            await asyncio.sleep(0)
            pump = client._attachment.pump
            if not (pump.unwritten_bytes or pump.session.out.chunks):
                break
        print("written", flush=True)
        time.sleep(3600)

asyncio.run(main())
"""


async def test_what_a_killed_process_has_written_is_routed_before_its_session_ends(
    daemon: Daemon,
) -> None:
    gaps: list[Any] = []
    async with client(daemon.socket) as reader, reader.subscribe("t", on_loss=gaps.append) as got:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(daemon.socket), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        messages = aiter(got)
        assert (await anext(messages)).payload == b"begun"
        _, child = json.loads(await process.stdout.readline())
        try:
            daemon.process.send_signal(signal.SIGSTOP)
            process.stdin.write(b"go on\n")
            assert await process.stdout.readline() == b"written\n"
            process.kill()
            await eventually(lambda: process.returncode is not None)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = [(await anext(messages)).payload async for _ in counted(500)]
            assert said == [b"%d" % number for number in range(500)]
            await eventually(lambda: daemon.said("session.process_ended"))
            status = await reader.status()
            assert len(status["sessions"]) == 1
        finally:
            os.kill(child, signal.SIGKILL)
            await process.stdout.read()
    assert not gaps


async def test_all_that_waits_in_the_connection_of_a_process_that_ended_is_routed(
    relay: Relay,
) -> None:
    gaps: list[Any] = []
    socket_path = relay.config.socket_path
    async with client(socket_path) as reader, reader.subscribe("t", on_loss=gaps.append) as got:
        config = iris.ClientConfig(relay=socket_path, label="writer")
        async with iris.connect(config=config, keyring=reader.keyring) as writer:
            await writer.flush()
            await writer.publish("t", b"first")
            await writer.flush()
            messages = aiter(got)
            assert (await anext(messages)).payload == b"first"
            (port,) = [port for port in relay.hub.ports if port.session.label == "writer"]
            # All of it in one turn of the loop, in which the relay reads nothing.
            for number in range(100):
                assert writer.offer("t", b"%d" % number)
                pump = writer._attachment and writer._attachment.pump
                assert pump
                pump.flush()
            assert not pump.unwritten_bytes
            port._process_ended()
            async with asyncio.timeout(PATIENCE_S):
                said = [(await anext(messages)).payload async for _ in counted(100)]
            assert said == [b"%d" % number for number in range(100)]
            assert port not in relay.hub.ports
    assert not gaps


async def counted(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def test_a_session_gives_back_the_descriptor_of_its_process(daemon: Daemon) -> None:
    async with client(daemon.socket) as other:
        await other.status()
        before = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
        for _ in range(5):
            async with client(daemon.socket) as one:
                assert len((await one.status())["sessions"]) == 2
        await eventually(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")) == before)


async def test_a_process_is_served_though_no_descriptor_is_free_to_watch_it(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that was accepted and closed again would take its caller's turn in the backlog."""

    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("relay.net.sessions.peer_process", no_descriptor)
    async with client(relay.config.socket_path) as one:
        assert len((await one.status())["sessions"]) == 1
    assert "session.not_watched" in caplog.text


async def test_a_process_that_had_ended_when_it_was_accepted_gets_no_session(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    monkeypatch.setattr("relay.net.sessions.peer_process", ended)
    with pytest.raises(iris.RelayUnavailable):
        async with client(relay.config.socket_path):
            raise AssertionError
    assert not relay.hub.ports
    assert not any(relay.hub.users.held.values())
