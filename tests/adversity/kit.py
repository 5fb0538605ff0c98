"""A session that sends any frames that a test gives it, and honest clients beside it.

with Daemon(tmp_path) as relay:
    async with Wire(relay.socket) as wire:
        await wire.greet()
        await wire.send(frame)
        assert "alias 7" in await wire.error()
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from support.relays import client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Sealer
from iris.wire import frames
from iris.wire.codec import END, HOP, decode_control, encode_control, metadata_prefix
from iris.wire.frames import Control
from iris.wire.kinds import Kind

OTHER_KEY = ClusterKey(bytes(range(1, 33)))
"""The key of offenders, which honest clients do not have."""
C = TypeVar("C", bound=Control)


class Wire:
    """A session under a test's control: it sends whole frames, or any bytes."""

    def __init__(self, path: Path, key: ClusterKey = OTHER_KEY) -> None:
        self.path = path
        self.key = key
        self.sender_id = b"\x5a" * 16
        self.sealer = Sealer(key, self.sender_id)
        self.welcome: frames.Welcome
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_unix_connection(self.path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.writer.transport.abort()
        try:
            await self.writer.wait_closed()
        except OSError:
            return  # the relay may have closed it: many tests provoke that

    async def greet(self) -> Self:
        """Send HELLO, and return after WELCOME."""
        await self.send(frames.Hello(1, 0, "offender", os.getpid()))
        self.welcome = await self.expect(frames.Welcome)
        return self

    async def prove(self, key: ClusterKey | None = None) -> Self:
        """Greet, and prove a key."""
        await self.greet()
        await self.send(self.proof(key or self.key))
        return self

    def proof(self, key: ClusterKey) -> frames.Prove:
        """Return a PROVE that is valid in this session."""
        signature = key.sign_proof(
            relay_id=self.welcome.relay_id,
            session_id=self.welcome.session_id,
            challenge=self.welcome.challenge,
        )
        return frames.Prove(0, key.public_key, signature)

    async def send(self, *parts: Control | bytes) -> None:
        """Send control frames and bytes in order; ignore that the relay has closed the connection meanwhile."""
        try:
            for part in parts:
                self.writer.write(part if isinstance(part, bytes) else encode_control(part))
            await self.writer.drain()
        except ConnectionError:
            return  # what the relay sent before can still be read

    def stop_reading(self) -> None:
        """Stop reading from the socket."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport

    def read_again(self) -> None:
        """Read from the socket again."""
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]  # a socket's transport

    async def frame(self) -> tuple[int, bytes]:
        """Return (kind, whole frame) of the next frame; raises EOFError at the end."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                head = await self.reader.readexactly(4)
                body = await self.reader.readexactly(int.from_bytes(head, "little"))
            except (asyncio.IncompleteReadError, ConnectionError) as err:
                raise EOFError("the relay closed the connection") from err
        return body[0], head + body

    async def expect(self, wanted: type[C]) -> C:
        """Return the next control frame of this type, and ignore frames before it."""
        while True:
            kind, frame = await self.frame()
            if kind < Kind.REQUEST:
                body = decode_control(memoryview(frame), 0, len(frame))
                if isinstance(body, wanted):
                    return body

    async def data(self, wanted: int) -> bytes:
        """Return the next data frame of this kind."""
        while True:
            kind, frame = await self.frame()
            if kind == wanted:
                return frame

    async def error(self) -> str:
        """Return the text of the relay's ERROR, after checking that no frame follows it."""
        detail = (await self.expect(frames.Error)).detail
        await self.gone()
        return detail

    async def gone(self) -> None:
        """Return when the relay has closed the connection."""
        try:
            while True:
                await self.frame()
        except EOFError:
            return

    async def alive(self) -> None:
        """Raise EOFError if the relay does not answer any more, because of an offence before."""
        await self.send(frames.Ping(4242))
        assert (await self.expect(frames.Pong)).id == 4242

    async def join(self, name: str, kind: int, *, concurrency: int = 8, limit_bytes: int = 1 << 20) -> int:  # fmt: skip
        """Join a cluster, and return the member's number."""
        serving = {kind: frames.Serving(concurrency, limit_bytes)}
        await self.send(frames.Join(77, name, [self.key.key_id], serving))
        ack = await self.expect(frames.Ack)
        assert not ack.error
        return ack.member

    def declare(self, alias: int, kind: int, name: str) -> frames.Declare:
        """Return a DECLARE under our key and sender id."""
        return frames.Declare(alias, kind, name, self.key.key_id, self.sender_id)

    def sealed(
        self, kind: int, name: str, payload: bytes = b"x", *, alias: int = 0, hop: int = 0, flags: int = 0,
        count: int = 1, first: int = 0, deadline: int = 0, sent_us: int | None = None, suffix: bytes = b"",
    ) -> bytes:  # fmt: skip
        """Return a data frame that its receiver can open."""
        plain = (1).to_bytes(4, "little") + bytes(8) + len(payload).to_bytes(4, "little") + payload
        end = END.pack(time.time_ns() // 1000 if sent_us is None else sent_us, 0, count, first)
        prefix = metadata_prefix(kind, name, self.key.key_id, self.sender_id)
        body = self.sealer.seal(plain, prefix + end + suffix)
        return data_frame(kind, body, alias=alias, hop=hop, flags=flags, deadline=deadline, end=end)


def data_frame(
    kind: int, body: bytes = b"", *, alias: int = 0, hop: int = 0, flags: int = 0, deadline: int = 0,
    end: bytes = END.pack(0, 0, 1, 0),
) -> bytes:  # fmt: skip
    """Return a data frame with end fields."""
    return HOP.pack(22 + len(end) + len(body), kind, flags, alias, hop, deadline) + end + body


def control_frame(kind: int, body: bytes) -> bytes:
    """Return a control frame around any bytes."""
    return (2 + len(body)).to_bytes(4, "little") + bytes((kind, 0)) + body


class Neighbours:
    """Two honest clients: one serves `echo`, the other calls it."""

    def __init__(self, member: iris.Client, caller: iris.Client) -> None:
        self.member = member
        self.caller = caller
        self.asked = 0
        self.received: list[bytes] = []

    async def check(self) -> None:
        """Check that requests, pushes and publications work, and that the relay's account balances."""
        self.asked += 1
        number = b"%d" % self.asked
        assert await self.caller.request("echo", number, timeout=PATIENCE_S) == number
        await self.caller.publish("news.echo", number)
        await eventually(lambda: self.received and self.received[-1] == number)
        assert len(self.received) == self.asked
        assert not self.caller.losses
        assert not self.member.losses

    async def status(self) -> dict[str, Any]:
        """Return the relay's status."""
        return await self.caller.status(timeout=PATIENCE_S)

    async def settled(self, sessions: int) -> dict[str, Any]:
        """Return the status when only `sessions` sessions are left and no message is held."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await self.status()
                if len(status["sessions"]) == sessions and not status["accounts"]["held"]:
                    return status
                await asyncio.sleep(0.02)


@asynccontextmanager
async def neighbours(relay: Path) -> AsyncIterator[Neighbours]:
    """Attach honest clients to the relay at this socket."""
    service = iris.Service("echo")

    @service.on_request
    def echo(payload: bytes) -> bytes:
        return payload

    async with client(relay) as member, client(relay) as caller:
        both = Neighbours(member, caller)
        received = both.received

        def receive(message: iris.Message) -> None:
            received.append(message.payload)

        async with member.serve(service), member.subscribe("news.>", receive):
            yield both


def unaccounted(status: dict[str, Any]) -> int:
    """Return the number of messages that the relay's account does not explain, which should be 0."""
    account = status["accounts"]
    leaving = [account[name] for name in ("out", "unwanted", "refused", "expired", "held")]
    return account["in"] + account["copied"] - sum(leaving) - sum(account["dropped"].values())  # type: ignore[no-any-return]  # JSON


def tables(status: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a status that must be the same after an offender has left."""
    sessions = [
        # An honest client proves its keys when it needs them.
        {name: value for name, value in session.items() if name != "keys"}
        for session in status["sessions"]
    ]
    return {"clusters": status["clusters"], "sessions": sessions}
