"""A dashboard from start to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from importlib.metadata import version
from typing import Final

from iris.client import Client
from iris.dashboard.actions import Actions
from iris.dashboard.app import Dashboard
from iris.dashboard.feed import Feed
from iris.watch import Watch
from iris.web import server
from iris.web.tokens import Tokens

INTERVAL_S: Final = 1.0
"""Time between two states of the network, so that a page shows a lost relay within 3 s."""


async def serve(
    listener: socket.socket, watch: Watch, tokens: Tokens, stop: asyncio.Event, *, hosts: Collection[str] = (),
    connect: Callable[[], Client] | None,
) -> None:  # fmt: skip
    """Serve pages at a listening socket, which is closed at the end, until `stop` is set. No relay needs to be there.

    `connect` makes the client of the page's buttons; without it the page has none.
    """
    feed = Feed(watch)
    hello = {"version": version("iris-messaging"), "read_only": connect is None}
    actions = Actions(connect) if connect is not None else None
    dashboard = Dashboard(feed, tokens, actions, hosts=hosts, hello=hello)
    async with watch, asyncio.TaskGroup() as group:
        following = group.create_task(feed.run(), name="dashboard feed")
        closing = group.create_task(_close(feed, stop), name="dashboard stop")
        try:
            await server.serve(dashboard.guard, listener, stop)
        finally:
            following.cancel()
            closing.cancel()
            if actions is not None:
                await actions.close()


async def _close(feed: Feed, stop: asyncio.Event) -> None:
    await stop.wait()
    feed.close()
