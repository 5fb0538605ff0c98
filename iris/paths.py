"""Where the relay's socket and the keys of a development machine lie.

Pure: the environment and the user id are arguments, and nothing here looks at the disk. Client, command and
relay call the same functions, so that they meet without being told an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RELAY_VARIABLE = "IRIS_RELAY"
"""Environment variable with the path of the relay's socket; it beats every default."""

SYSTEM_DIRECTORY = Path("/run/iris")
"""Runtime directory of the one relay that serves all users of a host."""

_SOCKET_NAME = "relay.sock"


def runtime_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory of the sockets and locks of user `uid`; it need not exist.

    `$XDG_RUNTIME_DIR/iris`, else `/run/iris` for root, else `/tmp/iris-<uid>`. An empty or relative
    XDG_RUNTIME_DIR counts as unset (XDG Base Directory Specification). Anybody may create a name in
    `/tmp` first: whoever uses the directory checks its owner, as `relay.net.socketfile` does.
    """
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if xdg.startswith("/"):
        return Path(xdg) / "iris"
    if uid == 0:
        return SYSTEM_DIRECTORY
    return Path(f"/tmp/iris-{uid}")


def default_socket(environ: Mapping[str, str], uid: int) -> Path:
    """Return where a relay started by user `uid` listens: IRIS_RELAY, else in the runtime directory."""
    named = environ.get(RELAY_VARIABLE, "")
    return Path(named) if named else runtime_directory(environ, uid) / _SOCKET_NAME


def candidate_sockets(environ: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """Return the sockets that a client of user `uid` tries, in order, without repeats.

    If IRIS_RELAY is set, that is the only one. Otherwise the user's own relay comes first, then the host's.
    `iris.dialling` checks the directory of a socket before it is used.
    """
    own = default_socket(environ, uid)
    system = SYSTEM_DIRECTORY / _SOCKET_NAME
    return (own,) if environ.get(RELAY_VARIABLE) or own == system else (own, system)


def dev_key_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory of the keys that a development relay makes for user `uid`."""
    return runtime_directory(environ, uid) / "dev"
