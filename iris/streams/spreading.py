"""Spreads the appends of a stream over its partitions: those with a key by the key, others batch by batch.

Each partition has an `Appender` of its own, so appends to one that is away do not hold up the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Final

from iris.core.bundle import CUT_BYTES, Headers, message_bytes
from iris.core.producer import QUEUE_BYTES, Extras
from iris.errors import ConfigError, IrisError, RequestError, StreamError, StreamUnavailable
from iris.streams.appending import Appender, retrieve_error
from iris.streams.interleaving import LAYOUT_S
from iris.streams.messages import as_bytes
from iris.streams.partitions import Layout
from iris.streams.stores import Stores

REVIVE_S: Final = 2.0
"""Seconds in which a store that was away must answer to be used again."""


class Offset(int):
    """The offset of a message in a stream with several partitions; `partition` says in which one it is."""

    __slots__ = ()
    partition: int

    def __reduce__(self) -> tuple[Callable[[int, int], Offset], tuple[int, int]]:
        return offset_in, (int(self), self.partition)


@functools.cache  # for at most `MAX_PARTITIONS`
def offsets_of(partition: int) -> type[Offset]:
    """Return the type of a partition's offsets. One without a field of its own is made as fast as an int."""
    return type("Offset", (Offset,), {"__slots__": (), "partition": partition})


def offset_in(offset: int, partition: int) -> Offset:
    """Return the offset of a message in a partition."""
    return offsets_of(partition)(offset)


def partition_of(offset: int) -> int:
    """Return the partition of an offset that `append` or `append_many` returned; 0 if the stream has one partition."""
    return offset.partition if isinstance(offset, Offset) else 0


class Spread:
    """Chooses the partition of each append to one stream."""

    def __init__(
        self, layout: Layout, appender: Callable[[str, str], Appender], look: Callable[[], object]
    ) -> None:
        """`appender` returns the appender of a log; `look` is called from time to time, to update `layout`."""
        self.layout = layout
        self._appender = appender
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._look_s = self._loop.time() + LAYOUT_S
        self._turn = 0
        """Counts batches without a key."""
        self._current = -1
        """The partition of this turn's batch; -1 before its first message."""
        self._room = 0
        """Bytes that the batch may still get."""

    def choose(
        self, partition: int | None, key: str | bytes | None, message_id: str | bytes | None, expect: int | None, size: int
    ) -> int:  # fmt: skip
        """Return the partition of a message of `size` bytes: the one asked for, that of its key or its id, or any.

        Raises ConfigError if the stream has no such partition, or the append expects an offset without naming one.
        """
        now_s = self._loop.time()
        if now_s >= self._look_s:
            self._look_s = now_s + LAYOUT_S
            self._look()
        if partition is not None:
            self.layout.log(partition)
            return partition
        if expect is not None:
            raise ConfigError(
                "expect: each partition counts its own offsets; name one with partition="
            )
        if key is not None:
            return self.layout.of_key(as_bytes("key", key))
        if message_id is not None:  # a retry goes to the same one
            return self.layout.of_id(as_bytes("message_id", message_id))
        return self._next(size)

    def appender(self, partition: int) -> Appender:
        """Return the appender of a partition."""
        return self._appender(*self.layout.log(partition))

    async def revive(self, stores: Stores) -> None:
        """Find out whether stores that were away, and to which nothing is being sent, answer again."""
        for partition in range(len(self.layout)):
            appender = self.appender(partition)
            if appender.away and appender.producer.idle:
                with contextlib.suppress(StreamError, RequestError):
                    await stores.describe(appender.name, appender.uuid, timeout=REVIVE_S)
                    appender.found_again()

    def _next(self, size: int) -> int:
        """Return the partition of a message without a key: the same one for a turn of the event loop, or a record's
        worth of messages.

        The partitions take turns. One whose store does not answer, or that has no room, is left out while there is
        another.
        """
        if self._current < 0:
            self._loop.call_soon(self._turn_ended)
        if self._current < 0 or self._room < size or self.appender(self._current).producer.full:
            self._current, self._room = self._chosen(), CUT_BYTES
        self._room -= size
        return self._current

    def _chosen(self) -> int:
        count = len(self.layout)
        order = [(self._turn + step) % count for step in range(count)]
        self._turn += 1
        answering = [one for one in order if not self.appender(one).away]
        return next((one for one in answering if not self.appender(one).producer.full), (answering or order)[0])  # fmt: skip

    def _turn_ended(self) -> None:
        self._current = -1


class Opening:
    """The appends to a stream whose partitions are not known yet. They wait in order, and then go on to the stream.

    It is used like an `Appender`. It has no keys, so messages with a key wait for `target`.
    """

    def __init__(
        self, name: str, find: Coroutine[Any, Any, Appender | Spread], done: Callable[[Appender | Spread | None], object]
    ) -> None:  # fmt: skip
        """`done` is called with what `find` returned, or with None if it failed, when nothing waits here any more."""
        self.name = name
        self.bytes = 0
        """Bytes that wait."""
        self._loop = asyncio.get_running_loop()
        self._done = done
        self._waiting: list[tuple[bytes, Headers | None, bool, Extras, asyncio.Future[int]]] = []
        self.task = self._loop.create_task(self._open(find), name="iris-append-open")
        self.task.add_done_callback(retrieve_error)

    @property
    def producer(self) -> Opening:
        """This object, which takes messages as a `Producer` does."""
        return self

    @property
    def full(self) -> bool:
        """Whether an append must wait for room."""
        return self.bytes > QUEUE_BYTES

    def add(
        self, payload: bytes, headers: Headers | None, packed: bool, extras: Extras
    ) -> tuple[asyncio.Future[int], int]:
        """Add a message; see `Producer.add`."""
        waiter: asyncio.Future[int] = self._loop.create_future()
        waiter.add_done_callback(retrieve_error)
        self._waiting.append((payload, headers, packed, extras, waiter))
        self.bytes += message_bytes(payload, headers)
        return waiter, 0

    async def wait_for_room(self) -> None:
        """Wait until the partitions are known, so that nothing waits here any more."""
        await asyncio.wait([self.task])

    async def target(self) -> Appender | Spread:
        """Wait for the result of `find`. Raises StreamError."""
        return await asyncio.shield(self.task)

    def end(self, reason: str) -> None:
        """Fail what waits. Idempotent."""
        self.task.cancel()
        self._fail(StreamUnavailable(self.name, reason))

    async def _open(self, find: Coroutine[Any, Any, Appender | Spread]) -> Appender | Spread:
        try:
            target = await find
        except Exception as err:  # any error fails the appends that wait
            self._done(None)
            error = err if isinstance(err, IrisError) else StreamUnavailable(self.name, str(err))
            self._fail(error)
            raise error from err.__cause__
        self._done(target)
        number = None
        appender = target
        if isinstance(appender, Spread):
            number = appender.choose(None, None, None, None, self.bytes)
            appender = appender.appender(number)
        for payload, headers, packed, extras, waiter in self._waiting:
            first, index = appender.producer.add(payload, headers, packed, extras)
            first.add_done_callback(functools.partial(_pass_on, waiter, index, number))
        self._waiting.clear()
        return target

    def _fail(self, error: Exception) -> None:
        for *_, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()


Target = Appender | Spread | Opening


def _pass_on(
    waiter: asyncio.Future[int], index: int, partition: int | None, first: asyncio.Future[int]
) -> None:
    """Resolve the waiter of one message from that of its record."""
    if waiter.done():
        return
    if first.cancelled():
        waiter.cancel()
    elif (error := first.exception()) is not None:
        waiter.set_exception(error)
    else:
        offset = first.result() + index
        waiter.set_result(offset if partition is None else offset_in(offset, partition))
