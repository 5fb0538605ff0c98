"""`iris bridge iris1` as a process, against a relay as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interop.iris1 import binding
from interop.iris1.kit import Echo, collecting
from support import warm
from support.commands import command
from support.pages import get, scrape
from support.relays import Daemon
from support.waiting import eventually, wait_until

import iris
from iris import keyfiles

pytestmark = pytest.mark.timeout(60)


class Process:
    """The bridge as a process."""

    def __init__(self, relay: Daemon, *arguments: str) -> None:
        self.log = relay.runtime / "bridge.log"
        with self.log.open("wb") as log:
            self.process = warm.Popen(
                command("bridge", "iris1", *arguments),
                env=relay.environ, stdin=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def lines(self, event: str) -> list[dict[str, Any]]:
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [line for line in map(json.loads, whole) if line["event"] == event]

    def port(self) -> int:
        wait_until(lambda: self.process.poll() is not None or self.lines("bridge.started"))
        (line,) = self.lines("bridge.started")
        return int(line["listen"][0].rpartition(":")[2])


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def start(relay: Daemon) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(*arguments: str) -> Process:
        started.append(Process(relay, *arguments))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


def keys(relay: Daemon) -> iris.Keyring:
    return keyfiles.load_keys(relay.environ)


async def test_programs_of_both_kinds_talk_and_sigterm_ends_it_cleanly(
    relay: Daemon, start: Callable[..., Process]
) -> None:
    process = start("--listen", "127.0.0.1:0")
    port = await asyncio.to_thread(process.port)
    await asyncio.to_thread(wait_until, lambda: process.lines("bridge.no_authentication"))
    assert process.lines("bridge.no_authentication")[0]["level"] == "WARNING"
    service = iris.Service("ours")
    begun, released = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def slow(request: bytes) -> bytes:
        if request == b"slow":
            begun.set()
            await released.wait()
        return b"ours:" + request

    async with iris.connect(relay.socket, keyring=keys(relay)) as client, client.serve(service):
        old = await binding.Binding("theirs", Echo()).open(port)
        assert await old.request("ours", b"x", 5000) == b"ours:x"
        assert await client.request("theirs", b"y", timeout=5) == b"y"
        assert len(await client.members("theirs")) == 1
        took_s = []
        for _ in range(100):
            begin_s = time.perf_counter()
            assert await old.request("theirs", b"z", 5000) == b"z"
            took_s.append(time.perf_counter() - begin_s)
        assert min(took_s) < 0.012
        asked = asyncio.create_task(old.request("ours", b"slow", 20_000))
        await begun.wait()
        process.process.send_signal(signal.SIGTERM)
        await closed_for_others(port)
        released.set()
        assert await asked == b"ours:slow"
        await old.ended.wait()
        assert old.closed == "the bridge stopped"
        await old.hang_up()
        assert await asyncio.to_thread(process.process.wait, 15) == 0
        assert not await client.members("theirs")


async def closed_for_others(port: int) -> None:
    """Return when no process listens at the port any more."""

    def refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # the last that was in its queue
            return False
        return False

    await eventually(refused)


async def test_sighup_takes_up_a_changed_keyring_for_the_clients_that_are_there(
    relay: Daemon, start: Callable[..., Process]
) -> None:
    directory = keyfiles.config_directory(relay.environ)
    directory.mkdir(parents=True)
    old_key, new_key = iris.ClusterKey(b"o" * 32), iris.ClusterKey(b"n" * 32)
    keyfiles.save_keyring(directory / keyfiles.KEYRING_FILE, iris.Keyring.single(old_key))
    process = start("--listen", "127.0.0.1:0")
    port = await asyncio.to_thread(process.port)
    one = await binding.Binding("theirs", Echo()).open(port)
    received: list[bytes] = []
    one.subscribe("topic", collecting(received))
    keyring = iris.Keyring.single(new_key)
    keyfiles.save_keyring(directory / keyfiles.KEYRING_FILE, keyring)
    async with iris.connect(relay.socket, keyring=keyring) as client:
        assert not await client.members("theirs")
        process.process.send_signal(signal.SIGHUP)
        await client.wait_for_members("theirs", 1, timeout=20)
        assert await client.request("theirs", b"x", timeout=20) == b"x"
        await asyncio.to_thread(wait_until, lambda: process.lines("bridge.keys_reloaded"))
        assert process.lines("bridge.keys_reloaded")[0]["left_behind"] == 0
        await client.publish("topic", b"y")
        await eventually(lambda: received == [b"y"])
        assert await one.request("theirs", b"z", 20_000) == b"z"
        keyfiles.save_keyring(directory / keyfiles.KEYRING_FILE, iris.Keyring({"other": [new_key]}))
        process.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: len(process.lines("bridge.keys_reloaded")) == 2)
        assert process.lines("bridge.keys_reloaded")[1]["left_behind"] == 1
        assert await client.request("theirs", b"x", timeout=20) == b"x"
        (directory / keyfiles.KEYRING_FILE).write_text("no keyring")
        process.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(
            wait_until, lambda: len(process.lines("bridge.keys_not_reloaded")) == 2
        )
        assert await client.request("theirs", b"x", timeout=20) == b"x"
    await one.close()


async def test_a_second_signal_ends_it_at_once(
    relay: Daemon, start: Callable[..., Process]
) -> None:
    process = start("--listen", "127.0.0.1:0")
    port = await asyncio.to_thread(process.port)
    service = iris.Service("ours")

    begun = asyncio.Event()

    @service.on_request
    async def never(request: bytes) -> None:
        begun.set()
        await asyncio.Event().wait()

    config = iris.ClientConfig(relay=relay.socket, drain_timeout_s=0.1)
    async with iris.connect(config=config, keyring=keys(relay)) as client, client.serve(service):
        old = await binding.Binding().open(port)
        asked = asyncio.create_task(old.request("ours", b"x", 60_000))
        await begun.wait()
        process.process.send_signal(signal.SIGINT)
        await closed_for_others(port)
        assert process.process.poll() is None
        process.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.process.wait, 20) == 1
        with pytest.raises(binding.Closed):
            await asked
        await old.hang_up()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "0.0.0.0:0"], "not a loopback address"),
        (
            ["--listen", "localhost:1"],
            "not a numeric address; to accept clients of this host only, write 127.0.0.1:PORT",
        ),
        (["--listen", "127.0.0.1"], "is not an address; write ADDRESS:PORT"),
        (["--relay", "/nowhere/relay.sock"], "/nowhere/relay.sock"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    relay: Daemon, start: Callable[..., Process], arguments: list[str], said: str
) -> None:
    process = start(*arguments)
    assert process.process.wait(20) == 2
    assert said in process.log.read_text().splitlines()[-1]


def test_a_port_that_is_taken_is_said(relay: Daemon, start: Callable[..., Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert process.process.wait(20) == 2
    assert "in use" in process.log.read_text().splitlines()[-1]


async def test_metrics_are_served_beside_the_clients_until_the_bridge_ends(
    relay: Daemon, start: Callable[..., Process]
) -> None:
    bridge = start("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", bridge.port())) as connection:
        wait_until(lambda: bridge.lines("bridge.metrics"))
        address = bridge.lines("bridge.metrics")[0]["address"]
        connection.sendall(b"nonsense")
        page = await asyncio.to_thread(scrape, address)
        assert page.sum("iris_bridge_ready", bridge="iris1") == 1
        assert (await asyncio.to_thread(get, address, "/ready")) == (200, "ok\n")
    bridge.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(bridge.process.wait, 30) == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(get, address)


def test_a_metrics_port_in_use_ends_the_bridge_with_a_clear_error(
    relay: Daemon, start: Callable[..., Process]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bridge = start("--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}")
        assert bridge.process.wait(30) == 2
    last = bridge.log.read_text().splitlines()[-1]
    assert last.startswith(
        "iris: metrics: cannot serve metrics: Address already in use: 127.0.0.1:"
    )
