"""Sessions that send nothing, send half a frame, never read, or connect by the thousand."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversity.kit import OTHER_KEY, Wire, data_frame, neighbours, tables, unaccounted
from support.relays import Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.kinds import Kind

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A relay with time limits of one second."""
    settings = {"IRIS_RELAY_HELLO_TIMEOUT_S": "1", "IRIS_RELAY_FRAME_TIMEOUT_S": "1"}
    with Daemon(tmp_path_factory.mktemp("relay"), settings=settings) as daemon:
        yield daemon


@pytest.fixture
def relay(daemon: Daemon) -> Path:
    return daemon.socket


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_a_client_that_connects_and_sends_nothing_gets_an_error_and_is_cut(
    relay: Path,
) -> None:
    async with neighbours(relay) as others, Wire(relay) as wire:
        await others.check()
        assert await wire.error() == "HELLO was not received within 1 s"
        await others.check()
        assert unaccounted(await others.settled(2)) == 0


async def test_half_a_frame_and_silence_is_cut(relay: Path) -> None:
    """The announced length may be less than the shared buffer, or more, which requires separate memory."""
    hello = encode_control(frames.Hello(1, 0))
    publication = data_frame(Kind.PUBLISH, bytes(900_000))

    async def greeting(size: int) -> str:
        async with Wire(relay) as wire:
            await wire.send(hello[:size])
            return await wire.error()

    async def publishing(size: int) -> str:
        async with Wire(relay) as wire:
            await wire.prove()
            await wire.alive()
            await wire.send(wire.declare(0, Kind.PUBLISH, "a"), publication[:size])
            return await wire.error()

    async def dripping() -> str:
        async with Wire(relay) as wire:
            await wire.greet()
            error = asyncio.create_task(wire.error())
            for index in range(len(hello)):
                await wire.send(hello[index : index + 1])
                await asyncio.wait((error,), timeout=0.2)
                if error.done():
                    break
            return await error

    async with neighbours(relay) as others:
        before = await others.status()
        errors = asyncio.gather(
            *map(greeting, (1, 4, 9)), *map(publishing, (3, 60, 100_000)), dripping()
        )
        await others.check()
        greeted = ["the rest of a frame was not received within 1 s"] * 4
        assert await errors == ["HELLO was not received within 1 s"] * 3 + greeted
        await others.check()
        after = await others.settled(2)
        assert tables(after) == tables(before)
        assert unaccounted(after) == 0


async def test_a_session_that_never_pauses_between_frames_is_not_taken_for_half_a_frame(
    relay: Path,
) -> None:
    """Each read ends within a frame for longer than a frame may take, but no frame takes long."""
    ping = encode_control(frames.Ping(1))
    async with Wire(relay) as wire:
        await wire.greet()
        await wire.send(ping[:5])
        until_s = time.monotonic() + 2.2
        while time.monotonic() < until_s:
            await wire.send(ping[5:] + ping[:5])
            await wire.expect(frames.Pong)
        await wire.send(ping[5:])
        await wire.expect(frames.Pong)
        await wire.alive()


async def test_silence_between_frames_is_nobodys_business(relay: Path) -> None:
    async with Wire(relay) as wire:
        await wire.greet()
        await asyncio.sleep(2)
        await wire.alive()


async def test_who_floods_and_never_reads_is_not_read_from_and_costs_bounded_memory(
    daemon: Daemon, relay: Path
) -> None:
    async with neighbours(relay) as others:
        before = await others.status()
        start_bytes = resident_bytes(daemon.process.pid)
        async with Wire(relay) as wire:
            await wire.prove()
            # It has no member, so each is answered with FAIL, and the answers are never read.
            await wire.send(wire.declare(0, Kind.REQUEST, "nobody"))
            wire.stop_reading()
            batch = b"".join(data_frame(Kind.REQUEST, bytes(8), hop=hop) for hop in range(2000))
            sending = asyncio.create_task(wire.send(*[batch] * 500))
            await asyncio.wait((sending,), timeout=1.0)
            assert not sending.done()  # the relay does not read the rest of the million
            sending.cancel()
            for _ in range(20):
                await others.check()
            assert resident_bytes(daemon.process.pid) - start_bytes < 40 << 20
            status = await others.status()
            assert unaccounted(status) == 0
        after = await others.settled(2)
        assert tables(after) == tables(before)
        assert unaccounted(after) == 0
        await others.check()


async def test_who_breaks_a_rule_and_never_reads_why_is_forgotten_all_the_same(
    daemon: Daemon, relay: Path
) -> None:
    """Its connection also ends after it has not read for the time limit of a frame."""
    async with neighbours(relay) as others, Wire(relay) as wire:
        await wire.prove()
        await wire.alive()
        count = descriptors(daemon.process.pid)  # one of them is its own
        await wire.send(wire.declare(0, Kind.REQUEST, "nobody"))
        wire.stop_reading()
        # Send enough calls that the answers fill its socket, and then commit the offence.
        requests = (data_frame(Kind.REQUEST, bytes(8), hop=hop) for hop in range(6000))
        await wire.send(*requests)
        await wire.send(b"\0\0\0\0")
        await others.settled(2)
        assert await others.caller.status()
        await eventually(lambda: descriptors(daemon.process.pid) < count)
        await others.check()


async def test_a_reader_that_stalls_loses_only_its_own_messages_and_is_told_how_many(
    relay: Path,
) -> None:
    """It stays connected, no other session waits for it, and the account counts its losses."""
    async with neighbours(relay) as others:
        before = await others.status()
        async with Wire(relay) as wire, client(relay, OTHER_KEY) as publisher:
            await wire.prove()
            await wire.send(frames.Subscribe(1, "stalled", [OTHER_KEY.key_id]))
            await wire.expect(frames.Ack)
            wire.stop_reading()
            total = 120
            for _ in range(total):
                await publisher.publish("stalled", bytes(1_000_000))
            await publisher.flush(timeout=PATIENCE_S)
            await others.check()
            status = await others.status()
            lost = status["accounts"]["dropped"].get("slow receiver", 0)
            assert 0 < lost < total
            assert unaccounted(status) == 0
            wire.read_again()
            seen = 0
            while seen < total - lost:
                kind, _ = await wire.frame()
                seen += kind == Kind.PUBLISH
            # The count follows when there is room again.
            reported = 0
            while reported < lost:
                gap = await wire.expect(frames.Gap)
                reported += gap.count
            assert reported == lost
        after = await others.settled(2)
        assert unaccounted(after) == 0
        assert tables(after) == tables(before)


async def test_a_thousand_connections_at_once_are_all_served(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this process may open {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    daemon = Daemon(tmp_path)
    relay = daemon.socket
    with daemon:
        async with neighbours(relay) as others, contextlib.AsyncExitStack() as stack:
            before = await others.status()

            async def one(number: int) -> Wire:
                wire = await stack.enter_async_context(Wire(relay))
                await wire.prove()
                topic = f"t.{number}"
                await wire.send(frames.Subscribe(1, topic, [OTHER_KEY.key_id]))
                assert (await wire.expect(frames.Ack)).error == ""
                await wire.send(
                    wire.declare(0, Kind.PUBLISH, topic), wire.sealed(Kind.PUBLISH, topic)
                )
                await wire.data(Kind.PUBLISH)
                return wire

            wires = await asyncio.gather(*map(one, range(1000)))
            status = await others.status()
            assert len(status["sessions"]) == 1002
            assert status["turned_away"] == before["turned_away"]
            await others.check()
            for wire in wires:
                wire.writer.close()
            after = await others.settled(2)
            assert tables(after) == tables(before)
            assert unaccounted(after) == 0


async def test_sessions_over_the_bound_are_turned_away_and_places_come_back(tmp_path: Path) -> None:
    # One user may have four of five.
    with Daemon(tmp_path, settings={"IRIS_RELAY_MAX_SESSIONS": "5"}) as daemon:
        async with neighbours(daemon.socket) as others:
            async with Wire(daemon.socket) as one, Wire(daemon.socket) as two:
                await one.greet()
                await two.greet()
                async with Wire(daemon.socket) as third:
                    await third.gone()
                await others.check()
                assert (await others.status())["turned_away"] == 1
            await others.settled(2)
            async with Wire(daemon.socket) as wire:
                await wire.greet()


async def test_without_descriptors_the_relay_serves_those_it_has_and_accepts_again(
    tmp_path: Path,
) -> None:
    with Daemon(tmp_path) as daemon:
        async with neighbours(daemon.socket) as others, contextlib.AsyncExitStack() as stack:
            few = descriptors(daemon.process.pid) + 16
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (few, few))
            crowd = [await stack.enter_async_context(Wire(daemon.socket)) for _ in range(40)]
            for wire in crowd:
                await wire.send(frames.Hello(1, 0))
            welcomes = [asyncio.create_task(wire.expect(frames.Welcome)) for wire in crowd]
            await eventually(lambda: daemon.said("sessions.no_descriptors"))
            await others.check()
            served = [wire for wire, welcome in zip(crowd, welcomes, strict=True) if welcome.done()]
            assert 0 < len(served) < 30
            for _ in range(5):
                await others.check()
            # The others wait in the backlog, and are accepted when a session ends.
            for wire in served:
                wire.writer.close()
            await eventually(lambda: sum(welcome.done() for welcome in welcomes) >= 2 * len(served))
            await others.check()
            for welcome in welcomes:
                welcome.cancel()
            await asyncio.gather(*welcomes, return_exceptions=True)
        async with client(daemon.socket) as fresh:
            assert iris.Client is type(fresh)
            assert unaccounted(await fresh.status()) == 0


async def test_a_relay_with_few_descriptors_admits_as_many_sessions_as_fit(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with Daemon(tmp_path, before=few) as daemon:
        async with neighbours(daemon.socket) as others, contextlib.AsyncExitStack() as stack:
            for _ in range(64):
                await stack.enter_async_context(Wire(daemon.socket))
            await eventually(lambda: daemon.said("sessions.full"))
            await others.check()
            assert descriptors(daemon.process.pid) <= 48  # a quarter is for other things
            assert (await others.status())["turned_away"] > 0
        assert not daemon.said("sessions.no_descriptors")
