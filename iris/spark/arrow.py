"""Converts between bundles and Arrow rows. The columns of an opened bundle become Arrow arrays without a copy.

Values that are the same for all rows of a bundle are repeated in C. No Python loop runs over rows, except for headers
(each a MessagePack map of its own), for `valueSchema`, and in bundles of a few messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from iris.core.bundle import (
    CUT_BYTES,
    KEYS,
    MESSAGE_BYTES,
    Column,
    Headers,
    decode_headers,
    decode_keyed,
    find_columns,
    join_columns,
    split_single,
)
from iris.core.bundle import HEADERS as HEADERS_FLAG
from iris.core.compression import expanded
from iris.errors import DecodeError
from iris.spark.errors import DECODE_ERRORS, MALFORMED, SparkError
from iris.spark.options import FAILFAST, JSON, SourceOptions
from iris.spark.schema import value_schema
from iris.wire.kinds import Kind

CREATE_TIME: Final = 0
"""Kafka's timestampType for the time of sending, by the sender's clock."""
MAX_US: Final = 253_402_300_799_999_999
"""The end of the year 9999, Spark's latest timestamp, in µs since 1970."""
BATCH_BYTES: Final = 4 << 20
SMALL_COUNT: Final = 32
"""Bundles of up to so many messages are taken apart in Python. For more, an Arrow array over the bundle costs less."""
BATCH_ROWS: Final = 1 << 16
"""Size of a record batch, about: more bundles begin another batch."""
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Opened(Struct, frozen=True, gc=False):
    """An opened record: `plain` is its bundle of `count` messages; `rows` of them after `skip` are wanted."""

    plain: bytes
    count: int
    skip: int
    rows: int
    offset: int
    """Offset of the first wanted message."""
    kind: int
    name: str
    sender: bytes
    sequence: int
    """The sender's sequence number of the first wanted message."""
    sent_us: int
    tombstone: bool


class RowBuilder:
    """Builds record batches with the columns of a source, of rows of one partition."""

    def __init__(
        self, options: SourceOptions, schema: StructType, stream: str, partition: int
    ) -> None:
        self._options = options
        self._stream = stream
        self._partition = partition
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._values = _ValueDecoder(options) if options.value_schema else None

    def batches(self, opened: Sequence[Opened]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the bundles in order, in batches of at most about 4 MiB or 65,536 rows.

        Raises:
            DecodeError: the columns of a bundle are inconsistent.
            SparkError: a value does not fit, in `valueMode=failfast`.
        """
        group: list[Opened] = []
        rows = size = 0
        for one in opened:
            if group and (rows + one.rows > BATCH_ROWS or size + len(one.plain) > BATCH_BYTES):
                yield self._batch(group)
                group, rows, size = [], 0, 0
            group.append(one)
            rows += one.rows
            size += len(one.plain)
        if group:
            yield self._batch(group)

    def _batch(self, group: list[Opened]) -> pa.RecordBatch:
        counts = np.array([one.rows for one in group], dtype=np.int64)
        rows = int(counts.sum())
        found = [*_columns(group)]
        options = self._options
        values = _joined([payload for payload, _, _, _ in found])
        columns: list[Any] = [_null_if_empty(_joined([keys for _, keys, _, _ in found]))]
        if self._values is None:
            columns.append(values)
        else:
            columns += self._values.columns(values)
        headers: list[Headers | None] | None = None
        if any(part is not None for _, _, part, _ in found):
            headers = []
            for _, _, part, count in found:
                headers += part if part is not None else [None] * count
        within = np.arange(rows) - np.repeat(counts.cumsum() - counts, counts)
        offsets = np.repeat([one.offset for one in group], counts) + within
        columns += [
            _repeated([*map(self._topic, group)], counts, pa.string()),
            pa.array(np.full(rows, self._partition, np.int32)),
            pa.array(offsets),
            self._timestamps(group, counts, headers),
            pa.array(np.full(rows, CREATE_TIME, np.int32)),
        ]
        if options.include_headers:
            columns.append(_header_array(headers, rows))
        if options.include_meta:
            clusters = [
                one.name if one.kind in (Kind.PUSH, Kind.BROADCAST) else None for one in group
            ]
            firsts = np.array([one.sequence for one in group], dtype=np.uint64).astype(np.int64)
            sequences = np.repeat(firsts, counts) + within
            columns += [
                _repeated([one.sender for one in group], counts, pa.binary()),
                _repeated(clusters, counts, pa.string()),
                pa.array(sequences),
            ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _topic(self, one: Opened) -> str:
        # The records of the other partitions are sealed under the name of their log.
        return self._stream if self._partition else one.name

    def _timestamps(
        self, group: list[Opened], counts: Any, headers: list[Headers | None] | None
    ) -> pa.Array:
        times = np.repeat(np.array([one.sent_us for one in group], dtype=np.int64), counts)
        name = self._options.timestamp_header
        if name and headers is not None:
            for row, found in enumerate(headers):
                if found and name in found:
                    times[row] = _timestamp_us(name, found[name])
        return pa.array(times).view(pa.timestamp("us", tz="UTC"))


def _columns(
    group: Sequence[Opened],
) -> Iterator[tuple[pa.Array, pa.Array, list[Headers | None] | None, int]]:
    """Yield (payloads, keys, headers, rows) of the wanted messages, in order: large bundles one by one, and those in
    between together, because arrays cost more than a few messages.

    Raises DecodeError.
    """
    small = _Small()
    for one in group:
        if one.count <= SMALL_COUNT:
            small.add(one)
            continue
        if small.payloads:
            yield small.take()
        payloads, keys, headers = bundle_arrays(one)
        yield payloads, keys, headers, one.rows
    if small.payloads:
        yield small.take()


class _Small:
    """Messages of small bundles."""

    def __init__(self) -> None:
        self.payloads: list[bytes | None] = []
        self._keys: list[bytes] = []
        self._headers: list[Headers | None] | None = None

    def add(self, one: Opened) -> None:
        """Add the wanted messages of a bundle. Raises DecodeError."""
        pair = split_single(one.plain)
        if pair is not None and one.count == one.rows == 1:
            payload, key = pair
            self.payloads.append(None if one.tombstone else payload)
            self._keys.append(key)
            if self._headers is not None:
                self._headers.append(None)
            return
        payloads, keys, headers, _ = decode_keyed(one.plain)
        _check_count(one, len(payloads))
        if headers is not None and self._headers is None:
            self._headers = [None] * len(self.payloads)
        wanted = slice(one.skip, one.skip + one.rows)
        self.payloads += [None] * one.rows if one.tombstone else payloads[wanted]
        self._keys += keys[wanted] if keys is not None else [b""] * one.rows
        if self._headers is not None:
            self._headers += headers[wanted] if headers is not None else [None] * one.rows

    def take(self) -> tuple[pa.Array, pa.Array, list[Headers | None] | None, int]:
        """Return what was added, and begin again."""
        payloads, keys, headers = self.payloads, self._keys, self._headers
        self.payloads, self._keys, self._headers = [], [], None
        binary = pa.binary()
        return pa.array(payloads, binary), pa.array(keys, binary), headers, len(payloads)


def _check_count(one: Opened, count: int) -> None:
    if count != one.count:
        raise DecodeError(f"the bundle holds {count} messages, but its record declares {one.count}")


def bundle_arrays(one: Opened) -> tuple[pa.Array, pa.Array, list[Headers | None] | None]:
    """Return (payloads, keys, headers) of the wanted messages; payloads and keys point into the bundle, uncopied.

    The key of a message without one is empty or null.

    Raises:
        DecodeError: the columns are inconsistent.
    """
    plain = expanded(one.plain)
    found = find_columns(plain)
    _check_count(one, found.count)
    buffer = pa.py_buffer(plain)
    payloads = _array(buffer, found.payloads, found.count)
    if one.tombstone:
        payloads = pa.nulls(found.count, pa.binary())
    if found.keys is None:
        keys: pa.Array = pa.nulls(one.rows, pa.binary())
    else:
        keys = _array(buffer, found.keys, found.count).slice(one.skip, one.rows)
    headers = None
    if found.headers is not None:
        headers = decode_headers(plain, found.headers)[one.skip : one.skip + one.rows]
    return payloads.slice(one.skip, one.rows), keys, headers


def _array(buffer: pa.Buffer, column: Column, count: int) -> pa.Array:
    offsets = buffer.slice(column.offsets, column.base - column.offsets)
    values = buffer.slice(column.base, column.end - column.base)
    array = pa.Array.from_buffers(pa.binary(), count, [None, offsets, values], null_count=0)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as err:
        raise DecodeError("the offsets in a bundle do not fit its bytes") from err
    return array


def _null_if_empty(keys: pa.Array) -> pa.Array:
    empty = pc.equal(pc.binary_length(keys), 0)
    return pc.if_else(empty, pa.scalar(None, pa.binary()), keys) if pc.any(empty).as_py() else keys


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _repeated(values: Sequence[Any], counts: Any, kind: pa.DataType) -> pa.Array:
    if len(set(values)) == 1:
        return pa.repeat(pa.scalar(values[0], kind), int(counts.sum()))
    return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(values)), counts)))


def _header_array(headers: list[Headers | None] | None, rows: int) -> pa.Array:
    if headers is None:
        return pa.nulls(rows, _HEADERS)
    return pa.array(
        [
            [{"key": k, "value": v.encode()} for k, v in found.items()] if found else None
            for found in headers
        ],
        _HEADERS,
    )


def _timestamp_us(name: str, text: str) -> int:
    """Return a header's time in µs since 1970. It is ISO 8601 (UTC without an offset) or whole milliseconds."""
    try:
        if text.isascii() and text.lstrip("-").isdecimal():
            time_us = int(text) * 1000
        else:
            found = datetime.fromisoformat(text)
            found = found if found.tzinfo else found.replace(tzinfo=UTC)
            time_us = int(found.timestamp() * 1e6)
        if abs(time_us) > MAX_US:
            raise ValueError("out of range")
        return time_us
    except (ValueError, OverflowError) as err:
        raise SparkError(
            MALFORMED,
            f"header {name!r}: {text[:40]!r} is not a time; send milliseconds since 1970 or ISO 8601",
        ) from err


class _ValueDecoder:
    """Decodes values into the columns of `valueSchema`."""

    def __init__(self, options: SourceOptions) -> None:
        schema = value_schema(options)
        self._failfast = options.value_mode == FAILFAST
        self._types = to_arrow_schema(schema, timezone="UTC")
        json = options.value_format == JSON
        self._decode: Callable[[bytes], Any] = (msgspec.json if json else msgspec.msgpack).decode

    def columns(self, values: pa.Array) -> list[pa.Array]:
        """Return one array per column, and last the values that did not fit the schema."""
        raw = values.to_pylist()
        rows: list[Any] = []
        for value in raw:
            found = None
            if value is not None:
                try:
                    found = self._decode(value)
                except DECODE_ERRORS as err:
                    self._check_mode(str(err))
                if not isinstance(found, dict):
                    self._check_mode("it is not a map")
                    found = None
            rows.append(found)
        try:
            columns = [
                pa.array(
                    [row.get(field.name) if row is not None else None for row in rows], field.type
                )
                for field in self._types
            ]
        except DECODE_ERRORS:
            columns = self._singly(rows)
        corrupt = [value if row is None else None for value, row in zip(raw, rows, strict=True)]
        return [*columns, pa.array(corrupt, pa.binary())]

    def _singly(self, rows: list[Any]) -> list[pa.Array]:
        """Build the columns row by row, setting rows that do not fit the types to None in `rows`."""
        for index, row in enumerate(rows):
            if row is None:
                continue
            try:
                for field in self._types:
                    pa.array([row.get(field.name)], field.type)
            except DECODE_ERRORS as err:
                self._check_mode(str(err))
                rows[index] = None
        return [
            pa.array([row.get(field.name) if row is not None else None for row in rows], field.type)
            for field in self._types
        ]

    def _check_mode(self, reason: str) -> None:
        if self._failfast:
            raise SparkError(
                MALFORMED,
                f"a value does not fit valueSchema: {reason[:200]}; valueMode=permissive keeps such rows",
            )


def encode_bundles(values: pa.Array, keys: pa.Array | None, headers: list[Headers | None] | None) -> Iterator[tuple[bytes, int]]:  # fmt: skip
    """Yield the rows as (bundle, message count), split as `BundleBuilder` does.

    Values and keys are binary arrays without nulls.
    """
    rows = len(values)
    starts, data = _buffers(values)
    weights = starts - starts[0] + MESSAGE_BYTES * np.arange(rows + 1)
    key_starts, key_data = _buffers(keys) if keys is not None else (None, None)
    if key_starts is not None:
        weights = weights + (key_starts - key_starts[0])
    encoded = None
    if headers is not None:
        encoded = [msgspec.msgpack.encode(found) if found else b"" for found in headers]
        weights = weights + np.cumsum([0, *map(len, encoded)])
    flags = (KEYS if keys is not None else 0) | (HEADERS_FLAG if encoded is not None else 0)
    begin = 0
    while begin < rows:
        end = int(np.searchsorted(weights, weights[begin] + CUT_BYTES, side="right")) - 1
        end = max(begin + 1, min(end, rows))
        columns: list[tuple[bytes, Sequence[bytes | memoryview]]] = [
            _column(starts, data, begin, end)
        ]
        if key_starts is not None and key_data is not None:
            columns.append(_column(key_starts, key_data, begin, end))
        if encoded is not None:
            part = encoded[begin:end]
            ends = np.array([0, *accumulate(map(len, part))], dtype="<i4")
            columns.append((ends.tobytes(), part))
        yield join_columns(end - begin, flags, columns), end - begin
        begin = end


def _buffers(array: pa.Array) -> tuple[Any, memoryview]:
    """Return (offsets into the bytes as int64, one more than there are rows; the bytes)."""
    _, offsets, values = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return ends.astype(np.int64), memoryview(values) if values is not None else memoryview(b"")


def _column(starts: Any, data: memoryview, begin: int, end: int) -> tuple[bytes, list[memoryview]]:
    ends = (starts[begin : end + 1] - starts[begin]).astype("<i4")
    return ends.tobytes(), [data[int(starts[begin]) : int(starts[end])]]
