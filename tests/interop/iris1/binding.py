"""A client for the relay protocol of the first Iris, v1.0-draft2, written from its description and modelled on
its Go binding.

It has no timers: it waits for everything that a relay owes it. Frames that would block or crash the binding (a reply
without a request, a confirmation without a tunnel, an end without CLOSE) are noted in `broken`, and `close` raises
them. Limits of threads, memory and expiry belong to the binding, so they are applied here and not by the relay.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 20.0
WINDOW = 64 << 20
WITHOUT_CLOSE = "the connection ended without CLOSE"


class TimedOut(Exception):
    """ErrTimeout."""


class Closed(Exception):
    """ErrClosed."""


class Remote(Exception):
    """RemoteError, with the bytes of the fault."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self.text = text


class Denied(Exception):
    """A DENY of the relay, with its reason."""


def number(value: int) -> bytes:
    out = b""
    while True:
        value, low = value >> 7, value & 127
        out += bytes([low | (128 if value else 0)])
        if not value:
            return out


def blob(data: bytes) -> bytes:
    return number(len(data)) + data


def hello(
    cluster: bytes = b"", *, magic: bytes = b"iris-client-magic", version: bytes = b"v1.0-draft2"
) -> bytes:
    return b"\x00" + blob(magic) + blob(version) + blob(cluster)


@dataclass
class Limits:
    threads: int = 16
    memory: int = 64 << 20


class Pool:
    """The binding's thread pool: `threads` tasks at once, `memory` bytes queued; the rest is dropped."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.queue: deque[tuple[int, Callable[[], Awaitable[None]]]] = deque()
        self.held = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0

    def put(self, size: int, work: Callable[[], Awaitable[None]]) -> None:
        if self.held + size > self.limits.memory:
            self.dropped += 1
            return
        self.held += size
        self.queue.append((size, work))
        if len(self.tasks) < self.limits.threads:
            self.tasks.add(asyncio.create_task(self._run()))

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while self.queue:
                size, work = self.queue.popleft()
                self.held -= size
                await work()
        finally:
            self.tasks.discard(task)

    def stop(self) -> None:
        for task in list(self.tasks):
            task.cancel()


class Handler:
    """ServiceHandler; tests override the methods that they need."""

    async def broadcast(self, message: bytes) -> None:
        raise NotImplementedError

    async def request(self, request: bytes) -> bytes:
        raise NotImplementedError

    async def tunnel(self, tunnel: Tunnel) -> None:
        raise NotImplementedError

    def drop(self, reason: str) -> None:
        raise AssertionError(f"HandleDrop({reason!r})")


class Binding:
    """A connection. With a cluster and a handler it is a service."""

    def __init__(
        self, cluster: str = "", handler: Handler | None = None, *, broadcasts: Limits | None = None,
        requests: Limits | None = None,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.handler = handler
        self.casts = Pool(broadcasts or Limits())
        self.asks = Pool(requests or Limits())
        self.topics: dict[bytes, tuple[Callable[[bytes], Awaitable[None]], Pool]] = {}
        self.replies: dict[int, asyncio.Future[bytes]] = {}
        self.building: dict[int, asyncio.Future[Tunnel]] = {}
        self.tunnels: dict[int, Tunnel] = {}
        self.next_request = 0
        self.next_tunnel = 0
        self.broken: list[str] = []
        self.closed: str | None = None
        self.ended = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.stray_events = 0
        self.clock: Callable[[], float] = time.monotonic
        """Clock in seconds, for the expiry of queued requests."""
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    # -- life ------------------------------------------------------------------------------------------------

    async def open(self, port: int) -> Binding:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(hello(self.cluster.encode()))
        op = await self.byte()
        magic = await self.blob()
        assert magic == b"iris-relay-magic"
        text = (await self.blob()).decode()
        if op == 1:
            await self.hang_up()
            raise Denied(text)
        assert (op, text) == (0, "v1.0-draft2")
        self.spawn(self._receive())
        return self

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        """Send CLOSE and wait for the relay's. Raises the first fault that would have broken the binding."""
        self.write(b"\x02")
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()
        await self.hang_up()
        assert self.closed == "", f"closed with {self.closed!r}"
        assert not self.broken, self.broken

    async def hang_up(self) -> None:
        """Close the socket without CLOSE."""
        for task in list(self.tasks):
            task.cancel()
        for pool in (self.casts, self.asks, *(pool for _, pool in self.topics.values())):
            pool.stop()
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            return

    def abort(self) -> None:
        self.writer.transport.abort()

    # -- calls -----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self.ended.is_set():
            raise Closed
        self.writer.write(data)

    def broadcast(self, cluster: str, message: bytes) -> None:
        self.write(b"\x03" + blob(cluster.encode()) + blob(message))

    def publish(self, topic: str, event: bytes) -> None:
        self.write(b"\x08" + blob(topic.encode()) + blob(event))

    async def request(self, cluster: str, request: bytes, timeout_ms: int) -> bytes:
        """Wait for the relay's answer. There is no timer here, except the time limit of the test."""
        id, self.next_request = self.next_request, self.next_request + 1
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.replies[id] = waiter
        self.write(
            b"\x04" + number(id) + blob(cluster.encode()) + blob(request) + number(timeout_ms)
        )
        async with asyncio.timeout(PATIENCE_S):
            return await waiter

    async def settled(self) -> None:
        """Return when the relay has handled all frames sent before."""
        with suppress(TimedOut):
            await self.request("nobody-is-there", b"x", 1000)

    def subscribe(
        self, topic: str, receive: Callable[[bytes], Awaitable[None]], limits: Limits | None = None
    ) -> None:
        assert topic.encode() not in self.topics, "already subscribed"
        self.topics[topic.encode()] = receive, Pool(limits or Limits())
        self.write(b"\x06" + blob(topic.encode()))

    def unsubscribe(self, topic: str) -> None:
        self.write(b"\x07" + blob(topic.encode()))
        del self.topics[topic.encode()]

    async def tunnel(self, cluster: str, timeout_ms: int) -> Tunnel:
        id, self.next_tunnel = self.next_tunnel, self.next_tunnel + 1
        waiter: asyncio.Future[Tunnel] = asyncio.get_running_loop().create_future()
        self.building[id] = waiter
        self.write(b"\x09" + number(id) + blob(cluster.encode()) + number(timeout_ms))
        async with asyncio.timeout(PATIENCE_S):
            return await waiter

    # -- frames ----------------------------------------------------------------------------------------------

    async def byte(self) -> int:
        return (await self.reader.readexactly(1))[0]

    async def bool(self) -> bool:
        value = await self.byte()
        assert value in (0, 1), value
        return value == 1

    async def number(self) -> int:
        value = shift = 0
        while True:
            part = await self.byte()
            value |= (part & 127) << shift
            shift += 7
            if part < 128:
                return value

    async def blob(self) -> bytes:
        return await self.reader.readexactly(await self.number())

    async def _receive(self) -> None:
        try:
            while await self._frame():
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.broken.append(WITHOUT_CLOSE)
            self._over("EOF")
        except AssertionError as err:
            self.broken.append(f"{err}")
            self._over("broken")

    def _over(self, reason: str) -> None:
        self.closed = reason
        self.ended.set()
        for waiter in (*self.replies.values(), *self.building.values()):
            if not waiter.done():
                waiter.set_exception(Closed())
        for tunnel in list(self.tunnels.values()):
            tunnel.end(reason)
        if reason and self.handler is not None:
            self.handler.drop(reason)

    async def _frame(self) -> bool:
        op = await self.byte()
        if op == 0x02:
            self._over((await self.blob()).decode())
            return False
        if op == 0x03:
            message = await self.blob()
            handler = self.handler
            assert handler is not None, "a broadcast for a pure client"
            self.casts.put(len(message), lambda: handler.broadcast(message))
        elif op == 0x04:
            id, request, timeout_ms = await self.number(), await self.blob(), await self.number()
            assert self.handler is not None, "a request for a pure client"
            until = self.clock() + timeout_ms / 1000
            self.asks.put(len(request), lambda: self._answer(id, request, until))
        elif op == 0x05:
            await self._reply()
        elif op == 0x08:
            topic, event = await self.blob(), await self.blob()
            if topic in self.topics:
                receive, pool = self.topics[topic]
                pool.put(len(event), lambda: receive(event))
            else:
                self.stray_events += 1
        elif op == 0x09:
            build, limit = await self.number(), await self.number()
            assert self.handler is not None, "a tunnel for a pure client"
            id, self.next_tunnel = self.next_tunnel, self.next_tunnel + 1
            tunnel = Tunnel(self, id, limit)
            self.write(b"\x0a" + number(build) + number(id) + b"\x0b" + number(id) + number(WINDOW))
            self.spawn(self.handler.tunnel(tunnel))
        elif op == 0x0A:
            await self._confirmed()
        else:
            await self._tunnel_frame(op)
        return True

    async def _reply(self) -> None:
        id = await self.number()
        waiter = self.replies.pop(id, None)
        assert waiter is not None, f"a second reply for request {id}"
        if await self.bool():
            outcome: bytes | Exception = TimedOut()
        elif await self.bool():
            outcome = await self.blob()
        else:
            outcome = Remote(await self.blob())
        if waiter.done():
            return
        if isinstance(outcome, bytes):
            waiter.set_result(outcome)
        else:
            waiter.set_exception(outcome)

    async def _answer(self, id: int, request: bytes, until: float) -> None:
        if self.clock() > until:
            return  # expired in the queue
        assert self.handler is not None
        try:
            data = b"\x01" + blob(await self.handler.request(request))
        except Remote as err:
            data = b"\x00" + blob(err.text)
        if not self.ended.is_set():
            self.write(b"\x05" + number(id) + data)

    async def _confirmed(self) -> None:
        id = await self.number()
        waiter = self.building.pop(id, None)
        assert waiter is not None, f"a confirmation of no tunnel: {id}"
        if await self.bool():
            waiter.set_exception(TimedOut())
            return
        limit = await self.number()
        assert limit > 0
        tunnel = Tunnel(self, id, limit)
        self.write(b"\x0b" + number(id) + number(WINDOW))
        waiter.set_result(tunnel)

    async def _tunnel_frame(self, op: int) -> None:
        assert op in (0x0B, 0x0C, 0x0D), f"operation {op:#x}"
        id = await self.number()
        tunnel = self.tunnels.get(id)
        assert tunnel is not None, f"a frame {op:#x} of no tunnel: {id}"
        if op == 0x0B:
            tunnel.allowance += await self.number()
            tunnel.changed.set()
        elif op == 0x0C:
            tunnel.chunk(await self.number(), await self.blob())
        else:
            tunnel.end((await self.blob()).decode())
            del self.tunnels[id]


class Tunnel:
    """One tunnel of the binding: whole messages, allowances, and a send that may stop within a message."""

    def __init__(self, binding: Binding, id: int, limit: int) -> None:
        self.binding = binding
        self.id = id
        self.limit = limit
        self.allowance = 0
        self.messages: deque[bytes] = deque()
        self.begun = bytearray()
        self.missing = 0
        self.closed: str | None = None
        self.changed = asyncio.Event()
        self.arrived = asyncio.Event()
        self.granted = WINDOW
        binding.tunnels[id] = self

    def chunk(self, size: int, data: bytes) -> None:
        assert 0 < len(data) <= 65536
        if size:
            assert self.granted >= len(data), "the first chunk was not allowed"
            self.begun, self.missing = bytearray(), size
        self.granted -= len(data)
        self.begun += data
        self.missing -= len(data)
        assert self.missing >= 0
        if not self.missing:
            self.messages.append(bytes(self.begun))
            self.arrived.set()

    def end(self, reason: str) -> None:
        if self.closed is None:
            self.closed = reason
        self.changed.set()
        self.arrived.set()

    async def send(self, message: bytes, timeout_s: float = PATIENCE_S) -> None:
        """Send chunk by chunk as allowed. Raises TimedOut, with the rest of the message not sent."""
        assert message
        size = len(message)
        try:
            async with asyncio.timeout(timeout_s):
                for start in range(0, size, self.limit):
                    part = message[start : start + self.limit]
                    while self.allowance < len(part) and self.closed is None:
                        self.changed.clear()
                        await self.changed.wait()
                    if self.closed is not None:
                        raise Closed(self.closed)
                    self.allowance -= len(part)
                    frame = b"\x0c" + number(self.id) + number(0 if start else size) + blob(part)
                    self.binding.write(frame)
                    await self.binding.writer.drain()
        except TimeoutError:
            raise TimedOut from None

    async def recv(self, timeout_s: float = PATIENCE_S) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                while not self.messages:
                    if self.closed is not None:
                        raise Closed(self.closed)
                    self.arrived.clear()
                    await self.arrived.wait()
        except TimeoutError:
            raise TimedOut from None
        message = self.messages.popleft()
        self.granted += len(message)
        if self.closed is None:
            self.binding.write(b"\x0b" + number(self.id) + number(len(message)))
        return message

    async def close(self) -> None:
        """Wait for the relay's close frame."""
        if self.closed is None:
            self.binding.write(b"\x0d" + number(self.id))
            async with asyncio.timeout(PATIENCE_S):
                while self.closed is None:
                    self.arrived.clear()
                    await self.arrived.wait()
        if self.closed:
            raise Closed(self.closed)
