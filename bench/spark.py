"""Compare the Spark source and sink with Spark's own, in one warmed-up session with two tasks: `make bench-spark`.

    python bench/spark.py --quick                    # one round, 50,000 rows
    python bench/spark.py --rounds 5 --rows 400000

Rows of 1 KiB. The relay and its stores are processes of their own and share the machine with Spark. With `--tasks 4`
there are as many tasks, and as many partitions, on two stores, in the cells that read partitions. Results go to
bench/results/: spark.json (every round) and spark.md. Needs the extra `spark`, and Java 17 or newer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import harness
from harness import BENCH, BenchError, IrisRelay, Result, Roles

import iris

RESULTS: Final = BENCH / "results"
ROW_BYTES: Final = 1024
TASKS: Final = 2
KEYED_PART: Final = 8
"""One row of so many is also appended with a key, as a record of its own."""
CHUNK_ROWS: Final = 20_000
TWIN_ROWS: Final = 4096
"""Rows of a record batch of the twin: 4 MiB, as in ours."""
PATIENCE_S: Final = 120.0
DEADLINE_S: Final = 3600.0
DISCARD: Final = 3
"""Micro-batches at the start of a query that are not counted."""


class Bench:
    """One session, one relay with its store, and the rows that are read."""

    def __init__(self, directory: Path, spark: Any, client: Any, rows: int, tasks: int) -> None:
        self.directory = directory
        self.tasks = tasks
        self.spark = spark
        self.client = client
        self.rows = rows
        self._number = 0

    def fresh(self, name: str) -> str:
        """Return an unused name."""
        self._number += 1
        return f"{name}-{self._number}"

    def fill(self) -> None:
        """Append the rows to the streams `bench` and `parts`, and write as many rows of that size to Parquet.

        A part of them are also appended to the stream `keyed`, each with a key.
        """
        blob = random.Random(1).randbytes(ROW_BYTES * 64)
        # The stores start beside the relay.
        wait_until(self._created)
        for first in range(0, self.rows, CHUNK_ROWS):
            rows = [
                number.to_bytes(8, "big") + blob[number % 64 : number % 64 + ROW_BYTES - 8]
                for number in range(first, min(first + CHUNK_ROWS, self.rows))
            ]
            self.client.call(
                lambda c, rows=rows: c.streams.append_many("bench", rows, timeout=PATIENCE_S)
            )
            share = -(-len(rows) // self.tasks)
            for partition in range(self.tasks):
                part = rows[partition * share : (partition + 1) * share]
                self.client.call(
                    lambda c, part=part, partition=partition: c.streams.append_many(
                        "parts", part, partition=partition, timeout=PATIENCE_S
                    )
                )
            self.client.call(lambda c, rows=rows: append_keyed(c, rows[::KEYED_PART]))
        self.source().select("value").write.mode("overwrite").parquet(self.parquet)

    def _created(self) -> bool:
        try:
            made = self.client.call(lambda c: c.streams.create("parts", partitions=self.tasks))
            self.client.call(lambda c: c.streams.create("bench"))
            self.client.call(lambda c: c.streams.create("keyed"))
            infos = self.client.call(lambda c: c.streams.partitions("parts"))
            if len({info.store for info in infos}) < min(2, self.tasks):
                self.client.call(lambda c: c.streams.delete("parts", uuid=made.uuid))
                raise iris.StreamUnavailable("parts", "the second store has not started")
        except iris.StreamUnavailable:
            time.sleep(0.1)
            return False
        return True

    @property
    def parquet(self) -> str:
        """Path of the Parquet file."""
        return str(self.directory / "rows.parquet")

    def source(self, stream: str = "bench") -> Any:
        """Return a stream as a DataFrame with a task for each core."""
        reader = self.spark.read.format("iris").option("stream", stream)
        return reader.option("minPartitions", self.tasks).load()


def read_iris(bench: Bench) -> Result:
    """Return rows a second of a batch read of every column, dropping the rows."""
    return timed(bench.rows, lambda: discard(bench.source()))


def read_iris_values(bench: Bench) -> Result:
    """Return rows a second of a batch read of the values only, as Parquet is read."""
    return timed(bench.rows, lambda: discard(bench.source().select("value")))


def read_partitions(bench: Bench) -> Result:
    """Return rows a second of a batch read of the values of a stream with a partition for each task, on two stores."""
    return timed(bench.rows, lambda: discard(bench.source("parts").select("value")))


def read_keyed(bench: Bench) -> Result:
    """Return rows a second of a batch read of rows that were appended with a key, each as a record of its own."""
    rows = bench.client.call(lambda c: c.streams.describe("keyed")).end
    return timed(rows, lambda: discard(bench.source("keyed").select("value")))


def read_twin(bench: Bench) -> Result:
    """Return rows a second of a Python source with our columns that yields one record batch again and again."""
    return timed(
        bench.rows // bench.tasks * bench.tasks,
        lambda: discard(twin(bench).select("value")),
    )


def read_parquet(bench: Bench) -> Result:
    """Return rows a second of reading the same values from a local Parquet file."""
    return timed(bench.rows, lambda: discard(bench.spark.read.parquet(bench.parquet)))


def read_stream(bench: Bench) -> Result:
    """Return rows a second of a streaming query over all rows (Trigger.AvailableNow), dropping them."""
    reader = bench.spark.readStream.format("iris").option("stream", "bench")
    rows = reader.option("startingOffsets", "earliest").option("minPartitions", bench.tasks).load()

    def run() -> None:
        query = start(bench, rows, trigger={"availableNow": True})
        if not query.awaitTermination(PATIENCE_S):
            raise BenchError("the streaming read did not end in time")
        read = sum(progress["numInputRows"] for progress in query.recentProgress)
        if read != bench.rows:
            raise BenchError(f"only {read} of {bench.rows} rows were read")

    return timed(bench.rows, run)


def read_socket(bench: Bench) -> Result:
    """Return rows a second of Spark's `socket` source, with lines of the same length."""
    line = b"x" * (ROW_BYTES - 1) + b"\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                for _ in range(bench.rows // 64):
                    connection.sendall(line * 64)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        reader = bench.spark.readStream.format("socket").option("host", "127.0.0.1")
        rows = reader.option("port", server.getsockname()[1]).load()
        begin_s = time.perf_counter()
        query = start(bench, rows)
        wanted = bench.rows // 64 * 64
        try:
            until_s = begin_s + PATIENCE_S
            while sum(p["numInputRows"] for p in query.recentProgress) < wanted:
                if time.perf_counter() > until_s or not query.isActive:
                    raise BenchError("Spark's socket source did not deliver the rows in time")
                time.sleep(0.02)
            spent_s = time.perf_counter() - begin_s
        finally:
            query.stop()
        thread.join()
    return {"rows_s": wanted / spent_s}


def append(bench: Bench) -> Result:
    """Return rows a second appended to a new stream exactly once by two tasks, until all are visible."""
    name = bench.fresh("sink")
    bench.client.call(lambda c: c.streams.create(name))
    rows = bench.spark.read.parquet(bench.parquet).limit(min(bench.rows, 150_000)).repartition(bench.tasks).cache()  # fmt: skip
    count = rows.count()
    result = timed(count, lambda: rows.write.format("iris").option("stream", name).mode("append").save())  # fmt: skip
    rows.unpersist(blocking=True)
    there = bench.client.call(lambda c: c.streams.describe(name))
    bench.client.call(lambda c: c.streams.delete(name))
    if there.end != count:
        raise BenchError(f"only {there.end} of {count} rows were appended")
    return result


def overhead(bench: Bench) -> Result:
    """Return milliseconds of a micro-batch of one row, and those of `rate-micro-batch`."""
    name = bench.fresh("trickle")
    bench.client.call(lambda c: c.streams.create(name))
    ours = start(bench, following(bench, name))
    batches = 12
    for number in range(batches + DISCARD):
        bench.client.call(lambda c: c.streams.append(name, b"x" * ROW_BYTES))
        wait_until(lambda number=number: batches_of(ours) > number)
    ours.stop()
    rate = bench.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    theirs = start(bench, rate)
    wait_until(lambda: batches_of(theirs) > batches + DISCARD)
    theirs.stop()
    bench.client.call(lambda c: c.streams.delete(name))
    return {
        "iris_ms": batch_ms(ours),
        "rate_ms": batch_ms(theirs),
        "ratio": batch_ms(ours) / batch_ms(theirs),
    }


def visible(bench: Bench) -> Result:
    """Return milliseconds from an append until a query has the row (foreachBatch)."""
    name = bench.fresh("visible")
    bench.client.call(lambda c: c.streams.create(name))
    seen: dict[bytes, float] = {}

    def look(rows: Any, _: int) -> None:
        for row in rows.select("value").toLocalIterator():
            seen.setdefault(bytes(row.value), time.perf_counter())

    rows = following(bench, name)
    checkpoint = bench.directory / bench.fresh("checkpoint")
    query = (
        rows.writeStream.foreachBatch(look).option("checkpointLocation", str(checkpoint)).start()
    )
    waited_ms = []
    rng = random.Random(2)
    for number in range(24):
        value = b"%d" % number
        begin_s = time.perf_counter()
        bench.client.call(lambda c, value=value: c.streams.append(name, value))
        wait_until(lambda value=value: value in seen)
        waited_ms.append(1000 * (seen[value] - begin_s))
        time.sleep(rng.uniform(0.05, 0.3))
    query.stop()
    bench.client.call(lambda c: c.streams.delete(name))
    counted = sorted(waited_ms[DISCARD:])
    return {"p50_ms": statistics.median(counted), "most_ms": counted[-1]}


CELLS: Final[dict[str, tuple[str, Callable[[Bench], Result]]]] = {
    "source": ("Batch read, all columns", read_iris),
    "source-values": ("Batch read, values", read_iris_values),
    "source-partitions": ("Batch read, values, partitions on two stores", read_partitions),
    "source-keyed": ("Batch read, values of rows with keys", read_keyed),
    "twin": ("A Python source that does nothing, values", read_twin),
    "parquet": ("Parquet, values", read_parquet),
    "stream": ("Streaming read, Trigger.AvailableNow", read_stream),
    "socket": ("Spark's `socket` source", read_socket),
    "append": ("Append, exactly once", append),
    "overhead": ("Micro-batch of one row", overhead),
    "visible": ("Append to visible", visible),
}


# -- parts -------------------------------------------------------------------------------------------------------


async def append_keyed(client: iris.Client, rows: list[bytes]) -> None:
    """Append rows to the stream `keyed`, each with a key."""
    for first in range(0, len(rows), 1000):
        part = rows[first : first + 1000]
        await asyncio.gather(
            *(client.streams.append("keyed", row, key=row[:8], timeout=PATIENCE_S) for row in part)
        )


def timed(rows: int, work: Callable[[], object]) -> Result:
    """Return the rows a second of `work`."""
    begin_s = time.perf_counter()
    work()
    return {"rows_s": rows / (time.perf_counter() - begin_s)}


def discard(rows: Any) -> None:
    """Compute every row and drop it."""
    rows.write.format("noop").mode("overwrite").save()


def twin(bench: Bench) -> Any:
    """Return the DataFrame of a Python source that costs nothing itself: what is left is Spark's own work."""
    import pyarrow as pa
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = bench.source("parts").schema
    fields = to_arrow_schema(columns, timezone="UTC")
    tasks, share = bench.tasks, bench.rows // bench.tasks

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(tasks)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            rows = min(TWIN_ROWS, share)
            filled = {
                "value": pa.array([bytes(ROW_BYTES)] * rows, pa.binary()),
                "topic": pa.array(["parts"] * rows, pa.string()),
            }
            arrays = [
                filled[field.name] if field.name in filled
                else pa.nulls(rows, field.type) if field.name == "key"
                else pa.array([0] * rows, field.type)
                for field in fields
            ]  # fmt: skip
            batch = pa.RecordBatch.from_arrays(arrays, schema=fields)
            left = share
            while left:
                rows = min(left, len(batch))
                yield batch.slice(0, rows)
                left -= rows

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "twin"

        def schema(self) -> Any:
            return columns

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    bench.spark.dataSource.register(Source)
    return bench.spark.read.format("twin").load()


def start(bench: Bench, rows: Any, trigger: dict[str, Any] | None = None) -> Any:
    """Start a streaming query that drops its rows."""
    checkpoint = bench.directory / bench.fresh("checkpoint")
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


def following(bench: Bench, name: str) -> Any:
    """Return the rows of a stream from its first message on."""
    reader = bench.spark.readStream.format("iris").option("stream", name)
    return reader.option("startingOffsets", "earliest").load()


def batches_of(query: Any) -> int:
    """Return how many micro-batches with rows a query has run; raises BenchError if it failed."""
    if query.exception() is not None:
        raise BenchError(str(query.exception())[:2000])
    return sum(1 for progress in query.recentProgress if progress["numInputRows"])


def batch_ms(query: Any) -> float:
    """Return the median time of the later micro-batches with rows."""
    times = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]
    return float(statistics.median(times[DISCARD:]))


def wait_until(done: Callable[[], bool]) -> None:
    """Return when the condition holds; raises BenchError after a time limit."""
    until_s = time.perf_counter() + PATIENCE_S
    while not done():
        if time.perf_counter() > until_s:
            raise BenchError("no row arrived at the query in time")
        time.sleep(0.002)


@contextlib.contextmanager
def staged(rows: int, tasks: int) -> Iterator[Bench]:
    """Start a relay with two stores and a Spark session; stop them at the end."""
    from pyspark.sql import SparkSession

    import iris.blocking
    import iris.spark

    with Roles(DEADLINE_S) as roles:
        directory = roles.directory / "spark"
        directory.mkdir()
        relay = IrisRelay(roles, ["--data", str(directory / "data")])
        second = [
            "-m",
            "relay.store",
            "--data",
            str(directory / "data2"),
            "--relay",
            relay.env["IRIS_RELAY"],
        ]
        roles.start("store", second, env=relay.env, reports=False)
        os.environ.update(relay.env)
        os.environ["PYSPARK_PYTHON"] = sys.executable
        builder = SparkSession.builder.master(f"local[{tasks}]").appName("iris-bench")
        settings = {
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": str(tasks),
            "spark.driver.memory": "4g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(directory / "local"),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
            "spark.log.level": "ERROR",
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        try:
            iris.spark.register(spark)
            with iris.blocking.connect() as client:
                yield Bench(directory, spark, client, rows, tasks)
        finally:
            spark.stop()
            relay.stop()


def markdown(document: Result) -> str:
    """Return the table."""
    lines = [f"{document['rows']:,} rows of 1 KiB, {document['tasks']} tasks, median of {document['rounds']} (least to most).", ""]  # fmt: skip
    lines += ["| | |", "|---|---|"]
    for cell, (title, _) in CELLS.items():
        runs = [run[cell] for run in document["runs"] if cell in run]
        for figure in runs[0] if runs else ():
            values = sorted(run[figure] for run in runs)
            digits = 0 if figure == "rows_s" else 2 if figure == "ratio" else 1
            shown = ", ".join(
                f"{value:,.{digits}f}"
                for value in (statistics.median(values), values[0], values[-1])
            )
            middle, least, most = shown.rsplit(", ", 2)
            lines.append(
                f"| {title}: {figure.replace('_', ' ')} | **{middle}** ({least} to {most}) |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--quick", action="store_true", help="one round of 50,000 rows")
    parser.add_argument("--rows", type=int, default=0, help="default: 300,000")
    parser.add_argument("--rounds", type=int, default=0, help="default: 3")
    parser.add_argument("--tasks", type=int, default=TASKS, help="default: 2")
    parser.add_argument("--cells", default="", metavar="ID,…", help=", ".join(CELLS))
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIRECTORY")
    args = parser.parse_args()
    cells = args.cells.split(",") if args.cells else list(CELLS)
    if unknown := [cell for cell in cells if cell not in CELLS]:
        sys.exit(f"--cells: unknown: {', '.join(unknown)}; choose from {', '.join(CELLS)}")
    rows = args.rows or (50_000 if args.quick else 300_000)
    rounds = args.rounds or (1 if args.quick else 3)
    document: Result = {**harness.facts(), "rows": rows, "tasks": args.tasks, "rounds": rounds, "runs": []}  # fmt: skip
    with staged(rows, args.tasks) as bench:
        bench.fill()
        for cell in cells:
            if CELLS[cell][1] in (read_iris, read_parquet, append):
                CELLS[cell][1](bench)  # warms up the JVM and the Python workers
        for number in range(1, rounds + 1):
            run: Result = {}
            document["runs"].append(run)
            for cell in cells:
                run[cell] = CELLS[cell][1](bench)
                said = ", ".join(f"{name} {value:,.1f}" for name, value in run[cell].items())
                print(f"round {number} {cell}: {said}", file=sys.stderr, flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "spark.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.output / "spark.md").write_text(markdown(document), encoding="utf-8")
    print(markdown(document))


if __name__ == "__main__":
    main()
