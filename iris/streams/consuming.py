"""Consumers: workers that share the messages of a stream and acknowledge each one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, Self

from msgspec import structs

from iris.checks import check_number, check_whole
from iris.errors import Closed, IrisError, RequestError, StreamError, StreamUnavailable
from iris.streams.interleaving import Interleaved
from iris.streams.partitions import Layout, find_layout, layout_of
from iris.streams.reading import (
    LOOK_S,
    MAX_GAPS,
    Start,
    check_alive,
    check_start,
    offset_in,
    resolve_dead,
    start_of,
)
from iris.streams.records import RecordOpener, StreamGap, StreamMessage, to_gap
from iris.streams.stores import Stores
from iris.wire.streams import Consume, Delivered, Handed, Range, Record, Settle, Settled

BATCH_BYTES: Final = 1 << 20
BATCH_MESSAGES: Final = 1000
WAIT_MS: Final = 20_000
"""Time that the store holds a call while there are no messages."""
MAX_RANGES: Final = 4000
"""Ranges of offsets of each kind in one Settle call."""
SETTLE_S: Final = 10.0
"""Seconds for which `close` waits to send what was settled."""
CONFIRM_S: Final = 1.0
"""Seconds after a delivery in which a worker that has not settled anything confirms that it received the messages."""


class Consumer:
    """One worker of a consumer: `async with client.streams.consumer("orders", "invoices", group=True) as work`.

    Iterate over the messages, and `ack` each one when its work is done. `nack` has it delivered again after a
    delay; `touch` asks for more time. A message not settled within `ack_timeout` is delivered again, to this or
    another worker: delivery is at least once. These calls are batched and sent at the end of the event-loop turn;
    `flush` waits until the store has them. Messages that this keyring cannot open are reported to `on_gap` and
    delivered again, to a worker that may have the key, up to `max_deliver` times.

    The workers of a stream with several partitions share all of them, each with the order of its keys. `max_messages`
    counts for each partition. While the store of one is away, a worker goes on with the others; `missing` says why.

    Several tasks may take messages of one worker: each message goes to one of them.
    """

    def __init__(
        self, stores: Stores, stream: str, name: str, start: Start, *, group: bool, durable: bool, ack_timeout: float,
        max_deliver: int, max_messages: int, uuid: str, patience: float, on_gap: Callable[[StreamGap], object] | None,
        partition: int | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        """With `partition` it works on one partition, otherwise on all. `number` is that of the log `stream`."""
        self.stream = stream
        self._partition = partition
        self._number = number
        self._parts: Interleaved[None] | None = None
        self._inner: dict[int, Consumer] = {}
        """The workers of the partitions, if this one works on several."""
        self._taken = -1
        """The partition whose batch was taken last."""
        self._kept_s = 0.0
        """Monotonic time at which it was last seen to that no message that waits here times out."""
        self._also: Iterable[StreamMessage] = ()
        """Messages of this partition that wait in the worker of the whole stream."""
        self._progress = False
        """The loop has settled messages of other partitions since messages here were last renewed."""
        self.name = name
        self.lag = 0
        """Messages not settled yet, as of the last delivery."""
        self.gaps: deque[StreamGap] = deque(maxlen=MAX_GAPS)
        self._stores = stores
        self._start = start
        self._group = group
        self._durable = durable
        check_number("ack_timeout", ack_timeout, 0)
        check_whole("max_deliver", max_deliver, 0)
        check_whole("max_messages", max_messages, 1)
        self._ack_timeout_us = self._lease_us = round(ack_timeout * 1e6)
        """`_lease_us` is the ack timeout in force, which may have been changed since the consumer was created."""
        self._max_deliver = max_deliver
        self._max_messages = max_messages
        self._uuid = uuid
        self._patience = patience
        self._on_gap = on_gap
        self._worker = os.urandom(16)
        self._opener = RecordOpener(stores.runtime.find_key)
        stores.openers.add(self._opener)
        self._ready: deque[StreamMessage] = deque()
        self._held: set[int] = set()
        """Offsets of messages delivered here and not settled yet."""
        self._offset = -1
        self._taking = asyncio.Lock()
        """Held by the one task that waits for the next messages."""
        self._batch_task: asyncio.Task[list[StreamMessage]] | None = None
        self._lost_answer = False
        """The last delivery may have been lost: ask the store to repeat it."""
        self._away_since_s = 0.0
        """Monotonic time since which the store is away; 0 while it answers."""
        self._closed = False
        self._acked: list[int] = []
        self._nacked: dict[tuple[int, str], list[int]] = {}
        """Failed messages: (delay in µs, reason) -> offsets."""
        self._touched: list[int] = []
        self._acked_through = -1
        self._settle_task: asyncio.Task[None] | None = None
        self._error: IrisError | None = None
        self._stopping = False
        self._renewed_s = 0.0
        """Monotonic time at which the ack timeout of the messages in `_ready` was last restarted."""
        self._unconfirmed: list[int] = []
        """Offsets of the last delivery, until the store knows that it arrived."""
        self._confirm_timer: asyncio.TimerHandle | None = None

    # -- receiving -------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

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
                self._renewed_s = time.monotonic()

    async def batches(self) -> AsyncIterator[list[StreamMessage]]:
        """Iterate over lists of messages, one list per delivery."""
        while True:
            try:
                yield await self.batch()
            except StopAsyncIteration:
                return

    def stop(self) -> None:
        """Deliver no further message: the iteration ends. Messages that were delivered can still be settled.

        What arrived and was not delivered to the loop goes to other workers when this one is closed.
        """
        self._stopping = True
        for worker in self._inner.values():
            worker.stop()
        if self._parts is not None:
            self._parts.stop()
        if self._batch_task is not None:
            self._batch_task.cancel()

    async def batch(self) -> list[StreamMessage]:
        """Wait for the next messages and return them, at least one. Raises StopAsyncIteration after `stop`.

        Raises:
            StreamError: another worker took over, the consumer exists with other settings or was deleted, or its store
                was away for longer than `patience`.
        """
        async with self._taking:
            return await self._next_batch()

    async def _next_batch(self) -> list[StreamMessage]:
        while True:
            if self._closed:
                raise Closed(f"consumer {self.name!r} of {self.stream!r} was closed; open another")
            self._raise_error()
            if self._stopping:
                raise StopAsyncIteration
            if self._parts is not None:
                return await self._batch_of_any(self._parts)
            if self._offset < 0:
                await self._find_start()
                continue
            task = self._batch_task
            if task is None:
                task = self._batch_task = asyncio.create_task(
                    self._fetch_batch(), name="iris-consume"
                )
                task.add_done_callback(_retrieve_error)
            try:
                # If the caller is cancelled, the next caller waits for this task: its messages are not lost.
                messages = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    self._batch_task = None
                    this = asyncio.current_task()
                    if self._stopping and not (this and this.cancelling()):
                        raise StopAsyncIteration from None
                raise
            except BaseException:
                self._batch_task = None
                raise
            self._batch_task = None
            if messages:
                return messages

    async def _find_start(self) -> None:
        """Find the log, or the partitions, and where a new consumer starts."""
        stream = await self._stores.describe(
            self.stream, self._uuid, timeout=self._patience, patience=self._patience
        )
        layout = layout_of(self._stores, self.stream, stream)
        if self._partition:
            self.stream, self._uuid = layout.log(self._partition)
            self._number, self._partition = self._partition, 0
            return
        if self._partition is None:
            check_alive(self.stream, stream)
            if len(layout) > 1:
                self._share(layout)
                return
        start = start_of(self._start, self._number)
        self._offset = await offset_in(
            self._stores, self.stream, stream, start, patience=self._patience
        )
        self._opener.stream = stream
        self._uuid = self._uuid or stream.described.uuid.hex()

    # -- partitions ------------------------------------------------------------------------------------------

    def _share(self, layout: Layout) -> None:
        """Work on all partitions, with a worker for each."""
        check_start(self.stream, len(layout), self._start)
        for number in range(len(layout)):
            self._add(layout, number, self._start)

        async def look() -> int:
            now = await find_layout(self._stores, self.stream, layout.uuids[0], timeout=LOOK_S)
            for number in range(len(self._inner), len(now)):
                self._add(now, number, "first")
            return len(now)

        self._parts = Interleaved(
            self.stream, len(layout), lambda number: self._inner[number]._fill(), passing=_passing, look=look
        )  # fmt: skip

    def _add(self, layout: Layout, number: int, start: Start) -> None:
        name, uuid = layout.log(number)
        self._inner[number] = Consumer(
            self._stores, name, self.name, start, group=self._group, durable=self._durable, ack_timeout=self._ack_timeout_us / 1e6,
            max_deliver=self._max_deliver, max_messages=self._max_messages, uuid=uuid, patience=self._patience,
            on_gap=self._report, partition=0, number=number,
        )  # fmt: skip

    async def _batch_of_any(self, parts: Interleaved[None]) -> list[StreamMessage]:
        if self._taken >= 0:
            parts.resume(self._taken)
            self._inner[self._taken]._also, self._taken = (), -1
        number, _ = await parts.next()
        if self._stopping:
            raise StopAsyncIteration
        worker = self._inner[number]
        messages = [*worker._ready]
        worker._ready.clear()
        worker._also, self._taken = self._ready, number
        self.lag = sum(one.lag for one in self._inner.values())
        return messages

    @property
    def missing(self) -> dict[int, Exception]:
        """Partitions whose store is away -> why. The worker goes on with the others, and tries these again."""
        return {} if self._parts is None else dict(self._parts.missing)

    def _workers(
        self, messages: Iterable[StreamMessage]
    ) -> Iterable[tuple[Consumer, list[StreamMessage]]]:
        """Return the workers of the partitions that these messages are of, each with its messages."""
        found: dict[int, list[StreamMessage]] = {}
        for message in messages:
            if message.partition not in self._inner:
                raise StreamError(self.stream, f"it has no partition {message.partition}")
            found.setdefault(message.partition, []).append(message)
        now_s = time.monotonic()
        if now_s - self._kept_s >= self._lease_us / 8e6:
            self._kept_s = now_s
            for worker in self._inner.values():
                worker._keep(now_s)
        return [(self._inner[number], some) for number, some in found.items()]

    def _keep(self, now_s: float) -> None:
        """Restart the ack timeout of messages that wait here while the loop settles those of other partitions."""
        if self._ready and now_s - self._renewed_s >= self._lease_us / 4e6:
            self._progress = True
            self._schedule()

    # -- receiving, of one partition -------------------------------------------------------------------------

    async def _fetch_batch(self) -> list[StreamMessage]:
        self._cancel_confirm()  # the call below confirms the last delivery
        await self._wait_settled()
        call = Consume(
            self.name, self._worker, BATCH_BYTES, self._max_messages, WAIT_MS, self._offset, self._group, self._durable,
            self._ack_timeout_us, self._max_deliver, self._lost_answer,
        )  # fmt: skip
        # Until the answer has arrived and is opened, assume that it was lost.
        again, self._lost_answer = self._lost_answer, True
        try:
            location = await self._stores.find(self.stream, self._uuid, timeout=self._patience)
            delivered = await self._stores.ask(
                location.address, location.key, call, Delivered, timeout=self._patience + WAIT_MS / 1000, shown=self.stream
            )  # fmt: skip
        except (RequestError, StreamError) as err:
            await self._pause_or_raise(err)
            return []
        self._away_since_s = 0.0
        self.lag = delivered.lag
        self._lease_us = delivered.ack_timeout_us or self._ack_timeout_us
        if delivered.fenced:
            raise StreamError(
                self.stream,
                f"another worker of consumer {self.name!r} has taken over; set group to share its messages",
            )
        messages: list[StreamMessage] = []
        for delivery in delivered.items:
            messages += await self._open_item(delivery)
        if again:
            # A repeated delivery may contain messages that we already hold.
            messages = [message for message in messages if message.offset not in self._held]
        self._held.update(message.offset for message in messages)
        self._lost_answer = False
        if messages and not self._closed:
            # A worker that is busy with the first message still holds the others.
            self._unconfirmed = [message.offset for message in messages]
            delay_s = min(CONFIRM_S, self._lease_us / 4e6)
            self._confirm_timer = asyncio.get_running_loop().call_later(delay_s, self._confirm)
        return messages

    def _confirm(self) -> None:
        self._confirm_timer = None
        if self._unconfirmed and not self._closed:
            self._schedule()

    def _cancel_confirm(self) -> None:
        self._unconfirmed = []
        if self._confirm_timer is not None:
            self._confirm_timer.cancel()
            self._confirm_timer = None

    async def _pause_or_raise(self, err: IrisError) -> None:
        """Pause before the next try; raise `err` if retrying cannot help or `patience` has run out."""
        now_s = time.monotonic()
        self._stores.forget(self.stream, self._uuid)
        self._away_since_s = self._away_since_s or now_s
        if (
            isinstance(err, StreamError)
            and not err.passing
            and not isinstance(err, StreamUnavailable)
        ):
            raise err
        if now_s - self._away_since_s > self._patience:
            self._away_since_s = 0.0
            if isinstance(err, StreamError):
                raise err
            raise StreamUnavailable(self.stream, str(err), may_have_run=True) from err
        await asyncio.sleep(random.uniform(0.05, 0.2))

    async def _open_item(self, delivery: Handed) -> list[StreamMessage]:
        item = delivery.item
        if not isinstance(item, Record):
            self._report(to_gap(item))
            return []
        opened = self._opener.open(item, delivery.deliveries)
        if isinstance(opened, StreamGap):
            self._report(opened)
            return []
        wanted = int.from_bytes(delivery.wanted, "little")
        messages = [message for index, message in enumerate(opened) if wanted >> index & 1]
        for message in messages:
            message.partition = self._number
            if message.dead is not None:
                await resolve_dead(
                    self._stores, self._opener, self.stream, message, message.dead, patience=self._patience
                )  # fmt: skip
        return messages

    def _report(self, gap: StreamGap) -> None:
        if self._number:
            gap = structs.replace(gap, partition=self._number)
        self.gaps.append(gap)
        if self._on_gap is not None:
            self._on_gap(gap)

    # -- settling --------------------------------------------------------------------------------------------

    def ack(self, *messages: StreamMessage) -> None:
        """Acknowledge messages: they are done and are not delivered again."""
        if self._inner:
            for worker, some in self._workers(messages):
                worker.ack(*some)
            return
        for message in messages:
            self._held.discard(message.offset)
            self._acked.append(message.offset)
        self._schedule()

    def ack_through(self, message: StreamMessage) -> None:
        """Acknowledge this message and everything delivered to this worker before it, in its partition."""
        if self._inner:
            for worker, (one,) in self._workers((message,)):
                worker.ack_through(one)
            return
        self._acked_through = max(self._acked_through, message.offset)
        self._held = {offset for offset in self._held if offset > message.offset}
        self._schedule()

    def nack(self, *messages: StreamMessage, delay: float = 0.0, reason: str = "") -> None:
        """Report that messages failed: they are delivered again after `delay` seconds. A dead letter keeps `reason`."""
        if not 0 <= delay <= 30 * 86_400:
            raise StreamError(
                self.stream, f"delay: {delay} s is out of range; use 0 to 2592000 s (30 days)"
            )
        if self._inner:
            for worker, some in self._workers(messages):
                worker.nack(*some, delay=delay, reason=reason)
            return
        for message in messages:
            self._held.discard(message.offset)
            self._nacked.setdefault((round(delay * 1e6), reason[:1024]), []).append(message.offset)
        self._schedule()

    def touch(self, *messages: StreamMessage) -> None:
        """Restart the ack timeout of messages that are still being worked on."""
        if self._inner:
            for worker, some in self._workers(messages):
                worker.touch(*some)
            return
        self._touched += [message.offset for message in messages]
        self._schedule()

    async def flush(self) -> None:
        """Wait until the store has every ack, nack and touch. Raises StreamError if it could not be reached."""
        if self._inner:
            done = await asyncio.gather(
                *(worker.flush() for worker in self._inner.values()), return_exceptions=True
            )
            for error in done:
                if error is not None:
                    raise error
            return
        if self._acked or self._nacked or self._touched or self._acked_through >= 0:
            self._schedule()
        await self._wait_settled()
        self._raise_error()

    def _schedule(self) -> None:
        if self._closed:
            raise Closed(f"consumer {self.name!r} of {self.stream!r} was closed; open another")
        if self._settle_task is None:
            self._settle_task = asyncio.get_running_loop().create_task(
                self._settle(), name="iris-settle"
            )

    async def _wait_settled(self) -> None:
        while self._settle_task is not None:
            await asyncio.shield(self._settle_task)

    async def _settle(self) -> None:
        try:
            while call := self._next_call():
                await self._stores.ask_stream(
                    self.stream, self._uuid, call, Settled, timeout=self._patience, writes=True
                )
        except IrisError as err:
            self._error = err
        finally:
            self._settle_task = None

    def _next_call(self, *, leaving: bool = False) -> Settle | None:
        """Return the next call with what is to be settled, as much as one call holds; None if there is nothing."""
        had: list[Range] = []
        if self._confirm_timer is None:
            had, self._unconfirmed = _ranges(self._unconfirmed)
        done, self._acked = _ranges(self._acked)
        held, self._touched = _ranges(self._touched)
        failed: list[Range] = []
        delay_us, reason = 0, ""
        if self._nacked:
            (delay_us, reason), offsets = self._nacked.popitem()
            failed, rest = _ranges(offsets)
            if rest:
                self._nacked[delay_us, reason] = rest
        through, self._acked_through = self._acked_through, -1
        unseen: list[Range] = []
        progress, self._progress = self._progress, False
        waits = [message.offset for message in (*self._ready, *self._also)]
        if leaving:
            unseen, _ = _ranges(waits)
        elif waits and (done or failed or through >= 0 or progress):
            # The loop makes progress: what waits for it here must not time out meanwhile.
            now_s = time.monotonic()
            if now_s - self._renewed_s >= self._lease_us / 4e6:
                self._renewed_s = now_s
                waiting, _ = _ranges(waits)
                held = [*held, *waiting][:MAX_RANGES]
        if not (done or held or failed or leaving or had or through >= 0):
            return None
        last = None if through < 0 else through
        return Settle(
            self.name,
            self._worker,
            done,
            failed,
            held,
            last,
            delay_us,
            reason,
            leaving,
            had,
            unseen,
        )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, StreamError):
            raise error
        if error is not None:
            raise StreamUnavailable(self.stream, str(error), may_have_run=True) from error

    # -- life ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send the store what was settled, and release the rest to other workers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._parts is not None:
            await self._parts.close()
            await asyncio.gather(*(worker.close() for worker in self._inner.values()))
            self._ready.clear()
            return
        self._cancel_confirm()
        task, self._batch_task = self._batch_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        with contextlib.suppress(TimeoutError, IrisError):
            async with asyncio.timeout(SETTLE_S):
                await self._wait_settled()
                if self._offset >= 0 and (call := self._next_call(leaving=True)) is not None:
                    await self._stores.ask_stream(
                        self.stream,
                        self._uuid,
                        call,
                        Settled,
                        timeout=SETTLE_S,
                        patience=1.0,
                        writes=True,
                    )
        self._ready.clear()
        if self._settle_task is not None:
            self._settle_task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _passing(error: Exception) -> bool:
    """Return whether a worker goes on with the other partitions after this error of one."""
    return isinstance(error, StreamUnavailable | RequestError) or (
        isinstance(error, StreamError) and error.passing
    )


def _retrieve_error(task: asyncio.Task[list[StreamMessage]]) -> None:
    if not task.cancelled():
        task.exception()


def _ranges(offsets: Iterable[int]) -> tuple[list[Range], list[int]]:
    """Return offsets as ranges, as many as one call holds, and the offsets that are left over."""
    ranges: list[Range] = []
    ordered = sorted(set(offsets))
    first = end = -1
    for index, offset in enumerate(ordered):
        if offset != end:
            if end >= 0:
                ranges.append(Range(first, end))
                if len(ranges) >= MAX_RANGES:
                    return ranges, ordered[index:]
            first = offset
        end = offset + 1
    if end >= 0:
        ranges.append(Range(first, end))
    return ranges, []
