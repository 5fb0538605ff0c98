"""A relay and members in processes of their own, with a temporary directory; all are removed at the end."""

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
"""Time for a started process to answer, on a busy machine, too."""
STOP_S: Final = 5.0


class Sandbox:
    """A temporary directory with keys, and the processes that use them; a context manager."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="iris-demo-")
        root = Path(self._directory.name)
        self.socket = root / "relay.sock"
        self.keyring, _ = keyfiles.create_keys(root / "config")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._log = root / "log"
        # Without the user's own settings: another relay, other keys, a supervisor's notification socket.
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
        finally:  # also after a second Ctrl-C
            for process in running:
                process.kill()
                process.wait()
            self._directory.cleanup()

    def start(self, *arguments: str) -> int:
        """Start `python -m` with these arguments and return the process id."""
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=self._directory.name,
                start_new_session=True,  # so that Ctrl-C reaches only the demo, which stops them in order
            )
        self.processes[process.pid] = process
        return process.pid

    def client(self, label: str) -> iris.Client:
        """Return a client of this relay, connected when entered."""
        config = iris.ClientConfig(relay=self.socket, label=label)
        return iris.connect(keyring=self.keyring, config=config)

    async def relay_up(self) -> None:
        """Return when the relay answers; raises IrisError with the end of its log if it does not."""
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
        """Raise IrisError with the end of the log if a process has ended by itself."""
        for process in self.processes.values():
            code = process.poll()
            if code is not None and code != -signal.SIGKILL:
                last = self._log.read_text(errors="replace")[-2000:]
                raise IrisError(
                    f"the demo's process {process.pid} ended with exit code {code}; the end of its log: {last}"
                )

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of the processes."""
        self.processes[pid].send_signal(number)
