"""A tunnel between two clients of one bridge: it passes messages from end to end without a relay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import iris

AHEAD_BYTES: Final = 256 << 10
"""Bytes that one end holds without making the sender wait.

A longer message stays with its sender, who accounts for it.
"""


class LocalTunnelEnd:
    """One end of a tunnel, with the methods of `iris.Tunnel` that `tunnels.py` uses. Made by `local_tunnel`."""

    def __init__(self, name: str) -> None:
        self.peer: LocalTunnelEnd
        self.on_message: Callable[[bytes], bool] = _refuse
        """Accepts a message if nothing is queued before it and it can be forwarded at once."""
        self._name = name
        self._queue: deque[tuple[bytes, asyncio.Future[None] | None]] = deque()
        self._held = 0
        """Bytes of queued messages whose senders do not wait."""
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._ended = False
        """Whether the peer closed the tunnel."""
        self._broken = ""

    def offer(self, data: bytes) -> bool:
        """Forward a message at once if the other end waits for one and accepts it; return whether it did."""
        peer = self.peer
        if peer._waiter is None or peer._queue or self._closed or self._ended or self._broken:
            return False
        return peer.on_message(data)

    async def send(self, data: bytes) -> None:
        """Return when the other end has accepted the message or queued it within `AHEAD_BYTES`.

        Raises as `iris.Tunnel`.
        """
        self._check_sending()
        peer = self.peer
        if peer._held + len(data) <= AHEAD_BYTES:
            peer._held += len(data)
            peer._queue.append((data, None))
            peer._wake()
            return
        delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = data, delivered
        peer._queue.append(entry)
        peer._wake()
        try:
            await delivered
        except asyncio.CancelledError:
            if entry in peer._queue:
                peer._queue.remove(entry)
            raise

    async def recv_chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the chunks of the next message, which here is one. Raises as `iris.Tunnel`."""
        while not self._queue:
            if self._broken:
                raise iris.TunnelBroken(f"tunnel to {self._name}: {self._broken}")
            if self._ended or self._closed:
                raise iris.EndOfTunnel(f"tunnel to {self._name}: the other side finished")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data, delivered = self._queue.popleft()
        if delivered is None:
            self._held -= len(data)
        elif not delivered.done():
            delivered.set_result(None)
        yield data

    async def close(self) -> None:
        """End both directions; the other end still receives what was sent to it. Idempotent."""
        if not self._closed and not self._broken:
            self._closed = True
            self._discard()
            self.peer._ended = True
            self.peer._wake()
            self._wake()

    def fail(self, reason: str) -> None:
        """Break both ends. Idempotent."""
        if self._closed or self._broken:
            return
        if not self._ended:
            self.peer._broken = reason
            self.peer._wake()
        self._broken = reason
        self._discard()
        self._wake()

    def _check_sending(self) -> None:
        if self._broken:
            raise iris.TunnelBroken(f"tunnel to {self._name}: {self._broken}")
        if self._closed or self._ended:
            raise iris.Closed(f"tunnel to {self._name}: the tunnel is closed")

    def _discard(self) -> None:
        """Drop the queued messages and raise in their senders."""
        queue, self._queue = self._queue, deque()
        self._held = 0
        for _, delivered in queue:
            if delivered is not None and not delivered.done():
                if self._broken:
                    delivered.set_exception(
                        iris.TunnelBroken(f"tunnel to {self._name}: {self._broken}")
                    )
                else:
                    delivered.set_exception(
                        iris.Closed(f"tunnel to {self._name}: the tunnel is closed")
                    )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def local_tunnel(name: str) -> tuple[LocalTunnelEnd, LocalTunnelEnd]:
    """Return the two ends of a tunnel to `name`."""
    ends = LocalTunnelEnd(name), LocalTunnelEnd(name)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends


def _refuse(data: bytes) -> bool:
    return False
