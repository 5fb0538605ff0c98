"""Whatever is in the tester's shell, and whatever runs on the host, tests see only what they made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support import alone, warm

from iris import paths
from iris.keyfiles import config_directory

HERE = Path(__file__)
SEES = """
import os, sys
from iris import paths
from iris.keyfiles import config_directory
print(*paths.candidate_sockets(os.environ, os.geteuid()), config_directory(os.environ))
"""


def test_settings_homes_and_service_managers_of_the_tester_are_gone(tmp_path: Path) -> None:
    theirs = {
        "IRIS_RELAY": "/r", "IRIS_CONFIG": "/c", "IRIS_RELAY_DATA": "/d", "IRIS_VERBOSE": "1", "XDG_RUNTIME_DIR": "/x", "XDG_CONFIG_HOME": "/x",
        "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "JOURNAL_STREAM": "1:2", "OTEL_SDK_DISABLED": "true", "HOME": "/h",
        "PATH": "/p", "LANG": "C", "IRIS_TEST_HOSTS": "required",
    }  # fmt: skip
    assert alone.cleaned(theirs, tmp_path) == {
        "PATH": "/p", "LANG": "C", "IRIS_TEST_HOSTS": "required", "HOME": f"{tmp_path}/home", "XDG_CONFIG_HOME": f"{tmp_path}/config",
        "XDG_RUNTIME_DIR": f"{tmp_path}/run",
    }  # fmt: skip


def test_this_process_and_what_it_starts_look_for_nothing_of_the_host(tmp_path: Path) -> None:
    seen = [*paths.candidate_sockets(os.environ, os.geteuid()), config_directory(os.environ)]
    assert not [path for path in seen if path.exists() or Path("/run") in path.parents]
    with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR")), (Path.home() / "new").open("w"):
        pass  # both can be written to
    program = tmp_path / "sees.py"
    program.write_text(SEES)
    for environ in (None, {"PATH": os.environ["PATH"]}):
        with warm.Popen([sys.executable, str(program)], env=environ, stdout=subprocess.PIPE) as process:  # fmt: skip
            told = process.communicate()[0].decode()
        assert not [word for word in told.split() if word.startswith("/run/")]


def test_a_run_of_tests_does_not_see_the_testers_settings_nor_a_broken_home(tmp_path: Path) -> None:
    """With a shell that sets what would make most tests fail."""
    broken = {
        **os.environ, "IRIS_RELAY": "/nonexistent", "IRIS_CONFIG": "/proc", "IRIS_RELAY_PORT": "x", "IRIS_CONTEXT": "none",
        "TMPDIR": "/nonexistent", "XDG_RUNTIME_DIR": "/proc", "XDG_CONFIG_HOME": "/proc",
    }  # fmt: skip
    del broken["HOME"]
    tests = f"{HERE}::{test_this_process_and_what_it_starts_look_for_nothing_of_the_host.__name__}"
    for environ in (broken, {**broken, "HOME": "/proc"}):
        done = subprocess.run(
            [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", tests], env=environ, cwd=HERE.parents[3],
            capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
