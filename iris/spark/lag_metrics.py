"""The lag of queries in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from iris.metrics.page import Page, Spec
from iris.spark.lag import QueryLag

QUERY: Final = ("query", "name")
STREAM: Final = (*QUERY, "stream")
SPECS: Final = (
    Spec("iris_spark_lag_messages", "Offsets between the end of the last batch and the end of the stream.", STREAM),
    Spec("iris_spark_position", "The first offset of the next batch.", STREAM),
    Spec("iris_spark_rows_total", "Rows read since the listener was added.", QUERY),
    Spec("iris_spark_rows_per_second", "Rows of the last batch divided by its duration.", QUERY),
    Spec("iris_spark_batch_seconds", "Duration of the last batch.", QUERY),
)  # fmt: skip


class LagCollector(Collector):
    """Metrics of the queries that a listener knows; it remembers at most `listener.MAX_QUERIES`."""

    def __init__(self, latest: Callable[[], Iterable[tuple[QueryLag, int]]]) -> None:
        """`latest` returns the last batch of each query, and the rows that it has read."""
        self._latest = latest

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without values."""
        return Page(SPECS).families()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all queries that run."""
        page = Page(SPECS)
        for one, rows in self._latest():
            labels = one.query, one.name
            page.set("iris_spark_rows_total", rows, *labels)
            page.set("iris_spark_rows_per_second", one.rows_per_s, *labels)
            page.set("iris_spark_batch_seconds", one.batch_ms / 1000, *labels)
            for stream, position in one.streams.items():
                page.set("iris_spark_lag_messages", position.lag, *labels, stream)
                page.set("iris_spark_position", position.position, *labels, stream)
        return page.families()

    def text(self) -> str:
        """Return the metrics as text; empty without queries."""
        return generate_latest(self).decode() if any(True for _ in self._latest()) else ""
