"""Accepts connections, a limited number per turn of the event loop, and attaches them to protocols."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

RETRY_S: Final = 0.2
"""Pause of a listener when no descriptor is free."""
_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Passes every connection, non-blocking, with the peer's address to `accepted`, which then owns it.

    It accepts up to `per_turn` connections of one listener and then pauses that listener for `pause_s`, so that
    strangers do not slow members down. While no descriptor is free it calls `starved`, and new connections wait in
    the kernel's backlog; those that are served already continue.
    """

    def __init__(
        self, accepted: Callable[[socket.socket, Any], None], starved: Callable[[OSError], None], *, per_turn: int,
        pause_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._accepted = accepted
        self._starved = starved
        self._per_turn = per_turn
        self._pause_s = pause_s
        self._loop: asyncio.AbstractEventLoop
        self.attaching: set[asyncio.Task[None]] = set()
        """Tasks that attach connections to their protocols."""
        self._listeners: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Accept from `listeners`, which stay the caller's to close after `stop`."""
        self._loop = asyncio.get_running_loop()
        for listener in listeners:
            self._listeners.append(listener)
            self._loop.add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Accept no more. Idempotent."""
        for listener in self._listeners:
            pause = self._pauses.pop(listener, None)
            if pause is None:
                self._loop.remove_reader(listener)
            else:
                pause.cancel()
        self._listeners.clear()

    def attach(
        self, connection: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], failed: Callable[[OSError], None], **tls: Any
    ) -> asyncio.Task[None]:  # fmt: skip
        """Start to attach an accepted connection to what `protocol` returns; the task ends when that is done.

        If it fails, the connection is closed and `failed` is called with the error. If the task is cancelled, the
        connection is closed, too.
        """
        attaching = self._attach(connection, protocol, failed, tls)
        task = self._loop.create_task(attaching, name="iris-accept")
        self.attaching.add(task)
        task.add_done_callback(partial(self._attached, connection))
        return task

    def cancel(self) -> None:
        """Close every connection that is not attached yet. Idempotent."""
        for task in self.attaching:
            task.cancel()

    async def closed(self) -> None:
        """Return when no connection is being attached any more."""
        await asyncio.gather(*self.attaching, return_exceptions=True)

    async def _attach(
        self, connection: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], failed: Callable[[OSError], None],
        tls: dict[str, Any],
    ) -> None:  # fmt: skip
        try:
            await self._loop.connect_accepted_socket(protocol, connection, **tls)
        except OSError as err:  # TLS errors included
            connection.close()
            failed(err)

    def _attached(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self.attaching.discard(task)
        if task.cancelled():
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        pause_s = self._pause_s
        for _ in range(self._per_turn):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._starved(err)
                pause_s = RETRY_S
                break
            connection.setblocking(False)
            self._accepted(connection, address)
            if listener not in self._listeners:
                return  # `accepted` has stopped listening
        if pause_s:
            self._loop.remove_reader(listener)
            self._pauses[listener] = self._loop.call_later(pause_s, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        del self._pauses[listener]
        self._loop.add_reader(listener, self._accept, listener)
