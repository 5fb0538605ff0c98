"""A stream of another site is used right after it was created, before this site knows of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from integration.test_stream_links import created
from support.gateways import World, joined
from support.relays import client
from support.waiting import eventually

import iris
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def sites(tmp_path: Path) -> AsyncIterator[tuple[Relay, Relay]]:
    """Two sites; the first has a store."""
    world = World(tmp_path)
    eu = await world.start("eu", world.peer("us"), data=tmp_path / "data")
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    yield eu, us
    for relay in (us, eu):
        await world.stop(relay)


async def test_appends_reads_and_descriptions_wait_until_the_other_site_is_known_to_have_it(
    sites: tuple[Relay, Relay],
) -> None:
    eu, us = sites
    async with client(eu.config.socket_path) as owner, client(us.config.socket_path) as far:
        for name in ("appended", "described", "read"):
            await created(owner, name)
            if name == "appended":
                assert await far.streams.append(f"eu:{name}", b"first") == 0
            elif name == "described":
                assert (await far.streams.describe(f"eu:{name}")).name == name
            else:
                await owner.streams.append(name, b"first")
                async with far.streams.read(f"eu:{name}", "first", follow=False) as reader:
                    assert [message.payload async for message in reader] == [b"first"]


async def test_a_stream_that_another_site_does_not_have_is_not_waited_for_long(
    sites: tuple[Relay, Relay],
) -> None:
    _, us = sites
    async with client(us.config.socket_path) as far:
        until_s = time.monotonic() + 30.0
        with pytest.raises(iris.NoStream):
            await far.streams.append("eu:ordres", b"", timeout=60.0)
        with pytest.raises(iris.NoStream):
            await far.streams.describe("eu:ordres", timeout=0.2)
        assert time.monotonic() < until_s, "it did not wait until its timeout"
