"""The watchdog of systemd gets pings of an event loop that runs, and none of one that hangs."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay import watchdog


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setblocking(False)
        yield receiver


@pytest.fixture
def faults() -> Iterator[None]:
    """Leave the fault handler of this process as it was."""
    before = faulthandler.is_enabled()
    yield
    if not before:
        faulthandler.disable()


@pytest.mark.usefixtures("faults")
async def test_a_loop_that_runs_pings_and_one_that_hangs_does_not(
    manager: socket.socket, tmp_path: Path
) -> None:
    manager.bind(str(tmp_path / "n"))
    environ = {"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "20000"}
    loop = asyncio.get_running_loop()
    pinging = asyncio.create_task(watchdog.keep_alive(environ))
    try:
        for _ in range(3):
            assert await loop.sock_recv(manager, 64) == b"WATCHDOG=1"
        hangs_until_s = time.monotonic() + 0.1  # five intervals
        while time.monotonic() < hangs_until_s:
            pass
        with pytest.raises(BlockingIOError):
            manager.recv(64)
        assert await loop.sock_recv(manager, 64) == b"WATCHDOG=1"
    finally:
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}]
)
async def test_without_a_watchdog_of_this_process_nothing_is_sent(
    environ: dict[str, str], manager: socket.socket, tmp_path: Path
) -> None:
    manager.bind(str(tmp_path / "n"))
    await watchdog.keep_alive({"NOTIFY_SOCKET": str(tmp_path / "n"), **environ})  # returns at once
    with pytest.raises(BlockingIOError):
        manager.recv(64)


def test_a_watchdog_of_this_process_is_found_by_its_pid() -> None:
    environ = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert watchdog.watchdog_s(environ) == 30.0


@pytest.mark.parametrize("text", ["30s", "-1", "0", "1.5", "²"])
def test_a_watchdog_interval_that_is_not_a_number_is_logged_and_turns_pings_off(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert watchdog.watchdog_s({"WATCHDOG_USEC": text}) is None
    (record,) = caplog.records
    assert repr(text) in record.fields["error"]  # type: ignore[attr-defined]  # ours
