"""Workers that are killed while they wait: nothing is handed to them, and nothing counts as delivered that nobody had."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from adversity.kit import eventually
from integration.test_stream_links import client, created, relays  # noqa: F401 - a fixture

from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)

TESTS = str(Path(__file__).resolve().parents[1])
WAIT = """
import asyncio, sys
from adversity.kit import client

async def main(socket, name):
    async with client(socket) as party, party.streams.consumer(
        "orders", name, group=True, ack_timeout=60.0, max_deliver=2
    ) as work:
        print("waits", flush=True)
        async for message in work:
            print(message.payload.decode(), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


async def waiting_worker(relay: Relay, name: str) -> asyncio.subprocess.Process:
    """Start a worker in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAIT, str(relay.config.socket_path), name,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": TESTS},
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"waits\n"
    return process


def polls(keeper: Relay) -> int:
    """How many calls the store was handed and has not answered."""
    return sum(len(session.handed) for session in keeper.router.sessions.values())


@pytest.fixture(params=["same relay", "over a link"])
def where(request: pytest.FixtureRequest, relays: tuple[Relay, Relay]) -> tuple[Relay, Relay]:  # noqa: F811
    keeper, other = relays
    return keeper, keeper if request.param == "same relay" else other


async def test_killed_workers_that_waited_are_handed_nothing(where: tuple[Relay, Relay]) -> None:
    keeper, theirs = where
    async with client(keeper.config.socket_path) as party:
        await created(party, "orders")
        await party.streams.append("orders", b"first")
        async with party.streams.consumer(
            "orders", "work", group=True, ack_timeout=60.0, max_deliver=2
        ) as work:
            first = await asyncio.wait_for(anext(work), 20.0)
            work.ack(first)
            await work.flush()
            for number in range(4):
                process = await waiting_worker(theirs, "work")
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
            async with party.streams.consumer("orders", "work", group=True) as gone:
                waiting = asyncio.create_task(anext(gone))  # type: ignore[arg-type]
                await eventually(lambda: polls(keeper))
                waiting.cancel()
            await eventually(lambda: not polls(keeper))
            await party.streams.append("orders", b"%d" % number)
            async with party.streams.consumer("orders", "work", group=True) as work:
                message = await asyncio.wait_for(anext(work), 20.0)
                assert (message.payload, message.deliveries) == (b"%d" % number, 1)
                work.ack(message)
                await work.flush()
