"""A collector over the counters of clients: what `Client.stats` returns, in Prometheus' form."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from iris import blocking
from iris.client import Client
from iris.errors import Closed
from iris.forks import disable_in_child
from iris.metrics.page import Names, Page, Spec
from iris.stats import Stats

ANSWER_S: Final = 1.0
"""How long a client's event loop may take to give its counters."""
MAX_CLUSTERS: Final = 200
MAX_METHODS: Final = 200
MAX_FILTERS: Final = 200
MAX_CAUSES: Final = 64
OUTCOMES: Final = ("handled", "failed", "refused", "expired")

SPECS: Final = (
    Spec("iris_client_up", "1 if the client's event loop gave its counters; 0 if it was held up for over 1 s, and they are older.", ("client",)),
    Spec("iris_client_connected", "1 while a relay is connected.", ("client",)),
    Spec("iris_client_reconnects_total", "How often a relay was connected again after one was lost or stopped.", ("client",)),
    Spec("iris_client_messages_total", "Messages and answers, by direction (sent, received).", ("client", "direction")),
    Spec("iris_client_bytes_total", "Bytes of connections with relays, by direction (sent, received).", ("client", "direction")),
    Spec("iris_client_dropped_messages_total", "Messages dropped in this process, by cause.", ("client", "cause")),
    Spec("iris_client_losses_total", "Losses reported; one may stand for many messages.", ("client",)),
    Spec("iris_client_failed_handlers_total", "How often a handler or callback raised an exception.", ("client",)),
    Spec("iris_client_held_bytes", "Bytes of publications and broadcasts that wait for a relay.", ("client",)),
    Spec("iris_client_unwritten_bytes", "Bytes in the write buffer of the connection.", ("client",)),
    Spec("iris_client_queued_bytes", "Bytes received and not handled yet, by all subscriptions and services.", ("client",)),
    Spec("iris_subscription_queued_bytes", "Bytes received and not handled yet, by filter and queue group.", ("client", "filter", "group")),
    Spec("iris_subscription_queue_limit_bytes", "Limit of these bytes.", ("client", "filter", "group")),
    Spec("iris_subscription_lost_messages_total", "Messages for a subscription that are known to be lost.", ("client", "filter", "group")),
    Spec("iris_service_running", "Deliveries, bundles of broadcasts and tunnels that are queued or running.", ("client", "cluster")),
    Spec("iris_service_queued_bytes", "Bytes that are queued or running.", ("client", "cluster")),
    Spec("iris_service_calls_total", "Calls of handlers, by outcome (handled, failed, refused, expired).", ("client", "cluster", "kind", "method", "outcome")),
    Spec("iris_service_handler_seconds_total", "Seconds that the timed calls took together.", ("client", "cluster", "kind", "method")),
    Spec("iris_service_timed_calls_total", "Calls that were timed: of plain functions every 16th, of other handlers all.", ("client", "cluster", "kind", "method")),
    Spec("iris_service_handler_max_seconds", "Seconds that the longest timed call took.", ("client", "cluster", "kind", "method")),
)  # fmt: skip


class _Watched:
    """One client, its event loop, and its latest counters."""

    def __init__(self, client: Client | blocking.Client) -> None:
        if isinstance(client, blocking.Client):
            self.client, self.loop = client._client, client._loop
        else:
            self.client, self.loop = client, asyncio.get_running_loop()
        self.label = self.client.config.label
        self.latest: Stats | None = None

    def read(self) -> bool:
        """Take the counters in the thread of the event loop; return False if it does not answer.

        Raises Closed if the client, or its loop, is closed.
        """

        async def taken() -> Stats:
            return self.client.stats()

        try:
            here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            here = False
        if here:
            self.latest = self.client.stats()
            return True
        work = taken()
        try:
            answer = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise Closed("the client's event loop is closed") from None
        try:
            self.latest = answer.result(ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            answer.cancel()
            return False
        return True


class ClientCollector(Collector):
    """The metrics of one or several clients and of their services and subscriptions.

    Make one collector for each registry. Its metrics can be collected in any thread. A client that is closed is left
    out from then on. Clients with the same label are added up.
    """

    def __init__(
        self, *clients: Client | blocking.Client, registry: CollectorRegistry | None = REGISTRY
    ) -> None:
        """Register with `registry`, by default that of `prometheus_client.start_http_server`; None: with none.

        Raises:
            RuntimeError: an `iris.Client` is not given in its own event loop.
            ValueError: `registry` has a collector of clients already; use its `add`.
        """
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._clusters, self._methods = Names(MAX_CLUSTERS), Names(MAX_METHODS)
        self._filters, self._groups = Names(MAX_FILTERS), Names(MAX_FILTERS)
        self._causes = Names(MAX_CAUSES)
        for client in clients:
            self.add(client)
        disable_in_child(self)
        if registry is not None:
            registry.register(self)

    def add(self, client: Client | blocking.Client) -> None:
        """Add a client that is open. Call this in its event loop."""
        watched = _Watched(client)
        with self._lock:
            self._watched.append(watched)

    def _forked(self) -> None:
        """Leave all clients out in the child of a fork: the parent shows them."""
        self._lock = threading.Lock()
        self._watched.clear()

    def discard(self, client: Client | blocking.Client) -> None:
        """Leave out a client that was added. If it was added twice, one of both stays."""
        bare = client._client if isinstance(client, blocking.Client) else client
        with self._lock:
            for watched in self._watched:
                if watched.client is bare:
                    self._watched.remove(watched)
                    return

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without values, so that registering asks no client."""
        return Page(SPECS).families()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all clients that are open."""
        with self._lock:
            page = Page(SPECS)
            for watched in list({watched.client: watched for watched in self._watched}.values()):
                try:
                    up = watched.read()
                except Closed:
                    self._watched.remove(watched)
                    continue
                page.set("iris_client_up", up, watched.label)
                if watched.latest is not None:
                    self._fill(page, watched.label, watched.latest)
        return page.families()

    def _fill(self, page: Page, client: str, stats: Stats) -> None:
        page.add("iris_client_connected", stats.connected_since is not None, client)
        page.add("iris_client_reconnects_total", stats.reconnects, client)
        page.add("iris_client_messages_total", stats.sent_messages, client, "sent")
        page.add("iris_client_messages_total", stats.received_messages, client, "received")
        page.add("iris_client_bytes_total", stats.sent_bytes, client, "sent")
        page.add("iris_client_bytes_total", stats.received_bytes, client, "received")
        for cause, count in stats.dropped.items():
            page.add("iris_client_dropped_messages_total", count, client, self._causes(cause))
        page.add("iris_client_losses_total", stats.losses, client)
        page.add("iris_client_failed_handlers_total", stats.failed_handlers, client)
        page.add("iris_client_held_bytes", stats.held_bytes, client)
        page.add("iris_client_unwritten_bytes", stats.unwritten_bytes, client)
        page.add("iris_client_queued_bytes", stats.queued_bytes, client)
        for one in stats.subscriptions:
            where = client, self._filters(one.filter), self._groups(one.group)
            page.add("iris_subscription_queued_bytes", one.queued_bytes, *where)
            page.add("iris_subscription_queue_limit_bytes", one.limit_bytes, *where)
            page.add("iris_subscription_lost_messages_total", one.lost_messages, *where)
        for service in stats.services:
            cluster = self._clusters(service.cluster)
            page.add("iris_service_running", service.running, client, cluster)
            page.add("iris_service_queued_bytes", service.queued_bytes, client, cluster)
            for handler in service.handlers:
                which = client, cluster, handler.kind, self._methods(handler.method)
                for outcome in OUTCOMES:
                    count = getattr(handler, outcome)
                    page.add("iris_service_calls_total", count, *which, outcome)
                page.add("iris_service_handler_seconds_total", handler.timed_s, *which)
                page.add("iris_service_timed_calls_total", handler.timed, *which)
                page.raise_to("iris_service_handler_max_seconds", handler.max_s, *which)
