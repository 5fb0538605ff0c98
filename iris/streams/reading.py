"""Reads a stream page by page; the next page is fetched while the current one is opened."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final, Self

from msgspec import structs

from iris.awaiting import check_callback, check_returned
from iris.errors import Closed, StreamDamaged, StreamError, StreamSuperseded, StreamUnavailable
from iris.forks import FORKED, disable_in_child
from iris.iterating import Items
from iris.misuse import AsyncOnly
from iris.one_process import OneProcess
from iris.streams.interleaving import Interleaved
from iris.streams.partitions import Layout, find_layout, layout_of
from iris.streams.records import RecordOpener, StreamGap, StreamMessage, to_gap
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.codec import END
from iris.wire.names import plural
from iris.wire.orders import DEAD, partition_name
from iris.wire.stream_items import DeadLetter, Record
from iris.wire.streams import Fetch, Fetched, Find, Found

Start = str | int | datetime | Mapping[int, str | int | datetime]
FETCH_BYTES: Final = 1 << 20
WAIT_MS: Final = 20_000
"""Time that the store holds a fetch at the end of the stream."""
MIN_BYTES: Final = 64 << 10
"""Least bytes of a page, of a reader of many partitions, which share the bytes of one reader."""
LOOK_S: Final = 5.0
"""Seconds for which a reader looks, in the background, for partitions that were added."""
CLOSED: Final = "was closed; open another"
MAX_GAPS: Final = 1000
"""Latest gaps that a reader or consumer keeps in `gaps`."""


class Reader(OneProcess, AsyncOnly, Items[StreamMessage]):
    """The messages of a stream from an offset on: `async for message in client.streams.read("orders")`.

    Another reader that starts at `offset` continues here. Missing messages are reported to
    `on_gap`, and the latest 1,000 reports are kept in `gaps`. If the relay or the store is away, the reader waits
    up to `patience` seconds for it to come back; then it raises StreamUnavailable.

    A reader of several partitions delivers batches as they arrive, in order within each partition; `message.partition`
    names it. While a partition cannot be read, the reader continues with the others, and `missing` says why. Without
    `follow`, it then raises StreamUnavailable at the end.

    Several tasks may take messages of one reader: each message goes to one of them. If you save `offset`, use one
    task, because `offset` also moves past messages that another task has not finished.
    """

    _right_use = "async for message in client.streams.read(...):"

    def __init__(
        self, stores: Stores, name: str, start: Start, *, follow: bool, uuid: str, batch_bytes: int, patience: float,
        on_gap: Callable[[StreamGap], object] | None, partition: int | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        """With `partition` it reads one partition, otherwise all. `number` is that of the log `name`, if it is one."""
        self.name = name
        self._partition = partition
        self._number = number
        self._inner: dict[int, Reader] = {}
        """The readers of the partitions, if this one reads several."""
        self._parts: Interleaved[list[StreamMessage]] | None = None
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
        check_callback("on_gap", on_gap)
        self._on_gap = on_gap
        self._opener = RecordOpener(stores.runtime.find_key)
        stores.openers.add(self._opener)
        self._ready: deque[StreamMessage] = deque()
        self._taking = asyncio.Lock()
        """Held by the one task that waits for the next messages."""
        self._fetching: asyncio.Task[Fetched] | None = None
        self._closed = ""
        """Why it reads no more; completes "the reader of ..."."""
        self._end: int | None = None
        disable_in_child(self)
        self._unread: tuple[Fetched, int] | None = None
        """(answer, index): the items from `index` on are still to be delivered."""

    @property
    def offset(self) -> int:
        """The offset after the last message delivered; -1 until the stream is found.

        Raises StreamError if it reads several partitions; see `offsets`.
        """
        if self._parts is not None:
            raise StreamError(
                self.name, "it has several partitions, each with its own offset; use reader.offsets"
            )
        return self._ready[0].offset if self._ready else self._at

    @property
    def offsets(self) -> dict[int, int]:
        """Partition -> the offset after the last message delivered; -1 until it is found. A `start` for `read`."""
        if self._parts is None:
            return {self._number: self.offset}
        found = {number: self._position(number, reader) for number, reader in self._inner.items()}
        if self._ready:
            found[self._ready[0].partition] = self._ready[0].offset
        return dict(sorted(found.items()))

    def _position(self, number: int, reader: Reader) -> int:
        """Return the offset after the last message that was taken of a partition."""
        waiting = self._parts.ready(number) if self._parts is not None else None
        return waiting[0].offset if waiting else reader.offset

    @property
    def missing(self) -> dict[int, Exception]:
        """Partitions that cannot be read now -> why. The reader goes on with the others, and tries these again."""
        return {} if self._parts is None else dict(self._parts.missing)

    @property
    def _of(self) -> str:
        return self.name

    async def __anext__(self) -> StreamMessage:
        while not self._ready:
            await self._fill()
        return self._ready.popleft()

    async def _fill(self) -> None:
        """Wait until messages are in `_ready`."""
        async with self._taking:
            if not self._ready:
                self._ready.extend(await self._next_batch())

    def batches(self) -> Items[list[StreamMessage]]:
        """Iterate over lists of messages, one per fetch. This is faster than single messages."""
        return Batches(self.name, self.batch)

    async def batch(self) -> list[StreamMessage]:
        """Return the next messages, at least one. Raises StopAsyncIteration at the end, unless the reader follows.

        Raises:
            StreamError: NoStream, StreamDamaged, StreamUnavailable. Call again to go on at `offset` once it is
                repaired.
        """
        async with self._taking:
            return await self._next_batch()

    async def _next_batch(self) -> list[StreamMessage]:
        while True:
            if self._closed:
                raise Closed(f"the reader of {self.name!r} {self._closed}")
            if self._parts is not None:
                return await self._batch_of_any(self._parts)
            if self._at < 0:
                await self._find_start()
                continue
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
        self._closed = self._closed or CLOSED
        if self._parts is not None:
            await self._parts.close()
            await asyncio.gather(*(reader.close() for reader in self._inner.values()))
        task, self._fetching = self._fetching, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _forked(self) -> None:
        """Deliver nothing in the child of a fork: the tasks that fetch, and what they fetched, are the parent's."""
        self._closed = FORKED
        self._ready.clear()
        self._parts = self._fetching = self._unread = None
        self._inner = {}
        self._taking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- fetching --------------------------------------------------------------------------------------------

    async def _find_start(self) -> None:
        stream = await self._stores.describe(
            self.name, self._uuid, timeout=self._patience, patience=self._patience
        )
        layout = layout_of(self._stores, self.name, stream)
        name, number = self.name, self._number
        if self._partition is not None:
            number = self._partition
            if number:
                name, uuid = layout.log(number)
                stream = await self._stores.describe(
                    name, uuid, timeout=self._patience, patience=self._patience
                )
        else:
            check_alive(name, stream)
            if len(layout) > 1:
                self._read_all(layout)
                return
        start = start_of(self._start, number)
        at = await offset_in(self._stores, name, stream, start, patience=self._patience)
        # Changed only now, because each wait may be cancelled, and this begins again then.
        if number and self._partition is not None:
            self.name, self._uuid = name, uuid
        self._number, self._partition = number, None
        # From now on read only this log, even if its name is given to another.
        self._uuid = self._uuid or stream.described.uuid.hex()
        self._opener.stream = stream
        self.high_water = stream.described.next
        if not self._follow:
            self._end = stream.described.next
        self._at = at

    # -- partitions ------------------------------------------------------------------------------------------

    def _read_all(self, layout: Layout) -> None:
        """Read all partitions, each with a reader of its own."""
        check_start(self.name, len(layout), self._start)
        for number in range(len(layout)):
            self._add(layout, number, self._start)

        async def look() -> int:
            now = await find_layout(self._stores, self.name, layout.uuids[0], timeout=LOOK_S)
            for number in range(len(self._inner), len(now)):
                self._add(now, number, "first")
            return len(now)

        self._parts = Interleaved(
            self.name, len(layout), self._batch_of, passing=lambda err: not isinstance(err, StreamSuperseded), look=look if self._follow else None
        )  # fmt: skip

    def _add(self, layout: Layout, number: int, start: Start) -> None:
        name, uuid = layout.log(number)
        self._inner[number] = Reader(
            self._stores, name, start, follow=self._follow, uuid=uuid, batch_bytes=max(MIN_BYTES, self._batch_bytes // len(layout)),
            patience=self._patience, on_gap=self._report, partition=0 if number == 0 else None, number=number,
        )  # fmt: skip

    async def _batch_of(self, number: int) -> list[StreamMessage]:
        return await self._inner[number].batch()

    async def _batch_of_any(self, parts: Interleaved[list[StreamMessage]]) -> list[StreamMessage]:
        try:
            number, messages = await parts.next()
        except StreamError as err:
            if self._follow or not parts.missing:
                raise
            away = "; ".join(
                f"partition {one}: {why}" for one, why in sorted(parts.missing.items())
            )
            raise StreamUnavailable(
                self.name, f"{plural(len(parts.missing), 'partition')} could not be read, the others were read to their ends: {away}"
            ) from err  # fmt: skip
        parts.resume(number)
        self.high_water = sum(reader.high_water for reader in self._inner.values())
        return messages

    # -- fetching, of one partition --------------------------------------------------------------------------

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
                if gap.end > at:
                    if messages:
                        return self._before_gap(at, messages, fetched, number)
                    self._at = at = gap.end
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
                if self._number:
                    for message in opened:
                        message.partition = self._number
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
        if self._number:
            gap = structs.replace(gap, partition=self._number)
        self.gaps.append(gap)
        if self._on_gap is not None:
            check_returned(self._on_gap(gap))


class Batches(Items[list[StreamMessage]]):
    """Iterates over the batches of a reader or consumer of the stream `name`."""

    def __init__(self, name: str, batch: Callable[[], Awaitable[list[StreamMessage]]]) -> None:
        self._name = name
        self._batch = batch

    @property
    def _of(self) -> str:
        return self._name

    async def __anext__(self) -> list[StreamMessage]:
        return await self._batch()


def start_of(start: Start, partition: int) -> Start:
    """Return where a partition is started: `start`, or what it maps the partition to."""
    return start.get(partition, "first") if isinstance(start, Mapping) else start


def check_start(name: str, partitions: int, start: Start) -> None:
    """Raise StreamError if `start` is an offset, which means nothing in a stream with several partitions."""
    if isinstance(start, int):
        raise StreamError(
            name,
            f"it has {partitions} partitions, each with its own offsets; name a partition, or use start={{0: {start}, …}}",
        )


def check_alive(name: str, stream: VerifiedStream) -> None:
    """Raise StreamError for the dead letters of a stream with several partitions, each of which has its own."""
    if stream.dead and stream.order.definition.partitions:
        raise StreamError(
            name,
            f"each partition has its own dead letters: read one of them, such as {partition_name(stream.order.definition.name, 1) + DEAD!r}, "
            "or all with client.streams.dead_letters or `iris stream dead`",
        )


async def start_offset(
    stores: Stores, name: str, uuid: str, start: Start, *, patience: float
) -> tuple[VerifiedStream, int]:
    """Return the stream and the offset that `start` means in it. Raises StreamError."""
    stream = await stores.describe(name, uuid, timeout=patience, patience=patience)
    return stream, await offset_in(stores, name, stream, start, patience=patience)


async def offset_in(
    stores: Stores, name: str, stream: VerifiedStream, start: Start, *, patience: float
) -> int:
    """Return the offset that `start` means in a log. Raises StreamError."""
    found = stream.described
    if not found.readable:
        raise StreamDamaged(name, found.failed)
    if start == "first":
        return found.oldest
    if start == "new":
        return found.next
    if start == "last":
        return max(found.oldest, found.next - 1)
    if isinstance(start, datetime):
        call = Find(int(start.timestamp() * 1e6))
        at = await stores.ask_stream(name, found.uuid.hex(), call, Found, timeout=patience)
        return at.offset
    if isinstance(start, int) and start >= 0:
        if start > found.next:
            raise StreamError(
                name, f"offset {start} is beyond the end, {found.next}; start there or earlier"
            )
        return start
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
