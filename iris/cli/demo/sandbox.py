"""A relay and members of their own, in processes and a directory that are gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import iris
from iris import keyfiles
from iris.errors import IrisError, RelayUnavailable

START_S: Final = 20.0
"""Until a process that was started answers; a busy machine takes its time."""
STOP_S: Final = 5.0


class Sandbox:
    """A temporary directory with keys, and the processes that find them there. A context manager."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="iris-demo-")
        root = Path(self._directory.name)
        self.socket = root / "relay.sock"
        self.keyring, _ = keyfiles.create_keys(root / "config")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._log = root / "log"
        # Nothing of the user's own settings: a relay of another name, other keys, a supervisor's notification socket.
        self._environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("IRIS_", "NOTIFY_", "PYTHONASYNCIODEBUG"))
        } | {
            "XDG_RUNTIME_DIR": str(root),
            "IRIS_RELAY": str(self.socket),
            "IRIS_CONFIG": str(root / "config"),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every process, members first, and delete the directory."""
        running = [process for process in self.processes.values() if process.poll() is None]
        try:
            for process in reversed(running):
                process.terminate()
                process.send_signal(signal.SIGCONT)
            until = time.monotonic() + STOP_S
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:  # also when Ctrl-C comes once more
            for process in running:
                process.kill()
                process.wait()
            self._directory.cleanup()

    def start(self, *arguments: str) -> int:
        """Start `python -m` with these arguments and return the process id."""
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,  # Ctrl-C is for the demo, which stops them in order
            )
        self.processes[process.pid] = process
        return process.pid

    def client(self, label: str) -> iris.Client:
        """Return a client of this relay, connected when entered."""
        config = iris.ClientConfig(relay=self.socket, label=label)
        return iris.connect(keyring=self.keyring, config=config)

    async def relay_up(self) -> None:
        """Return when the relay answers; raises IrisError with its last words if it does not."""
        until = time.monotonic() + START_S
        while True:
            self.check_alive()
            try:
                async with self.client("iris demo"):
                    return
            except RelayUnavailable as error:
                if time.monotonic() > until:
                    raise IrisError(
                        f"the relay did not start within {START_S:g} s: {error}"
                    ) from error
            await asyncio.sleep(0.02)

    def check_alive(self) -> None:
        """Raise IrisError with the last words of a process that ended by itself."""
        for process in self.processes.values():
            code = process.poll()
            if code is not None and code != -signal.SIGKILL:
                last = self._log.read_text(errors="replace")[-2000:]
                raise IrisError(f"process {process.pid} ended with code {code}: {last}")

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of our processes."""
        self.processes[pid].send_signal(number)
