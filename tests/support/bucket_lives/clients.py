"""Clients of streams in a bucket: they write, read and consume, try again until they are sure, and note what they
saw.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from iris.wire import consumers, stream_items, streams
from iris.wire.codec import END
from iris.wire.stream_items import decode_dead
from iris.wire.streams import Answer, Call
from support.bucket_lives.history import Acked, Chunk, History, Interval, Place, Seen
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import EPOCH_US

END_FIELDS: Final = END.pack(EPOCH_US, 0, 1, 0)
TRY_AGAIN_S: Final = 0.5
CONSUMER: Final = "workers"

RETENTION: Final = 1
"""Reason of a hole (`iris.wire.stream_items.HOLES`)."""

Ask = Callable[[str, Call], Awaitable[Answer | None]]
"""Sends a call to whoever serves a stream, by its uuid; returns the answer, or None if none came in time."""


def body_of(item: stream_items.Item) -> bytes:
    """Return the body of a message, or what stands for a gap or hole."""
    return item.body if isinstance(item, stream_items.Record) else repr(item).encode()


class Client:
    """What all clients have: a stream, a name, and the history that they write into."""

    def __init__(
        self, name: str, plan: StreamPlan, ask: Ask, history: History, rng: random.Random, counts: Counter[str]
    ) -> None:  # fmt: skip
        self.name = name
        self.plan = plan
        self.stream = stream = plan.label
        self._ask = ask
        self._history = history
        self._rng = rng
        self._counts = counts
        self._id = (f"{stream}/{name}".encode() + bytes(16))[:16]

    def _body(self, number: int) -> bytes:
        """Return the message `number` of this client, and note that it is sent."""
        body = f"{self.stream}/{self.name}/{number}".encode()
        self._history.sent[body] = self.stream, self.name, number
        return body

    def _begun(self) -> tuple[int, float]:
        """Return the time of a call that begins."""
        return self._history.tick(), asyncio.get_running_loop().time()

    def _acked(
        self, number: int, body: bytes, offset: int | None, begun: tuple[int, float]
    ) -> None:
        when = Interval(begun[0], self._history.tick())
        self._history.acked.append(
            Acked(self.stream, self.name, number, body, offset, when, begun[1])
        )

    async def _pause(self, mean_s: float) -> None:
        await asyncio.sleep(self._rng.expovariate(1 / mean_s))

    async def _call(self, call: Call) -> Answer | None:
        answer = await self._ask(self.plan.address, call)
        if isinstance(answer, streams.Refused):
            self._counts[f"refused: {answer.code}"] += 1
        elif answer is None:
            self._counts["unanswered calls"] += 1
        return answer


class Producer(Client):
    """Appends messages with the numbers of a producer, each until it is acknowledged: exactly once."""

    def __init__(self, *given: object, count: int, ids: bool, mean_s: float) -> None:
        super().__init__(*given)  # type: ignore[arg-type]  # as the caller gave them
        self.count = count
        self._ids = ids
        """Message ids instead of numbers."""
        self._mean_s = mean_s

    async def run(self) -> None:
        number = 0
        while number < self.count:
            await self._pause(self._mean_s)
            many = min(self._rng.choice((1, 1, 2, 4)), self.count - number)
            await self._append(range(number, number + many))
            number += many

    async def _append(self, numbers: range) -> None:
        bodies = [self._body(number) for number in numbers]
        begun = self._begun()
        while True:
            answer = await self._call(self._call_with(numbers, bodies))
            if isinstance(answer, streams.Appended):
                stored = (streams.STORED, streams.DUPLICATE)
                if all(one.status in stored for one in answer.outcomes):
                    break
                # A store that does not know yet that another one has taken over may not know the latest numbers.
                self._counts["appends out of order"] += 1
            await self._pause(TRY_AGAIN_S)
        for number, body, one in zip(numbers, bodies, answer.outcomes, strict=True):
            self._counts["acknowledged"] += 1
            self._counts["acknowledged as duplicates"] += one.status == streams.DUPLICATE
            self._acked(number, body, one.value, begun)

    def _call_with(self, numbers: range, bodies: list[bytes]) -> Call:
        records = [
            streams.NewRecord(
                number, END_FIELDS, body, id_hash=(body + bytes(32))[:32] if self._ids else b""
            )
            for number, body in zip(numbers, bodies, strict=True)
        ]  # fmt: skip
        producer = streams.NO_PRODUCER if self._ids else self._id
        return streams.Append(self._id, records, producer)


class Once(Client):
    """Appends messages without numbers, and never tries again."""

    def __init__(self, *given: object, count: int, mean_s: float) -> None:
        super().__init__(*given)  # type: ignore[arg-type]  # as the caller gave them
        self._count = count
        self._mean_s = mean_s

    async def run(self) -> None:
        for number in range(self._count):
            await self._pause(self._mean_s)
            # Another name for each: one that got no answer may be stored after its successor.
            body = f"{self.stream}/{self.name}.{number}/0".encode()
            self._history.sent[body] = self.stream, f"{self.name}.{number}", 0
            begun = self._begun()
            record = streams.NewRecord(0, END_FIELDS, body)
            answer = await self._call(streams.Append(self._id, [record]))
            if isinstance(answer, streams.Appended):
                self._counts["acknowledged"] += 1
                self._acked(0, body, answer.outcomes[0].value, begun)


class Committer(Client):
    """Commits batches, as Spark does: stages attempts, some in vain, then commits one of them until it is sure."""

    def __init__(self, *given: object, count: int, mean_s: float) -> None:
        super().__init__(*given)  # type: ignore[arg-type]  # as the caller gave them
        self._count = count
        self._mean_s = mean_s

    async def run(self) -> None:
        number = 0
        for batch in range(1, self._count + 1):
            await self._pause(self._mean_s)
            size = self._rng.randint(1, 3)
            numbers = range(number, number + size)
            bodies = [self._body(one) for one in numbers]
            begun = self._begun()
            while True:
                attempt = self._rng.randbytes(16)
                await self._stage(batch, attempt, bodies)
                if self._rng.random() < 0.2:
                    continue  # a worker dies, and another one does its part again
                committed = await self._commit(batch, attempt, size)
                if committed is not None:
                    break
            self._counts["committed batches"] += 1
            for index, body in enumerate(bodies):
                first = committed.first
                offset = None if first is None else first + index
                self._acked(number + index, body, offset, begun)
            number += size

    async def _stage(self, batch: int, attempt: bytes, bodies: list[bytes]) -> None:
        records = [streams.NewRecord(index, END_FIELDS, body) for index, body in enumerate(bodies)]
        call = streams.Stage(self.name, batch, attempt, self._id, records)
        while not isinstance(await self._call(call), streams.Staged):
            await self._pause(TRY_AGAIN_S)

    async def _commit(self, batch: int, attempt: bytes, size: int) -> streams.Committed | None:
        """Return the outcome; None if the records have to be staged again."""
        call = streams.Commit(self.name, batch, [streams.Attempt(attempt, size)])
        while True:
            answer = await self._call(call)
            if isinstance(answer, streams.Committed):
                return answer
            if isinstance(answer, streams.Refused) and answer.code == "staged":
                return None
            await self._pause(TRY_AGAIN_S)


class Reader(Client):
    """Reads a stream from its beginning on, forever."""

    at = 0

    async def run(self) -> None:
        while True:
            begun = self._history.tick()
            answer = await self._call(streams.Fetch(self.at, 4096, 1000))
            if not isinstance(answer, streams.Fetched):
                await self._pause(TRY_AGAIN_S)
                continue
            when = Interval(begun, self._history.tick())
            found, removed = [], []
            for item in answer.items:
                if isinstance(item, stream_items.Hole) and item.reason == RETENTION:
                    removed.append((item.offset, item.next))
                    continue
                body = body_of(item)
                found.append(item.offset)
                self._history.seen.append(Seen(self.stream, "", item.offset, body, when))
            self._history.chunks.append(
                Chunk(self.stream, self.at, answer.next, answer.high_water, tuple(found), tuple(removed))
            )  # fmt: skip
            self._counts["read"] += len(found)
            self._counts["holes of retention"] += len(removed)
            self.at = answer.next
            if self._rng.random() < 0.1:
                self.at = self._rng.randint(0, self.at)
            await self._pause(TRY_AGAIN_S)


class Worker(Client):
    """A worker of a durable consumer: settles what it gets, or forgets it, and has the position confirmed at times."""

    floor = 0
    """The last position that was confirmed."""
    ack_timeout_us = 1_000_000
    calm = False
    """It finishes everything that it gets, because the life is about to end."""

    async def run(self) -> None:
        again = False
        while True:
            begun = self._history.tick()
            call = consumers.Consume(
                CONSUMER, self._id, 4096, 8, 500, ack_timeout_us=self.ack_timeout_us, again=again,
                max_deliver=self.plan.max_deliver,
            )  # fmt: skip
            answer = await self._call(call)
            again = not isinstance(answer, consumers.Delivered)
            if isinstance(answer, consumers.Delivered):
                await self._work(answer, begun)
            if self._rng.random() < 0.2:
                await self._confirm()
            await self._pause(TRY_AGAIN_S)

    async def _work(self, answer: consumers.Delivered, begun: int) -> None:
        when = Interval(begun, self._history.tick())
        done, failed = [], []
        for handed in answer.items:
            item = handed.item
            if isinstance(item, stream_items.Gap):
                continue  # it is reported once, and is finished then
            if isinstance(item, stream_items.Hole) and item.reason == RETENTION:
                continue
            body = body_of(item)
            self._history.seen.append(Seen(self.stream, CONSUMER, item.offset, body, when))
            self._counts["delivered"] += 1
            self._counts["delivered again"] += handed.deliveries > 1
            dice = 0.0 if self.calm else self._rng.random()
            if dice < (0.9 if not self.plan.max_deliver else 0.75):
                done.append(consumers.Range(item.offset, item.offset + 1))
                self._history.done[self.stream, CONSUMER].add(item.offset)
            elif dice < 0.95:
                failed.append(consumers.Range(item.offset, item.offset + 1))
        done.sort(key=lambda one: one.first)
        failed.sort(key=lambda one: one.first)
        if done or failed:
            await self._call(consumers.Settle(CONSUMER, self._id, done, failed))

    async def _confirm(self) -> None:
        """Have the position confirmed by a change, which is in the bucket when it is answered."""
        changed_us = self.ack_timeout_us + 1  # a change that changes nothing is not written
        while True:
            begun = self._history.tick()
            answer = await self._call(consumers.ChangeConsumer(CONSUMER, changed_us))
            if isinstance(answer, consumers.Consumers):
                break
            if isinstance(answer, streams.Refused) and answer.code == "consumer":
                return  # this store does not know the consumer yet
            await self._pause(TRY_AGAIN_S)
        self.ack_timeout_us = changed_us
        self.floor = answer.consumers[0].floor
        when = Interval(begun, self._history.tick())
        self._history.places.append(Place(self.stream, CONSUMER, self.floor, when))
        self._counts["confirmed positions"] += 1


class Redriver(Client):
    """Has the messages of dead letters delivered again, at times."""

    calm = False
    """It does nothing more, because the life is about to end."""

    async def run(self) -> None:
        while True:
            await self._pause(5)
            letters = {} if self.calm else await self.letters()
            if not letters:
                continue
            some = sorted(self._rng.sample(sorted(letters), min(3, len(letters))))
            self._history.redriven.add((self.stream, CONSUMER))
            answer = await self._call(consumers.RedriveLetters(CONSUMER, some))
            if isinstance(answer, consumers.Redriven):
                self._counts["redriven"] += answer.count

    async def letters(self) -> dict[int, int]:
        """Return the dead letters that there are: offset of the letter -> that of its message."""
        found: dict[int, int] = {}
        address = stream_items.dead_uuid(self.plan.uuid).hex()
        at = 0
        while True:
            answer = await self._ask(address, streams.Fetch(at, 1 << 19))
            if not isinstance(answer, streams.Fetched):
                return {}
            for item in answer.items:
                if isinstance(item, stream_items.Record):
                    found[item.offset] = decode_dead(item.body).offset
            at = answer.next
            if at >= answer.high_water:
                return found
