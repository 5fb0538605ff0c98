"""Accepts connections, and limits how many of them a process holds, from the first byte to the closed descriptor.

    accept ── Places.enter ── TLS ── protocol ── hold ── … ── release ── closing ── descriptor closed

A connection is *loose* while nobody would miss it: its TLS handshake is not done, it has not shown who it is, it has no
request under way, or it is being closed. When a limit is reached, the oldest loose one is aborted, without a word to
its peer; if there is none, the new connection is closed. Either way the reason is counted and logged by the owner.

An accepted connection counts until its descriptor is closed, whatever closes it: see `Accepted`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

HANDSHAKE_S: Final = 5.0
"""Time limit of a TLS handshake."""
RETRY_S: Final = 0.2
"""Pause of a listener when no descriptor is free."""
RESERVED: Final = 2048
"""Descriptors that are not for connections of the main kind: other listeners, files, connections to other hosts."""
STRANGERS_PART: Final = 8
"""A kind of listener may have an eighth of the reserve for strangers: see `strangers_that_fit`."""
HALF_OPEN: Final = "too many half-open"
"""Reason for which the connection of a stranger makes room for another one."""
FULL: Final = "no free place"
"""Reason for which a new connection is closed: no loose one could make room."""
TOO_LONG: Final = "TLS handshake took too long"
_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def descriptor_limit() -> tuple[int, int]:
    """Return how many descriptors this process may have, and how many of them are reserved: a quarter, but at most
    `RESERVED`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    return limit, min(limit // 4, RESERVED)


def connections_that_fit(wanted: int, each: int = 1) -> int:
    """Return how many of `wanted` connections fit the free descriptors without the reserve, if one takes `each`."""
    limit, reserved = descriptor_limit()
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no /proc
        used = 0
    return max(1, min(wanted, (limit - reserved - used) // each))


def strangers_that_fit(wanted: int, part: int) -> int:
    """Return how many of `wanted` connections of strangers fit the `part`th part of the reserve.

    The kinds of listeners of a process have different parts, so that strangers at all of them leave descriptors.
    """
    return max(1, min(wanted, descriptor_limit()[1] // part))


def handshake_failure(error: BaseException) -> str:
    """Return why a handshake failed on this side: one of three texts, under which refusals are counted."""
    if isinstance(error, ssl.SSLError):
        return "TLS failure"
    if isinstance(error, TimeoutError):
        return TOO_LONG
    # asyncio reports a handshake over its time limit as a ConnectionAbortedError, too.
    if isinstance(error, ConnectionAbortedError) and "longer than" in str(error):
        return TOO_LONG
    return "connection ended in the TLS handshake"


class Accepted(socket.socket):
    """An accepted connection. It leaves its `Places` when its descriptor is closed, and not before.

    asyncio closes the socket of a transport, and uvloop detaches it as it closes the descriptor. Both do so at the end
    of all that TLS and unsent data keep a closing connection waiting for.
    """

    __slots__ = ("_places", "_task", "_transport", "address", "cut")

    def __init__(self, connection: socket.socket, address: Any, places: Places | None) -> None:
        """Take over the descriptor of `connection`, whose peer has `address`."""
        kind = connection.family, connection.type, connection.proto
        super().__init__(*kind, fileno=connection.detach())
        self._places = places
        self.address = address
        self.cut: Callable[[], object] | None = None
        """What the owner does to abort the connection, if anything but the transport must know."""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def close(self) -> None:
        super().close()
        self._gone()

    def detach(self) -> int:
        descriptor = super().detach()
        self._gone()
        return descriptor

    @property
    def host(self) -> str:
        """Address of the peer, without its port; empty for a Unix socket."""
        return self.address[0] if self.address else ""

    def abort(self) -> None:
        """End the connection at once. The descriptor is closed within the next turns of the event loop."""
        if self.cut is not None:
            self.cut()
        elif self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()
        else:
            self.close()

    def _gone(self) -> None:
        if self.fileno() != -1:
            return
        if self._places is not None:
            self._places._leave(self)
            self._places = None
        # They refer to it, too.
        self.cut = self._task = self._transport = None


class Places:
    """The connections of one kind of listener: all of them, and those that are loose."""

    def __init__(
        self, refused: Callable[[Accepted, str], None], *, reason: str, loose: Callable[[], int], total: Callable[[], int] | None = None,
        choose: Callable[[Collection[Accepted]], Accepted] | None = None,
    ) -> None:  # fmt: skip
        """`loose` and `total` return the limits.

        `refused` is called with a connection that is aborted, for `reason`, or closed as it arrives, for `FULL`.
        `choose` chooses the loose connection that makes room, by default the oldest.
        """
        self._refused = refused
        self._reason = reason
        self._loose_limit = loose
        self._total_limit = total
        self._choose = choose or (lambda loose: next(iter(loose)))
        self.open: set[Accepted] = set()
        self.loose: dict[Accepted, None] = {}
        """The oldest first; one that was released counts from then on."""
        self._ending: set[Accepted] = set()
        """Aborted, and not gone yet. They count as loose."""

    def enter(self, connection: Accepted) -> bool:
        """Count a new connection, and make room for it; False if there is none, so that it must be closed."""
        full = len(self.loose) + len(self._ending) >= self._loose_limit()
        if full or (self._total_limit is not None and len(self.open) >= self._total_limit()):
            if not self.loose:
                self._refused(connection, FULL)
                return False
            self._make_room(self._choose(self.loose))
        self.open.add(connection)
        self.loose[connection] = None
        return True

    def hold(self, connection: Accepted) -> None:
        """Note that a connection is not loose any more. Idempotent."""
        self.loose.pop(connection, None)

    def release(self, connection: Accepted) -> None:
        """Note that a connection is loose from now on, as when it is being closed. Idempotent."""
        if connection in self.open and connection not in self._ending:
            self.loose.setdefault(connection)

    def _make_room(self, connection: Accepted) -> None:
        del self.loose[connection]
        self._ending.add(connection)
        self._refused(connection, self._reason)
        connection.abort()

    def _leave(self, connection: Accepted) -> None:
        self.open.discard(connection)
        self.loose.pop(connection, None)
        self._ending.discard(connection)


class Acceptor:
    """Passes every connection, non-blocking, with the peer's address to `accepted`, which then owns it.

    One that finds no room in `places` is passed to `turned_away`, if given, and closed. The acceptor accepts up to
    `per_turn` connections of one listener and then pauses that listener for `pause_s`, so that strangers do not slow
    members down. While no descriptor is free it calls `starved`, and new connections wait in the kernel's backlog;
    those that are served already continue.
    """

    def __init__(
        self, accepted: Callable[[Accepted, Any], None], starved: Callable[[OSError], None], *, per_turn: int,
        pause_s: float = 0.0, places: Places | None = None, turned_away: Callable[[Accepted], None] | None = None,
    ) -> None:  # fmt: skip
        self._accepted = accepted
        self._starved = starved
        self._per_turn = per_turn
        self._pause_s = pause_s
        self._places = places
        self._turned_away = turned_away
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
        self, connection: Accepted, protocol: Callable[[], asyncio.BaseProtocol], failed: Callable[[OSError], None], **tls: Any
    ) -> asyncio.Task[None]:  # fmt: skip
        """Start to attach an accepted connection to what `protocol` returns; the task ends when that is done.

        With `ssl`, a handshake may take `HANDSHAKE_S`. If it fails, the connection is closed and `failed` is called
        with the error. If the task is cancelled, as by `connection.abort`, the connection is closed, too.
        """
        if tls.get("ssl") is not None:
            tls = {"ssl_handshake_timeout": HANDSHAKE_S, **tls}
        attaching = self._attach(connection, protocol, failed, tls)
        task = self._loop.create_task(attaching, name="iris-accept")
        self.attaching.add(task)
        connection._task = task
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
        self, connection: Accepted, protocol: Callable[[], asyncio.BaseProtocol], failed: Callable[[OSError], None],
        tls: dict[str, Any],
    ) -> None:  # fmt: skip
        try:
            transport, _ = await self._loop.connect_accepted_socket(protocol, connection, **tls)
        except OSError as err:  # TLS errors included
            connection.close()
            failed(err)
        else:
            connection._transport = transport

    def _attached(self, connection: Accepted, task: asyncio.Task[None]) -> None:
        self.attaching.discard(task)
        if task.cancelled():
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        pause_s = self._pause_s
        for _ in range(self._per_turn):
            try:
                raw, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                if err.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._starved(err)
                pause_s = RETRY_S
                break
            raw.setblocking(False)
            connection = Accepted(raw, address, self._places)
            if self._places is None or self._places.enter(connection):
                self._accepted(connection, address)
            else:
                with contextlib.suppress(OSError):
                    if self._turned_away is not None:
                        self._turned_away(connection)
                connection.close()
            if listener not in self._listeners:
                return  # `accepted` has stopped listening
        if pause_s:
            self._loop.remove_reader(listener)
            self._pauses[listener] = self._loop.call_later(pause_s, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        del self._pauses[listener]
        self._loop.add_reader(listener, self._accept, listener)
