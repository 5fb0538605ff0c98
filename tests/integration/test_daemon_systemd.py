"""The relay and the store as systemd meets them: readiness, the watchdog, the journal."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.relays import Daemon
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a service manager, at `tmp_path / "notify"`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(PATIENCE_S)
        yield receiver


def no_core() -> None:
    """Leave no core file behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def test_a_relay_pings_its_watchdog_and_shows_where_it_hangs_when_that_ends_it(
    manager: socket.socket, tmp_path: Path
) -> None:
    settings = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
    with Daemon(tmp_path, settings=settings, before=no_core) as daemon:
        said = [manager.recv(100) for _ in range(3)]
        assert said == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        assert daemon.stop(signal.SIGABRT) == -signal.SIGABRT
        text = daemon.log.read_text()
    assert "Fatal Python error: Aborted" in text
    assert 'relay/daemon.py"' in text


def test_a_store_of_its_own_notifies_the_service_manager(
    manager: socket.socket, tmp_path: Path
) -> None:
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
    command = [sys.executable, "-m", "relay.store", "--data", str(tmp_path / "data"), "--relay", str(tmp_path / "absent")]  # fmt: skip
    with (tmp_path / "log").open("wb") as stderr:
        store = subprocess.Popen(command, env={**os.environ, **told}, stderr=stderr)
    try:
        # It is ready although its relay is not there yet: it connects as soon as that is.
        said = [manager.recv(100) for _ in range(3)]
        assert said == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        store.terminate()
        assert store.wait(PATIENCE_S) == 0
        last = manager.recv(100)
        while last == b"WATCHDOG=1":
            last = manager.recv(100)
        assert last == b"STOPPING=1"
    finally:
        store.kill()
        store.wait()


def test_a_store_that_a_relay_supervises_does_not_speak_for_the_relay(
    manager: socket.socket, tmp_path: Path
) -> None:
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with Daemon(tmp_path, "--data", str(tmp_path / "data"), settings=told) as daemon:
        wait_until(lambda: daemon.said("store.attached"))
        assert daemon.stop() == 0
    manager.setblocking(False)
    said = []
    with contextlib.suppress(BlockingIOError):
        while True:
            said.append(manager.recv(100))
    assert said == [b"READY=1", b"STOPPING=1"]


def test_what_a_relay_and_its_store_log_to_the_journal_has_priorities(tmp_path: Path) -> None:
    log = tmp_path / "journal"
    with log.open("wb") as stderr:
        found = os.fstat(stderr.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "relay", "--dev", "--data", str(tmp_path / "data")],
            env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path),
                 "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}", "NOTIFY_SOCKET": str(tmp_path / "nobody")},
            stderr=stderr,
        )  # fmt: skip
        try:
            wait_until(lambda: '"store.attached"' in log.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
    lines = [line for line in log.read_text().splitlines() if not line.startswith("iris relay: ")]
    events = {json.loads(line[3:])["event"]: line[:3] for line in lines}
    assert events["relay.started"] == events["store.attached"] == "<6>"
    assert events["notify.failed"] == "<4>"
