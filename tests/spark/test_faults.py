"""A relay or store that ends within a batch: the batch continues, and every row is stored once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark import faults
from spark.faults import Fault
from spark.kit import (
    Relay,
    append_rows,
    expect_code,
    finish,
    make_row,
    make_stream,
    read_stream,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 2000
SIZE = 1000
"""Bytes of a row, so large that 64 rows fill a record, and each record is fetched separately."""
SMALL = {"fetchBytes": "1", "minPartitions": "2", "startingOffsets": "earliest"}


@pytest.fixture(autouse=True)
def _faults(spark: SparkSession) -> None:
    faults.register(spark)


@pytest.fixture(params=["relay", "store"])
def strike(request: pytest.FixtureRequest, relay: Relay) -> Callable[..., None]:
    """Return a function that waits for a fault, kills relay or store, lets the query continue, and restarts it."""

    def strike(fault: Fault, query: Any = None) -> None:
        fault.wait(query)
        if request.param == "relay":
            relay.kill_relay()
            fault.release()
            relay.start_relay()
        else:
            relay.kill_store()
            fault.release()
            relay.start_store()
        relay.wait_for_store()

    return strike


def start_copy(
    spark: SparkSession, relay: Relay, name: str, checkpoint: Path, source: dict[str, str], sink: dict[str, str]
) -> Any:  # fmt: skip
    """Start a query that copies the stream `name` to `name.out` in batches of 700, up to its end."""
    reader = spark.readStream.format(faults.FORMAT).options(**relay.options).options(**SMALL)
    rows = reader.options(stream=name, maxOffsetsPerTrigger="700", **source).load().select("value")
    writer = rows.writeStream.format(faults.FORMAT).options(**relay.options)
    writer = writer.options(stream=f"{name}.out", **sink)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def sizes(query: Any) -> list[int]:
    return [p.numInputRows for p in query.recentProgress if p.numInputRows]


def test_a_read_goes_on_over_a_lost_relay_or_store(
    spark: SparkSession, relay: Relay, name: str, tmp_path: Path, strike: Callable[..., None]
) -> None:
    client = relay.client()
    make_stream(client, name)
    rows = append_rows(client, name, ROWS, size=SIZE)
    fault = Fault(tmp_path / "fault", point="read", action="halt", at=5)
    reader = spark.read.format(faults.FORMAT).options(**relay.options).options(**SMALL)
    frame = reader.options(stream=name, **fault.options).load()
    with fault.meanwhile(lambda: strike(fault)):
        found = frame.select("offset", "value").collect()
    got = sorted((row.offset, bytes(row.value)) for row in found)
    assert got == list(enumerate(rows))


def test_a_write_goes_on_over_a_lost_relay_or_store(
    spark: SparkSession, relay: Relay, name: str, tmp_path: Path, strike: Callable[..., None]
) -> None:
    client = relay.client()
    make_stream(client, name)
    frame = spark.range(0, ROWS, 1, 2).selectExpr(f"rpad(concat('a:', id, ':'), {SIZE}, '.') value")
    fault = Fault(tmp_path / "fault", point="write", action="halt", at=12)
    writer = frame.write.format(faults.FORMAT).options(**relay.options).mode("append")
    with fault.meanwhile(lambda: strike(fault)):
        writer.options(stream=name, **fault.options).save()
    assert read_stream(client, name) == [make_row("a", number, SIZE) for number in range(ROWS)]


def test_a_query_goes_on_over_a_lost_relay_or_store(
    spark: SparkSession, relay: Relay, name: str, checkpoint: Path, tmp_path: Path, strike: Callable[..., None]
) -> None:  # fmt: skip
    """It is lost while the query reads, and again while it commits the staged rows."""
    client = relay.client()
    make_stream(client, name)
    make_stream(client, f"{name}.out")
    rows = append_rows(client, name, ROWS, size=SIZE)
    reading = Fault(tmp_path / "reading", point="read", action="halt", at=3)
    committing = Fault(tmp_path / "committing", point="commit", action="halt")
    query = start_copy(spark, relay, name, checkpoint, reading.options, committing.options)
    strike(reading, query)
    strike(committing, query)
    finish(query)
    assert sizes(query) == [700, 700, 600]
    assert read_stream(client, f"{name}.out") == rows


def test_a_query_that_gave_up_on_a_silent_store_goes_on_when_it_is_started_again(
    spark: SparkSession, relay: Relay, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The query does not know whether its last commit succeeded."""
    client = relay.client()
    make_stream(client, name)
    make_stream(client, f"{name}.out")
    rows = append_rows(client, name, ROWS, size=SIZE)
    fault = Fault(tmp_path / "fault", point="commit", action="halt")
    impatient = {**fault.options, "fetchTimeoutMs": "1000"}
    query = start_copy(spark, relay, name, checkpoint, {}, impatient)
    fault.wait(query)
    relay.pause_store()
    fault.release()
    expect_code(query, "IRIS_SINK: ")
    relay.resume_store()
    query = start_copy(spark, relay, name, checkpoint, {}, fault.options)
    finish(query)
    assert sizes(query) == [700, 700, 600]
    assert read_stream(client, f"{name}.out") == rows
