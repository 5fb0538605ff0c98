"""A TCP proxy with faults: it can delay, lose, stall and cut the connections that pass through it.

    with FaultProxy(listener, dial) as proxy:
        proxy.delay_s = 0.1
        proxy.cut()

TCP repairs losses: a connection only sees a pause of one retransmission timeout, after which the bytes arrive
complete and in order. `loss` imitates that. Sockets belong to the network namespace in which they were created,
so a proxy can stand between two hosts although its thread belongs to this process.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

READ_BYTES = 64 << 10
HELD_BYTES = 4 << 20
"""Most bytes held for one direction of one connection. Beyond them the proxy does not read, as a full network."""
RETRANSMIT_S = 0.2
"""Shortest time after which Linux sends a lost segment again."""
END_S = 10.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send RST."""

T = TypeVar("T")


class FaultProxy:
    """Listens at `listener` and connects each client to the address from `dial`. Faults can be changed at any time.

    `dial` returns a fresh, unconnected socket and the address to connect it to; it is called for each connection. A
    context manager: at its end all connections are cut and no thread is left.
    """

    def __init__(
        self, listener: socket.socket, dial: Callable[[], tuple[socket.socket, tuple[Any, ...]]], *, seed: int = 1
    ) -> None:  # fmt: skip
        self.delay_s = 0.0
        """Delay of each direction. A change applies to bytes that are read after it."""
        self.loss = 0.0
        """Share of reads that are lost once, from 0 to 1. Each loss stops its direction for `RETRANSMIT_S`."""
        self.accepted = 0
        """Connections accepted so far."""
        self.passed_bytes = 0
        """Bytes passed on so far, in both directions."""
        self._listener = listener
        self._dial = dial
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault proxy")
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: dict[asyncio.Task[None], tuple[socket.socket, ...]] = {}
        self._failure: BaseException | None = None
        self._accepting: asyncio.Task[None]

    @property
    def port(self) -> int:
        """The port at which it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        self._listener.close()
        if self._failure is not None and error is None:
            raise self._failure

    def stall(self) -> None:
        """Pass nothing on, without closing anything, as a network without a route. Connections are still accepted."""
        self._call(self._set_flowing(False))

    def flow(self) -> None:
        """Pass bytes on again, first those that were held."""
        self._call(self._set_flowing(True))

    def cut(self) -> int:
        """Reset all connections on both sides; return how many. New ones are accepted."""
        return self._call(self._cut())

    def passes(self) -> None:
        """Return when bytes are passed on after this call. Raises TimeoutError if none are."""
        before = self.passed_bytes
        until_s = time.monotonic() + END_S
        while self.passed_bytes == before:
            if time.monotonic() > until_s:
                raise TimeoutError(f"nothing passed for {END_S:g} s")
            time.sleep(0.001)

    # -- in the proxy's thread -------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _cut(self) -> int:
        tasks = list(self._connections)
        for task in tasks:
            for end in self._connections[task]:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def _end(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await self._cut()

    async def _accept(self) -> None:
        while True:
            inner, _ = await self._loop.sock_accept(self._listener)
            inner.setblocking(False)
            self.accepted += 1
            try:
                outer, address = self._dial()
            except OSError as err:
                self._failure = err
                inner.close()
                continue
            outer.setblocking(False)
            task = self._loop.create_task(self._connection(inner, outer, address))
            self._connections[task] = (inner, outer)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for end in self._connections.pop(task):
            end.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    async def _connection(
        self, inner: socket.socket, outer: socket.socket, address: tuple[Any, ...]
    ) -> None:
        try:
            await self._loop.sock_connect(outer, address)
            async with asyncio.TaskGroup() as group:
                group.create_task(_Direction(self, inner, outer).run())
                group.create_task(_Direction(self, outer, inner).run())
        except* OSError:
            # When one side resets or cannot be reached, reset the other; the proxy itself goes on.
            for end in (inner, outer):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def due_s(self) -> float:
        """Return the time at which bytes that are read now are passed on, after any loss (called by the directions)."""
        lost = self._chance.random() < self.loss
        return self._loop.time() + self.delay_s + (RETRANSMIT_S if lost else 0.0)

    async def flowing(self) -> None:
        """Return when bytes may pass (called by the directions)."""
        await self._flowing.wait()


class _Direction:
    """One direction of a connection, from `source` to the other side."""

    def __init__(self, proxy: FaultProxy, source: socket.socket, target: socket.socket) -> None:
        self._proxy = proxy
        self._source = source
        self._target = target
        self._held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Pass bytes on until the source has ended and all of its bytes are passed on."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._write())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            data = await loop.sock_recv(self._source, READ_BYTES)
            # Keep the order: nothing overtakes bytes that were lost before it.
            due_s = max(due_s, self._proxy.due_s())
            self._held.append((due_s, data))
            self._held_bytes += len(data)
            self._changed.set()
            if not data:
                return
            await self._until(lambda: self._held_bytes <= HELD_BYTES)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._until(lambda: self._held)
            due_s, data = self._held[0]
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            await self._proxy.flowing()
            self._held.popleft()
            if not data:
                self._target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._target, data)
            self._held_bytes -= len(data)
            self._proxy.passed_bytes += len(data)
            self._changed.set()

    async def _until(self, true: Callable[[], object]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()
