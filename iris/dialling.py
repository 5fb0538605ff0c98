"""How a process reaches its relay: the socket on this host, after a look at who listens there, or TLS to another host."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import random
import re
import socket
import ssl
import struct
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from iris import paths
from iris.config import ClientConfig
from iris.errors import ConfigError, KeyringError, RelayUnavailable
from iris.keyfiles import config_directory, distrust
from iris.remote import load_access

log = logging.getLogger(__name__)

REMOTE: Final = "tls://"
_EVERY: Final = "tls://dns:"
MAX_REMOTES: Final = 16
ONE_OF_MANY_S: Final = 1.5
"""For a relay to answer while there are others to try."""
ACCESS_VARIABLE: Final = "IRIS_ACCESS"
ACCESS_FILE: Final = "access.pem"
_HOST_AND_PORT: Final = re.compile(r"[^/]+:[0-9]{1,5}")
_CREDENTIALS: Final = struct.Struct("3i")
_skipped: Final[dict[Path, str]] = {}
"""Sockets that were reported as skipped -> the reason."""


async def reach(
    config: ClientConfig,
    environ: Mapping[str, str],
    factory: Callable[[], asyncio.BufferedProtocol],
) -> Path | None:
    """Attach the protocol that `factory` makes to the relay of `config`, else of $IRIS_RELAY, else of this host.

    Return the path of its socket; None if it is on another host.

    Raises:
        RelayUnavailable: nobody is there whom we trust.
        ConfigError, KeyringError: the address, or the access file that TLS takes, cannot be used.
    """
    relay = config.relay or environ.get(paths.RELAY_VARIABLE)
    if relay and not str(relay).startswith(REMOTE):
        _check_path(str(relay))
    if str(relay).startswith(REMOTE):
        named = config.access or environ.get(ACCESS_VARIABLE)
        access_file = Path(named) if named else config_directory(environ) / ACCESS_FILE
        await dial_any(parse_remotes(str(relay)), access_file, factory)
        return None
    path = Path(relay) if relay else find_relay(environ, config.relay_user)
    connection = await dial(path, config.relay_user)
    try:
        await asyncio.get_running_loop().create_unix_connection(factory, sock=connection)
    except BaseException:
        connection.close()
        raise
    return path


def arrivals(config: ClientConfig, environ: Mapping[str, str]) -> Callable[[], bool]:
    """Return what says whether a relay has put its socket there since it was asked last; of a relay on another host never.

    A few calls of stat(2): it may be asked many times a second.
    """
    relay = config.relay or environ.get(paths.RELAY_VARIABLE)
    if str(relay).startswith(REMOTE):
        return lambda: False
    places = (Path(relay),) if relay else paths.candidate_sockets(environ, os.geteuid())
    seen = [_identity(place) for place in places]

    def arrived() -> bool:
        before, seen[:] = list(seen), [_identity(place) for place in places]
        return any(now is not None and now != then for now, then in zip(seen, before, strict=True))

    return arrived


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a socket from the next one at its path; None if nothing can be seen there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _check_path(relay: str) -> None:
    if "\0" in relay:
        raise ConfigError(
            f"relay: {relay!r} is an abstract socket, which any process may claim; relays do not use them. Give the path of the relay's socket"
        )
    if "://" in relay:
        raise ConfigError(f"relay: {relay!r} is neither a path nor tls://host:port")
    if _HOST_AND_PORT.fullmatch(relay) and not os.path.exists(relay):
        raise ConfigError(
            f"relay: {relay!r} is not a path; for a relay on another host write tls://{relay}"
        )


def find_relay(environ: Mapping[str, str], relay_user: str) -> Path:
    """Return the socket to try: the user's own relay if it exists, else the host's.

    A socket that another user may have put there is skipped and logged, so that it does not hide the next. $IRIS_RELAY is not
    checked here: whoever sets it wants that relay.

    Raises:
        RelayUnavailable: there is no socket, or all were skipped; the text says which, and why.
    """
    candidates = paths.candidate_sockets(environ, os.geteuid())
    skipped = []
    for path in candidates:
        try:
            if not path.exists():
                continue
            why = distrust(path.parent, _trusted(relay_user))
        except OSError as err:
            why = f"{path}: {err.strerror}"
        if not why:
            return path
        skipped.append(f"skipped {path}: {why}")
        if _skipped.get(path) != why:  # clients try again and again
            _skipped[path] = why
            log.warning(
                "relay.socket_skipped", extra={"fields": {"socket": str(path), "reason": why}}
            )
    if skipped:
        names = " or ".join(map(str, candidates))
        raise RelayUnavailable(f"no relay at {names}; {'; '.join(skipped)}")
    return candidates[0]


class Remote(NamedTuple):
    """Where a relay on another host takes sessions."""

    host: str
    port: int
    all_of_name: bool = False
    """The host is a name of which every address is a relay."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_remotes(text: str) -> tuple[Remote, ...]:
    """Return the addresses of `tls://host:port`, several with commas between them.

    IPv6 is in brackets; `tls://dns:name:port` stands for all addresses of a name. Raises ConfigError.
    """
    remotes = tuple(_parse_remote(part.strip()) for part in text.split(","))
    if len(remotes) > MAX_REMOTES:
        raise ConfigError(f"relay: {len(remotes)} addresses, over {MAX_REMOTES}")
    return remotes


def _parse_remote(text: str) -> Remote:
    named = text.startswith(_EVERY)
    parts = urllib.parse.urlsplit(REMOTE + text.removeprefix(_EVERY) if named else text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tls" or not host or not port or parts.path.strip("/") or parts.query:
        raise ConfigError(f"relay: {text!r} is neither a path nor tls://host:port")
    return Remote(host, port, named)


async def dial_any(
    remotes: Sequence[Remote], access_file: Path, factory: Callable[[], asyncio.BufferedProtocol]
) -> None:
    """Attach the protocol that `factory` makes to one of the relays at `remotes`: in a random order, until one takes it.

    Raises:
        RelayUnavailable: none of them did; says why for each.
        KeyringError: the access file cannot be used.
    """
    found: list[Remote] = []
    failed: list[str] = []
    for remote in remotes:
        try:
            found += await _every_address(remote)
        except OSError as err:
            failed.append(f"{remote.host} has no address ({err})")
    random.shuffle(found)
    for remote in found:
        try:
            async with asyncio.timeout(ONE_OF_MANY_S if len(found) > 1 else None):
                return await dial_remote((remote.host, remote.port), access_file, factory)
        except TimeoutError:
            failed.append(f"{remote} did not answer within {ONE_OF_MANY_S:g} s")
        except RelayUnavailable as err:
            failed.append(str(err))
    raise RelayUnavailable("; ".join(failed))


async def _every_address(remote: Remote) -> list[Remote]:
    if not remote.all_of_name:
        return [remote]
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(remote.host, remote.port, type=socket.SOCK_STREAM)
    return [Remote(str(host), remote.port) for host in dict.fromkeys(info[4][0] for info in infos)]


async def dial_remote(
    address: tuple[str, int], access_file: Path, factory: Callable[[], asyncio.BufferedProtocol]
) -> None:
    """Attach the protocol that `factory` makes to the relay at `address` on another host, over TLS.

    Raises:
        RelayUnavailable: nobody answers there, or whoever does is no relay of the network of the access file.
        KeyringError: the access file cannot be used.
    """
    try:
        access = load_access(access_file)
    except KeyringError as err:
        raise KeyringError(
            f"{err}; tls:// takes a file of `iris key access`, here or named by ${ACCESS_VARIABLE}"
        ) from err
    try:
        await asyncio.get_running_loop().create_connection(
            factory, *address, ssl=access.context, server_hostname=access.server_name
        )
    except (ssl.SSLError, ConnectionResetError) as err:
        why = getattr(err, "reason", None) or str(err) or "it closed the handshake"
        raise RelayUnavailable(
            f"{address[0]}:{address[1]} takes no session with {access_file} ({why}): the file is of another network, or this is not the "
            "port of `iris relay --listen`"
        ) from err
    except OSError as err:
        raise RelayUnavailable(
            f"no relay at {address[0]}:{address[1]} ({err}); `iris relay --listen tls://HOST:PORT` takes sessions there"
        ) from err


async def dial(path: Path, relay_user: str) -> socket.socket:
    """Return a socket connected to the relay at `path`, after checking who listens there.

    Raises:
        RelayUnavailable: nobody listens, or somebody whom we do not trust with our metadata.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as err:  # no descriptor is free
        raise RelayUnavailable(
            f"cannot make a socket for the relay at {path}: {err.strerror}"
        ) from err
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, os.fspath(path))
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != 0 and uid not in _trusted(relay_user):
            raise RelayUnavailable(
                f"the relay at {path} runs as uid {uid}, which is not trusted: only our own user, root and {relay_user!r} are (ClientConfig.relay_user)"
            )
    except OSError as err:
        connection.close()
        raise RelayUnavailable(
            f"no relay at {path} ({err.strerror or err}); start one with `iris relay`, or to try things out on this host alone with "
            "`iris relay --dev`"
        ) from err
    except BaseException:
        connection.close()
        raise
    return connection


def _trusted(relay_user: str) -> tuple[int, ...]:
    """Return the users, besides root, whose relay we trust."""
    try:
        return os.geteuid(), pwd.getpwnam(relay_user).pw_uid
    except KeyError:
        return (os.geteuid(),)
