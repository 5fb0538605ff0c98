"""The Spark format "iris", for `spark.read`, `readStream`, `write` and `writeStream`.

    import iris.spark

    iris.spark.register(spark)
    rows = spark.readStream.format("iris").option("subscribe", "flights.>").option("groupId", "pipeline").load()

Like every member, the job proves that it holds the key of what it reads. Its executors open the rows with their own
keyring file; `docs/spark.md` says how they get it. It needs the extra [spark].
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from iris.extras import install_line

try:
    from pyspark.sql.datasource import DataSource
except ImportError as err:
    raise ImportError(f"iris.spark needs PySpark 4.2 or newer: {install_line('spark')}") from err

from iris.errors import IrisError
from iris.spark.errors import SparkError, to_spark_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType

    from iris.spark.dead_letters import with_dead_letter
    from iris.spark.listener import IrisLagListener

__all__ = ["IrisLagListener", "IrisSource", "SparkError", "register", "with_dead_letter"]

_LAZY: Final = {"IrisLagListener": "listener", "with_dead_letter": "dead_letters"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"iris.spark.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(spark: SparkSession) -> None:
    """Register the format "iris" with a session. Idempotent.

    Spark warns if a format is replaced, so one that it has found by itself (`pyspark_iris`) is left as it is.
    """
    jvm_session: Any = getattr(spark, "_jsparkSession", None)  # Spark Connect has none
    if jvm_session is not None:
        known = jvm_session.sessionState().dataSourceManager()
        if known.dataSourceExists(IrisSource.name()):
            return
    spark.dataSource.register(IrisSource)


class IrisSource(DataSource):
    """The format "iris"."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format()`."""
        return "iris"

    def schema(self) -> StructType:
        """Return the columns of a read. Raises SparkError."""
        from iris.spark.schema import source_schema

        # Spark does not say here whether it is a batch or a streaming read; the columns are the same.
        try:
            return source_schema(self._source(streaming=None))
        except IrisError as err:
            raise to_spark_error(err) from err

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader. Raises SparkError."""
        from iris.spark.source import IrisReader

        return IrisReader(self._source(streaming=False), self._columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Return a streaming reader. Raises SparkError."""
        from iris.spark.source import IrisStreamReader

        return IrisStreamReader(self._source(streaming=True), self._columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return a batch writer. Raises SparkError."""
        from iris.spark.sink import IrisWriter

        return IrisWriter(self._sink(streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802  # Spark's name
        """Return a streaming writer. Raises SparkError."""
        from iris.spark.sink import IrisStreamWriter

        return IrisStreamWriter(self._sink(streaming=True), schema, overwrite)

    def _source(self, *, streaming: bool | None) -> Any:
        from iris.spark.options import SourceOptions

        try:
            return SourceOptions.parse(self.options, streaming=streaming)
        except IrisError as err:
            raise to_spark_error(err) from err

    def _sink(self, *, streaming: bool) -> Any:
        from iris.spark.options import SinkOptions

        try:
            return SinkOptions.parse(self.options, streaming=streaming)
        except IrisError as err:
            raise to_spark_error(err) from err

    def _columns(self, schema: StructType) -> StructType:
        own = self.schema()
        if [(f.name, f.dataType) for f in schema.fields] != [
            (f.name, f.dataType) for f in own.fields
        ]:
            raise SparkError(
                "IRIS_CONFIG",
                "the iris source defines its own columns; remove .schema(), and set the option valueSchema to decode values",
            )
        return own
