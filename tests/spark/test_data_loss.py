"""Rows that are lost, or that our keys do not open: the query fails with a stable error code, and never returns fewer
rows instead.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import iris
from iris.keyfiles import load_keyring, save_keyring
from spark import faults
from spark.faults import Fault
from spark.kit import (
    Relay,
    append_rows,
    expect_code,
    finish,
    make_stream,
    publish_rows,
    read_stream,
    source,
    stream_source,
    until,
    values,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import iris.blocking


def from_first(stream: str) -> str:
    """Return startingOffsets that name offset 0, which `earliest` does not."""
    return json.dumps({stream: {"0": 0}})


def oldest(client: iris.blocking.Client, stream: str) -> int:
    return client.call(lambda c: c.streams.describe(stream)).oldest


def trim(client: iris.blocking.Client, stream: str, keep: int) -> None:
    """Set a stream to keep `keep` messages, and return when the others are deleted."""
    before = oldest(client, stream)
    client.call(lambda c: c.streams.change(stream, max_messages=keep))
    until(lambda: oldest(client, stream) > before)


class Planned:
    """A batch read that plans its ranges before `change`, and whose tasks read after it."""

    def __init__(self, spark: SparkSession, relay: Relay, directory: Path, **options: Any) -> None:
        faults.register(spark)
        self._fault = Fault(directory, point="task", action="halt")
        texts = {name: str(value) for name, value in options.items()}
        reader = spark.read.format(faults.FORMAT).options(**relay.options)
        self._frame = reader.options(**texts, **self._fault.options).load()

    def rows_after(self, change: Callable[[], object]) -> list[bytes]:
        """Return the rows that its tasks read after `change()`."""

        def work() -> None:
            try:
                change()
            finally:
                self._fault.release()

        with self._fault.meanwhile(work):
            found = self._frame.select("offset", "value").collect()
        return [bytes(row.value) for row in sorted(found)]

    def failure_after(self, change: Callable[[], object]) -> str:
        """Return the error of its tasks after `change()`."""
        with pytest.raises(Exception, match="IRIS_") as caught:
            self.rows_after(change)
        return str(caught.value)


def run(frame: DataFrame, checkpoint: Path) -> Any:
    """Run a query over the existing rows, and return it. It may have failed."""
    writer = frame.select("value").writeStream.format("noop")
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def failure(frame: DataFrame) -> str:
    """Return the error of a batch read."""
    with pytest.raises(Exception, match="IRIS_") as caught:
        frame.collect()
    return str(caught.value)


# -- what retention took -------------------------------------------------------------------------------------


def test_rows_that_retention_removed_fail_a_read_unless_configured_to_go_on(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    make_stream(client, name)
    rows: list[bytes] = []
    for _ in range(10):
        rows += append_rows(client, name, 50, first=len(rows))
    # The rows are deleted just before a task reads them.
    strict = Planned(spark, stage, tmp_path / "strict", stream=name)
    text = strict.failure_after(lambda: trim(client, name, 300))
    assert "IRIS_DATA_LOSS: " in text
    assert "were removed (retention)" in text
    lenient = Planned(spark, stage, tmp_path / "lenient", stream=name, failOnDataLoss="false")
    found = lenient.rows_after(lambda: trim(client, name, 100))
    first = oldest(client, name)
    assert found == rows[first:]

    # The rows were deleted before.
    options: dict[str, Any] = {"stream": name, "startingOffsets": from_first(name)}
    text = failure(source(spark, stage, **options))
    assert f"IRIS_DATA_LOSS: stream '{name}': retention removed offsets 0 to {first}" in text
    assert values(source(spark, stage, **options, failOnDataLoss=False)) == rows[first:]
    # `earliest` begins with the first existing row.
    assert values(source(spark, stage, stream=name)) == rows[first:]


def test_a_query_that_comes_back_too_late_fails_unless_configured_to_go_on(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    make_stream(client, name)
    append_rows(client, name, 100)
    options: dict[str, Any] = {"stream": name, "startingOffsets": "earliest"}
    finish(run(stream_source(spark, stage, **options), checkpoint))
    for number in range(10):
        append_rows(client, name, 50, first=100 + 50 * number)
    trim(client, name, 100)
    until(lambda: oldest(client, name) > 100)

    text = expect_code(run(stream_source(spark, stage, **options), checkpoint), "IRIS_DATA_LOSS: ")
    assert f"retention removed offsets 100 to {oldest(client, name)}" in text
    query = run(stream_source(spark, stage, **options, failOnDataLoss=False), checkpoint)
    finish(query)
    read = sum(p.numInputRows for p in query.recentProgress)
    assert read == 600 - oldest(client, name) > 0


# -- what the log is not, or has not -------------------------------------------------------------------------


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_stream_that_was_made_again_is_never_taken_for_the_first(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path, tmp_path: Path, strict: str
) -> None:  # fmt: skip
    make_stream(client, name)
    append_rows(client, name, 100)
    frame = stream_source(
        spark, stage, stream=name, startingOffsets="earliest", failOnDataLoss=strict
    )
    finish(run(frame, checkpoint))
    batch = Planned(
        spark, stage, tmp_path / "fault", stream=name, failOnDataLoss=strict, fetchTimeoutMs=2000
    )

    def make_again() -> None:
        client.call(lambda c: c.streams.delete(name))
        make_stream(client, name)
        append_rows(client, name, 200, tag="b")

    text = batch.failure_after(make_again)
    assert any(code in text for code in ("IRIS_DATA_LOSS: ", "IRIS_NO_STREAM: "))
    expect_code(run(frame, checkpoint), "IRIS_DATA_LOSS: ", "was deleted and created again")
    assert len(values(source(spark, stage, stream=name))) == 200


def test_what_the_store_could_not_record_fails_a_read_unless_configured_to_go_on(
    spark: SparkSession, relay: Relay, name: str, checkpoint: Path
) -> None:
    client = relay.client()
    make_stream(client, name, topic=f"{name}.>")
    rows = publish_rows(client, f"{name}.a", 50)
    until(lambda: len(read_stream(client, name)) == 50)
    relay.kill_store()
    publish_rows(client, f"{name}.a", 20, tag="lost")
    relay.start_store()
    rows += publish_rows(client, f"{name}.a", 50, first=50)
    until(lambda: len(read_stream(client, name)) == 100)

    text = failure(source(spark, relay, stream=name))
    assert "IRIS_DATA_LOSS: " in text
    assert "the store was not running" in text
    assert values(source(spark, relay, stream=name, failOnDataLoss=False)) == rows

    options: dict[str, Any] = {"stream": name, "startingOffsets": "earliest"}
    expect_code(run(stream_source(spark, relay, **options), checkpoint), "IRIS_DATA_LOSS: ", "the store was not running")  # fmt: skip
    query = run(stream_source(spark, relay, **options, failOnDataLoss=False), checkpoint)
    finish(query)
    assert sum(p.numInputRows for p in query.recentProgress) == 100


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_keys(stage: Relay, tmp_path: Path) -> Callable[[iris.Keyring], str]:
    """Return a function that writes a keyring file for this test's queries, and returns its path."""

    def put(keyring: iris.Keyring) -> str:
        save_keyring(tmp_path / "keyring.toml", keyring)
        return str(tmp_path / "keyring.toml")

    return put


def test_rows_under_a_key_that_a_task_does_not_hold_are_an_error_of_authentication(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, own_keys: Callable[[iris.Keyring], str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """They also count as loss, which may be allowed."""
    ours = load_keyring(stage.keyring)
    (key,) = ours.for_cluster(name)
    new = iris.ClusterKey(os.urandom(32))
    rotated = ours.add(name, new).promote(name, new.key_id)
    make_stream(client, name)
    rows = append_rows(client, name, 20)
    both = iris.blocking.connect(stage.socket, keyring=rotated)
    try:
        both.call(lambda c: c.streams.share_keys())
        late = append_rows(both, name, 30, first=20)
    finally:
        both.close()
    path = own_keys(rotated)
    options: dict[str, Any] = {"stream": name, "keyringFile": path}
    assert values(source(spark, stage, **options)) == rows + late

    def forget() -> None:
        own_keys(iris.Keyring.single(new))

    text = Planned(spark, stage, tmp_path / "strict", **options).failure_after(forget)
    assert "IRIS_AUTH: " in text
    assert f"sealed under key {key.key_id.hex()[:8]}, which is not in this keyring" in text
    own_keys(rotated)
    lenient = Planned(spark, stage, tmp_path / "lenient", **options, failOnDataLoss="false")
    assert lenient.rows_after(forget) == late


def test_a_keyring_without_any_key_of_a_stream_reads_nothing_of_it(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, own_keys: Callable[[iris.Keyring], str],
    tmp_path: Path,
) -> None:  # fmt: skip
    make_stream(client, name)
    append_rows(client, name, 20)
    path = own_keys(load_keyring(stage.keyring))
    options: dict[str, Any] = {"stream": name, "keyringFile": path, "failOnDataLoss": "false"}
    task = Planned(spark, stage, tmp_path / "task", **options)
    foreign = iris.Keyring.single(iris.ClusterKey(os.urandom(32)))
    text = task.failure_after(lambda: own_keys(foreign))
    assert "IRIS_AUTH: " in text
    # To the driver the stream does not seem to exist.
    options["fetchOffset.numRetries"] = 0
    assert "IRIS_NO_STREAM: " in failure(source(spark, stage, **options))


def test_a_keyring_that_others_may_read_or_that_is_not_there_is_refused(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    make_stream(client, name)
    append_rows(client, name, 20)
    path = tmp_path / "keys.toml"
    options: dict[str, Any] = {"stream": name, "keyringFile": path, "failOnDataLoss": False}
    assert "IRIS_AUTH: " in failure(source(spark, stage, **options))
    shutil.copy(stage.keyring, path)
    path.chmod(0o644)
    text = failure(source(spark, stage, **options))
    assert "IRIS_AUTH: " in text
    assert str(path) in text


# -- nobody answers ------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_holds_is_an_error(
    spark: SparkSession, stage: Relay, name: str, checkpoint: Path
) -> None:
    options: dict[str, Any] = {"stream": name, "failOnDataLoss": False}
    options["fetchOffset.numRetries"] = 1
    assert "IRIS_NO_STREAM: " in failure(source(spark, stage, **options))
    expect_code(run(stream_source(spark, stage, **options), checkpoint), "IRIS_NO_STREAM: ")


def test_a_relay_that_is_gone_is_an_error_in_time_for_every_reader(
    spark: SparkSession, relay: Relay, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    client = relay.client()
    make_stream(client, name)
    append_rows(client, name, 100)
    options: dict[str, Any] = {"stream": name, "failOnDataLoss": "false", "fetchTimeoutMs": 500}
    options["fetchOffset.numRetries"] = 0
    # The relay is there while it is planned.
    task = Planned(spark, relay, tmp_path / "task", **{**options, "fetchTimeoutMs": 3000})
    assert "IRIS_TIMEOUT: " in task.failure_after(relay.kill_relay)
    assert "IRIS_TIMEOUT: " in failure(source(spark, relay, **options))
    stream = stream_source(spark, relay, **options, startingOffsets="earliest")
    expect_code(run(stream, checkpoint), "IRIS_TIMEOUT: ")
