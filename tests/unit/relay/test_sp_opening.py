"""How an entry's socket is opened: who may reach it from the first moment, and which TLS keys are accepted."""

from __future__ import annotations

import os
import socket as unix
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from interop.sp.kit import make_certificate

import iris
from relay.bridges.sp.config import SocketConfig

pytest.importorskip("pynng")
from relay.bridges.sp.opening import new_socket, start


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o000])
def test_an_ipc_socket_has_its_mode_before_anybody_can_connect(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nng sets the mode between bind and listen, so that it is never wider."""
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    path = tmp_path / "socket"
    config = SocketConfig(protocol="rep", cluster="answers", listen=f"ipc://{path}", ipc_mode=mode)
    before = os.umask(0)
    try:
        with new_socket(config) as socket:
            assert start(socket, config) == config.listen
            assert os.umask(0) == 0  # given back
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert len(socket.listeners) == 1
    finally:
        os.umask(before)
    assert not path.exists()


WATCH = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
path, met = sys.argv[1], 0
os.set_blocking(0, False)
print("watching", flush=True)
tries = 0
while True:
    one = socket.socket(socket.AF_UNIX)
    for _ in range(200):
        try:
            one.connect(path)
        except OSError:
            continue
        met += 1
        break
    one.close()
    try:
        if os.read(0, 1):
            print(met, flush=True)
            met = 0
        else:
            break
    except BlockingIOError:
        pass
"""
"""Tries all the time to connect, as a user whom the mode 000 keeps out; says how often it could since it was asked
last.
"""


class Watcher:
    """A process that does so."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", WATCH, str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._answer() == "watching"

    def met(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("?")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def listen_first(path: Path) -> None:
    """As it must not be: the mode comes when it listens already."""
    with unix.socket(unix.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
    path.unlink()


def test_users_that_its_mode_keeps_out_cannot_connect_while_an_ipc_socket_is_opened() -> None:
    """Whoever tries all the time gets in where a socket listens before it has its mode, and never here."""
    with tempfile.TemporaryDirectory(prefix="iris-sp-") as name:
        Path(name).chmod(0o755)
        path = Path(name) / "socket"
        config = SocketConfig(protocol="rep", cluster="a", listen=f"ipc://{path}", ipc_mode=0)
        watcher = Watcher(path)
        before = os.umask(0)
        try:
            rounds, until_s = 0, time.monotonic() + 30
            while not watcher.met():  # so it does see what it is to see
                assert time.monotonic() < until_s, "it sees nothing"
                rounds += 10
                for _ in range(10):
                    listen_first(path)
            for _ in range(max(50, 2 * rounds)):
                with new_socket(config) as socket:
                    start(socket, config)
            assert watcher.met() == 0
        finally:
            os.umask(before)
            watcher.end()


@pytest.mark.parametrize(("mode", "taken"), [(0o600, True), (0o640, True), (0o644, False), (0o660, False)])  # fmt: skip
def test_a_tls_key_that_others_can_read_is_refused(tmp_path: Path, mode: int, taken: bool) -> None:
    make_certificate(tmp_path, "server")
    (tmp_path / "server.key").chmod(mode)
    config = SocketConfig(
        protocol="rep", cluster="answers", listen="tls+tcp://127.0.0.1:0",
        tls_cert=str(tmp_path / "server.pem"), tls_key=str(tmp_path / "server.key"),
    )  # fmt: skip
    if taken:
        new_socket(config).close()
    else:
        with pytest.raises(iris.ConfigError, match=r"tls_key: .*server\.key: open to other users"):
            new_socket(config)
