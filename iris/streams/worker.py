"""A worker of a consumer at one log: it receives messages, and reports to the store what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, MutableSequence
from typing import Final

from msgspec import Struct, structs

from iris.errors import (
    Closed,
    IrisError,
    NotActive,
    RequestError,
    StreamError,
    StreamUnavailable,
)
from iris.forks import FORKED
from iris.program import host_name
from iris.streams.reading import CLOSED, Start, offset_in, resolve_dead, start_of
from iris.streams.records import RecordOpener, Settler, StreamGap, StreamMessage, to_gap
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.consumers import MAX_LABEL, Consume, Delivered, Handed, Range, Settle
from iris.wire.names import split_site
from iris.wire.stream_items import Record
from iris.wire.streams import Settled

BATCH_BYTES: Final = 1 << 20
WAIT_MS: Final = 20_000
"""Time that the store holds a call while there are no messages."""
MAX_RANGES: Final = 4000
"""Ranges of offsets of each kind in one Settle call."""
SETTLE_S: Final = 10.0
"""Seconds for which `close` waits to send what was settled."""
CONFIRM_S: Final = 1.0
"""Seconds after a delivery in which a worker that has not settled anything confirms that it received the messages."""


class Settings(Struct, frozen=True):
    """The settings of a consumer, and how its workers here call for messages."""

    name: str
    shared: bool
    durable: bool
    ack_timeout_us: int
    max_deliver: int
    prefetch: int
    create: bool
    """Whether the consumer is created if it does not exist."""
    patience: float
    """Seconds for which a relay or a store may be away."""


class Worker:
    """Receives the messages of one log for a consumer, and settles them."""

    def __init__(
        self, stores: Stores, settings: Settings, stream: str, uuid: str, start: Start, report: Callable[[StreamGap], object],
        settler: Settler, seated: Callable[[Worker, int, bool], object], number: int = 0,
    ) -> None:  # fmt: skip
        """`settler` leads from messages to their consumer. `number` is the partition whose log is `stream`.

        `seated(worker, place, replaced)` is called when it becomes active (at place 0) or stands by, `replaced` if it
        was active before.
        """
        self.id = os.urandom(16)
        self.stream = stream
        self.consumer = settings.name
        self.active = settings.shared
        """It receives messages, as far as the store has said."""
        self.lag = 0
        """Messages not settled yet, as of the last delivery."""
        self.lease_us = settings.ack_timeout_us
        """The ack timeout in force, which may have been changed since the consumer was created."""
        self.waiting: MutableSequence[StreamMessage] = []
        """Messages that the loop has not begun with. Their ack timeout is restarted while it goes on with others."""
        self._stores = stores
        self._settings = settings
        self._uuid = uuid
        self._start = start
        self._number = number
        self._report_gap = report
        self._settler = settler
        self._seated = seated
        self._place = 0 if settings.shared else -1
        """Its place in the line of workers; -1 until it is known."""
        self._opener = RecordOpener(stores.runtime.find_key)
        stores.openers.add(self._opener)
        self._held: set[int] = set()
        """Offsets of messages delivered here and not settled yet."""
        self._offset = -1
        """Where a new consumer starts; -1 until that is found."""
        self._batch_task: asyncio.Task[list[StreamMessage]] | None = None
        self._lost_answer = False
        """The last delivery may have been lost: ask the store to repeat it."""
        self._away_since_s = 0.0
        """Monotonic time since which the store is away; 0 while it answers."""
        self._closed = ""
        """Why it receives and settles no more; completes "consumer ..."."""
        self._acked: list[int] = []
        self._nacked: dict[tuple[int, str], list[int]] = {}
        """Failed messages: (delay in µs, reason) -> offsets."""
        self._touched: list[int] = []
        self._acked_through = -1
        self._settle_task: asyncio.Task[None] | None = None
        self._error: IrisError | None = None
        self._stopping = False
        self._renewed_s = 0.0
        """Monotonic time at which the ack timeout of the messages in `waiting` was last restarted."""
        self._progress = False
        """The loop has settled messages of other partitions since messages here were last renewed."""
        self._asks_if_active = False
        """The store does not know its place: ask whether it is still active, by confirming what it holds."""
        self._settles = False
        """The last call settles or touches something."""
        self._unconfirmed: list[int] = []
        """Offsets of the last delivery, until the store knows that it arrived."""
        self._confirm_timer: asyncio.TimerHandle | None = None

    # -- receiving -------------------------------------------------------------------------------------------

    async def find_start(self, stream: VerifiedStream | None = None) -> None:
        """Find where a new consumer starts. `stream` is the log's description, if it is known."""
        patience = self._settings.patience
        if stream is None:
            stream = await self._stores.describe(
                self.stream, self._uuid, timeout=patience, patience=patience
            )
        self._offset = await offset_in(
            self._stores, self.stream, stream, start_of(self._start, self._number), patience=patience
        )  # fmt: skip
        self._opener.stream = stream
        self._uuid = self._uuid or stream.described.uuid.hex()

    def check(self) -> None:
        """Return if it may receive messages.

        Raises Closed, StreamError for what could not be settled, and StopAsyncIteration after `stop`.
        """
        if self._closed:
            raise Closed(f"consumer {self._settings.name!r} of {self.stream!r} {self._closed}")
        self._raise_error()
        if self._stopping:
            raise StopAsyncIteration

    async def wait(self) -> list[StreamMessage]:
        """Receive the next messages and keep them in `waiting`."""
        self.waiting = messages = await self.batch()
        return messages

    async def batch(self) -> list[StreamMessage]:
        """Wait for the next messages and return them, at least one. Raises as `check`, and StreamError."""
        while True:
            self.check()
            if self._offset < 0:
                await self.find_start()
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
            if self._batch_task is not task:
                continue  # another worker is active now, and gets these messages
            self._batch_task = None
            if messages:
                if not self.waiting:
                    self._renewed_s = time.monotonic()
                return messages

    @property
    def uuid(self) -> str:
        """Identity of the log, in hex; empty until it is known."""
        return self._uuid

    def placed(self, place: int | None) -> None:
        """Note the place in the line of workers that the store has said: 0 if it is active; None if it has none."""
        if self._closed or self._settings.shared:
            return
        if place is None:
            if self.active and self._held:
                self._asks_if_active = True
                self._schedule()
            return
        replaced, known = self.active and place > 0, self._place
        self.active, self._place = place == 0, place
        if replaced:
            self._drop_held()
        if (place > 0) != (known > 0) or known < 0:
            self._seated(self, place, replaced)

    def _drop_held(self) -> None:
        """Drop messages that the program has not begun with, because they are delivered to another worker."""
        self.waiting.clear()
        self._held.clear()
        self._cancel_confirm()
        task = self._batch_task
        if task is not None and task.done():
            self._batch_task = None

    def stop(self) -> None:
        """Receive no further messages: `batch` raises StopAsyncIteration."""
        self._stopping = True
        if self._batch_task is not None:
            self._batch_task.cancel()

    def keep(self, now_s: float) -> None:
        """Restart the ack timeout of what is waiting, because the loop settles messages of other partitions."""
        if self.waiting and now_s - self._renewed_s >= self.lease_us / 4e6:
            self._progress = True
            self._schedule()

    async def _fetch_batch(self) -> list[StreamMessage]:
        settings = self._settings
        self._cancel_confirm()  # the call below confirms the last delivery
        await self._wait_settled()
        call = Consume(
            settings.name, self.id, BATCH_BYTES, settings.prefetch, WAIT_MS, self._offset, settings.shared, settings.durable,
            settings.ack_timeout_us, settings.max_deliver, self._lost_answer, settings.create,
        )  # fmt: skip
        if not settings.shared:
            self._stores.attendance.keep(self)
            label = f"{self._stores.runtime.config.label}, pid {os.getpid()} on {host_name()}"
            call = structs.replace(
                call, lease=self._stores.attendance.lease, label=label[:MAX_LABEL], was_active=self.active
            )  # fmt: skip
        # Until the answer has arrived and is opened, assume that it was lost.
        again, self._lost_answer = self._lost_answer, True
        try:
            location = await self._stores.find(
                self.stream, self._uuid, timeout=self._settings.patience
            )
            delivered = await self._stores.ask(
                location.address, location.key, call, Delivered, timeout=self._settings.patience + WAIT_MS / 1000, shown=self.stream
            )  # fmt: skip
        except (RequestError, StreamError) as err:
            await self._pause_or_raise(err)
            return []
        self._away_since_s = 0.0
        self.lag = delivered.lag
        self.lease_us = delivered.ack_timeout_us or settings.ack_timeout_us
        messages: list[StreamMessage] = []
        for delivery in delivered.items:
            messages += await self._open_item(delivery)
        if again:
            # A repeated delivery may contain messages that we already hold.
            messages = [message for message in messages if message.offset not in self._held]
        self._held.update(message.offset for message in messages)
        self._lost_answer = False
        if messages:
            self.placed(0)
        if messages and not self._closed:
            # A worker that is busy with the first message still holds the others.
            self._unconfirmed = [message.offset for message in messages]
            delay_s = min(CONFIRM_S, self.lease_us / 4e6)
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
        if not self._settings.shared:
            self._stores.attendance.look_again(self)
        self._away_since_s = self._away_since_s or now_s
        if (
            isinstance(err, StreamError)
            and not err.passing
            and not isinstance(err, StreamUnavailable)
        ):
            raise err
        if now_s - self._away_since_s > self._settings.patience:
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
            message.consumer = self._settings.name
            message.settler = self._settler
            if message.dead is not None:
                await resolve_dead(
                    self._stores, self._opener, self.stream, message, message.dead, patience=self._settings.patience
                )  # fmt: skip
        return messages

    def _report(self, gap: StreamGap) -> None:
        if self._number:
            gap = structs.replace(gap, partition=self._number)
        self._report_gap(gap)

    # -- settling --------------------------------------------------------------------------------------------

    def check_own(self, messages: Iterable[StreamMessage]) -> None:
        """Raise ValueError unless all messages are of this log, and of this consumer if one delivered them.

        Offsets count in one log, so the store would settle another message, which would never be processed.
        """
        for message in messages:
            if message.uuid != self._uuid:
                # Before the first delivery only the name is known; what is settled is of that log.
                if self._uuid or not message.uuid or message.stream != split_site(self.stream)[1]:
                    raise ValueError(
                        f"message {message.offset} is of {_log(message.stream, message.uuid)}, but consumer "
                        f"{self._settings.name!r} reads {_log(self.stream, self._uuid)}; "
                        "settle it with the consumer that delivered it"
                    )
                self._uuid = message.uuid
            if message.consumer not in ("", self._settings.name):
                raise ValueError(
                    f"message {message.offset} of stream {message.stream!r} was delivered by consumer "
                    f"{message.consumer!r}, not by {self._settings.name!r}; settle it with the consumer that delivered it"
                )

    def ack(self, messages: Iterable[StreamMessage]) -> None:
        """See `Consumer.ack`."""
        for message in messages:
            self._held.discard(message.offset)
            self._acked.append(message.offset)
        if self._settle_task is None or self._closed:
            self._schedule()

    def ack_through(self, message: StreamMessage) -> None:
        """See `Consumer.ack_through`."""
        self._acked_through = max(self._acked_through, message.offset)
        self._held = {offset for offset in self._held if offset > message.offset}
        self._schedule()

    def nack(self, messages: Iterable[StreamMessage], delay_us: int, reason: str) -> None:
        """See `Consumer.nack`."""
        for message in messages:
            self._held.discard(message.offset)
            self._nacked.setdefault((delay_us, reason), []).append(message.offset)
        self._schedule()

    def touch(self, messages: Iterable[StreamMessage]) -> None:
        """See `Consumer.touch`."""
        self._touched += [message.offset for message in messages]
        self._schedule()

    async def flush(self) -> None:
        """Wait until the store has everything that was settled. Raises StreamError if it could not be reached."""
        if self._acked or self._nacked or self._touched or self._acked_through >= 0:
            self._schedule()
        await self._wait_settled()
        self._raise_error()

    def _schedule(self) -> None:
        if self._closed:
            raise Closed(f"consumer {self._settings.name!r} of {self.stream!r} {self._closed}")
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
                await self._send(call)
        except IrisError as err:
            self._error = err
        finally:
            self._settle_task = None

    async def _send(self, call: Settle) -> None:
        """Send what was settled. Raises StreamError, RequestError; NotActive only if it is about what the loop did."""
        settles = self._settles
        try:
            await self._stores.ask_stream(
                self.stream, self._uuid, call, Settled, timeout=self._settings.patience, writes=True
            )
        except NotActive:
            self.placed(1)
            if settles:
                raise

    def _next_call(self, *, leaving: bool = False, begun: bool = True) -> Settle | None:
        """Return the next call with what is to be settled, as much as one call holds; None if there is nothing.

        `begun`: if the worker is leaving, count the delivery of messages that the program has begun with.
        """
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
        waits = [message.offset for message in self.waiting]
        if leaving:
            unseen, _ = _ranges(waits if begun else self._held)
        elif waits and (done or failed or through >= 0 or progress):
            # The loop makes progress: what waits for it must not time out meanwhile.
            now_s = time.monotonic()
            if now_s - self._renewed_s >= self.lease_us / 4e6:
                self._renewed_s = now_s
                waiting, _ = _ranges(waits)
                held = [*held, *waiting][:MAX_RANGES]
        self._settles = bool(done or held or failed or through >= 0)
        asks, self._asks_if_active = self._asks_if_active, False
        if asks:
            had, _ = _ranges(self._held)
        if not (done or held or failed or leaving or had or through >= 0):
            return None
        last = None if through < 0 else through
        return Settle(
            self._settings.name,
            self.id,
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

    def _forked(self) -> None:
        """Receive and settle nothing in the child of a fork: the messages, and the tasks here, are the parent's."""
        self._closed = FORKED
        self._batch_task = self._settle_task = self._confirm_timer = None
        self._acked, self._nacked, self._touched, self._unconfirmed = [], {}, [], []
        self._acked_through = -1

    async def close(self, *, failed: bool = False) -> None:
        """Send the store what was settled, and release the rest to other workers. Idempotent.

        What was delivered here does not count as delivered, unless the consumer is shared or the loop has `failed`:
        then messages that it has begun with count, because one of them may be the cause.
        """
        if self._closed:
            return
        self._closed = CLOSED
        if not self._settings.shared:
            self._stores.attendance.leave(self)
        self._cancel_confirm()
        task, self._batch_task = self._batch_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        with contextlib.suppress(TimeoutError, IrisError):
            async with asyncio.timeout(SETTLE_S):
                await self._wait_settled()
                if self._offset >= 0 and (call := self._last_call(failed)) is not None:
                    await self._stores.ask_stream(
                        self.stream,
                        self._uuid,
                        call,
                        Settled,
                        timeout=SETTLE_S,
                        patience=1.0,
                        writes=True,
                    )
        if self._settle_task is not None:
            self._settle_task.cancel()
            self._settle_task = None

    def _last_call(self, failed: bool) -> Settle | None:
        return self._next_call(leaving=True, begun=failed or self._settings.shared)


def _log(name: str, uuid: str) -> str:
    """Return a log as errors name it."""
    shown = f" (log {uuid[:8]}…)" if uuid else ""
    return f"stream {name!r}{shown}" if name else "no stream"


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
