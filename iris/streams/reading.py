"""Reads a stream page by page; the next page is fetched while the current one is opened."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Final, Self

from iris.errors import Closed, StreamDamaged, StreamError
from iris.streams.records import RecordOpener, StreamGap, StreamMessage, to_gap
from iris.streams.stores import Stores, VerifiedStream
from iris.wire.codec import END
from iris.wire.orders import DEAD
from iris.wire.streams import DeadLetter, Fetch, Fetched, Find, Found, Record

Start = str | int | datetime
FETCH_BYTES: Final = 1 << 20
WAIT_MS: Final = 20_000
"""Time that the store holds a fetch at the end of the stream."""
MAX_GAPS: Final = 1000
"""Latest gaps that a reader or consumer keeps in `gaps`."""


class Reader:
    """The messages of a stream from an offset on: `async for message in client.streams.read("orders")`.

    Use it from one task. A reader that starts at `offset` later misses nothing. Missing messages are reported to
    `on_gap`, and the latest 1,000 reports are kept in `gaps`. If the relay or the store is away, the reader waits
    up to `patience` seconds for it to come back; then it raises StreamUnavailable.
    """

    def __init__(
        self, stores: Stores, name: str, start: Start, *, follow: bool, uuid: str, batch_bytes: int, patience: float,
        on_gap: Callable[[StreamGap], object] | None,
    ) -> None:  # fmt: skip
        self.name = name
        self._at = -1
        """First offset not opened yet; -1 until the stream is found."""
        self.gaps: deque[StreamGap] = deque(maxlen=MAX_GAPS)
        self.high_water = 0
        """The end of the stream as of the last answer."""
        self._stores = stores
        self._start = start
        self._follow = follow
        self._uuid = uuid
        self._batch_bytes = batch_bytes
        self._patience = patience
        self._on_gap = on_gap
        self._opener = RecordOpener(stores.runtime.find_key)
        stores.openers.add(self._opener)
        self._ready: deque[StreamMessage] = deque()
        self._fetching: asyncio.Task[Fetched] | None = None
        self._closed = False
        self._end: int | None = None
        self._unread: tuple[Fetched, int] | None = None
        """(answer, index): the items from `index` on are still to be delivered."""

    @property
    def offset(self) -> int:
        """The offset after the last message delivered; -1 until the stream is found."""
        return self._ready[0].offset if self._ready else self._at

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamMessage:
        while not self._ready:
            await self._fill()
        return self._ready.popleft()

    async def _fill(self) -> None:
        """Wait for the next messages and keep them in `_ready`."""
        self._ready.extend(await self.batch())

    async def batches(self) -> AsyncIterator[list[StreamMessage]]:
        """Iterate over lists of messages, one per fetch. This is faster than single messages."""
        while True:
            try:
                yield await self.batch()
            except StopAsyncIteration:
                return

    async def batch(self) -> list[StreamMessage]:
        """Return the next messages, at least one. Raises StopAsyncIteration at the end, unless the reader follows.

        Raises:
            StreamError: NoStream, StreamDamaged, StreamUnavailable. Call again to go on at `offset` once it is
                repaired.
        """
        while True:
            if self._closed:
                raise Closed(f"the reader of {self.name!r} was closed; open another")
            if self._at < 0:
                await self._find_start()
            if self._end is not None and self._at >= self._end:
                raise StopAsyncIteration
            left, self._unread = self._unread, None
            fetched, index = left or (await self._next(), 0)
            try:
                messages = await self._open(fetched, index)
            except BaseException:
                # The page fetched ahead does not follow on from where we stopped.
                self._drop_ahead()
                raise
            if messages:
                return messages

    def _drop_ahead(self) -> None:
        task, self._fetching = self._fetching, None
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._closed = True
        task, self._fetching = self._fetching, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- fetching --------------------------------------------------------------------------------------------

    async def _find_start(self) -> None:
        stream, self._at = await start_offset(
            self._stores, self.name, self._uuid, self._start, patience=self._patience
        )
        # From now on read only this log, even if its name is given to another.
        self._uuid = self._uuid or stream.described.uuid.hex()
        self._opener.stream = stream
        self.high_water = stream.described.next
        if not self._follow:
            self._end = stream.described.next

    async def _next(self) -> Fetched:
        task = self._fetching or self._fetch(self._at)
        self._fetching = task
        try:
            fetched = await asyncio.shield(task)
        except BaseException:
            if task.done():
                self._fetching = None
            raise
        # Fetch the next page while this one is opened.
        more = fetched.next > self._at and (self._end is None or fetched.next < self._end)
        self._fetching = self._fetch(fetched.next) if more and not self._closed else None
        return fetched

    def _fetch(self, start: int) -> asyncio.Task[Fetched]:
        wait_ms = WAIT_MS if self._follow else 0
        call = Fetch(start, self._batch_bytes, wait_ms)
        work = self._stores.ask_stream(
            self.name,
            self._uuid,
            call,
            Fetched,
            timeout=self._patience + wait_ms / 1000,
            patience=self._patience,
        )
        task = asyncio.get_running_loop().create_task(work, name="iris-fetch")
        task.add_done_callback(_retrieve_error)
        return task

    # -- opening ---------------------------------------------------------------------------------------------

    async def _open(self, fetched: Fetched, index: int) -> list[StreamMessage]:
        """Return the messages of an answer from item `index` on, up to the next gap, which is reported after them.

        Raises StreamDamaged if the answer leaves out offsets.
        """
        messages: list[StreamMessage] = []
        self.high_water = fetched.high_water
        at = self._at
        for number in range(index, len(fetched.items)):
            item = fetched.items[number]
            if item.offset > at:
                raise StreamDamaged(self.name, f"the store left out offsets {at} to {item.offset}")
            if not isinstance(item, Record):
                gap = to_gap(item)
                if gap.next > at:
                    if messages:
                        return self._before_gap(at, messages, fetched, number)
                    self._at = at = gap.next
                    self._report(gap)
                continue
            end = item.offset + END.unpack(item.end)[2]
            if end <= at:
                continue
            opened = self._opener.open(item)
            if isinstance(opened, StreamGap):
                if messages:
                    return self._before_gap(at, messages, fetched, number)
                self._at = end
                self._report(opened)
            else:
                if item.offset < at:
                    opened = opened[at - item.offset :]
                for message in opened:
                    if message.dead is not None:
                        await resolve_dead(
                            self._stores,
                            self._opener,
                            self.name,
                            message,
                            message.dead,
                            patience=self._patience,
                        )
                messages += opened
            at = end
        if at != fetched.next and fetched.items:
            raise StreamDamaged(self.name, f"the store left out offsets {at} to {fetched.next}")
        self._at = at
        return self._before_end(messages)

    def _before_gap(
        self, at: int, messages: list[StreamMessage], fetched: Fetched, number: int
    ) -> list[StreamMessage]:
        """Return the messages before a gap; keep the rest of the answer, from the gap (item `number`) on, for later."""
        self._at, self._unread = at, (fetched, number)
        return self._before_end(messages)

    def _before_end(self, messages: list[StreamMessage]) -> list[StreamMessage]:
        if self._end is not None and messages and messages[-1].offset >= self._end:
            return [message for message in messages if message.offset < self._end]
        return messages

    def _report(self, gap: StreamGap) -> None:
        self.gaps.append(gap)
        if self._on_gap is not None:
            self._on_gap(gap)


async def start_offset(
    stores: Stores, name: str, uuid: str, start: Start, *, patience: float
) -> tuple[VerifiedStream, int]:
    """Return the stream and the offset that `start` means in it. Raises StreamError."""
    stream = await stores.describe(name, uuid, timeout=patience, patience=patience)
    found = stream.described
    if not found.readable:
        raise StreamDamaged(name, found.failed)
    if start == "first":
        return stream, found.oldest
    if start == "new":
        return stream, found.next
    if start == "last":
        return stream, max(found.oldest, found.next - 1)
    if isinstance(start, datetime):
        call = Find(int(start.timestamp() * 1e6))
        at = await stores.ask_stream(name, found.uuid.hex(), call, Found, timeout=patience)
        return stream, at.offset
    if isinstance(start, int) and start >= 0:
        if start > found.next:
            raise StreamError(
                name, f"offset {start} is beyond the end, {found.next}; start there or earlier"
            )
        return stream, start
    raise StreamError(
        name,
        f"start: {start!r} is not allowed; use an offset, a datetime, 'first', 'last' or 'new'",
    )


async def resolve_dead(
    stores: Stores, opener: RecordOpener, name: str, message: StreamMessage, dead: DeadLetter, *, patience: float
) -> None:  # fmt: skip
    """Fill a dead letter with the message that it refers to; if that cannot be read, say why in a header."""
    base = name.removesuffix(DEAD)
    if opener.stream is None or dead.uuid != opener.stream.order.uuid:
        message.headers = {"unreadable": "it refers to another stream"}
        return
    try:
        fetched = await stores.ask_stream(
            base, dead.uuid.hex(), Fetch(dead.offset, 1), Fetched, timeout=patience
        )
    except StreamError as err:
        message.headers = {"unreadable": str(err)[:1024]}
        return
    for item in fetched.items:
        opened = opener.open(item) if isinstance(item, Record) else to_gap(item)
        if isinstance(opened, StreamGap):
            message.headers = {"unreadable": opened.cause[:1024]}
            continue
        for original in opened:
            if original.offset == dead.offset:
                message.payload, message.name = original.payload, original.name
                message.headers, message.packed = original.headers, original.packed
                message.source, message.sent_us = original.source, original.sent_us
                message.key = original.key


def _retrieve_error(task: asyncio.Task[Fetched]) -> None:
    if not task.cancelled():
        task.exception()
