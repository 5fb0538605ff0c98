"""Runs `iris …` as scripts do, in this process or in another one, with its own environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from iris import cli
from support import warm
from support.waiting import PATIENCE_S, wait_until


def command(*arguments: str) -> list[str]:
    """Return the command line of `iris …`."""
    return [sys.executable, "-m", "iris.cli", *arguments]


class Shell:
    """Runs `iris …` with its own environment."""

    def __init__(self, root: Path, **environ: str) -> None:
        self.root = root
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTHONASYNCIO"))}
        self.environ = {
            **kept,
            "XDG_RUNTIME_DIR": str(root),
            "XDG_CONFIG_HOME": str(root / "config"),
            **environ,
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> bytes:
        """Run the command in this process, which saves half a second of imports; otherwise as `process`."""
        done = CliRunner().invoke(
            cli.app, arguments, input=stdin, env=self.environ, prog_name="iris"
        )  # fmt: skip
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return self._checked(arguments, code, done.exit_code, done.stdout_bytes, done.stderr_bytes)

    def printed(self, *arguments: str, stdin: bytes = b"") -> tuple[bytes, bytes]:
        """Run it inside this process with success, and return what it printed on stdout and on stderr."""
        done = CliRunner().invoke(
            cli.app, arguments, input=stdin, env=self.environ, prog_name="iris"
        )  # fmt: skip
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, (arguments, done.output)
        return done.stdout_bytes, done.stderr_bytes

    def process(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> bytes:
        """Run the command and return its output. Asserts the exit code and, if that is 0, an empty stderr."""
        done = warm.run(
            command(*arguments), input=stdin, env=self.environ, cwd=self.root, timeout=PATIENCE_S
        )
        return self._checked(arguments, code, done.returncode, done.stdout, done.stderr)

    def _checked(
        self, arguments: tuple[str, ...], wanted: int, code: int, out: bytes, err: bytes
    ) -> bytes:
        assert code == wanted, (arguments, out, err)
        assert b"Traceback" not in err
        if code == 0:
            assert err == b""
        return out + err

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end, whatever its exit code."""
        return warm.run(command(*arguments), env=self.environ, cwd=self.root, timeout=PATIENCE_S)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command with pipes. The fixture checks that it has ended."""
        process = warm.Popen(
            command(*arguments), env=self.environ, cwd=self.root,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def finish(self) -> None:
        """Reap all started processes, and fail if a test left one running."""
        running = [process.args for process in self.started if process.poll() is None]
        for process in self.started:
            process.kill()
            process.communicate()
        assert running == []


def end(process: subprocess.Popen[bytes], code: int = 0) -> tuple[bytes, bytes]:
    """Return (stdout, stderr) of a process that ends by itself with this exit code."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running: {process.args!r} {process.communicate()}")
    assert process.returncode == code, (out, err)
    return out, err


@contextmanager
def short_directory(prefix: str) -> Iterator[Path]:
    """A temporary directory with a short path, as sockets need. Asserts that no socket is left in it at the end."""
    root = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield root
        assert not list(root.rglob("*.sock"))
    finally:
        shutil.rmtree(root)


@contextmanager
def dev_relay(root: Path, *arguments: str) -> Iterator[Path]:
    """Run a relay with throw-away keys and yield its socket. Asserts that it exits with 0 and its account balances."""
    shell = Shell(root)
    process = shell.start("relay", "--dev", *arguments)
    socket = root / "iris" / "relay.sock"
    try:
        wait_until(lambda: socket.exists() or process.poll() is not None)
        yield socket
        process.terminate()
        _, err = end(process)
    finally:
        shell.finish()
    account = json.loads(err.splitlines()[-1])["account"]
    assert account["held"] == 0
    dropped = sum(account["dropped"].values())
    assert (
        account["in"] + account["copied"]
        == account["out"] + account["unwanted"] + account["refused"] + account["expired"] + dropped
    )


def processes_under(directory: Path) -> list[str]:
    """Return the command lines of processes whose environment names `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.fsencode(directory) in (entry / "environ").read_bytes():
                    found.append(os.fsdecode((entry / "cmdline").read_bytes()))
            except OSError:
                continue  # it has ended meanwhile, or belongs to another user
    return found
