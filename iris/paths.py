"""Paths of the relay's socket and of the keys of a development relay.

The functions depend only on their arguments (environment and user id) and do not look at the disk. Clients, commands
and relays all use them, so they find each other without a configured address.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RELAY_VARIABLE = "IRIS_RELAY"
"""Environment variable with the path of the relay's socket; it overrides all defaults."""

SYSTEM_DIRECTORY = Path("/run/iris")
"""Runtime directory of the system relay, which serves all users of a host."""

_SOCKET_NAME = "relay.sock"


def runtime_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory of the sockets and locks of user `uid`; it need not exist.

    It is `$XDG_RUNTIME_DIR/iris`, else `/run/iris` for root, else `/tmp/iris-<uid>`. An empty or relative
    XDG_RUNTIME_DIR counts as unset (XDG Base Directory Specification). Any user could create the directory in `/tmp`
    first, so check its owner before use, as `relay.net.socketfile` does.
    """
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if xdg.startswith("/"):
        return Path(xdg) / "iris"
    if uid == 0:
        return SYSTEM_DIRECTORY
    return Path(f"/tmp/iris-{uid}")


def default_socket(environ: Mapping[str, str], uid: int) -> Path:
    """Return the socket path of a relay that user `uid` starts: $IRIS_RELAY, else in the runtime directory."""
    named = environ.get(RELAY_VARIABLE, "")
    return Path(named) if named else runtime_directory(environ, uid) / _SOCKET_NAME


def candidate_sockets(environ: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """Return the socket paths that a client of user `uid` tries, in order, without repeats.

    That is $IRIS_RELAY alone if it is set, else the user's own relay, then the host's. `iris.dialling` checks
    the directory of a socket before it is used.
    """
    user = default_socket(environ, uid)
    system = SYSTEM_DIRECTORY / _SOCKET_NAME
    return (user,) if environ.get(RELAY_VARIABLE) or user == system else (user, system)


def dev_key_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory of the keys that `iris relay --dev` creates for user `uid`."""
    return runtime_directory(environ, uid) / "dev"
