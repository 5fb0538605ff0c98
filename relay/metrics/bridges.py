"""Metrics of bridges, served by a thread of the bridge's process."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from iris.metrics.page import Names, Page, Spec
from relay.metrics.server import LOOK_S, Server
from relay.metrics.supervisor import listen
from relay.net.addresses import show

log = logging.getLogger(__name__)

FRESH_S: Final = 1.0
"""How long a page is used again: a flood of scrapers must not take the time of the bridge."""
MAX_CAUSES: Final = 100

SPECS: Final = (
    Spec("iris_bridge_ready", "1 if everything is open and serves.", ("bridge",)),
    Spec("iris_bridge_peers", "Programs of the other protocol that are connected, by socket.", ("bridge", "socket")),
    Spec("iris_bridge_messages_total", "Messages from and to programs of the other protocol, by socket and direction (in, out).", ("bridge", "socket", "direction")),
    Spec("iris_bridge_losses_total", "Messages lost, and other failures, by socket and cause.", ("bridge", "socket", "cause")),
    Spec("iris_bridge_connections_cut_total", "Connections to this page that were cut, because they were slow or too many.", ("bridge",)),
)  # fmt: skip


class BridgeSource(Collector):
    """The page of one bridge. `fill` sets its values; it is called in the thread of a scraper."""

    def __init__(
        self, bridge: str, ready: Callable[[], bool], fill: Callable[[Page, str, Names], None]
    ) -> None:
        self.cut_connections = 0
        self._bridge = bridge
        self._ready = ready
        self._fill = fill
        self._causes = Names(MAX_CAUSES)
        self._lock = threading.Lock()
        self._made_s = float("-inf")
        self._page = b""

    def page(self) -> bytes:
        """Return the page of metrics."""
        with self._lock:
            if time.monotonic() - self._made_s >= FRESH_S:
                self._page = generate_latest(self)
                self._made_s = time.monotonic()
            return self._page

    def not_live(self) -> str:
        """Return "": a bridge that answers is alive."""
        return ""

    def not_ready(self) -> str:
        """Return why the bridge does not serve yet; "" if it does."""
        return "" if self._ready() else "not every socket serves yet"

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        page = Page(SPECS)
        page.set("iris_bridge_ready", self._ready(), self._bridge)
        page.set("iris_bridge_connections_cut_total", self.cut_connections, self._bridge)
        self._fill(page, self._bridge, self._causes)
        return page.families()


@contextlib.contextmanager
def serving(address: str, source: BridgeSource) -> Iterator[None]:
    """Serve a bridge's page at HOST:PORT until the block ends; "" serves none. Raises ConfigError."""
    if not address:
        yield
        return
    listener = listen(address)
    server = Server(listener, source)
    thread = threading.Thread(
        target=server.serve_forever, args=(LOOK_S,), name="iris-metrics", daemon=True
    )
    thread.start()
    try:
        host, port = listener.getsockname()[:2]
        log.info("bridge.metrics", extra={"fields": {"address": show(host, port)}})
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
