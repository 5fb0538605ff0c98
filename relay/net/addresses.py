"""Sockets and addresses of links: binding, connecting, formatting and parsing."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from iris.errors import ConfigError
from relay.config import RelayConfig
from relay.discovery import DEFAULT_PORT

UNSENT_BYTES: Final = 128 << 10
"""Most unsent bytes that the kernel buffers on a link. More would wait there, where short frames cannot overtake long
ones."""
UNREAD_BYTES: Final = 256 << 10
"""Receive buffer of a link in the kernel (by default it may be 32 MiB): short frames would wait behind unread ones.
Enough for 250 MB/s at a round trip of 1 ms. It must be set before connect and listen, which fix the window scale."""
BACKLOG: Final = 512
_NO_SUCH_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


def bind(config: RelayConfig) -> list[socket.socket]:
    """Return listening sockets at the addresses of `config`, all with the same port.

    If `config` does not name a port, use `DEFAULT_PORT`, or any free port if that is in use.

    Raises:
        ConfigError: an address or the port in `config` cannot be bound.
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
                        f"port: cannot accept links at port {number}: it is in use (by another relay?); choose another --port"
                    ) from err
                shown = ", ".join(config.bind)
                raise ConfigError(f"bind: cannot accept links at {shown}: {err.strerror}") from err
    raise ConfigError(
        f"port: no port is free at all of {', '.join(config.bind)}; choose one with --port"
    )


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
    """Return a listening socket at one address; `unread_bytes`, if given, is its receive buffer in the kernel.

    Raises:
        ConfigError: `host`, from setting `setting`, is not a numeric address.
        OSError: the address or port cannot be bound.
    """
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (socket.gaierror, ValueError) as err:
        raise ConfigError(
            f"{setting}: {host!r} is not an IP address; a host name cannot be used here"
        ) from err
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


def prepare(connection: socket.socket, *, far: bool = False) -> None:
    """Set the options of a link's socket, or with `far` of a connection to another site.

    A connection to another site keeps the kernel's receive buffer, because a smaller one would limit the throughput
    over long round trips. Its keepalives stop firewalls and NAT between the sites from forgetting it.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if far:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    else:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)


def show(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_addresses(texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the (host, port) of texts formatted by `show`; skip those that are not numeric."""
    for text in texts:
        host, _, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            continue
        if port.isascii() and port.isdigit() and 0 < len(port) < 6 and 0 < int(port) < 65_536:
            yield bare, int(port)
