"""An SP socket on an event loop. With `opening` this is the only user of pynng; these are its pitfalls:

* Sockets without contexts are read and written without waiting, when nng's descriptors show that it is
  possible. This is several times as fast as pynng's asyncio calls, which cost a callback thread, two
  futures and an aio each, and there is nothing to cancel.
* Requests and surveys need contexts, which have asyncio calls only. A cancellation that comes as such a
  call completes is swallowed (pynng issue 128). Loops over them check their own flag, and are woken at
  the end by closing the context.
* If nng could not send a message, its sender owns it again, but pynng does not free it:
  `SpContext.send` does.
* A peer that nng refuses is removed without having been added, and a peer may be removed before it is
  added. pynng then keeps for ever what it adds, and also the pipe of a message whose peer has left.
  Messages are received in a way that avoids this.
* A raw respondent queues 2 messages for each peer, and drops more without a report. A pub or bus socket
  drops from its queue, and a surveyor drops beyond 8 for each peer. nng's statistics say how much was
  written to each peer, but not over ws: see `SpSocket.written`.
* `nng_close` blocks, callbacks come from nng's threads, and nng does not linger. So sockets are closed
  in a thread, after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import pynng
from pynng._aio import AIOHelper

from relay.bridges.sp.config import SocketConfig
from relay.bridges.sp.opening import new_socket, start
from relay.bridges.sp.tally import Tally

Closed = pynng.Closed
SpError = pynng.NNGException
"""Raised by any operation on a socket. Closed means the end of the socket."""
SpTimeout = pynng.Timeout

MAX_STATS_AGE_S: Final = 0.05
"""Longest time for which nng's statistics are cached."""
TURN_MESSAGES: Final = 64
"""Messages received at once before other tasks of the event loop have their turn."""


class Peers:
    """The SP connections of a socket, as the event loop knows them."""

    def __init__(self) -> None:
        self.pipes: dict[int, Any] = {}
        self.since: dict[int, int] = {}
        """Number of messages sent before each peer connected: pipe number -> count."""
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.pipes)

    async def wait(self, wanted: Callable[[], bool]) -> None:
        """Return when `wanted()` is true. It is evaluated at every change."""
        while not wanted():
            self._changed.clear()
            await self._changed.wait()

    def changed(self) -> None:
        """Wake everything that waits, to evaluate its condition again."""
        self._changed.set()

    def add(self, number: int, pipe: Any, sent: int) -> None:
        """Add a connection."""
        self.pipes[number] = pipe
        self.since[number] = sent
        self.changed()

    def remove(self, number: int) -> None:
        """Remove a connection."""
        self.pipes.pop(number, None)
        self.since.pop(number, None)
        self.changed()


class SpSocket:
    """The socket of one entry. `open` it, and `close` it in a thread, because that blocks."""

    def __init__(self, config: SocketConfig, tally: Tally) -> None:
        self.config = config
        self.tally = tally
        self.peers = Peers()
        self.url = config.address
        """The address that it listens on, with the port that it got, or the one that it dials."""
        self.closed = False
        self._last_behind = 0
        self._written: dict[int, int] = {}
        self._stats_expire_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._socket: Any = None
        self._contexts: list[Any] = []
        self._admitted: set[int] = set()
        """Numbers of the connected pipes. Changed by nng's threads, which call one at a time."""
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def open(self) -> None:
        """Listen or begin to dial.

        Raises:
            ConfigError: nng refused the address, a file or a setting.
        """
        self._socket = new_socket(self.config)
        self._socket.add_pre_pipe_connect_cb(self._admit)
        self._socket.add_post_pipe_connect_cb(self._on_connect)
        self._socket.add_post_pipe_remove_cb(self._on_disconnect)
        self.url = start(self._socket, self.config)

    def close(self) -> None:
        """Close the socket; blocks until nng's threads are done. Waiting calls raise Closed."""
        for context in self._contexts:
            with contextlib.suppress(SpError):
                context.close()
        if self._socket is not None:
            self._socket.close()

    def forget_descriptors(self) -> None:
        """Stop watching the descriptors, which close with the socket. Call it on the event loop, before `close`."""
        self._last_behind = self.behind()
        self.closed = True
        for descriptor, waiter in list(self._waiting.items()):
            self._loop.remove_reader(descriptor)
            if not waiter.done():
                waiter.cancel()
        self._waiting.clear()

    # -- without waiting -------------------------------------------------------------------------------------

    def receive_now(self) -> bytes | None:
        """Return the next message, or None if there is none."""
        try:
            data: bytes = self._socket.recv(block=False)
        except pynng.TryAgain:
            return None
        except Closed:
            raise
        except SpError as err:
            self.tally.count_lost(f"sp: {type(err).__name__}", err)
            return None
        except RuntimeError:
            data = b""  # an empty message has no bytes, and pynng fails to read them
        self.tally.from_sp += 1
        return data

    def send_now(self, data: bytes) -> bool:
        """Send if nng accepts the message. pub and bus sockets always do, and drop it for a peer that is behind."""
        try:
            self._socket.send(data, block=False)
        except pynng.TryAgain:
            return False
        self.tally.to_sp += 1
        return True

    def receive_message(self) -> Received | None:
        """Return the next message with its sender, or None if there is none."""
        lib, found = pynng.lib, pynng.ffi.new("nng_msg **")
        try:
            pynng.check_err(lib.nng_recvmsg(self._socket.socket, found, lib.NNG_FLAG_NONBLOCK))
        except pynng.TryAgain:
            return None
        except Closed:
            raise
        except SpError as err:
            self.tally.count_lost(f"sp: {type(err).__name__}", err)
            return None
        self.tally.from_sp += 1
        return Received(self, pynng.Message(found[0]))

    def send_message(self, message: Any) -> bool:
        """Send a pynng message if nng accepts it; return whether it did."""
        try:
            self._socket.send_msg(message, block=False)
        except pynng.TryAgain:
            return False
        self.tally.to_sp += 1
        return True

    # -- waiting ---------------------------------------------------------------------------------------------

    async def messages(self) -> AsyncIterator[bytes]:
        """Iterate over received messages.

        While the caller does not ask for the next, messages fill nng's queue and then wait at the
        peers.
        """
        while True:
            for _ in range(TURN_MESSAGES):
                data = self.receive_now()
                if data is None:
                    await self.readable()
                    break
                yield data
            else:
                await asyncio.sleep(0)

    async def send(self, data: bytes) -> None:
        """Send as soon as a peer has room."""
        while not self.send_now(data):
            await self.writable()

    async def readable(self) -> None:
        """Return when there may be a message."""
        await self._wait(self._socket.recv_fd)

    async def writable(self) -> None:
        """Return when nng accepts a message.

        A pair socket has no queue, so there it means that the last message is written.
        """
        await self._wait(self._socket.send_fd)

    async def _wait(self, descriptor: int) -> None:
        """Return when a descriptor of nng is readable, which means that the operation is possible.

        One waiter at a time for each descriptor.
        """
        waiter = self._loop.create_future()
        self._waiting[descriptor] = waiter
        self._loop.add_reader(descriptor, _wake, waiter)
        try:
            await waiter
        finally:
            if self._waiting.get(descriptor) is waiter:
                del self._waiting[descriptor]
                self._loop.remove_reader(descriptor)

    def context(self) -> SpContext:
        """Return a new context, which is closed with the socket."""
        context = self._socket.new_context()
        self._contexts.append(context)
        return SpContext(context, self.tally)

    def written(self) -> dict[int, int]:
        """Return how many messages nng has written to each connected peer: pipe number -> count.

        Reading nng's statistics costs about 20 µs for each connection of the process, so they are
        cached for nine times as long as reading them took.
        """
        began_s = time.monotonic()
        if began_s >= self._stats_expire_s:
            self._written = _sent_by_pipe()
            took_s = time.monotonic() - began_s
            self._stats_expire_s = began_s + min(10 * took_s, MAX_STATS_AGE_S)
        return {number: self._written.get(number, 0) for number in self.peers.pipes}

    def behind(self) -> int:
        """Return how many messages the slowest peer is behind.

        They wait for it, or a pub or bus socket dropped them.
        """
        if self.closed:
            return self._last_behind
        peers = self.peers.since
        return max((self.tally.to_sp - peers[n] - sent for n, sent in self.written().items()), default=0)  # fmt: skip

    def is_connected(self, number: int) -> bool:
        """Whether a peer is connected, by the number of its pipe. nng's view, which is ahead of `peers`."""
        return number in self._admitted

    def count_unread(self) -> None:
        """Count as lost what nng has received but nobody will read: up to a full queue, and for a pull
        socket one message a peer.
        """
        most = len(self.peers) if self.config.protocol == "pull" else self.config.queue_messages + 1
        if self.config.protocol == "bus" and self.config.direction == "out":
            return  # nothing is ever read from it
        for _ in range(most if self._socket is not None else 0):
            if self.receive_now() is None:
                return
            self.tally.count_lost("stopping")

    def hang_up(self, only: int | None = None) -> None:
        """Close all connections, or the one of pipe `only`. The peers notice, and may reconnect."""
        for number, pipe in list(self.peers.pipes.items()):
            if only in (None, number):
                with contextlib.suppress(SpError):  # it has closed meanwhile
                    pipe.close()

    # -- connections: called by nng's threads ----------------------------------------------------------------

    def _admit(self, pipe: Any) -> None:
        if len(self._admitted) < self.config.max_peers:
            self._admitted.add(pipe.id)
            return
        with contextlib.suppress(SpError):  # it has closed meanwhile
            pipe.close()
        self._call_on_loop(self.tally.count_lost, "too many peers", self.url)

    def _on_connect(self, pipe: Any) -> None:
        if self.is_connected(pipe.id):
            self._call_on_loop(self.peers.add, pipe.id, pipe, self.tally.to_sp)
        else:
            # It was removed before it was added, so nothing else removes it.
            self._socket._pipes.pop(pipe.id, None)

    def _on_disconnect(self, pipe: Any) -> None:
        self._admitted.discard(pipe.id)
        self._call_on_loop(self.peers.remove, pipe.id)

    def _call_on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)


class SpContext:
    """One request, reply or survey at a time, beside others on the same socket."""

    def __init__(self, context: Any, tally: Tally) -> None:
        self.peer = 0
        """Number of the pipe that the last message came from."""
        self._context = context
        self._tally = tally

    async def receive(self) -> bytes:
        """Return the next message; raises SpError, and Closed at the end."""
        with AIOHelper(self._context, "asyncio") as aio:
            message = await aio.arecv_msg()
        self._tally.from_sp += 1
        self.peer = _pipe_number(message)
        data: bytes = message.bytes
        return data

    async def send(self, data: bytes) -> None:
        """Return when nng has the message; raises SpError."""
        message = pynng.Message(data)
        try:
            await self._context.asend_msg(message)
        except BaseException:
            message._mem_freed = False  # nng returned it: see the module docstring
            raise
        self._tally.to_sp += 1


class Received:
    """A message and its sender. On a raw respondent it is a survey, with the route back to the surveyor."""

    __slots__ = ("_message", "_socket", "data", "peer")

    def __init__(self, socket: SpSocket, message: Any) -> None:
        self.data: bytes = message.bytes
        self._socket = socket
        self._message = message
        self.peer = _pipe_number(message)

    def answer(self, data: bytes) -> bool:
        """Send one more response; return False if the queue is full and it was dropped."""
        copy = pynng.ffi.new("nng_msg **")
        pynng.check_err(pynng.lib.nng_msg_dup(copy, self._message._nng_msg))
        answer = pynng.Message(copy[0])  # has the header, which identifies the survey
        pynng.lib.nng_msg_clear(copy[0])
        pynng.check_err(pynng.lib.nng_msg_append(copy[0], data, len(data)))
        return self._socket.send_message(answer)


def _pipe_number(message: Any) -> int:
    """Return the number of the pipe that a message came from."""
    return int(pynng.lib.nng_pipe_id(pynng.lib.nng_msg_get_pipe(message._nng_msg)))


def _sent_by_pipe() -> dict[int, int]:
    """Return how many messages nng has written to each pipe of the process: pipe number -> count."""
    lib, found, tree = pynng.lib, {}, pynng.ffi.new("nng_stat **")
    pynng.check_err(lib.nng_stats_get(tree))
    try:
        for pipe in _children(tree[0], b"pipe"):
            figures = {
                name: int(lib.nng_stat_value(node))
                for name in (b"id", b"tx_msgs")
                for node in _children(pipe, name)
            }
            found[figures[b"id"]] = figures[b"tx_msgs"]
    finally:
        lib.nng_stats_free(tree[0])
    return found


def _children(node: Any, name: bytes) -> Iterator[Any]:
    """Iterate over the children named `name` of a node of nng's statistics."""
    lib, child = pynng.lib, pynng.lib.nng_stat_child(node)
    while child != pynng.ffi.NULL:
        if pynng.ffi.string(lib.nng_stat_name(child)) == name:
            yield child
        child = lib.nng_stat_next(child)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
