"""A relay's socket is one live relay's, and nobody else's."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iris.errors import ConfigError
from relay.net import socketfile
from relay.net.socketfile import AlreadyRunning, SocketFile

Bind = Callable[..., SocketFile]

DIES = """
import os, sys
from pathlib import Path
from relay.net.socketfile import bind
bind(Path(sys.argv[1]))
os._exit(0)
"""


@pytest.fixture
def bind() -> Iterator[Bind]:
    bound: list[SocketFile] = []

    def keep(path: Path, **options: object) -> SocketFile:
        bound.append(socketfile.bind(path, **options))  # type: ignore[arg-type]  # options of bind
        return bound[-1]

    yield keep
    for one in bound:
        one.release()
        one.listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "relay.sock"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_bound_socket_listens_without_blocking_in_a_private_directory(
    bind: Bind, path: Path
) -> None:
    bound = bind(path)
    assert connects(path)
    assert not bound.listener.getblocking()
    assert not os.get_inheritable(bound.listener.fileno())
    assert (mode_of(path.parent), mode_of(path)) == (0o700, 0o600)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "relay.sock",
        "relay.sock.lock",
    ]


def test_with_a_group_socket_and_new_directory_are_open_to_it(bind: Bind, path: Path) -> None:
    gid = os.getegid()
    bind(path, group=grp.getgrgid(gid).gr_name)
    assert (mode_of(path.parent), mode_of(path)) == (0o750, 0o660)
    assert (path.parent.stat().st_gid, path.stat().st_gid) == (gid, gid)


def test_an_explicit_mode_holds_whatever_the_umask(bind: Bind, path: Path) -> None:
    before = os.umask(0o077)
    try:
        bind(path, mode=0o666)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o666


def test_the_socket_has_its_mode_before_it_has_its_name(
    bind: Bind, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename
    renamed: list[tuple[int, bool]] = []

    def watched(self: Path, target: Path) -> Path:
        renamed.append((mode_of(self), connects(self)))
        assert not target.exists()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    bind(path, mode=0o640)
    assert renamed == [(0o640, True)]


def test_a_second_relay_is_refused_with_the_pid_of_the_first(bind: Bind, path: Path) -> None:
    bind(path)
    with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}\b") as raised:
        bind(path)
    assert raised.value.pid == os.getpid()
    assert connects(path)


def test_a_holder_that_has_not_said_its_pid_yet_is_refused_all_the_same(
    bind: Bind, path: Path
) -> None:
    path.parent.mkdir(0o700)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AlreadyRunning, match="another process") as raised:
            bind(path)
    assert raised.value.pid is None
    assert not path.exists()


def test_a_live_relay_whose_lock_file_was_tidied_away_keeps_its_socket(
    bind: Bind, path: Path
) -> None:
    first = bind(path)
    Path(f"{path}.lock").unlink()
    before = path.stat().st_ino
    with pytest.raises(AlreadyRunning) as raised:
        bind(path)
    assert raised.value.pid == os.getpid()
    assert path.stat().st_ino == before
    first.listener.setblocking(True)
    assert connects(path)


def test_a_live_relay_with_a_full_backlog_is_not_taken_for_dead(bind: Bind, path: Path) -> None:
    first = bind(path)
    Path(f"{path}.lock").unlink()
    first.listener.listen(0)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(path))
        with pytest.raises(AlreadyRunning):
            bind(path)


def test_the_socket_of_a_relay_that_was_killed_is_replaced(bind: Bind, path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(path)], check=True)
    assert path.is_socket()
    assert not connects(path)
    bind(path)
    assert connects(path)


def test_what_a_relay_left_that_was_killed_while_it_bound_is_replaced(
    bind: Bind, path: Path
) -> None:
    path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as unfinished:
        unfinished.bind(f"{path}~")
    bind(path)
    assert connects(path)
    assert not Path(f"{path}~").exists()


def test_a_file_that_is_not_a_socket_is_never_replaced(bind: Bind, path: Path) -> None:
    path.parent.mkdir(0o700)
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"^socket_path: .* is not a socket"):
        bind(path)
    assert path.read_text() == "precious"
    path.unlink()
    bind(path)  # the failure kept no lock


def test_a_link_in_the_socket_s_place_is_not_followed(bind: Bind, path: Path) -> None:
    path.parent.mkdir(0o700)
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="is not a socket"):
        bind(path)


def test_a_link_in_the_lock_s_place_is_not_followed(bind: Bind, path: Path) -> None:
    path.parent.mkdir(0o700)
    target = path.parent / "precious"
    target.write_text("precious")
    Path(f"{path}.lock").symlink_to(target)
    with pytest.raises(ConfigError, match=r"^socket_path: "):
        bind(path)
    assert target.read_text() == "precious"


def test_a_directory_of_somebody_else_is_refused(
    bind: Bind, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir(0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(ConfigError, match=r"^socket_path: .* belongs to uid"):
        bind(path)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(bind: Bind, path: Path, mode: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    with pytest.raises(ConfigError, match=r"^socket_path: other users can write"):
        bind(path)
    assert list(path.parent.iterdir()) == []


def test_a_link_to_a_directory_is_refused(bind: Bind, path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    path.parent.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"^socket_path: .* is not a directory"):
        bind(path)


def test_a_directory_that_the_group_cannot_enter_is_refused(bind: Bind, path: Path) -> None:
    path.parent.mkdir(0o700)
    with pytest.raises(ConfigError, match=r"^socket_group: .* cannot enter"):
        bind(path, group=grp.getgrgid(os.getegid()).gr_name)


def test_a_directory_without_a_parent_is_named(bind: Bind, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^socket_path: .*No such file"):
        bind(tmp_path / "a" / "b" / "relay.sock")


def test_an_unknown_group_is_named_before_anything_is_made(bind: Bind, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^socket_group: .*no-such-group"):
        bind(path, group="no-such-group")
    assert not path.parent.exists()


def test_release_gives_back_the_name_and_the_lock(bind: Bind, path: Path) -> None:
    first = bind(path)
    first.release()
    assert not path.exists()
    second = bind(path)
    first.release()
    assert connects(path)
    second.release()
    assert not path.exists()


def test_release_leaves_a_name_alone_that_is_no_longer_ours(bind: Bind, path: Path) -> None:
    bound = bind(path)
    path.unlink()
    path.write_text("another's")
    bound.release()
    assert path.read_text() == "another's"


def test_release_after_somebody_deleted_the_name_is_harmless(bind: Bind, path: Path) -> None:
    bound = bind(path)
    path.unlink()
    bound.release()
    bind(path)
    assert connects(path)


def test_the_longest_path_that_settings_allow_can_be_bound(
    bind: Bind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    room = socketfile.MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    assert room > 5
    path = tmp_path / ("s" * room)
    bind(path)
    assert connects(path)
    with pytest.raises(ConfigError, match=r"^socket_path: "):
        bind(path.with_name(path.name + "ss"))
