"""A floor without messaging: bare asyncio streams over a Unix socket, with a length before every message.

The receiver listens. A burst is one write; `drain` is awaited after each, so a slow receiver slows down the sender.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import count
from pathlib import Path
from struct import Struct
from typing import Any

from peers import TOPIC, Peer, Publisher, Requester, Sender, Took, background

HEAD = Struct("!I")
ECHO = "echo"
STREAM = "stream"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class StreamsPublisher(Publisher):
    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self._writers = writers

    async def burst(self, payloads: Sequence[bytes]) -> None:
        data = b"".join([part for payload in payloads for part in framed(payload)])
        for writer in self._writers:
            writer.write(data)
        for writer in [*self._writers]:
            try:
                await writer.drain()
            except ConnectionError:  # a subscriber that leaves does not affect the others
                self._writers.remove(writer)

    async def flush(self) -> None:
        for writer in self._writers:
            await emptied(writer)


class StreamsRequester(Requester):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._reading = background(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for frame in frames(reader):
            answer = self._waiting.pop(frame[: HEAD.size])
            if not answer.cancelled():
                answer.set_result(frame[HEAD.size :])

    async def request(self, payload: bytes) -> bytes:
        number = HEAD.pack(next(self._numbers))
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(b"".join(framed(number + payload)))
        await self._writer.drain()
        return await answer


class StreamsSender(Sender):
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, payload: bytes) -> None:
        self._writer.writelines(framed(payload))
        await self._writer.drain()

    async def finish(self) -> None:
        await emptied(self._writer)


class Streams(Peer):
    name = "streams"

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._serving: list[asyncio.Task[None]] = []

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        writers = []
        for path in self.directory.glob(f"{topic}-*.socket"):
            try:
                _, writer = await asyncio.open_unix_connection(path)
            except ConnectionRefusedError:
                path.unlink()  # left by a subscriber of an earlier run
                continue
            writers.append(writer)
        return StreamsPublisher(writers)

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        await self._take(f"{topic}-{os.getpid()}", took)

    async def replier(self) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async for frame in frames(reader):
                writer.write(b"".join(framed(frame)))
                await writer.drain()

        await self._listen(ECHO, echo)

    async def requester(self) -> Requester:
        return StreamsRequester(*await asyncio.open_unix_connection(self._path(ECHO)))

    async def receiver(self, took: Took) -> None:
        await self._take(STREAM, took)

    async def sender(self) -> Sender:
        _, writer = await asyncio.open_unix_connection(self._path(STREAM))
        return StreamsSender(writer)

    async def _take(self, name: str, took: Took) -> None:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async for frame in frames(reader):
                took(frame)

        await self._listen(name, take)

    async def _listen(self, name: str, serve: Serve) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._serving.append(background(serve(reader, writer)))

        self._server = await asyncio.start_unix_server(accept, self._path(name))

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.socket"


def framed(payload: bytes) -> tuple[bytes, bytes]:
    return HEAD.pack(len(payload)), payload


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield messages until the other end closes."""
    read, size, unpack = reader.readexactly, HEAD.size, HEAD.unpack
    while True:
        try:
            head = await read(size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return
        yield await read(unpack(head)[0])


async def emptied(writer: asyncio.StreamWriter) -> None:
    """Return when everything was passed to the kernel."""
    writer.transport.set_write_buffer_limits(
        high=0
    )  # with this limit, `drain` waits for the last byte
    await writer.drain()
    writer.transport.set_write_buffer_limits()


PEER = Streams
