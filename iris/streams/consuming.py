"""Consumers: workers that share the messages of a stream and acknowledge each one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Final, Self

from iris.awaiting import check_callback, check_returned
from iris.checks import check_flag, check_number, check_whole
from iris.errors import Closed, RequestError, StreamError, StreamUnavailable
from iris.forks import FORKED, disable_in_child
from iris.iterating import Items
from iris.logs import RAISED, logger
from iris.misuse import AsyncOnly
from iris.one_process import OneProcess
from iris.streams.interleaving import Interleaved
from iris.streams.partitions import Layout, find_layout, layout_of
from iris.streams.reading import CLOSED, LOOK_S, MAX_GAPS, Batches, Start, check_alive, check_start
from iris.streams.records import Settler, StreamGap, StreamMessage
from iris.streams.stores import Stores
from iris.streams.worker import Settings, Worker
from iris.wire.consumers import ACK_TIMEOUT_US, MAX_CONSUMED, MAX_DELIVER

log = logger(__name__)

BATCH_MESSAGES: Final = 1000


def check_consumer(ack_timeout: float | None, max_deliver: int | None) -> None:
    """Raise ConfigError unless these settings of a consumer are in range, or None."""
    if ack_timeout is not None:
        least, most = (limit / 1e6 for limit in ACK_TIMEOUT_US)
        check_number("ack_timeout", ack_timeout, least, most, unit=" s")
    if max_deliver is not None:
        check_whole("max_deliver", max_deliver, 0, MAX_DELIVER)


class Consumer(OneProcess, AsyncOnly, Items[StreamMessage]):
    """One worker of a consumer: `async with client.streams.consumer("orders", "invoices", shared=True) as work`.

    Iterate over the messages, and `ack` each one when its work is done. `nack` has it delivered again after a
    delay; `touch` asks for more time. `message.ack()` does what `work.ack(message)` does, and so do the other two. A
    message not settled within `ack_timeout` is delivered again, to this or another worker: delivery is at least once.
    These calls are batched and sent at the end of the event-loop turn; `flush` waits until the store has them. Messages
    that this keyring cannot open are reported to `on_gap` and delivered again, to a worker that may have the key, up to
    `max_deliver` times.

    Workers of a `shared` consumer share the messages, with the order of each key. Without `shared` one worker is
    active, `active` says whether it is this one, and the others stand by. `ack` and the other calls of a worker that
    was replaced are refused: the next batch, or `flush`, raises NotActive.

    All that holds for each partition of a stream by itself, and `prefetch` counts for each partition. While the store
    of one is away, a worker goes on with the others; `missing` says why.

    Several tasks may take messages of one worker: each message goes to one of them.
    """

    _right_use = "async with client.streams.consumer(...) as work:"

    def __init__(
        self, stores: Stores, stream: str, name: str, start: Start, *, shared: bool, durable: bool, ack_timeout: float,
        max_deliver: int, prefetch: int, create: bool, uuid: str, patience: float, on_gap: Callable[[StreamGap], object] | None,
        on_active: Callable[[bool], object] | None = None, partition: int | None = None,
    ) -> None:  # fmt: skip
        """With `partition` it works on one partition, otherwise on all."""
        check_consumer(ack_timeout, max_deliver)
        check_whole("prefetch", prefetch, 1, MAX_CONSUMED)
        for option, flag in (("shared", shared), ("durable", durable), ("create", create)):
            check_flag(option, flag)
        self.stream = stream
        self.name = name
        self.gaps: deque[StreamGap] = deque(maxlen=MAX_GAPS)
        self._stores = stores
        self._start = start
        self._uuid = uuid
        self._partition = partition
        self._settings = Settings(
            name, shared, durable, round(ack_timeout * 1e6), max_deliver, prefetch, create, patience
        )  # fmt: skip
        check_callback("on_gap", on_gap)
        check_callback("on_active", on_active)
        self._on_gap = on_gap
        self._on_active = on_active
        self._was_active = False
        """What `on_active` was called with last."""
        self._context = copy_context()
        """That of the program, of which each call of `on_active` has a copy."""
        self._ready: deque[StreamMessage] = deque()
        self._settler = Settler()
        self._settler.bind(self)
        self._worker: Worker | None = Worker(
            stores, self._settings, stream, uuid, start, self._report, self._settler, self._seated
        )
        """The worker of the one log; None if the stream has several partitions."""
        self._workers = {0: self._worker}
        """Partition -> its worker."""
        self._located = False
        """It is known which logs the stream has."""
        self._parts: Interleaved[list[StreamMessage]] | None = None
        self._taken = -1
        """The partition whose batch was taken last."""
        self._kept_s = 0.0
        """Monotonic time at which it was last seen to that no message that waits here times out."""
        self._taking = asyncio.Lock()
        """Held by the one task that waits for the next messages."""
        self._stopping = False
        self._closed = ""
        """Why it receives no more; completes "consumer ..."."""
        disable_in_child(self)

    # -- receiving -------------------------------------------------------------------------------------------

    @property
    def _of(self) -> str:
        return f"{self.stream}/{self.name}"

    async def __anext__(self) -> StreamMessage:
        if self._stopping:
            raise StopAsyncIteration
        while not self._ready:
            await self._fill()
        return self._ready.popleft()

    async def _fill(self) -> None:
        """Wait until messages are in `_ready`, where they are held but not begun with."""
        async with self._taking:
            if not self._ready:
                self._ready.extend(await self._next_batch())

    def batches(self) -> Items[list[StreamMessage]]:
        """Iterate over lists of messages, one list per delivery."""
        return Batches(self._of, self.batch)

    async def batch(self) -> list[StreamMessage]:
        """Wait for the next messages and return them, at least one. Raises StopAsyncIteration after `stop`.

        Raises:
            StreamError: the consumer exists with other settings or was deleted, or its store was away for longer than
                `patience`.
            NotActive: another worker replaced this one, and what this one settled afterwards was refused.
            TooManyWorkers: no more workers can stand by.
        """
        async with self._taking:
            return await self._next_batch()

    async def _next_batch(self) -> list[StreamMessage]:
        while (worker := self._worker) is not None:
            if self._located:
                messages = await worker.batch()
                worker.waiting = self._ready
                return messages
            worker.check()
            await self._locate(worker)
        assert self._parts is not None  # there are several partitions
        if self._closed:
            raise Closed(f"consumer {self.name!r} of {self.stream!r} {self._closed}")
        batch: list[StreamMessage] = []
        while not batch:  # a worker that was replaced has dropped those that waited
            if self._stopping:
                raise StopAsyncIteration
            if self._taken >= 0:
                self._workers[self._taken].waiting = []
                self._parts.resume(self._taken)
                self._taken = -1
            number, batch = await self._parts.next()
            if self._stopping:
                raise StopAsyncIteration
            self._workers[number].waiting, self._taken = self._ready, number
        return batch

    def stop(self) -> None:
        """Deliver no further message: the iteration ends. Messages that were delivered can still be settled.

        What arrived and was not delivered to the loop goes to other workers when this one is closed.
        """
        self._stopping = True
        for worker in self._workers.values():
            worker.stop()
        if self._parts is not None:
            self._parts.stop()

    @property
    def lag(self) -> int:
        """Messages not settled yet, as of the last delivery."""
        return sum(worker.lag for worker in self._workers.values())

    @property
    def active(self) -> bool:
        """Whether this worker receives messages, as far as the store has said: of one partition or more.

        A worker of a shared consumer is always active. Another one is not before the store says so.
        """
        return any(worker.active for worker in self._workers.values())

    @property
    def missing(self) -> dict[int, Exception]:
        """Partitions whose store is away -> why. The worker goes on with the others, and tries these again."""
        return {} if self._parts is None else dict(self._parts.missing)

    def _report(self, gap: StreamGap) -> None:
        self.gaps.append(gap)
        if self._on_gap is not None:
            check_returned(self._on_gap(gap))

    def _seated(self, worker: Worker, place: int, replaced: bool) -> None:
        """A worker is active now, or stands by."""
        fields: dict[str, object] = {"consumer": self.name, "stream": worker.stream}
        if replaced:
            log.warning("consumer.replaced", extra={"fields": fields})
        elif place:
            log.info("consumer.standing_by", extra={"fields": {**fields, "before": place}})
        else:
            log.info("consumer.active", extra={"fields": fields})
        if self._on_active is None or self.active == self._was_active:
            return
        self._was_active = self.active
        try:
            check_returned(self._context.copy().run(self._on_active, self.active))
        except RAISED as err:
            self._stores.runtime.handler_failed(
                f"on_active of consumer {self.name}", "", self._on_active, err
            )

    # -- partitions ------------------------------------------------------------------------------------------

    async def _locate(self, worker: Worker) -> None:
        """Find the log, or the partitions, and where a new consumer starts."""
        patience = self._settings.patience
        stream = await self._stores.describe(
            self.stream, self._uuid, timeout=patience, patience=patience
        )
        layout = layout_of(self._stores, self.stream, stream)
        if self._partition is None:
            check_alive(self.stream, stream)
        if self._partition:
            self._worker = self._add(layout, self._partition, self._start)
            self._workers = {self._partition: self._worker}
            self.stream = self._worker.stream
        elif self._partition is None and len(layout) > 1:
            self._share(layout)
        else:
            await worker.find_start(stream)
        self._located = True

    def _share(self, layout: Layout) -> None:
        """Work on all partitions, with a worker for each."""
        check_start(self.stream, len(layout), self._start)
        self._worker = None
        for number in range(len(layout)):
            self._add(layout, number, self._start)

        async def look() -> int:
            now = await find_layout(self._stores, self.stream, layout.uuids[0], timeout=LOOK_S)
            for number in range(len(self._workers), len(now)):
                self._add(now, number, "first")
            return len(now)

        self._parts = Interleaved(
            self.stream, len(layout), lambda number: self._workers[number].wait(), passing=_passing, look=look
        )  # fmt: skip

    def _add(self, layout: Layout, number: int, start: Start) -> Worker:
        name, uuid = layout.log(number)
        worker = Worker(
            self._stores, self._settings, name, uuid, start, self._report, self._settler, self._seated, number
        )  # fmt: skip
        self._workers[number] = worker
        return worker

    def _each(
        self, messages: Iterable[StreamMessage]
    ) -> Iterable[tuple[Worker, list[StreamMessage]]]:
        """Return the workers of the partitions that these messages are of, each with its messages."""
        found: dict[int, list[StreamMessage]] = {}
        for message in messages:
            found.setdefault(message.partition, []).append(message)
        for number, some in found.items():
            self._workers.get(number, self._workers[0]).check_own(some)
            if number not in self._workers:
                raise StreamError(self.stream, f"it has no partition {number}")
        now_s = time.monotonic()
        if now_s - self._kept_s >= self._settings.ack_timeout_us / 8e6:
            self._kept_s = now_s
            for worker in self._workers.values():
                worker.keep(now_s)
        return [(self._workers[number], some) for number, some in found.items()]

    # -- settling --------------------------------------------------------------------------------------------

    def ack(self, *messages: StreamMessage) -> None:
        """Acknowledge messages: they are done and are not delivered again.

        Raises ValueError if another consumer, or one of another stream, delivered one of them; nothing is settled.
        """
        if self._worker is not None:
            self._worker.check_own(messages)
            self._worker.ack(messages)
            return
        for worker, some in self._each(messages):
            worker.ack(some)

    def ack_through(self, message: StreamMessage) -> None:
        """Acknowledge this message and everything delivered to this worker before it, in its partition.

        Raises as `ack`.
        """
        if self._worker is not None:
            self._worker.check_own((message,))
            self._worker.ack_through(message)
            return
        for worker, (one,) in self._each((message,)):
            worker.ack_through(one)

    def nack(self, *messages: StreamMessage, delay: float = 0.0, reason: str = "") -> None:
        """Report that messages failed: they are delivered again after `delay` seconds. A dead letter keeps `reason`.

        Raises as `ack`.
        """
        if not 0 <= delay <= 30 * 86_400:
            raise StreamError(
                self.stream, f"delay: {delay} s is out of range; use 0 to 2592000 s (30 days)"
            )
        delay_us, reason = round(delay * 1e6), reason[:1024]
        if self._worker is not None:
            self._worker.check_own(messages)
            self._worker.nack(messages, delay_us, reason)
            return
        for worker, some in self._each(messages):
            worker.nack(some, delay_us, reason)

    def touch(self, *messages: StreamMessage) -> None:
        """Restart the ack timeout of messages that are still being worked on. Raises as `ack`."""
        if self._worker is not None:
            self._worker.check_own(messages)
            self._worker.touch(messages)
            return
        for worker, some in self._each(messages):
            worker.touch(some)

    async def flush(self) -> None:
        """Wait until the store has every ack, nack and touch. Raises StreamError if it could not be reached."""
        if self._worker is not None:
            await self._worker.flush()
            return
        done = await asyncio.gather(
            *(worker.flush() for worker in self._workers.values()), return_exceptions=True
        )
        for error in done:
            if error is not None:
                raise error

    # -- life ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send the store what was settled, and release the rest to other workers. Idempotent.

        Unless the consumer is shared, the worker that stands by next is active at once, and the messages that this one
        holds do not count as delivered. If an exception leaves the `async with`, those that the loop has begun with
        count: they may be its cause.
        """
        await self._close(failed=False)

    async def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = CLOSED
        if self._worker is not None:
            await self._worker.close(failed=failed)
        else:
            assert self._parts is not None  # there are several partitions
            await self._parts.close()
            workers = self._workers.values()
            await asyncio.gather(*(worker.close(failed=failed) for worker in workers))
        self._ready.clear()

    def _forked(self) -> None:
        """Deliver and settle nothing in the child of a fork: the messages are the parent's."""
        self._closed = FORKED
        self._ready.clear()
        self._parts = None
        self._taking = asyncio.Lock()
        for worker in self._workers.values():
            worker._forked()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close(failed=kind is not None and issubclass(kind, Exception))


def _passing(error: Exception) -> bool:
    """Return whether a worker goes on with the other partitions after this error of one."""
    return isinstance(error, StreamUnavailable | RequestError) or (
        isinstance(error, StreamError) and error.passing
    )
