"""Clients of a relay over WebSocket: `browser` is a whole client, `Page` sends what a test gives it.

Both speak through the library `websockets`, as browsers do through theirs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Origin, Subprotocol
from websockets.uri import parse_uri

from iris import Client, ClientConfig, Keyring
from iris.core.session import Session
from iris.crypto.keys import ClusterKey
from iris.errors import RelayUnavailable
from iris.transport import Pump
from iris.wire import frames
from iris.wire.codec import decode_control, encode_control
from iris.wire.frames import Control
from iris.wire.kinds import PROTOCOL_MINOR
from support.waiting import PATIENCE_S

C = TypeVar("C", bound=Control)
IRIS = [Subprotocol("iris.1")]


def browser(
    url: str, keyring: Keyring, *, tls: ssl.SSLContext | None = None, origin: str | None = None, label: str = "browser",
    ticket: str = "",
) -> Client:  # fmt: skip
    """Return a client over WebSocket."""
    config = ClientConfig(label=label, reconnect_min_s=0.005, reconnect_max_s=0.05)
    connector = partial(_connect, url, tls, origin, ticket, _keys(keyring) if ticket else ())
    return Client(config, keyring, connector=connector)


def _keys(keyring: Keyring) -> list[ClusterKey]:
    return [key for keys in keyring.entries().values() for key in keys]


async def _connect(
    url: str, tls: ssl.SSLContext | None, origin: str | None, ticket: str, keys: Sequence[ClusterKey], factory: Callable[[], Any],
) -> None:  # fmt: skip
    uri = parse_uri(url)
    pump = cast(Pump[Session], factory())
    pump.session.over_web(ticket, keys)
    loop = asyncio.get_running_loop()
    opened = loop.create_future()
    protocol = ClientProtocol(
        uri, subprotocols=IRIS, max_size=None, origin=None if origin is None else Origin(origin)
    )  # fmt: skip
    await loop.create_connection(
        lambda: _Socket(pump, protocol, opened), uri.host, uri.port, ssl=tls,
        server_hostname="localhost" if tls is not None else None,
    )  # fmt: skip
    await opened


class _Socket(asyncio.Protocol, asyncio.Transport):
    """Towards the socket a protocol, towards the client's pump a transport."""

    def __init__(
        self, pump: Pump[Session], protocol: ClientProtocol, opened: asyncio.Future[None]
    ) -> None:  # fmt: skip
        super().__init__()
        self._pump = pump
        self._protocol = protocol
        self._opened = opened
        self._socket: asyncio.Transport
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        self._protocol.send_request(self._protocol.connect())
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                if self._protocol.state is State.OPEN:
                    self._pump.connection_made(self)
                    self._opened.set_result(None)
            elif isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._feed(event)
        self._flush()

    def _feed(self, frame: Frame) -> None:
        view = memoryview(frame.data)
        while view and self._pump.connected:
            room = self._pump.get_buffer(len(view))
            size = min(len(view), len(room))
            room[:size] = view[:size]
            self._pump.buffer_updated(size)
            view = view[size:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(RelayUnavailable("the upgrade was refused"))
        elif self._opened.exception() is None:
            self._pump.connection_lost(exc)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._socket.write(data)
            else:
                self._socket.close()

    def pause_writing(self) -> None:
        self._pump.pause_writing()

    def resume_writing(self) -> None:
        self._pump.resume_writing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_binary(bytes(data))
            self._flush()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._socket.is_closing()

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        self._socket.abort()


class Page:
    """One connection that has done the upgrade, and greets only if `greet` is called."""

    def __init__(self, url: str, *, origin: str | None = None) -> None:
        self._url = url
        self._origin = None if origin is None else Origin(origin)
        self._frames: deque[bytes] = deque()
        self.socket: ClientConnection

    async def __aenter__(self) -> Self:
        self.socket = await connect(
            self._url, subprotocols=IRIS, origin=self._origin, max_size=None, compression=None,
            ping_interval=None, close_timeout=PATIENCE_S,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.transport.abort()
        await self.socket.wait_closed()

    async def greet(self, **fields: Any) -> frames.Welcome:
        fields = {"minor": PROTOCOL_MINOR, "mono_us": 1, **fields}
        await self.say(frames.Hello(1, **fields))
        return await self.receive(frames.Welcome)

    async def say(self, *parts: Control | bytes) -> None:
        """Send frames in one message."""
        data = [part if isinstance(part, bytes) else encode_control(part) for part in parts]
        await self.socket.send(b"".join(data))

    async def receive(self, wanted: type[C]) -> C:
        """Return the next control frame of this type; raises ConnectionClosed at the end."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self._frames:
                    frame = self._frames.popleft()
                    body = decode_control(memoryview(frame), 0, len(frame))
                    if isinstance(body, wanted):
                        return body
                self._split(await self.socket.recv(decode=False))

    def _split(self, message: bytes) -> None:
        while message:
            size = 4 + int.from_bytes(message[:4], "little")
            assert size <= len(message), "a message ends within a frame"
            if message[4] < 0x40:
                self._frames.append(message[:size])
            message = message[size:]

    async def closed(self) -> tuple[int, str]:
        """Return code and reason with which the relay closes."""
        async with asyncio.timeout(PATIENCE_S):
            await self.socket.wait_closed()
        return self.socket.close_code or 0, self.socket.close_reason or ""
