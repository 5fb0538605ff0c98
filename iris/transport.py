"""The asyncio pump of a client: moves bytes between a socket and a sans-IO session, with water marks.

After a TLS handshake it also checks which relay is at the other end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from iris.core.conversation import ENDED, UP, State
from iris.errors import Closed, IrisError, PeerProtocolError
from iris.logs import logger
from iris.remote import SESSION_ALPN, check_alpn, peer_channel, peer_relay_id
from iris.wire.codec import (
    FRAME_OVERHEAD,
    MAX_REPORT_BYTES,
    FrameReader,
    ReceiveBuffer,
    encode_control,
)
from iris.wire.frames import Hello
from iris.wire.kinds import NEVER_US

log = logger(__name__)

SMALL_BYTES = 8192
"""Average size of a chunk below which chunks are joined before they are written."""
LOOP_ENDED: Final = "belongs to an event loop that is closed; make another one with iris.connect() in the loop that uses it"
NEVER_PAUSES = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
"""asyncio's `writelines` ignores the high-water mark, so that its buffer has no bound (CVE-2024-12254)."""


class Writer:
    """Writes to a connection directly while its transport's buffer is empty, and leaves the rest to the transport.

    uvloop buffers writes until its turn ends, so that a peer on another core would wait for the whole batch. TLS
    connections always use the transport. So do closing ones, because their descriptor may be reused.
    """

    __slots__ = ("_fd", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        connected = transport.get_extra_info("socket")
        ours = connected is not None and transport.get_extra_info("sslcontext") is None
        self._fd = connected.fileno() if ours else -1

    def write(self, chunks: Sequence[bytes | memoryview], size: int) -> None:
        """Write `chunks`, `size` bytes together, in order.

        Memoryviews are borrowed: what cannot be written is copied.
        """
        if size < SMALL_BYTES * len(chunks) and len(chunks) > 1:
            chunks = [b"".join(chunks)]  # cheaper than many small chunks
        transport = self._transport
        if self._fd < 0 or transport.is_closing() or transport.get_write_buffer_size():
            self._leave([bytes(chunk) for chunk in chunks])
            return
        try:
            sent = os.writev(self._fd, chunks)
        except OSError:  # full, or broken: the transport waits, or reports it
            self._leave([bytes(chunk) for chunk in chunks])
            return
        if sent < size:
            for index, chunk in enumerate(chunks):
                if sent < len(chunk):
                    rest = bytes(chunk)  # copies only a memoryview
                    later = [bytes(each) for each in chunks[index + 1 :]]
                    self._leave([memoryview(rest)[sent:], *later])
                    return
                sent -= len(chunk)

    def _leave(self, chunks: Sequence[bytes | memoryview]) -> None:
        transport = self._transport
        transport.writelines(chunks)
        if NEVER_PAUSES:
            low, high = transport.get_write_buffer_limits()
            if transport.get_write_buffer_size() > high:
                transport.set_write_buffer_limits(high, low)  # calls pause_writing


class Outgoing(Protocol):
    """Framed output of a session, in order. The pump writes `chunks` and starts a new list."""

    chunks: list[bytes]
    chunk_bytes: int


class Driven(Protocol):
    """A sans-IO session with a relay: see `iris.core.conversation`."""

    message_limit: int
    state: State
    deadline_us: int

    @property
    def out(self) -> Outgoing: ...
    @property
    def greeting(self) -> Hello: ...
    @property
    def silent(self) -> bool: ...
    def frame(self, buf: memoryview, start: int, end: int) -> None: ...
    def turn(self, now_us: int, mono_us: int) -> None: ...
    def flush(self) -> None: ...
    def expire(self, mono_us: int) -> None: ...
    def mark_alive(self) -> None: ...
    def over_tls(self, relay_id: bytes, channel: bytes) -> None: ...
    def release_casts(self) -> None: ...
    def end(self, reason: str, *, routed: bool = False) -> None: ...
    def poison(self) -> None: ...


S = TypeVar("S", bound=Driven)


class PumpOwner(Protocol):
    """The object that a pump notifies when writing pauses or resumes, and when the connection ends."""

    def writing_paused(self, pump: Any) -> None: ...
    def writing_resumed(self, pump: Any) -> None: ...
    def disconnected(self, pump: Any, reason: str) -> None: ...
    def loop_ended(self) -> None: ...


class Pump(asyncio.BufferedProtocol, Generic[S]):
    """One connection and the session on it.

    The output of the session is written at the end of each batch of received frames, and at the end of a turn
    in which `touch` was called.
    """

    def __init__(
        self, owner: PumpOwner, session: S, buffer: ReceiveBuffer, high_bytes: int
    ) -> None:
        self.session = session
        self._owner = owner
        self._reader = FrameReader(
            session.frame, buffer, max(session.message_limit + FRAME_OVERHEAD, MAX_REPORT_BYTES)
        )
        self._high_bytes = high_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._writer: Writer
        self._scheduled = False
        self._timed = False
        """Whether the session was given the time in this turn, whose end is scheduled."""
        self._in_batch = False
        self.reason = ""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = NEVER_US
        self.closed = asyncio.Event()
        self.connected = False
        self.sent_bytes = 0
        """Bytes handed to the connection."""
        self.received_bytes = 0
        """Bytes read from the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self.connected = True
        self._writer = Writer(self._transport)
        self._transport.set_write_buffer_limits(high=self._high_bytes, low=self._high_bytes // 4)
        self.session.turn(time.time_ns() // 1000, time.monotonic_ns() // 1000)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            try:
                check_alpn(tls, SESSION_ALPN)
                self.session.over_tls(peer_relay_id(tls), peer_channel(tls))
            except PeerProtocolError as err:
                self.abort(str(err))
                return
        self._transport.write(encode_control(self.session.greeting))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._in_batch = True
        self.received_bytes += nbytes
        try:
            self.session.turn(time.time_ns() // 1000, time.monotonic_ns() // 1000)
            self.session.mark_alive()
            self._reader.received(nbytes)
        except IrisError as err:
            self.abort(str(err))
        except (
            Exception,
            asyncio.CancelledError,
        ) as err:  # after a bug in Iris, callers must not wait on a connection that is no longer read
            log.exception("client.fault")
            self.abort(f"internal error in Iris, please report it: {err!r}")
        finally:
            self._in_batch = False
        if self.connected:
            self.flush()
            if self.session.state is ENDED:
                self.abort("")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(
            self.reason
            or (f"the connection broke: {exc}" if exc else "the relay closed the connection")
        )

    def pause_writing(self) -> None:
        self._owner.writing_paused(self)

    def resume_writing(self) -> None:
        self._owner.writing_resumed(self)

    # -- for the client --------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Set the time of the session before it is used outside a batch. Once a turn is enough."""
        if not self._timed and not self._in_batch:
            self._set_time()
            self._timed = True
            self.touch()

    def _set_time(self) -> None:
        self.session.turn(time.time_ns() // 1000, time.monotonic_ns() // 1000)

    def touch(self) -> None:
        """Write the output of the session at the end of this turn of the loop."""
        if not self._scheduled and not self._in_batch:
            try:
                self._loop.call_soon(self._turn_ended)
            except RuntimeError as err:  # the loop is closed
                self._owner.loop_ended()
                raise Closed(f"this client {LOOP_ENDED}") from err
            self._scheduled = True

    def _turn_ended(self) -> None:
        self._scheduled = False
        timed, self._timed = self._timed, False
        if self.connected:
            if not timed:
                self._set_time()
            self.flush()

    def release_casts(self) -> None:
        """Let the session deliver the casts that it holds."""
        if self.connected:
            self._set_time()
            try:
                self.session.release_casts()
            except IrisError as err:
                self.abort(str(err))
                return
            self.flush()

    def flush(self) -> None:
        """Frame and write the output of the session now."""
        session = self.session
        session.flush()
        if session.state is UP:
            self.write()
        if session.deadline_us < self._timer_us:
            self._arm()

    def write(self) -> None:
        """Write what is framed already."""
        out = self.session.out
        chunks = out.chunks
        if chunks and self.connected:
            size = out.chunk_bytes
            out.chunks = []
            out.chunk_bytes = 0
            self.sent_bytes += size
            self._writer.write(chunks, size)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes in the write buffer of the connection."""
        return self._transport.get_write_buffer_size() if self.connected else 0

    def abort(self, reason: str) -> None:
        """End the connection now, with the first `reason` that is given. Idempotent."""
        if self.connected:
            self.reason = self.reason or reason
            self._transport.abort()
            self._finish(self.reason or "closed")

    def poison(self) -> None:
        """Never seal or write again: in the child of a fork, the connection belongs to the parent."""
        self.connected = False
        self._scheduled = True  # so that `touch` calls no loop
        self.session.poison()

    def _finish(self, reason: str) -> None:
        if not self.connected:
            return
        self.connected = False
        self.reason = reason
        if self._timer is not None:
            self._timer.cancel()
        self.session.end(reason)
        self.closed.set()
        self._owner.disconnected(self, reason)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_us = self.session.deadline_us
        delay_s = max(0.0, self._timer_us / 1e6 - time.monotonic())
        self._timer = self._loop.call_later(delay_s + 0.001, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._timer_us = NEVER_US
        if self.connected:
            self._set_time()
            self.session.expire(time.monotonic_ns() // 1000)
            if self.session.silent:
                self.abort("the relay has sent nothing for too long, not even heartbeats")
                return
            self.flush()
