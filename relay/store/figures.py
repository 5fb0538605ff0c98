"""The figures of a store for the page of metrics, as lines that the store's relay passes on to the process of the page.

Nothing is counted per message for them. They are read once in `FIGURES_S`, and only if the relay serves metrics. They
do not go into the relay's status, because every program of the host may ask for that, and names of streams are not
for all.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from iris.wire.stream_items import dead_uuid
from relay.store.bucket.state import backlog
from relay.store.errors import LogError
from relay.store.store import Store
from relay.store.stream import Stream
from relay.supervisor import FIGURES

log = logging.getLogger(__name__)

FIGURES_S: Final = 2.0
LINE_BYTES: Final = 48 << 10
"""Longest line. The relay skips lines over 64 KiB."""
MAX_SHOWN: Final = 100
"""Streams, and consumers, that have a row; the others are summed up in one."""
MAX_NAME: Final = 128
OTHER: Final = "other"


class StreamRow(Struct, array_like=True):
    """One stream, or the sum of several."""

    stream: str
    messages: int = 0
    bytes: int = 0
    oldest: int = 0
    next: int = 0
    lost: int = 0
    failed: int = 0
    dead: int = 0
    """Dead letters that are kept."""
    dead_ever: int = 0

    def add(self, other: StreamRow) -> None:
        """Add another stream. Offsets are not added up; those of a sum are left at 0."""
        self.messages += other.messages
        self.bytes += other.bytes
        self.next += other.next
        self.lost += other.lost
        self.failed += other.failed
        self.dead += other.dead
        self.dead_ever += other.dead_ever


class ConsumerRow(Struct, array_like=True):
    """One consumer, or the sum of several."""

    stream: str
    consumer: str
    lag: int = 0
    pending: int = 0
    workers: int = 0

    def add(self, other: ConsumerRow) -> None:
        """Add another consumer."""
        self.lag += other.lag
        self.pending += other.pending
        self.workers += other.workers


Row = TypeVar("Row", StreamRow, ConsumerRow)


class BucketRow(Struct, array_like=True):
    """The bucket of a store."""

    up: bool
    backlog: int
    backlog_limit: int
    local: int = 0
    """Bytes of records of streams in the bucket that are on this disk; `moved` are in segment objects alone."""
    moved: int = 0
    reads: int = 0
    """Requests for chunks of segment objects."""
    hits: int = 0
    """Chunks that were in memory when they were asked for."""


class Figures(Struct):
    """One line. `figures` is the process id of the store."""

    figures: int
    count: int
    streams: list[StreamRow]
    consumers: list[ConsumerRow]
    bucket: BucketRow | None = None


async def collect(store: Store) -> Figures:
    """Return the figures of all streams. Between two streams, other work of the event loop is done."""
    streams: list[StreamRow] = []
    consumers: list[ConsumerRow] = []
    for stream in list(store.streams.values()):
        if not stream.dead:
            row, its = _of(store, stream)
            streams.append(row)
            consumers += its
            await asyncio.sleep(0)
    return Figures(os.getpid(), len(streams), streams, consumers, _bucket(store))


def _of(store: Store, stream: Stream) -> tuple[StreamRow, list[ConsumerRow]]:
    name = (stream.name or stream.uuid.hex())[:MAX_NAME]
    row = StreamRow(name, lost=stream.recorder.lost)
    log = stream.log
    row.failed = int(bool(stream.why_superseded or stream.failed or log is None or log.failed))
    if log is not None:
        row.messages, row.bytes, row.oldest, row.next = (
            log.messages,
            log.size_bytes,
            log.oldest,
            log.next,
        )
    letters = store.streams.get(dead_uuid(stream.uuid))
    if letters is not None and letters.log is not None:
        row.dead, row.dead_ever = letters.log.messages, letters.log.next
    consumers: list[ConsumerRow] = []
    if stream.consumer_calls is None:
        return row, consumers
    after, more = "", True
    try:
        while more:
            infos, more = stream.consumer_calls.described(after)
            for info in infos:
                after = info.name
                row.dead += info.dead
                shown = info.name[:MAX_NAME]
                consumers.append(ConsumerRow(name, shown, info.lag, info.pending, info.workers))
            more = more and bool(infos)
    except LogError:  # who uses the consumer gets the error; here the stream counts as failed
        row.failed = 1
    return row, consumers


def _bucket(store: Store) -> BucketRow | None:
    shelf = store.catalogue.shelf
    if shelf is None:
        return None
    waits = backlog(shelf, store.streams.values())
    logs = [stream.log for stream in store.in_bucket() if stream.log is not None]
    local = sum(each.local_bytes for each in logs)
    moved = sum(each.size_bytes for each in logs) - local
    reads, hits = (0, 0) if shelf.reader is None else (shelf.reader.reads, shelf.reader.hits)
    return BucketRow(not waits.away, waits.bytes, waits.limit, local, moved, reads, hits)


def encode(found: Figures) -> bytes:
    """Return figures as one line of at most `LINE_BYTES`: as many rows as fit, and the sum of the others."""
    most = MAX_SHOWN
    while True:
        line = msgspec.json.encode(
            Figures(
                found.figures, found.count, _cut(found.streams, most, lambda: StreamRow(OTHER)),
                _cut(found.consumers, most, lambda: ConsumerRow(OTHER, OTHER)), found.bucket,
            )
        )  # fmt: skip
        if len(line) < LINE_BYTES or not most:
            assert line.startswith(FIGURES)
            return line + b"\n"
        most //= 2


def _cut(rows: list[Row], most: int, other: Callable[[], Row]) -> list[Row]:
    if len(rows) <= most:
        return rows
    rest = other()
    for row in rows[most:]:
        rest.add(row)
    kept = rows[:most]
    kept.append(rest)
    return kept


async def report(store: Store, descriptor: int = 1) -> None:
    """Write figures to the relay every `FIGURES_S`, until cancelled or the relay is gone.

    A relay that does not read is not waited for: the next figures are left out until it has.
    """
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(os.dup(descriptor), "wb", 0)
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
    try:
        while not transport.is_closing():
            if not transport.get_write_buffer_size():
                try:
                    transport.write(encode(await collect(store)))
                except Exception:  # a fault here must not end what is shown of all streams
                    log.exception("store.figures_fault")
            await asyncio.sleep(FIGURES_S)
    finally:
        transport.abort()
