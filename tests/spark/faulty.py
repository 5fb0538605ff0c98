"""The format "iris-faults": the source and sink of Iris with the faults of `spark.faults`.

The product's classes do the work, and call nothing here. As a program this module is a driver: see
`spark.faults.Driver`. Needs pyspark.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pyspark.sql.types import StructType

from iris.spark import IrisSource
from iris.spark.sink import IrisStreamWriter, IrisWriter
from iris.spark.source import IrisReader, IrisStreamReader
from iris.streams.stores import Stores
from iris.wire.streams import Commit
from spark.faults import FORMAT, OPTION, PATIENCE_S

SLICE_ROWS: Final = 50


class _Plan:
    def __init__(self, text: str) -> None:
        plan = json.loads(text) if text else {"dir": "", "point": "", "do": "", "at": 0}
        self.directory = Path(plan["dir"])
        self.point = plan["point"]
        self.action = plan["do"]
        self.at = plan["at"]

    def reach(self, point: str) -> None:
        """Cause the fault if this is its point and it has not happened yet."""
        if point != self.point:
            return
        try:
            os.close(os.open(self.directory / "happened", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self.action == "halt":
            until_s = time.monotonic() + PATIENCE_S
            while not (self.directory / "go").exists():
                if time.monotonic() > until_s:
                    raise TimeoutError("nobody let it go on")
                time.sleep(0.02)
        elif self.action == "fail":
            raise RuntimeError("the fault that was asked for")
        else:
            _end(self.action)

    @contextlib.contextmanager
    def between_commits(self) -> Iterator[None]:
        """Reach the point between the commits of two partitions after the first one, one commit after the other."""
        if self.point != "between":
            yield
            return
        ask, turn = Stores.ask_stream, asyncio.Lock()

        async def ask_in_turn(stores: Any, name: str, uuid: str, call: Any, *rest: Any, **more: Any) -> Any:  # fmt: skip
            if not isinstance(call, Commit):
                return await ask(stores, name, uuid, call, *rest, **more)
            async with turn:
                answer = await ask(stores, name, uuid, call, *rest, **more)
                self.reach("between")
                return answer

        setattr(Stores, "ask_stream", ask_in_turn)  # noqa: B010  # mypy refuses to assign a method
        try:
            yield
        finally:
            setattr(Stores, "ask_stream", ask)  # noqa: B010

    def count(self, point: str, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items. The point is reached after `at` of them, or with the last one."""
        number = 0
        for number, item in enumerate(items, 1):
            yield item
            if number == self.at:
                self.reach(point)


def _end(action: str) -> None:
    """Kill a parent process of this one, and this one."""
    pids = []
    if action == "executor":
        pids = [next(pid for pid, name in _parents() if "CoarseGrainedExecutorBackend" in name)]
    elif action == "driver":
        jvm = next(at for at, (_, name) in enumerate(_parents()) if "SparkSubmit" in name)
        # Python first, or it would report that its JVM has ended.
        pids = [pid for pid, _ in (_parents()[jvm + 1], _parents()[jvm])]
    else:
        assert action == "worker", action
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _parents() -> list[tuple[int, str]]:
    """Return pid and command line of this process's parents, nearest first."""
    found = []
    pid = os.getppid()
    while pid > 1:
        found.append((pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def _sliced(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, SLICE_ROWS):
            yield batch.slice(start, SLICE_ROWS)


class _Reading:
    _plan: _Plan

    def read(self, partition: Any) -> Iterator[Any]:
        self._plan.reach("task")
        return self._plan.count("read", super().read(partition))  # type: ignore[misc]


class _Writing:
    _plan: _Plan

    def write(self, iterator: Iterator[Any]) -> Any:
        written = super().write(self._plan.count("write", _sliced(iterator)))  # type: ignore[misc]
        if written.rows:
            self._plan.reach("staged")
        return written

    def commit(self, messages: Any, *batch: int) -> None:
        # Skip a query's first batch, which is empty.
        rows = any(written.rows for written in messages)
        if rows:
            self._plan.reach("commit")
        with self._plan.between_commits() if rows else contextlib.nullcontext():
            super().commit(messages, *batch)  # type: ignore[misc]
        if rows:
            self._plan.reach("committed")


class FaultyReader(_Reading, IrisReader):
    """See `Fault`."""


class FaultyStreamReader(_Reading, IrisStreamReader):
    """See `Fault`."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_plan": self._plan}


class FaultyWriter(_Writing, IrisWriter):
    """See `Fault`."""


class FaultyStreamWriter(_Writing, IrisStreamWriter):
    """See `Fault`."""


class FaultySource(IrisSource):
    """The data source of the format."""

    def __init__(self, options: dict[str, str]) -> None:
        # A case-insensitive dictionary, which must stay one.
        self._plan = _Plan(options.get(OPTION, ""))
        options = type(options)(options)
        options.pop(OPTION, None)
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> Any:
        return self._planned(FaultyReader(self._source(streaming=False), self._columns(schema)))

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802  # Spark's name
        return self._planned(
            FaultyStreamReader(self._source(streaming=True), self._columns(schema))
        )

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        return self._planned(FaultyWriter(self._sink(streaming=False), schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802  # Spark's name
        return self._planned(FaultyStreamWriter(self._sink(streaming=True), schema, overwrite))

    def _planned(self, made: Any) -> Any:
        made._plan = self._plan
        return made


# -- the phases of a driver ----------------------------------------------------------------------------------


def copy(spark: Any, *, source: dict[str, str], sink: dict[str, str], checkpoint: str) -> None:
    """Copy one stream to another in batches, up to its end."""
    rows = spark.readStream.format(FORMAT).options(**source).load()
    query = (
        rows.select("value")
        .writeStream.format(FORMAT)
        .options(**sink)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def copy_batch(spark: Any, *, source: dict[str, str], sink: dict[str, str], fail: str = "") -> None:
    """Copy one stream to another in one batch. `fail`: a file; the task that creates it fails at its last row."""
    rows = spark.read.format(FORMAT).options(**source).load().select("value")
    if fail:
        rows = rows.mapInArrow(_failing(fail), rows.schema)
    rows.write.format(FORMAT).options(**sink).mode("append").save()


def _failing(path: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def work(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        raise RuntimeError("the first attempt fails")

    return work


def main(text: str) -> None:
    """Run the phases of a `Driver`."""
    from pyspark.sql import SparkSession

    from spark import faulty  # not as __main__, which workers do not have

    options = json.loads(text)
    directory = options["dir"]
    # A killed JVM leaves its unpacked files, so they go to the directory that is removed after the test.
    java = f"-Djava.io.tmpdir={directory} -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss4m"
    conf = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "640m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.driver.extraJavaOptions": java,
        "spark.executor.extraJavaOptions": java,
        "spark.local.dir": f"{directory}/local",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
        **options["conf"],
    }
    builder = SparkSession.builder.master(options["master"]).appName("iris-faults")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.dataSource.register(faulty.FaultySource)
    for phase in options["phases"]:
        getattr(faulty, phase.pop("do"))(session, **phase)
    session.stop()


if __name__ == "__main__":
    main(sys.argv[1])
