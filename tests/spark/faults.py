"""Faults that halt or end Spark's processes at a chosen point of a batch, and Spark drivers as separate
processes.

    fault = Fault(tmp_path, point="read", action="halt", at=3)
    query = spark.readStream.format(FORMAT).options(**relay.options).options(**fault.options)...
    fault.wait(query)        # three parts of a range were read, and the task waits
    relay.kill_store()
    fault.release()

The part in Spark's processes is `spark.faulty`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from iris.keyfiles import load_keyring

PATIENCE_S: Final = 60.0
FORMAT: Final = "iris-faults"
OPTION: Final = "fault"
POINTS: Final = ("task", "read", "write", "staged", "commit", "between", "committed")
"""Points: before a task reads; within its range; within the rows that a task stages; after it has staged them; before
the driver's commit to the store; between the commits of two partitions; after the driver's commit."""


class Fault:
    """A fault of the first process that reaches `point`, which happens once; `at`: after this many batches of rows."""

    def __init__(self, directory: Path, *, point: str, action: str, at: int = 1) -> None:
        assert point in POINTS
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self._given_up = False
        self.options = {
            OPTION: json.dumps({"dir": str(directory), "point": point, "do": action, "at": at})
        }

    def wait(self, query: Any = None) -> None:
        """Return when the fault has happened. Raises the error of the query if that fails before."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.happened:
            if query is not None and query.exception() is not None:
                raise query.exception()
            assert not self._given_up, "the batch ended without"
            assert time.monotonic() < until_s, "no process reached the point of the fault"
            time.sleep(0.02)

    @contextlib.contextmanager
    def meanwhile(self, work: Callable[[], None]) -> Iterator[None]:
        """Do `work` in another thread after the fault has happened; the block must cause it. Raises what
        `work` does.

        Spark knows a session's formats only in the threads in which the session is active, such as this one.
        """

        def when() -> None:
            self.wait()
            work()

        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(when)
            try:
                yield
            finally:
                self._given_up = not self.happened
            doing.result(PATIENCE_S)

    def release(self) -> None:
        """Let the halted process continue."""
        (self.directory / "go").touch()

    @property
    def happened(self) -> bool:
        """Whether a process has reached the point."""
        return (self.directory / "happened").exists()


def register(spark: Any) -> None:
    """Register the format in a session of this process, whose workers cannot import our modules. Idempotent."""
    from pyspark import cloudpickle

    from spark import faulty

    if faulty.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(faulty)
        spark.dataSource.register(faulty.FaultySource)


def secrets(keyring: Path) -> list[bytes]:
    """Return the cluster keys of a file, in all encodings in which they might be written."""
    found = []
    for keys in load_keyring(keyring).entries().values():
        for key in keys:
            raw = base64.urlsafe_b64decode(key.reveal() + "==")
            found += [key.reveal().encode(), raw, raw.hex().encode(), base64.b64encode(raw)]
    assert found
    return found


# -- drivers in processes of their own -----------------------------------------------------------------------


class Driver:
    """A Spark driver as a process: `Driver(directory, relay.env(), master="local[2,4]").run([phase, …])`.

    A phase is a dictionary with the name of a function of `spark.faulty`, `do`, and its arguments. Returns the exit
    code.
    """

    def __init__(
        self, directory: Path, environ: dict[str, str], *, master: str, **conf: str
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.said = directory / "driver.log"
        self.master = master
        self.conf = conf
        self._environ = environ

    def run(self, phases: list[dict[str, Any]]) -> int:
        """Run the phases one after the other. Fails if that takes too long."""
        text = json.dumps({"master": self.master, "conf": self.conf, "phases": phases, "dir": str(self.directory)})  # fmt: skip
        tests = Path(__file__).parent.parent
        environ = {
            **self._environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": str(tests),
            "TMPDIR": str(self.directory),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_HOSTNAME": "localhost",
        }
        with self.said.open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "spark.faulty", text],
                env=environ, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
        try:
            return process.wait(3 * PATIENCE_S)
        finally:
            # Its JVM and workers end with it, however it ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def last_words(self) -> str:
        """Return the end of its output."""
        return self.said.read_text(errors="replace")[-6000:]
