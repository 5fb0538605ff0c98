"""Accepts sessions of processes on hosts without a relay, over TCP and TLS 1.3 with a certificate of an access file.

A connection is a stranger's until its handshake is done. There are at most `MAX_HALF_OPEN` such connections, and no
more than `strangers_that_fit`, each for at most `HANDSHAKE_S`; when one more arrives, the oldest is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from iris.accepting import HALF_OPEN, STRANGERS_PART, Accepted, Acceptor, Places, strangers_that_fit
from iris.errors import ConfigError, PeerProtocolError
from relay.address_settings import parse_listen
from relay.logs import Quiet
from relay.net.addresses import listen_at
from relay.net.sessions import SessionHub
from relay.net.tls import Credentials, refusal, session_server_context

log = logging.getLogger(__name__)

MAX_HALF_OPEN: Final = 128
SHUTDOWN_S: Final = 5.0
"""Time for the peer to answer the end of TLS. Until then its session counts."""
ACCEPTS: Final = 1
ACCEPT_PAUSE_S: Final = 0.001


class RemoteListener:
    """The TCP listeners for sessions. `credentials` is read in each handshake."""

    def __init__(self, hub: SessionHub, credentials: Sequence[Credentials]) -> None:
        self.addresses: list[tuple[str, int]] = []
        """(host, port) pairs at which sessions are accepted."""
        self.refusals: dict[str, int] = {}
        self._hub = hub
        self._credentials = credentials
        self._context = session_server_context(credentials)
        self._listeners: list[socket.socket] = []
        fitting = strangers_that_fit(MAX_HALF_OPEN, STRANGERS_PART)
        self._places = Places(
            lambda connection, reason: self._refused(connection.host, reason), reason=HALF_OPEN,
            loose=lambda: min(fitting, MAX_HALF_OPEN),
        )  # fmt: skip
        self._acceptor = Acceptor(
            self._accepted, self._starved, per_turn=ACCEPTS, pause_s=ACCEPT_PAUSE_S, places=self._places
        )  # fmt: skip
        self._quiet = Quiet()
        self._loop: asyncio.AbstractEventLoop

    def listen(self, addresses: Sequence[str]) -> None:
        """Bind at every tls://host:port; call `accept` later. Raises ConfigError, and then leaves nothing bound."""
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            for text in addresses:
                self._listeners.append(undo.enter_context(_bind(text)))
            undo.pop_all()
        self.addresses = [listener.getsockname()[:2] for listener in self._listeners]
        if self.addresses:
            shown = [f"{host}:{port}" for host, port in self.addresses]
            log.info("sessions.listening", extra={"fields": {"addresses": shown}})

    def accept(self) -> None:
        """Start to accept, beginning with connections that arrived since `listen`."""
        self._acceptor.listen(self._listeners)

    def stop_listening(self) -> None:
        """Stop accepting, and abort handshakes. Idempotent."""
        self._acceptor.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._acceptor.cancel()

    def keys_changed(self) -> None:
        """Close the sessions of networks that are not served any more."""
        served = [credentials.admitting for credentials in self._credentials]
        for port in list(self._hub.ports):
            if port.context is not None and port.context not in served:
                port.abort("its network key was removed")

    def status(self) -> dict[str, object]:
        """Return listeners and refusals, ready for JSON."""
        return {
            "sessions_listening": [f"{host}:{port}" for host, port in self.addresses],
            "sessions_refused": dict(self.refusals),
        }

    def _accepted(self, connection: Accepted, address: Any) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._hub.has_room():
            connection.close()
            return
        task = self._acceptor.attach(
            connection,
            partial(self._hub.remote_port, self._channel_of),
            lambda err: self._refused(connection.host, refusal(err)),
            ssl=self._context,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        task.add_done_callback(lambda task: self._places.hold(connection))

    def _starved(self, err: OSError) -> None:
        self._refused("", f"not accepted: {err.strerror}")

    def _channel_of(self, context: ssl.SSLContext) -> bytes:
        for credentials in self._credentials:
            if credentials.admitting is context:
                return credentials.channel
        raise PeerProtocolError("the network key of this connection was removed from the relay")

    def _refused(self, host: str, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        fields = {"address": host, "reason": reason}
        self._quiet.warning(log, "session.refused", (reason, host), time.monotonic(), fields)


def _bind(text: str) -> socket.socket:
    try:
        return listen_at("listen", *parse_listen(text))
    except OSError as err:
        raise ConfigError(f"listen: cannot accept sessions at {text}: {err.strerror}") from err
