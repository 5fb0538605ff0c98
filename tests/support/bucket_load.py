"""Producers, readers and a consumer of one stream in a bucket, and the audit of what they were told.

Every message says its producer and its number. Whoever is shown one notes its offset. An offset that is
shown with two messages, or a message with two offsets, is a broken promise, whoever was shown it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable

import iris
from iris.errors import NoStream, StreamError, StreamUnavailable
from iris.streams import StreamGap

STREAM = "kills"
PATIENCE_S = 150.0
MOST_AT_ONCE = 1_000
"""Most messages of one call of a producer that numbers its records."""
IDS_AT_ONCE = 20
SHORT_S = 3.0
"""Timeout of an append with a message id, after which it is repeated over another connection."""
LOOK_S = 0.5
LOOKED = 500
"""Messages that one look reads."""
BULK, WITH_IDS = (0, 1), 2
"""Producers: those that number their records, and the one that gives message ids."""
MESSAGE = struct.Struct("<BI")
FAILURES = 5
"""Refusals of one kind that the audit keeps in full."""

Message = tuple[int, int]
"""Producer and number."""


class Seen:
    """What anybody was shown of the stream."""

    def __init__(self) -> None:
        self.at: dict[int, Message] = {}
        """Offset -> message."""
        self.wrong: list[str] = []
        self._offsets: dict[Message, int] = {}

    def add(self, who: str, offset: int, message: Message) -> None:
        """Note that `who` was shown a message at an offset, or told that it is there."""
        there = self.at.setdefault(offset, message)
        if there != message:
            self.note(f"{who}: offset {offset} has {message}, and was shown with {there} before")
        first = self._offsets.setdefault(message, offset)
        if first != offset:
            self.note(f"{who}: {message} is at {offset}, and was shown at {first} before")

    def note(self, what: str) -> None:
        """Note a broken promise."""
        if len(self.wrong) < 20:
            self.wrong.append(what)


class Load:
    """Everything that uses the stream. Call `start`, then `finish`, then read the figures."""

    def __init__(self, connect: Callable[[], iris.Client], rng: random.Random) -> None:
        self.seen = Seen()
        self.acked: dict[Message, int] = {}
        """Acknowledged messages, and their offsets."""
        self.unsure: set[Message] = set()
        """Messages whose append ended with an error, so that they may be there or not."""
        self.repeated = 0
        """Appends with a message id that were repeated."""
        self.refusals: list[str] = []
        self.looks = self.looks_failed = 0
        self.consumed: set[int] = set()
        self.delivered = 0
        self.followed = 0
        """Messages that the reader who follows has received, each once and in order."""
        self._connect = connect
        self._rng = rng
        self._stopping = asyncio.Event()
        self._progress = asyncio.Event()
        self._producers: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to append, to read and to consume."""
        loop = asyncio.get_running_loop()
        self._producers = [loop.create_task(self._append_many(one)) for one in BULK]
        self._producers.append(loop.create_task(self._append_with_ids()))
        self._others = [
            loop.create_task(each) for each in (self._follow(), self._look(), self._consume())
        ]

    async def more(self) -> None:
        """Return when something that was sent from now on, or is on its way, was acknowledged."""
        self._progress.clear()
        await self._wait(self._progress.wait())

    async def until(self, count: int) -> None:
        """Return when `count` messages were acknowledged."""
        while len(self.acked) < count:
            await self.more()

    async def finish(self) -> list[Message]:
        """Stop appending, let everybody read to the end, and return the whole stream as it is now."""
        self._stopping.set()
        await self._wait(asyncio.gather(*self._producers))
        async with self._client() as client:
            end = (await client.streams.describe(STREAM, timeout=PATIENCE_S)).end
            whole: list[Message] = []
            async with client.streams.read(
                STREAM, "first", follow=False, patience=PATIENCE_S, on_gap=self._gap("the last reader")
            ) as reader:  # fmt: skip
                async for message in reader:
                    said = MESSAGE.unpack(bytes(message.payload))
                    if message.offset != len(whole):
                        self.seen.note(f"the end: offset {message.offset} follows {len(whole) - 1}")
                    self.seen.add("the end", message.offset, said)
                    whole.append(said)
        if len(whole) != end:
            self.seen.note(f"the end: {len(whole)} messages, but the next offset is {end}")
        async with asyncio.timeout(PATIENCE_S):
            while self.followed < end or len(self.consumed) < end:
                self._raise()
                await asyncio.sleep(0.05)
        for task in self._others:
            task.cancel()
        await asyncio.gather(*self._others, return_exceptions=True)
        return whole

    def audit(self, whole: list[Message]) -> list[str]:
        """Return every promise that does not hold for the stream as it is at the end."""
        wrong = list(self.seen.wrong)
        there = {message: offset for offset, message in enumerate(whole)}
        lost = [message for message, offset in self.acked.items() if there.get(message) != offset]
        if lost:
            wrong.append(f"{len(lost)} acknowledged messages are lost or moved, such as {lost[:3]}")
        if len(there) != len(whole):
            wrong.append(f"{len(whole) - len(there)} messages are there twice")
        for producer in BULK:
            numbers = [number for who, number in whole if who == producer]
            if numbers != sorted(numbers):
                wrong.append(f"messages of producer {producer} are out of order")
        unknown = there.keys() - self.acked.keys() - self.unsure
        if unknown:
            wrong.append(f"{len(unknown)} messages are there, but nobody was told")
        return wrong

    # -- producers -------------------------------------------------------------------------------------------

    async def _append_many(self, producer: int) -> None:
        number = 0
        async with self._client() as client:
            while not self._stopping.is_set():
                count = self._rng.randrange(1, MOST_AT_ONCE)
                some = [(producer, number + index) for index in range(count)]
                number += count
                packed = [MESSAGE.pack(*one) for one in some]
                try:
                    offsets = await client.streams.append_many(STREAM, packed, timeout=PATIENCE_S)
                except StreamError as err:
                    self._refused(err)
                    self.unsure.update(some)
                    continue
                for one, offset in zip(some, offsets, strict=True):
                    self._acked(one, offset)

    async def _append_with_ids(self) -> None:
        number = 0
        async with self._client() as first, self._client() as second:

            async def append(message: Message) -> None:
                name = f"{message[0]}.{message[1]}"
                clients = [first, second]
                while True:
                    try:
                        offset = await clients[0].streams.append(
                            STREAM, MESSAGE.pack(*message), message_id=name, timeout=SHORT_S
                        )
                    except (NoStream, StreamUnavailable):
                        self.repeated += 1
                        clients.reverse()
                    else:
                        self._acked(message, offset)
                        return

            while not self._stopping.is_set():
                await asyncio.gather(
                    *(append((WITH_IDS, number + index)) for index in range(IDS_AT_ONCE))
                )
                number += IDS_AT_ONCE

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[iris.Client]:
        """Yield a client that has found the stream: one that has not is told at once if no store serves it."""
        async with self._connect() as client:
            while True:
                try:
                    await client.streams.describe(STREAM, timeout=PATIENCE_S)
                except NoStream:
                    await asyncio.sleep(0.05)
                else:
                    break
            yield client

    def _acked(self, message: Message, offset: int) -> None:
        self.seen.add(f"producer {message[0]}", offset, message)
        self.acked[message] = offset
        self._progress.set()

    def _refused(self, err: StreamError) -> None:
        if len(self.refusals) < FAILURES:
            self.refusals.append(f"{type(err).__name__}: {err}")

    # -- readers and the consumer ----------------------------------------------------------------------------

    def _gap(self, who: str) -> Callable[[StreamGap], None]:
        return lambda gap: self.seen.note(f"{who}: a gap: {gap}")

    async def _follow(self) -> None:
        """Read from the first message on: each once, in order."""
        async with (
            self._client() as client,
            client.streams.read(
                STREAM, "first", patience=PATIENCE_S, on_gap=self._gap("the reader")
            ) as reader,
        ):
            async for message in reader:
                if message.offset != self.followed:
                    self.seen.note(f"the reader: {message.offset} follows {self.followed - 1}")
                self.seen.add("the reader", message.offset, MESSAGE.unpack(bytes(message.payload)))
                self.followed = message.offset + 1

    async def _look(self) -> None:
        """Read some messages from anywhere, again and again, also from a store that has just woken up."""
        async with self._client() as client:
            while True:
                await asyncio.sleep(LOOK_S)
                start = self._rng.randrange(max(1, self.followed))
                try:
                    async with client.streams.read(
                        STREAM, start, follow=False, patience=SHORT_S, on_gap=self._gap("a look")
                    ) as reader:
                        left = LOOKED
                        async for message in reader:
                            said = MESSAGE.unpack(bytes(message.payload))
                            self.seen.add("a look", message.offset, said)
                            left -= 1
                            if not left:
                                break
                except StreamError:
                    self.looks_failed += 1
                else:
                    self.looks += 1

    async def _consume(self) -> None:
        """Work on every message."""
        async with (
            self._client() as client,
            client.streams.consumer(
                STREAM, "worker", patience=PATIENCE_S, on_gap=self._gap("the consumer")
            ) as worker,
        ):
            async for message in worker:
                self.seen.add("a worker", message.offset, MESSAGE.unpack(bytes(message.payload)))
                self.delivered += 1
                self.consumed.add(message.offset)
                worker.ack(message)

    async def _wait(self, what: asyncio.Future[object] | object) -> None:
        """Wait for `what`, within `PATIENCE_S`, unless a task of ours has failed."""
        waiting = asyncio.ensure_future(what)  # type: ignore[arg-type]  # a coroutine or a future
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not waiting.done():
                    self._raise()
                    await asyncio.wait((waiting,), timeout=0.5)
            waiting.result()
        finally:
            waiting.cancel()

    def _raise(self) -> None:
        for task in (*self._producers, *self._others):
            if task.done() and not task.cancelled():
                task.result()
