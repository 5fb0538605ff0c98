"""A cluster in this process with a store, two clients of it, and what is read of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import iris
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey, public_id
from iris.testing import LocalCluster
from relay.store.process import StoreProcess


@asynccontextmanager
async def stored(directory: Path) -> AsyncIterator[Any]:
    """Yield (cluster, client, other client)."""
    cluster = LocalCluster(data=directory)
    async with cluster, cluster.client() as client, cluster.client() as other:
        yield cluster, client, other


class Store:
    """One more store of a cluster, which a test stops and starts."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self._cluster = cluster
        self.directory = directory
        self.process: StoreProcess
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        cluster = self._cluster
        self.process = StoreProcess(
            self.directory, cluster._connect, label=self.directory.name, entropy=cluster._entropy
        )
        self.process.open()
        self._task = asyncio.create_task(self.process.run(), name="iris-store")
        await self.process.up.wait()
        await cluster.settle()

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.process.close()

    @property
    def id(self) -> str:
        return public_id(self.process.store.key.public_key).hex()


@asynccontextmanager
async def two_stores(directory: Path) -> AsyncIterator[Any]:
    """Yield (cluster, client, other client, the second store)."""
    async with stored(directory / "first") as (cluster, client, other):
        second = Store(cluster, directory / "second")
        await second.start()
        try:
            yield cluster, client, other, second
        finally:
            await second.stop()


@asynccontextmanager
async def two_keys(cluster: Any, *, promoted: bool = False) -> AsyncIterator[Any]:
    """Yield (old key, new key, client with both, client with the new one alone); the new one may be `promoted`."""
    old, new = cluster.keyring.for_cluster("orders")[0], ClusterKey(bytes(range(32)))
    both = Keyring.single(old).add("orders", new)
    both = both.promote("orders", new.key_id) if promoted else both
    async with (
        cluster.client(keyring=both) as rotating,
        cluster.client(keyring=Keyring.single(new)) as last,
    ):
        yield old, new, rotating, last


async def created(client: iris.Client, second: Store) -> str:
    """Create a stream whose partition 0 is at the first store and partition 1 at the second; return its name."""
    for number in range(20):
        name = f"orders{number}"
        await client.streams.create(name, partitions=2)
        infos = await client.streams.partitions(name)
        if [info.store == second.id for info in infos] == [False, True]:
            return name
        await client.streams.delete(name)
    raise AssertionError("placement depends on the stream's name")


async def whole(
    client: iris.Client, name: str = "orders", start: Any = "first", **options: Any
) -> list[Any]:
    """Return all messages of a stream."""
    async with client.streams.read(name, start, follow=False, **options) as reader:
        return [message async for message in reader]
