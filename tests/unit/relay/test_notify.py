"""The service manager hears how far the relay has come, and cannot stop it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay import notify


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setblocking(False)
        yield receiver


def test_ready_and_stopping_reach_a_socket_file(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "n"))
    environ = {"NOTIFY_SOCKET": str(tmp_path / "n")}
    assert notify.ready(environ)
    assert manager.recv(64) == b"READY=1"
    assert notify.stopping(environ)
    assert manager.recv(64) == b"STOPPING=1"


def test_ready_reaches_an_abstract_socket(manager: socket.socket) -> None:
    name = f"iris-test-notify-{os.getpid()}"
    manager.bind("\0" + name)
    assert notify.ready({"NOTIFY_SOCKET": "@" + name})
    assert manager.recv(64) == b"READY=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_a_service_manager_nothing_is_said(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert not notify.ready(environ)
    assert caplog.records == []


def test_a_service_manager_that_is_gone_is_logged_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not notify.ready({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "notify.failed")
    ]


@pytest.mark.parametrize("address", ["vsock:2:1234", "@" + "x" * 200, "/" + "x" * 200])
def test_an_address_that_is_not_a_socket_is_logged_and_not_raised(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not notify.ready({"NOTIFY_SOCKET": address})
    assert [record.message for record in caplog.records] == ["notify.failed"]


def test_a_service_manager_that_does_not_read_cannot_hold_the_relay(
    manager: socket.socket, tmp_path: Path
) -> None:
    manager.bind(str(tmp_path / "n"))
    environ = {"NOTIFY_SOCKET": str(tmp_path / "n")}
    sent = 0
    while notify.ready(environ):  # ends when the queue of the socket is full
        sent += 1
        assert sent < 100_000
    assert sent > 0
