"""Streams over two relays: the store is at one host, who writes and reads is at the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.links import start
from support.relays import client
from support.waiting import eventually

from iris.errors import NoStream, StreamUnavailable
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def relays(tmp_path: Path) -> AsyncIterator[tuple[Relay, Relay]]:
    """Two linked relays; the first one was given a directory for streams."""
    keeper = await start(tmp_path / "one", data=tmp_path / "data")
    other = await start(tmp_path / "two", keeper)
    await eventually(lambda: keeper.router.links and other.router.links)
    yield keeper, other
    await other.stop(drain_s=0)
    await keeper.stop(drain_s=0)


async def created(party: Any, name: str, **options: Any) -> Any:
    """Create a stream as soon as the store is up."""
    async with asyncio.timeout(20.0):
        while True:
            try:
                return await party.streams.create(name, **options)
            except StreamUnavailable:
                await asyncio.sleep(0.05)


async def test_a_stream_is_written_and_read_from_another_host(relays: tuple[Relay, Relay]) -> None:
    keeper, other = relays
    async with client(other.config.socket_path) as far, client(keeper.config.socket_path) as near:
        made = await created(far, "orders", topic="orders.>")
        assert made.key_ids
        offsets = await far.streams.append_many("orders", [b"%d" % n for n in range(2000)])
        assert offsets == list(range(2000))
        await far.publish("orders.eu", b"published far away")
        big = bytes(far.message_limit)
        assert await far.streams.append("orders", big, timeout=20.0) in (2000, 2001)
        found = []
        async with asyncio.timeout(20.0), near.streams.read("orders") as reader:
            while len(found) < 2002:
                found += await reader.batch()
        async with far.streams.read("orders", follow=False) as reader:
            again = [message async for message in reader]
        assert [m.payload for m in again] == [m.payload for m in found]
        assert sorted(m.payload for m in again[2000:]) == sorted([big, b"published far away"])
        async with far.streams.consumer("orders", "far", shared=True) as work:
            handled = 0
            while handled < 2002:
                batch = await work.batch()
                work.ack(*batch)
                handled += len(batch)
            await work.flush()
        assert [(c.name, c.lag) for c in await near.streams.consumers("orders")] == [("far", 0)]


async def test_a_killed_store_is_started_again_and_has_everything(
    relays: tuple[Relay, Relay],
) -> None:
    keeper, other = relays
    async with client(other.config.socket_path) as far:
        await created(far, "orders")
        await far.streams.append("orders", b"0")
        assert keeper._store is not None
        for number in range(1, 4):
            pid = keeper._store.status()["pid"]
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
            assert await far.streams.append("orders", b"%d" % number, timeout=20.0) == number
            assert keeper._store.status()["pid"] != pid
        async with far.streams.read("orders", follow=False) as reader:
            assert [m.payload async for m in reader] == [b"0", b"1", b"2", b"3"]


async def test_the_store_ends_with_its_relay(tmp_path: Path) -> None:
    relay = await start(tmp_path / "one", data=tmp_path / "data")
    assert relay._store is not None
    async with client(relay.config.socket_path) as party:
        await created(party, "orders")
        pid = relay._store.status()["pid"]
        assert isinstance(pid, int)
        reader = party.streams.read("orders", patience=0.5)
        waiting = asyncio.create_task(reader.batch())
        await asyncio.sleep(0.1)
        # Who waits at a stream holds up nobody.
        async with asyncio.timeout(10.0):
            await relay.stop()
        with pytest.raises((StreamUnavailable, NoStream)):
            await waiting
        await reader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_second_store_of_one_directory_is_refused_and_names_the_first(
    tmp_path: Path,
) -> None:
    relay = await start(tmp_path / "one", data=tmp_path / "data")
    assert relay._store is not None
    async with client(relay.config.socket_path) as party:
        await created(party, "orders")
        command = [*relay._store._command[:-1]]
        second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await second.communicate()
        assert second.returncode == 2
        assert f"process {relay._store.status()['pid']}" in said.decode()
    await relay.stop(drain_s=0)
