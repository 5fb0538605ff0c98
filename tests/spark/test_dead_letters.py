"""Rows that do not parse go to a topic or stream, with the reason; the others are processed, and none is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark.kit import PATIENCE_S, finish, make_stream, source, stream_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import iris
    import iris.blocking
    from spark.kit import Relay

GOOD = [json.dumps({"id": n, "total": n / 2}).encode() for n in range(200)]
BAD = [b"no json", b"[1]", b'{"id": "seven"}', b"\xff\xfe"]
SCHEMA = "id INT, total DOUBLE"


def fill(client: iris.blocking.Client, name: str) -> dict[int, bytes]:
    """Append good and bad rows, and return the bad ones by offset."""
    make_stream(client, name)
    rows = list(GOOD)
    for number, bad in enumerate(BAD):
        rows.insert(number * 50, bad)
    client.call(lambda c: c.streams.append_many(name, rows, timeout=PATIENCE_S))
    return {offset: row for offset, row in enumerate(rows) if row in BAD}


def letters(client: iris.blocking.Client, stream: str) -> list[Any]:
    """Return the dead letters in a stream."""

    async def read(c: iris.Client) -> list[Any]:
        async with c.streams.read(stream, follow=False) as reader:
            return [message async for message in reader]

    return client.call(read)


def ids(rows: list[Any]) -> list[int]:
    return sorted(row.id for row in rows)


def test_rows_that_a_python_function_cannot_parse_are_kept_with_the_reason(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    from iris.spark.dead_letters import with_dead_letter

    bad = fill(client, name)
    dead = make_stream(client, f"{name}-bad")
    rows = source(spark, stage, stream=name)
    good = with_dead_letter(rows, json.loads, schema=SCHEMA, stream=dead, options=stage.options)
    assert good.columns == [*rows.columns, "parsed"]
    assert ids(good.select("parsed.*").collect()) == list(range(200))
    found = letters(client, dead)
    assert {int(one.headers["offset"]): one.payload for one in found} == bad
    assert {one.headers["topic"] for one in found} == {name}
    reasons = {one.payload: one.headers["reason"] for one in found}
    assert reasons[b"no json"].startswith("JSONDecodeError: ")
    assert reasons[b"[1]"].startswith("it does not fit the schema")
    assert reasons[b'{"id": "seven"}'].startswith("it does not fit the schema")


def test_a_column_that_is_null_is_a_dead_letter(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

    from iris.spark.dead_letters import with_dead_letter

    bad = fill(client, name)
    dead = make_stream(client, f"{name}-bad")
    good = with_dead_letter(
        source(spark, stage, stream=name),
        lambda value: F.from_json(value.cast("string"), f"{SCHEMA}, _corrupt_record STRING"),
        stream=dead,
        options=stage.options,
    )
    assert ids(good.select("parsed.id").collect()) == list(range(200))
    found = letters(client, dead)
    assert {int(one.headers["offset"]): one.payload for one in found} == bad
    assert {one.headers["reason"] for one in found} == {"parse returned null"}


def test_values_that_do_not_fit_value_schema_are_dead_letters_of_a_query(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    from iris.spark.dead_letters import with_dead_letter

    bad = fill(client, name)
    rows = stream_source(
        spark, stage, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger=100, valueFormat="json", valueSchema=SCHEMA,
    )  # fmt: skip
    received: list[Any] = []
    with client.subscribe(f"{name}.dead") as messages:
        good = with_dead_letter(rows, topic=f"{name}.dead", options=stage.options)
        assert "_corrupt_value" not in good.columns
        query = (
            good.writeStream.format("memory").queryName(name).option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        received += [next(messages) for _ in bad]
        finish(query)
    assert ids(spark.table(name).collect()) == list(range(200))
    assert {int(one.headers["offset"]): one.payload for one in received} == bad
    assert {one.headers["reason"] for one in received} == {"the value does not fit valueSchema"}
    assert {one.headers["spark-query"] for one in received} == {str(query.id)}
    assert {one.headers["spark-batch"] for one in received} == {"1", "2"}


def test_a_task_whose_dead_letters_cannot_be_kept_fails(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    from pyspark.errors import PySparkException

    from iris.spark.dead_letters import with_dead_letter

    fill(client, name)
    options = {**stage.options, "fetchTimeoutMs": "500"}
    good = with_dead_letter(
        source(spark, stage, stream=name), json.loads, schema=SCHEMA, stream="nobody-made-it", options=options
    )  # fmt: skip
    with pytest.raises(PySparkException, match="nobody-made-it"):
        good.collect()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "exactly one of"),
        ({"topic": "a", "stream": "b"}, "exactly one of"),
        ({"topic": "a"}, "_corrupt_value"),
        ({"topic": "a", "options": {"colour": "red"}}, "colour"),
        ({"topic": "a", "parse": bytes, "schema": "a INT", "taken": True}, "column 'parsed'"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(
    spark: SparkSession, settings: dict[str, Any], text: str
) -> None:
    from iris.spark import SparkError
    from iris.spark.dead_letters import with_dead_letter

    settings = dict(settings)
    column = "parsed" if settings.pop("taken", False) else "other"
    frame = spark.createDataFrame([(b"x", 1)], f"value BINARY, {column} INT")
    with pytest.raises(SparkError, match=text) as failure:
        with_dead_letter(frame, **settings)
    assert failure.value.code == "IRIS_CONFIG"


def test_a_value_of_null_is_not_a_dead_letter(spark: SparkSession) -> None:
    from iris.spark.dead_letters import with_dead_letter

    frame = spark.createDataFrame([(None, 1), (b'{"id": 2}', 2)], "value BINARY, n INT")
    good = with_dead_letter(frame, json.loads, schema="id INT", topic="nobody.hears")
    assert [(row.n, row.parsed) for row in good.orderBy("n").collect()] == [(1, None), (2, (2,))]
