"""Reports how far queries are behind their streams: to the log, to a topic, and as text for Prometheus.

    spark.streams.addListener(IrisLagListener(topic="metrics.spark",
    prometheus_file="/var/lib/node_exporter/iris.prom"))

Spark reports progress once per batch. So the lag is that of the batch: the end of the stream when the batch was
planned, minus the end of the batch. Nothing is reported while a batch runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from iris.client import Client
from iris.errors import ConfigError, IrisError
from iris.logs import logger
from iris.spark.connections import connection
from iris.spark.errors import SparkError
from iris.spark.lag import QueryLag, StreamLag
from iris.spark.offsets import Offsets, decode_offsets
from iris.spark.options import Access
from iris.wire.names import check_topic

if TYPE_CHECKING:
    from iris.spark.lag_metrics import LagCollector

log = logger(__name__)

MAX_QUERIES: Final = 1024
"""Queries that are remembered, in case Spark does not report the end of some; the least recent is forgotten."""
PUBLISH_S: Final = 5.0
"""Seconds that one publication may take: Spark calls the listeners of a session one after the other."""
PAUSE_S: Final = 10.0
"""Seconds without publications after one that failed."""


class IrisLagListener(StreamingQueryListener):
    """Reports the lag of every query that reads with the format "iris".

    It never breaks a query: its own failures are logged, each kind once.
    """

    def __init__(
        self, *, topic: str = "", prometheus_file: str = "", relay: str = "", keyring_file: str = "", access_file: str = "",
    ) -> None:  # fmt: skip
        """Publish a map of `QueryLag` to `topic`, and replace `prometheus_file`, after each batch. Empty: do not.

        The other arguments are the options `relay`, `keyringFile` and `accessKeyFile`, for the driver. Raises
        ConfigError; a bad keyring is only logged, with the first batch.
        """
        if topic:
            check_topic(topic)
        for option, path in (
            ("prometheus_file", prometheus_file),
            ("keyring_file", keyring_file),
            ("access_file", access_file),
        ):
            if path and not os.path.isabs(path):
                raise ConfigError(f"{option}: {path!r} is not an absolute path; write it from / on")
        self._topic = topic
        self._file = prometheus_file
        self._access = Access(keyring_file=keyring_file, access_file=access_file, relay=relay, timeout_s=PUBLISH_S)  # fmt: skip
        self._lock = threading.Lock()
        self._queries: dict[str, QueryLag] = {}
        self._rows: dict[str, int] = {}
        self._failing: set[tuple[str, str]] = set()
        """(part, kind of error) of the failures logged since that part last succeeded."""
        self._publish_at_s = 0.0

    # -- events from Spark ------------------------------------------------------------------------------------

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's name
        """Do nothing: Spark waits for this call."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802  # Spark's name
        """Report a batch."""
        with self._guarded("progress"):
            found = _query_lag(event.progress)
            if found is None:
                return
            self._remember(found)
            log.info(
                "spark.progress",
                extra={"fields": structs.asdict(found) | {"streams": _plain(found)}},
            )
            self._write_file()
            self._publish(found)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802  # Spark's name
        """Do nothing: the position of the query has been reported."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802  # Spark's name
        """Forget the query."""
        with self._guarded("terminated"):
            query = str(event.id)
            with self._lock:
                found = self._queries.get(query)
                # The query may have been started again already.
                if found is None or found.run != str(event.runId):
                    return
                del self._queries[query], self._rows[query]
            self._write_file()

    # -- figures -------------------------------------------------------------------------------------

    def queries(self) -> list[QueryLag]:
        """Return the last batch of each query that runs."""
        with self._lock:
            return list(self._queries.values())

    @property
    def collector(self) -> LagCollector:
        """The metrics as a collector, to show them on a page: `prometheus_client.REGISTRY.register(lag.collector)`.

        Needs prometheus-client, as `prometheus` does.
        """
        from iris.spark.lag_metrics import LagCollector

        return LagCollector(self._latest)

    def prometheus(self) -> str:
        """Return the metrics in Prometheus text format 0.0.4, with a final newline; empty without queries."""
        return self.collector.text()

    def _latest(self) -> list[tuple[QueryLag, int]]:
        with self._lock:
            return [(one, self._rows[one.query]) for one in self._queries.values()]

    # -- reporting -------------------------------------------------------------------------------------------------

    def _remember(self, found: QueryLag) -> None:
        with self._lock:
            self._queries.pop(found.query, None)
            self._queries[found.query] = found
            self._rows[found.query] = self._rows.get(found.query, 0) + found.rows
            while len(self._queries) > MAX_QUERIES:
                oldest = next(iter(self._queries))
                del self._queries[oldest], self._rows[oldest]

    def _write_file(self) -> None:
        if not self._file:
            return
        with self._guarded("prometheus_file"):
            # The name does not end in .prom, so a collector never reads a half-written file.
            partial = f"{self._file}.{os.getpid()}.tmp"
            try:
                with open(partial, "w", encoding="utf-8") as file:
                    file.write(self.prometheus())
                os.replace(partial, self._file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise

    def _publish(self, found: QueryLag) -> None:
        if not self._topic or time.monotonic() < self._publish_at_s:
            return
        payload = structs.asdict(found) | {"streams": _plain(found)}

        async def publish(client: Client) -> None:
            async with asyncio.timeout(PUBLISH_S):
                await client.publish(self._topic, payload)

        with self._guarded("publish"):
            self._publish_at_s = time.monotonic() + PAUSE_S
            connection(self._access).call(publish)
            self._publish_at_s = 0.0

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Log failures, each kind once until `what` succeeds. Spark would log a listener's error at every batch."""
        try:
            yield
        except Exception as err:
            kind = (what, err.code if isinstance(err, SparkError) else type(err).__name__)
            if kind not in self._failing:
                self._failing.add(kind)
                log.warning("spark.listener_failed", extra={"fields": {"what": what, "error": str(err) or kind[1]}})  # fmt: skip
        else:
            self._failing = {kind for kind in self._failing if kind[0] != what}


def _query_lag(progress: StreamingQueryProgress) -> QueryLag | None:
    """Return the figures of the iris sources in a progress; None if the query has no such source."""
    streams: dict[str, StreamLag] = {}
    rows = 0
    rate = 0.0
    any_source = False
    for source in progress.sources:
        ends = _offsets(source.endOffset)
        if ends is None:
            continue
        any_source = True
        latest = _offsets(source.latestOffset) or {}
        rows += source.numInputRows
        rate += _finite(source.processedRowsPerSecond)
        for part, position in ends.items():
            end, name = latest.get(part), str(part)
            lag = (
                max(0, end.offset - position.offset)
                if end is not None and end.uuid == position.uuid
                else None
            )
            before = streams.get(name)
            # A query may read a stream twice: report the slower position.
            if before is None or position.offset < before.position:
                streams[name] = StreamLag(position.offset, lag)
    if not any_source:
        return None
    return QueryLag(
        query=str(progress.id),
        run=str(progress.runId),
        name=progress.name or "",
        batch=progress.batchId,
        batch_ms=progress.batchDuration,
        rows=rows,
        rows_per_s=round(rate, 1),
        streams=streams,
    )


def _offsets(text: str) -> Offsets | None:
    """Return the offsets of an iris source, None for another source."""
    try:
        found = json.loads(text)
        return decode_offsets(found) if found else None
    except (ValueError, TypeError, IrisError):
        return None


def _plain(found: QueryLag) -> dict[str, Any]:
    return {name: structs.asdict(position) for name, position in found.streams.items()}


def _finite(rate: float) -> float:
    return rate if 0 <= rate < float("inf") else 0.0
