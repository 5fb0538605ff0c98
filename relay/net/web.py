"""Accepts sessions over WebSocket: ws:// on loopback, for a proxy that has TLS, and wss:// with a web certificate.

A connection is a stranger's until its session has greeted, and again when it is being closed. At most `MAX_HALF_OPEN`
connections are, at most a quarter of `max_sessions`, and no more than `strangers_that_fit`; each for at most
`HANDSHAKE_S` in TLS, and for `hello_timeout_s` before and after the upgrade. When one more arrives, the oldest is
aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from iris.accepting import HALF_OPEN, Accepted, Acceptor, Places, strangers_that_fit
from iris.errors import ConfigError
from iris.extras import install_line
from relay.address_settings import parse_web_listen
from relay.config import RelayConfig
from relay.core.session import Session
from relay.core.tickets import Admission
from relay.issuer_settings import load_revoked
from relay.logs import Quiet
from relay.net.addresses import listen_at, show
from relay.net.sessions import SessionHub
from relay.net.tls import refusal

if TYPE_CHECKING:
    from relay.net.websession import WebConnection

log = logging.getLogger(__name__)

MAX_HALF_OPEN: Final = 1024
STRANGERS_PART: Final = 2
"""These strangers may have half of the descriptors in the reserve: see `strangers_that_fit`."""
SHUTDOWN_S: Final = 2.0
"""Time for a browser to answer the end of TLS."""
ACCEPTS: Final = 1
ACCEPT_PAUSE_S: Final = 0.001
UNSENT_BYTES: Final = 256 << 10
"""Send buffer of a session in the kernel, which else may grow to 4 MiB: what waits there cannot be dropped."""
CLOSING_S: Final = 0.5
"""How long a stopping relay waits for browsers to answer its close frames."""


def check_installed() -> None:
    """Raise ConfigError if the packages of the extra [wss] are missing."""
    try:
        found = all(map(importlib.util.find_spec, ("websockets", "jwt")))
    except ValueError:  # a name that is in sys.modules without a module
        found = False
    if not found:
        raise ConfigError(
            f"listen: sessions over WebSocket need websockets and PyJWT: {install_line('wss')}"
        )


class WebListener:
    """The listeners for sessions over WebSocket, and their connections."""

    def __init__(self, hub: SessionHub, config: RelayConfig) -> None:
        """Read the certificate. Raises ConfigError: it cannot be used, or a package is missing."""
        check_installed()
        from relay.net.websession import WebConnection

        self._connection: Callable[..., WebConnection] = WebConnection
        self._hub = hub
        self._origins: Sequence[str] = config.origins
        self._tls = web_context(config)
        self.addresses: list[str] = []
        """URLs at which sessions are accepted."""
        self.refusals: dict[str, int] = {}
        self._listeners: dict[socket.socket, str] = {}
        """Listener -> scheme."""
        self._acceptors: list[Acceptor] = []
        self._fitting = strangers_that_fit(MAX_HALF_OPEN, STRANGERS_PART)
        self._places = Places(
            lambda connection, reason: self._refused(connection.host, reason), reason=HALF_OPEN,
            loose=lambda: self.half_open_limit,
        )  # fmt: skip
        self._connections: set[WebConnection] = set()
        self._quiet = Quiet()
        self._networks: Callable[[], Collection[str]] = tuple

    @property
    def half_open_limit(self) -> int:
        """Most connections whose session has not greeted, or that are being closed."""
        return max(1, min(MAX_HALF_OPEN, self._fitting, self._hub.max_sessions // 4))

    def check_tickets(self, networks: Callable[[], Collection[str]]) -> None:
        """Check the tickets of sessions, which must be for one of `networks` (fingerprints in hex).

        Raises ConfigError: the list of revoked tickets cannot be read.
        """
        self._networks = networks
        config = self._hub.config
        if config.tickets or config.issuers:
            self._admit(config)

    def _admit(self, config: RelayConfig) -> None:
        from iris.crypto.tickets import read_ticket

        router = self._hub.router
        admission = Admission(
            read_ticket, issuers=config.issuers, revoked=load_revoked(config.revoked_tickets), networks=self._networks,
            required=config.tickets, accounts=router.accounts, clock=lambda: router.now_us, stream_names=router.stream_names,
        )  # fmt: skip
        admission.on_denied = self._denied
        router.admit_by(admission)

    def _denied(self, session: Session, why: str) -> None:
        admitted = session.ticket
        holder = admitted.holder if admitted is not None else ("", "")
        fields = {
            "session": session.number,
            "issuer": holder[0],
            "subject": holder[1],
            "reason": why,
        }
        self._quiet.warning(log, "web.denied", holder, time.monotonic(), fields)

    def listen(self, texts: Sequence[str]) -> None:
        """Bind at every ws:// or wss:// URL; call `accept` later. Raises ConfigError, and then leaves nothing bound."""
        with contextlib.ExitStack() as undo:
            for text in texts:
                scheme, host, port = parse_web_listen(text)
                try:
                    listener = undo.enter_context(listen_at("listen", host, port))
                except OSError as err:
                    raise ConfigError(
                        f"listen: cannot accept sessions at {text}: {err.strerror}"
                    ) from err
                self._listeners[listener] = scheme
                self.addresses.append(f"{scheme}://{show(*listener.getsockname()[:2])}")
            undo.pop_all()
        log.info("web.listening", extra={"fields": {"addresses": self.addresses}})

    def accept(self) -> None:
        """Start to accept, beginning with connections that arrived since `listen`."""
        for scheme in sorted(set(self._listeners.values())):
            acceptor = Acceptor(
                self._accepted_tls if scheme == "wss" else self._accepted, self._starved,
                per_turn=ACCEPTS, pause_s=ACCEPT_PAUSE_S, places=self._places,
            )  # fmt: skip
            acceptor.listen([each for each, used in self._listeners.items() if used == scheme])
            self._acceptors.append(acceptor)

    def stop_listening(self) -> None:
        """Stop accepting, and close connections whose session has not greeted. Idempotent."""
        for acceptor in self._acceptors:
            acceptor.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for acceptor in self._acceptors:
            acceptor.cancel()
        for connection in list(self._connections):
            if connection.attached and not connection.greeted:
                connection.go_away()

    async def close(self) -> None:
        """Close every connection, after a moment for the answers to close frames. Idempotent."""
        self.stop_listening()
        until_s = time.monotonic() + CLOSING_S
        while self._connections and time.monotonic() < until_s:  # noqa: ASYNC110 - browsers close when they like
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        for acceptor in self._acceptors:
            acceptor.cancel()
            await acceptor.closed()
        await asyncio.sleep(0)

    def reload(self, config: RelayConfig) -> None:
        """Use the origins, issuers and revoked tickets of `config`, and read the certificate again.

        A file that cannot be read is logged, and what it said before stays in force.
        """
        self._origins = config.origins
        admission = self._hub.router.admission
        try:
            if admission is not None:
                admission.reload(config.issuers, load_revoked(config.revoked_tickets))
            elif config.issuers:
                self._admit(config)
        except ConfigError as err:
            log.error("web.revoked_unreadable", extra={"fields": {"error": str(err)}})
            if admission is not None:
                admission.reload(config.issuers, admission.revoked)
        if self._tls is None or config.wss_cert is None:
            return
        try:
            self._tls.load_cert_chain(config.wss_cert, config.wss_key)
        except (OSError, ssl.SSLError) as err:
            fields = {"path": str(config.wss_cert), "error": str(err)}
            log.error("web.certificate_unreadable", extra={"fields": fields})

    def status(self) -> dict[str, object]:
        """Return listeners, connections and refusals, ready for JSON."""
        admission = self._hub.router.admission
        return {
            "listening": list(self.addresses),
            "connections": len(self._connections),
            "half_open": len(self._places.loose),
            "refused": dict(self.refusals),
            "tickets": None if admission is None else admission.status(),
        }

    def _accepted(self, connection: Accepted, address: Any) -> None:
        self._attach(connection, {})

    def _accepted_tls(self, connection: Accepted, address: Any) -> None:
        self._attach(connection, {"ssl": self._tls, "ssl_shutdown_timeout": SHUTDOWN_S})

    def _attach(self, accepted: Accepted, tls: dict[str, Any]) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        connection = self._connection(
            self._hub, lambda: self._origins,
            refused=lambda connection, reason: self._refused(connection.host, reason, connection.origin),
            greeted=lambda connection: self._places.hold(accepted),
            leaving=lambda connection: self._places.release(accepted), ended=self._connections.discard,
        )  # fmt: skip
        connection.host = accepted.host
        self._connections.add(connection)
        task = self._acceptors[0].attach(
            accepted, lambda: connection, lambda err: self._refused(accepted.host, refusal(err)), **tls
        )  # fmt: skip
        task.add_done_callback(lambda task: self._attached(connection))

    def _attached(self, connection: WebConnection) -> None:
        if not connection.attached:  # its handshake failed, or was ended
            self._connections.discard(connection)

    def _starved(self, err: OSError) -> None:
        self._refused("", f"not accepted: {err.strerror}")

    def _refused(self, host: str, reason: str, origin: str | None = None) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        fields = {"address": host, "reason": reason}
        if origin is not None:
            fields["origin"] = origin
        self._quiet.warning(log, "web.refused", (reason, host), time.monotonic(), fields)


def web_context(config: RelayConfig) -> ssl.SSLContext | None:
    """Return the context for wss:// with the web certificate of `config`; None if it has none.

    Raises ConfigError: the certificate or its key cannot be used.
    """
    if config.wss_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.wss_cert, config.wss_key)
    except (OSError, ssl.SSLError) as err:
        raise ConfigError(
            f"wss_cert: cannot use the certificate {config.wss_cert} with the key {config.wss_key or config.wss_cert}: {err}"
        ) from err
    return context
