"""The metrics of an SP bridge."""

from __future__ import annotations

from iris.metrics.page import Names, Page
from relay.bridges.sp.process import SpBridge
from relay.metrics.bridges import BridgeSource


def source(bridge: SpBridge) -> BridgeSource:
    """Return the page of an SP bridge. Its entries have names in the configuration, so they need no limit."""

    def ready() -> bool:
        return all(each.ready.is_set() for each in bridge.bridges)

    def fill(page: Page, kind: str, causes: Names) -> None:
        for each in list(bridge.bridges):
            entry, tally = each.config.label, each.tally
            page.set("iris_bridge_peers", len(each.socket.peers), kind, entry)
            page.set("iris_bridge_messages_total", tally.from_sp, kind, entry, "in")
            page.set("iris_bridge_messages_total", tally.to_sp, kind, entry, "out")
            for cause, count in dict(tally.causes).items():
                page.add("iris_bridge_losses_total", count, kind, entry, causes(cause))
            expired = each.client.counters.get("expired", 0)  # in the member's queue
            page.add("iris_bridge_losses_total", expired, kind, entry, "expired")

    return BridgeSource("sp", ready, fill)
