"""Write bytes to one client at the end of each turn of the loop, within a limit in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from iris.transport import Writer

WRITE_HIGH_BYTES: Final = 1 << 20
"""Bytes that the client may leave unread before its tunnels wait."""
FLUSH_BYTES: Final = 256 << 10
"""Bytes that are written at once, before the turn of the loop ends."""
LINGER_S: Final = 2.0
"""Time in which a client must read the last bytes sent to it and close its socket."""


class FlushQueue:
    """Writers of one bridge with bytes to write.

    They are flushed at the end of the turn, or once all received frames are processed.
    """

    def __init__(self) -> None:
        self.scheduled = False
        self._writers: list[ClientWriter] = []
        self._loop = asyncio.get_running_loop()

    def add(self, writer: ClientWriter) -> None:
        """Add a writer that has bytes to write."""
        if not self.scheduled:
            self.scheduled = True
            self._loop.call_soon(self.flush)
        self._writers.append(writer)

    def flush(self) -> None:
        """Flush all writers now."""
        self.scheduled = False
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()


class ClientWriter:
    """The writing side of a client's socket.

    `on_full` gets the number of unread bytes when the client is disconnected for it.
    """

    def __init__(
        self, transport: asyncio.Transport, limit_bytes: int, on_full: Callable[[int], None], flush_queue: FlushQueue,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._writer = Writer(transport)
        self._flush_queue = flush_queue
        self._limit_bytes = limit_bytes
        self._on_full = on_full
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._paused = False
        self._writable = asyncio.Event()
        self._lingering: asyncio.TimerHandle | None = None
        """Timer that closes the socket after `hang_up`, whatever the client does."""
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def write(self, data: bytes) -> None:
        """Write `data` by the end of the turn.

        A client that leaves more than the limit unread is disconnected instead.
        """
        if self._lingering is not None or self._transport.is_closing():
            return
        held = self._out_bytes + self._transport.get_write_buffer_size()
        if held and held + len(data) > self._limit_bytes:
            self._out = []
            self._transport.abort()
            self._on_full(held)
            return
        if not self._out:
            self._flush_queue.add(self)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is queued now."""
        if self._out and not self._transport.is_closing():
            self._writer.write(self._out, self._out_bytes)
        self._out = []
        self._out_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the client leaves so much unread that tunnels wait."""
        return self._paused

    def pause(self) -> None:
        """Note that the client does not read."""
        self._paused = True
        self._writable.clear()

    def resume(self) -> None:
        """Note that the client reads again or has left."""
        self._paused = False
        self._writable.set()

    async def wait_writable(self) -> None:
        """Return when the client reads or has left."""
        while self._paused and not self._transport.is_closing():
            self._writable.clear()
            await self._writable.wait()

    def hang_up(self) -> None:
        """Send no more, and close the socket when the client does.

        A socket that is closed with unread input drops what was sent last.
        """
        self.flush()
        if self._lingering is None and not self._transport.is_closing():
            self._lingering = self._loop.call_later(LINGER_S, self._lingered)
            try:
                self._transport.write_eof()
            except OSError:  # the client has left meanwhile
                self._transport.abort()

    def _lingered(self) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        self._transport.abort()
        if unread_bytes:
            self._on_full(unread_bytes)

    def lost(self) -> None:
        """Clean up after the socket was closed."""
        if self._lingering is not None:
            self._lingering.cancel()
        self.resume()
