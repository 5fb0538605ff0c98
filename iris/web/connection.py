"""A connection of uvicorn with the limits that uvicorn does not have: of time to send a request, and of number."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from iris.web.guard import CUT

HEADERS_S: Final = 10.0
"""Time for a connection to send the headers of a request, from its first byte."""
MAX_HEAD_BYTES: Final = 32 << 10
"""Largest head of a request: its first line and its headers."""
REST_S: Final = 2.0
"""Time for the rest of a body that nobody wants, once the request was answered."""
FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 21\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\ntoo many connections\n"
)
_KEEP_ALIVE: Final = ((socket.SO_KEEPALIVE, 1),)
_TCP_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Door:
    """The connections of one server. When there are `max_connections`, the one that has waited longest for a request
    makes room; if all have one under way, the new connection is refused."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.waiting: dict[Connection, None] = {}
        """Connections without a request under way, longest first."""
        self.cut = 0
        """Connections that were cut or refused."""


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, door: Door, **more: Any) -> None:
        state = {**more.pop("app_state"), CUT: self.cut}
        super().__init__(app_state=state, **more)
        self._door = door
        self._timer: asyncio.TimerHandle | None = None
        self._rest = False
        """Whether the timer waits for the rest of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        door = self._door
        if len(self.connections) >= door.max_connections:
            door.cut += 1
            if not door.waiting:
                transport.write(FULL)
                transport.close()
            else:
                next(iter(door.waiting)).cut()
        super().connection_made(transport)
        if transport.is_closing():
            return
        _keep_alive(transport)
        door.waiting[self] = None
        self._start_timer(HEADERS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._door.waiting.pop(self, None)
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
            if self._timer is None or self._rest:
                self._start_timer(HEADERS_S)
        elif self._busy:
            self._door.waiting.pop(self, None)
            self._stop_timer()

    def on_response_complete(self) -> None:
        self._stop_timer()
        self._door.waiting[self] = None
        if self.conn.their_state is h11.SEND_BODY:
            self._start_timer(REST_S)
            self._rest = True
        super().on_response_complete()
        if self._busy:  # the next request was here already
            self._door.waiting.pop(self, None)

    @property
    def _busy(self) -> bool:
        """Whether a request is under way."""
        # uvicorn declares it without None, which it is before the first request
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _start_timer(self, after_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(after_s, self._late)

    def _stop_timer(self) -> None:
        self._rest = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._door.cut += 1
        self.cut()

    def cut(self) -> None:
        """End the connection at once, whatever was not sent yet."""
        self._door.waiting.pop(self, None)
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
