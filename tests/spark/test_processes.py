"""Drivers, executors and Python workers are killed within a batch: every row is stored once.

Each driver is a separate process; see `spark.faults`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark.faults import Driver, Fault, secrets
from spark.kit import Relay, append_rows, make_stream, read_stream

if TYPE_CHECKING:
    import iris.blocking

ROWS = 1000
SIZE = 1000
SMALL = {"fetchBytes": "1", "minPartitions": "2", "startingOffsets": "earliest"}
KILLED = -9


class Job:
    """A query that copies a stream to another, in two batches."""

    def __init__(
        self, stage: Relay, client: iris.blocking.Client, name: str, directory: Path, partitions: int = 1
    ) -> None:  # fmt: skip
        self.client = client
        self.source = make_stream(client, name)
        self.target = make_stream(client, f"{name}.out", partitions=partitions)
        self.rows = append_rows(client, name, ROWS, size=SIZE)
        self.directory = directory
        self._options = stage.options

    @property
    def copied(self) -> list[bytes]:
        return read_stream(self.client, self.target)

    def phase(self, do: str = "copy", **options: Any) -> dict[str, Any]:
        """Return the phase of a `Driver` that runs it, with a `fault` in its source or sink."""
        fault = options.pop("fault", {})
        found: dict[str, Any] = {
            "do": do,
            "source": {**self._options, **SMALL, "stream": self.source, **fault},
            "sink": {**self._options, "stream": self.target, **fault},
            **options,
        }
        if do == "copy":
            found["source"]["maxOffsetsPerTrigger"] = "500"
            found["checkpoint"] = str(self.directory / "checkpoint")
        return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_driver_goes_on_from_its_checkpoint(
    stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    """It is killed before its tasks stage, after that, and after a commit of the store that Spark does not know of."""
    job = Job(stage, client, name, tmp_path)
    events = tmp_path / "events"
    events.mkdir()
    driver = Driver(
        tmp_path / "driver", stage.env(), master="local[2]",
        **{"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"},
    )  # fmt: skip
    # Whole batches were committed when it was killed; of the last one all rows or none.
    for point, left in (("read", 0), ("commit", 0), ("committed", 500)):
        fault = Fault(tmp_path / point, point=point, action="driver")
        assert driver.run([job.phase(fault=fault.options)]) == KILLED, driver.last_words()
        assert fault.happened
        assert job.copied == job.rows[:left], point
    assert driver.run([job.phase()]) == 0, driver.last_words()
    assert job.copied == job.rows

    # Spark's event log must not contain a key.
    logged = b"".join(path.read_bytes() for path in events.rglob("*") if path.is_file())
    assert b"SparkListenerTaskEnd" in logged
    for secret in secrets(stage.keyring):
        assert secret not in logged


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_driver_killed_between_the_commits_of_two_partitions_goes_on_with_what_it_planned(
    stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    """The tasks that run again send the rows, which have no keys, to other partitions; one was added meanwhile."""
    job = Job(stage, client, name, tmp_path, partitions=3)
    driver = Driver(tmp_path / "driver", stage.env(), master="local[2]")
    fault = Fault(tmp_path / "between", point="between", action="driver")
    assert driver.run([job.phase(fault=fault.options)]) == KILLED, driver.last_words()
    assert fault.happened
    seen = sorted(job.copied)
    assert 0 < len(seen) < 500
    client.call(lambda c: c.streams.change(job.target, partitions=4))
    assert driver.run([job.phase()]) == 0, driver.last_words()
    assert sorted(job.copied) == sorted(job.rows)
    infos = client.call(lambda c: c.streams.partitions(job.target))
    assert all(info.end for info in infos)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tasks_that_fail_or_are_killed_leave_no_row_twice(
    stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    """A task fails after it has staged its rows; Python workers are killed while they read and while they write."""
    jobs, phases, checks = [], [], []
    failing = Job(stage, client, f"{name}a", tmp_path / "a")
    phases.append(failing.phase("copy_batch", fail=str(tmp_path / "failed")))
    for number, (point, at) in enumerate((("read", 1), ("write", 1), ("staged", 1))):
        job = Job(stage, client, f"{name}{number}", tmp_path / str(number))
        action = "fail" if point == "staged" else "worker"
        fault = Fault(tmp_path / f"f{number}", point=point, action=action, at=at)
        phases.append(job.phase(fault=fault.options))
        checks.append(fault)
        jobs.append(job)
    driver = Driver(tmp_path / "driver", stage.env(), master="local[2,4]")
    assert driver.run(phases) == 0, driver.last_words()
    assert (tmp_path / "failed").exists()
    assert all(fault.happened for fault in checks)
    for job in (failing, *jobs):
        assert job.copied == job.rows


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_executor_leaves_no_row_twice(
    stage: Relay, client: iris.blocking.Client, name: str, tmp_path: Path
) -> None:
    """It is killed while it reads, and while it writes into several partitions; both are in one task."""
    jobs, phases, checks = [], [], []
    for number, (point, partitions) in enumerate((("read", 1), ("write", 3))):
        job = Job(stage, client, f"{name}{number}", tmp_path / str(number), partitions=partitions)
        fault = Fault(tmp_path / f"f{number}", point=point, action="executor", at=1)
        phases.append(job.phase(fault=fault.options))
        jobs.append(job)
        checks.append(fault)
    driver = Driver(
        tmp_path / "driver", stage.env(), master="local-cluster[2,1,1024]", **{"spark.executor.memory": "512m"}
    )  # fmt: skip
    try:
        assert driver.run(phases) == 0, driver.last_words()
    finally:
        shutil.rmtree(tmp_path / "driver" / "local", ignore_errors=True)
    for job, fault in zip(jobs, checks, strict=True):
        assert fault.happened
        assert sorted(job.copied) == sorted(job.rows)
