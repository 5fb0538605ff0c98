"""A relay of a proof that is stopped and started again with the same socket and files."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from harness import Role

from iris.keyfiles import create_keys
from proofs.common import Run

START_S = 30.0
"""Limit for a relay to serve, or to log an event, on a busy machine."""


class RestartableRelay:
    """One relay with all its files in its own directory inside that of `roles`. Relays of one `network` share
    their keys.
    """

    def __init__(
        self, roles: Run, arguments: list[str], *, name: str = "relay", network: str = "keys", keyring: str = "", **settings: str
    ) -> None:  # fmt: skip
        """`keyring`: a network whose keyring this relay also has. `settings`: variables of its environment."""
        self._roles = roles
        self.name = name
        directory = roles.directory / name
        directory.mkdir(mode=0o700)
        keys = roles.directory / network
        if not keys.exists():
            create_keys(keys)
            if keyring:
                ring = "keyring.toml"
                (keys / ring).write_bytes((roles.directory / keyring / ring).read_bytes())
        self.socket = directory / "relay.sock"
        self._command = ["-m", "relay", "--socket", str(self.socket), *arguments]
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("IRIS_")}
        self.env = {
            **inherited, "XDG_RUNTIME_DIR": str(directory), "IRIS_CONFIG": str(keys), "IRIS_RELAY": str(self.socket), **settings,
        }  # fmt: skip
        self.role: Role

    def start(self) -> None:
        """Start the relay, and return when it serves."""
        before = _identity(self.socket)
        self.role = self._roles.start(self.name, self._command, env=self.env, reports=False)
        until_s = time.monotonic() + START_S
        while _identity(self.socket) in (None, before):
            if self.role.process.poll() is not None or time.monotonic() > until_s:
                raise self.role.failed("did not open its socket")
            time.sleep(0.005)

    def end(self, number: signal.Signals) -> float:
        """Send a signal; return the seconds until the process has ended."""
        began_s = time.monotonic()
        self.role.process.send_signal(number)
        self.role.process.wait()
        return time.monotonic() - began_s

    def logged(self, event: str, count: int = 1) -> None:
        """Return when the present process has logged `event` `count` times."""
        until_s = time.monotonic() + START_S
        while self.said(event) < count:
            if self.role.process.poll() is not None or time.monotonic() > until_s:
                raise self.role.failed(f"did not log {event} {count} times")
            time.sleep(0.02)

    def said(self, event: str) -> int:
        """Return how often the present process has logged `event`."""
        text = self.role.written()
        lines = text[: text.rfind("\n") + 1].splitlines()
        return sum(line.startswith("{") and json.loads(line)["event"] == event for line in lines)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns
