"""Asks a relay for its status, at most once in `FRESH_S`, and makes the page of metrics from it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from iris import blocking
from iris.config import ClientConfig
from iris.crypto.keyring import Keyring
from iris.errors import IrisError
from iris.metrics.page import Page
from relay.metrics.figures import SPECS, Labels, fill, fill_store

FRESH_S: Final = 1.0
"""How long a status is used again. So many scrapers cost the relay no more than one."""
ANSWER_S: Final = 2.0
SILENT_S: Final = 15.0
"""A relay that has not answered for this long is not alive."""
FIGURES_S: Final = 15.0
"""How long figures of the store are shown. It sends them every 2 s."""


class RelaySource(Collector):
    """The newest status of one relay, for all threads of the server."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._client: blocking.Client | None = None
        self._asked_s = float("-inf")
        self._failing_s: float | None = None
        """When the relay first did not answer, since it last did."""
        self._error = ""
        self._figures: dict[str, Any] = {}
        self._figures_s = float("-inf")
        self._report: dict[str, Any] | None = None
        self._page = b""
        self._labels = Labels()
        self._version = version("iris-messaging")
        self._processes = (
            ProcessCollector("iris_relay", lambda: self._pid(self._report), registry=None),
            ProcessCollector("iris_store", lambda: self._pid((self._report or {}).get("store")), registry=None),
        )  # fmt: skip
        self.cut_connections = 0
        """Connections that the server cut or refused, which are a metric, too."""

    def page(self) -> bytes:
        """Return the page of metrics."""
        with self._lock:
            self._refresh()
            return self._page

    def not_live(self) -> str:
        """Return why the relay is not alive; "" if it is. One that does not answer is given `SILENT_S`."""
        with self._lock:
            self._refresh()
            if self._failing_s is None or time.monotonic() - self._failing_s < SILENT_S:
                return ""
            return self._error

    def not_ready(self) -> str:
        """Return why the relay does not serve programs now; "" if it does."""
        with self._lock:
            self._refresh()
            if self._report is None:
                return self._error
            return "the relay is stopping" if self._report["draining"] else ""

    def store_said(self, line: bytes) -> None:
        """Note the figures of the store, one JSON object. Those that are cut off, as by a killed store, are none."""
        try:
            figures = json.loads(line)
        except ValueError:
            figures = {}
        with self._lock:
            self._figures, self._figures_s = figures, time.monotonic()

    def close(self) -> None:
        """Disconnect from the relay. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, as of the last status."""
        page = Page(SPECS)
        page.set("iris_relay_up", 0)
        if self._report is not None:
            fill(page, self._report, self._labels, self._version)
            # Figures of a store that has ended are not shown.
            store = self._report.get("store") or {}
            fresh = time.monotonic() - self._figures_s < FIGURES_S
            if fresh and self._figures.get("figures", -1) == store.get("pid"):
                fill_store(page, self._figures, self._labels)
        yield from page.families()
        for process in self._processes:
            try:
                yield from process.collect()
            except ValueError:
                continue  # a limit of files that is not a number: "unlimited"
        yield CounterMetricFamily(
            "iris_metrics_connections_cut_total", "Connections to this page that were cut, because they were slow or too many.",
            value=self.cut_connections,
        )  # fmt: skip

    def _refresh(self) -> None:
        if time.monotonic() - self._asked_s < FRESH_S:
            return
        try:
            if self._client is None:
                self._client = blocking.connect(keyring=Keyring({}), config=self._config)
            self._report = self._client.status(timeout=ANSWER_S)
            self._failing_s = None
        except (IrisError, OSError) as err:
            self._report = None
            self._error = str(err)
            if self._failing_s is None:
                self._failing_s = time.monotonic()
        self._asked_s = time.monotonic()
        self._page = generate_latest(self)

    @staticmethod
    def _pid(report: dict[str, Any] | None) -> str:
        """Return the process id in a report; "-" if it has none."""
        return str((report or {}).get("pid") or "-")
