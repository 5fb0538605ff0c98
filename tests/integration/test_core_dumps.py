"""Programs of Iris leave no core dump, in which their keys would be. The library changes nothing of its process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import commands
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(120)

IRIS = Path(sys.executable).with_name("iris")
APP = "import iris\nservice = iris.Service('pool')\n@service.on_request\ndef answer(text: str) -> str:\n    return text\n"
EMBEDDED = """
import asyncio, resource, iris
async def main():
    async with iris.connect(embedded=True):
        print(resource.getrlimit(resource.RLIMIT_CORE))
asyncio.run(main())
"""
WITHOUT_ROOM = """
import ctypes, os, resource, sys
from iris import core_dumps
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if not os.geteuid():
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
libc = ctypes.CDLL(None)
libc.prctl(4, 1, 0, 0, 0)  # the change of users may have cleared it
core_dumps.forbid()
print(libc.prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))
"""


@pytest.fixture
def root() -> Iterator[Path]:
    with commands.short_directory("iris-core-") as made:
        yield made
        wait_until(lambda: not commands.processes_under(made))


@contextmanager
def dumps_allowed() -> Iterator[None]:
    """Let processes that are started meanwhile dump as much as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if not before[1]:
        pytest.skip("the hard limit of core dumps is 0 here, so no process can leave one")
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def environment(root: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
    return kept | {"XDG_RUNTIME_DIR": str(root), "XDG_CONFIG_HOME": str(root / "config")}


@contextmanager
def started(root: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    with dumps_allowed():
        process = subprocess.Popen(
            list(map(str, command)), cwd=root, env=environment(root), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def limits_under(root: Path) -> dict[str, int]:
    """Return the command line of each process whose environment names `root`, and its soft limit of core dumps."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(root) in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[f"{entry.name} {line}"] = resource.prlimit(int(entry.name), resource.RLIMIT_CORE)[0]  # fmt: skip
        except OSError:
            continue  # it has ended meanwhile
    return found


def crash(root: Path, *command: object) -> bool:
    """Start a command, end it with SIGABRT once it has said a line on stderr; return whether it left a core dump."""
    with started(root, *command) as process:
        assert process.stderr is not None
        assert process.stderr.readline()
        process.send_signal(signal.SIGABRT)
        _, status = os.waitpid(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == -signal.SIGABRT
        return os.WCOREDUMP(status)


def test_a_relay_that_crashes_leaves_no_core_dump(root: Path) -> None:
    twin = "import sys, time; print('here', file=sys.stderr, flush=True); time.sleep(600)"
    if not crash(root, sys.executable, "-c", twin):
        pytest.skip("this system writes no core dump of any process")
    for found in root.glob("core*"):
        found.unlink()
    assert not crash(root, IRIS, "relay", "--dev")
    assert not list(root.glob("core*"))
    (root / "iris" / "relay.sock").unlink(missing_ok=True)


@pytest.mark.parametrize("relay", [("relay",), ("-m", "relay")], ids=["iris relay", "python -m relay"])  # fmt: skip
def test_every_process_of_a_host_forbids_core_dumps(root: Path, relay: tuple[str, ...]) -> None:
    (root / "app.py").write_text(APP)
    socket = root / "iris" / "relay.sock"
    start = sys.executable if relay[0] == "-m" else IRIS
    more = ("--dev", "--data", root / "data", "--metrics", "127.0.0.1:0")
    with started(root, start, *relay, *more):
        wait_until(socket.exists)
        with (
            started(root, IRIS, "run", "app", "--workers", "2"),
            started(root, IRIS, "subscribe", "news"),
            started(root, IRIS, "bridge", "iris1", "--listen", "127.0.0.1:0"),
            started(root, sys.executable, "-m", "relay.store", "--data", root / "more", "--relay", socket),
        ):  # fmt: skip
            wait_until(lambda: set(limits_under(root).values()) == {1})
            wait_until(lambda: len(limits_under(root)) == 9)
            assert set(limits_under(root).values()) == {1}


def test_the_library_leaves_the_limit_of_its_process_as_it_is(root: Path) -> None:
    with started(root, sys.executable, "-c", EMBEDDED) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert (out.decode().strip(), process.returncode) == (str((hard, hard)), 0), err


def test_a_process_whose_hard_limit_is_0_cannot_be_dumped_to_a_handler_either() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, timeout=PATIENCE_S)  # fmt: skip
    assert done.stdout == "0 (0, 0)\n", done.stderr
