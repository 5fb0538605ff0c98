"""How an entry's socket is opened: who may reach it from the first moment, and which TLS keys are accepted."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from interop.sp.kit import make_certificate
from support.required import cannot
from support.stores import build_shim, compiler
from support.waiting import PATIENCE_S

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


PROGRAM = """
import os, socket, sys
from relay.bridges.sp.config import SocketConfig
from relay.bridges.sp.opening import new_socket, start
os.umask(0)
here, late = sys.argv[1:]
config = SocketConfig(protocol="rep", cluster="a", listen="ipc://" + here, ipc_mode=0)
with new_socket(config) as ours:
    start(ours, config)
with socket.socket(socket.AF_UNIX) as listener:  # as it must not be
    listener.bind(late)
    listener.listen()
    os.chmod(late, 0)
"""


def test_users_that_its_mode_keeps_out_cannot_connect_while_an_ipc_socket_is_opened(
    tmp_path: Path,
) -> None:
    """Its mode is right from the moment that it is bound. A connect that begins then may be let in when it listens."""
    if compiler() is None:
        cannot("HOSTS", "there is no C compiler (gcc and libc6-dev) to build what looks at modes")
    shim = build_shim("socket_modes", tmp_path)
    paths = [str(tmp_path / name) for name in ("here", "late")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *paths], env={**os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, text=True,
        check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    told = [(path, what) for path in paths for what in ("bound", "listens")]
    modes = ("0", "0", "777", "777")
    assert done.stdout.splitlines() == [f"{path} {what} {mode}" for (path, what), mode in zip(told, modes, strict=True)]  # fmt: skip


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
