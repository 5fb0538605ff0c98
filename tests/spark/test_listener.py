"""The listener reports the lag of a query, and never delays it."""

from __future__ import annotations

import logging
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import iris
from iris.errors import ConfigError, InvalidName
from spark.kit import append_rows, finish, make_stream, stream_source, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import iris.blocking
    from spark.kit import Relay

IMPORTED = """
import sys, threading
import iris.spark, iris.spark.dead_letters, iris.spark.listener
assert "pyarrow" not in sys.modules
assert threading.active_count() == 1
"""
LOG = "5f0c" * 8
RUN = uuid.UUID(int=7)


def listener(**settings: Any) -> Any:
    """Return a listener that gets events only from the test."""
    from iris.spark.listener import IrisLagListener

    return IrisLagListener(**settings)


def progress(query: int = 1, *, batch: int = 0, run: uuid.UUID = RUN, name: str = "", sources: Any = None) -> Any:  # fmt: skip
    """Return the event of a batch that ended at 20 of 50 in stream "orders"."""
    from pyspark.sql.streaming.listener import QueryProgressEvent, StreamingQueryProgress

    one = source({"orders": {"0": 20, "log": LOG}}, {"orders": {"0": 50, "log": LOG}})
    found = {
        "id": str(uuid.UUID(int=query)), "runId": str(run), "name": name or None, "timestamp": "2013-01-01T00:00:00Z", "batchId": batch,
        "batchDuration": 1500, "stateOperators": [], "sources": [one] if sources is None else sources,
        "sink": {"description": "", "numOutputRows": 20},
    }  # fmt: skip
    return QueryProgressEvent(StreamingQueryProgress.fromJson(found))


def source(end: Any, latest: Any) -> dict[str, Any]:
    return {
        "description": "", "startOffset": None, "endOffset": end, "latestOffset": latest, "numInputRows": 20,
        "inputRowsPerSecond": 10.0, "processedRowsPerSecond": 13.3,
    }  # fmt: skip


def terminated(query: int = 1, run: uuid.UUID = RUN) -> Any:
    from pyspark.sql.streaming.listener import QueryTerminatedEvent

    return QueryTerminatedEvent(uuid.UUID(int=query), run, None, None)


def test_importing_iris_spark_loads_no_arrow_and_starts_nothing() -> None:
    subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", IMPORTED], check=True)


def test_a_batch_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "iris.spark.listener"):
        listener().onQueryProgress(progress(name="totals"))
    (record,) = caplog.records
    assert record.message.startswith("spark.progress: ")
    fields = record.fields  # type: ignore[attr-defined]  # what `extra` added
    assert fields["streams"] == {"orders": {"position": 20, "lag": 30}}
    assert (fields["name"], fields["rows"], fields["batch_ms"]) == ("totals", 20, 1500)
    assert fields["rows_per_s"] == 13.3


def scraped(lag_listener: Any) -> Any:
    from support.pages import Scraped

    return Scraped(lag_listener.prometheus())


def test_prometheus_reads_each_series_once_and_names_are_escaped() -> None:
    odd = 'a "b"\\\nc'
    lag_listener = listener()
    lag_listener.onQueryProgress(progress(1, name=odd))
    lag_listener.onQueryProgress(progress(1, name=odd, batch=1))
    lag_listener.onQueryProgress(progress(2))
    found = scraped(lag_listener)
    assert sum(map(len, found.samples.values())) == 10
    query = str(uuid.UUID(int=1))
    assert found.sum("iris_spark_lag_messages", query=query, name=odd, stream="orders") == 30
    assert found.sum("iris_spark_position", query=query, name=odd, stream="orders") == 20
    assert found.sum("iris_spark_rows_total", query=query, name=odd) == 40
    assert found.sum("iris_spark_batch_seconds", query=query, name=odd) == 1.5
    assert lag_listener.prometheus().endswith("\n")


def test_the_lag_can_be_shown_on_a_page_with_other_metrics() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    lag_listener, registry = listener(), CollectorRegistry()
    registry.register(lag_listener.collector)
    lag_listener.onQueryProgress(progress(1))
    assert generate_latest(registry).decode() == lag_listener.prometheus()


def test_a_query_that_ended_is_forgotten_and_one_that_runs_again_is_not() -> None:
    lag_listener = listener()
    again = uuid.UUID(int=8)
    lag_listener.onQueryProgress(progress(1))
    lag_listener.onQueryProgress(progress(1, run=again))
    lag_listener.onQueryTerminated(terminated(1))
    assert [one.run for one in lag_listener.queries()] == [str(again)]
    lag_listener.onQueryTerminated(terminated(1, again))
    assert lag_listener.queries() == []
    assert lag_listener.prometheus() == ""


def test_queries_whose_end_is_never_reported_are_bounded() -> None:
    from iris.spark.listener import MAX_QUERIES

    lag_listener = listener()
    for number in range(MAX_QUERIES + 10):
        lag_listener.onQueryProgress(progress(number + 1))
    assert len(lag_listener.queries()) == MAX_QUERIES
    assert lag_listener.queries()[0].query == str(uuid.UUID(int=11))


def test_a_query_that_reads_something_else_is_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    lag_listener = listener()
    for end in (None, 7, "x", {}, {"topic": {"0": 5}}):
        lag_listener.onQueryProgress(progress(sources=[source(end, end)]))
    assert lag_listener.queries() == []
    assert caplog.records == []


def test_a_lag_that_nobody_knows_is_not_a_number() -> None:
    ours = {"orders": {"0": 20, "log": LOG}}
    for latest in (None, {}, {"orders": {"0": 5, "log": "another"}}):
        lag_listener = listener()
        lag_listener.onQueryProgress(progress(sources=[source(ours, latest)]))
        assert lag_listener.queries()[0].streams["orders"].lag is None
        assert "iris_spark_lag_messages{" not in lag_listener.prometheus()


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "iris.prom"
    lag_listener = listener(prometheus_file=str(path))
    lag_listener.onQueryProgress(progress())
    assert path.read_text() == lag_listener.prometheus() != ""
    lag_listener.onQueryTerminated(terminated())
    assert path.read_text() == ""
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_is_reported_once_until_it_goes_well_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    lag_listener = listener(prometheus_file=str(folder / "iris.prom"))
    for number in range(3):
        lag_listener.onQueryProgress(progress(batch=number))
    assert len(caplog.records) == 1
    folder.mkdir()
    lag_listener.onQueryProgress(progress())
    (folder / "iris.prom").unlink()
    folder.rmdir()
    lag_listener.onQueryProgress(progress())
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "spark.listener_failed"
    ] * 2


def test_a_relay_that_is_away_is_reported_once_and_not_asked_with_every_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lag_listener = listener(topic="metrics.spark", relay=str(tmp_path / "none.sock"))
    for number in range(50):
        lag_listener.onQueryProgress(progress(batch=number))
    (record,) = caplog.records
    assert record.fields["what"] == "publish"  # type: ignore[attr-defined]  # what `extra` added
    assert lag_listener.queries()[0].batch == 49


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"topic": "a..b"}, InvalidName), ({"prometheus_file": "iris.prom"}, ConfigError)],
)  # fmt: skip
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, str], error: Any) -> None:
    with pytest.raises(error):
        listener(**settings)


def test_a_query_reports_its_lag_to_the_log_a_topic_and_a_file(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path, tmp_path: Path,
) -> None:  # fmt: skip
    make_stream(client, name)
    append_rows(client, name, 1000)
    path = tmp_path / "iris.prom"
    lag_listener = listener(
        topic=f"metrics.{name}", prometheus_file=str(path), relay=str(stage.socket), keyring_file=str(stage.keyring)
    )  # fmt: skip
    received: list[Any] = []
    spark.streams.addListener(lag_listener)
    try:
        with client.subscribe(f"metrics.{name}") as messages:
            rows = stream_source(
                spark, stage, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger=400
            )
            query = (
                rows.writeStream.format("noop").queryName(name).option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True).start()
            )  # fmt: skip
            received += [next(messages).value for _ in range(4)]
            finish(query)
        until(lambda: lag_listener.queries() == [])
    finally:
        spark.streams.removeListener(lag_listener)
    assert [one["streams"][name] for one in received] == [
        {"position": 0, "lag": 1000}, {"position": 400, "lag": 600}, {"position": 800, "lag": 200}, {"position": 1000, "lag": 0},
    ]  # fmt: skip
    assert [one["rows"] for one in received] == [0, 400, 400, 200]
    assert all(one["name"] == name and one["batch_ms"] > 0 for one in received)
    until(lambda: path.read_text() == "")
