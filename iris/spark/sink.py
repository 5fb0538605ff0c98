"""Writers of the format "iris", for `df.write` and `df.writeStream`: rows are appended to a stream, or sent live.

Exactly once: each task stages its rows in the store under (writer, batch, random attempt). The driver's `commit`
names the attempts of the successful tasks, and the store appends their rows in one write and remembers the batch. A
batch that is replayed after a crash is staged and committed again, which changes nothing. In a stream with several
partitions, a commit that a crash interrupted is completed with the attempts that it began with.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    StringType,
    StructType,
)

from iris.client import Client
from iris.core.bundle import Headers, check_headers
from iris.errors import IrisError, NoStream
from iris.logs import logger
from iris.spark.connections import CONNECT_S, connection, wait_for_stream
from iris.spark.errors import CONFIG, SINK, SparkError
from iris.spark.options import APPEND, BROADCAST, PUBLISH, PUSH, SinkOptions
from iris.streams import StagedAttempt, StreamInfo
from iris.streams.partitions import Layout
from iris.wire.names import check_cluster, check_topic

if TYPE_CHECKING:
    import pyarrow as pa

log = logger(__name__)

QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
QUERY_HEADER: Final = "spark-query"
BATCH_HEADER: Final = "spark-batch"
PARTITION_HEADER: Final = "spark-partition"
ROW_HEADER: Final = "spark-row"
FLUSH_ROWS: Final = 4096
"""Appends that are sent at once before their answers are awaited."""
ANY: Final = -1
"""Stands for the partition of rows without a key."""
DISCARD_S: Final = 10.0
"""Seconds to wait for a store when a batch is discarded. If that fails, what was staged expires by itself."""


class IrisCommit(WriterCommitMessage):
    """A task's message to the driver: the attempt that it staged, if any."""

    def __init__(self, writer: str, batch: int, attempt: StagedAttempt | None, rows: int) -> None:
        self.writer = writer
        self.batch = batch
        self.attempt = attempt
        self.rows = rows


class _Sink:
    """The common part of batch and streaming writers."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SparkError(CONFIG, "the iris format cannot overwrite; use mode('append')")
        self._options = options
        self._names = _check_columns(schema, options)

    def _stage(self, batches: Iterator[pa.RecordBatch], writer: str, batch: int) -> IrisCommit:
        options = self._options
        link = connection(options.access)
        timeout_s = options.access.timeout_s
        info = link.call(self._describe(min(CONNECT_S, timeout_s)), writing=True)
        by_record = options.keyed_records
        if by_record is None:
            by_record = "key" in self._names and info.compact

        async def open_staging(client: Client) -> Any:
            return client.streams.stage(
                options.stream, writer=writer, batch=batch, timeout=timeout_s
            )

        staging = link.call(open_staging, writing=True)
        rows = 0
        try:
            layout: Layout = link.call(lambda _: staging.layout(), writing=True)
            for one in batches:
                if by_record:
                    link.call(_add_records(staging, _rows(one, self._names)), writing=True)
                else:
                    for partition, part in _by_partition(one, self._names, layout):
                        bundles = list(_bundles(part, self._names))
                        link.call(_add_bundles(staging, bundles, partition), writing=True)
                rows += one.num_rows
            attempt = link.call(lambda _: staging.finish(), writing=True)
        except Exception:
            # Otherwise these rows would count against the stream's staging limit for a day.
            self._discard(writer, batch, [StagedAttempt(staging.attempt, 1)])
            raise
        return IrisCommit(writer, batch, attempt, rows)

    def _describe(self, patience_s: float) -> Callable[[Client], Coroutine[Any, Any, StreamInfo]]:
        """Find the stream, even while its store restarts. Once it was found, the client waits for it by itself."""
        name, timeout_s = self._options.stream, self._options.access.timeout_s
        return lambda client: wait_for_stream(
            lambda: client.streams.describe(name, timeout=timeout_s), patience_s
        )

    def _send(
        self, batches: Iterator[pa.RecordBatch], writer: str, batch: int, partition: int
    ) -> IrisCommit:
        """Append or send rows singly, each with headers that identify it, because a retried task repeats rows."""
        link = connection(self._options.access)
        rows = 0
        common = {QUERY_HEADER: writer, BATCH_HEADER: str(batch), PARTITION_HEADER: str(partition)}
        for one in batches:
            found = list(_rows(one, self._names))
            link.call(self._send_rows(found, common, rows), writing=True)
            rows += one.num_rows
        return IrisCommit(writer, batch, None, rows)

    def _send_rows(
        self, rows: list[_Row], common: Headers, first: int
    ) -> Callable[[Client], Coroutine[Any, Any, None]]:
        options = self._options
        timeout_s = options.access.timeout_s

        async def append(client: Client) -> None:
            for begin in range(0, len(rows), FLUSH_ROWS):
                appends = []
                for number, row in enumerate(rows[begin : begin + FLUSH_ROWS], first + begin):
                    headers = {**(row.headers or {}), **common, ROW_HEADER: str(number)}
                    appends.append(
                        client.streams.append(
                            options.stream, row.value or b"", headers=headers, key=row.key, tombstone=row.value is None,
                            timeout=timeout_s,
                        )
                    )  # fmt: skip
                for result in await asyncio.gather(*appends, return_exceptions=True):
                    if isinstance(result, BaseException):
                        raise result

        async def send(client: Client) -> None:
            async with client.watch_losses(timeout=timeout_s) as lost:
                for number, row in enumerate(rows, first):
                    headers = {**(row.headers or {}), **common, ROW_HEADER: str(number)}
                    name = row.name or options.name
                    if not name:
                        raise SparkError(
                            CONFIG,
                            f"row {number} has no destination; fill its column, or give the option topic or cluster",
                        )
                    if options.send == PUSH:
                        await client.push(
                            check_cluster(name), row.value, headers=headers, timeout=timeout_s
                        )
                    elif options.send == BROADCAST:
                        await client.broadcast(check_cluster(name), row.value, headers=headers)
                    else:
                        await client.publish(
                            check_topic(name),
                            row.value,
                            headers=headers,
                            when_full=options.when_full,
                        )
                await client.flush(timeout=timeout_s)
            failed = [one for one in lost if one.error is not None]
            if failed:
                raise SparkError(
                    SINK, f"{len(failed)} pushes failed, the first with: {failed[0].error}"
                )
            if any(one.kind == "relay" for one in lost):
                raise SparkError(
                    SINK, "the relay was lost while rows were sent; some may not have arrived"
                )

        return append if options.send == APPEND else send

    def _commit(
        self, messages: Sequence[WriterCommitMessage | None], *, latest: bool = False
    ) -> None:
        """Make a batch visible. With `latest`, a batch below the writer's last one is an error, not a replay."""
        commits = [message for message in messages if isinstance(message, IrisCommit)]
        attempts = [one.attempt for one in commits if one.attempt is not None]
        if not any(one.records or one.parts is not None for one in attempts):
            return  # with several partitions, an earlier run may have left a commit to complete
        attempts = [one for one in attempts if one.records or one.parts is not None]
        writer, batch = commits[0].writer, commits[0].batch
        options = self._options

        async def commit(client: Client) -> Any:
            return await client.streams.commit(
                options.stream, writer=writer, batch=batch, attempts=attempts, timeout=options.access.timeout_s
            )  # fmt: skip

        link = connection(options.access)
        # Tasks have staged in the stream, so it exists; wait for its store.
        link.call(self._describe(options.access.timeout_s), writing=True)
        done = link.call(commit, writing=True)
        if latest and done.replayed and done.first is None:
            raise SparkError(
                SINK, f"writer {writer!r} has already committed later batches than {batch}, so these rows were not written: its checkpoint "
                "is too old. Start the query with a new checkpoint",
            )  # fmt: skip
        if done.replayed:
            log.info("spark.batch_was_there", extra={"fields": {"stream": options.stream, "writer": writer, "batch": batch}})  # fmt: skip

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Discard everything staged for the batch, or, with several partitions, what this run staged."""
        commits = [message for message in messages if isinstance(message, IrisCommit)]
        if not commits or not self._options.exactly_once:
            return
        attempts = [one.attempt for one in commits if one.attempt is not None]
        # A commit, perhaps of an earlier run, may have begun. What it needs is kept.
        several = any(one.parts is not None for one in attempts)
        self._discard(commits[0].writer, commits[0].batch, attempts if several else ())

    def _discard(self, writer: str, batch: int, attempts: Sequence[StagedAttempt]) -> None:
        """Discard attempts at a batch, or all of them if none is given. If that fails they expire in the store."""
        options = self._options
        timeout_s = min(DISCARD_S, options.access.timeout_s)

        async def discard(client: Client) -> None:
            await client.streams.discard(
                options.stream, writer=writer, batch=batch, attempts=attempts, timeout=timeout_s
            )

        try:
            connection(options.access).call(discard, writing=True)
        except SparkError as err:
            log.warning("spark.not_discarded", extra={"fields": {"stream": options.stream, "error": str(err)}})  # fmt: skip


class IrisWriter(_Sink, DataSourceArrowWriter):
    """A batch write: all rows or none into a stream, or each row live at least once."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        # Chosen on the driver, before the writer is pickled to the tasks.
        self._writer = options.writer or f"job-{uuid.uuid4().hex}"
        self._batch = options.batch or 0
        if options.create_stream and options.stream:
            _ensure_stream(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage or send a task's rows. Raises SparkError."""
        if self._options.exactly_once:
            return self._stage(iterator, self._writer, self._batch)
        return self._send(iterator, self._writer, self._batch, _partition())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the rows of all tasks visible at once. Raises SparkError."""
        self._commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Discard the rows of all tasks."""
        self._abort(messages)


class IrisStreamWriter(_Sink, DataSourceStreamArrowWriter):
    """A streaming write, one batch at a time."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if options.create_stream and options.stream and not _in_task():
            _ensure_stream(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage or send a task's rows. Raises SparkError."""
        query, batch = _property(QUERY_PROPERTY), _property(BATCH_PROPERTY)
        writer = query or self._options.writer
        if not writer or batch is None:
            missing = QUERY_PROPERTY if not writer else BATCH_PROPERTY
            raise SparkError(
                CONFIG, f"Spark did not give this task its {missing}; set the option writerId"
                if not writer
                else f"Spark did not give this task its {missing}, which tells a batch from its replay",
            )  # fmt: skip
        if self._options.exactly_once:
            return self._stage(iterator, writer, int(batch))
        return self._send(iterator, writer, int(batch), _partition())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Make a batch visible once, even if Spark commits it again. Raises SparkError."""
        self._commit(messages, latest=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Discard a batch; Spark tries it again."""
        self._abort(messages)


class _Row:
    """One row that is appended or sent singly."""

    __slots__ = ("headers", "key", "name", "value")

    def __init__(
        self, value: bytes | None, key: bytes | None, name: str, headers: Headers | None
    ) -> None:
        self.value = value
        self.key = key
        self.name = name
        self.headers = headers


def _check_columns(schema: StructType, options: SinkOptions) -> frozenset[str]:
    """Return the column names. Raises SparkError if the sink cannot use a column."""
    text = (StringType, BinaryType)
    target = (
        "cluster"
        if options.send in (PUSH, BROADCAST)
        else "topic"
        if options.send == PUBLISH
        else ""
    )
    known = {"value", "headers", target or "key"}
    if not any(field.name == "value" for field in schema.fields):
        raise SparkError(
            CONFIG,
            f"the frame has no column 'value'; rename or select one (columns: {', '.join(schema.fieldNames())})",
        )
    for field in schema.fields:
        if field.name not in known:
            raise SparkError(
                CONFIG, f"sendMode={options.send} does not use column {field.name!r}; select only {', '.join(sorted(known))}"
            )  # fmt: skip
        if field.name in ("value", "key") and not isinstance(field.dataType, text):
            raise SparkError(
                CONFIG,
                f"column {field.name!r} is {field.dataType.simpleString()}, not string or binary; cast it",
            )
        if field.name == target and not isinstance(field.dataType, StringType):
            raise SparkError(
                CONFIG, f"column {target!r} is {field.dataType.simpleString()}, not string; cast it"
            )
        if field.name == "headers" and not _is_headers(field.dataType):
            raise SparkError(
                CONFIG,
                f"column 'headers' is {field.dataType.simpleString()}, not array<struct<key:string,value:binary>>; cast it",
            )
    if options.send != APPEND and not options.name and target not in schema.fieldNames():
        raise SparkError(
            CONFIG,
            f"the rows have no destination; give the option {target}, or a column of that name",
        )
    return frozenset(schema.fieldNames())


def _is_headers(kind: Any) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = kind.elementType.fields
    return [field.name for field in fields] == ["key", "value"] and isinstance(
        fields[0].dataType, StringType
    )


def _binary(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    return array if array.type == pa.binary() else array.cast(pa.binary())


def _headers(array: pa.Array) -> list[Headers | None]:
    found: list[Headers | None] = []
    for row in array.to_pylist():
        try:
            headers = {
                one["key"]: one["value"].decode()
                if isinstance(one["value"], bytes)
                else one["value"] or ""
                for one in row or ()
            }
            found.append(check_headers(headers) if headers else None)
        except (UnicodeDecodeError, IrisError) as err:
            raise SparkError(CONFIG, f"headers: {err}; keys and values must be UTF-8 text") from err
    return found


def _bundles(batch: pa.RecordBatch, names: frozenset[str]) -> Iterator[tuple[bytes, int]]:
    """Yield a record batch as (bundle, message count), without a Python loop over rows except for headers."""
    from iris.spark.arrow import encode_bundles

    values = _binary(batch.column("value"))
    if values.null_count:
        raise SparkError(
            CONFIG,
            "a value is null, which deletes the key of its row; set keyedRecords=true to allow that",
        )
    keys = None
    if "key" in names and (column := batch.column("key")).null_count < len(column):
        keys = _binary(column).fill_null(b"") if column.null_count else _binary(column)
    headers = None
    if "headers" in names and (column := batch.column("headers")).null_count < len(column):
        headers = _headers(column)
    return encode_bundles(values, keys, headers)


def _rows(batch: pa.RecordBatch, names: frozenset[str]) -> Iterator[_Row]:
    columns: dict[str, list[Any]] = {}
    for name in names - {"headers"}:
        column = batch.column(name)
        columns[name] = (_binary(column) if name in ("key", "value") else column).to_pylist()
    if "headers" in names:
        columns["headers"] = _headers(batch.column("headers"))
    nothing: list[Any] = [None] * batch.num_rows
    targets = columns.get("topic") or columns.get("cluster") or nothing
    for value, key, name, headers in zip(
        columns["value"],
        columns.get("key", nothing),
        targets,
        columns.get("headers", nothing),
        strict=True,
    ):
        if value is None and key is None:
            raise SparkError(
                CONFIG,
                "a row has no value and no key; drop such rows (a null value deletes a key, only in a stream)",
            )
        yield _Row(value, key, name or "", headers)


def _by_partition(
    batch: pa.RecordBatch, names: frozenset[str], layout: Layout
) -> Iterator[tuple[int | None, pa.RecordBatch]]:
    """Yield (partition, rows): those with a key by the partition of the key, and with None those that may go to any."""
    if len(layout) == 1 or "key" not in names:
        yield None, batch
        return
    import numpy as np
    import pyarrow as pa

    keys = _binary(batch.column("key")).dictionary_encode()
    # The last one is for rows without a key, which have no index.
    chosen = [layout.of_key(key) if key else ANY for key in keys.dictionary.to_pylist()] + [ANY]
    indices = keys.indices.fill_null(len(chosen) - 1).to_numpy(zero_copy_only=False)
    partitions = np.array(chosen)[indices]
    for partition in np.unique(partitions).tolist():
        rows = batch.take(pa.array(np.flatnonzero(partitions == partition)))
        yield (None if partition == ANY else partition), rows


def _add_bundles(
    staging: Any, bundles: list[tuple[bytes, int]], partition: int | None
) -> Callable[[Client], Coroutine[Any, Any, None]]:
    async def add(_: Client) -> None:
        for plain, count in bundles:
            await staging.add_bundle(plain, count, partition=partition)

    return add


def _add_records(
    staging: Any, rows: Iterator[_Row]
) -> Callable[[Client], Coroutine[Any, Any, None]]:
    async def add(_: Client) -> None:
        for row in rows:
            await staging.append(
                row.value or b"", headers=row.headers, key=row.key, tombstone=row.value is None
            )

    return add


def _ensure_stream(options: SinkOptions) -> None:
    timeout_s = options.access.timeout_s

    async def ensure(client: Client) -> None:
        try:
            await client.streams.describe(options.stream, timeout=timeout_s)
        except NoStream:
            await client.streams.create(options.stream, timeout=timeout_s)

    connection(options.access).call(ensure, writing=True)


def _in_task() -> bool:
    from pyspark import TaskContext

    return TaskContext.get() is not None


def _property(name: str) -> str | None:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.getLocalProperty(name) if context is not None else None


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else os.getpid()
