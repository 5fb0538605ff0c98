"""A cluster in this process with a store, two clients of it, and what is read of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import iris
from iris.testing import LocalCluster


@asynccontextmanager
async def stored(directory: Path) -> AsyncIterator[Any]:
    """Yield (cluster, client, other client)."""
    cluster = LocalCluster(data=directory)
    async with cluster, cluster.client() as client, cluster.client() as other:
        yield cluster, client, other


async def whole(
    client: iris.Client, name: str = "orders", start: Any = "first", **options: Any
) -> list[Any]:
    """Return all messages of a stream."""
    async with client.streams.read(name, start, follow=False, **options) as reader:
        return [message async for message in reader]
