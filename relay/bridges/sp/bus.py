"""BUS: a message of a bus peer is broadcast in the cluster, and a broadcast of the cluster reaches all bus peers."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import iris
from relay.bridges.sp.bridge import Backlog, Bridge

HEADER: Final = "sp-bridge"
"""Header of broadcasts that came over a bridge: the id of that bridge, which ignores its own broadcasts."""


class BusBridge(Bridge):
    """Forwards in both directions, or in one.

    Two bridges of one cluster must not be peers of one bus. SP messages do not record their path, so
    they would circulate for ever.
    """

    async def run(self) -> None:
        """Forward until cancelled."""
        self._mark = os.urandom(8).hex()
        async with asyncio.TaskGroup() as group:
            if self.config.direction != "out":
                backlog = Backlog(self, self._broadcast)
                group.create_task(self._read(backlog))
                group.create_task(backlog.drain())
            if self.config.direction != "in":
                group.create_task(self._serve())

    async def _read(self, backlog: Backlog) -> None:
        async for data in self.incoming():
            backlog.add(self.config.cluster, data)

    async def _broadcast(self, cluster: str, data: bytes) -> None:
        await self.client.broadcast(cluster, data, headers={HEADER: self._mark})

    async def _serve(self) -> None:
        service = iris.Service(self.config.cluster)

        @service.on_broadcast
        def forward(message: iris.Message) -> None:
            if (message.headers or {}).get(HEADER) != self._mark:  # else it came from this bus
                self.cast(message.payload)

        await self.serve(service)
