"""A client of HTTP for tests, which can send what no library would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h11
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


AMBIGUOUS = {
    "both framings": b"POST /body HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both framings, the other way": b"POST /body HTTP/1.1\r\nhost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": b"POST /body HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "LF after the first line": b"GET / HTTP/1.1\nhost: localhost\r\n\r\n",
    "LF after a header": b"GET / HTTP/1.1\r\nhost: localhost\nx: y\r\n\r\n",
    "LF at the end": b"GET / HTTP/1.1\r\nhost: localhost\r\n\n",
    "LF alone": b"GET / HTTP/1.1\nhost: localhost\n\n",
    "CR in a header": b"GET / HTTP/1.1\r\nhost: localhost\r\nx: y\rz: w\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nhost: localhost\r\nx: y\r\n z\r\n\r\n",
    "a folded coding": b"POST /body HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding:\r\n\tchunked\r\n\r\n0\r\n\r\n",
}  # fmt: skip
"""Requests that a proxy may read in another way than the server behind it."""


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


def certificate(directory: Path, name: str = "localhost") -> tuple[Path, Path, bytes]:
    """Write a web certificate and its key; return their paths, and the certificate as DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    start = datetime(2020, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), start, start.replace(year=2099))  # fmt: skip
    made = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    cert, private = directory / "web.crt", directory / "web.key"
    cert.write_bytes(made.public_bytes(Encoding.PEM))
    private.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    return cert, private, made.public_bytes(Encoding.DER)
