"""Sends appends to a stream's store and reports the outcomes to the producer (see `iris.core.producer`)."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

from iris.core.bundle import Headers
from iris.core.producer import Extras, Producer, Sent
from iris.deadlines import seconds_left
from iris.errors import ConnectionLost, OffsetConflict, StreamError, StreamSuperseded
from iris.streams.stores import Stores, StreamLocation
from iris.wire.kinds import NEVER_US
from iris.wire.streams import CONFLICT, DUPLICATE, STORED, Append, Appended

CALL_S: Final = 10.0
"""Seconds for the answer to one call; the producer decides about retries."""
SLOW_S: Final = 0.25
"""Seconds after which a stream that is still being looked up counts as away."""
GIVE_UP_S: Final = 60.0
"""Seconds for which the stream's store may be away before the waiting appends fail."""


class Appender:
    """Sends the appends of one stream.

    Add with `producer.add`; while the producer is full, await `wait_for_room` first.
    """

    def __init__(
        self, stores: Stores, name: str, uuid: str, found: Callable[[], object] = lambda: None, *, named: bool = False
    ) -> None:  # fmt: skip
        """`found` is called each time that the stream has been looked up again. `named`: if another log takes the place
        of this one, it goes on there.
        """
        self.name = name
        self._named = named
        self._found = found
        self._location: StreamLocation | None = None
        self._lost = False
        """Whether the last call found no store."""
        self._looking_s = 0.0
        """Time since which the stream is being looked up; 0 if it is not."""
        self._loop = asyncio.get_running_loop()
        self.producer = Producer(
            name, os.urandom(16), waiter=self._waiter, on_open=self._opened, rng=random.random,
            find_key=lambda key_id: stores.runtime.keyring.by_id(key_id),
        )  # fmt: skip
        self._stores = stores
        self.uuid = uuid
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room: asyncio.Future[None] | None = None
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._feed_task: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def away(self) -> bool:
        """Whether the stream's store does not answer, as far as is known."""
        slow = self._looking_s and self._loop.time() - self._looking_s > SLOW_S
        return self._lost or bool(slow)

    def found_again(self) -> None:
        """Note that the store answers."""
        self._lost = False

    async def wait_for_room(self) -> None:
        """Wait until the producer has room."""
        while self.producer.full:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)

    async def finish(self) -> None:
        """Wait until every message that was added has an outcome."""
        await self._idle.wait()

    def end(self, reason: str) -> None:
        """Stop sending, and fail what is pending with `reason`. Idempotent."""
        self._ended = True
        if self._feed_task is not None:
            self._feed_task.cancel()
        for task in self._tasks:
            task.cancel()
        self.producer.end(reason)
        self._wake()

    # -- internals -------------------------------------------------------------------------------------------

    def _waiter(self) -> asyncio.Future[int]:
        waiter: asyncio.Future[int] = self._loop.create_future()
        # The caller may have been cancelled, so nobody may look at the outcome: that is not an error.
        waiter.add_done_callback(retrieve_error)
        return waiter

    def _opened(self) -> None:
        self._idle.clear()
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn_ended)

    def _turn_ended(self) -> None:
        self._scheduled = False
        self.producer.cut()
        if self._feed_task is None and self.producer.busy and not self._ended:
            self._feed_task = self._loop.create_task(self._feed(), name="iris-append")
        self._work.set()

    async def _feed(self) -> None:
        """Keep the window full while there is something to send."""
        producer, runtime = self.producer, self._stores.runtime
        try:
            while producer.busy:
                self._work.clear()
                due_us = producer.due_us
                if due_us == NEVER_US:
                    await self._work.wait()
                    continue
                if (pause_us := due_us - _now_us()) > 0:
                    await asyncio.sleep(pause_us / 1e6)
                self._looking_s = self._loop.time()
                try:
                    location = await self._stores.locate(self.name, self.uuid, timeout=GIVE_UP_S)
                except StreamSuperseded:
                    if not self._follow_name():
                        raise
                    continue
                self._looking_s = 0.0
                if location is not self._location:
                    self._location = location
                    self._found()
                _, session = await runtime.ready(self.name, GIVE_UP_S)
                for sent in producer.due(
                    _now_us(), location.uuid, location.key, session.out, runtime.message_limit
                ):
                    task = self._loop.create_task(
                        self._send(location, sent), name="iris-append-call"
                    )
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                runtime.touch()
        except Exception as err:  # any error fails the appends that wait
            self._lost = True
            producer.failed(err)
        finally:
            self._looking_s = 0.0
            self._feed_task = None
            if producer.busy:
                self._turn_ended()
            self._wake()

    async def _send(self, location: StreamLocation, sent: Sent[asyncio.Future[int]]) -> None:
        try:
            answer = await self._stores.ask(
                location.address, sent.key, sent.call, Appended, timeout=CALL_S, shown=self.name, writes=True
            )  # fmt: skip
            if len(answer.outcomes) != len(sent.records):
                raise ConnectionLost(
                    self.name,
                    f"the store answered for {len(answer.outcomes)} records, not {len(sent.records)}",
                )
        except Exception as err:
            if isinstance(err, StreamSuperseded):
                err.passing = self._follow_name()
            if self.producer.lost(sent, err, _now_us()):
                self._lost = True
                self._stores.forget(self.name, self.uuid)
        else:
            self._lost = False
            self.producer.answered(sent, answer.outcomes, _now_us())
        self._wake()

    def _follow_name(self) -> bool:
        """Go on at the log that has the name now, if the caller did not choose a log; return whether that is so."""
        if self._named:
            self._stores.forget(self.name, self.uuid)
            self.uuid = ""
        return self._named

    def _wake(self) -> None:
        """Wake the waiters whose condition now holds: there is room, or nothing is left to do."""
        if self._room is not None and not self.producer.full:
            room, self._room = self._room, None
            if not room.done():
                room.set_result(None)
        if self.producer.idle:
            self._idle.set()
        self._work.set()


async def append_expecting(
    stores: Stores, name: str, uuid: str, data: bytes, headers: Headers | None, packed: bool, extras: Extras, expect: int, timeout: float
) -> int:  # fmt: skip
    """Append one message if the stream ends at offset `expect`. It is its own producer, so a retry is recognized."""
    until_s = time.monotonic() + timeout
    location = await stores.locate(name, uuid, timeout=timeout)
    _, session = await stores.runtime.ready(name, seconds_left(until_s))
    sender_id, end, body = session.out.record(
        name, location.key, (data,), (headers,) if headers else None, packed, extras.key
    )
    call = Append(sender_id, [extras.record(0, end, body, expect)], os.urandom(16))
    answer = await stores.ask_stream(
        name, uuid, call, Appended, timeout=seconds_left(until_s), writes=True
    )
    outcome = answer.outcomes[0]
    if outcome.status in (STORED, DUPLICATE) and outcome.value is not None:
        return outcome.value
    if outcome.status == CONFLICT and outcome.value is not None:
        raise OffsetConflict(
            name,
            f"the stream ends at offset {outcome.value}, not {expect}; nothing was stored",
            outcome.value,
        )
    raise StreamError(
        name, f"the store did not store the message (status {outcome.status}); append it again"
    )


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def retrieve_error(future: asyncio.Future[Any]) -> None:
    """Look at a future's error, so that one that nobody waits for is not reported as unseen."""
    if not future.cancelled():
        future.exception()
