"""A store of a bucket is killed and its disk deleted while a query copies a stream with partitions to another one: each
row is stored once, and the rows of a key keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.buckets import Group

import iris.blocking
from iris.errors import IrisError
from iris.keyfiles import load_keyring
from spark import faults
from spark.faults import FORMAT, POINTS, Fault
from spark.kit import PATIENCE_S, make_row, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import iris

PARTITIONS = 3
KEYS = 8
BATCH = 60
"""Rows of a batch of the query."""


class Copy:
    """Two streams in the bucket of two stores, and a query that copies one to the other."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.group = Group(directory)
        self.client: iris.blocking.Client
        self.failed: list[str] = []
        """Errors with which the query ended, before it was started again from its checkpoint."""
        self._spark = spark
        self._checkpoint = directory / "checkpoint"
        self._keyring = directory / "iris" / "dev" / "keyring.toml"
        self._rows: list[tuple[str | None, bytes]] = []

    def begin(self) -> None:
        """Start the stores and create the streams."""
        self.group.__enter__()
        self.start_stores(1, 2)
        self.client = iris.blocking.connect(
            self.group.rig.socket, keyring=load_keyring(self._keyring)
        )
        for name in ("orders", "copy"):
            self.client.call(lambda c, name=name: self.group.create(c, name, partitions=PARTITIONS))
            infos = self.client.call(lambda c, name=name: c.streams.partitions(name))
            assert len({info.store for info in infos}) == 2

    def end(self) -> None:
        """End everything."""
        try:
            self.client.close()
        finally:
            self.group.__exit__(None, None, None)

    def start_stores(self, *numbers: int) -> None:
        """Start stores. Return when they use the bucket and each has seen the other one, so that it takes over soon."""
        marks = {number: len(self.group.log(number)) for number in (1, 2)}
        for number in numbers:
            self.group.start(number)
        for number in (1, 2):
            until(lambda n=number: '"store.peer_seen"' in self.group.log(n)[marks[n] :])
        for number in numbers:
            until(lambda n=number: '"store.bucket_opened"' in self.group.log(n)[marks[n] :])

    def append(self, count: int) -> None:
        """Append rows, most of them with one of a few keys, and return when the bucket has them."""
        first = len(self._rows)
        numbers = range(first, first + count)
        keys = [f"k{n % KEYS}" if n % 5 else None for n in numbers]
        rows = [(key, make_row(key or "none", n)) for key, n in zip(keys, numbers, strict=True)]

        async def append(c: iris.Client) -> None:
            await asyncio.gather(
                *(c.streams.append("orders", row, key=key, timeout=PATIENCE_S) for key, row in rows)
            )

        self.client.call(append)
        self._rows += rows

    def start(self, fault: Fault) -> Any:
        """Start the query, which goes on from its checkpoint."""
        options = {"relay": str(self.group.rig.socket), "keyringFile": str(self._keyring)}
        return (
            self._spark.readStream.format(FORMAT)
            .options(**options, **fault.options)
            .option("stream", "orders")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(BATCH))
            .load()
            .select("key", "value")
            .writeStream.format(FORMAT)
            .options(**options, **fault.options)
            .option("stream", "copy")
            .option("checkpointLocation", str(self._checkpoint))
            .start()
        )

    def lose(self, name: str) -> int:
        """Kill the store of a log, delete its disk, and return its number."""
        number = self.client.call(lambda c: self.group.holder(c, name))
        self.group.kill(number)
        self.group.lose_disk(number)
        return number

    def copied(self) -> int:
        """Return the number of rows that the copy has, as far as its stores answer."""
        try:
            infos = self.client.call(lambda c: c.streams.partitions("copy", timeout=2))
        except (IrisError, TimeoutError):  # partition 0 is away
            return 0
        return sum(info.end for info in infos)

    def finish(self, query: Any, fault: Fault) -> None:
        """Wait until everything is copied. A query that fails is started again."""

        def done() -> bool:
            nonlocal query
            if (error := query.exception()) is not None:
                self.failed.append(str(error))
                assert len(self.failed) <= 20, self.failed[-1]
                query = self.start(fault)
            return self.copied() >= len(self._rows)

        try:
            until(done)
            until(lambda: not query.status["isTriggerActive"] or query.exception() is not None)
        finally:
            query.stop()

    def check(self) -> None:
        """Check that the copy has each row once, and those of each key in order."""

        async def read(c: iris.Client) -> list[iris.StreamMessage]:
            async with c.streams.read("copy", follow=False, patience=PATIENCE_S) as reader:
                return [message async for message in reader]

        messages = self.client.call(read)
        assert sorted(message.payload for message in messages) == sorted(
            row for _, row in self._rows
        )
        for wanted in {key for key, _ in self._rows if key is not None}:
            of_key = [message for message in messages if message.key == wanted.encode()]
            assert len({message.partition for message in of_key}) == 1
            assert [message.payload for message in of_key] == [
                row for key, row in self._rows if key == wanted
            ]


@pytest.fixture
def copy(spark: SparkSession, tmp_path: Path) -> Iterator[Copy]:
    """Two stores, two streams and a query, which does not run yet."""
    faults.register(spark)
    made = Copy(spark, tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.end()


def test_a_store_lost_between_the_commits_of_two_partitions_loses_and_doubles_no_row(
    copy: Copy, tmp_path: Path
) -> None:
    """It holds the plan of the commit. Rows that are appended meanwhile are copied, too."""
    copy.append(2 * BATCH)
    fault = Fault(tmp_path / "fault", point="between", action="halt")
    query = copy.start(fault)
    fault.wait(query)
    copy.lose("copy")
    fault.release()
    copy.append(BATCH)
    copy.finish(query, fault)
    copy.check()
    assert copy.failed == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_store_lost_at_any_point_of_a_batch_loses_and_doubles_no_row(
    copy: Copy, tmp_path: Path
) -> None:
    """Each time another store with an empty disk comes back, and the next one is killed."""
    turns = [(point, "halt") for point in POINTS]
    # The batch fails as well, and its next run completes what was planned; rows without a key would go elsewhere.
    turns.append(("between", "fail"))
    for turn, (point, action) in enumerate(turns):
        copy.append(2 * BATCH)
        fault = Fault(tmp_path / f"fault{turn}", point=point, action=action)
        query = copy.start(fault)
        fault.wait(query)
        lost = copy.lose(("orders", "copy/1")[turn % 2])
        fault.release()
        copy.append(BATCH)
        copy.finish(query, fault)
        copy.check()
        assert bool(copy.failed) == (action == "fail")
        copy.start_stores(lost)
