"""The demo of Spark: it agrees with the file, says so, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# It has a JVM of its own.
pytestmark = pytest.mark.timeout(240)
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark" / "flights.py"


def processes_under(directory: Path) -> list[str]:
    """Return the command lines of processes whose environment names `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.fsencode(directory) in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().decode())
            except OSError:
                continue  # it ended meanwhile, or is not ours
    return found


def test_a_query_of_departures_agrees_with_the_file(java: str, tmp_path: Path) -> None:
    inside, out = tmp_path / "inside", tmp_path / "out"
    inside.mkdir()
    foreign = ("IRIS_", "PYTHONASYNCIO", "SPARK_", "PYSPARK_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--rows", "2500", "--out", out],
        env=environ | {"JAVA_HOME": java, "TMPDIR": str(inside)},
        cwd=inside, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 3
    assert all(line.startswith("ok  ") for line in lines)
    assert "2,500 departures" in lines[0]
    assert "2,500 departures" in lines[1]
    assert (out / "delays.parquet").is_dir()
    assert list(inside.iterdir()) == []
    assert processes_under(inside) == []
