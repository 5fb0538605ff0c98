"""The columns of a source: those of Spark's Kafka source, in the same order, and the ones that options add."""

from __future__ import annotations

import json
import re
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from iris.errors import ConfigError
from iris.spark.options import SourceOptions

HEADERS: Final = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
KAFKA: Final = (
    StructField("key", BinaryType()),
    StructField("value", BinaryType()),
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("timestamp", TimestampType()),
    StructField("timestampType", IntegerType()),
)
CORRUPT: Final = "_corrupt_value"
"""Column that `valueSchema` adds: the bytes of a value that did not fit, else null."""
META: Final = (
    StructField("sender", BinaryType()),
    StructField("cluster", StringType()),
    StructField("sequence", LongType()),
)


def source_schema(options: SourceOptions) -> StructType:
    """Return the columns that a source with these options has. Raises ConfigError."""
    fields = list(KAFKA)
    if options.value_schema:
        values = value_schema(options)
        fields[1:2] = [*values.fields, StructField(CORRUPT, BinaryType())]
    if options.include_headers:
        fields.append(StructField("headers", HEADERS))
    if options.include_meta:
        fields += META
    names = [field.name.lower() for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"valueSchema: the source itself has a column {twice[0]!r}; rename the field"
        )
    return StructType(fields)


def value_schema(options: SourceOptions) -> StructType:
    """Parse the option `valueSchema`, DDL like `a INT, b ARRAY<STRING>` or a StructType's JSON. Raises ConfigError."""
    text = options.value_schema.strip()
    try:
        if text.startswith("{"):
            return StructType.fromJson(json.loads(text))
        return _Ddl(text).schema()
    except (ValueError, KeyError, TypeError, AttributeError, PySparkException) as err:
        raise ConfigError(f"valueSchema: {text[:80]!r}: {str(err)[:200]}") from err


class _Ddl:
    """Parses the DDL of columns. Spark plans sources in Python processes without a JVM, which could parse it."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        if _BLANKS.sub("", "".join(self._tokens)) != _BLANKS.sub("", text):
            raise ValueError("write it as a list like 'a INT, b STRING'")

    def schema(self) -> StructType:
        fields = self._fields("")
        if self._tokens:
            raise ValueError(f"{self._tokens[0]!r} is not expected here")
        return fields

    def _fields(self, end: str) -> StructType:
        fields = []
        while True:
            name = self._next()
            if not _WORD.fullmatch(name):
                raise ValueError(f"{name!r} is not a column name")
            if self._tokens and self._tokens[0] == ":":
                self._next()
            fields.append(StructField(name.strip("`"), self._type()))
            if not self._tokens or self._tokens[0] != ",":
                break
            self._next()
        self._expect(end)
        return StructType(fields)

    def _type(self) -> DataType:
        name = self._next().lower()
        if name == "array":
            self._expect("<")
            made: DataType = ArrayType(self._type())
        elif name == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            made = MapType(key, self._type())
        elif name == "struct":
            self._expect("<")
            return self._fields(">")
        elif name in ("decimal", "dec", "numeric"):
            if not self._tokens or self._tokens[0] != "(":
                return DecimalType(10, 0)
            self._next()
            precision, scale = int(self._next()), 0
            if self._tokens and self._tokens[0] == ",":
                self._next()
                scale = int(self._next())
            self._expect(")")
            return DecimalType(precision, scale)
        elif name in _TYPES:
            return _TYPES[name]()
        else:
            raise ValueError(f"{name!r} is not a type of Spark")
        self._expect(">")
        return made

    def _next(self) -> str:
        if not self._tokens:
            raise ValueError("the schema is not complete")
        token: str = self._tokens.pop(0)
        return token

    def _expect(self, token: str) -> None:
        if token and self._next() != token:
            raise ValueError(f"a {token!r} is missing")


_TYPES: Final[dict[str, type[DataType]]] = {
    "boolean": BooleanType, "byte": ByteType, "tinyint": ByteType, "short": ShortType, "smallint": ShortType, "int": IntegerType,
    "integer": IntegerType, "long": LongType, "bigint": LongType, "float": FloatType, "real": FloatType, "double": DoubleType,
    "string": StringType, "binary": BinaryType, "date": DateType, "timestamp": TimestampType,
}  # fmt: skip
_WORD: Final = re.compile(r"\w+|`[^`]+`")
_TOKEN: Final = re.compile(r"\w+|`[^`]+`|[<>(),:]")
_BLANKS: Final = re.compile(r"\s+")
