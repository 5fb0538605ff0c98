"""A connection of uvicorn with what uvicorn does not have: limits of time to send a request, a limit of the number of
connections that begins before TLS, and a parser that refuses what a proxy in front may read in another way."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any, Final

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from iris.accepting import Accepted, Places
from iris.logs import Repeats, logger
from iris.web import heads
from iris.web.guard import CUT

log = logger(__name__)

HEADERS_S: Final = 10.0
"""Time for a connection to send the headers of a request, from its first byte."""
MAX_HEAD_BYTES: Final = 32 << 10
"""Largest head of a request: its first line and its headers."""
TOO_MANY: Final = "too many connections"
INVALID: Final = "invalid request"
HEAD: Final = "headers too slow"
BODY: Final = "body too slow"
REST: Final = "rest of a body too slow"
REST_S: Final = 2.0
"""Time for the rest of a body that nobody wants, once the request was answered."""
TOO_MANY_NOW: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 21\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\ntoo many connections\n"
)
_KEEP_ALIVE: Final = ((socket.SO_KEEPALIVE, 1),)
_TCP_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Door:
    """The connections of one server, handshakes included. When there are `max_connections`, the one that has waited
    longest for a request makes room; if all have one under way, the new connection is refused.

    `refused` counts connections that were cut or refused, by reason.
    """

    def __init__(self, max_connections: int, body_s: float, refused: Counter[str]) -> None:
        self.body_s = body_s
        self.refused = refused
        self.places = Places(
            lambda connection, reason: self.refuse(connection.host, reason), reason=TOO_MANY,
            loose=lambda: max_connections, total=lambda: max_connections,
        )  # fmt: skip
        self._repeats = Repeats(limit=64)

    def refuse(self, address: str, reason: str) -> None:
        """Count and log a connection that is cut or refused."""
        self.refused[reason] += 1
        self._repeats.warning(log, "http.refused", (reason, address), None, {"address": address, "reason": reason})  # fmt: skip

    def end(self) -> None:
        """Log what was held back."""
        self._repeats.end()


class StrictHeads(ReceiveBuffer):
    """What h11 has received and not parsed. It refuses heads and trailers that `heads.fault` refuses."""

    fault = ""
    """What was wrong; empty if nothing was."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        received = bytes(self)
        lines = super().maybe_extract_lines()
        self.fault = heads.fault(received[: len(received) - len(self)] or received)
        if self.fault:
            raise h11.LocalProtocolError(self.fault)  # which h11 makes a RemoteProtocolError
        return lines


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, door: Door, accepted: Accepted, **more: Any) -> None:
        state = {**more.pop("app_state"), CUT: self.cut}
        super().__init__(app_state=state, **more)
        assert type(self.conn._receive_buffer) is ReceiveBuffer, (
            "h11 keeps what it received elsewhere"
        )
        self._heads = self.conn._receive_buffer = StrictHeads()
        self._door = door
        self._accepted = accepted
        self._timer: asyncio.TimerHandle | None = None
        self._awaits = HEAD
        """What must be here when the timer ends."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._accepted.cut = self.cut
        _keep_alive(transport)
        self._start_timer(HEADERS_S, HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if len(data) > MAX_HEAD_BYTES and self.conn.their_state is h11.IDLE:
            # h11 looks at the size of what is incomplete only, and this may be complete.
            self.data_received(data[:MAX_HEAD_BYTES])
            self.data_received(data[MAX_HEAD_BYTES:])
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # the headers are not complete
            if self._timer is None or self._awaits is REST:
                self._start_timer(HEADERS_S, HEAD)
        elif self._busy:
            self._under_way()

    def send_400_response(self, msg: str) -> None:
        self._stop_timer()
        self._door.refuse(self._accepted.host, INVALID)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(f"{self._heads.fault or msg}\n")
            self._door.places.release(self._accepted)
        else:  # an answer was sent, or has begun
            self.cut()

    def on_response_complete(self) -> None:
        self._stop_timer()
        self._door.places.release(self._accepted)
        if self.conn.their_state is h11.SEND_BODY:
            self._start_timer(REST_S, REST)
        super().on_response_complete()
        if self._busy:  # the next request was here already
            self._under_way()

    def _under_way(self) -> None:
        """Note that a request is under way, whose body may not have ended."""
        self._door.places.hold(self._accepted)
        if self.conn.their_state is not h11.SEND_BODY:
            self._stop_timer()
        elif self._timer is None or self._awaits is not BODY:
            self._start_timer(
                self._door.body_s + REST_S, BODY
            )  # the application has answered before

    @property
    def _busy(self) -> bool:
        """Whether a request is under way."""
        # uvicorn declares it without None, which it is before the first request
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _start_timer(self, after_s: float, awaits: str) -> None:
        self._stop_timer()
        self._awaits = awaits
        self._timer = self.loop.call_later(after_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._door.refuse(self._accepted.host, self._awaits)
        self.cut()

    def cut(self) -> None:
        """End the connection at once, whatever was not sent yet."""
        self.connections.discard(self)
        self.transport.abort()


def _keep_alive(transport: asyncio.Transport) -> None:
    """Have the kernel notice a peer whose host is gone."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.SOL_SOCKET, option, value)
    for name, seconds in _TCP_KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
