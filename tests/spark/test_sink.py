"""`df.write` and `df.writeStream` of the format "iris": a batch is stored whole and once, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import iris
from spark import faults
from spark.faults import Fault
from spark.kit import (
    Relay,
    append_rows,
    finish,
    make_row,
    make_stream,
    read_stream,
    rows_of,
    source,
    stream_source,
    streams_of,
    until,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import iris.blocking

ROW = "rpad(concat('a:', id, ':'), 40, '.')"
"""The same value as `make_row("a", id)`, as an SQL expression."""
OWN = ["spark-batch", "spark-partition", "spark-query", "spark-row"]


def frame_of(spark: SparkSession, count: int, *columns: str, parts: int = 2) -> DataFrame:
    """Return a frame of rows 0 to `count` in `parts` partitions."""
    return spark.range(0, count, 1, parts).selectExpr(f"{ROW} value", *columns)


def save(frame: DataFrame, relay: Relay, *, format: str = "iris", **options: Any) -> None:
    frame.write.format(format).options(**relay.options).options(**options).mode("append").save()


def messages_of(
    client: iris.blocking.Client, stream: str, count: int = 0
) -> list[iris.StreamMessage]:
    """Return the messages of a stream once it has `count`: a store records casts and pushes after they are sent."""
    until(lambda: client.call(lambda c: c.streams.describe(stream)).end >= count)

    async def read(c: iris.Client) -> list[iris.StreamMessage]:
        async with c.streams.read(stream, follow=False) as reader:
            return [message async for message in reader]

    return client.call(read)


def own_headers(message: iris.StreamMessage) -> tuple[str, str, int, int]:
    """Return the headers that identify a live row: query, batch, partition, row."""
    headers = message.headers or {}
    assert sorted(name for name in headers if name.startswith("spark-")) == OWN
    query, batch, part, row = (headers[name] for name in ("spark-query", *OWN[:2], "spark-row"))
    return query, batch, int(part), int(row)


# -- into a stream -------------------------------------------------------------------------------------------


def test_a_batch_write_appends_every_row_once_and_side_by_side(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    before = append_rows(client, name, 5, tag="before")
    save(frame_of(spark, 3000, parts=4), stage, stream=name)
    found = read_stream(client, name)
    assert found[:5] == before
    assert found[5:] == [make_row("a", number) for number in range(3000)]
    assert client.call(lambda c: c.streams.describe(name)).end == 3005


def test_nothing_of_a_batch_is_seen_before_all_of_it(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    faults.register(spark)
    make_stream(client, name)
    fault = Fault(tmp_path / "fault", point="commit", action="halt")
    seen: list[list[bytes]] = []

    def look() -> None:
        # All tasks have staged their rows.
        seen.append(read_stream(client, name))
        fault.release()

    with fault.meanwhile(look):
        save(frame_of(spark, 1000), stage, format=faults.FORMAT, stream=name, **fault.options)
    assert seen == [[]]
    assert read_stream(client, name) == [make_row("a", number) for number in range(1000)]


def test_a_write_that_fails_leaves_nothing_behind(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    broken = frame_of(spark, 1000, parts=2).selectExpr(
        "if(value like 'a:990:%', raise_error('no more'), value) value"
    )
    with pytest.raises(Exception, match="no more"):
        save(broken, stage, stream=name)
    assert read_stream(client, name) == []
    assert client.call(lambda c: c.streams.describe(name)).end == 0


def test_an_empty_frame_is_an_empty_batch(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    save(frame_of(spark, 0), stage, stream=name)
    assert read_stream(client, name) == []


def test_a_batch_that_its_writer_has_written_is_not_written_again(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    for batch, count in ((7, 100), (7, 100), (8, 50), (7, 100)):
        frame = frame_of(spark, count).selectExpr(f"concat('{batch}-', value) value")
        save(frame, stage, stream=name, writerId="nightly", batchId=batch)
    assert read_stream(client, name) == [
        f"{batch}-".encode() + make_row("a", number)
        for batch, count in ((7, 100), (8, 50))
        for number in range(count)
    ]


def test_a_query_copies_a_stream_batch_by_batch(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    target = f"{name}.out"
    make_stream(client, name)
    rows = append_rows(client, name, 700)
    frame = stream_source(spark, stage, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger=300, minPartitions=2)  # fmt: skip
    for first in (700, 900):
        query = (
            frame.select("value")
            .writeStream.format("iris")
            .options(**stage.options)
            .option("stream", target)
            .option("createStream", "true")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        finish(query)
        read = [p.numInputRows for p in query.recentProgress if p.numInputRows]
        assert read == ([300, 300, 100] if first == 700 else [200])
        # Partitions of a batch are appended in their order.
        assert read_stream(client, target) == rows
        if first == 700:
            rows += append_rows(client, name, 200, first=700)


def test_keys_and_headers_come_back_as_they_went(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    columns = (
        "if(id % 3 = 0, null, concat('key-', id)) key",
        "if(id % 4 = 0, null, array(struct('n' as key, cast(string(id) as binary) as value),"
        " struct('é' as key, cast('ü' as binary) as value))) headers",
    )
    save(frame_of(spark, 400, *columns), stage, stream=name)
    found = source(spark, stage, stream=name, includeHeaders=True).collect()
    assert len(found) == 400
    for row in found:
        number = int(bytes(row.value).split(b":")[1])
        assert bytes(row.value) == make_row("a", number)
        assert row.key == (None if number % 3 == 0 else f"key-{number}".encode())
        headers = None if row.headers is None else [(h.key, bytes(h.value)) for h in row.headers]
        expected = [("n", str(number).encode()), ("é", "ü".encode())]
        assert headers == (None if number % 4 == 0 else expected)
    # Rows can be written as they were read.
    copy = make_stream(client, f"{name}b")
    frame = source(spark, stage, stream=name, includeHeaders=True)
    save(frame.select("key", "value", "headers"), stage, stream=copy)
    again = source(spark, stage, stream=copy, includeHeaders=True)
    columns = ("offset", "key", "value", "headers")
    assert again.select(*columns).collect() == frame.select(*columns).collect()


def test_a_row_without_a_value_deletes_its_key_in_a_compacted_stream(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name, compact=True)
    nulls = spark.range(0, 40, 1, 2).selectExpr(
        f"if(id % 2 = 1, {ROW}, null) value", "concat('k', id) key"
    )
    save(nulls, stage, stream=name)
    found = messages_of(client, name)
    assert [message.tombstone for message in found] == [number % 2 == 0 for number in range(40)]
    rows = rows_of(source(spark, stage, stream=name))
    assert [bytes(row.key) for row in rows] == [f"k{number}".encode() for number in range(40)]
    assert [None if row.value is None else bytes(row.value) for row in rows] == [
        make_row("a", number) if number % 2 else None for number in range(40)
    ]

    plain = make_stream(client, f"{name}b")
    with pytest.raises(Exception, match=r"IRIS_CONFIG: a value is null.*keyedRecords"):
        save(nulls, stage, stream=plain)
    assert read_stream(client, plain) == []
    save(nulls, stage, stream=plain, keyedRecords="true")
    assert sum(message.tombstone for message in messages_of(client, plain)) == 20


def test_a_stream_is_made_only_if_that_was_asked_for(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    frame = frame_of(spark, 10)
    with pytest.raises(Exception, match="IRIS_NO_STREAM: "):
        save(frame, stage, stream=name, fetchTimeoutMs=500)
    assert streams_of(client, name) == []
    for _ in range(2):
        save(frame, stage, stream=name, createStream="true")
    assert len(read_stream(client, name)) == 20


# -- live ----------------------------------------------------------------------------------------------------


def test_rows_are_published_to_the_topic_that_they_or_the_option_name(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name, topic=f"{name}.>")
    save(frame_of(spark, 100), stage, topic=f"{name}.all")
    frame = frame_of(spark, 100, f"if(id < 50, concat('{name}.', id % 2), null) topic")
    save(frame, stage, topic=f"{name}.rest")
    found = messages_of(client, name, 200)
    everything, named = found[:100], found[100:]
    expected = sorted(make_row("a", number) for number in range(100))
    assert sorted(message.payload for message in everything) == expected
    assert sorted(message.payload for message in named) == expected
    assert {message.name for message in everything} == {f"{name}.all"}
    for message in named:
        number = int(message.payload.split(b":")[1])
        assert message.name == f"{name}.{number % 2 if number < 50 else 'rest'}"
    # Each row has an id, by which its receivers recognize a repetition.
    ids = [own_headers(message) for message in found]
    assert len(set(ids)) == 200
    assert len({query for query, *_ in ids}) == 2
    assert {part for _, _, part, _ in ids} == {0, 1}


@pytest.mark.parametrize("mode", ["push", "broadcast"])
def test_rows_are_sent_to_the_cluster_that_they_or_the_option_name(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, mode: str
) -> None:
    clusters = [f"{name}a", f"{name}b"]
    for cluster in clusters:
        make_stream(client, cluster, cluster=cluster)
    frame = frame_of(spark, 100, f"if(id < 30, '{clusters[1]}', null) cluster")
    save(frame, stage, cluster=clusters[0], sendMode=mode)
    counts = (70, 30)
    first, second = (messages_of(client, *each) for each in zip(clusters, counts, strict=True))
    numbers = [
        sorted(int(message.payload.split(b":")[1]) for message in found)
        for found in (first, second)
    ]
    assert numbers == [list(range(30, 100)), list(range(30))]
    assert len({own_headers(message) for message in (*first, *second)}) == 100


def test_rows_that_are_pushed_to_nobody_fail_their_task(
    spark: SparkSession, stage: Relay, name: str
) -> None:
    with pytest.raises(Exception, match=f"IRIS_SINK: 5 pushes failed, .*: {name}a: no members"):
        save(frame_of(spark, 10), stage, cluster=f"{name}a", sendMode="push")


def test_a_query_publishes_with_its_own_id_and_batch_numbers(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    make_stream(client, name)
    target = make_stream(client, f"{name}.out", topic=f"{name}.live")
    rows = append_rows(client, name, 150)
    frame = stream_source(
        spark, stage, stream=name, startingOffsets="earliest", maxOffsetsPerTrigger=100
    )
    query = (
        frame.select("value")
        .writeStream.format("iris")
        .options(**stage.options)
        .option("topic", f"{name}.live")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    found = messages_of(client, target, 150)
    assert [message.payload for message in found] == rows
    # Batch 0 holds nothing but the offset at which the query begins.
    assert [own_headers(message) for message in found] == [
        (query.id, "1", 0, row) for row in range(100)
    ] + [(query.id, "2", 0, row) for row in range(50)]


def test_at_least_once_into_a_stream_names_its_rows(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    save(frame_of(spark, 300), stage, stream=name, delivery="at_least_once")
    found = messages_of(client, name)
    assert sorted(m.payload for m in found) == sorted(make_row("a", n) for n in range(300))
    assert len({own_headers(message) for message in found}) == 300


# -- refused -------------------------------------------------------------------------------------------------


def wrong(name: str) -> Iterator[tuple[list[str], dict[str, str], str]]:
    """Yield columns besides `value`, options, and the error that they must raise."""
    yield ["1 n"], {"stream": name}, "sendMode=append does not use column 'n'"
    yield ["'t' topic"], {"stream": name}, "sendMode=append does not use column 'topic'"
    yield ["1 key"], {"stream": name}, "column 'key' is int, not string or binary"
    yield ["1 headers"], {"stream": name}, "column 'headers' is int, not array<struct<"
    yield ["1 topic"], {"sendMode": "publish"}, "column 'topic' is int, not string"
    yield [], {"sendMode": "push"}, "the rows have no destination; give the option cluster"
    yield [], {"stream": name, "topic": "a"}, "stream, topic, cluster: give only one"
    yield [], {"stream": name, "sendmodes": "push"}, "sendmodes: the iris format has no such option for writing; did you mean sendMode?"  # fmt: skip
    yield (
        [],
        {"topic": "a", "delivery": "exactly_once"},
        "delivery=exactly_once requires the option stream",
    )
    yield [], {"topic": "a.>"}, ""


def test_a_column_or_option_that_the_sink_cannot_use_is_named(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    for columns, options, said in wrong(name):
        with pytest.raises(Exception, match="IRIS_CONFIG: ") as caught:
            save(frame_of(spark, 3, *columns), stage, **options)
        assert f"IRIS_CONFIG: {said}" in str(caught.value)
    with pytest.raises(Exception, match="IRIS_CONFIG: the frame has no column 'value'"):
        save(spark.range(3), stage, stream=name)
    with pytest.raises(Exception, match="IRIS_CONFIG: column 'value' is bigint"):
        save(spark.range(3).withColumnRenamed("id", "value"), stage, stream=name)
    assert read_stream(client, name) == []


def test_a_stream_is_not_overwritten(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    rows = append_rows(client, name, 10)
    writer = frame_of(spark, 3).write.format("iris").options(**stage.options)
    with pytest.raises(Exception, match=r"IRIS_CONFIG: .*mode\('append'\)"):
        writer.option("stream", name).mode("overwrite").save()
    assert read_stream(client, name) == rows
