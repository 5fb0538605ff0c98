"""Columns: Kafka's, in its order and of its types, and those that options add."""

from __future__ import annotations

import pytest
from pyspark.sql.types import IntegerType, StringType, StructType

from iris.errors import ConfigError
from iris.spark.options import SourceOptions
from iris.spark.schema import source_schema


def columns(**options: str) -> str:
    found = source_schema(SourceOptions.parse({"stream": "s", **options}, streaming=None))
    return found.simpleString()


KAFKA = "key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int"


def test_columns_are_those_of_the_kafka_source() -> None:
    assert columns() == f"struct<{KAFKA}>"
    assert columns(includeHeaders="true") == (
        f"struct<{KAFKA},headers:array<struct<key:string,value:binary>>>"
    )
    assert columns(includeMeta="true") == (
        f"struct<{KAFKA},sender:binary,cluster:string,sequence:bigint>"
    )


@pytest.mark.parametrize(
    ("ddl", "found"),
    [
        ("a INT, b STRING", "a:int,b:string"),
        ("`the a` bigint,b:double", "the a:bigint,b:double"),
        ("a ARRAY<INT>, b MAP<STRING, DECIMAL(10, 2)>", "a:array<int>,b:map<string,decimal(10,2)>"),
        ("a STRUCT<b: DATE, c: STRUCT<d: TIMESTAMP>>", "a:struct<b:date,c:struct<d:timestamp>>"),
        ("a decimal, b boolean, c binary, d float", "a:decimal(10,0),b:boolean,c:binary,d:float"),
    ],
)
def test_value_schema_is_read_without_a_jvm(ddl: str, found: str) -> None:
    middle = columns(valueFormat="json", valueSchema=ddl)
    assert middle.startswith(f"struct<key:binary,{found},_corrupt_value:binary,topic:string")


def test_value_schema_may_be_the_json_of_a_schema() -> None:
    inner = StructType().add("c", StringType())
    schema = StructType().add("a", IntegerType()).add("b", inner)
    assert "a:int,b:struct<c:string>" in columns(valueFormat="msgpack", valueSchema=schema.json())


@pytest.mark.parametrize(
    "ddl",
    ["a", "a INT,", "a INT b INT", "a NOTHING", "a ARRAY<INT", "1 + 1", "a INT; DROP", "{}", "{"],
)
def test_a_schema_that_cannot_be_read_is_named(ddl: str) -> None:
    with pytest.raises(ConfigError, match="valueSchema"):
        columns(valueFormat="json", valueSchema=ddl)


def test_a_column_of_the_sources_own_cannot_be_shadowed() -> None:
    with pytest.raises(ConfigError, match="'offset'"):
        columns(valueFormat="json", valueSchema="Offset INT")
