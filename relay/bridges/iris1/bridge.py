"""The bridge to the first Iris: its listeners, its clients and its counters."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import iris
from iris.accepting import connections_that_fit, strangers_that_fit
from relay.bridges.iris1.barrier import SubscriptionBarrier
from relay.bridges.iris1.config import Iris1Config
from relay.bridges.iris1.connection import ClientConnection
from relay.bridges.iris1.local import LocalClients
from relay.bridges.iris1.writer import LINGER_S, FlushQueue
from relay.logs import Quiet

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
MAX_WAITING: Final = 1024
"""Connections that have not sent INIT. For one more, the oldest is closed."""
STRANGERS_PART: Final = 2
"""They may have half of the descriptors in the reserve: see `strangers_that_fit`."""
_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of bind for an address that this host lacks, or for IPv6 where it has none."""
_KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""Socket options. The protocol has no heartbeat, so TCP keep-alive finds a vanished host within two minutes."""

Connect = Callable[[str], iris.Client]


class Bridge:
    """Clients of the first Iris, each with its own session. `connect` returns an unopened session for a label."""

    def __init__(self, config: Iris1Config, connect: Connect) -> None:
        self.config = config
        self.max_clients = connections_that_fit(config.max_clients, each=2)  # one is its session's
        self._waiting_fit = strangers_that_fit(MAX_WAITING, STRANGERS_PART)
        self.connect = connect
        self.counters: Counter[str] = Counter()
        """Errors and losses: cause -> count. Logged as `bridge.counters`."""
        self._logged_counters: Counter[str] = Counter()
        self.connections: set[ClientConnection] = set()
        self.barrier = SubscriptionBarrier()
        self.local = LocalClients(config)
        """Members and subscribers among the clients of this bridge."""
        self.flush_queue = FlushQueue()
        self._loop = asyncio.get_running_loop()
        self._received: list[ClientConnection] = []
        """Connections that received data in this turn of the loop and have not processed it."""
        self._waiting: dict[ClientConnection, None] = {}
        self._admitted: set[ClientConnection] = set()
        self._stopping = False
        self.addresses: list[tuple[str, int]] = []
        """Addresses that it listens on."""
        self._servers: list[asyncio.Server] = []
        self._quiet = Quiet()
        self._waiter: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Listen on all configured addresses.

        An address that this host lacks is skipped, such as ::1 without IPv6, if another one can be
        used.

        Raises:
            ConfigError: an address is not loopback and `allow_remote` is not set, or no address can be used.
        """
        loop = asyncio.get_running_loop()
        absent: list[str] = []
        try:
            for host, port in self.config.listen:
                self._check(host)
                try:
                    sock = _bound(host, port)
                except OSError as err:
                    if err.errno not in _ABSENT:
                        raise iris.ConfigError(
                            f"listen: cannot listen on {_shown(host, port)}: {err.strerror or err}; "
                            "choose another address with --listen"
                        ) from err
                    absent.append(_shown(host, port))
                    continue
                server = await loop.create_server(
                    lambda: ClientConnection(self), sock=sock, backlog=BACKLOG
                )
                self._servers.append(server)
                self.addresses += [sock.getsockname()[:2] for sock in server.sockets]
            if not self._servers:
                raise iris.ConfigError(
                    f"listen: {' and '.join(absent)} cannot be used: this host does not have that address; "
                    "choose another with --listen"
                )
        except BaseException:
            self._close()
            raise
        fields = {"listen": [_shown(*address) for address in self.addresses], "absent": absent}
        log.info("bridge.started", extra={"fields": fields})
        why = "the protocol has no authentication, and whoever connects acts with the bridge's keys"
        log.warning("bridge.no_authentication", extra={"fields": {**fields, "why": why}})

    async def stop(self) -> None:
        """Accept no more clients, finish what was accepted within a time limit, and disconnect all clients."""
        self._stopping = True
        self._close()
        for connection in list(self.connections):
            connection.stop()
        bound_s = 3 * self.config.drain_s + LINGER_S
        try:
            async with asyncio.timeout(bound_s):
                await self._all_disconnected()
        except TimeoutError:
            log.warning("bridge.stuck", extra={"fields": {"clients": len(self.connections)}})
            tasks = [c.task for c in self.connections if c.task is not None]
            for connection in list(self.connections):
                connection.give_up()
            if tasks:
                await asyncio.wait(tasks, timeout=self.config.drain_s)
        self.log_counters()
        log.info("bridge.stopped")

    async def _all_disconnected(self) -> None:
        while self.connections:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []

    def _check(self, host: str) -> None:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise iris.ConfigError(
                f"listen: {host!r} is not a numeric address; "
                "to accept clients of this host only, write 127.0.0.1:PORT or [::1]:PORT"
            ) from None
        if not address.is_loopback and not self.config.allow_remote:
            raise iris.ConfigError(
                f"listen: {host} is not a loopback address, and this protocol has no authentication; "
                "add --allow-remote if every host that can connect is trusted"
            )

    # -- what its clients call -------------------------------------------------------------------------------

    def connected(self, connection: ClientConnection) -> None:
        """Add a connection that was accepted."""
        self.connections.add(connection)
        self._waiting[connection] = None
        if self._stopping:  # accepted in the turn in which the listeners were closed
            connection.stop()
        if len(self._waiting) > min(MAX_WAITING, self._waiting_fit):
            self.counters["handshakes over the bound"] += 1
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.give_up()

    def admit(self, connection: ClientConnection) -> bool:
        """Admit a client that sent INIT; return False if there are `max_clients` already."""
        if len(self._admitted) >= self.max_clients:
            return False
        self._waiting.pop(connection, None)
        self._admitted.add(connection)
        return True

    def received(self, connection: ClientConnection) -> None:
        """Process what a connection received once all sockets of this turn are read, subscriptions first."""
        if not self._received:
            self._loop.call_soon(self._process_received)
        self._received.append(connection)

    def _process_received(self) -> None:
        received, self._received = self._received, []
        if len(received) > 1:
            for connection in received:
                self._process(connection, subscribing=True)
        for connection in received:
            self._process(connection)
        self.flush_queue.flush()  # before frames for the relay are sealed, which takes longer

    def _process(self, connection: ClientConnection, *, subscribing: bool = False) -> None:
        """Process one connection. An internal error closes this connection alone."""
        try:
            connection.process(subscribing=subscribing)
        except Exception:
            self.counters["faults of the bridge"] += 1
            log.exception("bridge.fault", extra={"fields": {"peer": connection.peer}})
            connection.give_up()

    def disconnected(self, connection: ClientConnection) -> None:
        """Remove a connection that is closed and has no task left."""
        self.connections.discard(connection)
        self._waiting.pop(connection, None)
        self._admitted.discard(connection)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lost(self, lost: iris.Loss) -> None:
        """Count messages that did not reach a client or the relay. The protocol cannot report them."""
        if lost.count is not None:
            self.counters[f"lost on the way: {lost.cause}"] += lost.count

    def gap(self, gap: iris.Loss) -> None:
        """Count a gap of unknown size. If the size is known, `lost` counts it."""
        if gap.count is None:
            self.counters[f"gaps of unknown length: {gap.cause}"] += 1

    async def reload_keys(self, keyring: iris.Keyring) -> int:
        """Have every client's session use a changed keyring; return how many could not.

        Each of these is logged and keeps the old keys.
        """
        moves = [connection.reload_keys(keyring) for connection in self.connections]
        return (await asyncio.gather(*moves)).count(False)

    def log_counters(self) -> None:
        """Log the counters if they have changed since they were last logged."""
        if self.counters != self._logged_counters:
            self._logged_counters = self.counters.copy()
            log.info("bridge.counters", extra={"fields": {"counters": dict(self.counters)}})

    def warn(self, event: str, peer: str, reason: str) -> None:
        """Log a warning about a client, at a limited rate for each host."""
        fields = {"peer": peer, "reason": reason}
        self._quiet.warning(log, event, peer.rpartition(":")[0], time.monotonic(), fields)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _KEEP_ALIVE:  # accepted sockets inherit them
            sock.setsockopt(level, option, value)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of "127.0.0.1:55555" or "[::1]:55555"; raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise iris.ConfigError(
            f"listen: {text!r} is not an address; write ADDRESS:PORT or [ADDRESS]:PORT"
        )
    return host, int(port)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
