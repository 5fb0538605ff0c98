"""What sessions and links share: one relay's event loop around its router, and connections that never wait.

Every port of a relay belongs to one `Driver`: they share a receive buffer, and a batch of frames from one connection ends with
writing whatever it put on the way to any other, runs of frames to one port as one slice.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from iris.transport import Writer
from iris.wire.codec import ReceiveBuffer
from iris.wire.kinds import NEVER_US
from relay.config import RelayConfig
from relay.core.budget import QUEUE_BYTES, Budget, Entry, cut
from relay.core.neighbor import Neighbor
from relay.core.ports import Held
from relay.core.router import Router

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 1 << 20
"""Write buffer of a connection beyond which a port queues itself, so that it can count and refuse."""
CONTROL_LIMIT_BYTES: Final = 64 << 20
FAULT_PAUSE_US: Final = 200_000
"""After a fault of ours the router is called no sooner than this."""
_RECORD_BYTES: Final = 16 << 10
"""Most that one TLS record carries."""


class Driver:
    """One router's clock and turn: the receive buffer, the ports that have something to write, the timer."""

    __slots__ = ("_loop", "_pause_us", "_timer", "_timer_us", "budget", "buffer", "dirty", "router")

    def __init__(self, router: Router, queue_bytes: int = QUEUE_BYTES) -> None:
        """`queue_bytes` may wait at all ports together."""
        self.router = router
        self.budget = Budget(queue_bytes)
        self.buffer = ReceiveBuffer()
        self.dirty: list[ConnectionPort] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = NEVER_US
        self._pause_us = 0
        """The router is not called before this."""

    def turn(self) -> None:
        """Tell the router the time."""
        self.router.now_us = time.monotonic_ns() // 1000

    def settle(self) -> None:
        """Write what the last batch put on the way, and see to it that the router is called when it wants to be."""
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for port in dirty:
                try:
                    port.flush()
                except Exception:  # a fault of ours costs this port, and nobody else theirs
                    log.exception("port.fault")
                    port.abort("internal error")
        if self.router.deadline_us < self._timer_us:
            self._arm()

    def close(self) -> None:
        """Call the router no more. Idempotent; the next `settle` starts the timer again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_us = NEVER_US

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._timer_us = max(self.router.deadline_us, self._pause_us)
        delay_s = max(0.0, self._timer_us / 1e6 - time.monotonic())
        # Event loops round to a millisecond: not too early, or it would have to be called again.
        self._timer = self._loop.call_later(delay_s + 0.0005, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._timer_us = NEVER_US
        self.turn()
        try:
            self.router.expire()
        except Exception:  # what is due stays due: sessions and links go on, and it is tried again
            log.exception("router.fault")
            self._pause_us = self.router.now_us + FAULT_PAUSE_US
        self.settle()


class Secured:
    """TLS between a port and its socket. What it is given to write leaves encrypted, at once, as a session's does.

    Not the event loop's own TLS: a port that sees each step can bound what a stranger makes it hold, say why a
    handshake failed, and write without waiting for the end of the loop's turn.
    """

    __slots__ = ("_incoming", "_outgoing", "_writer", "out_bytes", "tls")

    def __init__(
        self, context: ssl.SSLContext, transport: asyncio.Transport, server_name: str | None
    ) -> None:
        """Accept, or dial with `server_name`."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._writer = Writer(transport)
        self.out_bytes = 0
        """Written so far, encrypted."""
        self.tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )

    def received(self, data: memoryview) -> None:
        """Take encrypted bytes; they are copied."""
        self._incoming.write(data)

    def handshake(self) -> bool:
        """Go on with the handshake; whether it is done. Raises ssl.SSLError; what the peer should see of it is written."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._write_out()
        return True

    def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` with what has come; return how much that is. Fewer bytes than fit: there is no more. -1: the end."""
        filled = 0
        read = self.tls.read
        incoming = self._incoming
        size = len(buffer)
        while filled < size:
            try:
                got = read(size - filled, buffer[filled:])
            except ssl.SSLWantReadError:
                break
            if not got:
                return filled or -1
            filled += cast(int, got)
            if not incoming.pending and not self.tls.pending():
                break  # one more read could only raise, which costs as much as this one
        if self._outgoing.pending:
            self._write_out()  # TLS itself had to answer
        return filled

    def write(self, chunks: Sequence[bytes | memoryview], size: int) -> None:
        """Write `chunks`, `size` bytes together, in order. They are borrowed."""
        if len(chunks) > 1 and size < _RECORD_BYTES * len(chunks):
            chunks = [b"".join(chunks)]  # a record each would cost more
        write = self.tls.write
        for chunk in chunks:
            sent = write(chunk)
            if sent < len(chunk):
                view = memoryview(chunk)
                while sent < len(view):
                    sent += write(view[sent:])
        self._write_out()

    def _write_out(self) -> None:
        data = self._outgoing.read()
        if data:
            self.out_bytes += len(data)
            self._writer.write([data], len(data))


class ConnectionPort(asyncio.BufferedProtocol):
    """One connection as `relay.core.ports.Port`: a queue within its bounds, and writes that are settled by the batch.

    Who derives from it says what happens when bytes come, sets `_transport` and `_writer`, and ends the connection.
    """

    high_water_bytes = HIGH_WATER_BYTES

    def __init__(self, driver: Driver, config: RelayConfig) -> None:
        self._driver = driver
        self._router = driver.router
        self._budget = driver.budget
        self._transport: asyncio.Transport
        self._writer: Writer | Secured
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._run: memoryview | None = None
        self._run_start = 0
        self._run_end = 0
        self._run_count = 0
        self._dirty = False
        self._paused = False
        self._finishing = False
        self._closed = False
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._tunnel_bytes = 0
        self._control_bytes = 0
        self._held = 0
        self._limit_bytes = config.port_queue_bytes
        self._tunnel_limit_bytes = config.tunnel_share_bytes
        self._room_bytes = self._limit_bytes // 2
        """With so little waiting there is room again after a refusal."""

    def abort(self, reason: str) -> None:
        """Close now; `reason` is for our log."""
        raise NotImplementedError

    def _has_room_again(self) -> None:
        """Tell the router."""
        raise NotImplementedError

    def _neighbor(self) -> Neighbor | None:
        """Whose connection it is, as the router knows it."""
        raise NotImplementedError

    def _done(self) -> bool:
        """Whether all that was taken is with the connection."""
        return not self._queue

    def _control_waits(self) -> None:
        """More control frames than before wait for a peer that does not read."""

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no common class
        high = self.high_water_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 4)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write_queue()
        if not self._closed and self._queued_bytes <= self._room_bytes:
            self._room_bytes = self._limit_bytes // 2
            self._has_room_again()
            self._driver.settle()

    def _lost(self, cause: str) -> None:
        """The connection is gone: what was taken and not written is dropped as `cause`."""
        self._closed = True
        if self._held:  # taken, counted as out, and never written
            self._router.accounts.out -= self._held
            self._router.accounts.drop(cause, self._held)
            self._held = 0
        self._queue.clear()
        self._chunks.clear()
        self._budget.released(self._queued_bytes)
        self._budget.ended(self)
        self._queued_bytes = 0

    # -- Port ------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        if not self._queue:
            return True
        if self._run is not None:
            size += self._run_end - self._run_start
        if self._queued_bytes - self._tunnel_bytes + size > self._limit_bytes:
            return False
        budget = self._budget
        return budget.bytes + size <= budget.limit_bytes or self._finds_room(size)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that this port counts in the relay's budget."""
        return self._queued_bytes

    def _finds_room(self, size: int) -> bool:
        """Whether the relay's budget, which is full, gets room for a frame here."""
        if self._budget.make_room(self, size):
            return True
        self._room_bytes = min(self._room_bytes, self.waiting_bytes // 2)
        return False

    def shed(self, wanted_bytes: int) -> int:
        """Drop about so many bytes of the newest publications that wait here; return how many bytes that frees."""
        neighbor = self._neighbor()
        if neighbor is None or self._closed:
            return 0
        queue, router = self._queue, self._router
        kept, lost, read, freed = cut(reversed(queue), wanted_bytes, neighbor.aliases.key_of)
        if freed <= 0:
            return 0
        for _ in range(read):
            self._control_bytes -= _control_bytes(queue.pop())
        queue.extend(kept)
        self._control_bytes += sum(map(_control_bytes, kept))
        self._queued_bytes -= freed
        self._budget.released(freed)
        for delivery, count in lost:
            self._held -= count
            self._budget.shed += count
            router.shed(neighbor, delivery, count)
        return freed

    def forward(self, buf: memoryview, start: int, end: int, count: int) -> bool:
        if self._queue and not self.has_room(end - start):
            return False
        if self._run is buf and self._run_end == start:
            self._run_end = end
            self._run_count += count
            return True
        self._take_run()
        self._run = buf
        self._run_start = start
        self._run_end = end
        self._run_count = count
        if not self._dirty:
            self._dirty = True
            self._driver.dirty.append(self)
        return True

    def send(self, frame: bytes, count: int) -> bool:
        if self._queue and not self.has_room(len(frame)):
            return False
        self._put(frame, count, None)
        return True

    def forward_tunnel(self, buf: memoryview, start: int, end: int, held: Held) -> bool:
        if not self._paused and not self._queue:
            return self.forward(buf, start, end, 1)
        size = end - start
        if self._tunnel_bytes + size > self._tunnel_limit_bytes:
            return False
        budget = self._budget
        if budget.bytes + size > budget.limit_bytes and not budget.make_room(self, size, own=True):
            return False
        held.bytes += size
        self._tunnel_bytes += size
        self._put(bytes(buf[start:end]), 1, held)
        return True

    def discard(self, held: Held) -> int:
        if not held.bytes:
            return 0
        kept: deque[Entry] = deque()
        lost = 0
        for entry in self._queue:
            if entry[2] is held:
                lost += entry[1]
            else:
                kept.append(entry)
        self._queue = kept
        self._queued_bytes -= held.bytes
        self._tunnel_bytes -= held.bytes
        self._held -= lost
        self._budget.released(held.bytes)
        self._emptied()
        held.bytes = 0
        return lost

    def control(self, frame: bytes) -> None:
        if self._closed:
            return
        self._put(frame, 0, None)
        if not self._queue:
            return
        self._control_bytes += len(frame)
        if self._control_bytes > CONTROL_LIMIT_BYTES:
            self.abort("it does not read its answers")
        else:
            self._control_waits()

    def finish(self) -> None:
        """Close once all that was taken is written."""
        self._finishing = True
        if not self._dirty:
            self._dirty = True
            self._driver.dirty.append(self)

    @property
    def crowded(self) -> bool:
        waiting, budget = self.waiting_bytes, self._budget
        return waiting > self._limit_bytes // 4 or (
            waiting > 0 and 2 * budget.bytes > budget.limit_bytes
        )

    @property
    def held_messages(self) -> int:
        return self._held

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that this port or its connection holds."""
        return self._queued_bytes + self._transport.get_write_buffer_size()

    # -- writing ---------------------------------------------------------------------------------------------

    def _take_run(self) -> None:
        """Copy the run out of the receive buffer."""
        run = self._run
        if run is not None:
            self._run = None
            self._store(bytes(run[self._run_start : self._run_end]), self._run_count, None)

    def _put(self, frame: bytes, count: int, held: Held | None) -> None:
        """Take an owned frame, behind the run."""
        if self._run is not None:
            self._take_run()
        self._store(frame, count, held)
        if not self._dirty:
            self._dirty = True
            self._driver.dirty.append(self)

    def _store(self, data: bytes, count: int, held: Held | None) -> None:
        if self._paused or self._queue:
            if not self._queue:
                self._budget.waiting[self] = None
            self._queue.append((data, count, held))
            self._queued_bytes += len(data)
            self._budget.bytes += len(data)
            self._held += count
        else:
            self._chunks.append(data)
            self._chunk_bytes += len(data)
            if self._chunk_bytes > self.high_water_bytes:
                self._write_chunks()  # the transport pauses, and the bounds count from here

    def flush(self) -> None:
        """Give the connection what the batch left here."""
        self._dirty = False
        run = self._run
        if run is not None:
            if self._chunks or self._queue or self._paused or self._closed:
                self._take_run()
            else:  # alone, it is written as it lies in the receive buffer
                self._run = None
                self._write([run[self._run_start : self._run_end]])
        if self._closed:
            return
        self._write_chunks()
        if self._finishing and self._done():
            self._transport.close()

    def _write_chunks(self) -> None:
        chunks = self._chunks
        if chunks and not self._closed:
            self._chunks = []
            self._chunk_bytes = 0
            self._write(chunks)

    def _write(self, chunks: Sequence[bytes | memoryview]) -> None:
        self._writer.write(chunks, sum(map(len, chunks)))

    def _write_queue(self) -> None:
        queue = self._queue
        while queue and not self._paused and not self._closed:
            batch: list[bytes] = []
            batch_bytes = 0
            while queue and batch_bytes < self.high_water_bytes:
                frame, count, held = queue.popleft()
                size = len(frame)
                self._queued_bytes -= size
                self._held -= count
                if held is not None:
                    held.bytes -= size
                    self._tunnel_bytes -= size
                elif count == 0:
                    self._control_bytes -= size
                batch.append(frame)
                batch_bytes += size
            self._budget.released(batch_bytes)
            self._write(batch)
        self._emptied()
        if self._finishing and not self._closed and self._done():
            self._transport.close()

    def _emptied(self) -> None:
        """If nothing waits here, this port is none that others could take room from."""
        if not self.waiting_bytes:
            self._budget.ended(self)
            neighbor = self._neighbor()
            if neighbor is not None:
                neighbor.aliases.forget_past()


def _control_bytes(entry: Entry) -> int:
    """Return the length of what is queued, if it is control frames."""
    data, count, held = entry
    return len(data) if count == 0 and held is None else 0
