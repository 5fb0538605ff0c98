"""The connection of a link: TLS, both HELLOs, and the port for frames."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

import msgspec

from iris.accepting import Accepted
from iris.errors import PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import (
    FLAGS_AT,
    FRAME_OVERHEAD,
    MAX_REPORT_BYTES,
    RECEIVE_BYTES,
    FrameReader,
    OnFrame,
    decode_control,
    encode_control,
    ignored,
)
from iris.wire.kinds import FLAG_MORE, PROTOCOL_VERSION
from iris.wire.link_frames import MAX_ADDRESSES
from iris.wire.names import printable
from relay.config import RelayConfig
from relay.core.neighbor import Neighbor
from relay.core.router import Router
from relay.logs import Quiet
from relay.net.dialling import LINKED, OURSELVES, UP, Outcome
from relay.net.fragments import WHOLE_BYTES, Assembly
from relay.net.longframes import LongFramePort
from relay.net.ports import Driver, Secured
from relay.net.tls import LINK_ALPN, TLS_REASONS, check_alpn, peer_relay_id
from relay.net.turns import TURN

log = logging.getLogger(__name__)

FINISH_S: Final = 2.0
"""Time limit for writing what a link that ends has queued; the rest is dropped."""
FIRST_LIMIT_BYTES: Final = 64 << 10
HIGH_WATER_BYTES: Final = 256 << 10
_LOOPBACK: Final = ("127.", "[::1]")


class Refused(PeerProtocolError):
    """A connection must not become a link; `reason` is the key under which it is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Dialling(Protocol):
    """The credentials of a dialled connection; see `relay.net.tls`."""

    @property
    def server_name(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...


class Owner(Protocol):
    """The hub of a port; see `relay.net.hub.Hub`."""

    driver: Driver
    config: RelayConfig
    router: Router
    ports: set[LinkPort]
    quiet: Quiet
    protocol_errors: int

    @property
    def kind(self) -> str: ...
    def half_open(self, port: LinkPort) -> None: ...
    def no_longer_half_open(self, port: LinkPort) -> None: ...
    def linked(self, relay_id: bytes) -> bool: ...
    def refused(self, address: str, reason: str, detail: str) -> None: ...
    def greeted(self, port: LinkPort, hello: link_frames.LinkHello) -> Neighbor: ...
    def lost(self, port: LinkPort, neighbor: Neighbor, relay_id: bytes, lived_s: float) -> None: ...


def _no_network(context: ssl.SSLContext) -> bytes:
    """Return no fingerprint: WAN connections do not belong to a network."""
    return b""


class LinkPort(LongFramePort):
    """One connection to a relay or a stranger. Implements `relay.core.ports.Port` once it is a link."""

    high_water_bytes = HIGH_WATER_BYTES
    alpn: ClassVar[str] = LINK_ALPN

    def __init__(
        self,
        hub: Owner,
        address: str,
        context: ssl.SSLContext,
        *,
        credentials: Dialling | None = None,
        dial_us: int = 0,
        network_of: Callable[[ssl.SSLContext], bytes] = _no_network,
    ) -> None:
        """Accept with `context`, or dial with `credentials`; the dial began at `dial_us`.

        `network_of` returns the fingerprint of the network that the handshake of an accepted connection selected, or
        raises Refused.
        """
        super().__init__(hub.driver, hub.config)
        self.address = address
        self.dialled = credentials is not None
        self.dial_us = dial_us
        """Time of the dial, by the dialling side's clock (us)."""
        self.fingerprint = credentials.fingerprint if credentials is not None else b""
        """Fingerprint of the key that signed the peer's certificate."""
        self.relay_id = b""
        """The peer's relay id, from that certificate."""
        self.link: Neighbor | None = None
        self.reason = ""
        """Why the connection ended; empty until then."""
        self.made = False
        self.accepted: Accepted | None = None
        """The connection if this side accepted it."""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """The result, if this side dialled."""
        self.in_frames = self.in_bytes = 0
        self._hub = hub
        self._network_of = network_of
        self._context = context
        self.credentials = credentials
        self._secured: Secured
        self._handshaking = True
        self._broken = False
        """Whether TLS has failed, so that nothing can be written any more."""
        self._reader = FrameReader(ignored, hub.driver.buffer, FIRST_LIMIT_BYTES)
        self._entry: OnFrame
        self._parts = Assembly(hub.router.message_limit + FRAME_OVERHEAD)
        self._up_s = 0.0
        self._finish_timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._closed or self._finishing

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.dialled:
            self.made = True
        if self._closed:  # aborted before it was made
            if self.made:
                self._transport.abort()
            return
        self._reader.on_frame, self._reader.may_go_on = self._greeting, self._may_go_on
        self._hub.ports.add(self)
        name = self.credentials.server_name if self.credentials is not None else None
        self._secured = Secured(self._context, self._transport, name)
        self._writer = self._secured
        if not self.dialled:
            self._hub.half_open(self)

    def begin(self) -> None:
        """Continue a dial once its transport owns the socket (uvloop would close it twice if it ended before)."""
        self.made = True
        if self._closed:
            self._transport.abort()
        else:
            self._secured.handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._driver.buffer.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed or self._finishing:
            return
        self._router.now_us = time.monotonic_ns() // 1000
        self.in_bytes += nbytes
        if self.link is not None and self.link.pulse is not None:
            # Part of a frame shows, too, that the peer is alive.
            self.link.pulse.last_us = self._router.now_us
        try:
            if nbytes:
                self._secured.received(self._driver.buffer.view[:nbytes])
            if nbytes == RECEIVE_BYTES:  # the event loop may read more in this turn
                self.turn.hold(self._router.now_us)
            if self.turn.paused and nbytes:
                return
            if not self._handshaking or self._continue_handshake():
                self._read()
        except PeerProtocolError as err:
            self._driver.settle()
            self._protocol_error(err)
        except ssl.SSLError as err:
            self._broken = True
            self.refuse(Refused(self._tls_reason(err.reason or ""), err.reason or str(err)))
        except Exception:  # an internal error must cost this link only
            fields = {"address": self.address}
            log.exception("%s.fault", self._hub.kind, extra={"fields": fields})
            self.abort("internal error")
        finally:
            self._driver.settle()

    def eof_received(self) -> bool:
        self.reason = self.reason or "the peer closed the connection"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reason = self.reason or (f"the connection was lost: {exc}" if exc else "closed")
        self._hub.ports.discard(self)
        if self._finish_timer is not None:
            self._finish_timer.cancel()
        self._driver.turn()
        if self.link is None and not (self.ended or self.dialled):
            self._hub.refused(self.address, "closed before HELLO", self.reason)
        self._closed = True
        self._stop_reading()
        self._link_ended()
        self._driver.settle()
        self._held += self._lanes.messages
        self._lanes.clear()
        self._lost("link lost")

    # -- becoming a link -------------------------------------------------------------------------------------

    def _continue_handshake(self) -> bool:
        """Continue the TLS handshake; when it is done, send HELLO. Raises Refused."""
        if self.in_bytes > FIRST_LIMIT_BYTES:
            raise Refused("too long a handshake")
        if not self._secured.handshake():
            return False
        self._handshaking = False
        tls = self._secured.tls
        try:
            check_alpn(tls, self.alpn)
        except PeerProtocolError as err:
            raise Refused("protocol version", str(err)) from err
        self._identify(tls)
        if self.relay_id == self._router.relay_id:
            raise Refused(OURSELVES)
        if self.dialled and self._hub.linked(self.relay_id):
            raise Refused(LINKED)
        self._put(encode_control(self._hello()), 0, None)
        return True

    def _identify(self, tls: ssl.SSLObject) -> None:
        """Take the peer's relay id from the certificate that TLS verified. Raises Refused."""
        try:
            self.relay_id = peer_relay_id(tls)
        except PeerProtocolError as err:
            raise Refused("not a relay", str(err)) from err
        if not self.dialled:
            self.fingerprint = self._network_of(tls.context)

    def _tls_reason(self, error: str) -> str:
        """Return the refusal reason for OpenSSL's name of a TLS error."""
        return TLS_REASONS.get(error, "TLS failure")

    def _hello(self) -> link_frames.LinkHello:
        """Return the HELLO to send."""
        return self._router.hello(self.dial_us)

    def _greeting(self, buf: memoryview, start: int, end: int) -> None:
        """Handle the first frame: HELLO, or ERROR with the reason for refusing."""
        body = decode_control(buf, start, end)
        if isinstance(body, frames.Error):
            if body.detail == LINKED:
                raise Refused(LINKED)
            raise Refused("refused by the other relay", printable(body.detail))
        if not isinstance(body, link_frames.LinkHello):
            raise PeerProtocolError(
                f"{type(body).__name__} before HELLO; the first frame must be HELLO or ERROR"
            )
        if body.version != PROTOCOL_VERSION:
            raise Refused(
                "protocol version",
                f"you speak version {body.version}, this relay speaks {PROTOCOL_VERSION}",
            )
        if body.relay_id != self.relay_id:
            raise Refused(
                "another relay's id",
                f"HELLO has the id of another relay than the certificate: {body.relay_id.hex()}",
            )
        if bool(body.dial_us) == self.dialled:
            raise PeerProtocolError("both sides dialled, or neither, according to HELLO")
        if not self.dialled:
            self.dial_us = body.dial_us
        self.link = link = self._hub.greeted(self, self._checked_hello(body))
        self._hub.no_longer_half_open(self)
        self._up_s = time.monotonic()
        self._entry = self._router.entry(link)
        self._longest_bytes = 4 + FRAME_OVERHEAD + body.message_limit
        self._whole_bytes = min(WHOLE_BYTES, self._longest_bytes)
        self._reader.limit = MAX_REPORT_BYTES
        self._reader.on_frame = self._frame
        self._settle_dial(Outcome(UP, self.relay_id))

    def _checked_hello(self, hello: link_frames.LinkHello) -> link_frames.LinkHello:
        """Return a valid HELLO as the router gets it. Raises Refused.

        The address at which the peer is seen is put before the addresses that it names: it is the one known to work.
        """
        if not hello.addresses:
            return hello
        port = hello.addresses[0].rpartition(":")[2]
        seen = self.address if self.dialled else f"{self.address.rpartition(':')[0]}:{port}"
        if seen in hello.addresses or "%" in seen:
            return hello
        local = self.address.startswith(_LOOPBACK)
        # A relay that has not read its addresses yet names loopback, which is a different host for its peers.
        others = [one for one in hello.addresses if local or not one.startswith(_LOOPBACK)]
        others = others[: MAX_ADDRESSES - 1]
        addresses = [*others, seen] if local else [seen, *others]
        return msgspec.structs.replace(hello, addresses=addresses)

    def refuse(self, why: Refused) -> None:
        """Close a connection that is not a link, and count the reason.

        A superfluous one is neither counted nor a warning.
        """
        if self._closed or self._finishing:
            return
        if self.link is not None:
            self.abort(str(why))
            return
        self.reason = why.reason
        if why.reason in (LINKED, OURSELVES):
            fields = {"address": self.address, "reason": why.reason, "peer": self.relay_id.hex()}
            log.info("%s.dropped", self._hub.kind, extra={"fields": fields})
        else:
            self._hub.refused(self.address, why.reason, str(why))
        self._settle_dial(Outcome(why.reason, self.relay_id or None))
        self._hub.no_longer_half_open(self)
        if not self.made:
            self._closed = True  # the connection is closed as soon as it is made
            return
        if not (self._handshaking or self._broken):
            # Not BYE: the peer may regard this connection as its link and would conclude that this relay stops.
            self._put(encode_control(frames.Error(str(why)[:1024])), 0, None)
        self.finish()
        self._driver.settle()

    # -- frames in -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        reader = self._reader
        if reader.waiting and self._may_go_on(0):
            reader.go_on()
        while not reader.waiting:
            buffer = reader.get_buffer()
            got = self._secured.read_into(buffer)
            if got > 0:
                reader.received(got)
            if got < len(buffer) or self._closed or self._finishing:
                if reader.waiting:
                    self._is_done()
                if got < 0 and not self._closed:
                    self.abort("the peer closed the connection")
                break
            self._driver.settle()  # forwarded frames are in the buffer that is filled next
        if reader.waiting and not (self.turn.paused or self._closed or self._finishing):
            self.turn.wait()

    def go_on(self) -> bool:
        self.turn.release()
        self.buffer_updated(0)
        if self._closed or self._finishing:
            return False
        if not self._reader.waiting:
            self.turn.resume(TURN)
        return self._reader.waiting

    def _frame(self, buf: memoryview, start: int, end: int) -> object:
        self.in_frames += 1
        if end - start > WHOLE_BYTES or self._parts or buf[start + FLAGS_AT] & FLAG_MORE:
            whole = self._parts.add(buf, start, end)
            if whole is None:
                return False
            if whole is not buf:
                buf, start, end = whole, 0, len(whole)
        return self._entry(buf, start, end)

    def _stop_reading(self) -> None:
        self._reader.on_frame = ignored
        self.turn.resume(TURN)  # closing with unread bytes would discard what was written last

    # -- Port ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.reason = self.reason or "the peer stops (BYE)"
        self._stop_reading()
        super().finish()
        if self._finish_timer is None:
            loop = asyncio.get_running_loop()
            self._finish_timer = loop.call_later(
                FINISH_S, self.abort, "the peer does not read the last frames"
            )

    def leave(self, reason: str, *, goodbye: bool = True) -> None:
        """Close when all is written, with BYE if `goodbye` (this relay stops).

        A connection that is not a link closes at once.
        """
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
        self._link_ended()

    def abort(self, reason: str) -> None:
        if not self._closed:
            self.reason = self.reason or reason
            self._closed = True
            self._stop_reading()
            self._hub.no_longer_half_open(self)
            self._settle_dial(Outcome(reason, self.relay_id or None))
            if self.made:
                self._transport.abort()

    def log_fields(self) -> dict[str, object]:
        """Return the log fields of a connection that is up."""
        return {"address": self.address, "dialled": self.dialled}

    def status(self) -> dict[str, object]:
        """Return the state of the link, ready for JSON."""
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

    def _neighbor(self) -> Neighbor | None:
        return self.link

    def _has_room_again(self) -> None:
        super()._has_room_again()
        if self.link is not None:
            self._router.writable(self.link)

    def _write(self, chunks: Sequence[bytes | memoryview]) -> None:
        try:
            super()._write(chunks)
        except ssl.SSLError as err:
            self._broken = True
            self.abort(f"TLS failure: {err.reason or err}")

    # -- faults ----------------------------------------------------------------------------------------------

    def _link_ended(self) -> None:
        """Notify the router and the dialler that this is not a link any more."""
        self._hub.no_longer_half_open(self)
        self._settle_dial(Outcome(self.reason, self.relay_id or None))
        link = self.link
        if link is not None:
            self.link = None
            self._hub.lost(self, link, self.relay_id, time.monotonic() - self._up_s)

    def _settle_dial(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _protocol_error(self, err: PeerProtocolError) -> None:
        """Send the peer the rule that it broke, and close the connection. Other connections are not affected."""
        if self.link is None:
            self.refuse(err if isinstance(err, Refused) else Refused("protocol error", str(err)))
            return
        self._hub.protocol_errors += 1
        fields = {"peer": self.relay_id.hex(), "address": self.address, "error": str(err)}
        event = f"{self._hub.kind}.protocol_error"
        self._hub.quiet.warning(log, event, self.relay_id, time.monotonic(), fields)
        if not self._closed:
            self.reason = f"protocol error: {err}"
            self.control(encode_control(frames.Error(str(err)[:1024])))
            self.finish()
            self._link_ended()
