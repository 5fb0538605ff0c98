"""Addresses of links: where they are accepted, how they are reached, how they are written."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final

from iris.errors import ConfigError
from relay.config import RelayConfig
from relay.discovery import DEFAULT_PORT

UNSENT_BYTES: Final = 128 << 10
"""Kept back by the kernel on a link, so that what waits waits here, where short frames overtake long ones."""
UNREAD_BYTES: Final = 256 << 10
"""Buffered by the kernel for a relay that is short of time (it may be 32 MiB otherwise): behind them short frames would wait, too. Enough
for 250 MB/s at a round trip of 1 ms. Set before connecting and listening, as the window's scale follows from it."""
BACKLOG: Final = 512
_NO_SUCH_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


def bind(config: RelayConfig) -> list[socket.socket]:
    """Return listening sockets at the addresses and the one port that `config` names.

    Without a port of its own choice the relay takes `DEFAULT_PORT`, or any other if that is taken.

    Raises:
        ConfigError: an address or a chosen port cannot be had.
    """
    wanted = DEFAULT_PORT if config.port is None else config.port
    for number in (
        (wanted, 0) if config.port is None else (wanted,) * 8 if not wanted else (wanted,)
    ):
        try:
            return _bind_all(config.bind, number)
        except OSError as err:
            if err.errno != errno.EADDRINUSE or (wanted and config.port is not None):
                if err.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port: no links at {number}: it is in use, by another relay perhaps; choose another --port"
                    ) from err
                shown = ", ".join(config.bind)
                raise ConfigError(f"bind: no links at {shown}: {err.strerror}") from err
    raise ConfigError("port: no port is free at all addresses")


def _bind_all(addresses: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    wildcards = {"0.0.0.0", "::"} == set(addresses)
    with contextlib.ExitStack() as undo:
        for host in addresses:
            try:
                listener = undo.enter_context(listen_at("bind", host, port, UNREAD_BYTES))
            except OSError as err:
                if wildcards and err.errno in _NO_SUCH_ADDRESS and host == "::":
                    continue  # a host without IPv6
                raise
            port = listener.getsockname()[1]
            listeners.append(listener)
        undo.pop_all()
    return listeners


def listen_at(setting: str, host: str, port: int, unread_bytes: int = 0) -> socket.socket:
    """Return a listening socket at one address; `unread_bytes`, if given, bounds what the kernel buffers of a connection.

    Raises:
        ConfigError: `host`, of this setting, is no numeric address.
        OSError: the address or the port cannot be had.
    """
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (socket.gaierror, ValueError) as err:
        raise ConfigError(f"{setting}: {host!r} is not an IP address of this host") from err
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if unread_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, unread_bytes)
        listener.bind(sockaddr)
        listener.setblocking(False)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def connect(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, sockaddr: Any
) -> None:
    """Connect a non-blocking socket; raises OSError.

    Not the event loop's own: uvloop's drops the scope of link-local IPv6 addresses.
    """
    error = connection.connect_ex(sockaddr)
    if error == errno.EINPROGRESS:
        writable = asyncio.Event()
        loop.add_writer(connection, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(connection)
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def prepare(connection: socket.socket, *, far: bool = False) -> None:
    """Set what the socket of a link needs, or with `far` that of a connection to another site.

    Over long round trips the kernel chooses how much it buffers (a bound of ours would be one of the throughput), and what stands
    between the sites is to keep the connection in mind.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if far:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    else:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)


def show(host: str, port: int) -> str:
    """Return host:port, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_addresses(texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the addresses written as `show` does; what is not numeric is passed over."""
    for text in texts:
        host, _, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            continue
        if port.isascii() and port.isdigit() and 0 < len(port) < 6 and 0 < int(port) < 65_536:
            yield bare, int(port)
