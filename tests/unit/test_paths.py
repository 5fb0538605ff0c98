"""Client, command and relay agree on where the socket is."""

from __future__ import annotations

from pathlib import Path

import pytest

from iris import paths

SYSTEM = Path("/run/iris/relay.sock")


@pytest.fixture(autouse=True)
def _as_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are alone otherwise (`support.alone`)."""
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", SYSTEM.parent)


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/1000"}, 1000, "/run/user/1000/iris"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/user/0/iris"),
        ({}, 0, "/run/iris"),
        ({}, 1000, "/tmp/iris-1000"),
        ({"XDG_RUNTIME_DIR": ""}, 1000, "/tmp/iris-1000"),
        ({"XDG_RUNTIME_DIR": "relative"}, 1000, "/tmp/iris-1000"),
    ],
)
def test_the_runtime_directory_is_the_session_s_else_the_user_s(
    environ: dict[str, str], uid: int, expected: str
) -> None:
    assert paths.runtime_directory(environ, uid) == Path(expected)
    assert paths.default_socket(environ, uid) == Path(expected) / "relay.sock"
    assert paths.dev_key_directory(environ, uid) == Path(expected) / "dev"


def test_iris_relay_names_the_only_socket_a_client_tries() -> None:
    environ = {"IRIS_RELAY": "/srv/r.sock", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert paths.default_socket(environ, 7) == Path("/srv/r.sock")
    assert paths.candidate_sockets(environ, 7) == (Path("/srv/r.sock"),)


def test_a_client_tries_its_own_relay_and_then_the_host_s() -> None:
    own = Path("/run/user/7/iris/relay.sock")
    assert paths.candidate_sockets({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == (own, SYSTEM)
    assert paths.candidate_sockets({}, 7) == (Path("/tmp/iris-7/relay.sock"), SYSTEM)


def test_a_client_of_root_tries_the_host_s_relay_once() -> None:
    assert paths.candidate_sockets({}, 0) == (SYSTEM,)


def test_an_empty_iris_relay_is_an_unset_one() -> None:
    assert paths.candidate_sockets({"IRIS_RELAY": ""}, 0) == (SYSTEM,)


def test_the_development_keys_stay_in_the_runtime_directory_when_the_socket_is_elsewhere() -> None:
    environ = {"IRIS_RELAY": "/srv/r.sock"}
    assert paths.dev_key_directory(environ, 7) == Path("/tmp/iris-7/dev")
