"""Serves an application over HTTP/1.1: its socket, the limits of its connections, start and stop.

uvicorn does the work. It bounds neither the time that a connection takes to send a request nor the number of
connections, so `Connection` does; and connections are accepted by `iris.accepting`, which counts TLS handshakes, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import ipaddress
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from iris.accepting import Accepted, Acceptor, connections_that_fit, handshake_failure
from iris.errors import ConfigError
from iris.extras import install_line
from iris.web.bodies import BODY_S

if TYPE_CHECKING:
    from starlette.types import ASGIApp

BACKLOG: Final = 2048
ACCEPTS: Final = 16
"""Connections accepted in one turn of the event loop."""


def check_installed(what: str) -> None:
    """Raise ConfigError if the packages of the extra [web] are missing. `what` needs them: "the dashboard"."""
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        raise ConfigError(f"{what} needs starlette and uvicorn: {install_line('web')}")


def parse_address(setting: str, address: str) -> tuple[str, int]:
    """Return (numeric host, port) of "127.0.0.1:8080", "[::1]:8080" or "localhost:8080". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    try:
        if not colon or not port.isdecimal() or int(port) > 65_535:
            raise ValueError
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"{setting}: {address!r} is not ADDRESS:PORT; write 127.0.0.1:8080 or [::1]:8080"
        ) from None
    return host, int(port)


def listen(setting: str, address: str, *, allow_remote: bool = False) -> socket.socket:
    """Return a socket that listens at `address`, which came from the setting `setting`.

    Raises:
        ConfigError: the address is malformed or cannot be bound, or it is not a loopback address and `allow_remote`
            is False.
    """
    host, port = parse_address(setting, address)
    if not allow_remote and not ipaddress.ip_address(host).is_loopback:
        raise ConfigError(
            f"{setting}: {host} is not a loopback address, and tokens and payloads would cross the network in the "
            "clear; use TLS, or allow it with --allow-remote behind a proxy that does"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.setblocking(False)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = f"{error.strerror}: {address}"
        if error.errno == errno.EADDRINUSE:
            why += "; stop what listens there, or choose another port"
        raise ConfigError(f"{setting}: cannot listen: {why}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """Return "ADDRESS:PORT" of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve(
    app: ASGIApp, listener: socket.socket, stop: asyncio.Event, *, max_connections: int = 1024, grace_s: int = 5,
    body_s: float = BODY_S, certificate: str = "", key: str = "", refused: Counter[str] | None = None,
) -> None:  # fmt: skip
    """Serve `app` at a socket, which is closed at the end, until `stop` is set; then finish for at most `grace_s`.

    An application that sends without end must end when `stop` is set, or it is cancelled after `grace_s`. One that
    reads a body must give it up after `body_s`, and answer; a little later the connection is cut. With `certificate`
    and `key`, both PEM files, connections use TLS. Handshakes count in `max_connections`, of which there are no more
    than fit the descriptors of this process. `refused` counts connections that were cut or refused, by reason.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    import uvicorn

    from iris.web.connection import MAX_HEAD_BYTES, TOO_MANY_NOW, Connection, Door

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield  # signals are the caller's

    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", interface="asgi3", log_config=None, log_level="critical",
        access_log=False, proxy_headers=False, server_header=False, timeout_keep_alive=15,
        timeout_graceful_shutdown=grace_s, h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=certificate or None, ssl_keyfile=key or None,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:  # ssl.SSLError, too
        listener.close()
        raise ConfigError(f"the certificate {certificate} or its key {key} cannot be used: {error.strerror or error}") from error  # fmt: skip
    server = Server(config)
    door = Door(
        connections_that_fit(max_connections), body_s, Counter() if refused is None else refused
    )

    def accepted(connection: Accepted, address: Any) -> None:
        acceptor.attach(
            connection, lambda: Connection(door, connection, config=config, server_state=server.server_state, app_state={}),
            lambda error: door.refuse(connection.host, handshake_failure(error)), ssl=config.ssl,
        )  # fmt: skip

    def turned_away(connection: Accepted) -> None:
        if config.ssl is None:
            connection.send(TOO_MANY_NOW)
            connection.recv(MAX_HEAD_BYTES)  # else the answer might not arrive

    acceptor = Acceptor(
        accepted, lambda error: door.refuse("", f"not accepted: {error.strerror}"), per_turn=ACCEPTS, places=door.places,
        turned_away=turned_away,
    )  # fmt: skip
    # It serves no socket of its own: connections are accepted here, so that their handshakes are counted.
    running = asyncio.ensure_future(server.serve(sockets=[]))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        acceptor.listen((listener,))
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        _stop_accepting(acceptor, listener)
        server.should_exit = True
        await running
    finally:
        running.cancel()
        stopping.cancel()
        _stop_accepting(acceptor, listener)
        tasks = set(server.server_state.tasks)
        for task in tasks:
            task.cancel()
        for connection in list(door.places.open):
            connection.abort()
        await asyncio.gather(running, stopping, *tasks, return_exceptions=True)
        await acceptor.closed()
        door.end()


def _stop_accepting(acceptor: Acceptor, listener: socket.socket) -> None:
    """Accept no more, and end handshakes. Idempotent."""
    acceptor.stop()
    acceptor.cancel()
    listener.close()
