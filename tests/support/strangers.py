"""Clients over TLS that do not behave."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from typing import Any

from support.web import Http


def trusting() -> ssl.SSLContext:
    """Return a context that trusts every server."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls


class Lingering:
    """A client over TLS that does not answer the server's end of TLS."""

    def __init__(self, plain: Http) -> None:
        self._plain = plain
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting().wrap_bio(self._in, self._out)

    async def say(self, data: bytes, *, until: bytes) -> None:
        """Send data after the handshake, and read until `until` was received."""
        await self._do(self._tls.do_handshake)
        self._tls.write(data)
        got = b""
        while until not in got:
            got += await self._do(self._tls.read)

    async def gone(self) -> None:
        """Return when the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._plain.reader.read(65_536):
                pass

    async def _do(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._plain.writer.write(self._out.read())
                if not (received := await self._plain.reader.read(65_536)):
                    raise ConnectionError("the server closed the connection") from None
                self._in.write(received)
            else:
                self._plain.writer.write(self._out.read())
                return done
