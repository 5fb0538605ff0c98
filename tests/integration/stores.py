"""A cluster in this process with a store, on a directory of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from iris.testing import LocalCluster
from relay.store.process import StoreProcess


class StoredCluster(LocalCluster):
    """A LocalCluster with one store; `start_store` and `stop_store` as often as wanted."""

    def __init__(self, directory: Path, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.directory = directory
        self.store: StoreProcess
        self._running: asyncio.Task[None] | None = None

    async def start_store(self) -> None:
        """Start a store and wait until the relay knows of its streams."""
        self.store = StoreProcess(self.directory, self._connect, entropy=self._entropy)
        self.store.open()
        self._running = asyncio.create_task(self.store.run())
        await self.store.up.wait()
        await self.settle()

    async def stop_store(self) -> None:
        """Stop it as SIGTERM does."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self.store.close()

    async def __aenter__(self) -> StoredCluster:
        await super().__aenter__()
        await self.start_store()
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self.stop_store()
        await super().__aexit__(*args)


@asynccontextmanager
async def stored(directory: Path) -> AsyncIterator[Any]:
    """Yield (cluster, client, other client)."""
    async with StoredCluster(directory) as cluster, cluster.client() as client, cluster.client() as other:
        yield cluster, client, other
