"""After a restart a relay waits for the members that it had, and clients come back as soon as its socket is there."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.kit import echo_service
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from relay.statefile import FILE_BYTES

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def kept(daemon: Daemon) -> Path:
    """Return where a relay keeps how many members it had."""
    return daemon.socket.with_name("relay.sock.sessions")


def members_kept(daemon: Daemon) -> int:
    """Return how many members the file names; 0 without one."""
    try:
        return int(json.loads(kept(daemon).read_text())["members"])
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_call_that_comes_before_its_member_is_back_waits_for_it(
    number: int, daemon: Daemon
) -> None:
    async with client(daemon.socket) as member, member.serve(echo_service()):
        await eventually(lambda: members_kept(daemon) == 1)
        await asyncio.to_thread(daemon.stop, number)
    await asyncio.to_thread(daemon.start)
    async with client(daemon.socket) as caller:
        early = asyncio.create_task(caller.request("echo", b"early", timeout=PATIENCE_S))
        await caller.flush()
        assert not early.done()
        async with client(daemon.socket) as member, member.serve(echo_service()):
            assert await early == b"early"
            # All are back: nobody is waited for any more.
            with pytest.raises(iris.NoMembers):
                await caller.request("nobody", b"", timeout=PATIENCE_S)
    assert daemon.said("relay.waits")
    assert daemon.said("relay.returned")


async def test_members_that_came_just_before_the_relay_was_stopped_are_kept(daemon: Daemon) -> None:
    slow, begun = iris.Service("slow"), asyncio.Event()

    @slow.on_request
    async def answer(_: bytes) -> None:
        begun.set()
        await asyncio.sleep(0.3)  # the drain lasts for longer than the count waits to be written

    async with client(daemon.socket) as member, client(daemon.socket) as caller, member.serve(slow):
        call = asyncio.create_task(caller.request("slow", b"", timeout=PATIENCE_S))
        await begun.wait()
        await asyncio.to_thread(daemon.stop, signal.SIGTERM)
        await call
        assert members_kept(daemon) == 1


async def test_what_does_not_come_back_is_waited_for_a_while_and_no_longer(daemon: Daemon) -> None:
    async with client(daemon.socket) as member, member.serve(echo_service()):
        await eventually(lambda: members_kept(daemon) == 1)
        await asyncio.to_thread(daemon.stop, signal.SIGKILL)
    await asyncio.to_thread(daemon.start)
    async with client(daemon.socket) as caller:
        with pytest.raises(iris.NoMembers):
            await caller.request("echo", b"", timeout=PATIENCE_S)
        assert daemon.said("relay.missed")
        await eventually(lambda: members_kept(daemon) == 0)


async def test_a_call_waits_no_longer_than_its_own_deadline(daemon: Daemon) -> None:
    async with client(daemon.socket) as member, member.serve(echo_service()):
        await eventually(lambda: members_kept(daemon) == 1)
        await asyncio.to_thread(daemon.stop, signal.SIGKILL)
    await asyncio.to_thread(daemon.start)
    async with client(daemon.socket) as caller:
        # Whether it may have run depends on who ends it: its own clock, or the relay, which knows.
        with pytest.raises(iris.RequestTimeout):
            await caller.request("echo", b"", timeout=0.1)


async def test_only_the_owner_reads_what_is_kept_and_nothing_is_kept_of_nobody(
    daemon: Daemon,
) -> None:
    async with client(daemon.socket) as member:
        async with member.serve(echo_service()), member.serve(echo_service("other")):
            await eventually(lambda: members_kept(daemon) == 2)
            assert stat.S_IMODE(kept(daemon).stat().st_mode) == 0o600
            assert json.loads(kept(daemon).read_text())["sessions"] == 1
        await eventually(lambda: not kept(daemon).exists())


@pytest.mark.parametrize(
    "text",
    [b"", b"not JSON", b"[]", b'{"members": -1}', b'{"members": true}', b'{"boot": "another", "sessions": 1, "members": 1}', b" " * 2 * FILE_BYTES, b"[" * 2 * FILE_BYTES],
)  # fmt: skip
async def test_a_file_that_says_nothing_of_use_is_as_none(text: bytes, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.socket.parent.mkdir(0o700)
    kept(daemon).write_bytes(text)
    with daemon:
        async with client(daemon.socket) as caller:
            with pytest.raises(iris.NoMembers):
                await caller.request("echo", b"", timeout=PATIENCE_S)
        assert not daemon.said("relay.waits")


async def test_a_file_that_cannot_be_kept_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.socket.parent.mkdir(0o700)
    kept(daemon).mkdir()
    (kept(daemon) / "taken").touch()
    with daemon:
        async with client(daemon.socket) as member, member.serve(echo_service()):
            assert await member.request("echo", b"x", timeout=PATIENCE_S) == b"x"
            await eventually(lambda: daemon.said("attendance.not_kept"))
        assert await asyncio.to_thread(daemon.stop) == 0


async def test_clients_are_back_as_soon_as_the_socket_is_there(daemon: Daemon) -> None:
    """Whatever pause the attempts before it have led to."""
    config = iris.ClientConfig(relay=daemon.socket, reconnect_min_s=3600, reconnect_max_s=3600)
    async with iris.connect(keyring=iris.Keyring.single(KEY), config=config) as one:
        for number in (signal.SIGKILL, signal.SIGTERM):
            await asyncio.to_thread(daemon.stop, number)
            with pytest.raises(iris.ConnectionLost):
                await one.flush(timeout=0.2)
            await asyncio.to_thread(daemon.start)
            await one.flush(timeout=PATIENCE_S)
