"""A connection to a relay that sends any bytes that a test gives it."""

from __future__ import annotations

import asyncio
import ssl
from typing import Self, TypeVar

from iris.wire.codec import decode_control, encode_control
from iris.wire.frames import Control
from support.waiting import PATIENCE_S

C = TypeVar("C", bound=Control)


class Connection:
    """A connection from the address `host` to `port` of 127.0.0.1. With a context: TLS, to server name `name`."""

    def __init__(
        self, port: int, context: ssl.SSLContext | None, name: str, host: str = "127.0.0.1"
    ) -> None:
        self.port = port
        self.context = context
        self.name = name
        self.host = host
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        name = self.name if self.context is not None else None
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.context, server_hostname=name, local_addr=(self.host, 0)
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
        try:
            await self.writer.wait_closed()
        except OSError:
            return  # the relay may have closed it: many tests provoke that

    async def say(self, *parts: Control | bytes) -> None:
        try:
            for part in parts:
                self.writer.write(part if isinstance(part, bytes) else encode_control(part))
            await self.writer.drain()
        except OSError:
            return  # what the relay sent before can still be read

    async def receive(self, wanted: type[C]) -> C:
        """Return the next control frame of this type; raises EOFError at the end."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    head = await self.reader.readexactly(4)
                    frame = head + await self.reader.readexactly(int.from_bytes(head, "little"))
                except (asyncio.IncompleteReadError, OSError) as err:
                    raise EOFError from err
                body = decode_control(memoryview(frame), 0, len(frame))
                if isinstance(body, wanted):
                    return body

    async def gone(self) -> None:
        """Return once the relay has closed the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while await self.reader.read(65_536):
                    pass
            except OSError:
                return


def blind(alpn: str) -> ssl.SSLContext:
    """Return a context that trusts every server and has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    return context
