"""The base of sessions and links: the driver that calls the router, TLS without waiting, and the port of a connection.

All ports of a relay belong to one `Driver` and share its receive buffer. Frames are handled in batches, one batch for
each read of a connection, or several if they take longer than its share of a turn. At the end of a batch everything
it put into other ports is written; consecutive frames to one port are written as one slice of the receive buffer,
without copying.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import ssl
import termios
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, cast

from iris.transport import Writer
from iris.wire.codec import RECEIVE_BYTES, FrameReader, ReceiveBuffer
from iris.wire.kinds import NEVER_US
from relay.config import RelayConfig
from relay.core.budget import QUEUE_BYTES, Budget, Entry, cut
from relay.core.neighbor import Neighbor
from relay.core.ports import Held
from relay.core.router import Router
from relay.net.turns import CONTROL_NS, SHARE_NS, Turn, Turns

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 1 << 20
"""Size of a connection's write buffer beyond which frames are queued in the port, where they are counted and
refused."""
CONTROL_LIMIT_BYTES: Final = 64 << 20
FAULT_PAUSE_US: Final = 200_000
"""Pause before the router is called again after an internal error."""
_RECORD_BYTES: Final = 16 << 10
"""Most bytes that one TLS record carries."""
_FREED: Final = 64
"""Frames that are freed together."""


class Driver:
    """Drives one router: holds the receive buffer, the ports with something to write, and the timer."""

    __slots__ = (
        "_loop",
        "_pause_us",
        "_timer",
        "_timer_us",
        "budget",
        "buffer",
        "dirty",
        "router",
        "turns",
    )

    def __init__(self, router: Router, queue_bytes: int = QUEUE_BYTES) -> None:
        """`queue_bytes` is the most that may wait at all ports together."""
        self.router = router
        self.budget = Budget(queue_bytes)
        self.buffer = ReceiveBuffer()
        self.dirty: list[ConnectionPort] = []
        self.turns = Turns()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = NEVER_US
        self._pause_us = 0
        """Time before which the timer does not call the router."""

    def turn(self) -> None:
        """Set the router's clock."""
        self.router.now_us = time.monotonic_ns() // 1000

    def settle(self) -> None:
        """Write what the last batch put into ports, and set the timer for the router's next deadline."""
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for port in dirty:
                try:
                    port.flush()
                except Exception:  # an internal error must cost this port only
                    log.exception("port.fault")
                    port.abort("internal error")
        if self.router.is_due_before(self._timer_us):
            self._arm()

    def close(self) -> None:
        """Stop the timer. Idempotent; the next `settle` starts it again."""
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
        # Event loops round to a millisecond. A call too early would have to be repeated.
        self._timer = self._loop.call_later(delay_s + 0.0005, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._timer_us = NEVER_US
        self.turn()
        try:
            self.router.expire()
        except Exception:  # what is due stays due and is tried again; sessions and links continue
            log.exception("router.fault")
            self._pause_us = self.router.now_us + FAULT_PAUSE_US
        self.settle()


class Secured:
    """TLS between a port and its socket. Writes are encrypted and passed on at once.

    The event loop's own TLS is not used: a port that sees each step can bound what a stranger makes it hold, report why
    a handshake failed, and write without waiting for the end of the loop's turn.
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
        """Encrypted bytes written so far."""
        self.tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )

    def received(self, data: memoryview) -> None:
        """Add received, encrypted bytes; they are copied."""
        self._incoming.write(data)

    def handshake(self) -> bool:
        """Continue the handshake; return whether it is done.

        Raises ssl.SSLError, after the alert for the peer is written.
        """
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._write_out()
        return True

    def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` with decrypted bytes; return their number (not full: no more for now), or -1 at the end."""
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
        """Write `chunks`, `size` bytes together, in order. The caller keeps their memory."""
        if len(chunks) > 1 and size < _RECORD_BYTES * len(chunks):
            chunks = [b"".join(chunks)]  # one record for each would cost more
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


class _Closed(asyncio.Transport):
    """Stands for the transport of a connection that has ended. One of TLS keeps methods of the protocol."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: it is closed."""

    abort = close


_CLOSED: Final = _Closed()


class ConnectionPort(asyncio.BufferedProtocol):
    """One connection as a `relay.core.ports.Port`: a bounded queue, and writes at the end of each batch.

    A subclass handles received bytes, sets `_transport` and `_writer`, and ends the connection.
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
        self._reader: FrameReader
        self.turn = Turn(driver.turns)
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._tunnel_bytes = 0
        self._control_bytes = 0
        self._held = 0
        self._limit_bytes = config.port_queue_bytes
        self._tunnel_limit_bytes = config.tunnel_share_bytes
        self._room_bytes = self._limit_bytes // 2
        """Queued bytes at or below which the port has room again after a refusal."""

    def abort(self, reason: str) -> None:
        """Close at once; `reason` is for the log."""
        raise NotImplementedError

    def _has_room_again(self) -> None:
        """Notify the router that this port has room again."""
        raise NotImplementedError

    def _neighbor(self) -> Neighbor | None:
        """Return the router's object for this connection, if there is one."""
        raise NotImplementedError

    def _done(self) -> bool:
        """Return whether nothing is queued here any more."""
        return not self._queue

    def _control_waits(self) -> None:
        """Handle a growing queue of control frames for a peer that does not read. A subclass may pause reading."""

    # -- turns -----------------------------------------------------------------------------------------------

    def _turn_begins(self) -> None:
        self.turn.begin(self, self._transport)

    def _turn_ended(self) -> None:
        self.turn.end()

    @property
    def turn_user(self) -> str:
        """The user in whose place this connection waits for its turn."""
        neighbor = self._neighbor()
        return "" if neighbor is None else neighbor.user

    def _may_go_on(self, at_hand: int) -> bool:
        """Continue a frame that is handled in parts; return whether the next frame may be handled in this turn."""
        neighbor, turn, now_us = self._neighbor(), self.turn, self._router.now_us
        if at_hand >= RECEIVE_BYTES:  # the event loop may read more in this turn
            turn.hold(now_us)
        if neighbor is None:
            return turn.has_time(now_us)
        share_ns = CONTROL_NS if neighbor.controlled_us == now_us else SHARE_NS
        if neighbor.unfinished is not None:
            for _ in neighbor.unfinished:
                if not turn.has_time(now_us, share_ns):
                    return False
            neighbor.unfinished = None
        return turn.has_time(now_us, share_ns)

    def _is_done(self) -> bool:
        """Return whether the reader stopped behind the last frame that was received, so that nothing has to wait."""
        neighbor, reader = self._neighbor(), self._reader
        if reader.rest_bytes or (neighbor is not None and neighbor.unfinished is not None):
            return False
        reader.go_on()
        return True

    def go_on(self) -> bool:
        """Handle more of what was received; see `relay.net.turns.Waiting`."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether something that was received waits for its turn."""
        return self._reader.waiting

    @property
    def unread(self) -> bool:
        if self.turn.paused:
            return not self.turn.peer_is_behind
        waiting = array.array("i", (0,))
        try:
            fcntl.ioctl(
                self._transport.get_extra_info("socket").fileno(), termios.FIONREAD, waiting
            )
        except OSError:  # the socket is closed already
            return False
        return waiting[0] > 0

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transports have no common base class
        self._turn_begins()
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
        """Drop what is queued, counted as `cause`: the connection is lost.

        What refers back to this port lets go of it, so that its memory is free at once: cycles are collected seldom
        (`iris.memory`).
        """
        self._closed = True
        self._reader.end()
        self._turn_ended()
        self._transport = _CLOSED
        self._writer = Writer(_CLOSED)
        if self._held:  # counted as out, but never written
            self._router.accounts.out -= self._held
            self._router.accounts.drop(cause, self._held)
            self._held = 0
        queue, self._queue = self._queue, deque()
        self._router.take_apart(_freed(queue))
        self._chunks.clear()
        self._budget.released(self._queued_bytes)
        self._budget.ended(self)
        self._queued_bytes = 0
        self._driver.settle()  # what is freed in parts has a deadline

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
        """Bytes of this port that the relay's budget counts."""
        return self._queued_bytes

    def _finds_room(self, size: int) -> bool:
        """Return whether the relay's full budget can make room for a frame here."""
        if self._budget.make_room(self, size):
            return True
        self._room_bytes = min(self._room_bytes, self.waiting_bytes // 2)
        return False

    def shed(self, wanted_bytes: int) -> int:
        """Drop about `wanted_bytes` of the newest publications queued here; return how many bytes that frees."""
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
            self.abort("it does not read its control frames")
        else:
            self._control_waits()

    def finish(self) -> None:
        """Close when everything queued is written."""
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
        """Bytes held in this port and in its connection's write buffer."""
        return self._queued_bytes + self._transport.get_write_buffer_size()

    # -- writing ---------------------------------------------------------------------------------------------

    def _take_run(self) -> None:
        """Copy the current run of frames out of the receive buffer."""
        run = self._run
        if run is not None:
            self._run = None
            self._store(bytes(run[self._run_start : self._run_end]), self._run_count, None)

    def _put(self, frame: bytes, count: int, held: Held | None) -> None:
        """Queue an owned frame behind the current run."""
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
                self._write_chunks()  # now the transport pauses, and further frames count against the bounds

    def flush(self) -> None:
        """Write what the batch left here to the connection."""
        self._dirty = False
        run = self._run
        if run is not None:
            if self._chunks or self._queue or self._paused or self._closed:
                self._take_run()
            else:  # it is alone: write it from the receive buffer, without copying
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
        """Remove this port from those with queued bytes, if nothing is queued any more."""
        if not self.waiting_bytes:
            self._budget.ended(self)
            neighbor = self._neighbor()
            if neighbor is not None:
                neighbor.aliases.forget_past()


def _freed(queue: deque[Entry]) -> Iterator[int]:
    """Free the frames of a lost connection in parts, which yield their work: it may be 64 MiB in small pieces."""
    while queue:
        for _ in range(min(_FREED, len(queue))):
            queue.popleft()
        yield _FREED // 4


def _control_bytes(entry: Entry) -> int:
    """Return the length of a queue entry if it is a control frame, else 0."""
    data, count, held = entry
    return len(data) if count == 0 and held is None else 0
