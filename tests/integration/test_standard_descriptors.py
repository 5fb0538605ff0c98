"""Programs of Iris work with closed standard descriptors: these are /dev/null before anything else can have them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands
from support.commands import Shell
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(180)

PYTHON = sys.executable
IRIS = str(Path(PYTHON).with_name("iris"))
COMBINATIONS = [closed for n in (1, 2, 3) for closed in itertools.combinations(range(3), n)]
APP = "import iris\nservice = iris.Service('greeter')\n@service.on_request\ndef greet(text: str) -> str:\n    return f'hello, {text}'\n"
SOCKETS = '[[socket]]\nprotocol = "rep"\ncluster = "greeter"\nname = "rep"\ntimeout_s = 5\nlisten = "tcp://127.0.0.1:0"\n'
BLOCKING = """
import iris.blocking
with iris.blocking.connect() as client:
    assert client.request("greeter", "x", timeout=20.0) == b"hello, x"
"""


@contextlib.contextmanager
def started(
    shell: Shell, closed: tuple[int, ...], *command: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with some of its descriptors closed, and end it. What it writes is in `shell.root`/log."""

    def close() -> None:
        for number in closed:
            os.close(number)

    with (shell.root / "log").open("ab") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=shell.root, env=shell.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=close,
        )  # fmt: skip
    try:
        yield process
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, (command, (shell.root / "log").read_text())
    finally:
        process.kill()
        process.wait()


def run(shell: Shell, closed: tuple[int, ...], *command: object) -> tuple[int, bytes, bytes]:
    """Run a command to its end with some of its descriptors closed; return its exit code and what it wrote."""
    done = subprocess.run(
        list(map(str, command)), cwd=shell.root, env=shell.environ, stdin=subprocess.DEVNULL, capture_output=True,
        preexec_fn=lambda: [os.close(number) for number in closed], timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def labels(shell: Shell) -> list[str]:
    """Return the labels of the programs that are connected to the relay."""
    done = shell.run("status", "--json")
    return sorted(each["label"] for each in json.loads(done.stdout)["sessions"]) if done.stdout else []  # fmt: skip


def standard_descriptors(root: Path) -> dict[str, list[str]]:
    """Return what descriptors 0, 1 and 2 are of each process whose environment names `root`."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and os.fsencode(root) in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[f"{entry.name} {line}"] = [
                    os.readlink(entry / "fd" / str(number)) for number in range(3)
                ]
    return found


@pytest.fixture
def shell() -> Iterator[Shell]:
    with commands.short_directory("iris-fds-") as root:
        (root / "app.py").write_text(APP)
        (root / "sp.toml").write_text(SOCKETS)
        shell = Shell(root)
        yield shell
        wait_until(lambda: not commands.processes_under(root))


@pytest.mark.parametrize("closed", COMBINATIONS, ids=str)
def test_every_program_works_whichever_standard_descriptors_are_closed(
    shell: Shell, closed: tuple[int, ...]
) -> None:
    """All of them where one or all are closed; where two are, the programs that others stand on."""
    socket = shell.root / "iris" / "relay.sock"
    relay = (PYTHON, "-m", "relay") if closed == (0, 1, 2) else (IRIS, "relay")
    started_here: list[tuple[object, ...]] = [(IRIS, "run", "app"), (IRIS, "run", "app", "--workers", "2")]  # fmt: skip
    expected = ["iris run app"] * 3 + ["iris-store"]
    if len(closed) != 2:
        started_here += [
            (IRIS, "subscribe", "news"),
            (IRIS, "dashboard", "--listen", "127.0.0.1:0"),
            (IRIS, "bridge", "iris1", "--listen", "127.0.0.1:0"),
            (IRIS, "bridge", "http", "--listen", "127.0.0.1:0"),
            (IRIS, "bridge", "sp", "--config", "sp.toml"),
            (PYTHON, "-m", "relay.store", "--data", "more", "--relay", socket),
            (IRIS, "store", "--data", "third", "--relay", socket),
        ]
        expected = ["iris"] * 2 + ["iris bridge http", "iris bridge iris1", "iris bridge sp: rep", *expected, *["iris-store"] * 2]  # fmt: skip
    with contextlib.ExitStack() as running:
        first = running.enter_context(
            started(shell, closed, *relay, "--dev", "--data", "data", "--metrics", "127.0.0.1:0")
        )
        wait_until(lambda: socket.exists() or first.poll() is not None)
        wait_until(lambda: "iris-store" in labels(shell))
        shell.run("bridge", "http-token", "shop", "--allow", "push=greeter")
        for command in started_here:
            running.enter_context(started(shell, closed, *command))
        wait_until(lambda: [each for each in labels(shell) if each in expected] == expected)
        status = json.loads(shell.run("status", "--json").stdout)
        assert (status["store"]["starts"], status["metrics"]["starts"]) == (1, 1), status

        processes = standard_descriptors(shell.root)
        assert len(processes) == len(started_here) + 5, processes  # relay, store, metrics, workers
        for line, has in processes.items():
            if (
                "--supervised" not in line and "--listener" not in line
            ):  # the relay gives them pipes
                assert [has[number] for number in closed] == ["/dev/null"] * len(closed), line

        code, out, err = run(shell, closed, IRIS, "request", "greeter", "x")
        assert (code, out) == (0, b"" if 1 in closed else b"hello, x\n"), err
        code, out, err = run(shell, closed, PYTHON, "-m", "iris.cli", "request", "nobody", "x")
        assert (code, err == b"") == (3, 2 in closed)
        code, out, err = run(shell, closed, IRIS, "request", "greeter")
        assert (code, out) == (0, b"" if 1 in closed else b"hello, \n"), err
        assert run(shell, closed, IRIS, "status")[0] == 0
        assert run(shell, closed, IRIS, "request")[0] == 2


@pytest.mark.parametrize(
    ("number", "file", "mode", "command", "why"),
    [
        (1, "/dev/full", os.O_WRONLY, "status", "No space left on device"),
        (1, "/dev/full", os.O_WRONLY, "request greeter x", "No space left on device"),
        (1, "/dev/full", os.O_WRONLY, "--help", "No space left on device"),
        (1, "/dev/null", os.O_RDONLY, "status --json", "Bad file descriptor"),
        (0, "/dev/null", os.O_WRONLY, "request greeter", "Bad file descriptor"),
    ],
    ids=str,
)
def test_a_standard_stream_that_cannot_be_used_is_one_line(
    shell: Shell, number: int, file: str, mode: int, command: str, why: str
) -> None:
    wrong = os.open(file, mode)
    with started(shell, (), IRIS, "relay", "--dev"), started(shell, (), IRIS, "run", "app"):
        wait_until(lambda: "iris run app" in labels(shell))
        done = subprocess.run(
            [IRIS, *command.split()], env=shell.environ, stdin=wrong if number == 0 else subprocess.DEVNULL,
            stdout=wrong if number == 1 else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
    os.close(wrong)
    name = "read standard input" if number == 0 else "write to standard output"
    assert done.returncode == (1 if number else 2)
    line, _, _ = done.stderr.removesuffix("\n").partition("; `iris request --help`")
    assert line == f"iris: cannot {name}: {why}"


def test_a_blocking_client_works_in_a_program_that_has_them_closed(shell: Shell) -> None:
    """The library leaves the descriptors of its process alone."""
    with started(shell, (), IRIS, "relay", "--dev"), started(shell, (), IRIS, "run", "app"):
        wait_until(lambda: "iris run app" in labels(shell))
        for closed in COMBINATIONS:
            assert run(shell, closed, PYTHON, "-c", BLOCKING) == (0, b"", b""), closed
