"""Mirrors for tests: another store, a copy up to the end, what a copy has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import structs
from support.waiting import PATIENCE_S

import iris
from iris.testing import LocalCluster
from iris.wire.streams import Fetch, Fetched
from relay.store.process import StoreProcess


@asynccontextmanager
async def second_store(cluster: LocalCluster, directory: Path) -> AsyncIterator[StoreProcess]:
    """Yield another store of the cluster."""
    os.makedirs(directory, exist_ok=True)
    store = StoreProcess(directory, cluster._connect, entropy=os.urandom)
    store.open()
    running = asyncio.create_task(store.run())
    try:
        await store.up.wait()
        await cluster.settle()
        yield store
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def whole(client: iris.Client, name: str, start: Any = "first") -> tuple[list[Any], Any]:
    """Return all messages and gaps of a stream."""
    async with client.streams.read(name, start, follow=False) as reader:
        return [message async for message in reader], list(reader.gaps)


async def copy_all(client: iris.Client, source: str, name: str, **options: Any) -> int:
    """Copy up to the end; return how many messages that were."""
    async with client.streams.mirror(
        source, name, follow=False, patience=10.0, **options
    ) as mirror:
        await mirror.run()
        assert mirror.lag == 0
        return mirror.copied


async def same(client: iris.Client, source: str, name: str) -> None:
    """Assert that a copy has what its source has: messages with all that is told of them but their log, and gaps."""
    messages, gaps = await whole(client, source)
    copies, copied_gaps = await whole(client, name)
    assert {message.stream for message in copies} <= {name}
    apart = [structs.replace(one, stream="", uuid="") for one in (*messages, *copies)]
    assert (apart[: len(messages)], gaps) == (apart[len(messages) :], copied_gaps)


async def fetched(client: iris.Client, name: str) -> list[Any]:
    """Return the items of a stream as its store tells them."""
    call = Fetch(0, 1 << 20)
    found = await client.streams._stores.ask_stream(name, "", call, Fetched, timeout=5.0)
    return found.items


async def come_to(client: iris.Client, name: str, offset: int) -> None:
    """Return when a stream has come to an offset."""
    async with asyncio.timeout(PATIENCE_S):
        while (await client.streams.describe(name, timeout=PATIENCE_S)).end < offset:  # noqa: ASYNC110 - a poll over processes
            await asyncio.sleep(0.005)


async def log_of(cluster: LocalCluster, client: iris.Client, name: str) -> Any:
    """Return the log of a stream at its store."""
    uuid = (await client.streams.describe(name)).uuid
    return cluster.store.store.streams[bytes.fromhex(uuid)].log
