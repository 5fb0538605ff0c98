"""Workers are killed while they wait: nothing is dispatched to them, nor counted as delivered without a receiver."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from integration.test_stream_links import client, created, relays  # noqa: F401 - a fixture
from support.gateways import World, joined
from support.links import NETWORK, Host, start
from support.stores import Rig
from support.waiting import eventually

import iris
from iris.errors import NoStream
from relay.daemon import Relay
from relay.net.addresses import show

pytestmark = pytest.mark.timeout(60)

TESTS = str(Path(__file__).resolve().parents[1])
WAIT = """
import asyncio, sys
from adversity.kit import client

async def main(socket, stream, name):
    async with client(socket) as party, party.streams.consumer(
        stream, name, shared=True, ack_timeout=60.0, max_deliver=2
    ) as work:
        print("waits", flush=True)
        async for message in work:
            print(message.payload.decode(), flush=True)

asyncio.run(main(*sys.argv[1:4]))
"""


def arguments(relay: Relay) -> tuple[str, ...]:
    """What a worker process is told: another site's stream is named with its site."""
    stream = "eu:orders" if relay.config.site == "us" else "orders"
    return str(relay.config.socket_path), stream, "work"


async def waiting_worker(relay: Relay) -> asyncio.subprocess.Process:
    """Start a worker in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAIT, *arguments(relay),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": TESTS},
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"waits\n"
    return process


def polls(keeper: Relay) -> int:
    """How many calls the store was handed and has not answered."""
    return sum(len(session.in_flight) for session in keeper.router.sessions.values())


@pytest.fixture(params=["same relay", "over a link", "over gateways"])
async def where(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Relay, Relay]]:
    """The relay that has the store, and the one of the workers that are killed."""
    if request.param == "over gateways":
        world = World(tmp_path)
        keeper = await world.start("eu", world.peer("us"), data=tmp_path / "data")
        other = await world.start("us", world.peer("eu", keeper))
        await eventually(lambda: joined((keeper, other)))
    else:
        keeper = other = await start(tmp_path / "one", data=tmp_path / "data")
        if request.param == "over a link":
            other = await start(tmp_path / "two", keeper)
            await eventually(lambda: keeper.router.links and other.router.links)
    yield keeper, other
    if other is not keeper:
        await other.stop(drain_s=0)
    await keeper.stop(drain_s=0)


async def test_killed_workers_that_waited_are_handed_nothing(where: tuple[Relay, Relay]) -> None:
    keeper, theirs = where
    async with client(keeper.config.socket_path) as party:
        await created(party, "orders")
        await party.streams.append("orders", b"first")
        async with party.streams.consumer(
            "orders", "work", shared=True, ack_timeout=60.0, max_deliver=2
        ) as work:
            first = await asyncio.wait_for(anext(work), 20.0)
            work.ack(first)
            await work.flush()
            for number in range(4):
                process = await waiting_worker(theirs)
                await eventually(lambda: polls(keeper))
                process.kill()
                await process.wait()
                await eventually(lambda: not polls(keeper))
                await party.streams.append("orders", b"%d" % number)
                message = await asyncio.wait_for(anext(work), 20.0)
                assert (message.payload, message.deliveries) == (b"%d" % number, 1)
                work.ack(message)
                await work.flush()
        assert [c.dead for c in await party.streams.consumers("orders")] == [0]


async def test_a_worker_that_closes_takes_its_waiting_call_with_it(
    relays: tuple[Relay, Relay],  # noqa: F811
) -> None:
    keeper, _ = relays
    async with client(keeper.config.socket_path) as party:
        await created(party, "orders")
        for number in range(5):
            async with party.streams.consumer("orders", "work", shared=True) as gone:
                waiting = asyncio.create_task(anext(gone))  # type: ignore[arg-type]
                await eventually(lambda: polls(keeper))
                waiting.cancel()
            await eventually(lambda: not polls(keeper))
            await party.streams.append("orders", b"%d" % number)
            async with party.streams.consumer("orders", "work", shared=True) as work:
                message = await asyncio.wait_for(anext(work), 20.0)
                assert (message.payload, message.deliveries) == (b"%d" % number, 1)
                work.ack(message)
                await work.flush()


DIE = """
import asyncio, os, sys
from adversity.kit import client

async def main(socket, stream, name):
    async with client(socket) as party, party.streams.consumer(
        stream, name, shared=True, ack_timeout=0.4, max_deliver=2
    ) as work:
        await anext(work)
        os._exit(0)

for turn in range(int(sys.argv[4])):
    child = os.fork()
    if not child:
        asyncio.run(main(*sys.argv[1:4]))
    _, status = os.waitpid(child, 0)
    print(turn, status, flush=True)
"""


async def first_letter(party: Any) -> iris.StreamMessage | None:
    """Return the first dead letter, if there is one yet."""
    try:
        async with party.streams.read("orders.dead", follow=False) as letters:
            return await anext(aiter(letters), None)
    except NoStream:
        return None


async def test_a_message_that_ends_every_worker_at_once_is_handed_out_ten_times(
    where: tuple[Relay, Relay],
) -> None:
    keeper, theirs = where
    async with client(keeper.config.socket_path) as party:
        await created(party, "orders")
        await party.streams.append("orders", b"deadly")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DIE, *arguments(theirs), "10",
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": TESTS},
        )  # fmt: skip
        said, _ = await process.communicate()
        assert said.splitlines() == [b"%d 0" % turn for turn in range(10)], "it came ten times"
        await party.streams.append("orders", b"good")
        async with party.streams.consumer(
            "orders", "work", shared=True, ack_timeout=0.4, max_deliver=2
        ) as work:
            message = await asyncio.wait_for(anext(work), 20.0)
            assert (message.payload, message.deliveries) == (b"good", 1)
            work.ack(message)
            await work.flush()
        async with asyncio.timeout(20.0):
            while (letter := await first_letter(party)) is None:  # noqa: ASYNC110 - a tick of the store writes it
                await asyncio.sleep(0.05)
        assert letter.payload == b"deadly"
        assert letter.dead is not None
        assert letter.dead.deliveries == 0
        assert "dispatched 10 times" in letter.dead.reason


async def waits_and_gets(party: Any, other: Any, lose: Callable[[], Awaitable[None]]) -> None:
    """A worker that lives gets at once what comes after `lose`, which takes the relay of its waiting call."""
    async with party.streams.consumer(
        "orders", "work", shared=True, ack_timeout=60.0, max_deliver=2
    ) as work:
        for number in range(2):
            waiting = asyncio.create_task(anext(work))  # type: ignore[arg-type]
            await lose()
            await other.streams.append("orders", b"%d" % number, timeout=20.0)
            message = await asyncio.wait_for(waiting, 20.0)
            assert (message.payload, message.deliveries) == (b"%d" % number, 1)
            work.ack(message)
            await work.flush()
    assert [c.dead for c in await other.streams.consumers("orders")] == [0]


async def test_the_relay_of_a_worker_is_killed_and_swallows_nothing(tmp_path: Path) -> None:
    keeper = await start(tmp_path / "one", data=tmp_path / "data")
    assert keeper.links is not None
    there = show(*keeper.links.addresses[0])
    host = Host(tmp_path / "two", "--port", "0", "--join", there, keys=(NETWORK,))
    try:
        with host.daemon:
            await eventually(lambda: keeper.router.links)

            async def lose() -> None:
                await eventually(lambda: polls(keeper))
                host.daemon.process.kill()
                host.daemon.process.wait()
                host.daemon.start()

            async with (
                client(host.daemon.socket) as party,
                client(keeper.config.socket_path) as own,
            ):
                await created(own, "orders")
                await waits_and_gets(party, own, lose)
    finally:
        await keeper.stop(drain_s=0)


async def test_the_relay_of_a_store_is_killed_and_swallows_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_relay()
        await rig.serve()

        async def lose() -> None:
            # Long enough for the call to be at the store; were it not, this turn would show less.
            await asyncio.sleep(0.3)
            rig.end_relay(signal.SIGKILL)
            rig.mark_said()
            rig.start_relay()
            assert await rig.attached()

        async with rig.client() as party:
            await party.streams.create("orders", timeout=20.0)
            await waits_and_gets(party, party, lose)
