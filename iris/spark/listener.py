"""How far behind its streams a query is: to the log, to a topic, and as text for Prometheus.

    spark.streams.addListener(IrisLagListener(topic="metrics.spark", prometheus_file="/var/lib/node_exporter/iris.prom"))

Spark tells progress once a batch, so the lag is that of the batch: what the stream had when the batch was planned, less where the batch
ended. While a batch runs nothing is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from msgspec import Struct, structs
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
from iris.spark.connections import connection
from iris.spark.errors import SparkError
from iris.spark.offsets import Offsets, decode_offsets
from iris.spark.options import Access
from iris.wire.names import check_topic

log = logging.getLogger(__name__)

MAX_QUERIES: Final = 1024
"""Queries that are remembered, should Spark not tell that some ended; the one that was heard of longest ago goes."""
PUBLISH_S: Final = 5.0
"""What one publication may take: Spark tells a session's listeners one after the other."""
PAUSE_S: Final = 10.0
"""After a publication that failed, none is tried for so long."""


class StreamLag(Struct, frozen=True):
    """Where a query stands in one stream."""

    next: int
    """The offset that the next batch begins with."""
    lag: int | None
    """Offsets until the end of the stream, gaps included; None if Spark does not say where it ends."""


class QueryLag(Struct, frozen=True):
    """What the last batch of a query came to."""

    query: str
    """Its id, the same after a restart from its checkpoint."""
    run: str
    name: str
    """Empty if it has none."""
    batch: int
    batch_ms: int
    rows: int
    rows_per_s: float
    """Rows of the batch over its time."""
    streams: dict[str, StreamLag]


class IrisLagListener(StreamingQueryListener):
    """Tells the lag of every query that reads with the format "iris"; never breaks one: its own failures are logged, each kind once."""

    def __init__(
        self, *, topic: str = "", prometheus_file: str = "", relay: str = "", keyring_file: str = "", access_file: str = "",
    ) -> None:  # fmt: skip
        """`topic` is published to, a map as of `QueryLag`; `prometheus_file` is replaced with each batch. Empty: neither.

        The others are as the options `relay`, `keyringFile` and `accessKeyFile`, for the driver. Raises ConfigError, KeyringError
        not before the first batch.
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
        """What failed and how, since it last went well."""
        self._publish_at_s = 0.0

    # -- what Spark tells ------------------------------------------------------------------------------------

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's name
        """Nothing: Spark waits for this one."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802  # Spark's name
        """Tell a batch."""
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
        """Nothing: where the query stands has been told."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802  # Spark's name
        """Forget the query."""
        with self._guarded("terminated"):
            query = str(event.id)
            with self._lock:
                found = self._queries.get(query)
                # It may run again already.
                if found is None or found.run != str(event.runId):
                    return
                del self._queries[query], self._rows[query]
            self._write_file()

    # -- what others ask -------------------------------------------------------------------------------------

    def queries(self) -> list[QueryLag]:
        """Return the last batch of each query that runs."""
        with self._lock:
            return list(self._queries.values())

    def prometheus(self) -> str:
        """Return what Prometheus reads: text format 0.0.4, ends with a line end; empty without queries."""
        with self._lock:
            queries = list(self._queries.values())
            rows = dict(self._rows)
        if not queries:
            return ""
        lines: list[str] = []

        def add(name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.extend((f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{{{labels}}} {value}" for labels, value in samples)

        streams = [
            (f'{_labels(one)},stream="{_escaped(stream)}"', position)
            for one in queries
            for stream, position in one.streams.items()
        ]
        add(
            "iris_spark_lag_messages", "gauge", "Offsets between the end of the last batch and that of the stream.",
            ((labels, position.lag) for labels, position in streams if position.lag is not None),
        )  # fmt: skip
        add(
            "iris_spark_next_offset", "gauge", "The offset that the next batch begins with.",
            ((labels, position.next) for labels, position in streams),
        )  # fmt: skip
        add(
            "iris_spark_rows_total", "counter", "Rows read since the listener was added.",
            ((_labels(one), rows[one.query]) for one in queries),
        )  # fmt: skip
        add(
            "iris_spark_rows_per_second", "gauge", "Rows of the last batch over its time.",
            ((_labels(one), one.rows_per_s) for one in queries),
        )  # fmt: skip
        add(
            "iris_spark_batch_seconds", "gauge", "Time of the last batch.",
            ((_labels(one), one.batch_ms / 1000) for one in queries),
        )  # fmt: skip
        return "\n".join(lines) + "\n"

    # -- how -------------------------------------------------------------------------------------------------

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
            # Its end is not .prom: a collector does not read it half written.
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
        """Log what fails, each kind once until it went well again: what a listener raises, Spark logs at every batch."""
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
    """Return what a progress says of our sources; None if the query has none."""
    streams: dict[str, StreamLag] = {}
    rows = 0
    rate = 0.0
    ours = False
    for source in progress.sources:
        ends = _offsets(source.endOffset)
        if ends is None:
            continue
        ours = True
        latest = _offsets(source.latestOffset) or {}
        rows += source.numInputRows
        rate += _finite(source.processedRowsPerSecond)
        for name, position in ends.items():
            end = latest.get(name)
            lag = (
                max(0, end.next - position.next)
                if end is not None and end.uuid == position.uuid
                else None
            )
            before = streams.get(name)
            # A query may read a stream twice: it is as far as the slower one.
            if before is None or position.next < before.next:
                streams[name] = StreamLag(position.next, lag)
    if not ours:
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
    """Return the offsets of a source of ours, else None."""
    try:
        found = json.loads(text)
        return decode_offsets(found) if found else None
    except (ValueError, TypeError, IrisError):
        return None


def _plain(found: QueryLag) -> dict[str, Any]:
    return {name: structs.asdict(position) for name, position in found.streams.items()}


def _finite(rate: float) -> float:
    return rate if 0 <= rate < float("inf") else 0.0


def _labels(one: QueryLag) -> str:
    return f'query="{one.query}",name="{_escaped(one.name)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
