"""The rules for every source of sightings, whatever it searches."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

import pytest

from relay.discovery import Discovery, Sighting
from relay.discovery.seeds import SeedDiscovery
from relay.discovery.zeroconf import MulticastDiscovery

WAIT_S = 10.0


async def never(name: str, port: int) -> list[str]:
    """Look up a name at a name server that does not answer."""
    await asyncio.Event().wait()
    return []


def multicast() -> Discovery:
    return MulticastDiscovery(os.urandom(16), (os.urandom(16),), 7, interfaces=["127.0.0.1"])


def multicast_without_interfaces() -> Discovery:
    return MulticastDiscovery(os.urandom(16), (os.urandom(16),), 7, interfaces=[])


def seeds() -> Discovery:
    return SeedDiscovery(["silent.example:1"], resolver=never)


def no_seeds() -> Discovery:
    return SeedDiscovery([])


SOURCES = [multicast, multicast_without_interfaces, seeds, no_seeds]
every_source = pytest.mark.parametrize("source", SOURCES)
Source = Callable[[], Discovery]


async def read(discovery: Discovery, began: asyncio.Event) -> list[Sighting]:
    sightings = discovery.sightings()
    began.set()
    return [each async for each in sightings]


async def begin(discovery: Discovery) -> asyncio.Task[list[Sighting]]:
    """Start a reader; return when the search has begun."""
    began = asyncio.Event()
    reader = asyncio.create_task(read(discovery, began))
    await began.wait()
    return reader


def others() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


@every_source
async def test_closing_ends_the_reader_and_leaves_no_task(source: Source) -> None:
    discovery = source()
    reader = await begin(discovery)
    async with asyncio.timeout(WAIT_S):
        await discovery.close()
        assert await reader == []
    # cancelled tasks need one turn of the loop to end
    await asyncio.sleep(0)
    assert others() == set()


@every_source
async def test_closing_again_and_at_once_is_harmless(source: Source) -> None:
    discovery = source()
    reader = await begin(discovery)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(discovery.close(), discovery.close())
        await discovery.close()
        await reader


@every_source
async def test_what_never_began_can_be_closed_and_finds_nothing_then(source: Source) -> None:
    discovery = source()
    await discovery.close()
    assert [each async for each in discovery.sightings()] == []
    assert others() == set()


@every_source
async def test_a_cancelled_reader_can_be_followed_by_another(source: Source) -> None:
    discovery = source()
    reader = await begin(discovery)
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    reader = await begin(discovery)
    async with asyncio.timeout(WAIT_S):
        await discovery.close()
        await reader


@every_source
async def test_a_cancelled_close_still_leaves_nothing_open(source: Source) -> None:
    discovery = source()
    reader = await begin(discovery)
    closing = asyncio.create_task(discovery.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait({closing})
        await discovery.close()
        await reader
    await asyncio.sleep(0)
    assert others() == set()


@every_source
async def test_its_status_is_json_and_says_where_it_searched(source: Source) -> None:
    discovery = source()
    reader = await begin(discovery)
    status = discovery.status()
    assert json.loads(json.dumps(status)) == status
    assert isinstance(status["tried"], list)
    await discovery.close()
    await reader
    assert json.dumps(discovery.status())
