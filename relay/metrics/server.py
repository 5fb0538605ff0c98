"""Answers GET /metrics, /live and /ready. Whatever scrapers do, it holds at most `MAX_CONNECTIONS` for `ANSWERED_S`.

One thread for each connection, which is closed after its answer. When there are too many, the oldest of those that have
not sent their request is cut; if all have, the new one is.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import socket
import sys
import time
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, ThreadingMixIn
from typing import Any, Final, Protocol

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from iris.web import heads

MAX_CONNECTIONS: Final = 32
MAX_HEAD_BYTES: Final = 32 << 10
ASKED_S: Final = 5.0
"""Time for a connection to send its request."""
ANSWERED_S: Final = 15.0
"""Time for a connection from its beginning to its end."""
LOOK_S: Final = 0.25
"""Interval at which connections are checked for their age."""
PLAIN: Final = "text/plain; charset=utf-8"
INDEX: Final = "Iris: GET /metrics, /live, /ready\n"


class Source(Protocol):
    """What a server shows."""

    cut_connections: int
    """Connections that the server cut or refused."""

    def page(self) -> bytes: ...
    def not_live(self) -> str: ...
    def not_ready(self) -> str: ...


class _Connection:
    __slots__ = ("asked", "began_s", "cut")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.asked = False
        """Whether its request has arrived."""
        self.cut = False
        """Whether it was cut, and waits for its thread to close it."""


class Server(ThreadingMixIn, BaseServer):
    """Serves one `Source` at a socket that listens already."""

    daemon_threads = True
    block_on_close = False  # a thread ends with its connection, which `server_close` cuts

    def __init__(self, listener: socket.socket, source: Source) -> None:
        super().__init__(listener.getsockname(), _Handler)
        self.source = source
        self._listener = listener
        self.on_loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        self._connections: dict[socket.socket, _Connection] = {}

    def fileno(self) -> int:
        return self._listener.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        return self._listener.accept()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a new connection. Return False if there is none."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self.source.cut_connections += 1
            connections = list(self._connections.items())  # the threads of others change the table
            waiting = (each for each, known in connections if not (known.asked or known.cut))
            oldest = next(waiting, None)
            if oldest is None or len(connections) >= 2 * MAX_CONNECTIONS:
                return False
            self._cut(oldest)
        request.settimeout(ANSWERED_S)
        self._connections[request] = _Connection(time.monotonic())
        return True

    def asked(self, connection: socket.socket) -> None:
        """Note that the request of a connection has arrived."""
        known = self._connections.get(connection)
        if known is not None:
            known.asked = True

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
        request.close()

    def service_actions(self) -> None:
        """Cut connections that are too old. Called after every request, and every `LOOK_S`."""
        now_s = time.monotonic()
        for connection, known in list(self._connections.items()):
            if not known.cut and now_s - known.began_s > (ANSWERED_S if known.asked else ASKED_S):
                self.source.cut_connections += 1
                self._cut(connection)

    def server_close(self) -> None:
        for connection in list(self._connections):
            self._cut(connection)
        self._listener.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore what a scraper does to its own connection; other errors are printed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _cut(self, connection: socket.socket) -> None:
        """End a connection. Its thread, which may be reading or writing, fails and closes it; it counts until then."""
        known = self._connections.get(connection)
        if known is not None:
            known.cut = True
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Head(io.BufferedReader):
    """What is read of a connection. It keeps the head as it was received, and reads no more than its limit."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.received = b""

    def readline(self, size: int | None = -1) -> bytes:
        if len(self.received) > MAX_HEAD_BYTES:
            raise LineTooLong("head")  # which is answered with 431
        line = super().readline(size)
        self.received += line
        return line


class _Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[mutable-override]  # only a Server makes handlers
    server_version = "iris"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = self._head = _Head(self.rfile.detach())

    def parse_request(self) -> bool:
        """Refuse a head that a proxy may read in another way, too."""
        if not super().parse_request():
            return False
        if fault := heads.fault(self._head.received):
            self.server.source.cut_connections += 1
            self._answer(HTTPStatus.BAD_REQUEST, fault + "\n")
            return False
        return True

    def do_GET(self) -> None:
        self.server.asked(self.connection)
        source, path = self.server.source, self.path.partition("?")[0]
        if not self._host_allowed():
            self._answer(
                HTTPStatus.FORBIDDEN, "this page is for localhost, and not for other names\n"
            )
        elif path == "/metrics":
            self._answer(HTTPStatus.OK, source.page(), CONTENT_TYPE_PLAIN_0_0_4)
        elif path == "/live":
            self._health(source.not_live())
        elif path == "/ready":
            self._health(source.not_ready())
        elif path == "/":
            self._answer(HTTPStatus.OK, INDEX)
        else:
            self._answer(HTTPStatus.NOT_FOUND, INDEX)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _health(self, why_not: str) -> None:
        if why_not:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, why_not + "\n")
        else:
            self._answer(HTTPStatus.OK, "ok\n")

    def _host_allowed(self) -> bool:
        """Whether the request names this host, if only this host can send it.

        A web page whose name was made to lead to 127.0.0.1 names itself.
        """
        host = self.headers.get("Host", "localhost")
        if not self.server.on_loopback:
            return True
        bare = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if bare == "localhost":
            return True
        try:
            ipaddress.ip_address(bare.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def _answer(self, status: HTTPStatus, body: str | bytes, kind: str = PLAIN) -> None:
        data = body if isinstance(body, bytes) else body.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: anybody can send requests."""
