"""Durable streams: appends, and messages from an offset on as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any, Final

import iris
from iris.documents import stream_document
from iris.streams import Offset
from iris.web.sending import event
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.replies import BEGIN, HEARTBEAT, problem_of
from relay.bridges.http.requests import Asked, bad
from relay.bridges.http.shares import Share

BATCH_BYTES: Final = 128 << 10
"""Bytes that a reader asks the store for at once. It has up to three such batches in memory."""
PATIENCE_S: Final = 30.0


def start_of(asked: Asked) -> str | int | datetime:
    """Return where to start: after Last-Event-ID, else at the parameter `start`, else at the first message.

    Raises Problem.
    """
    last = asked.number("Last-Event-ID")
    if last is not None:
        return last + 1
    text = asked.query().get("start", "first")
    if text in ("first", "last", "new"):
        return text
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise bad(f"start: {text[:40]!r} is not first, last, new, an offset or a time such as 2026-01-31T12:00:00Z") from None  # fmt: skip


async def append(client: iris.Client, name: str, asked: Asked) -> dict[str, int]:
    """Append the body; return its offset, and its partition if the stream has several, once it is on disk.

    Raises:
        Problem: a header is wrong.
        IrisError: as `Streams.append`.
    """
    offset = await client.streams.append(
        name, await asked.payload(), headers=asked.message_headers(), key=asked.headers.get("iris-key"),
        expect=asked.number("Iris-Expect"), message_id=asked.headers.get("idempotency-key"),
        tombstone=asked.flag("Iris-Tombstone"), timeout=asked.timeout(),
    )  # fmt: skip
    if isinstance(offset, Offset):
        return {"offset": int(offset), "partition": offset.partition}
    return {"offset": offset}


class StreamReaders:
    """All event streams of durable streams."""

    def __init__(self, client: iris.Client, config: HttpConfig) -> None:
        self.events = 0
        self.lost: Counter[str] = Counter()
        self._places = Share(config.max_stream_readers, "readers of streams", self.lost)
        self._client = client
        self._config = config
        self._stop = asyncio.Event()

    @property
    def readers(self) -> int:
        """Number of event streams."""
        return self._places.total

    def end(self) -> None:
        """End all event streams that are open now."""
        self._stop.set()
        self._stop = asyncio.Event()

    async def events_of(self, name: str, start: str | int | datetime, user: str, *, follow: bool) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Iterate over parts of an event stream. The first says nothing but that the stream was found.

        Raises:
            Problem: too many readers, or too many of this user.
            IrisError: before the first part, as `Streams.read`. Later errors are events.
        """
        with self._places.place(user):
            async with contextlib.aclosing(self._read(name, start, follow=follow)) as parts:
                async for part in parts:
                    yield part

    async def _read(self, name: str, start: str | int | datetime, *, follow: bool) -> AsyncGenerator[bytes, None]:  # fmt: skip
        gaps: list[bytes] = []

        def on_gap(gap: iris.StreamGap) -> None:
            document = {
                "first": gap.first,
                "end": gap.end,
                "count": gap.count,
                "cause": gap.cause,
            }
            gaps.append(event(document, "gap", str(gap.end - 1)))

        found = await self._client.streams.describe(name)
        at = await self._client.streams.find(name, start, uuid=found.uuid)
        yield BEGIN
        stopped = asyncio.ensure_future(self._stop.wait())
        reader = self._client.streams.read(
            name, at, follow=follow, uuid=found.uuid, batch_bytes=BATCH_BYTES, patience=PATIENCE_S, on_gap=on_gap
        )  # fmt: skip
        batch: asyncio.Future[list[iris.StreamMessage]] | None = None
        try:
            async with reader:
                while True:
                    batch = batch or asyncio.ensure_future(_batch(reader))
                    await asyncio.wait((batch, stopped), timeout=self._config.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
                    if gaps:
                        yield b"".join(gaps)
                        gaps.clear()
                    if stopped.done():
                        return
                    if not batch.done():
                        yield HEARTBEAT
                        continue
                    try:
                        messages = batch.result()
                    except iris.IrisError as error:
                        yield event(problem_of(error).document, "error")
                        return
                    batch = None
                    if not messages:
                        yield event({"end": reader.offset}, "end")
                        return
                    self.events += len(messages)
                    yield b"".join(event(stream_document(each), "", str(each.offset)) for each in messages)  # fmt: skip
        finally:
            stopped.cancel()
            if batch is not None:
                batch.cancel()
                await asyncio.gather(batch, return_exceptions=True)


async def _batch(reader: Any) -> list[iris.StreamMessage]:
    """Return the next messages of a reader; none at the end."""
    try:
        messages: list[iris.StreamMessage] = await reader.batch()
    except StopAsyncIteration:
        return []
    return messages
