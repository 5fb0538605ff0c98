"""Tests see nothing of whoever runs them: no settings, keys, home or relay of this user or of this host.

`conftest.py` and `proof.py` call `leave_the_host` before anything else. What tests start has the environment of this
process, or less of it. A warm process (`support.warm`) is told of the directory in place of /run/iris, too; a test that
executes an interpreter names its relay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from iris import paths

KEPT = ("IRIS_TEST_", "IRIS_PROOF_")
"""How the variables begin that are for tests: what must run, and how."""
FOREIGN = (
    "INVOCATION_ID",
    "IRIS_",
    "JOURNAL_STREAM",
    "LISTEN_",
    "NOTIFY_SOCKET",
    "OTEL_",
    "WATCHDOG_",
    "XDG_",
)
"""How the variables begin that programs of Iris would read, or that a service manager set."""


def cleaned(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return an environment without what is the tester's, with homes in `directory`."""
    kept = {name: value for name, value in environ.items() if name.startswith(KEPT) or not name.startswith(FOREIGN)}  # fmt: skip
    return kept | {
        "HOME": str(directory / "home"),
        "XDG_CONFIG_HOME": str(directory / "config"),
        "XDG_RUNTIME_DIR": str(directory / "run"),
    }


def leave_the_host() -> Path:
    """Change the environment of this process, and where it looks for the relay of the host; return the directory that
    it has instead, for `come_back`."""
    directory = Path(tempfile.mkdtemp(prefix="iris-tester-"))
    for name in ("home", "config", "run"):
        (directory / name).mkdir(mode=0o700)
    environ = cleaned(os.environ, directory)
    if "TMPDIR" in environ:
        environ["TMPDIR"] = tempfile.gettempdir()  # another one if a file cannot be made in it
    os.environ.clear()
    os.environ.update(environ)
    paths.SYSTEM_DIRECTORY = directory / "system"
    return directory


def come_back(directory: Path) -> None:
    """Remove the directory of `leave_the_host`."""
    shutil.rmtree(directory)
