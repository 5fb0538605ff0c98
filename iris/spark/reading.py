"""Reading a range of a stream, in an executor: every offset of it is accounted for, or the task fails.

Spark never checks that a range was served whole, so this does: what the store sends has to lie side by side from the first offset to the
last, and of what is missing it has to say why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from iris.errors import DecodeError
from iris.spark.connections import Connection, connection, wait_for_stream
from iris.spark.errors import AUTH, DATA_LOSS, SparkError
from iris.spark.options import SourceOptions
from iris.streams import StreamGap, StreamPage, StreamRecord

if TYPE_CHECKING:
    from concurrent.futures import Future

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from iris.spark.arrow import Opened

log = logging.getLogger(__name__)

INTACT: Final = frozenset({"compacted", "expired", "deferred"})
"""Holes that are as they should be: the stream was told to make them."""


class Range(Struct, frozen=True):
    """Offsets from `start` until `end` of one log."""

    stream: str
    uuid: str
    start: int
    end: int
    key_ids: tuple[str, ...] = ()
    """Under which the stream is kept, in hex."""


def read_range(part: Range, options: SourceOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range as record batches, fetched ahead by one.

    Raises:
        SparkError: DATA_LOSS if something of it is gone and `failOnDataLoss` is set, AUTH if the keyring does not open it, TIMEOUT.
    """
    from iris.spark.arrow import RowBuilder

    link = connection(options.access)
    builder = RowBuilder(options, schema)
    reader = _RangeReader(link, part, options)
    try:
        for opened in reader:
            yield from builder.batches(opened)
    except DecodeError as err:
        link.drop()
        raise SparkError(DATA_LOSS, f"stream {part.stream!r}: {err}") from err
    finally:
        reader.close()


class _RangeReader:
    """Iterates over lists of opened records that cover a range."""

    def __init__(self, link: Connection, part: Range, options: SourceOptions) -> None:
        self._link = link
        self._part = part
        self._options = options
        self._ahead: Future[StreamPage] | None = None

    def __iter__(self) -> Iterator[list[Opened]]:
        part, link = self._part, self._link
        by_id = link.client.keyring.by_id
        if part.key_ids and not any(by_id(bytes.fromhex(key_id)) for key_id in part.key_ids):
            raise SparkError(
                AUTH,
                f"stream {part.stream!r}: the keyring on this host has no key of the stream; add one (keyringFile)",
            )
        at = part.start
        while at < part.end:
            page = link.result(self._ahead or self._fetch(at))
            if page.uuid != part.uuid:
                raise SparkError(
                    DATA_LOSS,
                    f"stream {part.stream!r}: log {page.uuid} answered, but the query reads log {part.uuid}",
                )
            if page.next <= at:
                raise SparkError(
                    DATA_LOSS,
                    f"stream {part.stream!r} ends at offset {at}, before offset {part.end} of this query: its store may have lost records",
                )
            self._ahead = self._fetch(page.next) if page.next < part.end else None
            opened, at = self._cover(page, at)
            if opened:
                yield opened

    def close(self) -> None:
        """Fetch no more."""
        if self._ahead is not None:
            self._ahead.cancel()

    def _fetch(self, start: int) -> Future[StreamPage]:
        part, options = self._part, self._options
        timeout_s = options.access.timeout_s
        return self._link.start(
            lambda client: wait_for_stream(
                lambda: client.streams.fetch(
                    part.stream,
                    start,
                    uuid=part.uuid,
                    max_bytes=options.fetch_bytes,
                    timeout=timeout_s,
                ),
                timeout_s,
            )
        )

    def _cover(self, page: StreamPage, at: int) -> tuple[list[Opened], int]:
        """Return what of a page is wanted, and where it ends; raises SparkError if it leaves something out."""
        opened: list[Opened] = []
        end = self._part.end
        for item in page:
            if at >= end:
                break  # and so what lies behind is not opened
            first = item.offset if isinstance(item, StreamRecord) else item.first
            if first > at:
                raise self._lost(f"the store left out offsets {at} to {first}")
            if item.next > at:
                if isinstance(item, StreamRecord):
                    opened.append(self._wanted(item, at, min(item.next, end)))
                elif item.unreadable:
                    self._cannot_read(item)
                elif item.cause not in INTACT:
                    self._miss(item)
            at = max(at, item.next)
        if at < min(page.next, end):
            raise self._lost(f"the store left out offsets {at} to {page.next}")
        return opened, min(at, end)

    def _wanted(self, record: StreamRecord, at: int, end: int) -> Opened:
        from iris.spark.arrow import Opened

        if record.dead:
            raise SparkError(
                AUTH,
                f"stream {self._part.stream!r} holds dead letters, which Spark cannot read; use client.streams.read",
            )
        skip = max(0, at - record.offset)
        start = record.offset + skip
        return Opened(
            record.plain, record.count, skip, end - start, start, record.kind, record.name, record.sender, record.sequence + skip,
            record.sent_us, record.tombstone,
        )  # fmt: skip

    def _cannot_read(self, gap: StreamGap) -> None:
        if self._options.fail_on_data_loss:
            raise SparkError(
                AUTH,
                f"stream {self._part.stream!r} at offset {gap.first}: {gap.cause}; failOnDataLoss=false skips it",
            )
        log.warning("spark.unreadable", extra={"fields": {"stream": self._part.stream, "offset": gap.first, "cause": gap.cause}})  # fmt: skip

    def _miss(self, gap: StreamGap) -> None:
        count = "an unknown number of" if gap.count is None else gap.count
        text = (
            f"offsets {gap.first} to {gap.next} were removed ({gap.cause})"
            if gap.count == 0
            else f"{count} messages are missing before offset {gap.next}: {gap.cause}"
        )
        if self._options.fail_on_data_loss:
            raise self._lost(f"{text}; failOnDataLoss=false goes on without them")
        log.warning(
            "spark.data_loss", extra={"fields": {"stream": self._part.stream, "what": text}}
        )

    def _lost(self, text: str) -> SparkError:
        return SparkError(DATA_LOSS, f"stream {self._part.stream!r}: {text}")
