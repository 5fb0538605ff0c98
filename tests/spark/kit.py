"""A relay and a store for tests of Spark, and rows that name their writer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from support.stores import Rig

import iris
import iris.blocking
from iris.errors import IrisError
from iris.keyfiles import load_keyring

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE_S = 120.0
"""Limit of every wait, after which the test fails. No measurement depends on it."""
JVM = "-XX:MetaspaceSize=256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Options of a JVM that runs for minutes: less garbage collection, compilation and verification."""
QUICK = {
    # Plans of a few rows run once, so compiling or adapting them takes longer than it saves.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # The other one starts a program for each file of a checkpoint that it looks at.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
}
"""Settings with which Spark does less work for the same result."""

FLIGHTS: Final = Path(__file__).parents[2] / "examples" / "spark" / "flights.py"


class Example(NamedTuple):
    """The running example: its directories for temporary files and results, and the files of its output and errors."""

    process: subprocess.Popen[bytes]
    inside: Path
    out: Path
    said: Path
    complaints: Path


class Relay:
    """A relay with a store beside it, two processes on a directory of their own; a test may end either and start it
    again.

    relay.kill_store()
    relay.start_store()
    spark.read.format("iris").options(**relay.options).option("stream", "orders")
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.rig = Rig(directory)
        self.socket = self.rig.socket
        self.keyring = directory / "iris" / "dev" / "keyring.toml"
        """The cluster keys that the relay made at its first start, mode 0600."""
        self._clients: list[iris.blocking.Client] = []

    @property
    def options(self) -> dict[str, str]:
        """Options with which a source or sink connects to this relay; both are paths."""
        return {"relay": str(self.socket), "keyringFile": str(self.keyring)}

    def env(self) -> dict[str, str]:
        """Return an environment in which a process finds this relay and its keys by itself."""
        return {**self.rig.environ, "IRIS_RELAY": str(self.socket)}

    def client(self) -> iris.blocking.Client:
        """Return a new client, which is closed with the relay."""
        made = iris.blocking.connect(self.socket, keyring=load_keyring(self.keyring))
        self._clients.append(made)
        return made

    # Beginning and ending

    def start(self) -> None:
        """Start both, and return when they serve."""
        self.rig.start_relay()
        self.start_store()

    def stop(self) -> None:
        """Close the clients and end both. Idempotent."""
        for client in self._clients:
            # The client may have no relay any more.
            with contextlib.suppress(IrisError, TimeoutError, OSError):
                client.close()
        self._clients.clear()
        self.rig.end_store(signal.SIGTERM)
        self.rig.end_relay(signal.SIGTERM)

    def start_relay(self) -> None:
        """Start the relay again, and return when it serves. The store reconnects by itself: see `wait_for_store`."""
        self.rig.mark_said()
        self.rig.start_relay()

    def kill_relay(self) -> None:
        """End the relay with SIGKILL. The store keeps running, and waits for another relay."""
        self.rig.end_relay(signal.SIGKILL)

    def restart_relay(self) -> None:
        """Kill the relay, start it again, and return when relay and store serve."""
        self.kill_relay()
        self.start_relay()
        self.wait_for_store()

    def start_store(self) -> None:
        """Start the store, and return when it serves."""
        self.rig.start_store()
        self.wait_for_store()

    def kill_store(self) -> None:
        """End the store with SIGKILL."""
        self.rig.end_store(signal.SIGKILL)

    def restart_store(self) -> None:
        """Kill the store and start it again."""
        self.kill_store()
        self.start_store()

    def pause_store(self) -> None:
        """Freeze the store, which answers nothing until `resume_store`."""
        self.rig.signal_store(signal.SIGSTOP)

    def resume_store(self) -> None:
        """Let a frozen store continue."""
        self.rig.signal_store(signal.SIGCONT)

    def wait_for_store(self) -> None:
        """Return when the store serves the present relay. Fails if the store has ended."""
        assert asyncio.run(self.rig.attached()), self.rig.last_words()


# -- rows ----------------------------------------------------------------------------------------------------


def make_row(tag: str, number: int, size: int = 40) -> bytes:
    """Return `tag:number:` filled up with dots to `size` bytes."""
    return f"{tag}:{number}:".encode().ljust(size, b".")


def append_rows(
    client: iris.blocking.Client, stream: str, count: int, *, tag: str = "a", first: int = 0, size: int = 40,
) -> list[bytes]:  # fmt: skip
    """Append `count` rows to an existing stream, and return them when they are on disk."""
    rows = [make_row(tag, number, size) for number in range(first, first + count)]
    client.call(lambda c: c.streams.append_many(stream, rows, timeout=PATIENCE_S))
    return rows


def publish_rows(
    client: iris.blocking.Client, topic: str, count: int, *, tag: str = "a", first: int = 0, size: int = 40,
    headers: dict[str, str] | None = None,
) -> list[bytes]:  # fmt: skip
    """Publish `count` rows, and return them when the relay has handled them. A store may record them later."""
    rows = [make_row(tag, number, size) for number in range(first, first + count)]

    async def publish(c: iris.Client) -> None:
        for number, row in enumerate(rows):
            await c.publish(topic, row, headers=headers)
            if number % 500 == 499:
                await c.flush(timeout=PATIENCE_S)
        await c.flush(timeout=PATIENCE_S)

    client.call(publish)
    return rows


def read_stream(client: iris.blocking.Client, stream: str) -> list[bytes]:
    """Return the payloads that are in a stream now, in order."""

    async def read(c: iris.Client) -> list[bytes]:
        async with c.streams.read(stream, follow=False) as reader:
            return [message.payload async for message in reader]

    return client.call(read)


def rows_of(frame: DataFrame) -> list[Any]:
    """Return the rows of a frame by topic and offset. Sorted here: orderBy would read everything twice."""
    return sorted(frame.collect(), key=lambda row: (row.topic, row.offset))


def values(frame: DataFrame) -> list[bytes]:
    """Return the column `value` of a frame by topic and offset."""
    return [bytes(row.value) for row in rows_of(frame.select("topic", "offset", "value"))]


def make_stream(client: iris.blocking.Client, name: str, **settings: Any) -> str:
    """Create a stream, and return its name."""
    client.call(lambda c: c.streams.create(name, **settings))
    return name


def streams_of(client: iris.blocking.Client, prefix: str) -> list[str]:
    """Return the names of the streams that begin with `prefix`."""
    return [
        info.name
        for info in client.call(lambda c: c.streams.list())
        if info.name.startswith(prefix)
    ]


# -- queries -------------------------------------------------------------------------------------------------


def until(true: Callable[[], Any], query: Any = None) -> Any:
    """Return the value of `true()` when that is true. Fails after `PATIENCE_S`, or when the query fails."""
    until_s = time.monotonic() + PATIENCE_S
    while not (found := true()):
        if query is not None and query.exception() is not None:
            raise query.exception()
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.05)
    return found


def finish(query: Any) -> None:
    """Wait for the end of a query. Raises its error if it failed."""
    assert query.awaitTermination(int(PATIENCE_S)), "the query did not end in time"


def source(spark: SparkSession, relay: Relay, **options: Any) -> DataFrame:
    """Return a batch read with these options."""
    return spark.read.format("iris").options(**relay.options).options(**_texts(options)).load()


def stream_source(spark: SparkSession, relay: Relay, **options: Any) -> DataFrame:
    """Return a streaming read with these options."""
    return (
        spark.readStream.format("iris").options(**relay.options).options(**_texts(options)).load()
    )


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def expect_code(query: Any, code: str, *also: Sequence[str]) -> str:
    """Wait until a query has failed, and return its error, which must contain `code` (see `iris.spark.errors`)."""
    try:
        query.awaitTermination(int(PATIENCE_S))
    except Exception as err:
        text = str(err)
    else:
        raise AssertionError("the query did not fail")
    for part in (code, *also):
        assert part in text, text[-3000:]
    return text
