"""What goes to one client: written at the end of the turn, within a bound in bytes, and said to the last word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from iris.transport import Writer

WRITE_HIGH_BYTES: Final = 1 << 20
"""Written and not taken by the client: tunnels wait."""
FLUSH_BYTES: Final = 256 << 10
"""Written before the turn of the loop ends."""
LINGER_S: Final = 2.0
"""How long a client may take to read the last that it is told, and to close."""


class FlushQueue:
    """The outlets of a bridge that have something to write: by the end of the turn, or when the bridge has acted on what came."""

    def __init__(self) -> None:
        self.scheduled = False
        self._outlets: list[ClientWriter] = []
        self._loop = asyncio.get_running_loop()

    def add(self, writer: ClientWriter) -> None:
        """It has something to write."""
        if not self.scheduled:
            self.scheduled = True
            self._loop.call_soon(self.flush)
        self._outlets.append(writer)

    def flush(self) -> None:
        """Write now."""
        self.scheduled = False
        outlets, self._outlets = self._outlets, []
        for writer in outlets:
            writer.flush()


class ClientWriter:
    """The writing side of a client's socket. `on_full` is told what a client left unread that is cut for it."""

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
        """It has said its last; the socket is closed by then, whatever the client does."""
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def write(self, data: bytes) -> None:
        """Write `data` by the end of the turn; a client that leaves too much unread is cut instead."""
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
        """Write now."""
        if self._out and not self._transport.is_closing():
            self._writer.write(self._out, self._out_bytes)
        self._out = []
        self._out_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the client leaves so much unread that tunnels wait."""
        return self._paused

    def pause(self) -> None:
        """The client does not read."""
        self._paused = True
        self._writable.clear()

    def resume(self) -> None:
        """It does again, or is gone."""
        self._paused = False
        self._writable.set()

    async def wait_writable(self) -> None:
        """Return when the client reads, or is gone."""
        while self._paused and not self._transport.is_closing():
            self._writable.clear()
            await self._writable.wait()

    def hang_up(self) -> None:
        """Say no more, and close when the client does: a socket closed with something unread takes what was said last with it."""
        self.flush()
        if self._lingering is None and not self._transport.is_closing():
            self._lingering = self._loop.call_later(LINGER_S, self._lingered)
            try:
                self._transport.write_eof()
            except OSError:  # it has gone meanwhile
                self._transport.abort()

    def _lingered(self) -> None:
        unread_bytes = self._transport.get_write_buffer_size()
        self._transport.abort()
        if unread_bytes:
            self._on_full(unread_bytes)

    def lost(self) -> None:
        """The socket is closed."""
        if self._lingering is not None:
            self._lingering.cancel()
        self.resume()
