"""While a store is on its way, calls of streams wait for it within their timeout, wherever they come from."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.commands import Shell
from support.links import start
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually, wait_until

import iris
from iris.config import ClientConfig
from iris.errors import NoStream, StreamUnavailable
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)


def starting(relay: Relay) -> list[str]:
    """Return where a relay knows of a store that is on its way."""
    return relay.router.mesh.starting_stores()


@pytest.fixture
async def away(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that is linked to one whose store cannot start, because somebody has its directory."""
    data = tmp_path / "data"
    data.mkdir(0o700)
    lock = os.open(data / "store.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    keeper = await start(tmp_path / "one", data=data)
    other = await start(tmp_path / "two", keeper)
    await eventually(lambda: keeper.router.links and other.router.links and starting(other))
    yield other
    os.close(lock)
    await other.stop(drain_s=0)
    await keeper.stop(drain_s=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_first_calls_after_a_restart_of_relay_and_store_wait_for_the_store(
    number: int, tmp_path: Path
) -> None:
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as daemon:
        async with client(daemon.socket) as one:
            await one.streams.create("orders", timeout=PATIENCE_S)
            await one.streams.append("orders", b"one", timeout=PATIENCE_S)
        await asyncio.to_thread(daemon.stop, number)
        await asyncio.to_thread(daemon.start)
        async with client(daemon.socket) as writer, client(daemon.socket) as reader:
            appending = asyncio.create_task(
                writer.streams.append("orders", b"two", timeout=PATIENCE_S)
            )
            described = await reader.streams.describe("orders", timeout=PATIENCE_S)
            assert described.name == "orders"
            assert await appending == 1
            read = [m.payload async for m in reader.streams.read("orders", follow=False)]
            assert read == [b"one", b"two"]
            with pytest.raises(NoStream):  # the store is up, and holds none of this name
                await reader.streams.describe("nothing", timeout=PATIENCE_S)


async def test_the_first_words_of_each_verb_wait_for_a_store_that_is_restarted(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as daemon:
        async with client(daemon.socket) as one:
            await one.streams.create("orders", timeout=PATIENCE_S)
            await one.streams.append("orders", b"one", timeout=PATIENCE_S)
            status = await one.status(timeout=PATIENCE_S)
            os.kill(status["store"]["pid"], signal.SIGKILL)
            await eventually(lambda: daemon.said("store.ended"))
        async with (
            client(daemon.socket) as reader,
            client(daemon.socket) as worker,
            client(daemon.socket) as writer,
        ):

            async def read() -> list[bytes]:
                return [m.payload async for m in reader.streams.read("orders", follow=False)]

            async def take() -> bytes:
                async with worker.streams.consumer("orders", "w") as consumer:
                    async for message in consumer:
                        consumer.ack(message)
                        return message.payload
                raise AssertionError("the consumer ended")

            found = await asyncio.gather(
                read(), take(), writer.streams.append_many("orders", [b"two"], timeout=PATIENCE_S)
            )
            assert found[0][0] == b"one"  # and what was appended meanwhile, perhaps
            assert found[1:] == [b"one", [1]]


def test_the_append_command_waits_for_a_store_that_is_restarted(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as daemon:
        shell = Shell(tmp_path)
        shell("stream", "create", "orders")
        daemon.stop(signal.SIGKILL)
        daemon.start()
        shell.process("stream", "append", "orders", stdin=b"one\n")


async def test_a_call_over_a_link_waits_for_its_timeout_and_says_where_a_store_is_starting(
    away: Relay,
) -> None:
    config = ClientConfig(relay=away.config.socket_path, drain_timeout_s=0.1, connect_timeout_s=2)
    async with iris.connect(keyring=iris.Keyring.single(KEY), config=config) as one:
        for call in (
            one.streams.describe("orders", timeout=0.3),
            one.streams.append("orders", b"x", timeout=0.3),
            one.streams.append_many("orders", [b"x"], timeout=0.3),
            one.streams.create("orders", timeout=0.3),
        ):
            with pytest.raises(StreamUnavailable, match="a store is still starting: "):
                await call
    await eventually(lambda: not away.router._calls.parking.waiting)


async def test_a_call_over_a_link_is_answered_as_soon_as_the_store_is_there(
    tmp_path: Path,
) -> None:
    keeper = await start(tmp_path / "one", data=tmp_path / "data")
    other = await start(tmp_path / "two", keeper)
    try:
        await eventually(lambda: other.router.links and starting(other))
        async with client(other.config.socket_path) as one:
            created = await one.streams.create("orders", timeout=PATIENCE_S)
            assert created.name == "orders"
        await eventually(lambda: not starting(other) and not starting(keeper))
    finally:
        await other.stop(drain_s=0)
        await keeper.stop(drain_s=0)


def test_a_store_finds_the_relays_socket_where_the_relay_does(tmp_path: Path) -> None:
    """`socket_path` of the environment names the socket for both."""
    with Daemon(tmp_path) as relay:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "IRIS_RELAY_SOCKET_PATH": str(relay.socket),
        }
        log = tmp_path / "store.log"
        command = [sys.executable, "-m", "relay.store", "--data", str(tmp_path / "data")]
        with log.open("wb") as output:
            store = subprocess.Popen(command, env=environ, stderr=output)
        try:
            wait_until(lambda: b"store.attached" in log.read_bytes() or store.poll() is not None)
            assert store.poll() is None, log.read_text()
        finally:
            store.terminate()
            assert store.wait(PATIENCE_S) == 0
