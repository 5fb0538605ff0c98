"""How an entry's socket is opened: who may reach it from the first moment, and which TLS keys are accepted."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
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
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert len(socket.listeners) == 1
    finally:
        os.umask(before)
    assert not path.exists()


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_the_mode_of_an_ipc_socket_is_set_before_it_listens(tmp_path: Path) -> None:
    script = (
        "import sys; from relay.bridges.sp.config import SocketConfig; from relay.bridges.sp.opening import new_socket, start\n"
        "config = SocketConfig(protocol='rep', cluster='a', listen='ipc://' + sys.argv[1], ipc_mode=0o600)\n"
        "socket = new_socket(config); start(socket, config); print('open'); socket.close()"
    )
    done = subprocess.run(
        ["strace", "-f", "-e", "trace=bind,chmod,listen", sys.executable, "-c", script, str(tmp_path / "s")],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    if done.stdout != "open\n":
        pytest.skip(f"strace may not trace here: {done.stderr[-200:]}")
    order = [
        call for line in done.stderr.splitlines() for call in ("bind", "chmod", "listen") if f"{call}(" in line
    ]  # fmt: skip
    assert order == ["bind", "chmod", "listen"], done.stderr


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
        with pytest.raises(iris.ConfigError, match=r"tls_key: .*server\.key: open to others"):
            new_socket(config)
