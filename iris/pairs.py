"""Socket pairs of a client's direct tunnels: fetched from the relay, then read and written without blocking.

Two sessions of one relay move a busy tunnel to a socket pair, which the relay creates (`iris.core.direct`).
This module does not use transports of the event loop: those cannot pass file descriptors, and here one system
call reads or writes many records.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from iris.core.tunnel import TunnelEnd
from iris.core.tunnels import Tunnels
from iris.crypto.noise import MAX_MESSAGE_BYTES
from iris.dialling import dial
from iris.errors import IrisError, PeerProtocolError
from iris.forks import keep_from_child
from iris.logs import logger
from iris.wire.codec import LENGTH, FrameReader, ReceiveBuffer, encode_control
from iris.wire.frames import Fetch

log = logger(__name__)

FETCH_S: Final = 5.0
"""Timeout for fetching a descriptor from the relay."""
READ_BYTES: Final = 512 << 10
"""Size of the receive buffer."""
WRITE_BYTES: Final = 192 << 10
"""Queued bytes at which they are written at once, and not at the end of the turn."""
AHEAD_BYTES: Final = 256 << 10
"""Bytes that may be queued while the socket is full, before the sender has to wait."""
MAX_PIECES: Final = 512
"""Largest number of buffers in one `sendmsg`; the kernel accepts 1,024."""
SMALL_BYTES: Final = 4096
"""Average size of a buffer below which buffers are joined before they are written."""
_DESCRIPTOR: Final = struct.Struct("i")
_ROOM: Final = socket.CMSG_LEN(_DESCRIPTOR.size)


class Pairs:
    """Fetches this side's ends of socket pairs for the tunnels of one session."""

    def __init__(self, tunnels: Tunnels, path: Path, trusted_user: str, buffer: ReceiveBuffer, touch: Callable[[], None]) -> None:  # fmt: skip
        self._tunnels = tunnels
        self._path = path
        self._trusted_user = trusted_user
        self._buffer = buffer
        self._touch = touch
        self._fetching: set[asyncio.Task[None]] = set()

    def fetch(self, token: bytes, end: TunnelEnd) -> None:
        """Start to fetch the descriptor for `token`. If that fails, the tunnel stays with the relay."""
        task = asyncio.get_running_loop().create_task(self._fetch(token, end), name="iris-pair")
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    def cancel(self) -> None:
        """Stop all fetches, because the session has ended."""
        for task in self._fetching:
            task.cancel()

    async def _fetch(self, token: bytes, end: TunnelEnd) -> None:
        try:
            async with asyncio.timeout(FETCH_S):
                connection = await fetch_socket(self._path, self._trusted_user, token)
        except (IrisError, OSError) as err:  # TimeoutError is an OSError
            log.debug("tunnel.not_direct", extra={"fields": {"error": str(err)}})
            return
        self._tunnels.attach_pair(
            end, PairSocket(connection, self._buffer, self._tunnels, end, self._touch)
        )
        self._touch()


async def fetch_socket(path: Path, trusted_user: str, token: bytes) -> socket.socket:
    """Return the socket for a token, received as a descriptor from the relay at `path`.

    Raises:
        RelayUnavailable, OSError: the relay cannot be reached.
        PeerProtocolError: the relay sent no descriptor, or not one of a Unix stream socket.
    """
    loop = asyncio.get_running_loop()
    with await dial(path, trusted_user) as connection:
        await loop.sock_sendall(connection, encode_control(Fetch(token)))
        readable = loop.create_future()
        loop.add_reader(connection, _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(connection)
        # Not socket.recv_fds, which ignores its flags: a program started meanwhile would inherit the descriptor.
        _, passed, _, _ = connection.recvmsg(1, _ROOM, socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        descriptor
        for level, kind, data in passed
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(data)
    ]
    if not descriptors:  # the relay does not know the token, or this process is out of descriptors
        raise PeerProtocolError("the relay sent no descriptor for a direct tunnel")
    ours, *others = descriptors
    try:
        return _stream_socket(ours)
    except BaseException:
        os.close(ours)
        raise
    finally:
        for other in others:
            os.close(other)


def _stream_socket(descriptor: int) -> socket.socket:
    """Return the Unix stream socket that a descriptor is; it owns the descriptor then.

    Raises PeerProtocolError if it is anything else: the descriptor stays open, and the caller owns it.
    """
    try:
        ours = keep_from_child(socket.socket(fileno=descriptor))
    except OSError as err:
        raise PeerProtocolError(
            f"the relay sent a descriptor for a direct tunnel that is not a socket: {err.strerror}"
        ) from err
    if ours.family != socket.AF_UNIX or ours.type != socket.SOCK_STREAM:
        ours.detach()
        raise PeerProtocolError(
            f"the relay sent a descriptor of {ours.family!r} {ours.type!r} for a direct tunnel, "
            "not a Unix stream socket"
        )
    ours.setblocking(False)
    return ours


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class PairSocket:
    """This side's end of a tunnel's socket pair. Implements `iris.core.direct.PairEnd`."""

    __slots__ = (
        "_after_write", "_end", "_loop", "_lost", "_pieces", "_processing", "_reader", "_reading", "_socket", "_touch",
        "_tunnels", "_waiting", "closed", "queued_bytes", "received_bytes", "received_records", "sent_bytes",
        "sent_records",
    )  # fmt: skip

    def __init__(
        self, connection: socket.socket, buffer: ReceiveBuffer, tunnels: Tunnels, end: TunnelEnd, touch: Callable[[], None]
    ) -> None:  # fmt: skip
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._tunnels = tunnels
        self._end = end
        self._touch = touch
        self._reader = FrameReader(self._record, buffer, MAX_MESSAGE_BYTES)
        self._reading = False
        self._processing = False
        """Whether records that were read are being processed now."""
        self._pieces: list[bytes | memoryview] = []
        """Queued buffers: alternately a record's length and the record."""
        self._waiting = False
        """Whether the socket is full, and a writer is registered with the loop."""
        self._lost = False
        """Whether the socket is broken or shut down."""
        self._after_write: Callable[[], None] | None = None
        """Called once all that is queued was written, or the socket is broken."""
        self.closed = False
        self.queued_bytes = 0
        self.sent_records = self.sent_bytes = 0
        self.received_records = self.received_bytes = 0

    # -- writing ---------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return self._waiting and self.queued_bytes >= AHEAD_BYTES

    def send(self, record: bytes) -> None:
        if self._lost:
            return
        size = len(record)
        self._pieces.append(LENGTH.pack(size))
        self._pieces.append(record)
        self.queued_bytes += 4 + size
        self.sent_records += 1
        self.sent_bytes += size
        if self.queued_bytes >= WRITE_BYTES and not self._waiting:
            self._write()

    def flush(self) -> None:
        if self._pieces and not self._waiting and not self._lost:
            self._write()

    def finish(self, then: Callable[[], None]) -> None:
        self.flush()
        if self._pieces:
            self._after_write = then
        else:
            then()

    def _write(self) -> None:
        """Write until the queue is empty or the socket is full."""
        while self._pieces:
            pieces = self._pieces
            if len(pieces) > 8 and self.queued_bytes < SMALL_BYTES * len(pieces):
                pieces = self._pieces = [b"".join(pieces)]  # cheaper than many small buffers
            try:
                sent = self._socket.sendmsg(pieces[:MAX_PIECES])
            except (BlockingIOError, InterruptedError):
                self._wait()
                return
            except OSError:
                self._on_broken()
                return
            self.queued_bytes -= sent
            for index, piece in enumerate(pieces):
                size = len(piece)
                if sent < size:
                    self._pieces = pieces[index:]
                    if sent:
                        self._pieces[0] = memoryview(piece)[sent:]
                    break
                sent -= size
            else:
                self._pieces = []
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._socket)
        self._written()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        was_full = self.full
        self._write()
        if was_full and not self.full:
            self._end.wake()

    def _written(self) -> None:
        then, self._after_write = self._after_write, None
        if then is not None:
            then()
            self._touch()

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._socket, self._readable)

    def drain(self) -> None:
        while self._receive():
            pass

    def _readable(self) -> None:
        if not self._receive() and self._lost:
            self._on_broken()
        self._touch()

    def _receive(self) -> bool:
        """Read once and process the records; return whether there may be more to read."""
        if self.closed:
            return False
        view = self._reader.get_buffer()
        try:
            size = self._socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            size = 0
        if not size:
            self._lost = True
            return False
        self._processing = True
        try:
            self._reader.received(size)
        except PeerProtocolError as err:
            self._end.fail(str(err), notify=True)
        finally:
            self._processing = False
        return not self.closed

    def _record(self, buf: memoryview, start: int, end: int) -> None:
        self.received_records += 1
        self.received_bytes += end - start - 4
        self._end.arrived(buf[start + 4 : end])

    # -- its end ---------------------------------------------------------------------------------------------

    def _on_broken(self) -> None:
        """Read the rest, stop, and let the tunnel ask the relay why the socket broke."""
        if self.closed:
            return
        if (
            self._processing
        ):  # a record that is being processed caused a write: process all records first
            self._loop.call_soon(self._on_broken)
            return
        if self._reading:
            self.drain()
        if self.closed:
            return
        self._lost = True
        self._stop()
        self._pieces = []
        self.queued_bytes = 0
        self._written()
        self._tunnels.pair_lost(self._end)
        self._end.wake()
        self._touch()

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._socket)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._stop()
        self._lost = True
        self._pieces = []
        self.queued_bytes = 0
        self._after_write = None
        self._socket.close()
