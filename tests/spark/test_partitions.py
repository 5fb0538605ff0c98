"""Streams with several partitions, read and written by Spark: all of each partition, in order and once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import iris
from iris.spark.errors import SparkError
from iris.spark.offsets import Part, decode_offsets, encode_offsets
from iris.spark.options import SourceOptions
from iris.spark.planning import Planner
from spark import faults
from spark.faults import Fault
from spark.kit import (
    PATIENCE_S,
    Relay,
    append_rows,
    finish,
    make_row,
    make_stream,
    source,
    stream_source,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import iris.blocking

PARTITIONS = 3
ROW = "rpad(concat('a:', id, ':'), 40, '.')"
"""The same value as `make_row("a", id)`, as an SQL expression."""


def fill(client: iris.blocking.Client, stream: str, partition: int, first: int, count: int) -> None:
    """Append rows to one partition, whose tag names it."""
    rows = [make_row(str(partition), number) for number in range(first, first + count)]
    client.call(
        lambda c: c.streams.append_many(stream, rows, partition=partition, timeout=PATIENCE_S)
    )


def rows_by_partition(frame: DataFrame) -> dict[int, list[bytes]]:
    """Return the values of a frame by partition and offset."""
    found: dict[int, list[bytes]] = {}
    for row in sorted(frame.collect(), key=lambda row: (row.partition, row.offset)):
        found.setdefault(row.partition, []).append(bytes(row.value))
    return found


def numbered(partition: int, first: int, end: int) -> list[bytes]:
    return [make_row(str(partition), number) for number in range(first, end)]


def test_a_batch_read_has_a_task_for_each_partition_and_more_if_asked(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name, partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        fill(client, name, partition, 0, 40)
    frame = source(spark, stage, stream=name)
    assert frame.rdd.getNumPartitions() == PARTITIONS
    rows = frame.collect()
    assert Counter((row.topic, row.partition) for row in rows) == {
        (name, partition): 40 for partition in range(PARTITIONS)
    }
    assert rows_by_partition(frame) == {
        partition: numbered(partition, 0, 40) for partition in range(PARTITIONS)
    }
    assert source(spark, stage, stream=name, minPartitions=6).rdd.getNumPartitions() == 6

    between = {
        "startingOffsets": json.dumps({name: {"0": 10, "1": -2, "2": 40}}),
        "endingOffsets": json.dumps({name: {"0": 30, "1": 5, "2": -1}}),
    }
    assert rows_by_partition(source(spark, stage, stream=name, **between)) == {
        0: numbered(0, 10, 30),
        1: numbered(1, 0, 5),
    }


@pytest.mark.parametrize(
    ("offsets", "text"),
    [({"0": 1}, "no offset is given for partition 1"), ({"0": 1, "1": 1, "2": 1}, "has no partition 2")],
)  # fmt: skip
def test_offsets_must_name_the_partitions_that_there_are(
    stage: Relay, client: iris.blocking.Client, name: str, offsets: dict[str, int], text: str
) -> None:
    make_stream(client, name, partitions=2)
    for partition in range(2):
        fill(client, name, partition, 0, 2)
    options = {"stream": name, "startingOffsets": json.dumps({name: offsets}), **stage.options}
    planner = Planner(SourceOptions.parse(options, streaming=True))
    with pytest.raises(SparkError, match=text):
        planner.initial()


def test_partitions_that_were_added_are_read_from_their_beginning(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path
) -> None:
    """The query began with a stream of one partition, whose checkpoint is as it was before there were partitions."""
    make_stream(client, name)
    fill(client, name, 0, 0, 20)
    read: list[tuple[int, int, bytes]] = []

    def keep(frame: DataFrame, _: int) -> None:
        read.extend((row.partition, row.offset, bytes(row.value)) for row in frame.collect())

    def run() -> Any:
        query = (
            stream_source(spark, stage, stream=name, startingOffsets="earliest")
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        finish(query)
        return json.loads(query.recentProgress[-1]["sources"][0]["endOffset"])

    ends = run()
    assert {key: end for key, end in ends[name].items() if key != "log"} == {"0": 20}
    client.call(lambda c: c.streams.change(name, partitions=2))
    fill(client, name, 1, 0, 30)
    fill(client, name, 0, 20, 5)
    assert run()[name] == {"0": 25, "1": 30, "log": ends[name]["log"]}
    assert sorted(read) == [
        *((0, number, make_row("0", number)) for number in range(25)),
        *((1, number, make_row("1", number)) for number in range(30)),
    ]


def test_a_limit_is_shared_by_the_partitions(
    stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name, partitions=2)
    fill(client, name, 0, 0, 10)
    fill(client, name, 1, 0, 30)
    options = {
        "stream": name, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20", "minPartitions": "4", **stage.options
    }  # fmt: skip
    planner = Planner(SourceOptions.parse(options, streaming=True))
    start = planner.initial()
    planner.ranges(start, start)  # the first batch is empty
    end = planner.next_end(decode_offsets(encode_offsets(start)))
    assert {part.partition: position.offset for part, position in end.items()} == {0: 5, 1: 15}
    ranges = planner.ranges(start, end)
    assert [(one.partition, one.start, one.end) for one in ranges] == [
        (0, 0, 5), (1, 0, 5), (1, 5, 10), (1, 10, 15)
    ]  # fmt: skip
    assert end[Part(name, 0)].uuid == ranges[1].uuid != ranges[1].log


# -- writing -----------------------------------------------------------------------------------------------------------


def messages_of(client: iris.blocking.Client, stream: str) -> list[iris.StreamMessage]:
    """Return what is in all partitions now."""

    async def read(c: iris.Client) -> list[iris.StreamMessage]:
        async with c.streams.read(stream, follow=False) as reader:
            return [message async for message in reader]

    return client.call(read)


def test_rows_with_a_key_go_to_its_partition_and_others_to_all(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str
) -> None:
    make_stream(client, name, partitions=PARTITIONS)
    tasks = 32  # each begins at any partition: the chance that none begins at one of them is 1 in 100,000
    frame = spark.range(0, 400, 1, tasks).selectExpr(
        "if(id % 4 = 0, null, concat('k', id % 10)) key", f"{ROW} value"
    )
    frame.write.format("iris").options(**stage.options).option("stream", name).mode("append").save()
    found = messages_of(client, name)
    assert sorted(message.payload for message in found) == sorted(
        make_row("a", number) for number in range(400)
    )
    assert {message.partition for message in found if not message.key} == set(range(PARTITIONS))
    for key in {message.key for message in found if message.key}:
        offset: Any = client.call(lambda c, key=key: c.streams.append(name, b"later", key=key))
        partitions = {message.partition for message in found if message.key == key}
        assert partitions == {offset.partition}


def test_a_commit_that_failed_between_two_partitions_is_completed(
    spark: SparkSession, stage: Relay, client: iris.blocking.Client, name: str, checkpoint: Path, tmp_path: Path
) -> None:  # fmt: skip
    """The rows have no keys, so the tasks that run again send them elsewhere; one partition was added meanwhile."""
    faults.register(spark)
    make_stream(client, name)
    rows = append_rows(client, name, 600)
    target = make_stream(client, f"{name}.out", partitions=PARTITIONS)
    fault = Fault(tmp_path / "fault", point="between", action="fail")

    def start() -> Any:
        return (
            stream_source(spark, stage, stream=name, startingOffsets="earliest", minPartitions=2)
            .select("value")
            .writeStream.format(faults.FORMAT)
            .options(**stage.options, **fault.options)
            .option("stream", target)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    with pytest.raises(Exception, match="the fault that was asked for"):
        finish(start())
    assert fault.happened
    assert 0 < len(messages_of(client, target)) < 600
    client.call(lambda c: c.streams.change(target, partitions=PARTITIONS + 1))
    finish(start())
    assert sorted(message.payload for message in messages_of(client, target)) == sorted(rows)
