"""A tunnel as a user sees it: whole messages in order, or chunks, and three ways to end.

`finish` says that no message follows (the other side's iteration ends); `close` ends both directions; anything else
breaks it, and both sides hear of it as TunnelBroken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from iris.core.bundle import Headers, check_headers
from iris.core.tunnel import TunnelEnd
from iris.deadlines import deadline, milliseconds, seconds_left
from iris.errors import ConnectionLost, MessageTooLarge, RequestTimeout, TunnelBroken
from iris.runtime import Runtime

DEFAULT_RECV_LIMIT = 64 << 20


class EndOfTunnel(Exception):
    """The other side finished: no message follows."""


class Tunnel:
    """One end of a tunnel. One task may send while another receives; two of a kind take turns."""

    __slots__ = (
        "_closing", "_end", "_parts", "_parts_bytes", "_readers", "_receiving", "_sending", "_skipping", "_too_large", "_touch",
        "_wait_writable", "_waiters",
    )  # fmt: skip

    def __init__(
        self,
        end: TunnelEnd,
        touch: Callable[[], None],
        wait_writable: Callable[[], Awaitable[None] | None],
    ) -> None:
        self._end = end
        self._touch = touch
        self._wait_writable = wait_writable
        self._waiters: list[asyncio.Future[None]] = []
        self._sending: asyncio.Lock | None = None
        self._receiving: asyncio.Lock | None = None
        self._closing = False
        # The message that recv is putting together: a cancelled recv leaves it for the next.
        self._parts: list[bytes | memoryview] | None = None
        self._readers = 0
        """Who receives, or waits to."""
        self._parts_bytes = 0
        self._too_large = False
        self._skipping = False
        """The rest of a message that recv_chunks was not asked for any more is discarded."""
        end.wake = self._wake

    @property
    def name(self) -> str:
        """The cluster."""
        return self._end.name

    @property
    def headers(self) -> Headers:
        """What the opener sent along."""
        return self._end.headers or {}

    @property
    def closed(self) -> bool:
        """Whether it ended in both directions: by both finishing, by one closing, or broken."""
        return self._end.ended

    async def send(self, data: bytes | bytearray | memoryview | str) -> None:
        """Send one message of any size; returns when its last byte is on the way.

        Waits for the receiver's credit. If it is cancelled or timed out on the way, the message begun is aborted: the
        receiver discards it, and the tunnel stays usable.

        Raises:
            TunnelBroken: the tunnel ended without being closed.
            Closed: this side finished, or the other side closed it.
        """
        if isinstance(data, str):
            data = data.encode()
        view = memoryview(data if type(data) is bytes else bytes(data))
        end = self._end
        if self._sending is None and not end.filling:
            # The whole message at once, without a lock, whenever credit allows.
            end.check_sending()
            sent, done = end.write(view, 0)
            self._touch()
            if done:
                await self._room()
                return
        else:
            sent = 0
        if self._sending is None:
            self._sending = asyncio.Lock()
        async with self._sending:
            try:
                while True:
                    end.check_sending()
                    before = sent
                    sent, done = end.write(view, sent)
                    self._touch()
                    if done:
                        break
                    if sent == before:
                        await self._changed()
                    await self._room()
            except BaseException:
                end.abort()
                self._touch()
                raise
        await self._room()

    async def recv(self, *, limit_bytes: int = DEFAULT_RECV_LIMIT) -> bytes:
        """Return the next whole message.

        Raises:
            EndOfTunnel: the other side finished or closed; no message follows.
            MessageTooLarge: it is over `limit_bytes`; the rest of it is discarded, and the next `recv` starts after it.
            TunnelBroken: the tunnel ended without being closed.
        """
        if not self._readers:
            # A message that is there at once, without a lock.
            message = self._message(limit_bytes)
            if message is not None:
                return message
        async with self._reading():
            while (message := self._message(limit_bytes)) is None:
                await self._changed()
            return message

    def _message(self, limit_bytes: int) -> bytes | None:
        """Return the next message if its last chunk is there; raises as `recv`."""
        end = self._end
        while (chunk := self._next()) is not None:
            flags, data = chunk
            size = len(data)
            if flags & 3 == 3 and size <= limit_bytes:
                return data  # type: ignore[return-value]  # a whole one is bytes
            if flags == 4:  # the sender gave up the message begun
                self._parts, self._parts_bytes, self._too_large = None, 0, False
                continue
            self._parts_bytes += size
            if self._too_large or self._parts_bytes > limit_bytes:
                self._parts, self._too_large = None, True
            elif self._parts is None:
                self._parts = [data]
            else:
                self._parts.append(data)
            if flags & 2:
                parts, too_large = self._parts, self._too_large
                self._parts, self._parts_bytes, self._too_large = None, 0, False
                if too_large:
                    raise MessageTooLarge(
                        f"a tunnel message is over {limit_bytes} bytes; use recv_chunks()"
                    )
                return b"".join(parts or ())
        self._check_more(end)
        return None

    async def recv_chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the chunks of the next message, of any size; raises as `recv`. Left early, the rest is discarded.

        Raises TunnelBroken, too, if the sender aborted the message: part of it was handed out.
        """
        async with self._reading():
            # A recv that was cancelled may have begun this message.
            begun, self._parts, self._parts_bytes = self._parts, None, 0
            started = bool(begun)
            self._skipping, self._too_large = started or self._skipping or self._too_large, False
            if begun:
                yield b"".join(begun)
                self._skipping = False
            while True:
                while (chunk := self._next()) is None:
                    self._check_more(self._end)
                    await self._changed()
                flags, data = chunk
                if flags == 4:
                    if started:
                        raise TunnelBroken(
                            f"tunnel to {self.name}: the sender gave up this message; the next may follow"
                        )
                    continue
                started = True
                self._skipping = not flags & 2
                yield data if type(data) is bytes else bytes(data)
                self._skipping = False
                if flags & 2:
                    return

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                message = await self.recv()
            except EndOfTunnel:
                return
            yield message

    async def finish(self) -> None:
        """Half-close: no message follows from this side; the other may still send."""
        self._end.finish()
        self._touch()
        await self._room()

    async def close(self) -> None:
        """End both directions; unread messages are discarded. Idempotent."""
        if not self._closing:
            self._closing = True
            self._end.close()
            self._touch()
            self._wake()

    def fail(self, reason: str) -> None:
        """Break it on both sides, e.g. because the handler raised."""
        self._end.fail(reason, notify=True)
        self._touch()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, EndOfTunnel):
            self.fail(
                f"the {'opener' if self._end.initiator else 'handler'} stopped: {kind.__name__ if kind else ''}"
            )
        else:
            await self.close()

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        """Wait until nobody else receives, and keep others waiting."""
        if self._receiving is None:
            self._receiving = asyncio.Lock()
        self._readers += 1
        try:
            async with self._receiving:
                yield
        finally:
            self._readers -= 1

    def _next(self) -> tuple[int, bytes | memoryview] | None:
        """Return the next chunk that is not skipped, if it is there."""
        end = self._end
        while (chunk := end.next_chunk()) is not None:
            if end.begun:  # credit
                self._touch()
            if not self._skipping:
                return chunk
            self._skipping = not chunk[0] & 6  # until the last chunk, or the abort
        return None

    def _check_more(self, end: TunnelEnd) -> None:
        """Raise what says that no chunk follows, if so."""
        if end.broken:
            raise TunnelBroken(f"tunnel to {end.name}: {end.broken}")
        if end.peer_finished or end.closed:
            raise EndOfTunnel(f"tunnel to {end.name}: the other side finished")

    async def _room(self) -> None:
        waiting = self._wait_writable()
        if waiting is not None:
            await waiting
        end = self._end
        while end.pair is not None and end.pair.full and not end.ended:
            await self._changed()

    async def _changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


async def open_tunnel(
    runtime: Runtime, cluster: str, timeout: float, headers: Headers | None
) -> Tunnel:
    """Open a tunnel to one member; raises as `Client.open_tunnel`."""
    until_s = deadline(timeout)
    attachment = runtime.attached()
    pump, session = await attachment.ready(cluster, timeout)
    if headers:
        check_headers(headers)
    key = runtime.registry.cluster_keys(cluster)[0]
    left_s = seconds_left(until_s)
    end = session.tunnels.open(cluster, key, headers, milliseconds(left_s))
    changed = asyncio.Event()
    end.wake = changed.set
    pump.touch()
    try:
        async with asyncio.timeout(left_s):
            while not end.open and not end.broken:
                changed.clear()
                await changed.wait()
    except BaseException as err:
        session.tunnels.drop(end)
        pump.touch()
        if isinstance(err, TimeoutError):
            raise RequestTimeout(
                cluster, f"no member accepted the tunnel within {timeout:g} s"
            ) from None
        raise
    if end.error is not None:
        raise end.error
    if end.broken:
        raise ConnectionLost(cluster, end.broken, may_have_run=False)
    return Tunnel(end, attachment.touch, attachment.writable)
