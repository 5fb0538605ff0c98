"""A process that was killed has left, even while a process that it forked lives and has its connection."""

from __future__ import annotations

import asyncio
import contextlib
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

pytestmark = pytest.mark.timeout(120)

MEMBER = """
import asyncio, ctypes, json, multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
import iris

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
