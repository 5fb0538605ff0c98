"""Dead letters of a consumer: looks at them, and has their messages delivered again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from typing import Final

from msgspec import Struct

from iris.deadlines import seconds_left
from iris.errors import DecodeError, NoStream, StreamError
from iris.streams.reading import FETCH_BYTES, resolve_dead
from iris.streams.records import RecordOpener, StreamMessage
from iris.streams.stores import Stores
from iris.wire.consumers import MAX_REDRIVEN, RedriveLetters, Redriven
from iris.wire.orders import DEAD
from iris.wire.stream_items import DEAD_KIND, DeadLetter, Record, dead_uuid, decode_dead
from iris.wire.streams import Describe, Described, Fetch, Fetched

PATIENCE_S: Final = 5.0
"""Seconds for which the store may be away while the message of a dead letter is fetched."""


class RedriveInfo(Struct, frozen=True):
    """What `redrive` did, in dead letters."""

    redriven: int
    """Their messages are delivered again, and the letters are deleted."""
    gone: int = 0
    """Left as they are, because the stream no longer has their messages."""
    left: int = 0
    """Left as they are, because the consumer holds as many unsettled messages as it can. Redrive again later."""


class Letters:
    """The dead letters of one stream, oldest first, up to where they end when it is made.

    Their stream does not exist before the first one, so it may be missing.
    """

    def __init__(self, stores: Stores, name: str, uuid: str, timeout: float) -> None:
        self._stores = stores
        self._name = name
        self._dead_name = name + DEAD
        self._uuid = uuid
        self._dead_uuid = ""
        self._until_s = time.monotonic() + timeout
        self._asked = timeout

    @property
    def _left_s(self) -> float:
        return seconds_left(self._until_s)

    async def of(
        self, consumer: str, offsets: Collection[int] = ()
    ) -> AsyncIterator[tuple[Record, DeadLetter]]:
        """Iterate over the letters of `consumer` ("" for all), only those of messages at `offsets` if any is given.

        Raises StreamError.
        """
        located = await self._stores.locate(self._name, self._uuid, timeout=self._left_s)
        self._uuid, self._dead_uuid = located.uuid.hex(), dead_uuid(located.uuid).hex()
        try:
            described = await self._stores.ask_stream(
                self._dead_name, self._dead_uuid, Describe(), Described, timeout=self._left_s, asked=self._asked
            )  # fmt: skip
        except NoStream:
            return
        at, end = described.oldest, described.next
        while at < end:
            fetched = await self._stores.ask_stream(
                self._dead_name, self._dead_uuid, Fetch(at, FETCH_BYTES), Fetched, timeout=self._left_s, asked=self._asked
            )  # fmt: skip
            for item in fetched.items:
                if not isinstance(item, Record) or item.kind != DEAD_KIND or item.offset >= end:
                    continue
                try:
                    letter = decode_dead(item.body)
                except DecodeError as err:
                    detail = f"the dead letter at offset {item.offset}: {err}"
                    raise StreamError(self._dead_name, detail) from err
                if consumer not in ("", letter.consumer):
                    continue
                if letter.uuid == located.uuid and (not offsets or letter.offset in offsets):
                    yield item, letter
            if fetched.next <= at:
                return
            at = fetched.next

    async def redrive(
        self, consumer: str, offsets: Collection[int], limit: int | None
    ) -> RedriveInfo:
        """See `Streams.redrive`."""
        done, batch, seen = RedriveInfo(0), list[int](), 0
        async for record, _ in self.of(consumer, offsets):
            seen += 1
            batch.append(record.offset)
            if len(batch) == MAX_REDRIVEN or seen == limit:
                done = await self._send(consumer, batch, done)
                batch = []
            if seen == limit or done.left:
                break
        return await self._send(consumer, batch, done)

    async def _send(self, consumer: str, letters: list[int], before: RedriveInfo) -> RedriveInfo:
        if not letters:
            return before
        answer = await self._stores.ask_stream(
            self._name, self._uuid, RedriveLetters(consumer, letters), Redriven, timeout=self._left_s, writes=True, asked=self._asked
        )  # fmt: skip
        gone, left = len(answer.gone), max(0, len(letters) - answer.count)
        return RedriveInfo(
            before.redriven + len(letters) - gone - left, before.gone + gone, before.left + left
        )

    async def messages(self, consumer: str, limit: int) -> list[StreamMessage]:
        """See `Streams.dead_letters`."""
        found: list[StreamMessage] = []
        opener = RecordOpener(self._stores.runtime.find_key)
        async for record, letter in self.of(consumer):
            if opener.stream is None:
                opener.stream = await self._stores.describe(
                    self._name, self._uuid, timeout=self._left_s, asked=self._asked
                )
            message = StreamMessage(
                b"", record.name, offset=record.offset, stored_us=record.stored_us
            )
            message.dead = letter
            message.stream, message.uuid = self._dead_name, self._dead_uuid
            patience = min(PATIENCE_S, self._left_s)
            await resolve_dead(self._stores, opener, self._name, message, letter, patience=patience)
            found.append(message)
            if len(found) >= limit:
                break
        return found
