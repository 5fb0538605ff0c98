"""Sessions over WebSocket (docs/protocol.md, §18.1): the frames of a session in binary messages.

    socket ── bytes ──► WebConnection ── payloads ──► WebSession (a SessionPort) ──► router
           ◄── bytes ──               ◄── frames ──   through MessageTransport

What is received is parsed in pieces, so that a connection keeps to its share of a turn (`relay.net.turns`) whatever
it sends.

The library `websockets` parses and frames; nothing here knows the layout of a WebSocket frame. A connection belongs to
a stranger until its session has greeted.
"""

from __future__ import annotations

import asyncio
import http
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

from websockets.exceptions import InvalidMessage
from websockets.frames import BINARY, CLOSE, CONT, PING, PONG, TEXT, Frame
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import FRAME_OVERHEAD, LENGTH_BYTES, encode_control
from iris.wire.kinds import CLOCK_PING
from relay.core.buckets import Bucket, Rate
from relay.core.tickets import Admission, TicketRefused
from relay.net.sessions import FIRST_LIMIT_BYTES, INTERNAL, WEB_USER, Peer, SessionHub, SessionPort
from relay.net.turns import CONTROL_NS, SHARE_NS, TURN, Turn

log = logging.getLogger(__name__)

_LIBRARY: Final = logging.getLogger("relay.net.websession.library")
_LIBRARY.setLevel(logging.WARNING)  # it logs every connection

SUBPROTOCOL: Final = Subprotocol("iris.1")
PING_S: Final = 20.0
DEAD_S: Final = 60.0
"""Seconds after the last pong at which a session ends. Browsers answer pings by themselves, in hidden tabs, too."""
PIECE_BYTES: Final = 1 << 10
"""Bytes that are parsed at a stretch."""
IDLE_FRAMES: Final = 32
"""Pings, pongs, empty fragments and empty messages that a peer may send a second."""
ORIGIN_CHARACTERS: Final = 256
"""Characters of a refused Origin header in the log."""
IDLE_FRAMES_BEFORE_HELLO: Final = 8
CLOSE_S: Final = 2.0
"""Seconds that the peer has to close the connection after a close frame."""
WRITE_BYTES: Final = 64 << 10
"""Bytes that may wait in the connection of one browser before its frames are queued, counted and dropped for."""
NOT_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: 32\r\n\r\n"
    b"the upgrade is not valid HTTP/1\n"
)
MAX_REASON_BYTES: Final = 123
_HEADER_BYTES: Final = 14
"""Longest header of a WebSocket frame (RFC 6455, section 5.2)."""

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
TEXT_FRAME: Final = 1003
TOO_LONG: Final = 1009
INTERNAL_ERROR: Final = 1011
BROKE_A_RULE: Final = 4000
SILENT: Final = 4001
DOES_NOT_READ: Final = 4002
TICKET_REFUSED: Final = 4003
TICKET_ENDED: Final = 4004


class WebConnection(asyncio.Protocol):
    """One TCP or TLS connection of a browser, from its first byte to its end.

    `refused` is called with a reason of few different texts, for counting. `greeted` is called when the session has
    greeted, `leaving` when this side closes the connection, `ended` when it has ended; each at most once.
    """

    def __init__(
        self, hub: SessionHub, origins: Callable[[], Sequence[str]], *,
        refused: Callable[[WebConnection, str], None], greeted: Callable[[WebConnection], None],
        leaving: Callable[[WebConnection], None], ended: Callable[[WebConnection], None],
    ) -> None:  # fmt: skip
        self.host = ""
        """Address of the peer, for logs."""
        self.port: WebSession | None = None
        """Its session, once the upgrade was accepted."""
        self._open_port: WebSession | None = None
        self.origin: str | None = None
        """The Origin header of the upgrade, also of a refused one; None: the peer is not a browser."""
        self._hub = hub
        self._refused = refused
        self._greeted: Callable[[WebConnection], None] | None = greeted
        self._leaving = leaving
        self._ended = ended
        limit = hub.router.message_limit + FRAME_OVERHEAD + LENGTH_BYTES
        allowed: list[Origin | None] = [None, *map(Origin, origins())]
        self._protocol = ServerProtocol(
            origins=allowed, extensions=[], subprotocols=[SUBPROTOCOL], max_size=limit, logger=_LIBRARY
        )  # fmt: skip
        self._transport: asyncio.Transport | None = None
        self._unparsed_bytes = 0
        """Bytes parsed since the last event."""
        self.turn = Turn(hub.driver.turns)
        self._received = memoryview(b"")
        """What was received and is not parsed yet."""
        self._frames: deque[Frame | Request] = deque()
        """What was parsed and is not handled yet."""
        self._payload = memoryview(b"")
        """What is left of a frame that is handled."""
        self._last = False
        """Whether that frame ends its message."""
        self._share_ns = SHARE_NS
        """Its share of this turn."""
        self._idle_frames = Bucket("", Rate(IDLE_FRAMES), 0)
        """How many frames without content it may send now."""
        self._idle_frames_before = IDLE_FRAMES_BEFORE_HELLO
        self.message_since_s = 0.0
        """When the fragmented message began that has not ended; 0: there is none."""
        self._paused = False
        self._over = False
        """Whether this side has ended the connection, so that nothing of the peer counts any more."""
        self._timer: asyncio.TimerHandle | None = None
        self.pong_s = 0.0
        """When the upgrade was accepted or the last pong came."""

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no common base class
        self.turn.begin(self, self._transport)
        timeout_s = self._hub.config.hello_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late)

    def data_received(self, data: bytes) -> None:
        self._received = memoryview(b"".join((self._received, data)))
        if self.turn.paused:
            return  # TLS passes on what it had read before
        self._handle()
        if self._has_more:
            self.turn.wait()

    def go_on(self) -> bool:
        self.turn.release()
        self._handle()
        if self._has_more:
            return not self.turn.peer_is_behind
        self.turn.resume(TURN)
        return False

    @property
    def turn_user(self) -> str:
        """The user in whose place this connection waits for its turn; a stranger's is its address."""
        return self.host if self.port is None else self.port.session.user

    @property
    def _has_more(self) -> bool:
        """Whether something that was received is not handled yet. At the end, only a close frame still counts."""
        if self._over:
            return bool(self._received)
        return self._unhandled or bool(self._received)

    @property
    def _unhandled(self) -> bool:
        """Whether something that was parsed is not handled yet."""
        waits = self.port is not None and self.port.waits
        return waits or bool(self._payload or self._frames)

    def _handle(self) -> None:
        """Handle what was received, until the turn ends."""
        begun_us = time.monotonic_ns() // 1000
        self._share_ns = SHARE_NS
        self.turn.hold(begun_us)  # for all messages of the turn
        while self._has_more:
            self._step()
            if not self.turn.has_time(begun_us, self._share_ns):
                break
        self._write_out()

    def _step(self) -> None:
        """Handle the next part of what was received."""
        if self._over:
            self._parse()
            self._frames.clear()
            return
        port = self.port
        if port is not None and port.waits:
            port.buffer_updated(0)
        elif self._payload:
            self._pass_on()
        elif self._frames:
            frame = self._frames.popleft()
            if isinstance(frame, Frame):
                self._frame(frame)
            else:
                self._upgrade(frame)
        else:
            self._parse()
        if not self._unhandled and not self._over:
            if self._last:
                self._message_ended()
            if not self._over:
                self._check()

    def _parse(self) -> None:
        """Parse the next piece of what was received."""
        piece, self._received = self._received[:PIECE_BYTES], self._received[PIECE_BYTES:]
        protocol = self._protocol
        self._unparsed_bytes += len(piece)
        protocol.receive_data(bytes(piece))
        if self._paused and protocol.state is OPEN:
            protocol.data_to_send()  # pongs for a peer that sends pings and does not read
        self._frames.extend(cast("list[Frame | Request]", protocol.events_received()))
        if self._frames:
            self._unparsed_bytes = 0

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True
        if self.port is not None:
            self.port.pause_writing()

    def resume_writing(self) -> None:
        self._paused = False
        if self.port is not None:
            self.port.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._over = True
        self._received = memoryview(b"")
        self._ended(self)
        self._lose_port(exc)
        self.turn.end()
        self._transport = None  # one of TLS may refer to this object

    # -- what is received ------------------------------------------------------------------------------------

    def _upgrade(self, request: Request) -> None:
        protocol = self._protocol
        if not self._hub.has_room(WEB_USER):
            self._refused(self, "too many sessions")
            response = protocol.reject(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many sessions\n")
        else:
            response = protocol.accept(request)
        protocol.send_response(response)
        self._stop_timer()
        if response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            if response.status_code == http.HTTPStatus.FORBIDDEN:
                self.origin = ", ".join(request.headers.get_all("Origin"))[:ORIGIN_CHARACTERS]
                self._refused(self, "origin not allowed")
            elif response.status_code != http.HTTPStatus.SERVICE_UNAVAILABLE:
                self._refused(self, "bad upgrade")
            self._leave()
            return
        self.origin = protocol.origin
        self.pong_s = time.monotonic()
        self._write_out()  # before the session can write
        assert self._transport is not None
        self.port = self._open_port = WebSession(self._hub, self)
        self.port.connection_made(MessageTransport(self, self._transport))
        self.port.session.origin = self.origin

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is CLOSE:
            self._leave()  # the library has answered
        elif frame.opcode is TEXT:
            self._refused(self, "text frame")
            self.end(TEXT_FRAME, "messages must be binary")
        elif self._is_idle(frame) and not self._may_be_idle():
            self._refused(self, "too many empty frames")
            self.end(BROKE_A_RULE, "too many pings, pongs or empty frames")
        elif frame.opcode is BINARY or frame.opcode is CONT:
            self._part(frame)
        elif frame.opcode is PONG:
            self.pong_s = time.monotonic()

    def _is_idle(self, frame: Frame) -> bool:
        """Whether a frame has no content for the session, so that only its number can be limited."""
        ends = frame.fin and frame.opcode is CONT
        return frame.opcode in (PING, PONG) or not (frame.data or ends)

    def _may_be_idle(self) -> bool:
        """Count a frame without content; return whether the peer may send it."""
        self._share_ns = CONTROL_NS
        if self.port is None or not self.port.session.greeted:
            self._idle_frames_before -= 1
            return self._idle_frames_before >= 0
        if self._idle_frames.is_empty(time.monotonic_ns() // 1000):
            return False
        self._idle_frames.take(1, 0)
        return True

    def _part(self, frame: Frame) -> None:
        """Begin to pass on a message, or a fragment of one."""
        port = self.port
        assert port is not None
        if not port.session.greeted and len(frame.data) > FIRST_LIMIT_BYTES + LENGTH_BYTES:
            self._too_long()
            return
        if not frame.fin and not self.message_since_s:
            self.message_since_s = time.monotonic()
        self._payload = memoryview(frame.data)
        self._last = frame.fin

    def _pass_on(self) -> None:
        """Pass on the next part of a payload."""
        port, view = self.port, self._payload
        assert port is not None
        room = port.get_buffer(len(view))
        size = min(len(view), len(room))
        room[:size] = view[:size]
        self._payload = view[size:]
        port.buffer_updated(size)

    def _message_ended(self) -> None:
        """Note the end of a message, all of which the session has handled."""
        self._last = False
        port = self.port
        assert port is not None
        self.message_since_s = 0.0
        port.message_ended()
        if self._greeted is not None and port.session.greeted:
            port.admitted()
            greeted, self._greeted = self._greeted, None
            greeted(self)

    def _check(self) -> None:
        """End the connection if what it sent breaks WebSocket's rules or a limit."""
        protocol = self._protocol
        if protocol.parser_exc is not None:
            sent = protocol.close_sent
            self._refused(
                self, "message too long" if sent and sent.code == TOO_LONG else "not WebSocket"
            )
            self._leave()
        elif protocol.handshake_exc is not None and self.port is None:
            self._refused(self, "bad upgrade")
            if isinstance(
                protocol.handshake_exc, InvalidMessage
            ):  # which the library does not answer
                protocol.data_to_send()
                assert self._transport is not None
                self._transport.write(NOT_HTTP)
            self._leave()
        elif self._unparsed_bytes > FIRST_LIMIT_BYTES + LENGTH_BYTES + _HEADER_BYTES and (
            self.port is None or not self.port.session.greeted
        ):
            self._too_long()

    def _too_long(self) -> None:
        self._refused(self, "message too long")
        text = f"before HELLO a message may have {FIRST_LIMIT_BYTES + LENGTH_BYTES} bytes"
        self.end(TOO_LONG, text)

    # -- what is sent ----------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the connection has ended, or ends."""
        return self._over

    def send(self, data: bytes) -> None:
        """Send `data`, which are whole frames, as one message."""
        if not self._over and self._protocol.state is OPEN:
            self._protocol.send_binary(data)
            self._write_out()

    def ping(self) -> None:
        """Send a WebSocket ping."""
        if not self._over and self._protocol.state is OPEN:
            self._protocol.send_ping(b"")
            self._write_out()

    def end(self, code: int, reason: str) -> None:
        """Close the connection with a close frame, or before the upgrade without one. Idempotent."""
        if self._over:
            return
        if self._protocol.state is OPEN:
            self._protocol.send_close(code, _cut(reason))
            self._write_out()
        self._leave()

    def refuse(self, reason: str) -> None:
        """Count a refusal."""
        self._refused(self, reason)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def attached(self) -> bool:
        """Whether it has a transport, so that its TLS handshake is done."""
        return self._transport is not None

    @property
    def greeted(self) -> bool:
        """Whether its session has greeted."""
        return self._greeted is None

    def go_away(self) -> None:
        """Close the connection, because the relay stops."""
        self.end(GOING_AWAY, "the relay is stopping")

    def _leave(self) -> None:
        """End the session now, and wait a little for the peer to close the connection, so that it can read why."""
        if not self._over:
            self._leaving(self)
        self._over = True
        self._stop_timer()
        loop = asyncio.get_running_loop()
        if self.port is not None:
            self.port.cut()
            loop.call_soon(self._lose_port)
        self._write_out()
        transport, protocol = self._transport, self._protocol
        if transport is None or transport.is_closing():
            return
        if protocol.close_sent is None or protocol.close_rcvd is not None:
            transport.close()
        else:
            self._timer = loop.call_later(CLOSE_S, transport.abort)

    def _lose_port(self, exc: Exception | None = None) -> None:
        port, self._open_port = self._open_port, None
        self.port = None
        if port is not None:
            port.connection_lost(exc)

    def _write_out(self) -> None:
        data = self._protocol.data_to_send()
        transport = self._transport
        if not data or transport is None or transport.is_closing():
            return
        transport.writelines([each for each in data if each])
        if data[-1] == b"" and self._over:
            if self._protocol.close_rcvd is not None:
                transport.close()
            elif transport.can_write_eof():
                transport.write_eof()

    def _too_late(self) -> None:
        self._timer = None
        self._refused(self, "no upgrade in time")
        self.end(NORMAL, "")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class MessageTransport(asyncio.Transport):
    """What a `WebSession` writes to: each write becomes one binary message of its connection."""

    def __init__(self, connection: WebConnection, transport: asyncio.Transport) -> None:
        super().__init__()
        self._connection = connection
        self._socket = transport
        self.closing: tuple[int, str] = (NORMAL, "")
        """Code and reason with which `close` and `abort` close the connection."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self._connection.send(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return 0 if self._socket.is_closing() else self._socket.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._socket.get_write_buffer_limits()

    def pause_reading(self) -> None:
        if not self._socket.is_closing():
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        if not self._socket.is_closing():
            self._socket.resume_reading()

    def is_closing(self) -> bool:
        return self._connection.over or self._socket.is_closing()

    def close(self) -> None:
        self._connection.end(*self.closing)

    def abort(self) -> None:
        self._connection.end(*self.closing)


class WebSession(SessionPort):
    """The session of one browser."""

    high_water_bytes = WRITE_BYTES

    def __init__(self, hub: SessionHub, connection: WebConnection) -> None:
        super().__init__(hub, Peer(None), web=True)
        self._connection = connection
        self.turn = connection.turn
        self._ping_s = time.monotonic() + PING_S
        """When the next ping is due."""

    def _turn_begins(self) -> None:
        """Do nothing: it is the turn of the connection."""

    def _turn_ended(self) -> None:
        """Do nothing: the connection may still wait for the peer's close frame."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Wait for the next turn: the connection does, for all that it has received."""

    def message_ended(self) -> None:
        """Check that the message held whole frames."""
        if self._reader.held_bytes and not self._closed and not self._finishing:
            self._protocol_error(PeerProtocolError("a message must hold whole frames"))
            self._driver.settle()

    def admitted(self) -> None:
        """Count the session for the user that its ticket names, because it has greeted."""
        user, users = self.session.user, self._hub.users
        if user == self.user or not self.user:
            return
        if not users.has_room(user):
            self.session.user = self.user
            self._protocol_error(TicketRefused("too many sessions", users.full(user, "sessions")))
            self._driver.settle()
            return
        users.give(self.user)
        users.take(user)
        self.user = user

    def _end_by_ticket(self, admission: Admission, why: str) -> None:
        admission.ended[why] = admission.ended.get(why, 0) + 1
        log.info(
            "web.ticket_ended", extra={"fields": {"session": self.session.number, "reason": why}}
        )
        self._close_with(TICKET_ENDED, why)
        self.control(encode_control(frames.Error(why)))
        self.finish()
        self._router.session_down(self.session)
        self._driver.settle()

    def cut(self) -> None:
        """Write nothing more: the connection has ended, and `connection_lost` follows."""
        self._closed = True

    def finish(self) -> None:
        if self._router.draining:
            self._close_with(GOING_AWAY, "the relay is stopping")
        super().finish()

    def abort(self, reason: str) -> None:
        if not self._closed:
            going = self._router.draining or self._hub.over
            code = INTERNAL_ERROR if reason == INTERNAL else DOES_NOT_READ
            self._close_with(GOING_AWAY if going else code, reason)
        super().abort(reason)

    def check_deadline(self, now_s: float) -> None:
        if self._closed:
            return
        admission = self._router.admission
        if admission is not None and self.session.ticket is not None and not self._finishing:
            self._driver.turn()
            if why := admission.ended_by(self.session, self._router.now_us):
                self._end_by_ticket(admission, why)
                return
        connection = self._connection
        if now_s - connection.pong_s > DEAD_S:
            self._close_with(SILENT, f"no pong was received for {DEAD_S:g} s")
            super().abort("it did not answer pings")
            return
        since_s, limit_s = connection.message_since_s, self._hub.config.frame_timeout_s
        if since_s and now_s - since_s > limit_s and not self.turn.paused:
            self._protocol_error(
                PeerProtocolError(f"the rest of a message was not received within {limit_s:g} s")
            )
            self._driver.settle()
            return
        if now_s >= self._ping_s and self.session.greeted and not self._finishing:
            self._ping_s = now_s + PING_S
            connection.ping()
            self._driver.turn()
            self.control(
                encode_control(frames.Ping(CLOCK_PING, self._router.now_us))
            )  # a sample of its clock
            self._driver.settle()
        super().check_deadline(now_s)

    def _protocol_error(self, err: PeerProtocolError) -> None:
        code = BROKE_A_RULE
        if isinstance(err, TicketRefused):
            code = TICKET_REFUSED
            self._connection.refuse(err.reason)
        self._close_with(code, str(err))
        super()._protocol_error(err)

    def _close_with(self, code: int, reason: str) -> None:
        transport = self._transport
        if isinstance(transport, MessageTransport):
            transport.closing = (code, reason)


def _cut(reason: str) -> str:
    """Return as much of a reason as fits in a close frame."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
