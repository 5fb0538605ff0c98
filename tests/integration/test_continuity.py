"""A recorded stream goes on without a gap where nothing can be missing, and has one wherever something may be: real
relays and stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from adversity.kit import Wire
from support.relays import KEY, Daemon

import iris
from iris.config import ClientConfig
from iris.wire import frames
from iris.wire.kinds import Kind
from relay.config import RelayConfig
from relay.daemon import Relay
from relay.supervisor import StoreSupervisor

WAIT_S = 30.0
NOT_RUNNING = "the store was not running"
pytestmark = pytest.mark.timeout(120)


def connect(relay: Path, label: str) -> iris.Client:
    """Return a client that looks for its relay often."""
    config = ClientConfig(relay=relay, label=label, reconnect_min_s=0.005, reconnect_max_s=0.02)
    return iris.connect(keyring=iris.Keyring.single(KEY), config=config)


class Stage:
    """A relay with a store, in processes of their own; a publisher and a reader of the stream there."""

    def __init__(self, directory: Path, kind: str, grace_s: float) -> None:
        file = directory / "relay.toml"
        file.write_text(f"drain_timeout_s = {grace_s}\n")
        data = str(directory / "data")
        self.daemon = Daemon(directory, "--config", str(file), "--data", data)
        self.complete = directory / "data" / "complete"
        self.pub = connect(self.daemon.socket, "pub")
        self.reader = connect(self.daemon.socket, "reader")
        self.sent = 0
        self._where = {"topic": "all"} if kind == "publish" else {"cluster": "all"}
        self._send = self.pub.publish if kind == "publish" else self.pub.broadcast

    async def create(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(iris.errors.StreamError):  # its store is starting
                    await self.reader.streams.create("log", **self._where)  # type: ignore[arg-type]
                    return
                await asyncio.sleep(0.02)

    async def send(self, count: int = 1) -> None:
        for _ in range(count):
            await self._send("all", b"%d" % self.sent)
            self.sent += 1

    async def recorded(self, count: int | None = None) -> list[str]:
        """Return the causes of the gaps once `count`, or all, messages are there; they are in order, and there is
        nothing else.
        """
        count = self.sent if count is None else count
        numbers: list[int] = []
        gaps: list[iris.StreamGap] = []
        try:
            async with asyncio.timeout(WAIT_S):
                while len(numbers) < count:
                    await asyncio.sleep(0.02)
                    with contextlib.suppress(iris.errors.StreamError):  # its store is starting
                        reader = self.reader.streams.read("log", "first", follow=False)
                        async with reader as messages:
                            numbers = [int(message.payload) async for message in messages]
                        gaps = messages.gaps
        except TimeoutError:
            pytest.fail(
                f"{len(numbers)} of {count}, {gaps}; relay: {self.daemon.log.read_text()[-2000:]}"
            )
        assert numbers == list(range(count))
        return [gap.cause for gap in gaps]

    async def store(self) -> int:
        """Return the process id of the store, once it serves."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(iris.errors.StreamError):
                    await self.reader.streams.describe("log")
                    status = await self.reader.status()
                    if pid := status["store"]["pid"]:
                        return int(pid)
                await asyncio.sleep(0.02)

    async def ended(self, number: int = signal.SIGTERM) -> None:
        """Stop the relay, and return when it is gone: its store is, too."""
        await asyncio.to_thread(self.daemon.stop, number)

    async def started(self) -> None:
        await asyncio.to_thread(self.daemon.start)


@contextlib.asynccontextmanager
async def stage(
    directory: Path, kind: str = "publish", *, grace_s: float = 10.0
) -> AsyncIterator[Stage]:
    found = Stage(directory, kind, grace_s)
    with found.daemon:
        async with found.pub, found.reader:
            await found.create()
            yield found


@pytest.mark.parametrize("kind", ["publish", "broadcast"])
async def test_a_stream_goes_on_without_a_gap_through_stops_under_load(
    tmp_path: Path, kind: str
) -> None:
    async with stage(tmp_path, kind) as on:
        done = asyncio.Event()

        async def publish() -> None:
            while not done.is_set():
                await on.send(10)
                await asyncio.sleep(0.005)

        publishing = asyncio.create_task(publish())
        for _ in range(3):
            await on.store()
            await on.ended()
            await on.started()
        done.set()
        await publishing
        assert await on.recorded() == []
        assert not on.pub.losses


async def test_a_stop_with_nothing_published_leaves_no_gap_nor_does_one_before_the_store_is_back(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as on:
        await on.send()
        assert await on.recorded() == []
        await on.ended()
        assert on.complete.exists()
        for _ in range(2):
            await on.started()
            await on.ended()  # at once: its store has hardly begun
        await on.started()
        await on.send()
        assert await on.recorded() == []
        assert not on.complete.exists()  # it says nothing about what comes from here on


@pytest.mark.parametrize("first", ["store", "relay"])
async def test_who_stops_the_relay_may_signal_its_store_too(tmp_path: Path, first: str) -> None:
    async with stage(tmp_path) as on:
        for _ in range(2):
            store = await on.store()
            await on.send(100)
            if first == "store":
                os.kill(store, signal.SIGTERM)
            on.daemon.process.send_signal(signal.SIGTERM)
            if first == "relay":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(store, signal.SIGTERM)
            await on.send(100)
            await asyncio.to_thread(on.daemon.process.wait, WAIT_S)
            await on.started()
        assert await on.recorded() == []


async def test_a_relay_or_a_store_that_is_killed_leaves_a_gap_and_a_stop_after_it_none(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as on:
        await on.send()
        assert await on.recorded() == []
        gaps: list[str] = []
        for victim in ("relay", "store", "store that drains"):
            store = await on.store()
            if victim == "relay":
                await on.ended(signal.SIGKILL)
                await on.started()
            else:
                os.kill(store, signal.SIGKILL if victim == "store" else signal.SIGTERM)
            while await on.store() == store:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)
            gaps.append(NOT_RUNNING)
            await on.send()
            assert await on.recorded() == gaps, victim
            await on.ended()
            await on.started()
            await on.send()
            assert await on.recorded() == gaps, f"a stop after {victim}"


async def test_a_relay_in_between_that_has_no_store_leaves_a_gap(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.send()
        assert await on.recorded() == []
        await on.ended()
        assert on.complete.exists()
        with Daemon(tmp_path) as other:
            assert other.socket == on.daemon.socket
            async with connect(other.socket, "another") as another:
                await another.publish("all", b"nobody records it")
                await another.flush(timeout=WAIT_S)
            await asyncio.to_thread(other.stop)
        await on.started()
        await on.store()  # what comes before may be in the gap
        await on.send()
        assert await on.recorded() == [NOT_RUNNING]


async def test_a_session_that_was_not_read_to_its_end_leaves_a_gap(tmp_path: Path) -> None:
    async with stage(tmp_path, grace_s=0.3) as on, Wire(on.daemon.socket, KEY) as silent:
        await on.send()
        assert await on.recorded() == []
        await silent.send(frames.Hello(1, 0, "silent", os.getpid()))
        silent.welcome = await silent.expect(frames.Welcome)
        await silent.send(silent.proof(KEY), silent.declare(1, Kind.PUBLISH, "all"))
        await silent.alive()
        await on.ended()
        assert not on.complete.exists()
        await on.started()
        await on.store()  # what comes before may be in the gap
        await on.send()
        assert await on.recorded() == [NOT_RUNNING]


async def test_a_store_that_does_not_come_back_holds_nobody_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as on:
        await on.send()
        assert await on.recorded() == []
        await on.ended()
        assert on.complete.exists()
        began, run = asyncio.Event(), StoreSupervisor.run

        async def later(self: StoreSupervisor) -> None:
            await began.wait()
            await run(self)

        monkeypatch.setattr("relay.startup.WORD_S", 0.05)
        monkeypatch.setattr(StoreSupervisor, "run", later)
        config = RelayConfig(
            socket_path=on.daemon.socket, data=tmp_path / "data", dev=True, drain_timeout_s=10
        )
        relay = Relay(config)
        await relay.start()
        try:
            await on.pub.publish("all", b"nobody records it")
            await on.pub.flush(timeout=WAIT_S)
            assert not on.complete.exists()
            began.set()
            assert await on.recorded() == [NOT_RUNNING]
        finally:
            await relay.stop(drain_s=0)
