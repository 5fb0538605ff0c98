"""The example of two sites: it agrees with the file, and leaves nothing behind, also when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

EXAMPLES = Path(__file__).parents[2] / "examples" / "federation"
COMMAND = [sys.executable, "-W", "error", EXAMPLES / "flights.py", "--quick"]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which all temporary files and the programs' own paths are under tmp_path."""
    files = sorted(EXAMPLES.iterdir())
    yield {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTHONASYNCIO"))} | {
        "TMPDIR": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    assert list(tmp_path.iterdir()) == []
    assert sorted(EXAMPLES.iterdir()) == files
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue  # it ended meanwhile, or is not ours
            assert os.fsencode(tmp_path) not in environ, (entry / "cmdline").read_bytes()


def test_two_sites_answer_fail_over_and_come_back(environment: dict[str, str]) -> None:
    done = subprocess.run(
        COMMAND, env=environment, capture_output=True, text=True, timeout=160, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    # Of January's 27,004 departures 521 were cancelled.
    assert "26,483 departures" in lines[3]
    assert lines[7] == "ok    jfk is back: a survey adds up both"
    assert lines[8].endswith("questions were asked, and all of them answered")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_federation_takes_its_processes_and_files_along(
    environment: dict[str, str], number: signal.Signals
) -> None:
    with subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        assert "are joined" in demo.stdout.readline()
        demo.send_signal(number)
        rest, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, rest + errors
    assert errors == ""
