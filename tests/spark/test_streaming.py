"""`spark.readStream.format("iris")`: every row once, in batches within the limits, from the query's last position."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from iris.spark.connections import connection
from iris.spark.offsets import Part
from iris.spark.options import SourceOptions
from iris.spark.planning import Planner
from iris.streams.stores import Stores
from spark.kit import (
    Relay,
    append_rows,
    expect_code,
    finish,
    make_stream,
    publish_rows,
    stream_source,
    streams_of,
    until,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import iris.blocking

IDLE = "spark.sql.streaming.noDataProgressEventInterval"


@pytest.fixture
def _idle_is_reported(spark: SparkSession) -> Iterator[None]:
    """Let Spark report idle triggers at once instead of every ten seconds."""
    spark.conf.set(IDLE, "50")
    yield
    spark.conf.unset(IDLE)


class Kept:
    """The rows of each batch that a query passed to foreachBatch."""

    def __init__(self, frame: DataFrame, checkpoint: Path, **trigger: Any) -> None:
        self.batches: list[list[bytes]] = []
        writer = frame.writeStream.foreachBatch(self._keep)
        writer = writer.option("checkpointLocation", str(checkpoint))
        self.query = writer.trigger(**(trigger or {"processingTime": "20 milliseconds"})).start()

    def _keep(self, frame: DataFrame, _: int) -> None:
        # Sorted here: orderBy would read everything twice.
        found = sorted((row.offset, bytes(row.value)) for row in frame.collect())
        self.batches.append([value for _, value in found])

    @property
    def rows(self) -> list[bytes]:
        return [row for batch in self.batches for row in batch]

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows in the batches, as counted by Spark."""
        sizes = [p.numInputRows for p in self.query.recentProgress if p.numInputRows]
        assert sizes == [len(batch) for batch in self.batches if batch]
        return sizes

    def wait_for(self, count: int) -> None:
        """Return when the batches that Spark has committed have `count` rows."""
        until(lambda: sum(p.numInputRows for p in self.query.recentProgress) >= count, self.query)

    def wait_until_idle(self, stream: str, end: int) -> None:
        """Return when a trigger has found no rows after `end`."""
        until(lambda: any(_saw(p, stream, end) for p in self.query.recentProgress), self.query)


def _saw(progress: Any, stream: str, end: int) -> bool:
    latest = json.loads(progress.sources[0].latestOffset or "{}")
    return progress.numInputRows == 0 and latest.get(stream, {}).get("0") == end


def test_a_query_reads_what_there_is_in_batches_of_the_limit_and_goes_on_after_a_restart(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    make_stream(client, name)
    rows = append_rows(client, name, 1000)
    frame = stream_source(
        spark, stage, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger=300
    )
    kept = Kept(frame, checkpoint, availableNow=True)
    finish(kept.query)
    assert kept.sizes == [300, 300, 300, 100]
    assert kept.rows == rows

    more = append_rows(client, name, 350, first=1000)
    kept = Kept(frame, checkpoint, availableNow=True)
    finish(kept.query)
    assert kept.sizes == [300, 50]
    assert kept.rows == more


@pytest.mark.usefixtures("_idle_is_reported")
def test_a_trigger_waits_for_the_least_rows_unless_it_has_waited_long_enough(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    """Two queries of one stream both get all rows."""
    make_stream(client, name)
    options: dict[str, Any] = {
        "stream": name,
        "startingOffsets": "earliest",
        "minOffsetsPerTrigger": 100,
    }
    patient = Kept(stream_source(spark, stage, **options, maxTriggerDelay="1h"), checkpoint)
    hasty = Kept(
        stream_source(spark, stage, **options, maxTriggerDelay="100ms"), checkpoint.with_name("2")
    )
    rows = append_rows(client, name, 60)
    patient.wait_until_idle(name, 60)
    hasty.wait_for(60)
    rows += append_rows(client, name, 50, first=60)
    patient.wait_for(110)
    hasty.wait_for(110)
    patient.query.stop()
    hasty.query.stop()
    assert patient.rows == hasty.rows == rows
    assert patient.sizes == [110]
    assert len(hasty.sizes) > 1


def test_what_comes_while_a_trigger_waits_goes_into_it(
    stage: Relay, client: iris.blocking.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not have to wait for the next trigger, which Spark starts after a pause, unless a minimum is set."""
    make_stream(client, name)
    wait = Planner._wait

    def append_and_wait(planner: Planner, *args: Any) -> Any:
        append_rows(client, name, 5)
        return wait(planner, *args)

    monkeypatch.setattr(Planner, "_wait", append_and_wait)
    for least, grown in (("0", 5), ("100", 0)):
        options = {"stream": name, "startingOffsets": "latest", "minOffsetsPerTrigger": least}
        planner = Planner(SourceOptions.parse({**options, **stage.options}, streaming=True))
        start = planner.initial()
        assert planner.next_end(start) == start  # what it begins with is for the checkpoint
        planner.ranges(start, start)
        part = Part(name, 0)
        assert planner.next_end(start)[part].offset == start[part].offset + grown


def test_a_connection_asks_once_what_a_stream_is(
    stage: Relay, client: iris.blocking.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stream(client, name)
    append_rows(client, name, 10)
    link = connection(SourceOptions.parse({"stream": name, **stage.options}, streaming=True).access)
    asked: list[str] = []
    describe = Stores.describe

    def counted(stores: Stores, stream: str, *rest: Any, **more: Any) -> Any:
        asked.append(stream)
        return describe(stores, stream, *rest, **more)

    monkeypatch.setattr(Stores, "describe", counted)
    pages = [link.call(lambda c: c.streams.fetch(name, 0)) for _ in range(3)]
    assert [page.end for page in pages] == [10] * 3
    assert asked == [name]


def test_a_limit_in_bytes_makes_several_batches(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    make_stream(client, name)
    rows = append_rows(client, name, 200, size=1000)
    frame = stream_source(
        spark, stage, stream=name, startingOffsets="earliest", maxBytesPerTrigger=70_000
    )
    kept = Kept(frame, checkpoint, availableNow=True)
    finish(kept.query)
    assert kept.rows == rows
    assert len(kept.sizes) == 3
    assert max(kept.sizes) <= 70


@pytest.mark.usefixtures("_idle_is_reported")
def test_a_late_query_begins_at_the_first_row_or_at_the_next_as_configured(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    """The position is that of its start, not of its first batch."""
    make_stream(client, name)
    old = append_rows(client, name, 100)
    late = Kept(stream_source(spark, stage, stream=name), checkpoint)
    full = Kept(
        stream_source(spark, stage, stream=name, startingOffsets="earliest"),
        checkpoint.with_name("2"),
    )
    late.wait_until_idle(name, 100)
    new: list[bytes] = []
    for number in range(5):
        new += append_rows(client, name, 10, first=100 + 10 * number)
        full.wait_for(100 + len(new))
    late.wait_for(50)
    late.query.stop()
    full.query.stop()
    assert late.rows == new
    assert full.rows == old + new


def test_foreach_batch_may_read_its_rows_more_than_once(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    make_stream(client, name)
    rows = append_rows(client, name, 400)
    seen: list[tuple[int, int, list[bytes]]] = []

    def twice(frame: DataFrame, number: int) -> None:
        count = frame.count()
        seen.append((number, count, sorted(bytes(row.value) for row in frame.collect())))

    frame = stream_source(spark, stage, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger=200, minPartitions=2)  # fmt: skip
    query = (
        frame.writeStream.foreachBatch(twice)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    # The first batch only holds the offset at which the query begins.
    assert seen == [(0, 0, []), (1, 200, sorted(rows[:200])), (2, 200, sorted(rows[200:]))]


@pytest.mark.usefixtures("_idle_is_reported")
def test_a_query_without_a_group_finds_its_own_stream_again(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    """Messages published while it does not run are read when it runs again."""
    frame = stream_source(spark, stage, subscribe=f"{name}.>", groupIdPrefix=name)
    kept = Kept(frame, checkpoint)
    (stream,) = until(lambda: streams_of(client, f"spark.{name}-"), kept.query)
    kept.wait_until_idle(stream, 0)
    rows = publish_rows(client, f"{name}.a", 50)
    kept.wait_for(50)
    kept.query.stop()
    assert kept.rows == rows

    more = publish_rows(client, f"{name}.b", 70, first=50)
    until(lambda: client.call(lambda c: c.streams.describe(stream)).messages == 120)
    kept = Kept(frame, checkpoint, availableNow=True)
    finish(kept.query)
    assert kept.rows == more
    assert kept.sizes == [70]
    assert streams_of(client, f"spark.{name}-") == [stream]


def test_a_checkpoint_of_another_query_is_refused(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    for stream in (name, f"{name}b"):
        append_rows(client, make_stream(client, stream), 10)
    options = {"startingOffsets": "earliest"}
    kept = Kept(stream_source(spark, stage, stream=name, **options), checkpoint, availableNow=True)
    finish(kept.query)
    other = Kept(stream_source(spark, stage, stream=f"{name}b", **options), checkpoint, availableNow=True)  # fmt: skip
    expect_code(other.query, "IRIS_CONFIG: ", name)
    assert other.rows == []
