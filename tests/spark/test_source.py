"""`spark.read.format("iris")`: a read returns all stored rows, each once, in Kafka's columns."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import iris
import iris.spark
from spark.faults import secrets
from spark.kit import (
    PATIENCE_S,
    Relay,
    append_rows,
    make_row,
    make_stream,
    publish_rows,
    rows_of,
    source,
    streams_of,
    until,
    values,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import iris.blocking

KAFKA = [
    ("key", "binary"),
    ("value", "binary"),
    ("topic", "string"),
    ("partition", "int"),
    ("offset", "bigint"),
    ("timestamp", "timestamp"),
    ("timestampType", "int"),
]
"""Columns and types of Spark's Kafka source, from its documentation."""


def test_a_batch_read_is_the_whole_stream_in_the_columns_of_kafka(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    before = time.time()
    rows = append_rows(client, name, 700)
    frame = source(spark, stage, stream=name)
    assert frame.dtypes == KAFKA
    found = rows_of(frame)
    assert [bytes(row.value) for row in found] == rows
    assert [row.offset for row in found] == list(range(700))
    assert {(row.key, row.topic, row.partition, row.timestampType) for row in found} == {
        (None, name, 0, 0)
    }
    sent = [row.timestamp.timestamp() for row in found]
    assert before - 1 <= min(sent) <= max(sent) <= time.time() + 1


def test_keys_and_headers_are_those_of_the_messages(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)

    async def append(c: iris.Client) -> None:
        await c.streams.append(name, b"plain")
        await c.streams.append(name, b"keyed", key="AA")
        await c.streams.append(name, b"both", key=b"\xff", headers={"kind": "é", "empty": ""})
        await c.streams.append(name, b"", headers={"n": "1"})

    client.call(append)
    frame = source(spark, stage, stream=name, includeHeaders=True)
    assert frame.dtypes == [
        *KAFKA,
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    found = [
        (
            bytes(row.value),
            None if row.key is None else bytes(row.key),
            None if row.headers is None else {h.key: bytes(h.value) for h in row.headers},
        )
        for row in rows_of(frame)
    ]
    assert found == [
        (b"plain", None, None),
        (b"keyed", b"AA", None),
        (b"both", b"\xff", {"kind": "é".encode(), "empty": b""}),
        (b"", None, {"n": b"1"}),
    ]


def test_a_read_between_two_offsets_is_what_lies_between_them(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    rows = append_rows(client, name, 300)

    def read(**offsets: Any) -> list[bytes]:
        texts = {option: json.dumps({name: {"0": at}}) for option, at in offsets.items()}
        return values(source(spark, stage, stream=name, **texts))

    assert read(startingOffsets=17, endingOffsets=211) == rows[17:211]
    assert read(startingOffsets=-2, endingOffsets=-1) == rows
    assert read(startingOffsets=299) == rows[299:]
    assert read(startingOffsets=300) == []
    assert read(startingOffsets=40, endingOffsets=40) == []


def test_an_empty_stream_is_an_empty_frame(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    frame = source(spark, stage, stream=name, minPartitions=4)
    assert frame.dtypes == KAFKA
    assert frame.count() == 0


def test_a_read_from_a_time_on_is_what_was_stored_since(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    early = append_rows(client, name, 100)
    between_ms = time.time_ns() // 1_000_000 + 1
    until(lambda: time.time_ns() // 1_000_000 > between_ms)
    late = append_rows(client, name, 100, first=100)
    assert values(source(spark, stage, stream=name, startingTimestamp=between_ms)) == late
    assert values(source(spark, stage, stream=name, endingTimestamp=between_ms)) == early


def test_parts_of_a_read_lose_and_double_nothing(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    from pyspark.sql.functions import spark_partition_id

    make_stream(client, name)
    rows = append_rows(client, name, 1000)

    def parts(**options: int) -> list[int]:
        frame = source(spark, stage, stream=name, **options)
        found = frame.withColumn("part", spark_partition_id()).collect()
        assert sorted((row.offset, bytes(row.value)) for row in found) == list(enumerate(rows))
        counts: dict[int, int] = {}
        for row in found:
            counts[row.part] = counts.get(row.part, 0) + 1
        return [counts[part] for part in sorted(counts)]

    assert parts(minPartitions=7) == [142, 143, 143, 143, 143, 143, 143]
    most = parts(maxRecordsPerPartition=301)
    assert len(most) == 4
    assert max(most) <= 301
    assert len(parts(fetchBytes=3000)) == 1


def test_several_streams_are_one_frame(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    first, second = make_stream(client, f"{name}a"), make_stream(client, f"{name}b")
    here = append_rows(client, first, 50, tag="a")
    there = append_rows(client, second, 70, tag="b")
    offsets = json.dumps({first: {"0": 20}, second: {"0": -2}})
    frame = source(spark, stage, stream=f"{first}, {second}", startingOffsets=offsets)
    assert values(frame) == here[20:] + there
    assert {row.topic for row in frame.select("topic").distinct().collect()} == {first, second}


def test_meta_columns_say_who_sent_a_row_and_which_of_theirs_it_is(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    append_rows(client, name, 60)
    frame = source(spark, stage, stream=name, includeMeta=True, includeHeaders=True)
    assert frame.dtypes[-4:] == [
        ("headers", "array<struct<key:string,value:binary>>"),
        ("sender", "binary"),
        ("cluster", "string"),
        ("sequence", "bigint"),
    ]
    found = rows_of(frame)
    assert len({bytes(row.sender) for row in found}) == 1
    assert {row.cluster for row in found} == {None}
    sequences = [row.sequence for row in found]
    assert sequences == list(range(sequences[0], sequences[0] + 60))


def test_a_header_may_be_the_timestamp(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)

    async def append(c: iris.Client) -> None:
        await c.streams.append(name, b"1", headers={"at": "2024-05-06T07:08:09+00:00"})
        await c.streams.append(name, b"2", headers={"at": "1700000000123"})

    client.call(append)
    frame = source(spark, stage, stream=name, timestampHeader="at")
    columns = ("topic", "offset", "cast(timestamp as double) t")
    times = [float(row.t) for row in rows_of(frame.selectExpr(*columns))]
    assert times == [datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC).timestamp(), 1_700_000_000.123]


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_values_are_decoded_to_columns_and_what_does_not_fit_is_kept(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, form: str
) -> None:
    make_stream(client, name)
    encode = msgspec.json.encode if form == "json" else msgspec.msgpack.encode
    good = encode({"id": 7, "tags": ["x", "y"], "at": {"lat": 1.5}})
    wrong = encode({"id": "seven", "tags": [], "at": None})
    other = encode([1, 2])
    broken = b"\xc1{"
    bad = [wrong, other, broken]

    async def append(c: iris.Client) -> None:
        for value in (good, *bad):
            await c.streams.append(name, value)

    client.call(append)
    options = {
        "stream": name,
        "valueFormat": form,
        "valueSchema": "id BIGINT, tags ARRAY<STRING>, at STRUCT<lat: DOUBLE>",
    }
    frame = source(spark, stage, **options)
    assert frame.columns[:5] == ["key", "id", "tags", "at", "_corrupt_value"]
    first, *rest = rows_of(frame)
    assert (first.id, first.tags, first["at"].lat, first._corrupt_value) == (
        7,
        ["x", "y"],
        1.5,
        None,
    )
    assert [(row.id, bytes(row._corrupt_value)) for row in rest] == [(None, one) for one in bad]

    with pytest.raises(Exception, match="IRIS_MALFORMED: "):
        source(spark, stage, **options, valueMode="failfast").collect()
    # A read that failed does not make the next one fail.
    fitting = json.dumps({name: {"0": 1}})
    ok = source(spark, stage, **options, valueMode="failfast", endingOffsets=fitting).collect()
    assert [row.id for row in ok] == [7]


def test_a_group_reads_a_topic_from_a_stream_of_its_own(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    options = {"subscribe": f"{name}.>", "groupId": name, "includeMeta": True}
    assert source(spark, stage, **options).count() == 0
    (stream,) = streams_of(client, f"spark.{name}.")
    assert len(stream) == len(f"spark.{name}.") + 16
    rows = publish_rows(client, f"{name}.new", 200)
    until(lambda: client.call(lambda c: c.streams.describe(stream)).messages == 200)
    frame = source(spark, stage, **options)
    assert values(frame) == rows
    assert {(row.topic, row.cluster) for row in frame.collect()} == {(f"{name}.new", None)}
    assert streams_of(client, f"spark.{name}.") == [stream]


def test_a_cluster_is_read_as_a_member_that_takes_its_share(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    """Pushes go to the stream or to the other member, never to both; broadcasts to both."""
    options = {"cluster": name, "groupId": name, "includeMeta": True}
    assert source(spark, stage, **options).count() == 0
    (stream,) = streams_of(client, f"spark.{name}.")
    pushed: list[bytes] = []
    received: list[bytes] = []
    service = iris.Service(name)
    service.on_push(lambda data: pushed.append(data))
    service.on_broadcast(lambda data: received.append(data))
    pushes = [make_row("push", number) for number in range(200)]
    broadcasts = [make_row("broadcast", number) for number in range(50)]

    async def send(c: iris.Client) -> None:
        for row in pushes:
            await c.push(name, row, timeout=PATIENCE_S)
        for row in broadcasts:
            await c.broadcast(name, row)
        await c.flush(timeout=PATIENCE_S)

    def messages() -> int:
        return client.call(lambda c: c.streams.describe(stream)).messages

    other = stage.client()
    with other.serve(service):
        client.wait_for_members(name, 2, timeout=PATIENCE_S)
        client.call(send)
        until(lambda: len(received) == 50 and len(pushed) + messages() == 250)
    found = rows_of(source(spark, stage, **options))
    assert {(row.topic, row.cluster) for row in found} == {(name, name)}
    taken = [bytes(row.value) for row in found]
    shared = [row for row in taken if row.startswith(b"push")]
    assert shared, "the stream got no share"
    assert pushed, "the member got no share"
    assert sorted(shared + pushed) == sorted(pushes)
    assert [row for row in taken if row.startswith(b"broadcast")] == broadcasts


WRONG = [
    # Spark passes options to a source in lower case.
    ({"startingOffset": "earliest"}, "startingoffset: the iris format has no such option for reading; did you mean startingOffsets?"),
    ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger: "),
    ({"startingOffsets": '{"other": {"0": 3}}'}, "startingOffsets: this query does not read 'other'"),
    ({"keyringFile": "keyring.toml"}, "keyringFile: "),
    ({"subscribe": "a.>"}, "give exactly one of the options stream, subscribe, "),
    ({"valueFormat": "json", "valueSchema": "topic STRING"}, "valueSchema: "),
]  # fmt: skip


def test_a_wrong_option_is_named(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    for options, said in WRONG:
        with pytest.raises(Exception, match="IRIS_CONFIG: ") as caught:
            source(spark, stage, **{"stream": name, **options}).count()
        assert f"IRIS_CONFIG: {said}" in str(caught.value)


def test_the_source_has_its_own_columns_only(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name)
    reader = spark.read.format("iris").options(**stage.options).option("stream", name)
    with pytest.raises(Exception, match=r"IRIS_CONFIG: .*valueSchema"):
        reader.schema("value STRING").load().count()


def test_what_travels_to_tasks_holds_no_key(
    stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    from pyspark import cloudpickle
    from pyspark.sql.types import StringType, StructField, StructType

    from iris.spark import IrisSource, connections

    make_stream(client, name)
    append_rows(client, name, 20)
    made = IrisSource({**stage.options, "stream": name})
    schema = made.schema()
    reader = made.reader(schema)
    writer = made.writer(StructType([StructField("value", StringType())]), overwrite=False)
    stream_reader = made.streamReader(schema)
    # Each has been connected, or is as if it had been.
    parts = reader.partitions()
    stream_reader.initialOffset()
    try:
        sent = b"".join(
            cloudpickle.dumps(one) for one in (made, reader, *parts, stream_reader, writer)
        )
    finally:
        connections.close_all()
    assert str(stage.keyring).encode() in sent
    for secret in secrets(stage.keyring):
        assert secret not in sent


def test_registering_the_format_again_replaces_nothing_of_which_spark_would_warn(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(
        type(spark.dataSource), "register", lambda self, source: registered.append(source)
    )
    iris.spark.register(spark)
    assert registered == []
