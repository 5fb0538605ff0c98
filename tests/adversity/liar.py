"""A lying relay, which answers like a relay unless a script does something else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from adversity.kit import data_frame
from support.relays import KEY

import iris
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Sealer
from iris.wire import frames
from iris.wire.codec import (
    END,
    END_AT,
    HOP,
    answer_suffix,
    decode_control,
    encode_control,
    metadata_prefix,
)
from iris.wire.frames import Control
from iris.wire.kinds import Kind

Script = Callable[["Peer", Control | bytes], Awaitable[None] | None]
"""A function that gets each frame of a client: a decoded control frame, or a whole data frame."""

WELCOME = frames.Welcome(1, 0, b"R" * 16, b"S" * 8, b"C" * 32, 1 << 20)
SENDER = b"\xa5" * 16


class Peer:
    """The connection of one client at the lying relay."""

    def __init__(self, writer: asyncio.StreamWriter, number: int) -> None:
        self.number = number
        """Number of the connection, from 1."""
        self.declared: dict[int, frames.Declare] = {}
        """The client's aliases and their declarations."""
        self.got: list[Control | bytes] = []
        self.sealers: dict[bytes, Sealer] = {}
        self._writer = writer

    def send(self, *parts: Control | bytes) -> None:
        """Send control frames and bytes."""
        if not self._writer.is_closing():
            self._writer.write(
                b"".join(p if isinstance(p, bytes) else encode_control(p) for p in parts)
            )

    def hang_up(self) -> None:
        """End the connection."""
        self._writer.close()

    def count(self, kind: int) -> int:
        """Return how many data frames of this kind were received."""
        return sum(isinstance(frame, bytes) and frame[4] == kind for frame in self.got)

    def sealed(
        self, kind: int, name: str, payload: bytes, *, alias: int = 0, hop: int = 0, first: int = 0,
        suffix: bytes = b"", key: ClusterKey = KEY, true: bool = True,
    ) -> bytes:  # fmt: skip
        """Return a data frame of a holder of `key`, with a damaged seal unless `true`."""
        sealer = self.sealers.setdefault(key.key_id, Sealer(key, SENDER))
        plain = (1).to_bytes(4, "little") + bytes(8) + len(payload).to_bytes(4, "little") + payload
        end = END.pack(time.time_ns() // 1000, 0, 1, first)
        prefix = metadata_prefix(kind, name, key.key_id, SENDER)
        body = bytearray(sealer.seal(plain, prefix + end + suffix))
        body[-1] ^= not true
        return data_frame(kind, bytes(body), alias=alias, hop=hop, end=end)

    def declare(
        self, alias: int, kind: int, name: str, *, key: ClusterKey = KEY, member: int = 0
    ) -> frames.Declare:
        """Return a DECLARE of `SENDER`."""
        return frames.Declare(alias, kind, name, key.key_id, SENDER, member=member)

    def suffix(self, request: bytes) -> bytes:
        """Return the data that binds an answer to this request, which only a key holder can know."""
        alias = HOP.unpack_from(request)[3]
        header = request[END_AT + 24 :]
        kid_bytes, ctr = 1 + (header[0] >> 4 & 7), header[0] & 15
        at = 1 + kid_bytes
        counter = ctr if ctr < 8 else int.from_bytes(header[at : at + (ctr & 7) + 1])
        return answer_suffix(self.declared[alias].sender_id, counter)


def hop_of(frame: bytes) -> int:
    """Return the hop id of a data frame."""
    return int(HOP.unpack_from(frame)[4])


class Liar:
    """A Unix socket server that greets and acknowledges, and leaves everything else to `script`."""

    def __init__(
        self, directory: Path, script: Script, *, greeting: Control | bytes | None = WELCOME
    ) -> None:
        self.path = directory / "liar.sock"
        self.peers: list[Peer] = []
        self._script = script
        self._greeting = greeting
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._server.close()
        for peer in self.peers:
            peer.hang_up()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def client(self, *, connect_timeout_s: float = 0.5) -> iris.Client:
        """Return a client of this relay."""
        config = iris.ClientConfig(
            relay=self.path,
            connect_timeout_s=connect_timeout_s,
            drain_timeout_s=connect_timeout_s,
            reconnect_min_s=0.01,
        )
        return iris.connect(config=config, keyring=iris.Keyring.single(KEY))

    @property
    def last(self) -> Peer:
        """The latest connection."""
        return self.peers[-1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        peer = Peer(writer, len(self.peers) + 1)
        self.peers.append(peer)
        try:
            while True:
                head = await reader.readexactly(4)
                frame = head + await reader.readexactly(int.from_bytes(head, "little"))
                await self._heard(peer, frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client left
        finally:
            writer.close()

    async def _heard(self, peer: Peer, frame: bytes) -> None:
        body: Control | bytes = frame
        if frame[4] < Kind.REQUEST:
            body = decode_control(memoryview(frame), 0, len(frame))
        peer.got.append(body)
        match body:
            case frames.Hello():
                if self._greeting is not None:
                    peer.send(self._greeting)
            case frames.Declare():
                peer.declared[body.alias] = body
        answer = self._script(peer, body)
        if answer is not None:
            await answer


def acknowledging(peer: Peer, body: Control | bytes) -> None:
    """A script that answers control frames as a relay does."""
    match body:
        case frames.Join():
            peer.send(frames.Ack(body.id, "", 7))
        case frames.Subscribe() | frames.Unsubscribe() | frames.Leave():
            peer.send(frames.Ack(body.id))
        case frames.Ping():
            peer.send(frames.Pong(body.id))
        case frames.Bye():
            peer.send(frames.Bye())
            peer.hang_up()


def silent(peer: Peer, body: Control | bytes) -> None:
    """A script that never sends anything."""
