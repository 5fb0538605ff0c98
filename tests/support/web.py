"""A client of HTTP for tests, which can send what no library would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import h11


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """One connection. `send` and `answer` can be used apart."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._state = h11.Connection(h11.CLIENT)

    def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send a request whole."""
        host = self.writer.get_extra_info("peername")
        given = {
            "host": f"{host[0]}:{host[1]}",
            **{name.lower(): text for name, text in headers.items()},
        }
        if body or method == "POST":
            given.setdefault("content-length", str(len(body)))
        request = h11.Request(method=method, target=target, headers=list(given.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self.writer.write(self._state.send(event) or b"")

    async def event(self) -> Any:
        """Return the next event of the answer."""
        while (event := self._state.next_event()) is h11.NEED_DATA:
            self._state.receive_data(await self.reader.read(65_536))
        return event

    async def start(self) -> Answer:
        """Return the head of the answer."""
        head = await self.event()
        assert isinstance(head, h11.Response), head
        return Answer(
            head.status_code,
            {name.decode(): text.decode("latin-1") for name, text in head.headers},
            b"",
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the body, as it arrives."""
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data), event
            yield bytes(event.data)

    async def answer(self) -> Answer:
        """Return a whole answer; the connection can be used again."""
        answer = await self.start()
        async for chunk in self.chunks():
            answer.body += chunk
        with contextlib.suppress(h11.LocalProtocolError):  # the server closes the connection
            self._state.start_next_cycle()
        return answer

    async def ended(self) -> bool:
        """Return whether the server has closed the connection; waits until it has, or sends something."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


@contextlib.asynccontextmanager
async def http(address: str) -> AsyncIterator[Http]:
    """Connect to HOST:PORT."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        yield Http(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(
    address: str, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b"", token: str = "",
) -> Answer:  # fmt: skip
    """Send one request over a connection of its own, and return the answer."""
    bearer = {"authorization": f"Bearer {token}"} if token else {}
    async with http(address) as connection:
        connection.send(method, target, {**bearer, **(headers or {})}, body)
        return await connection.answer()
