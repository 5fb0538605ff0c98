"""The metrics of a bridge to the first Iris."""

from __future__ import annotations

from iris.metrics.page import Names, Page
from relay.bridges.iris1.bridge import Bridge
from relay.metrics.bridges import BridgeSource


def source(bridge: Bridge) -> BridgeSource:
    """Return the page of a bridge to the first Iris. It has no names of sockets, and does not count messages."""

    def fill(page: Page, kind: str, causes: Names) -> None:
        page.set("iris_bridge_peers", len(bridge.connections), kind, "")
        for cause, count in dict(bridge.counters).items():
            page.add("iris_bridge_losses_total", count, kind, "", causes(cause))

    return BridgeSource("iris1", lambda: True, fill)
