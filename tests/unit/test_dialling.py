"""Which socket a client uses, and who may listen there."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import iris
from iris import dialling, paths
from iris.config import ClientConfig
from iris.dialling import dial, reach
from iris.errors import ConfigError, RelayUnavailable
from iris.logs import event_of

NOBODY = 65534


class Relay:
    """A listening socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.setblocking(False)
        self.listener.bind(os.fspath(path))
        self.listener.listen()

    @property
    def met(self) -> bool:
        """Whether a client has connected."""
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return False
        connection.close()
        return True


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """$XDG_RUNTIME_DIR of the user."""
    directory = tmp_path / "user"
    directory.mkdir(0o700)
    return directory


@pytest.fixture
def own(runtime: Path) -> Iterator[Relay]:
    relay = Relay(runtime / "iris" / "relay.sock")
    yield relay
    relay.listener.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", tmp_path / "host")
    relay = Relay(tmp_path / "host" / "relay.sock")
    yield relay
    relay.listener.close()


async def go(
    environ: dict[str, str], relay: Path | None = None, trusted_user: str = "iris"
) -> None:
    """Attach a silent protocol."""
    made: list[asyncio.BaseTransport] = []

    class Silent(asyncio.BufferedProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

        def get_buffer(self, sizehint: int) -> bytearray:
            return bytearray(1)

    await reach(ClientConfig(relay=relay, trusted_user=trusted_user), environ, Silent)
    made[0].close()


def here(runtime: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(runtime)}


@contextmanager
def listening_as_another(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel reports the user that a listener had when it began to listen."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            relay.listener.listen()
        finally:
            os.seteuid(0)
        yield
    else:
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: NOBODY)
            yield


async def test_the_user_s_own_relay_comes_before_the_host_s(
    runtime: Path, own: Relay, host: Relay
) -> None:
    await go(here(runtime))
    assert own.met
    assert not host.met


async def test_a_socket_that_others_may_replace_does_not_hide_the_host_s(
    runtime: Path, own: Relay, host: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    own.path.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        await go(here(runtime))
        await go(here(runtime))
    assert host.met
    assert not own.met
    (said,) = [record for record in caplog.records if event_of(record) == "relay.socket_skipped"]
    assert "other users may write to" in str(vars(said)["fields"])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
async def test_a_socket_in_another_user_s_directory_does_not_hide_the_host_s(
    runtime: Path, own: Relay, host: Relay
) -> None:
    os.chown(own.path.parent, NOBODY, NOBODY)
    await go(here(runtime))
    assert host.met
    assert not own.met


async def test_a_link_in_place_of_the_directory_does_not_hide_the_host_s(
    tmp_path: Path, runtime: Path, host: Relay
) -> None:
    elsewhere = Relay(tmp_path / "elsewhere" / "relay.sock")
    (runtime / "iris").symlink_to(tmp_path / "elsewhere")
    await go(here(runtime))
    assert host.met
    assert not elsewhere.met
    elsewhere.listener.close()


@pytest.mark.parametrize(("mode", "trusted"), [(0o777, False), (0o775, False), (0o1777, True)])
async def test_a_directory_that_others_may_rename_does_not_hide_the_host_s(
    runtime: Path, own: Relay, host: Relay, mode: int, trusted: bool
) -> None:
    """In a sticky directory such as /tmp only the owner of an entry may rename it."""
    os.chmod(runtime, mode)
    await go(here(runtime))
    assert (own.met, host.met) == (trusted, not trusted)


async def test_when_nothing_is_left_to_try_the_error_says_what_was_skipped_and_why(
    tmp_path: Path, runtime: Path, own: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", tmp_path / "none")
    own.path.parent.chmod(0o770)
    with pytest.raises(RelayUnavailable) as failed:
        await go(here(runtime))
    assert str(tmp_path / "none" / "relay.sock") in str(failed.value)
    assert str(own.path) in str(failed.value)
    assert "other users may write to" in str(failed.value)
    assert not own.met


@pytest.mark.parametrize("how", ["environment", "configuration"])
async def test_a_relay_named_by_the_user_is_the_only_one(
    tmp_path: Path, runtime: Path, own: Relay, host: Relay, how: str
) -> None:
    named = tmp_path / "named.sock"
    environ = here(runtime)
    if how == "environment":
        environ["IRIS_RELAY"] = str(named)
    with pytest.raises(RelayUnavailable, match=r"named\.sock"):
        await go(environ, named if how == "configuration" else None)
    assert not own.met
    assert not host.met


async def test_a_relay_named_by_the_user_may_lie_anywhere(
    tmp_path: Path, own: Relay, host: Relay
) -> None:
    own.path.parent.chmod(0o777)
    await go({"IRIS_RELAY": str(own.path)})
    assert own.met
    assert not host.met


async def test_a_relay_of_another_user_is_refused(
    runtime: Path, own: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        listening_as_another(own, monkeypatch),
        pytest.raises(RelayUnavailable, match="root and 'iris'"),
    ):
        await go({}, own.path)


async def test_a_relay_of_the_configured_user_is_accepted(
    runtime: Path, own: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener_uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    user = pwd.getpwuid(listener_uid).pw_name
    with listening_as_another(own, monkeypatch):
        await go({}, own.path, user)
    assert own.met


async def test_a_socket_that_leads_elsewhere_is_judged_by_who_listens_there(
    tmp_path: Path, runtime: Path, host: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in our own directory is our own word: it is followed, and the listener's uid still decides."""
    elsewhere = Relay(tmp_path / "elsewhere" / "relay.sock")
    (runtime / "iris").mkdir(mode=0o700)
    (runtime / "iris" / "relay.sock").symlink_to(elsewhere.path)
    await go(here(runtime))
    assert elsewhere.met
    with (
        listening_as_another(elsewhere, monkeypatch),
        pytest.raises(RelayUnavailable, match="root and 'iris'"),
    ):
        await go(here(runtime))
    elsewhere.listener.close()


async def test_a_link_to_nothing_does_not_hide_the_host_s(
    tmp_path: Path, runtime: Path, host: Relay
) -> None:
    (runtime / "iris").mkdir(mode=0o700)
    (runtime / "iris" / "relay.sock").symlink_to(tmp_path / "gone")
    await go(here(runtime))
    assert host.met


async def test_links_in_a_circle_do_not_hide_the_host_s(runtime: Path, host: Relay) -> None:
    (runtime / "iris").mkdir(mode=0o700)
    (runtime / "iris" / "relay.sock").symlink_to(runtime / "iris" / "relay.sock")
    await go(here(runtime))
    assert host.met


async def test_a_socket_that_is_replaced_after_the_look_is_judged_by_who_listens_then(
    runtime: Path, own: Relay, host: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's owner is only a first check; the kernel names the user at the other end of the connection."""
    replaced: list[Relay] = []
    look = dialling.find_relay

    def find_and_replace(environ: Mapping[str, str], trusted_user: str) -> Path:
        path = look(environ, trusted_user)
        own.listener.close()
        path.unlink()
        replaced.append(Relay(path))
        return path

    monkeypatch.setattr(dialling, "find_relay", find_and_replace)
    await go(here(runtime))
    assert replaced[0].met
    replaced[0].listener.close()
    dial = dialling.dial

    async def dial_a_replaced_one(path: Path, trusted_user: str) -> socket.socket:
        os.unlink(path)
        replaced.append(Relay(path))
        with listening_as_another(replaced[-1], monkeypatch):
            return await dial(path, trusted_user)

    monkeypatch.setattr(dialling, "find_relay", look)
    monkeypatch.setattr(dialling, "dial", dial_a_replaced_one)
    with pytest.raises(RelayUnavailable, match="root and 'iris'"):
        await go(here(runtime))
    assert not host.met
    replaced[-1].listener.close()


@pytest.mark.parametrize("how", ["environment", "configuration", "runtime directory"])
async def test_a_name_that_is_too_long_for_a_socket_is_an_error_with_the_name(
    tmp_path: Path, how: str
) -> None:
    long = tmp_path / ("x" * 120)
    environ = {"IRIS_RELAY": str(long)} if how == "environment" else {}
    if how == "runtime directory":
        (long / "iris").mkdir(mode=0o700, parents=True)
        (long / "iris" / "relay.sock").touch()
        environ = {"XDG_RUNTIME_DIR": str(long)}
    with pytest.raises(RelayUnavailable, match=r"x{120}.*too long"):
        await go(environ, long if how == "configuration" else None)


@pytest.mark.parametrize("what", ["file", "directory", "nothing", "fifo"])
async def test_what_is_not_a_socket_is_not_a_relay(tmp_path: Path, what: str) -> None:
    path = tmp_path / "named.sock"
    if what == "file":
        path.touch()
    elif what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    with pytest.raises(RelayUnavailable, match=r"no relay at .*named\.sock"):
        await go({}, path)


@pytest.mark.parametrize("name", ["\0iris-relay", "/tmp/a\0b", "@iris-relay"])
@pytest.mark.parametrize("how", ["environment", "configuration"])
async def test_an_abstract_socket_is_never_connected_to(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in no directory, and whoever comes first has it."""
    monkeypatch.chdir(tmp_path)
    name = f"{name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name.lstrip("\0@"))
        listener.listen()
        listener.setblocking(False)
        environ = {"IRIS_RELAY": name} if how == "environment" else {}
        with pytest.raises(RelayUnavailable if name[0] == "@" else ConfigError):
            await go(environ, Path(name) if how == "configuration" else None)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_no_free_descriptor_is_a_relay_that_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", full)
        with pytest.raises(iris.RelayUnavailable, match="too many open files"):
            await dial(Path("/nowhere"), "iris")
