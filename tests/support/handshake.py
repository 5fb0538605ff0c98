"""TLS handshakes in memory."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Meeting:
    """The outcome of a handshake, after each side could read all that the other sent."""

    client: ssl.SSLObject
    server: ssl.SSLObject
    client_error: ssl.SSLError | None = None
    server_error: ssl.SSLError | None = None

    @property
    def up(self) -> bool:
        return self.client_error is None and self.server_error is None

    @property
    def alert(self) -> str:
        """Return OpenSSL's name of the alert that the client received."""
        assert self.client_error is not None
        return self.client_error.reason


def shake(
    client_context: ssl.SSLContext,
    server_context: ssl.SSLContext,
    name: str | None,
    *,
    session: ssl.SSLSession | None = None,
    rewrite: Callable[[bytes], bytes] = bytes,
) -> Meeting:
    """Let two contexts shake hands in memory; `rewrite` changes what the client sends."""
    to_client, to_server, from_client = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, from_client, server_hostname=name, session=session)
    met = Meeting(client, server_context.wrap_bio(to_server, to_client, server_side=True))
    # Three flights, and one for an alert.
    for _ in range(4):
        met.client_error = met.client_error or step(met.client)
        to_server.write(rewrite(from_client.read()))
        met.server_error = met.server_error or step(met.server)
    return met


def step(side: ssl.SSLObject) -> ssl.SSLError | None:
    try:
        side.do_handshake()
        side.read(1)
    except ssl.SSLWantReadError:
        return None
    except ssl.SSLError as error:
        return error
    raise AssertionError("application data, which nobody sent")
