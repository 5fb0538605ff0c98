"""A cluster in this process with a store, and two clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from iris.testing import LocalCluster


@asynccontextmanager
async def stored(directory: Path) -> AsyncIterator[Any]:
    """Yield (cluster, client, other client)."""
    cluster = LocalCluster(data=directory)
    async with cluster, cluster.client() as client, cluster.client() as other:
        yield cluster, client, other
