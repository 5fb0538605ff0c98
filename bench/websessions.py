"""Sessions of browsers, as `bench/web.py` opens them: thin clients over the library `websockets`, many in one process.

    python bench/websessions.py '{"system": "iris", "url": "ws://127.0.0.1:7432", "count": 500, ...}'

Each session does what its protocol asks for, subscribes, and then counts messages without opening or parsing them, for
all systems alike. So what a run costs is what the server costs. Two numbers are shared with the publisher in a file:
how many deliveries this process has counted, and when each message was sent.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import signal
import ssl
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import harness
import uvloop
from harness import Result
from strangers import SPARE_DESCRIPTORS, allow_descriptors
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

SLOTS: Final = 64
"""Counters at the begin of the shared file: one for each process with sessions."""
MAX_MESSAGES: Final = 1 << 20
TOPIC: Final = "news.all"
SIZE: Final = 128
NATS_HEAD: Final = b"MSG news.all 1 128\r\n"
OPENING: Final = 50
"""Sessions of one process that are opening at a time."""
COUNT: Final = struct.Struct("<I")
COUNT_AT: Final = 38
"""Where the number of messages stands in a PUBLISH frame of Iris (docs/protocol.md, §6)."""


class Shared:
    """Counters and times in a file that all processes of a run have mapped."""

    BYTES: Final = 8 * (SLOTS + MAX_MESSAGES)

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.BYTES)
        numbers = memoryview(self._map).cast("q")
        self.deliveries = numbers[:SLOTS]
        self.sent_ns = numbers[SLOTS:]
        """Number of a message -> CLOCK_MONOTONIC when it was published."""

    @classmethod
    def create(cls, path: Path) -> Path:
        with path.open("wb") as file:
            file.truncate(cls.BYTES)
        return path


class Counter:
    """What all sessions of this process have received."""

    def __init__(self, shared: Shared, slot: int) -> None:
        self._shared = shared
        self._slot = slot
        self._total = 0
        self.delays_ns: list[int] | None = None

    def take(self, first: int, count: int) -> None:
        """Count messages `first` and the following ones of one session."""
        self._total += count
        self._shared.deliveries[self._slot] = self._total
        if self.delays_ns is not None:
            now_ns = time.monotonic_ns()
            sent_ns = self._shared.sent_ns
            self.delays_ns += [now_ns - sent_ns[number] for number in range(first, first + count)]


class Session(asyncio.Protocol):
    """One session: the upgrade, then what the subclass does, until `opened` is set to how it subscribed."""

    subprotocols: tuple[Subprotocol, ...] = ()

    def __init__(self, url: str, counter: Counter) -> None:
        self._protocol = ClientProtocol(parse_uri(url), subprotocols=list(self.subprotocols) or None, max_size=None)  # fmt: skip
        self._counter = counter
        self._parts: list[bytes] = []
        self.messages = 0
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = ""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.send_request(self._protocol.connect())
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                if event.opcode in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
                    self._parts.append(event.data)
                    if event.fin:
                        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                        self._parts.clear()
                        self.received(whole)
            elif isinstance(event, Response):
                self.upgraded()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = str(exc or self._protocol.close_reason or "closed")
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(self.lost))

    def send(self, data: bytes) -> None:
        self._protocol.send_binary(data)

    def count(self, messages: int) -> None:
        self._counter.take(self.messages, messages)
        self.messages += messages

    def subscribed(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def close(self) -> None:
        self._transport.abort()

    def upgraded(self) -> None:
        """Send what the protocol begins with."""

    def received(self, message: bytes) -> None:
        """Handle a message."""
        raise NotImplementedError

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)


class IrisSession(Session):
    subprotocols = (Subprotocol("iris.1"),)

    def __init__(self, url: str, counter: Counter, key: Any) -> None:
        super().__init__(url, counter)
        self._key = key

    def upgraded(self) -> None:
        from iris.wire import frames
        from iris.wire.kinds import PROTOCOL_MINOR

        self._say(frames.Hello(1, PROTOCOL_MINOR, mono_us=time.monotonic_ns() // 1000))

    def received(self, message: bytes) -> None:
        from iris.wire import frames
        from iris.wire.codec import decode_control
        from iris.wire.kinds import Kind

        while message:
            size = 4 + int.from_bytes(message[:4], "little")
            kind = message[4]
            if kind == Kind.PUBLISH:
                self.count(COUNT.unpack_from(message, COUNT_AT)[0])
            elif kind in (Kind.WELCOME, Kind.ACK, Kind.ERROR, Kind.GAP):
                answer = decode_control(memoryview(message), 0, size)
                if isinstance(answer, frames.Welcome):
                    signature = self._key.sign_proof(
                        relay_id=answer.relay_id, session_id=answer.session_id, challenge=answer.challenge
                    )  # fmt: skip
                    self._say(
                        frames.Prove(0, self._key.public_key, signature),
                        frames.Subscribe(1, TOPIC, [self._key.key_id]),
                    )
                elif isinstance(answer, frames.Ack) and not answer.error:
                    self.subscribed()
                else:
                    self.lost = str(answer)
            message = message[size:]

    def _say(self, *parts: Any) -> None:
        from iris.wire.codec import encode_control

        self.send(b"".join(map(encode_control, parts)))


class SocketIoSession(Session):
    """Engine.IO 4: "0" opens, "2" pings, "3" answers; Socket.IO 5: "40" connects, "42" is an event."""

    def received(self, message: bytes) -> None:
        if message.startswith(b"42"):
            self.count(1)
        elif message.startswith(b"40"):
            self.subscribed()
        elif message.startswith(b"0"):
            self._protocol.send_text(b"40")
        elif message == b"2":
            self._protocol.send_text(b"3")

    def send(self, data: bytes) -> None:
        self._protocol.send_text(data)


class NatsSession(Session):
    """Every message has the same length, so that bytes can be counted."""

    def __init__(self, url: str, counter: Counter) -> None:
        super().__init__(url, counter)
        self._bytes = 0

    def received(self, message: bytes) -> None:
        if self.opened.done():
            self._bytes += len(message)
            each = len(NATS_HEAD) + SIZE + 2
            if whole := self._bytes // each:
                self._bytes -= whole * each
                self.count(whole)
        elif message.startswith(b"INFO"):
            hello = b'CONNECT {"verbose":false,"pedantic":false,"lang":"bench","version":"1"}'
            self.send(hello + b"\r\nSUB " + TOPIC.encode() + b" 1\r\nPING\r\n")
        elif b"PONG" in message:
            self.subscribed()


def session_of(given: Result, counter: Counter) -> Callable[[], Session]:
    """Return what makes a session of the system."""
    url = given["url"]
    if given["system"] == "socketio":
        return lambda: SocketIoSession(url, counter)
    if given["system"] == "nats":
        return lambda: NatsSession(url, counter)
    from iris.crypto.keys import ClusterKey

    key = ClusterKey.parse(given["key"])
    return lambda: IrisSession(url, counter, key)


async def hold(given: Result) -> Result:
    """Open sessions, say so, count until stopped."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    counter = Counter(Shared(given["shared"]), given["slot"])
    if given["delays"]:
        counter.delays_ns = []
    made = session_of(given, counter)
    uri = parse_uri(given["url"])
    tls = ssl.create_default_context(cafile=given["ca"]) if given["ca"] else None
    sessions: list[Session] = []
    room = asyncio.Semaphore(OPENING)

    async def open_one() -> None:
        async with room, asyncio.timeout(given["limit_s"]):
            _, session = await loop.create_connection(made, uri.host, uri.port, ssl=tls)
            sessions.append(session)
            await session.opened

    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(given["count"]):
            group.create_task(open_one())
    opened_s = time.monotonic() - begun_s
    harness.say_ready()
    await stop.wait()
    lost = [session.lost for session in sessions if session.lost]
    figures: Result = {
        "opened_s": opened_s,
        "lost": lost[:3],
        "received": sum(each.messages for each in sessions),
        "fewest": min(each.messages for each in sessions),
    }
    if counter.delays_ns:
        figures["delays_us"] = [delay // 1000 for delay in counter.delays_ns]
    for session in sessions:
        session.close()
    return figures


def main() -> None:
    given: Result = json.loads(sys.argv[1])
    allow_descriptors(given["count"] + SPARE_DESCRIPTORS)
    signal.alarm(int(given["limit_s"]))  # ends this role even if the bench is killed
    harness.report("sessions", uvloop.run(hold(given)))


if __name__ == "__main__":
    main()
