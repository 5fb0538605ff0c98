"""In whatever way a relay ends, running calls can finish, the next relay starts, and clients connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversity.kit import neighbours
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually, wait_until

import iris

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Daemon]:
    """A relay that waits for running calls for as long as they take."""
    with Daemon(tmp_path, settings={"IRIS_RELAY_DRAIN_TIMEOUT_S": "3600"}) as daemon:
        yield daemon


def left_behind(daemon: Daemon) -> list[str]:
    """Return the names in the relay's directory. The lock stays: a deleted lock could be held twice. The count of
    members stays while there are some.
    """
    return sorted(path.name for path in daemon.socket.parent.iterdir() if path.name != "dev")


def again(daemon: Daemon) -> subprocess.CompletedProcess[str]:
    """Start a second relay at the same socket, which must end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "relay", "--dev"],
        env=daemon.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def accepts(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as session:
        return session.connect_ex(str(path)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_what_runs_is_finished(number: int, patient: Daemon) -> None:
    running = asyncio.Event()
    finish = asyncio.Event()
    service = iris.Service("slow")

    @service.on_request
    async def slow(payload: bytes) -> bytes:
        running.set()
        await finish.wait()
        return payload

    async with (
        client(patient.socket) as member,
        client(patient.socket) as caller,
        member.serve(service),
    ):
        waiting = asyncio.create_task(caller.request("slow", b"done", timeout=PATIENCE_S))
        await running.wait()
        patient.process.send_signal(number)
        while patient.socket.parent.exists() and not patient.said("relay.stopped"):
            with contextlib.suppress(iris.RelayUnavailable):
                async with client(patient.socket):
                    await asyncio.sleep(0.01)
                    continue
            break  # it accepts no new session, and the request still runs
        assert not waiting.done()
        finish.set()
        assert await waiting == b"done"
        assert await asyncio.to_thread(patient.process.wait, PATIENCE_S) == 0
    assert patient.said("relay.draining")
    assert patient.said("relay.stopped")
    assert left_behind(patient) == ["relay.sock.lock", "relay.sock.sessions"]


def test_a_relay_without_work_does_not_wait_for_its_drain_timeout(tmp_path: Path) -> None:
    async def idle(daemon: Daemon) -> None:
        async with neighbours(daemon.socket) as others:
            await others.check()
            code = await asyncio.to_thread(daemon.stop)
            assert code == 0

    with Daemon(tmp_path, settings={"IRIS_RELAY_DRAIN_TIMEOUT_S": "3600"}) as daemon:
        asyncio.run(idle(daemon))


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    service = iris.Service("never")

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        with contextlib.suppress(iris.TunnelBroken):
            await tunnel.recv()

    settings = {"IRIS_RELAY_DRAIN_TIMEOUT_S": "3600"}
    with Daemon(tmp_path, settings=settings) as daemon:
        async with client(daemon.socket) as member, member.serve(service):
            tunnel = await member.open_tunnel("never", timeout=PATIENCE_S)
            daemon.process.send_signal(signal.SIGTERM)
            # Two signals at once count as one, so the first must be handled before.
            await eventually(lambda: not accepts(daemon.socket))
            assert daemon.process.poll() is None  # an open tunnel keeps the relay running
            assert await asyncio.to_thread(daemon.stop) == 1
            with pytest.raises(iris.TunnelBroken):
                await tunnel.recv()


async def test_what_the_grace_cuts_is_reported_to_both_ends_and_in_the_log(tmp_path: Path) -> None:
    service = iris.Service("never")
    notified = asyncio.Event()

    @service.on_request
    async def never(payload: bytes) -> None:
        await asyncio.Event().wait()

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        try:
            await tunnel.recv()
        except iris.TunnelBroken:
            notified.set()

    with Daemon(tmp_path, settings={"IRIS_RELAY_DRAIN_TIMEOUT_S": "0.3"}) as daemon:
        async with (
            client(daemon.socket) as member,
            client(daemon.socket) as caller,
            member.serve(service) as binding,
        ):
            tunnel = await caller.open_tunnel("never", timeout=PATIENCE_S)
            asking = asyncio.create_task(caller.request("never", b"", timeout=3600))
            await eventually(lambda: binding.running == 2)
            assert await asyncio.to_thread(daemon.stop) == 0
            with pytest.raises(iris.TunnelBroken):
                await tunnel.recv()
            with pytest.raises(iris.ConnectionLost) as caught:
                await asking
            assert caught.value.may_have_run
            await notified.wait()
            await binding.stop()
            binding.running = 0
        (cut,) = [line for line in daemon.lines() if line["event"] == "relay.cut"]
        assert (cut["calls"], cut["tunnels"]) == (1, 1)


def test_a_live_relay_is_left_alone_and_the_second_says_who_has_it(daemon: Daemon) -> None:
    second = again(daemon)
    assert second.returncode == 2
    assert f"a relay already serves {daemon.socket} (process {daemon.process.pid})" in second.stderr
    assert "Traceback" not in second.stderr
    assert daemon.stop() == 0


async def test_after_a_kill_the_next_relay_replaces_the_stale_socket_and_clients_find_it(
    daemon: Daemon,
) -> None:
    async with neighbours(daemon.socket) as others:
        await others.check()
        kept = daemon.socket.with_name("relay.sock.sessions")
        await eventually(kept.exists)
        daemon.process.kill()
        await asyncio.to_thread(daemon.process.wait)
        assert left_behind(daemon) == ["relay.sock", "relay.sock.lock", "relay.sock.sessions"]
        with pytest.raises(iris.RequestError) as caught:
            await others.caller.request("echo", b"", timeout=0.2)
        assert isinstance(caught.value, iris.ConnectionLost)
        daemon.start()
        await others.caller.wait_for_members("echo", 1, timeout=PATIENCE_S)
        assert await others.caller.request("echo", b"again", timeout=PATIENCE_S) == b"again"
    assert daemon.stop() == 0
    assert left_behind(daemon) == ["relay.sock.lock"]


async def test_what_is_in_flight_when_a_relay_is_killed_ends_at_once(daemon: Daemon) -> None:
    service = iris.Service("never")

    @service.on_request
    async def never(payload: bytes) -> None:
        await asyncio.Event().wait()

    @service.on_tunnel
    async def hold(tunnel: iris.Tunnel) -> None:
        with contextlib.suppress(iris.TunnelBroken):
            await tunnel.recv()

    async with client(daemon.socket) as member, client(daemon.socket) as caller:
        serving = member.serve(service)
        binding = await serving.__aenter__()
        waiting = asyncio.create_task(caller.request("never", b"", timeout=3600))
        tunnel = await caller.open_tunnel("never", timeout=PATIENCE_S)
        await eventually(lambda: binding.running == 2)
        daemon.process.kill()
        with pytest.raises(iris.ConnectionLost) as caught:
            await waiting
        assert caught.value.may_have_run
        with pytest.raises(iris.TunnelBroken):
            await tunnel.recv()
        await binding.stop()
        binding.running = 0
        await serving.__aexit__(None, None, None)


@pytest.mark.parametrize("obstacle", ["file", "directory", "socket of another program"])
def test_a_name_that_is_taken_is_named_and_left_alone(obstacle: str, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.socket.parent.mkdir(0o700)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        if obstacle == "file":
            daemon.socket.write_text("mine")
        elif obstacle == "directory":
            daemon.socket.mkdir()
        else:
            listener.bind(str(daemon.socket))
            listener.listen()
        second = again(daemon)
        assert second.returncode == 2
        assert str(daemon.socket) in second.stderr
        assert "Traceback" not in second.stderr
        assert daemon.socket.exists()
        if obstacle == "socket of another program":
            assert f"process {os.getpid()}" in second.stderr


def test_a_runtime_directory_that_is_missing_or_forbidden_is_named(tmp_path: Path) -> None:
    missing = Daemon(tmp_path / "not" / "there")
    missing.environ["XDG_CONFIG_HOME"] = str(tmp_path)
    second = again(missing)
    assert second.returncode == 2
    assert "Traceback" not in second.stderr
    assert str(tmp_path / "not" / "there") in second.stderr


async def test_a_relay_stops_while_its_clients_come_and_go(daemon: Daemon) -> None:
    stop = asyncio.Event()
    turns = [0] * 8

    async def come_and_go(number: int) -> None:
        while not stop.is_set():
            try:
                async with client(daemon.socket) as one:
                    await one.publish("a", bytes(1000))
                    turns[number] += 1
            except iris.RelayUnavailable:
                await asyncio.sleep(0.01)

    crowd = [asyncio.create_task(come_and_go(number)) for number in range(len(turns))]
    await eventually(lambda: min(turns) > 1 or any(task.done() for task in crowd))
    assert await asyncio.to_thread(daemon.stop) == 0
    stop.set()
    await asyncio.gather(*crowd)
    assert left_behind(daemon) == ["relay.sock.lock"]
    stopped = next(line for line in daemon.lines() if line["event"] == "relay.stopped")
    account = stopped["account"]
    leaving = sum(account[each] for each in ("out", "unwanted", "refused", "expired", "held"))
    assert account["in"] + account["copied"] == leaving + sum(account["dropped"].values())
    assert not [line for line in daemon.lines() if "traceback" in line]


def test_connect_without_a_relay_says_how_to_start_one(tmp_path: Path) -> None:
    program = "import asyncio, iris\nasyncio.run(iris.connect(keyring=iris.Keyring.single(iris.ClusterKey(bytes(32)))).open())"
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"iris.errors.RelayUnavailable: no relay at {tmp_path}/iris/relay.sock")
    assert "`iris relay --dev`" in last


def test_the_log_of_a_whole_life_is_json_lines(daemon: Daemon) -> None:
    async def life() -> None:
        async with neighbours(daemon.socket) as others:
            await others.check()

    asyncio.run(life())
    began_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began_s < PATIENCE_S
    wait_until(lambda: daemon.said("relay.stopped"))
    events = [line["event"] for line in daemon.lines()]
    assert events[0] == "relay.started"
    assert events[-1] == "relay.stopped"
    assert all({"time", "level", "logger", "event"} <= line.keys() for line in daemon.lines())
    assert KEY.reveal() not in daemon.log.read_text()


_SIGNALS = """
import asyncio, os, signal
from relay.process import stop_on_signals

async def main():
    stop = stop_on_signals()
    stop.set()
    for which in ("first", "second"):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        print("after the", which, flush=True)

asyncio.run(main())
"""


def test_only_a_second_signal_is_immediate_not_the_first_after_another_reason_to_stop() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SIGNALS], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stdout) == (1, "after the first\n"), ended.stderr


_BESIDE_ANOTHER = """
import asyncio, signal, sys, uvloop
from iris.cli.exits import until_stopped
from relay.process import stop_on_signals

async def event():
    stop = stop_on_signals()
    print("ready", flush=True)
    await stop.wait()
    await asyncio.sleep(0.05)

async def verb():
    async def work():
        print("ready", flush=True)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
    await until_stopped(work())

signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
uvloop.run({"event": event, "verb": verb}[sys.argv[1]]())
print("stopped")
"""


@pytest.mark.parametrize("how", ["event", "verb"])
def test_a_signal_that_comes_with_another_counts_once(how: str) -> None:
    """As when a terminal is resized and closed, or a service is reloaded and stopped."""
    with subprocess.Popen(
        [sys.executable, "-c", _BESIDE_ANOTHER, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "stopped\n"), err
