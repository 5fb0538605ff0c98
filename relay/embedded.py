"""A relay inside the calling process: the same router and ports, with in-memory pipes instead of sockets."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from iris.errors import RelayUnavailable
from relay.config import RelayConfig
from relay.daemon import make_router
from relay.net.ports import Driver
from relay.net.sessions import SessionHub


class MemoryTransport(asyncio.Transport):
    """One end of a pipe. Bytes written are delivered to the other end's protocol in a later turn of the loop."""

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._peer: MemoryTransport
        self._incoming: deque[bytes | memoryview] = deque()
        self._incoming_bytes = 0
        self._high = 64 << 10
        self._low = 16 << 10
        self._writing_paused = False
        self._reading_paused = False
        self._held = False
        self._scheduled = False
        self._closing = False
        self._lost = False

    def join(self, peer: MemoryTransport) -> None:
        """Connect this end to `peer`."""
        self._peer = peer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        peer = self._peer
        if peer._lost:
            return
        peer._incoming.append(bytes(data))
        peer._incoming_bytes += len(data)
        peer._schedule()
        if not self._writing_paused and peer._incoming_bytes > self._high:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data) -> None:  # type: ignore[no-untyped-def]  # as asyncio.WriteTransport
        for data in list_of_data:
            self.write(data)

    def _schedule(self) -> None:
        if not self._scheduled and not self._reading_paused and not self._held and not self._lost:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        budget = 256 << 10
        while (
            self._incoming
            and budget > 0
            and not self._reading_paused
            and not self._held
            and not self._lost
        ):
            data = self._incoming.popleft()
            buffer = memoryview(self._protocol.get_buffer(-1))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            if size < len(data):
                self._incoming.appendleft(
                    memoryview(data)[size:]
                )  # the protocol may pause before it has all
            self._incoming_bytes -= size
            budget -= size
            self._protocol.buffer_updated(size)
        writer = self._peer
        if writer._writing_paused and self._incoming_bytes <= writer._low and not writer._lost:
            writer._writing_paused = False
            writer._protocol.resume_writing()
        if self._incoming:
            self._schedule()
        elif writer._closing and not self._lost:
            self._end(None)

    def _end(self, exc: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._incoming.clear()
            self._incoming_bytes = 0
            self._protocol.connection_lost(exc)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._peer._schedule()
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self._end, None)
        self._loop.call_soon(self._peer._end, None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._schedule()

    def hold(self, held: bool) -> None:
        """Deliver nothing to this end while `held`, whatever its protocol wants. For tests: what arrives is late."""
        self._held = held
        self._schedule()

    def is_reading(self) -> bool:
        return not self._reading_paused

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._peer._incoming_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def can_write_eof(self) -> bool:
        return False


class EmbeddedRelay:
    """A relay without a socket. Sessions attach with `connect`; tests may pass a seeded `entropy`."""

    def __init__(
        self, *, entropy: Callable[[int], bytes] = os.urandom, config: RelayConfig | None = None
    ) -> None:
        self.config = config or RelayConfig(socket_path=Path("/embedded"))
        self.router = make_router(self.config, entropy)
        self.driver = Driver(self.router, self.config.queue_bytes)
        self.hub = SessionHub(self.driver, self.config)
        self._sweeper: asyncio.Task[None] | None = None
        self._closed = False

    async def connect(self, factory: Callable[[], asyncio.BufferedProtocol]) -> None:
        """Attach the protocol that `factory` makes, as a session; raises RelayUnavailable after `close`."""
        self.attach(factory)

    def attach(
        self, factory: Callable[[], asyncio.BufferedProtocol]
    ) -> tuple[MemoryTransport, MemoryTransport]:
        """Do what `connect` does, and return both ends of the pipe: the session's and the relay's."""
        if self._closed:
            raise RelayUnavailable("the embedded relay was closed; make a new EmbeddedRelay")
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self.hub.sweep(), name="iris-sweep")
        theirs, ours = factory(), self.hub.port()
        left, right = MemoryTransport(theirs), MemoryTransport(ours)
        left.join(right)
        right.join(left)
        ours.connection_made(right)
        theirs.connection_made(left)
        return left, right

    async def close(self) -> None:
        """End every session. Idempotent."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        await self.hub.close()
        while self.hub.ports:  # noqa: ASYNC110 - their connection_lost is already scheduled
            await asyncio.sleep(0)
        self.driver.close()
