"""Reads a range of a stream in an executor; the task fails unless every offset is accounted for.

Spark does not check that a range was served completely, so this module does: the store's answers must cover the range
without holes, and must give a reason for every message that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from iris.errors import DecodeError
from iris.logs import logger
from iris.spark.connections import Connection, connection, wait_for_stream
from iris.spark.errors import AUTH, DATA_LOSS, SparkError
from iris.spark.options import SourceOptions
from iris.streams import StreamGap, StreamPage, StreamRecord
from iris.wire.names import plural
from iris.wire.orders import partition_name
from iris.wire.stream_items import DEAD_KIND

if TYPE_CHECKING:
    from concurrent.futures import Future

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from iris.spark.arrow import Opened

log = logger(__name__)

EXPECTED_HOLES: Final = frozenset({"compacted", "expired", "deferred"})
"""Causes of holes that are not data loss, because the stream's users asked for them."""


class Range(Struct, frozen=True):
    """Offsets from `start` up to `end` of one partition."""

    stream: str
    partition: int
    uuid: str
    """The uuid of the stream."""
    log: str
    """The uuid of the partition's log: that of the stream for partition 0."""
    start: int
    end: int
    key_ids: tuple[str, ...] = ()
    """Ids of the keys that the partition is kept under, in hex."""

    @property
    def name(self) -> str:
        """The name for people, such as "orders/1"."""
        return partition_name(self.stream, self.partition)


def read_range(part: Range, options: SourceOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range as record batches, with one page fetched ahead.

    Raises:
        SparkError: DATA_LOSS if messages are missing and `failOnDataLoss` is set; AUTH if the keyring cannot open a
            message; TIMEOUT.
    """
    from iris.spark.arrow import RowBuilder

    link = connection(options.access)
    builder = RowBuilder(options, schema, part.stream, part.partition)
    reader = _RangeReader(link, part, options)
    try:
        for opened in reader:
            yield from builder.batches(opened)
    except DecodeError as err:
        link.drop()
        raise SparkError(DATA_LOSS, f"stream {part.name!r}: {err}") from err
    finally:
        reader.close()


class _RangeReader:
    """Iterates over a range, one list of opened records per page."""

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
                f"stream {part.name!r}: the keyring on this host has no key of the stream; add one (keyringFile)",
            )
        at = part.start
        while at < part.end:
            page = link.result(self._ahead or self._fetch(at))
            if page.uuid != part.log:
                raise SparkError(
                    DATA_LOSS,
                    f"stream {part.name!r}: log {page.uuid} answered, but the query reads log {part.log}",
                )
            if page.end <= at:
                raise SparkError(
                    DATA_LOSS,
                    f"stream {part.name!r} ends at offset {at}, before offset {part.end} of this query: its store may have lost records",
                )
            self._ahead = self._fetch(page.end) if page.end < part.end else None
            opened, at = self._cover(page, at)
            if opened:
                yield opened

    def close(self) -> None:
        """Stop fetching."""
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
                    partition=part.partition,
                    uuid=part.uuid,
                    max_bytes=options.fetch_bytes,
                    timeout=timeout_s,
                ),
                timeout_s,
            )
        )

    def _cover(self, page: StreamPage, at: int) -> tuple[list[Opened], int]:
        """Return the wanted records of a page and their end. Raises SparkError if the page leaves offsets out."""
        from iris.spark.arrow import Opened

        opened: list[Opened] = []
        end = self._part.end
        for item in page:
            if type(item) is StreamRecord and item.offset == at and item.kind != DEAD_KIND:
                count = item.count
                if at + count <= end:  # the usual case, with as few steps as possible
                    opened.append(
                        Opened(
                            item.plain,
                            count,
                            0,
                            count,
                            at,
                            item.kind,
                            item.name,
                            item.sender,
                            item.sequence,
                            item.sent_us,
                            item.tombstone,
                        )
                    )
                    at += count
                    if at == end:
                        break
                    continue
            if at >= end:
                break  # so that records after the range are not opened
            first = item.offset if isinstance(item, StreamRecord) else item.first
            if first > at:
                raise self._lost(f"the store left out offsets {at} to {first}")
            if item.end > at:
                if isinstance(item, StreamRecord):
                    opened.append(self._wanted(item, at, min(item.end, end)))
                elif item.unreadable:
                    self._cannot_read(item)
                elif item.cause not in EXPECTED_HOLES:
                    self._miss(item)
            at = max(at, item.end)
        if at < min(page.end, end):
            raise self._lost(f"the store left out offsets {at} to {page.end}")
        return opened, min(at, end)

    def _wanted(self, record: StreamRecord, at: int, end: int) -> Opened:
        from iris.spark.arrow import Opened

        if record.dead:
            raise SparkError(
                AUTH,
                f"stream {self._part.name!r} holds dead letters, which Spark cannot read; use client.streams.read",
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
                f"stream {self._part.name!r} at offset {gap.first}: {gap.cause}; failOnDataLoss=false skips it",
            )
        log.warning("spark.unreadable", extra={"fields": {"stream": self._part.name, "offset": gap.first, "cause": gap.cause}})  # fmt: skip

    def _miss(self, gap: StreamGap) -> None:
        count = (
            "an unknown number of messages" if gap.count is None else plural(gap.count, "message")
        )
        text = (
            f"offsets {gap.first} to {gap.end} were removed ({gap.cause})"
            if gap.count == 0
            else f"{count} {'is' if gap.count == 1 else 'are'} missing before offset {gap.end}: {gap.cause}"
        )
        if self._options.fail_on_data_loss:
            raise self._lost(f"{text}; failOnDataLoss=false goes on without them")
        log.warning("spark.data_loss", extra={"fields": {"stream": self._part.name, "what": text}})

    def _lost(self, text: str) -> SparkError:
        return SparkError(DATA_LOSS, f"stream {self._part.name!r}: {text}")
