"""Tunnels: ordered, two-way streams of messages between a client and one member, throttled by the receiver.

A tunnel ends in one of three ways. `finish` ends one direction, so that the other side's iteration ends. `close` ends
both directions. Everything else breaks the tunnel, and both sides get TunnelBroken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from iris.core.bundle import Headers, check_headers
from iris.core.tunnel import TunnelEnd
from iris.deadlines import (
    HANDLED,
    deadline,
    explain_cut,
    inherited_s,
    milliseconds,
    seconds_left,
)
from iris.errors import (
    ConnectionLost,
    MessageTooLarge,
    RequestError,
    RequestTimeout,
    TunnelBroken,
    with_deadline,
)  # fmt: skip
from iris.iterating import Items, Iteration
from iris.one_process import OneProcess
from iris.runtime import Runtime

DEFAULT_RECV_LIMIT = 64 << 20
"""Default of `recv(limit_bytes=...)`."""


class EndOfTunnel(Exception):
    """The other side finished or closed the tunnel, and all of its messages were received."""


class Tunnel(OneProcess, Items[bytes]):
    """One end of a tunnel. Iterate over it with `async for` to receive messages until the other side finishes.

    One task may send while another one receives. Several tasks that send, or that receive, wait for each other.
    """

    __slots__ = (
        "_closing", "_end", "_parts", "_parts_bytes", "_readers", "_receiving", "_sending", "_skipping",
        "_too_large", "_touch", "_wait_writable", "_waiters",
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
        self._parts: list[bytes | memoryview] | None = None
        """Chunks of the message that `recv` is assembling. A cancelled `recv` leaves them for the next one."""
        self._readers = 0
        """Number of tasks that receive, or wait for their turn to."""
        self._parts_bytes = 0
        self._too_large = False
        """Whether the message being assembled is over the limit, so that its chunks are discarded."""
        self._skipping = False
        """Whether the rest of a message is discarded, because the iteration over its chunks was abandoned."""
        end.wake = self._wake

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self._end.name

    @property
    def headers(self) -> Headers:
        """Headers that the opener of the tunnel sent."""
        return self._end.headers or {}

    @property
    def closed(self) -> bool:
        """Whether the tunnel has ended in both directions: both sides finished, one side closed it, or it broke."""
        return self._end.ended

    async def send(self, data: bytes | bytearray | memoryview | str) -> None:
        """Send one message of any size, and return when its last byte is on its way.

        Waits while the receiver does not grant credit. If this call is cancelled before the end, the message is
        aborted: the receiver discards it, and the tunnel stays usable.

        Raises:
            TunnelBroken: the tunnel ended although neither side closed it.
            Closed: this side finished, or the other side closed the tunnel.
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
                await self._wait_for_room()
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
                        await self._wait_for_change()
                    await self._wait_for_room()
            except BaseException:
                end.abort()
                self._touch()
                raise
        await self._wait_for_room()

    async def recv(self, *, limit_bytes: int = DEFAULT_RECV_LIMIT) -> bytes:
        """Return the next message.

        Raises:
            EndOfTunnel: the other side finished or closed the tunnel; there are no more messages.
            MessageTooLarge: the message is over `limit_bytes`. It is discarded, and the next `recv` returns the
            one after it. TunnelBroken: the tunnel ended although neither side closed it.
        """
        if not self._readers:
            # If the message has arrived already, it is returned without a lock.
            message = self._message(limit_bytes)
            if message is not None:
                return message
        await self._begin_turn()
        try:
            while (message := self._message(limit_bytes)) is None:
                await self._wait_for_change()
            return message
        finally:
            self._end_turn()

    def _message(self, limit_bytes: int) -> bytes | None:
        """Return the next message if all of it has arrived, else None. Raises as `recv`."""
        end = self._end
        while (chunk := self._next()) is not None:
            flags, data = chunk
            size = len(data)
            if flags & 3 == 3 and size <= limit_bytes:
                return data  # type: ignore[return-value]  # a message in one chunk is bytes
            if flags == 4:  # the sender aborted this message
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
                        f"a tunnel message is over the limit of {limit_bytes} bytes; pass a larger limit_bytes, or use recv_chunks()"
                    )
                return b"".join(parts or ())
        self._check_more(end)
        return None

    def recv_chunks(self) -> Iteration[bytes]:
        """Iterate over the chunks of the next message, which may have any size.

        If you leave the iteration early, the rest of the message is discarded. Raises as `recv`, and also
        TunnelBroken if the sender aborts the message after some of its chunks were yielded.
        """
        return _Chunks(self)

    @property
    def _of(self) -> str:
        return self._end.name

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except EndOfTunnel:
            raise StopAsyncIteration from None

    async def finish(self) -> None:
        """End this direction. The other side's iteration ends after the messages sent so far; it may still send."""
        self._end.finish()
        self._touch()
        await self._wait_for_room()

    async def close(self) -> None:
        """End both directions. Unread messages are discarded. Idempotent."""
        if not self._closing:
            self._closing = True
            self._end.close()
            self._touch()
            self._wake()

    def fail(self, reason: str) -> None:
        """Break the tunnel on both sides; the other side gets TunnelBroken with `reason`."""
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
                f"the {'opener' if self._end.initiator else 'handler'} of the tunnel raised {kind.__name__ if kind else ''}"
            )
        else:
            await self.close()

    async def _begin_turn(self) -> None:
        """Wait for other receivers, and make later ones wait until `_end_turn`."""
        if self._receiving is None:
            self._receiving = asyncio.Lock()
        self._readers += 1
        try:
            await self._receiving.acquire()
        except BaseException:
            self._readers -= 1
            raise

    def _end_turn(self) -> None:
        assert self._receiving is not None  # it has begun
        self._receiving.release()
        self._readers -= 1

    def _next(self) -> tuple[int, bytes | memoryview] | None:
        """Return the next (flags, chunk) that is not skipped; None if it has not arrived."""
        end = self._end
        while (chunk := end.next_chunk()) is not None:
            if end.begun:  # credit to send
                self._touch()
            if not self._skipping:
                return chunk
            self._skipping = not chunk[0] & 6  # until the last chunk, or the abort
        return None

    def _check_more(self, end: TunnelEnd) -> None:
        """Raise TunnelBroken or EndOfTunnel if no more chunks can arrive."""
        if end.broken:
            raise TunnelBroken(f"tunnel to {end.name}: {end.broken}")
        if end.peer_finished or end.closed:
            raise EndOfTunnel(f"tunnel to {end.name}: the other side finished")

    async def _wait_for_room(self) -> None:
        """Wait until there is room to write, or the tunnel has ended."""
        waiting = self._wait_writable()
        if waiting is not None:
            await waiting
        end = self._end
        while end.pair is not None and end.pair.full and not end.ended:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait for a change of the tunnel: chunks, credit, room or its end."""
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


class _Chunks(Iteration[bytes]):
    """Iterates over the chunks of one message. Other receivers wait until it ends."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._taking = asyncio.Lock()
        """Held by the one task that waits for the next chunk."""
        self._turn = False
        """Whether it is the turn of this receiver."""
        self._started = False
        """Whether a part of the message was yielded."""
        self._last = False
        """Whether no more of the message will arrive."""

    @property
    def _of(self) -> str:
        return self._tunnel._of

    async def __anext__(self) -> bytes:
        async with self._taking:
            self._begun()
            try:
                return await self._chunk(self._tunnel)
            except asyncio.CancelledError:
                raise
            except BaseException:
                self._end()
                raise

    async def _chunk(self, tunnel: Tunnel) -> bytes:
        if not self._turn:
            await tunnel._begin_turn()
            self._turn = True
            # A cancelled `recv` may have received the first chunks of this message.
            begun, tunnel._parts, tunnel._parts_bytes = tunnel._parts, None, 0
            tunnel._skipping, tunnel._too_large = tunnel._skipping or tunnel._too_large, False
            if begun:
                self._started = True
                return b"".join(begun)
        while not self._last:
            while (chunk := tunnel._next()) is None:
                tunnel._check_more(tunnel._end)
                await tunnel._wait_for_change()
                self._begun()
            flags, data = chunk
            if flags != 4:
                self._started, self._last = True, bool(flags & 2)
                return data if type(data) is bytes else bytes(data)
            if self._started:
                self._last = True
                raise TunnelBroken(
                    f"tunnel to {tunnel.name}: the sender aborted this message; the tunnel stays usable"
                )
        raise StopAsyncIteration

    def _release(self) -> None:
        if self._turn:
            if self._started and not self._last:
                self._tunnel._skipping = True
            self._tunnel._end_turn()
            self._tunnel._wake()


async def open_tunnel(
    runtime: Runtime, cluster: str, timeout: float, headers: Headers | None, member: str
) -> Tunnel:
    """Open a tunnel to one member. Raises as `Client.open_tunnel`."""
    left_s = inherited_s(cluster, timeout) if HANDLED else None
    if left_s is not None:
        try:
            return await _open_tunnel(runtime, cluster, left_s, headers, member)
        except RequestTimeout as err:
            explain_cut(err, timeout)
            raise
    return await _open_tunnel(runtime, cluster, timeout, headers, member)


async def _open_tunnel(
    runtime: Runtime, cluster: str, timeout: float, headers: Headers | None, member: str
) -> Tunnel:
    until_s = deadline(timeout)
    attachment = runtime.attached()
    pump, session = await attachment.ready(cluster, timeout)
    if headers:
        check_headers(headers)
    key = runtime.registry.cluster_keys(cluster)[0]
    left_s = seconds_left(until_s)
    end = session.tunnels.open(cluster, key, headers, milliseconds(left_s), member)
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
            what = "no member accepted the tunnel"
            late = RequestTimeout(cluster, f"{what} within {timeout:g} s")
            runtime.name_timeout(with_deadline(late, what, timeout), timeout, until_s)
            raise late from None
        raise
    if end.error is not None:
        if isinstance(end.error, RequestError):
            runtime.name_timeout(end.error, timeout, until_s)
        raise end.error
    if end.broken:
        raise ConnectionLost(cluster, end.broken, may_have_run=False)
    return Tunnel(end, attachment.touch, attachment.writable)
