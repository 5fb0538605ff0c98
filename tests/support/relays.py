"""A relay in another process, and clients of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import iris
from iris.crypto.keys import ClusterKey
from support import warm
from support.waiting import PATIENCE_S, wait_until

KEY = ClusterKey(bytes(range(32)))
"""The key of honest members and callers."""


class Daemon:
    """`python -m relay --dev` with its own runtime directory. A context manager that ends it."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        settings: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
        dev: bool = True,
    ) -> None:
        self.runtime = directory
        self.socket = directory / "iris" / "relay.sock"
        self.environ = {
            "PATH": os.environ["PATH"],
            "XDG_RUNTIME_DIR": str(directory),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "HOME": str(directory),
            **(settings or {}),
        }
        self.log = directory / "relay.log"
        self._arguments = ["--dev"] * dev + list(arguments)
        self._before = before
        self.process: subprocess.Popen[bytes]

    def start(self) -> Self:
        """Start the relay, and return when it serves."""
        with self.log.open("ab") as log:
            self.process = warm.Popen(
                [sys.executable, "-m", "relay", *self._arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=self._before,
            )
        wait_until(lambda: self.said("relay.started") or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def said(self, event: str) -> bool:
        """Return whether the present process has logged `event`."""
        said = False
        for line in self.lines():
            if line["event"] == "relay.started":
                said = False
                if line["pid"] != self.process.pid:
                    continue
            said = said or line["event"] == event
        return said

    def lines(self) -> list[dict[str, Any]]:
        """Return the events of its log so far. Raises ValueError for a line that is not JSON."""
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in whole if not line.startswith("iris relay: ")]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def client(relay: Path, key: ClusterKey = KEY) -> iris.Client:
    """Return a client of the relay at this socket."""
    return iris.connect(relay, keyring=iris.Keyring.single(key))
