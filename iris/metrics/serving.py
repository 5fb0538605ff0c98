"""The page of metrics of a process, for as long as its clients want it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any, Final

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry

from iris.client import Client
from iris.errors import ConfigError
from iris.logs import logger
from iris.metrics.client import ClientCollector

log = logger(__name__)

PORTS: Final = 64
"""Ports that are tried, from the one asked for: as many processes of one service have a page on a host."""


class _Page:
    """The page of one registry: its server, its collector, and how many users it has."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises ConfigError if no port is free, ValueError if the registry has a collector of clients already."""
        self._registry = registry
        self.collector = ClientCollector(registry=registry)
        try:
            self._server, self._thread = _start(registry, host, port)
        except BaseException:
            registry.unregister(self.collector)
            raise
        self.port: int = self._server.server_port
        self.users = 0

    def stop(self) -> None:
        """End the server. It may take half a second."""
        self._registry.unregister(self.collector)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_pages: Final[dict[CollectorRegistry, _Page]] = {}
"""Registry -> its page, while somebody uses it."""


@contextlib.asynccontextmanager
async def serve(
    client: Client, port: int, host: str = "127.0.0.1", *, registry: CollectorRegistry = REGISTRY
) -> AsyncIterator[int]:
    """Serve the metrics of this process at `http://host:port/metrics` inside the block, and yield the port.

    It is made for the lifespan of a service: `async with iris.metrics.serve(client, 9100): yield`. A process has one
    page, however many of its services ask for it. If the port is in use, the next free one is taken, up to 63 higher:
    so each process of `iris run --workers` has a page, and the log says where (event `metrics.serving`). Port 0 stands
    for any free one.

    Raises:
        ConfigError: none of these ports is free, or the address is not one of this host.
        ValueError: `registry` has a `ClientCollector` already; use its `add`.
    """
    page = _pages.get(registry)
    if page is None:
        page = _pages[registry] = _Page(registry, host, port)
        log.info("metrics.serving", extra={"fields": {"address": f"{host}:{page.port}"}})
    page.users += 1
    page.collector.add(client)
    try:
        yield page.port
    finally:
        page.collector.discard(client)
        page.users -= 1
        if not page.users:
            del _pages[registry]
            await asyncio.to_thread(page.stop)


def _start(registry: CollectorRegistry, host: str, port: int) -> tuple[Any, Any]:
    last = port + PORTS if port else 1
    for each in range(port, last):
        try:
            return prometheus_client.start_http_server(each, host, registry)
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"metrics: cannot listen at {host}:{each}: {err.strerror or err}"
                ) from err
    raise ConfigError(f"metrics: the ports {port} to {last - 1} of {host} are all in use; choose another one")  # fmt: skip
