"""The base of links and WAN connections: accepts and dials them, and keeps one of two connections to the same relay.

    accept or dial ── TLS ── HELLO both ways ── router notified: up ── frames ── router notified: down

A connection is a stranger's until its certificate and its HELLO are valid, and again when it is being closed. A
stranger can make this relay hold 64 KiB and do one handshake, within `HELLO_S`, and there are at most `MAX_HALF_OPEN`
of them, and no more than `strangers_that_fit`. Refused connections are counted by reason and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Final

from iris.accepting import HALF_OPEN, STRANGERS_PART, Accepted, Acceptor, Places, strangers_that_fit
from iris.dialling import connect
from iris.wire import link_frames
from relay.config import RelayConfig
from relay.core.neighbor import Neighbor
from relay.logs import Quiet
from relay.net.addresses import prepare, show
from relay.net.dialling import LINKED, Address, Dialler, Outcome, Target
from relay.net.linkport import FINISH_S, LinkPort, Refused
from relay.net.ports import Driver

log = logging.getLogger(__name__)

HELLO_S: Final = 5.0
"""Time limit for TLS and HELLO together."""
MAX_HALF_OPEN: Final = 128
ACCEPTS: Final = 1
ACCEPT_PAUSE_S: Final = 0.001


class Hub:
    """All connections of one kind to other relays: listeners, half-open connections and dials."""

    kind: ClassVar[str]
    """The first part of this hub's log events: "link" or "gateway"."""
    connect_s: ClassVar[float]
    """Time limit for connecting over TCP."""
    far: ClassVar[bool]
    """Whether round trips are long; see `addresses.prepare`."""

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        self.driver = driver
        self.router = driver.router
        self.config = config
        self.ports: set[LinkPort] = set()
        self.quiet = Quiet()
        self.refusals: dict[str, int] = {}
        self.changed: Callable[[], object] = bool
        """Called when a connection came up or went down."""
        self.replaced = 0
        self.protocol_errors = 0
        self.addresses: list[tuple[str, int]] = []
        """(host, port) pairs at which connections are accepted."""
        self._context: ssl.SSLContext
        """TLS context of accepted connections."""
        self._dialler = Dialler(self.router.relay_id, self._dial, self.linked, kind=self.kind)
        self._half_open: dict[LinkPort, float] = {}
        """Accepted connections that are not up yet, the oldest first: port -> when its time is over (loop time)."""
        self._listeners: list[socket.socket] = []
        fitting = strangers_that_fit(MAX_HALF_OPEN, STRANGERS_PART)
        self._places = Places(
            self._over_limit, reason=HALF_OPEN, loose=lambda: min(fitting, MAX_HALF_OPEN), choose=self._to_drop
        )  # fmt: skip
        self._acceptor = Acceptor(
            self._accepted, self._starved, per_turn=ACCEPTS, pause_s=ACCEPT_PAUSE_S, places=self._places
        )  # fmt: skip
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stopping = False

    # -- differs between kinds --------------------------------------------------------------------------------

    def _accepting_port(self, address: str) -> LinkPort:
        """Return the port for a connection that is being accepted."""
        raise NotImplementedError

    async def _dial(self, target: Target, address: Address) -> Outcome:
        """Dial one address of a target."""
        raise NotImplementedError

    def _neighbor(self, relay_id: bytes) -> Neighbor | None:
        """Return the router's object of this relay if it is connected."""
        raise NotImplementedError

    def _up(self, port: LinkPort, hello: link_frames.LinkHello) -> Neighbor:
        """Notify the router of a connection that is up, to a relay that has no other. Raises Refused."""
        raise NotImplementedError

    def _down(self, neighbor: Neighbor) -> None:
        """Notify the router that a connection is down. Idempotent."""
        raise NotImplementedError

    def _check_hello(self, port: LinkPort, hello: link_frames.LinkHello) -> None:
        """Raise Refused if a relay with this valid HELLO must not be connected."""

    def _to_drop(self, strangers: Collection[Accepted]) -> Accepted:
        """Return the stranger to drop for the next one: the first, which is the oldest."""
        return next(iter(strangers))

    # -- listening -------------------------------------------------------------------------------------------

    def _listen(self, listeners: list[socket.socket]) -> None:
        """Accept at `listeners`, which this hub closes."""
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self.addresses = [listener.getsockname()[:2] for listener in listeners]
        self._acceptor.listen(listeners)
        shown = [show(*address) for address in self.addresses]
        if shown:
            log.info("%ss.listening", self.kind, extra={"fields": {"addresses": shown}})

    def stop_listening(self) -> None:
        """Stop accepting and close the listeners. Idempotent."""
        self._acceptor.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _accepted(self, connection: Accepted, address: Any) -> None:
        try:
            prepare(connection, far=self.far)
        except OSError as err:
            connection.close()
            self._not_attached(err)
            return
        port = self._accepting_port(show(*address[:2]))
        port.accepted = connection
        connection.cut = lambda: port.abort(HALF_OPEN)
        self._acceptor.attach(connection, lambda: port, self._not_attached)

    def _over_limit(self, connection: Accepted, reason: str) -> None:
        self.refused(show(*connection.address[:2]), reason, reason)

    def _starved(self, err: OSError) -> None:
        event = f"{self.kind}s.no_descriptors"
        self.quiet.warning(log, event, "", time.monotonic(), {"error": str(err)})

    def _not_attached(self, err: OSError) -> None:
        event = f"{self.kind}.not_attached"
        self.quiet.warning(log, event, "", time.monotonic(), {"error": str(err)})

    # -- strangers -------------------------------------------------------------------------------------------

    def half_open(self, port: LinkPort) -> None:
        """Start the time limit of an accepted connection."""
        self._half_open[port] = self._loop.time() + HELLO_S
        if self._timer is None:
            self._timer = self._loop.call_later(HELLO_S, self._sweep)

    def no_longer_half_open(self, port: LinkPort) -> None:
        """Note that a connection is up, or ends and is a stranger's until it is closed."""
        self._half_open.pop(port, None)
        if port.accepted is not None and port.ended:
            self._places.release(port.accepted)

    def _sweep(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for port, until_s in list(self._half_open.items()):
            if until_s > now_s:
                self._timer = self._loop.call_at(until_s, self._sweep)
                return
            port.refuse(Refused("timeout", f"TLS and HELLO took over {HELLO_S:g} s"))

    def refused(self, address: str, reason: str, detail: str) -> None:
        """Count and log a connection that was refused."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        fields = {"address": address, "reason": reason}
        if detail != reason:
            fields["detail"] = detail
        key = (reason, address.rpartition(":")[0])
        self.quiet.warning(log, f"{self.kind}.refused", key, time.monotonic(), fields)

    # -- one connection per peer -----------------------------------------------------------------------------

    def linked(self, relay_id: bytes) -> bool:
        """Return whether this relay is connected now."""
        return self._port_of(relay_id) is not None

    def _port_of(self, relay_id: bytes) -> LinkPort | None:
        neighbor = self._neighbor(relay_id)
        if neighbor is None or not isinstance(neighbor.port, LinkPort) or neighbor.port.ended:
            return None
        return neighbor.port

    def greeted(self, port: LinkPort, hello: link_frames.LinkHello) -> Neighbor:
        """Bring a connection up after both HELLOs, and return the router's object.

        Raises Refused if an older connection to the same relay stays. If the same side dialled both connections,
        the newer one stays. If each side dialled one, the one dialled by the relay with the lower id stays. The
        other is taken down.
        """
        self._check_hello(port, hello)
        older = self._port_of(hello.relay_id)
        own_id = self.router.relay_id
        if older is not None:
            if port.dialled == older.dialled:
                wins = port.dial_us > older.dial_us
            else:
                wins = port.dialled == (own_id < hello.relay_id)
            if not wins:
                raise Refused(LINKED)
            self.replaced += 1
            fields = {"peer": hello.relay_id.hex(), "old": older.address, "new": port.address}
            log.info("%s.replaced", self.kind, extra={"fields": fields})
            older.abort("replaced")
        before = self._neighbor(hello.relay_id)
        if before is not None:
            self._down(before)
        neighbor = self._up(port, hello)
        if port.accepted is not None:
            self._places.hold(port.accepted)
        neighbor.address = port.address
        self._dialler.up(hello.relay_id)
        shown = {"peer": hello.relay_id.hex(), "label": neighbor.label, **port.log_fields()}
        log.info("%s.up", self.kind, extra={"fields": shown})
        self.changed()
        return neighbor

    def lost(self, port: LinkPort, neighbor: Neighbor, relay_id: bytes, lived_s: float) -> None:
        """Handle the end of a connection that was up."""
        self._down(neighbor)
        fields = {"peer": relay_id.hex(), "address": port.address, "reason": port.reason}
        log.info("%s.down", self.kind, extra={"fields": fields})
        self.changed()
        if not self._stopping and not self.linked(relay_id):
            self._dialler.lost(relay_id, lived_s, port.dialled)

    # -- dialling --------------------------------------------------------------------------------------------

    async def _try(self, address: Address, make: Callable[[int], LinkPort]) -> Outcome:
        """Dial a numeric address. `make(dial_us)` returns the port for a connection begun at that time."""
        port = None
        try:
            family, _, _, _, sockaddr = socket.getaddrinfo(
                *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, ValueError) as err:  # ValueError: the host cannot be encoded as a name
            return Outcome(f"{show(*address)}: {getattr(err, 'strerror', None) or err}")
        try:
            prepare(connection, far=self.far)
            dial_us = time.monotonic_ns() // 1000
            async with asyncio.timeout(self.connect_s):
                await connect(connection, sockaddr)
            port = make(dial_us)
            async with asyncio.timeout(HELLO_S):
                made = port
                await self._loop.create_connection(lambda: made, sock=connection)
                port.begin()
                return await port.outcome
        except TimeoutError:
            if port is not None:
                port.refuse(Refused("timeout", f"TLS and HELLO took over {HELLO_S:g} s"))
            return Outcome(f"{show(*address)}: no answer")
        except OSError as err:
            return Outcome(f"{show(*address)}: {err.strerror or err}")
        finally:
            if port is None or not port.made:
                connection.close()
            elif port.link is None and not port.ended:
                port.abort("the dial was given up")

    # -- the end, and reports --------------------------------------------------------------------------------

    async def stop_dialling(self) -> None:
        """Stop dialling. Idempotent."""
        self._stopping = True
        await self._dialler.stop()

    async def close(self, bound_s: float = FINISH_S) -> None:
        """Send BYE on every connection, write what is queued within `bound_s`, and close.

        Idempotent; if cancelled, close at once.
        """
        self.stop_listening()
        self._stopping = True
        try:
            await self._dialler.stop()
            for port in list(self.ports):
                port.leave("the relay stopped")
            self.driver.settle()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    while self.ports:  # noqa: ASYNC110 - closes are the peers' to make
                        await asyncio.sleep(0.005)
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self.end()
        await self._acceptor.closed()
        await asyncio.sleep(0)

    def end(self) -> None:
        """Close every connection at once, those being accepted included. Idempotent."""
        self._acceptor.cancel()
        for port in list(self.ports):
            port.abort("the relay stopped")

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written and no call or tunnel over a connection is unfinished."""
        return not any(
            port.unwritten_bytes or port.waits or _busy(port.link) for port in self.ports
        )

    @property
    def up(self) -> Sequence[LinkPort]:
        """The connections that are up."""
        return [port for port in self.ports if port.link is not None]


def _busy(neighbor: Neighbor | None) -> bool:
    """Return whether calls or tunnels use a connection, local ones or those in transit."""
    return neighbor is not None and bool(neighbor.in_flight or neighbor.pending or neighbor.tunnels)
