"""Accepts the sessions of this host: bytes in, frames to the router, and back within each port's bounds.

One `SessionHub` serves all sessions. They share one receive buffer; what a batch of frames put on the way is written when
the batch ends, runs of frames to one port as one slice.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections import deque
from typing import cast

from iris.errors import PeerProtocolError
from iris.transport import Writer
from iris.wire.codec import FRAME_OVERHEAD, FrameReader, ReceiveBuffer, encode_control
from iris.wire.frames import Error
from relay.config import RelayConfig
from relay.core.ports import Held
from relay.core.router import Router
from relay.core.session import Session
from relay.logs import Quiet

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1 << 20
"""Write buffer of a connection beyond which a port queues itself, so that it can count and refuse."""
CONTROL_PAUSE_BYTES = 1 << 20
CONTROL_LIMIT_BYTES = 64 << 20
FIRST_LIMIT_BYTES = 64 << 10
"""Longest frame before a session has proven a key."""
SWEEP_S = 0.5
ACCEPT_RETRY_S = 0.2
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SessionHub:
    """All sessions of a relay; owns their ports and the deadlines of silent ones."""

    def __init__(self, router: Router, config: RelayConfig) -> None:
        self.router = router
        self.config = config
        self.buffer = ReceiveBuffer()
        self.ports: set[SessionPort] = set()
        self.dirty: list[SessionPort] = []
        self.quiet = Quiet()
        self.protocol_errors = 0
        self.turned_away = 0
        self.attaching = 0
        """Connections accepted whose ports are not made yet."""
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop
        self._accepting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None

    def listen(self, listener: socket.socket) -> None:
        """Accept sessions from `listener`, which stays the caller's to close after `stop_listening`."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def stop_listening(self) -> None:
        """Accept no more. Idempotent."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _accept(self) -> None:
        for _ in range(64):
            if self._listener is None:
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                # Serve those we have; the backlog waits until a descriptor is free.
                self.quiet.warning(
                    log, "sessions.no_descriptors", "", time.monotonic(), {"error": str(err)}
                )
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._accept_again)
                return
            connection.setblocking(False)
            if len(self.ports) + self.attaching >= self.config.max_sessions:
                self.turned_away += 1
                self.quiet.warning(
                    log,
                    "sessions.full",
                    "",
                    time.monotonic(),
                    {"max_sessions": self.config.max_sessions},
                )
                connection.close()
                continue
            self.attaching += 1
            task = self._loop.create_task(self._attach(connection), name="iris-accept")
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    def _accept_again(self) -> None:
        self._retry = None
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)
            self._accept()

    async def _attach(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self.accepted, connection)
        except OSError as err:
            self.attaching -= 1
            connection.close()
            self.quiet.warning(
                log, "session.not_attached", "", time.monotonic(), {"error": str(err)}
            )

    def port(self) -> SessionPort:
        """Return the protocol object of a new connection."""
        return SessionPort(self)

    def accepted(self) -> SessionPort:
        """As `port`, for a connection that was counted when it was accepted."""
        return SessionPort(self, accepted=True)

    def settle(self) -> None:
        """Write what the last batch put on the way."""
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for port in dirty:
                port.flush()

    async def sweep(self) -> None:
        """Cut connections that never greet, or begin a frame and do not end it. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for port in list(self.ports):
                port.check_deadline(now_s)

    @property
    def idle(self) -> bool:
        """Nothing runs at any member, and nothing waits to be written."""
        return all(
            not port.session.handed and not port.session.tunnels and not port.unwritten_bytes
            for port in self.ports
        )

    async def close(self) -> None:
        """End every session now."""
        self.stop_listening()
        for task in list(self._accepting):
            task.cancel()
        for port in list(self.ports):
            port.abort("the relay stopped")
        await asyncio.sleep(0)


class SessionPort(asyncio.BufferedProtocol):
    """One session's connection, both ways. Implements `relay.core.ports.Port`."""

    def __init__(self, hub: SessionHub, *, accepted: bool = False) -> None:
        self._hub = hub
        self._router = hub.router
        self._transport: asyncio.Transport
        self._writer: Writer
        self._reader = FrameReader(self._frame, hub.buffer, FIRST_LIMIT_BYTES)
        self.session: Session
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._run: memoryview | None = None
        self._run_start = 0
        self._run_end = 0
        self._run_count = 0
        self._dirty = False
        self._paused = False
        self._accepted = accepted
        self._finishing = False
        self._left_bytes = -1
        self._closed = False
        self._queue: deque[tuple[bytes, int, Held | None]] = deque()
        self._queued_bytes = 0
        self._tunnel_bytes = 0
        self._control_bytes = 0
        self._held = 0
        self._limit_bytes = hub.config.port_queue_bytes
        self._tunnel_limit_bytes = hub.config.tunnel_share_bytes
        self._reading_paused = False
        self._busy_since_s = time.monotonic()

    # -- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no common class
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=HIGH_WATER_BYTES // 4)
        self._writer = Writer(self._transport)
        self.session = self._router.session_up(self)
        self._hub.ports.add(self)
        self._hub.attaching -= self._accepted

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed or self._finishing:
            return
        now_ns = time.monotonic_ns()
        self._router.now_us = now_ns // 1000
        try:
            self._reader.received(nbytes)
        except PeerProtocolError as err:
            self._hub.settle()
            self._protocol_error(err)
        except Exception:  # a fault of ours costs this session, and nobody else theirs
            log.exception("session.fault", extra={"fields": {"session": self.session.number}})
            self.abort("internal error")
        finally:
            self._hub.settle()
        if self.session.greeted:
            held_bytes = self._reader.held_bytes
            if not held_bytes:
                self._busy_since_s = 0.0
            elif held_bytes <= nbytes or not self._busy_since_s:
                # The unfinished frame began in this read; a busy session seldom pauses between two.
                self._busy_since_s = now_ns / 1e9

    def _frame(self, buf: memoryview, start: int, end: int) -> None:
        """Route a frame of a session that has not proven a key yet; the first proof ends this."""
        self._router.frame_in(self.session, buf, start, end)
        if self.session.proven and not self._finishing:
            self._reader.limit = self._router.message_limit + FRAME_OVERHEAD
            self._reader.on_frame = self._router.entry(self.session)

    def _ignore(self, buf: memoryview, start: int, end: int) -> None:
        """Nothing counts after BYE, or after what broke the protocol."""

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._hub.ports.discard(self)
        self._router.now_us = time.monotonic_ns() // 1000
        self._router.session_down(self.session)
        self._hub.settle()
        if self._held:  # taken, counted as out, and never written
            self._router.accounts.out -= self._held
            self._router.accounts.drop("session lost", self._held)
            self._held = 0
        self._queue.clear()
        self._chunks.clear()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write_queue()
        if not self._closed and self._queued_bytes <= self._limit_bytes // 2:
            self._router.writable(self.session)
            self._hub.settle()

    # -- Port ------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        if not self._queue:
            return True
        waiting = (
            self._queued_bytes
            - self._tunnel_bytes
            + (self._run_end - self._run_start if self._run is not None else 0)
        )
        return waiting + size <= self._limit_bytes

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
            self._hub.dirty.append(self)
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
        held.bytes += size
        self._tunnel_bytes += size
        self._put(bytes(buf[start:end]), 1, held)
        return True

    def discard(self, held: Held) -> int:
        if not held.bytes:
            return 0
        kept: deque[tuple[bytes, int, Held | None]] = deque()
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
        elif self._control_bytes > CONTROL_PAUSE_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def finish(self) -> None:
        self._finishing = True
        self._reader.on_frame = self._ignore
        if not self._dirty:
            self._dirty = True
            self._hub.dirty.append(self)

    def abort(self, reason: str) -> None:
        if not self._closed:
            log.info(
                "session.aborted",
                extra={"fields": {"session": self.session.number, "reason": reason}},
            )
            self._closed = True
            self._reader.on_frame = self._ignore
            self._transport.abort()

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
            self._hub.dirty.append(self)

    def _store(self, data: bytes, count: int, held: Held | None) -> None:
        if self._paused or self._queue:
            self._queue.append((data, count, held))
            self._queued_bytes += len(data)
            self._held += count
        else:
            self._chunks.append(data)
            self._chunk_bytes += len(data)
            if self._chunk_bytes > HIGH_WATER_BYTES:
                self._write_chunks()  # the transport pauses, and the bounds count from here

    def flush(self) -> None:
        """Give the connection what the batch left here."""
        self._dirty = False
        if self._run is not None:
            self._take_run()
        if self._closed:
            return
        self._write_chunks()
        if self._finishing and not self._queue:
            self._transport.close()

    def _write_chunks(self) -> None:
        chunks = self._chunks
        if chunks and not self._closed:
            self._chunks = []
            self._chunk_bytes = 0
            self._write(chunks)

    def _write(self, chunks: list[bytes]) -> None:
        self._writer.write(chunks, sum(map(len, chunks)))

    def _write_queue(self) -> None:
        queue = self._queue
        while queue and not self._paused and not self._closed:
            batch: list[bytes] = []
            batch_bytes = 0
            while queue and batch_bytes < HIGH_WATER_BYTES:
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
            self._write(batch)
        if (
            self._reading_paused
            and self._control_bytes < CONTROL_PAUSE_BYTES // 2
            and not self._closed
        ):
            self._reading_paused = False
            self._transport.resume_reading()
        if self._finishing and not queue and not self._closed:
            self._transport.close()

    # -- faults ----------------------------------------------------------------------------------------------

    def check_deadline(self, now_s: float) -> None:
        """Cut the connection if it owes a greeting or the rest of a frame for too long."""
        if not (self._busy_since_s or self._finishing) or self._closed:
            return
        config = self._hub.config
        if self._finishing:
            left_bytes = self.unwritten_bytes
            if left_bytes != self._left_bytes:
                self._left_bytes, self._busy_since_s = left_bytes, now_s
            elif now_s - self._busy_since_s > config.frame_timeout_s:
                self.abort("it does not read what it was sent last")
            return
        greeted = self.session.greeted
        limit_s = config.frame_timeout_s if greeted else config.hello_timeout_s
        if now_s - self._busy_since_s > limit_s and not self._reading_paused:
            what = "the rest of a frame" if greeted else "HELLO"
            self._protocol_error(PeerProtocolError(f"{what} did not come within {limit_s:g} s"))
            self._hub.settle()

    def _protocol_error(self, err: PeerProtocolError) -> None:
        """Tell the session which rule it broke, and end it; nobody else notices."""
        self._hub.protocol_errors += 1
        fields = {
            "session": self.session.number,
            "label": self.session.label,
            "pid": self.session.pid,
            "error": str(err),
        }
        self._hub.quiet.warning(
            log, "session.protocol_error", self.session.pid, time.monotonic(), fields
        )
        if not self._closed:
            self.control(encode_control(Error(str(err)[:1024])))
            self.finish()
            self._router.session_down(self.session)
