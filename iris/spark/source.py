"""Readers of the format "iris", for `spark.read` and `spark.readStream`."""

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
    """A range of a partition of a stream, for one task."""

    def __init__(self, part: Range | None) -> None:
        super().__init__(part)
        self.part = part


class IrisReader(DataSourceReader):
    """A batch read: everything between two offsets."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return the ranges that tasks read. Raises SparkError."""
        planner = Planner(self._options)
        start = planner.initial()
        end = {
            part: position if position.offset >= start[part].offset else start[part]
            for part, position in planner.final().items()
            if part in start  # another may have been added in between
        }
        # If there were no partitions, Spark would make one that is not an IrisPartition.
        return [IrisPartition(part) for part in planner.ranges(start, end)] or [IrisPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a range's rows. Raises SparkError."""
        return _read(partition, self._options, self._schema)


class IrisStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read with admission control. After a crash, the same offsets give the same ranges again."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._planner = Planner(options)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return where a new query starts."""
        return encode_offsets(self._planner.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the narrowest limit. One object cannot hold all of them; `latestOffset` applies them all."""
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
        """Read what the streams hold now, in as many batches as the limits require, then end."""
        self._planner.end_at_target()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the ranges of a batch, the same again after a crash. Raises SparkError."""
        parts = self._planner.ranges(decode_offsets(start), decode_offsets(end))
        return [IrisPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a range's rows. Raises SparkError."""
        return _read(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark commits one batch late and never the last one, so nothing can be removed here."""

    def __getstate__(self) -> dict[str, Any]:
        # Tasks only read ranges; the planner stays on the driver.
        return {"_options": self._options, "_schema": self._schema}


def _read(
    partition: InputPartition, options: SourceOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, IrisPartition)
    return read_range(partition.part, options, schema) if partition.part is not None else iter(())
