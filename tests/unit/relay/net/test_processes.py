"""The process at the other end of a Unix socket: found, watched, and gone although its connection is open."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import until

from relay.net import processes
from relay.net.processes import PeerProcess, end_connection, peer_process


class Other:
    """A process that has connected. It holds the connection, as does a process that it forked."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self._hold, end = os.pipe()
        self._orphans, orphan = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            os.close(end)
            os.close(orphan)
            connection.send(b"x")
            if os.fork():
                os.read(self._hold, 1)
                os._exit(0)
            os.close(self._hold)
            os.read(self._orphans, 1)
            os._exit(0)
        os.close(self._hold)
        self._end, self._orphan = end, orphan
        self.connection, _ = listener.accept()
        self.connection.setblocking(False)

    def leave(self) -> None:
        """End it. The process that it forked goes on."""
        os.close(self._end)
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """End the process that it forked, too, and return when that has ended: the connection is closed then."""
        os.close(self._orphan)
        os.close(self._orphans)
        self.connection.setblocking(True)
        while self.connection.recv(10):
            pass
        self.connection.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        other = Other(listener, tmp_path / "s")
        yield other
        other.close()


def without_peer_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_known", False)


KERNELS = pytest.mark.parametrize(
    "kernel", [lambda _: None, without_peer_pidfd], ids=["6.5", "5.3"]
)
Kernel = Callable[[pytest.MonkeyPatch], None]


@KERNELS
async def test_the_end_of_a_process_is_noticed_while_another_has_its_connection(
    other: Other, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(monkeypatch)
    process = peer_process(other.connection, other.pid)
    assert process is not None
    ended = asyncio.Event()
    process.watch(ended.set)
    await asyncio.sleep(0)
    assert not ended.is_set()
    other.leave()
    await asyncio.wait_for(ended.wait(), 20)
    process.close()
    process.close()
    assert end_connection(other.connection)
    assert other.connection.recv(10) == b"x", "what was written can still be read"
    assert other.connection.recv(10) == b""
    assert not end_connection(other.connection)


@KERNELS
async def test_a_process_that_had_ended_when_it_was_accepted_is_noticed(
    other: Other, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(monkeypatch)
    other.leave()
    try:
        process = peer_process(other.connection, other.pid)
    except ProcessLookupError:
        return
    assert process is not None  # Linux 6.16 opens a pidfd of it all the same
    ended = asyncio.Event()
    process.watch(ended.set)
    await asyncio.wait_for(ended.wait(), 20)
    process.close()


def test_a_kernel_that_refuses_a_pidfd_of_an_ended_peer_says_that_it_has_ended() -> None:
    class Connection(socket.socket):
        def getsockopt(self, *_: object) -> int:  # type: ignore[override]
            raise OSError(errno.EINVAL, "as Linux 6.5 to 6.15")

    with Connection(socket.AF_UNIX) as connection, pytest.raises(ProcessLookupError):
        peer_process(connection, 1)


def failing(number: int) -> Callable[..., int]:
    def pidfd_open(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    return pidfd_open


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_where_the_kernel_cannot_watch_a_process_it_is_not_watched(
    other: Other, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_peer_pidfd(monkeypatch)
    assert peer_process(other.connection, 0) is None, "a process of another PID namespace"
    monkeypatch.setattr(os, "pidfd_open", failing(number))
    assert peer_process(other.connection, other.pid) is None
    other.leave()


def test_without_a_free_descriptor_it_says_so(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_peer_pidfd(monkeypatch)
    monkeypatch.setattr(os, "pidfd_open", failing(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        peer_process(other.connection, other.pid)
    other.leave()


def test_this_process_is_not_watched() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_process(ours, os.getpid()) is None


async def test_a_watched_process_takes_one_descriptor_until_it_is_closed(other: Other) -> None:
    before = os.listdir("/proc/self/fd")
    process = peer_process(other.connection, other.pid)
    assert isinstance(process, PeerProcess)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    process.close()
    await until(lambda: os.listdir("/proc/self/fd") == before)
    other.leave()
