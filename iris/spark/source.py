"""`spark.read` and `spark.readStream` of the format "iris"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from iris.spark.offsets import decode_offsets, encode_offsets
from iris.spark.options import SourceOptions
from iris.spark.planning import Planner
from iris.spark.reading import Range, read_range

if TYPE_CHECKING:
    import pyarrow as pa


class IrisPartition(InputPartition):
    """A range of a stream, for one task."""

    def __init__(self, part: Range | None) -> None:
        super().__init__(part)
        self.part = part


class IrisReader(DataSourceReader):
    """A batch read: all between two places."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return the ranges that tasks read. Raises SparkError."""
        planner = Planner(self._options)
        start = planner.initial()
        end = {
            name: position if position.next >= start[name].next else start[name]
            for name, position in planner.final().items()
        }
        # Without any, Spark makes one of its own, which is none of ours.
        return [IrisPartition(part) for part in planner.ranges(start, end)] or [IrisPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a range's rows. Raises SparkError."""
        return _read(partition, self._options, self._schema)


class IrisStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read with admission control. Offsets and ranges replay after a crash: see `iris.spark.reading`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._planner = Planner(options)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return where a new query begins."""
        return encode_offsets(self._planner.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the narrowest of the limits; `latestOffset` applies all of them, as one object cannot hold them."""
        options = self._options
        if options.max_offsets:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes:
            return ReadMaxBytes(options.max_bytes)
        return ReadMinRows(options.min_offsets) if options.min_offsets else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return where the next trigger ends; `start` if there is nothing to do."""
        return encode_offsets(self._planner.next_end(decode_offsets(start)))

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        """Return where the streams end, for the query's progress."""
        offsets = self._planner.latest()
        return encode_offsets(offsets) if offsets is not None else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Read what is there now, in as many batches as the limits make of it, and end."""
        self._planner.end_at_target()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the ranges of a batch; after a crash the same as before it. Raises SparkError."""
        parts = self._planner.ranges(decode_offsets(start), decode_offsets(end))
        return [IrisPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a range's rows. Raises SparkError."""
        return _read(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: it comes a batch late and never for the last one, so nothing may be removed on its word."""

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read ranges; where the query stands is the driver's.
        return {"_options": self._options, "_schema": self._schema}


def _read(
    partition: InputPartition, options: SourceOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, IrisPartition)
    return read_range(partition.part, options, schema) if partition.part is not None else iter(())
