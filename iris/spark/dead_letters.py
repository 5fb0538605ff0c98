"""Sends rows that do not parse to a topic or stream of dead letters, so that a query goes on with the others.

    good = with_dead_letter(rows, json.loads, schema="id INT, total DOUBLE", topic="unreadable.orders")

It is a step of the query plan: the input is read once, and any sink, output mode and state may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Final

from iris.errors import ConfigError, IrisError
from iris.spark.errors import DECODE_ERRORS, to_spark_error
from iris.spark.options import AT_LEAST_ONCE, SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    Parse = Callable[[Any], Any]

PARSED: Final = "parsed"
REASON: Final = "reason"
"""Header of a dead letter that says why. TOPIC and OFFSET say where the row came from, if the frame has the columns."""
TOPIC: Final = "topic"
OFFSET: Final = "offset"
REASON_CHARACTERS: Final = 200
NULL: Final = "parse returned null"
UNFIT: Final = "the value does not fit valueSchema"
_DEAD_REASON: Final = "_dead"
_CORRUPT_RECORD: Final = "_corrupt_record"


def with_dead_letter(
    df: DataFrame, parse: Parse | None = None, *, topic: str = "", stream: str = "", schema: StructType | str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:  # fmt: skip
    """Return the rows that parse. The other rows are sent unchanged to a topic or stream, with headers that say why.

    `parse` is one of three:

    * With `schema`: a Python function that takes the value (bytes) and returns a dict. It runs in the executors. A
    row is
      dead if the function raises or returns None, or if its result does not fit the schema.
    * Without `schema`: a function from the column `value` to another column. A row is dead if the result is null,
    or is a
      struct whose fields are all null or whose field `_corrupt_record` is not null, as `from_json` returns it.
    * None: `df` comes from a source with `valueSchema`, which has parsed the values. A row is dead if
    `_corrupt_value` is
      not null.

    The result has the columns of `df` and a column `parsed`; in the third case the columns of `df` without
    `_corrupt_value`. A null value is never a dead letter. Set watermarks after this step. `topic` must not be one
    that `df` reads, or dead letters come back as rows.

    Dead letters are sent before the task goes on, **at least once**: a task or batch that runs again sends them
    again, and so does a plan that is executed twice. The headers `topic` and `offset` identify repeats. If a dead
    letter cannot be sent, the task fails. `options` are those of the sink: relay, keyringFile, accessKeyFile,
    fetchTimeoutMs, createStream.

    Raises:
        SparkError: an option is wrong, or `df` lacks a column that is needed.
    """
    from pyspark.sql import functions as F  # noqa: N812  # its usual name
    from pyspark.sql.types import StructField, StructType

    try:
        given = {**(options or {}), **_target(topic, stream), "delivery": AT_LEAST_ONCE}
        sink = SinkOptions.parse(given, streaming=False)
        _check_frame(df.columns, corrupt=parse is None)
    except IrisError as err:
        raise to_spark_error(err) from err
    # Creates the stream if `createStream` is set, so that the tasks find it.
    _writer(sink)
    given = {name: text for name, text in given.items() if name.lower() != "createstream"}
    function: Parse | None = None
    if parse is None:
        from iris.spark.schema import CORRUPT

        body = CORRUPT
        result = StructType([field for field in df.schema.fields if field.name != CORRUPT])
        marked = df.withColumn(_DEAD_REASON, F.when(F.col(CORRUPT).isNotNull(), F.lit(UNFIT)))
    elif schema is not None:
        body = "value"
        kind = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        function = parse
        result = StructType([*df.schema.fields, StructField(PARSED, kind)])
        marked = df
    else:
        body = "value"
        marked = df.withColumn(PARSED, parse(F.col("value")))
        result = StructType(marked.schema.fields)
        failed = F.col("value").isNotNull() & _failed(F.col(PARSED), result[PARSED].dataType)
        marked = marked.withColumn(_DEAD_REASON, F.when(failed, F.lit(NULL)))
    return marked.mapInArrow(_Splitter(given, body, function, result), result)


def _failed(parsed: Column, kind: Any) -> Column:
    from pyspark.sql.types import StructType

    failed = parsed.isNull()
    if isinstance(kind, StructType) and kind.fields:
        names = kind.fieldNames()
        failed = failed | reduce(and_, [parsed[name].isNull() for name in names])
        if _CORRUPT_RECORD in names:
            failed = failed | parsed[_CORRUPT_RECORD].isNotNull()
    return failed


def _target(topic: str, stream: str) -> dict[str, str]:
    if bool(topic) == bool(stream):
        raise ConfigError(
            "dead letters go to a topic or a stream; give exactly one of topic= and stream="
        )
    return {"topic": topic} if topic else {"stream": stream}


def _check_frame(columns: list[str], *, corrupt: bool) -> None:
    from iris.spark.schema import CORRUPT

    if corrupt and CORRUPT not in columns:
        raise ConfigError(
            f"the frame has no column {CORRUPT!r}; read it with the option valueSchema, or pass parse="
        )
    if not corrupt and "value" not in columns:
        raise ConfigError(
            "the frame has no column 'value' to parse; rename or select one as 'value'"
        )
    for name in (_DEAD_REASON, *(() if corrupt else (PARSED,))):
        if name in columns:
            raise ConfigError(f"the frame already has a column {name!r}; rename it")


class _Splitter:
    """Sends the dead letters of a task's batches and passes on the other rows. It is pickled to the executors."""

    def __init__(
        self, sink: dict[str, str], body: str, parse: Parse | None, result: StructType
    ) -> None:
        self._sink = sink
        self._body = body
        self._parse = parse
        self._result = result

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc

        writer: Any = None
        sent = 0
        for batch in batches:
            whole, reasons = self._judge(batch)
            if reasons.null_count < len(reasons):
                if writer is None:
                    writer = _writer(
                        SinkOptions.parse(self._sink | _batch_of_task(), streaming=False)
                    )
                dead = pc.is_valid(reasons)
                letters = _letters(batch.filter(dead), self._body, reasons.filter(dead), sent)
                writer.write(iter([letters]))
                sent += letters.num_rows
                whole = whole.filter(pc.invert(dead))
            yield whole

    def _judge(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
        """Return the result's columns, and for each row the reason that it is dead, or null."""
        import pyarrow as pa

        columns = {name: batch.column(name) for name in batch.schema.names}
        if self._parse is None:
            reasons = columns[_DEAD_REASON]
        else:
            columns[PARSED], reasons = self._run(self._parse, columns[self._body].to_pylist())
        names = self._result.fieldNames()
        return pa.RecordBatch.from_arrays([columns[name] for name in names], names), reasons

    def _run(self, parse: Parse, values: list[Any]) -> tuple[pa.Array, pa.Array]:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        kind = to_arrow_schema(self._result, timezone="UTC").field(PARSED).type
        rows: list[Any] = []
        reasons: list[str | None] = []
        for value in values:
            row, why = None, None
            try:
                row = parse(value) if value is not None else None
                if row is None and value is not None:
                    why = NULL
            except Exception as err:
                # Any error of the user's function makes a dead letter.
                why = f"{type(err).__name__}: {err}"
            rows.append(row)
            reasons.append(why)
        try:
            parsed = pa.array(rows, kind)
        except DECODE_ERRORS:
            for index, row in enumerate(rows):
                try:
                    pa.array([row], kind)
                except DECODE_ERRORS as err:
                    rows[index], reasons[index] = None, f"it does not fit the schema: {err}"
            parsed = pa.array(rows, kind)
        return parsed, pa.array(reasons, pa.string())


def _letters(rows: pa.RecordBatch, body: str, reasons: pa.Array, first: int) -> pa.RecordBatch:
    """Return the rows for the sink, each with headers for the reason and the row number, counted from `first`."""
    import pyarrow as pa

    from iris.spark.sink import ROW_HEADER

    names = set(rows.schema.names)
    headers = []
    topics = rows.column(TOPIC).to_pylist() if TOPIC in names else None
    offsets = rows.column(OFFSET).to_pylist() if OFFSET in names else None
    for index, why in enumerate(reasons.to_pylist()):
        found = {ROW_HEADER: str(first + index), REASON: why[:REASON_CHARACTERS]}
        if topics is not None:
            found[TOPIC] = str(topics[index])
        if offsets is not None:
            found[OFFSET] = str(offsets[index])
        headers.append([{"key": name, "value": text.encode("utf-8", "replace")} for name, text in found.items()])  # fmt: skip
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    columns = {"value": rows.column(body).cast(pa.binary()), "headers": pa.array(headers, kind)}
    return pa.RecordBatch.from_pydict(columns)


def _batch_of_task() -> dict[str, str]:
    """Return options that name the query and batch of this task; empty outside a streaming query."""
    from pyspark import TaskContext

    from iris.spark.sink import BATCH_PROPERTY, QUERY_PROPERTY

    context = TaskContext.get()
    query = context.getLocalProperty(QUERY_PROPERTY) if context is not None else None
    batch = context.getLocalProperty(BATCH_PROPERTY) if context is not None else None
    return {"writerId": query, "batchId": batch} if query and batch is not None else {}


def _writer(sink: SinkOptions) -> Any:
    from pyspark.sql.types import BinaryType, StructField, StructType

    from iris.spark.schema import HEADERS
    from iris.spark.sink import IrisWriter

    columns = StructType([StructField("value", BinaryType()), StructField("headers", HEADERS)])
    return IrisWriter(sink, columns, False)
