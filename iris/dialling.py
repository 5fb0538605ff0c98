"""Connects a process to its relay: over the Unix socket of this host, or over TLS to another host.

Before a Unix socket is used, its directory and the user of the listening process are checked, because the relay
learns the names and sizes of all messages.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
import random
import re
import socket
import ssl
import struct
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from iris import paths
from iris.config import ClientConfig
from iris.core.backoff import Backoff
from iris.crypto.keyring import Keyring
from iris.errors import ConfigError, KeyringError, RelayUnavailable
from iris.forks import keep_from_child
from iris.keyfiles import NoKeyring, config_directory, distrust, load_keys
from iris.logs import logger
from iris.remote import load_access

log = logger(__name__)

T = TypeVar("T")
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
"""Shortest and longest pause between attempts to reach a relay that is waited for."""
REMOTE: Final = "tls://"
_EVERY: Final = "tls://dns:"
MAX_REMOTES: Final = 16
ONE_OF_MANY_S: Final = 1.5
"""Seconds for each relay to answer while there are others to try."""
ACCESS_VARIABLE: Final = "IRIS_ACCESS"
ACCESS_FILE: Final = "access.pem"
_HOST_AND_PORT: Final = re.compile(r"[^/]+:[0-9]{1,5}")
_CREDENTIALS: Final = struct.Struct("3i")
_skipped: Final[dict[Path, str]] = {}
"""Sockets that were logged as skipped -> the reason."""


async def reach(
    config: ClientConfig,
    environ: Mapping[str, str],
    factory: Callable[[], asyncio.BufferedProtocol],
) -> Path | None:
    """Connect the protocol that `factory` makes to the relay of `config`, else of $IRIS_RELAY, else of this host.

    Return the path of the relay's socket, or None if the relay is on another host.

    Raises:
        RelayUnavailable: no relay answered, or the one that did is not trusted.
        ConfigError, KeyringError: the address, or the access file for TLS, cannot be used.
    """
    relay = config.relay or environ.get(paths.RELAY_VARIABLE)
    if relay and not str(relay).startswith(REMOTE):
        _check_path(str(relay))
    if str(relay).startswith(REMOTE):
        named = config.access or environ.get(ACCESS_VARIABLE)
        access_file = Path(named) if named else config_directory(environ) / ACCESS_FILE
        await dial_any(parse_remotes(str(relay)), access_file, factory)
        return None
    path = Path(relay) if relay else find_relay(environ, config.trusted_user)
    connection = await dial(path, config.trusted_user)
    try:
        await asyncio.get_running_loop().create_unix_connection(factory, sock=connection)
    except BaseException:
        connection.close()
        raise
    return path


async def find_keys(config: ClientConfig, environ: Mapping[str, str]) -> Keyring:
    """Return the keyring that `iris.keyfiles.load_keys` finds.

    Raises:
        KeyringError: there is none, or it cannot be used. If no relay runs either, the text says so, because then
            one command can start both.
    """
    try:
        return load_keys(environ)
    except NoKeyring as error:
        relay = str(config.relay or environ.get(paths.RELAY_VARIABLE) or "")
        if relay.startswith(REMOTE):
            raise
        path: Path | str = relay or paths.candidate_sockets(environ, os.geteuid())[0]
        try:
            path = Path(relay) if relay else find_relay(environ, config.trusted_user)
            (await dial(path, config.trusted_user)).close()
        except RelayUnavailable as unreachable:
            hidden = "unset IRIS_CONFIG and " if environ.get("IRIS_CONFIG") else ""
            raise NoKeyring(
                f"no relay is running (looked at {path}) and there is no keyring in {error.directory}. To try Iris on this "
                f"host, {hidden}start `iris relay --dev`; for a network, make keys with `iris key new` and start "
                "`iris relay`",
                error.directory,
            ) from unreachable
        raise


async def retried(work: Callable[[], Awaitable[T]], until_s: float) -> T:
    """Return the result of `work()`; while no relay answers, repeat it until `until_s` of the monotonic clock."""
    backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
    while True:
        try:
            return await work()
        except (RelayUnavailable, NoKeyring) as err:
            # Without a keyring, one may appear with a relay that makes throw-away keys.
            waits = isinstance(err, RelayUnavailable) or isinstance(err.__cause__, RelayUnavailable)
            left_s = until_s - time.monotonic()
            if not waits or left_s <= 0:
                raise
            await asyncio.sleep(min(left_s, backoff.failed()))


def arrivals(config: ClientConfig, environ: Mapping[str, str]) -> Callable[[], bool]:
    """Return a function that says whether a relay has created its socket since the last call.

    For a relay on another host it always returns False. A call is a few stat(2) calls, cheap enough for many a
    second.
    """
    relay = config.relay or environ.get(paths.RELAY_VARIABLE)
    if str(relay).startswith(REMOTE):
        return lambda: False
    sockets = (Path(relay),) if relay else paths.candidate_sockets(environ, os.geteuid())
    seen = [_identity(path) for path in sockets]

    def arrived() -> bool:
        before, seen[:] = list(seen), [_identity(path) for path in sockets]
        return any(now is not None and now != then for now, then in zip(seen, before, strict=True))

    return arrived


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return (device, inode, ctime in ns) of a file, which change with the socket at that path; None if missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _check_path(relay: str) -> None:
    if "\0" in relay:
        raise ConfigError(
            f"relay: {relay!r} is an abstract socket, which any process may claim; "
            "give the path of the relay's socket"
        )
    if "://" in relay:
        raise ConfigError(
            f"relay: {relay!r} is not an address of a relay; write the path of its socket, or tls://host:port"
        )
    if _HOST_AND_PORT.fullmatch(relay) and not os.path.exists(relay):
        raise ConfigError(
            f"relay: {relay!r} is not a path; for a relay on another host write tls://{relay}"
        )


def find_relay(environ: Mapping[str, str], trusted_user: str) -> Path:
    """Return the path of the socket to try: that of the user's own relay if it exists, else the host's.

    A socket that another user may have created is skipped and logged, so that it does not hide the next one. The
    directory of $IRIS_RELAY is not checked here, because setting it names that relay.

    Raises:
        RelayUnavailable: all sockets were skipped; the text names them and the reasons.
    """
    candidates = paths.candidate_sockets(environ, os.geteuid())
    skipped = []
    for path in candidates:
        try:
            if not path.exists():
                continue
            why = distrust(path.parent, _trusted(trusted_user))
        except OSError as err:
            why = f"{path}: {err.strerror}"
        if not why:
            return path
        skipped.append(f"skipped {path}: {why}")
        if _skipped.get(path) != why:  # log once, because clients retry many times
            _skipped[path] = why
            log.warning(
                "relay.socket_skipped", extra={"fields": {"socket": str(path), "reason": why}}
            )
    if skipped:
        names = " or ".join(map(str, candidates))
        raise RelayUnavailable(f"no relay at {names}; {'; '.join(skipped)}")
    return candidates[0]


class Remote(NamedTuple):
    """TLS address of a relay on another host."""

    host: str
    port: int
    all_of_name: bool = False
    """Whether each address of the host name is a relay to try (tls://dns:name:port)."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_remotes(text: str) -> tuple[Remote, ...]:
    """Parse `tls://host:port`, or several of them separated by commas, at most 16.

    IPv6 addresses are in brackets. `tls://dns:name:port` stands for all addresses of a name. Raises ConfigError.
    """
    remotes = tuple(_parse_remote(part.strip()) for part in text.split(","))
    if len(remotes) > MAX_REMOTES:
        raise ConfigError(f"relay: {len(remotes)} addresses are over the limit of {MAX_REMOTES}")
    return remotes


def _parse_remote(text: str) -> Remote:
    named = text.startswith(_EVERY)
    parts = urllib.parse.urlsplit(REMOTE + text.removeprefix(_EVERY) if named else text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tls" or not host or not port or parts.path.strip("/") or parts.query:
        raise ConfigError(
            f"relay: {text!r} is not an address of a relay; write the path of its socket, or tls://host:port"
        )
    return Remote(host, port, named)


async def dial_any(
    remotes: Sequence[Remote], access_file: Path, factory: Callable[[], asyncio.BufferedProtocol]
) -> None:
    """Connect the protocol that `factory` makes to one of the relays at `remotes`, tried in random order.

    Raises:
        RelayUnavailable: all attempts failed; the text has the reason for each.
        KeyringError: the access file cannot be used.
    """
    found: list[Remote] = []
    failed: list[str] = []
    for remote in remotes:
        try:
            found += await _every_address(remote)
        except OSError as err:
            failed.append(f"cannot find the address of {remote.host}: {err.strerror or err}")
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
    """Connect the protocol that `factory` makes to the relay at `address` (host, port), over TLS.

    Raises:
        RelayUnavailable: no answer, or the peer is not a relay of the network of the access file.
        KeyringError: the access file cannot be used.
    """
    try:
        access = load_access(access_file)
    except KeyringError as err:
        raise KeyringError(
            f"{err}; tls:// addresses need an access file: make one with `iris key access` on a relay's host "
            f"and name it with ${ACCESS_VARIABLE}"
        ) from err
    try:
        connection = await _connect_tcp(*address)
        try:
            await asyncio.get_running_loop().create_connection(
                factory, sock=connection, ssl=access.context, server_hostname=access.server_name
            )
        except BaseException:
            connection.close()
            raise
    except (ssl.SSLError, ConnectionResetError) as err:
        why = getattr(err, "reason", None) or str(err) or "it closed the handshake"
        raise RelayUnavailable(
            f"{address[0]}:{address[1]} refused a session with {access_file} ({why}); check that the file is "
            "from this network, and that the port is that of `iris relay --listen`"
        ) from err
    except OSError as err:
        raise RelayUnavailable(
            f"no relay at {address[0]}:{address[1]} ({err}); start one there with "
            "`iris relay --listen tls://HOST:PORT`"
        ) from err


async def _connect_tcp(host: str, port: int) -> socket.socket:
    """Return a socket connected to the first address of a host that accepts. Raises OSError."""
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = None
        try:
            connection = keep_from_child(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            await connect(connection, address)
        except BaseException as err:
            if connection is not None:
                connection.close()
            if not isinstance(err, OSError):
                raise
            errors.append(err)
        else:
            return connection
    raise errors[0] if len(errors) == 1 else OSError("; ".join(map(str, errors)))


async def connect(connection: socket.socket, address: Any) -> None:
    """Connect a non-blocking socket to a numeric address; raises OSError.

    The event loop's own `sock_connect` is not used, because uvloop's drops the scope of link-local IPv6 addresses.
    """
    error = connection.connect_ex(address)
    if error == errno.EINPROGRESS:
        loop = asyncio.get_running_loop()
        writable = asyncio.Event()
        loop.add_writer(connection, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(connection)
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


async def dial(path: Path, trusted_user: str) -> socket.socket:
    """Return a socket connected to the relay at `path`, after checking the user of the process that listens there.

    Raises:
        RelayUnavailable: no process listens, or its user is not trusted with our metadata.
    """
    try:
        connection = keep_from_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    except OSError as err:  # out of file descriptors
        raise RelayUnavailable(
            f"cannot create a socket to connect to the relay at {path}: {err.strerror}"
        ) from err
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, os.fspath(path))
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != 0 and uid not in _trusted(trusted_user):
            raise RelayUnavailable(
                f"the relay at {path} runs as uid {uid}, which is not trusted; only your own user, root and "
                f"{trusted_user!r} (ClientConfig.trusted_user) are"
            )
    except OSError as err:
        connection.close()
        raise RelayUnavailable(
            f"no relay at {path} ({err.strerror or err}); start one with `iris relay`, "
            "or with `iris relay --dev` to try Iris on this host only"
        ) from err
    except BaseException:
        connection.close()
        raise
    return connection


def _trusted(trusted_user: str) -> tuple[int, ...]:
    """Return the uids, besides root, whose relay is trusted."""
    try:
        return os.geteuid(), pwd.getpwnam(trusted_user).pw_uid
    except KeyError:
        return (os.geteuid(),)
