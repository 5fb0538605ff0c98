"""Links to other relays: TCP, TLS 1.3, both HELLOs, one link per peer, and the port that long frames share with short ones.

    accept or dial ── TLS ── HELLO both ways ── router.link_up ── frames ── router.link_down

A connection is a stranger's until its certificate and HELLO hold: it may make us keep 64 KiB and do one handshake, within
`HELLO_S`, and there are at most `MAX_HALF_OPEN` of them. What it did wrong is counted by reason and said in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import msgspec

from iris.crypto.keys import NetworkKey
from iris.errors import ConfigError, PeerProtocolError
from iris.wire import frames
from iris.wire.codec import (
    ALIAS,
    ALIAS_AT,
    FLAGS_AT,
    FRAME_OVERHEAD,
    KIND_AT,
    MAX_REPORT_BYTES,
    FrameReader,
    decode_control,
    encode_control,
)
from iris.wire.frames import FLAG_MORE, MAX_ADDRESSES, PROTOCOL_VERSION, TUNNEL_KINDS
from relay.config import RelayConfig
from relay.core.link import Link
from relay.dialling import DEFAULT_PORT, LINKED, OURSELVES, UP, Dialler, Outcome, Seen, Target
from relay.fragments import PIECE_BYTES, WHOLE_BYTES, Assembly, Lanes
from relay.logs import Quiet
from relay.ports import CONTROL_LIMIT_BYTES, ConnectionPort, Driver, Secured
from relay.tls import LINK_ALPN, Credentials, check_alpn, link_server_context, peer_relay_id

log = logging.getLogger(__name__)

HELLO_S: Final = 5.0
"""TLS and HELLO together take no longer."""
CONNECT_S: Final = 2.0
FINISH_S: Final = 2.0
"""What a link that ends has queued is written within this, or not at all."""
MAX_HALF_OPEN: Final = 128
FIRST_LIMIT_BYTES: Final = 64 << 10
HIGH_WATER_BYTES: Final = 256 << 10
UNSENT_BYTES: Final = 128 << 10
"""Kept back by the kernel on a link, so that what waits waits here, where short frames overtake long ones."""
BULK_TURN_BYTES: Final = 2 * PIECE_BYTES
"""Pieces of long frames that a link is given per turn of the loop."""
ACCEPTS: Final = 4
ACCEPT_PAUSE_S: Final = 0.002
ACCEPT_RETRY_S: Final = 0.2
BACKLOG: Final = 512
_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_SUCH_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)

WRONG_NETWORK: Final = "wrong network"
_TLS_REASONS: Final = {
    "CALLBACK_FAILED": WRONG_NETWORK,  # no network of that name here
    "TLSV1_UNRECOGNIZED_NAME": WRONG_NETWORK,
    "CERTIFICATE_VERIFY_FAILED": "foreign certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "refused our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused our certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refused our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused our certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "refused our certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "refused our certificate",
    "UNSUPPORTED_PROTOCOL": "TLS version",
    "NO_PROTOCOLS_AVAILABLE": "TLS version",
    "TLSV1_ALERT_PROTOCOL_VERSION": "TLS version",
    "HTTP_REQUEST": "not TLS",
    "HTTPS_PROXY_REQUEST": "not TLS",
    "WRONG_VERSION_NUMBER": "not TLS",
    "UNKNOWN_PROTOCOL": "not TLS",
    "BAD_RECORD_TYPE": "not TLS",
    "RECORD_LAYER_FAILURE": "not TLS",
    "PACKET_LENGTH_TOO_LONG": "not TLS",
}
"""What OpenSSL calls it -> what we count it as."""


class Refused(PeerProtocolError):
    """A connection does not become a link; `reason` is what it is counted as."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class LinkHub:
    """All links of a relay: listeners, strangers, dials, and who wins when there are two."""

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        self.driver = driver
        self.router = driver.router
        self.config = config
        self.ports: set[LinkPort] = set()
        self.quiet = Quiet()
        self.refusals: dict[str, int] = {}
        self.replaced = 0
        self.protocol_errors = 0
        self.addresses: list[tuple[str, int]] = []
        """Where links are accepted."""
        self.credentials: list[Credentials] = []
        """Of the networks served; changed in place when keys rotate."""
        self._context: ssl.SSLContext
        self._dialler = Dialler(self.router.relay_id, self._dial, self.linked)
        self._half_open: dict[LinkPort, float] = {}
        """Accepted and not yet up, the oldest first -> when its time is up."""
        self._listeners: list[socket.socket] = []
        self._accepting: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stopping = False
        self.reload(config.network_keys)
        self._context = link_server_context(self.credentials)
        self.router.mesh.introduced = self.introduced

    # -- listening -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Bind and accept. Raises ConfigError; nothing is left behind then."""
        self._loop = asyncio.get_running_loop()
        self._listeners = bind(self.config)
        self.addresses = [listener.getsockname()[:2] for listener in self._listeners]
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)
        shown = [show(*address) for address in self.addresses]
        log.info("links.listening", extra={"fields": {"addresses": shown}})

    @property
    def port(self) -> int:
        """The TCP port that links are accepted on; 0 before `listen`."""
        return self.addresses[0][1] if self.addresses else 0

    def stop_listening(self) -> None:
        """Accept no more. Idempotent."""
        for pause in self._pauses.values():
            pause.cancel()
        for listener in self._listeners:
            if listener not in self._pauses:
                self._loop.remove_reader(listener)
            listener.close()
        self._pauses.clear()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        """Accept a few, then let the others have their turn: strangers must not slow members down."""
        pause_s = ACCEPT_PAUSE_S
        for _ in range(ACCEPTS):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self.quiet.warning(
                    log, "links.no_descriptors", "", time.monotonic(), {"error": str(err)}
                )
                pause_s = ACCEPT_RETRY_S
                break
            connection.setblocking(False)
            if len(self._half_open) + len(self._accepting) >= MAX_HALF_OPEN and self._half_open:
                next(iter(self._half_open)).refuse(Refused("too many half-open"))
            task = self._loop.create_task(self._attach(connection, address), name="iris-accept")
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
        self._loop.remove_reader(listener)
        self._pauses[listener] = self._loop.call_later(pause_s, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        del self._pauses[listener]
        self._loop.add_reader(listener, self._accept, listener)

    async def _attach(self, connection: socket.socket, address: Any) -> None:
        port = LinkPort(self, show(*address[:2]), self._context)
        try:
            prepare(connection)
            await self._loop.connect_accepted_socket(lambda: port, connection)
        except OSError as err:
            connection.close()
            self.quiet.warning(log, "link.not_attached", "", time.monotonic(), {"error": str(err)})

    # -- strangers -------------------------------------------------------------------------------------------

    def half_open(self, port: LinkPort) -> None:
        """An accepted connection is attached: its time runs."""
        self._half_open[port] = self._loop.time() + HELLO_S
        if self._timer is None:
            self._timer = self._loop.call_later(HELLO_S, self._sweep)

    def known(self, port: LinkPort) -> None:
        """A connection is no stranger any more, or gone."""
        self._half_open.pop(port, None)

    def _sweep(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for port, until_s in list(self._half_open.items()):
            if until_s > now_s:
                self._timer = self._loop.call_at(until_s, self._sweep)
                return
            port.refuse(Refused("timeout", f"no link within {HELLO_S:g} s"))

    def refused(self, address: str, reason: str, detail: str) -> None:
        """Count and log a connection that does not become a link."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        fields = {"address": address, "reason": reason}
        if detail != reason:
            fields["detail"] = detail
        host = address.rpartition(":")[0]
        self.quiet.warning(log, "link.refused", (reason, host), time.monotonic(), fields)

    # -- one link per peer -----------------------------------------------------------------------------------

    def linked(self, relay_id: bytes) -> bool:
        """Whether there is a link to this relay now."""
        return self._port_of(relay_id) is not None

    def _port_of(self, relay_id: bytes) -> LinkPort | None:
        link = self.router.links.get(relay_id)
        if link is None or not isinstance(link.port, LinkPort) or link.port.ended:
            return None
        return link.port

    def greeted(self, port: LinkPort, hello: frames.LinkHello) -> Link:
        """Both HELLOs are there and hold: return the link, after taking down an older one. Raises Refused: the older stays.

        Of links dialled by the same side the newer wins, of both sides' dials that of the lower relay id.
        """
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
            log.info("link.replaced", extra={"fields": fields})
            older.abort("replaced")
        before = self.router.links.get(hello.relay_id)
        if before is not None:
            self.router.link_down(before)
        link = self.router.link_up(port, hello)
        self._dialler.up(hello.relay_id)
        told = {
            "peer": hello.relay_id.hex(),
            "label": link.label,
            "address": port.address,
            "dialled": port.dialled,
        }
        log.info("link.up", extra={"fields": told})
        return link

    def link_lost(self, port: LinkPort, relay_id: bytes, lived_s: float) -> None:
        """A link that was up ended."""
        fields = {"peer": relay_id.hex(), "address": port.address, "reason": port.reason}
        log.info("link.down", extra={"fields": fields})
        if not self._stopping and not self.linked(relay_id):
            self._dialler.lost(relay_id, lived_s, port.dialled)

    # -- dialling --------------------------------------------------------------------------------------------

    def sighted(self, seen: Seen) -> None:
        """Discovery saw a relay, or saw it go."""
        if seen.networks and not any(c.fingerprint in seen.networks for c in self.credentials):
            return  # another network's
        self._dialler.sighted(seen)

    def introduced(self, relay_id: bytes, addresses: Sequence[str]) -> None:
        """A peer told of another relay. Only numeric addresses count: a peer does not make us resolve names."""
        self._dialler.introduced(relay_id, list(parse_addresses(addresses[:MAX_ADDRESSES])))

    async def _dial(self, target: Target) -> Outcome:
        outcome = Outcome("none of our networks")
        # The network that it was linked under last comes first.
        known = sorted(self.credentials, key=lambda c: c.fingerprint != target.network)
        for address in target.addresses:
            for credentials in known:
                if target.networks and credentials.fingerprint not in target.networks:
                    continue
                outcome = await self._try(address, credentials)
                if outcome.what == UP:
                    target.network = credentials.fingerprint
                if outcome.what != WRONG_NETWORK:
                    break
            if outcome.what in (UP, LINKED, OURSELVES):
                break
        return outcome

    async def _try(self, address: tuple[str, int], credentials: Credentials) -> Outcome:
        port = None
        try:
            family, _, _, _, place = socket.getaddrinfo(
                *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as err:
            return Outcome(f"{show(*address)}: {err.strerror}")
        try:
            prepare(connection)
            dial_us = time.monotonic_ns() // 1000
            async with asyncio.timeout(CONNECT_S):
                await connect(self._loop, connection, place)
            port = LinkPort(
                self, show(*address), credentials.dialling, credentials=credentials, dial_us=dial_us
            )
            async with asyncio.timeout(HELLO_S):
                made = port
                await self._loop.create_connection(lambda: made, sock=connection)
                return await port.outcome
        except TimeoutError:
            if port is not None:
                port.refuse(Refused("timeout", f"no link within {HELLO_S:g} s"))
            return Outcome(f"{show(*address)}: no answer")
        except OSError as err:
            return Outcome(f"{show(*address)}: {err.strerror or err}")
        finally:
            if port is None or not port.made:
                connection.close()
            elif port.link is None and not port.ended:
                port.abort("the dial was given up")

    # -- keys ------------------------------------------------------------------------------------------------

    def reload(self, keys: Sequence[NetworkKey]) -> None:
        """Serve exactly these networks from now on: links made under another are closed, and their relays dialled again."""
        before = {credentials.fingerprint: credentials for credentials in self.credentials}
        # In place: the accepting context looks at this list in each handshake.
        self.credentials[:] = [
            before.get(key.fingerprint) or Credentials(key, self.router.relay_id) for key in keys
        ]
        after = {credentials.fingerprint for credentials in self.credentials}
        if before:
            log.info(
                "links.keys", extra={"fields": {"networks": [name.hex()[:8] for name in after]}}
            )
        for port in list(self.ports):
            if port.fingerprint and port.fingerprint not in after:
                # No goodbye: the other relay stays, and what it knows of us holds until it is linked again.
                port.leave("its network key was removed", goodbye=False)

    def fingerprint_of(self, context: ssl.SSLContext) -> bytes:
        """Return the network that the handshake of an accepted connection picked."""
        for credentials in self.credentials:
            if credentials.accepting is context:
                return credentials.fingerprint
        raise Refused(WRONG_NETWORK)

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """The networks served."""
        return tuple(credentials.fingerprint for credentials in self.credentials)

    # -- the end, and reports --------------------------------------------------------------------------------

    async def stop_dialling(self) -> None:
        """Dial no more. Idempotent."""
        self._stopping = True
        await self._dialler.stop()

    async def close(self, bound_s: float = FINISH_S) -> None:
        """Say goodbye on every link, write what is queued within `bound_s`, and end. Idempotent; cancelled, it ends at once."""
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
            for task in list(self._accepting):
                task.cancel()
            for port in list(self.ports):
                port.abort("the relay stopped")
        await asyncio.sleep(0)

    def status(self) -> dict[str, object]:
        """Return links, refusals and dials, ready for JSON."""
        ports = {port.link.relay_id.hex(): port for port in self.ports if port.link is not None}
        links = []
        for known in cast(
            list[dict[str, object]], self.router.mesh.status(self.router.now_us)["links"]
        ):
            port = ports.get(str(known["peer"]))
            links.append(known | port.status() if port is not None else known)
        return {
            "links": links,
            "links_listening": [show(*address) for address in self.addresses],
            "links_refused": dict(self.refusals),
            "links_half_open": len(self._half_open),
            "links_replaced": self.replaced,
            "link_protocol_errors": self.protocol_errors,
            "dialling": self._dialler.status(),
        }


class LinkPort(ConnectionPort):
    """One connection to a relay, or to a stranger. Implements `relay.core.ports.Port` once it is a link."""

    high_water_bytes = HIGH_WATER_BYTES

    def __init__(
        self,
        hub: LinkHub,
        address: str,
        context: ssl.SSLContext,
        *,
        credentials: Credentials | None = None,
        dial_us: int = 0,
    ) -> None:
        """Accept under `context`, or dial with `credentials`, begun at `dial_us`."""
        super().__init__(hub.driver, hub.config)
        self.address = address
        self.dialled = credentials is not None
        self.dial_us = dial_us
        """When the dialler dialled, by its clock."""
        self.fingerprint = credentials.fingerprint if credentials is not None else b""
        self.link: Link | None = None
        self.reason = ""
        """Why it ended."""
        self.made = False
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """Of a dial."""
        self.in_frames = self.out_frames = self.in_bytes = 0
        self._hub = hub
        self._context = context
        self.credentials = credentials
        self._secured: Secured
        self._shaking = True
        self._relay_id = b""
        self._reader = FrameReader(self._greeting, hub.driver.buffer, FIRST_LIMIT_BYTES)
        self._entry: Callable[[memoryview, int, int], None]
        self._parts = Assembly(hub.router.message_limit + FRAME_OVERHEAD)
        self._longest_bytes = self._whole_bytes = WHOLE_BYTES
        """Longest frame that the other relay takes, and that it gets in one piece."""
        self._lanes = Lanes()
        self._pumped = False
        self._refusing = False
        self._up_s = 0.0
        self._finish_timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Nothing more comes of it."""
        return self._closed or self._finishing

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.made = True
        if self._closed:  # given up meanwhile
            self._transport.abort()
            return
        self._hub.ports.add(self)
        name = self.credentials.server_name if self.credentials is not None else None
        self._secured = Secured(self._context, self._transport, name)
        self._writer = self._secured
        if self.dialled:
            self._secured.handshake()
        else:
            self._hub.half_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._driver.buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed or self._finishing:
            return
        self._router.now_us = time.monotonic_ns() // 1000
        self.in_bytes += nbytes
        try:
            self._secured.received(self._driver.buffer.view[:nbytes])
            if not self._shaking or self._shake():
                self._read()
        except PeerProtocolError as err:
            self._driver.settle()
            self._protocol_error(err)
        except ssl.SSLError as err:
            reason = _TLS_REASONS.get(err.reason or "", "TLS failure")
            self.refuse(Refused(reason, err.reason or str(err)))
        except Exception:  # a fault of ours costs this link, and nobody else theirs
            log.exception("link.fault", extra={"fields": {"address": self.address}})
            self.abort("internal error")
        finally:
            self._driver.settle()

    def eof_received(self) -> bool:
        self.reason = self.reason or "the other side closed the connection"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reason = self.reason or (f"the connection broke: {exc}" if exc else "closed")
        self._hub.ports.discard(self)
        if self._finish_timer is not None:
            self._finish_timer.cancel()
        self._driver.turn()
        if self.link is None and not (self.ended or self.dialled):
            self._hub.refused(self.address, "closed before HELLO", self.reason)
        self._closed = True
        self._gone()
        self._driver.settle()
        self._held += self._lanes.messages
        self._lanes.clear()
        self._lost("link lost")

    def resume_writing(self) -> None:
        self._paused = False
        self._write_queue()
        if self._lanes and not self._closed:
            self._pump()
        if not self._closed and self._waiting_bytes() <= self._limit_bytes // 2:
            self._has_room_again()
            self._driver.settle()

    # -- becoming a link -------------------------------------------------------------------------------------

    def _shake(self) -> bool:
        """Go on with TLS; once it is done, greet. Raises Refused."""
        if self.in_bytes > FIRST_LIMIT_BYTES:
            raise Refused("too long a handshake")
        if not self._secured.handshake():
            return False
        self._shaking = False
        tls = self._secured.tls
        try:
            check_alpn(tls, LINK_ALPN)
        except PeerProtocolError as err:
            raise Refused("protocol version", str(err)) from err
        try:
            self._relay_id = peer_relay_id(tls)
        except PeerProtocolError as err:
            raise Refused("not a relay", str(err)) from err
        if not self.dialled:
            self.fingerprint = self._hub.fingerprint_of(tls.context)
        if self._relay_id == self._router.relay_id:
            raise Refused(OURSELVES)
        if self.dialled and self._hub.linked(self._relay_id):
            raise Refused(LINKED)
        self._put(encode_control(self._router.hello(self.dial_us)), 0, None)
        return True

    def _greeting(self, buf: memoryview, start: int, end: int) -> None:
        """The first frame: HELLO, or why there is none."""
        body = decode_control(buf, start, end)
        if isinstance(body, frames.Error):
            raise Refused("refused by the other relay", _printable(body.detail))
        if isinstance(body, frames.Bye):
            raise Refused(LINKED, _printable(body.reason))
        if not isinstance(body, frames.LinkHello):
            raise PeerProtocolError(f"{type(body).__name__} before HELLO")
        if body.version != PROTOCOL_VERSION:
            raise Refused(
                "protocol version",
                f"you speak version {body.version}, this relay speaks {PROTOCOL_VERSION}",
            )
        if body.relay_id != self._relay_id:
            raise Refused("another relay's id", "the certificate is of another relay")
        if bool(body.dial_us) == self.dialled:
            raise PeerProtocolError("both sides dialled, or neither")
        if not self.dialled:
            self.dial_us = body.dial_us
        body = self._with_observed(body)
        self.link = link = self._hub.greeted(self, body)
        self._hub.known(self)
        self._up_s = time.monotonic()
        self._entry = self._router.entry(link)
        self._longest_bytes = 4 + FRAME_OVERHEAD + body.message_limit
        self._whole_bytes = min(WHOLE_BYTES, self._longest_bytes)
        self._reader.limit = MAX_REPORT_BYTES
        self._reader.on_frame = self._frame
        self._settle_dial(Outcome(UP, self._relay_id))

    def _with_observed(self, hello: frames.LinkHello) -> frames.LinkHello:
        """Add the address that we see to those that a relay gives: it is the one that is known to work."""
        if not hello.addresses:
            return hello
        port = hello.addresses[0].rpartition(":")[2]
        seen = self.address if self.dialled else f"{self.address.rpartition(':')[0]}:{port}"
        if seen in hello.addresses or "%" in seen:
            return hello
        others = hello.addresses[: MAX_ADDRESSES - 1]
        local = self.address.startswith(("127.", "[::1]"))
        addresses = [*others, seen] if local else [seen, *others]
        return msgspec.structs.replace(hello, addresses=addresses)

    def refuse(self, why: Refused) -> None:
        """End a connection that is no link, and count why. What is only one too many is neither counted nor a warning."""
        if self._closed or self._finishing:
            return
        if self.link is not None:
            self.abort(str(why))
            return
        self.reason = why.reason
        if why.reason in (LINKED, OURSELVES):
            fields = {"address": self.address, "reason": why.reason, "peer": self._relay_id.hex()}
            log.info("link.dropped", extra={"fields": fields})
        else:
            self._hub.refused(self.address, why.reason, str(why))
        self._settle_dial(Outcome(why.reason, self._relay_id or None))
        self._hub.known(self)
        if not self._shaking:
            last = frames.Bye(why.reason) if why.reason == LINKED else frames.Error(str(why)[:1024])
            self._put(encode_control(last), 0, None)
        self.finish()
        self._driver.settle()

    # -- frames in -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        reader = self._reader
        while True:
            buffer = reader.get_buffer()
            got = self._secured.read_into(buffer)
            if got > 0:
                reader.received(got)
            if got < len(buffer) or self._closed or self._finishing:
                break
            self._driver.settle()  # what was forwarded lies in the buffer that is filled next
        if got < 0 and not self._closed:
            self.abort("the other side closed the connection")

    def _frame(self, buf: memoryview, start: int, end: int) -> None:
        self.in_frames += 1
        if end - start > WHOLE_BYTES or self._parts or buf[start + FLAGS_AT] & FLAG_MORE:
            whole = self._parts.add(buf, start, end)
            if whole is None:
                return
            if whole is not buf:
                buf, start, end = whole, 0, len(whole)
        self._entry(buf, start, end)

    def _ignore(self, buf: memoryview, start: int, end: int) -> None:
        """Nothing counts any more."""

    # -- Port ------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        if size > self._longest_bytes:
            return False
        waiting = self._waiting_bytes()
        return not waiting or waiting + size <= self._limit_bytes

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        self.out_frames += 1
        if end - start > self._whole_bytes or self._lanes:
            alias = self._lane(buf, start, end)
            if alias >= 0:
                return self._put_long(alias, bytes(buf[start:end]), count)
        if super().forward(buf, start, end, count):
            return True
        self._refusing = True
        return False

    def send(self, frame: bytes, count: int) -> bool:
        self.out_frames += 1
        if len(frame) > self._whole_bytes or self._lanes:
            alias = self._lane(frame, 0, len(frame))
            if alias >= 0:
                return self._put_long(alias, frame, count)
        if super().send(frame, count):
            return True
        self._refusing = True
        return False

    def control(self, frame: bytes) -> None:
        if self._closed:
            return
        self.out_frames += 1
        if not self._lanes.control(frame):
            super().control(frame)
        elif self._lanes.bytes > self._limit_bytes + CONTROL_LIMIT_BYTES:
            self.abort("it does not read what it is told")

    def finish(self) -> None:
        self.reason = self.reason or "the other relay said goodbye"
        self._reader.on_frame = self._ignore
        super().finish()
        if self._finish_timer is None:
            loop = asyncio.get_running_loop()
            self._finish_timer = loop.call_later(
                FINISH_S, self.abort, "it does not read what it was sent last"
            )

    def leave(self, reason: str, *, goodbye: bool = True) -> None:
        """Close once all is written, with a `goodbye` if this relay stops; what is no link yet closes at once."""
        if self._closed or self._finishing:
            return
        if self.link is None:
            self.abort(reason)
            return
        self.reason = reason
        if goodbye:
            self.control(encode_control(frames.Bye(reason)))
        self.finish()
        self._driver.turn()
        self._gone()

    def abort(self, reason: str) -> None:
        if not self._closed:
            self.reason = self.reason or reason
            self._closed = True
            self._reader.on_frame = self._ignore
            self._hub.known(self)
            self._settle_dial(Outcome(reason, self._relay_id or None))
            if self.made:
                self._transport.abort()

    @property
    def held_messages(self) -> int:
        return self._held + self._lanes.messages

    @property
    def unwritten_bytes(self) -> int:
        return self._lanes.bytes + super().unwritten_bytes

    def status(self) -> dict[str, object]:
        """Return what the link does, ready for JSON."""
        return {
            "address": self.address,
            "dialled": self.dialled,
            "network": self.fingerprint.hex()[:8],
            "since_s": round(time.monotonic() - self._up_s, 3),
            "queued_bytes": self.unwritten_bytes,
            "reassembling_bytes": self._parts.held_bytes,
            "in_frames": self.in_frames,
            "out_frames": self.out_frames,
            "in_bytes": self.in_bytes,
        }

    def _has_room_again(self) -> None:
        self._refusing = False
        if self.link is not None:
            self._router.writable(self.link)

    # -- long frames -----------------------------------------------------------------------------------------

    def _waiting_bytes(self) -> int:
        run_bytes = self._run_end - self._run_start if self._queue and self._run is not None else 0
        return self._queued_bytes + self._lanes.bytes - self._tunnel_bytes + run_bytes

    def _lane(self, buf: memoryview | bytes, start: int, end: int) -> int:
        """Return the alias of a frame that is long or stays behind a long one; -1: it goes as it comes."""
        if buf[start + KIND_AT] in TUNNEL_KINDS:
            return -1
        alias: int = ALIAS.unpack_from(buf, start + ALIAS_AT)[0]
        return alias if end - start > self._whole_bytes or alias in self._lanes else -1

    def _put_long(self, alias: int, frame: bytes, count: int) -> bool:
        if not self.has_room(len(frame)):
            self._refusing = True
            return False
        self._lanes.put(alias, frame, count)
        if not self._dirty:
            self._dirty = True
            self._driver.dirty.append(self)
        return True

    def flush(self) -> None:
        super().flush()
        if self._lanes and not self._pumped and not self._closed:
            self._pump()

    def _pump(self) -> None:
        """Write what a turn of the loop may take of long frames, after everything that may overtake them."""
        if self._paused or self._queue or self._pumped:
            return
        self._take_run()
        self._write_chunks()
        if self._paused:
            return
        self._write(self._lanes.take(BULK_TURN_BYTES))
        if self._lanes:
            self._pumped = True
            asyncio.get_running_loop().call_soon(self._pump_on)
        elif self._finishing and not self._closed:
            self._transport.close()
        if self._refusing and self._waiting_bytes() <= self._limit_bytes // 2:
            self._has_room_again()

    def _pump_on(self) -> None:
        self._pumped = False
        if not self._closed:
            self._pump()
            self._driver.settle()

    def _done(self) -> bool:
        return not self._queue and not self._lanes

    # -- faults ----------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        """It is a link no more: the router hears of it, and whoever dials."""
        self._hub.known(self)
        self._settle_dial(Outcome(self.reason, self._relay_id or None))
        link = self.link
        if link is not None:
            self.link = None
            self._router.link_down(link)
            self._hub.link_lost(self, link.relay_id, time.monotonic() - self._up_s)

    def _settle_dial(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _protocol_error(self, err: PeerProtocolError) -> None:
        """Tell the other side which rule it broke, and end the connection; nobody else notices."""
        if self.link is None:
            self.refuse(err if isinstance(err, Refused) else Refused("protocol error", str(err)))
            return
        self._hub.protocol_errors += 1
        fields = {"peer": self._relay_id.hex(), "address": self.address, "error": str(err)}
        self._hub.quiet.warning(
            log, "link.protocol_error", self._relay_id, time.monotonic(), fields
        )
        if not self._closed:
            self.reason = f"protocol error: {err}"
            self.control(encode_control(frames.Error(str(err)[:1024])))
            self.finish()
            self._gone()


# -- addresses -------------------------------------------------------------------------------------------------


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
                raise ConfigError(f"port: no links at {number}: {err}") from err
    raise ConfigError("port: no port is free at all addresses")


def _bind_all(addresses: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    wildcards = {"0.0.0.0", "::"} == set(addresses)
    with contextlib.ExitStack() as undo:
        for host in addresses:
            try:
                found = socket.getaddrinfo(
                    host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
                )
            except socket.gaierror as err:
                raise ConfigError(f"bind: {host!r} is not an IP address of this host") from err
            family, _, _, _, place = found[0]
            try:
                listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(place)
            except OSError as err:
                if wildcards and err.errno in _NO_SUCH_ADDRESS and host == "::":
                    continue  # a host without IPv6
                raise
            listener.setblocking(False)
            listener.listen(BACKLOG)
            port = listener.getsockname()[1]
            listeners.append(listener)
        undo.pop_all()
    return listeners


async def connect(loop: asyncio.AbstractEventLoop, connection: socket.socket, place: Any) -> None:
    """Connect a non-blocking socket; raises OSError.

    Not the event loop's own: uvloop's drops the scope of link-local IPv6 addresses.
    """
    error = connection.connect_ex(place)
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


def prepare(connection: socket.socket) -> None:
    """Set what a link's socket needs."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)


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


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
