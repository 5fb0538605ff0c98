"""The metrics of an HTTP bridge. Its "sockets" are the verbs, and event streams count as connected programs."""

from __future__ import annotations

from iris.metrics.page import Names, Page
from relay.bridges.http.process import HttpBridge
from relay.metrics.bridges import BridgeSource


def source(bridge: HttpBridge) -> BridgeSource:
    """Return the page of an HTTP bridge."""
    application = bridge.application

    def fill(page: Page, kind: str, causes: Names) -> None:
        page.set("iris_bridge_peers", application.topics.readers, kind, "subscribe")
        page.set("iris_bridge_peers", application.streams.readers, kind, "read")
        for verb, count in dict(application.asked).items():
            page.set("iris_bridge_messages_total", count, kind, verb, "in")
        page.set("iris_bridge_messages_total", application.topics.events, kind, "subscribe", "out")
        page.set("iris_bridge_messages_total", application.streams.events, kind, "read", "out")
        for socket, lost in (
            ("http", application.failed),
            ("http", application.room.refused),
            ("http", bridge.guard.denied),
            ("http", bridge.refused),
            ("subscribe", application.topics.lost),
            ("read", application.streams.lost),
        ):
            for cause, count in dict(lost).items():
                page.add("iris_bridge_losses_total", count, kind, socket, causes(cause))

    return BridgeSource("http", lambda: bridge.serving, fill)
