"""Rows as Arrow: what a bundle holds, where it lies, and back."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.core.bundle import (
    CUT_BYTES,
    BundleBuilder,
    Headers,
    decode_keyed,
    encode_bundle,
    message_bytes,
)
from iris.errors import DecodeError
from iris.spark.arrow import Opened, RowBuilder, bundle_arrays, encode_bundles
from iris.spark.errors import SparkError
from iris.spark.options import SourceOptions
from iris.spark.schema import source_schema
from iris.wire.kinds import Kind

SENDER = bytes(range(16))
SENT_US = 1_700_000_000_000_000


def opened(
    payloads: list[bytes], *, headers: Any = None, keys: Any = None, skip: int = 0, rows: int | None = None, offset: int = 100,
    kind: Kind = Kind.STREAM, name: str = "orders", tombstone: bool = False, packed: bool = False,
) -> Opened:  # fmt: skip
    plain = encode_bundle(payloads, headers, packed, keys)
    count = len(payloads)
    rows = count - skip if rows is None else rows
    return Opened(
        plain, count, skip, rows, offset + skip, kind, name, SENDER, 7 + skip, SENT_US, tombstone
    )


def table(*records: Opened, **options: str) -> list[dict[str, Any]]:
    parsed = SourceOptions.parse({"stream": "orders", **options}, streaming=None)
    builder = RowBuilder(parsed, source_schema(parsed), "orders", 0)
    return [row for batch in builder.batches(records) for row in batch.to_pylist()]


def test_payloads_lie_where_the_bundle_was_opened_to() -> None:
    one = opened([b"first", b"", b"third"], keys=[b"a", b"b", b"c"])
    payloads, keys, _ = bundle_arrays(one)
    whole = pa.py_buffer(one.plain)
    for array in (payloads, keys):
        for buffer in array.buffers()[1:]:
            assert whole.address <= buffer.address
            assert buffer.address + buffer.size <= whole.address + whole.size
    assert payloads.to_pylist() == [b"first", b"", b"third"]
    assert keys.to_pylist() == [b"a", b"b", b"c"]


def test_rows_have_kafkas_columns() -> None:
    (row, _) = table(opened([b"one", b"two"]))
    assert row == {
        "key": None,
        "value": b"one",
        "topic": "orders",
        "partition": 0,
        "offset": 100,
        "timestamp": datetime.fromtimestamp(SENT_US / 1e6, UTC),
        "timestampType": 0,
    }


def test_offsets_and_names_go_on_over_records() -> None:
    rows = table(
        opened([b"a", b"b"], kind=Kind.PUBLISH, name="t.a"),
        opened([b"c"], offset=102, kind=Kind.PUSH, name="work"),
        opened([b"d", b"e", b"f"], offset=103, skip=1, rows=1),
        includeMeta="true",
    )
    assert [(r["value"], r["offset"], r["topic"], r["cluster"], r["sequence"]) for r in rows] == [
        (b"a", 100, "t.a", None, 7),
        (b"b", 101, "t.a", None, 8),
        (b"c", 102, "work", "work", 7),
        (b"e", 104, "orders", None, 8),
    ]
    assert {r["sender"] for r in rows} == {SENDER}


def test_headers_come_with_those_that_have_them() -> None:
    rows = table(
        opened([b"a"]), opened([b"b", b"c"], headers=[{"k": "v"}, None], offset=101), includeHeaders="true"
    )  # fmt: skip
    assert [r["headers"] for r in rows] == [None, [{"key": "k", "value": b"v"}], None]


def test_a_deleted_key_has_no_value_and_an_empty_key_is_none() -> None:
    (gone,) = table(opened([b""], keys=[b"k"], tombstone=True))
    assert (gone["key"], gone["value"]) == (b"k", None)
    assert [r["key"] for r in table(opened([b"a", b"b"], keys=[b"", b"x"]))] == [None, b"x"]


def test_a_header_may_say_when_it_was() -> None:
    headers = [{"at": "1500"}, {"at": "2013-01-01T05:00:00+00:00"}, None]
    rows = table(opened([b"a", b"b", b"c"], headers=headers), timestampHeader="at")
    assert [r["timestamp"] for r in rows] == [
        datetime.fromtimestamp(1.5, UTC),
        datetime(2013, 1, 1, 5, tzinfo=UTC),
        datetime.fromtimestamp(SENT_US / 1e6, UTC),
    ]
    with pytest.raises(SparkError, match="IRIS_MALFORMED"):
        table(opened([b"a"], headers=[{"at": "noon"}]), timestampHeader="at")


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_values_become_columns_and_what_does_not_fit_is_kept(form: str) -> None:
    encode = json.dumps if form == "json" else msgspec.msgpack.encode
    good: Any = encode({"a": 1, "b": ["x"]})
    wrong: Any = encode({"a": "much"})
    good, wrong = (v.encode() if isinstance(v, str) else v for v in (good, wrong))
    payloads = [good, b"\xc1 no", wrong, good]
    rows = table(opened(payloads), valueFormat=form, valueSchema="a INT, b ARRAY<STRING>")
    assert [(r["a"], r["b"], r["_corrupt_value"]) for r in rows] == [
        (1, ["x"], None),
        (None, None, b"\xc1 no"),
        (None, None, wrong),
        (1, ["x"], None),
    ]
    with pytest.raises(SparkError, match="IRIS_MALFORMED"):
        table(opened(payloads), valueFormat=form, valueSchema="a INT", valueMode="failfast")


def test_columns_that_do_not_add_up_are_refused() -> None:
    plain = bytearray(encode_bundle([b"aa", b"bb", b"cc"], None, False))
    plain[12:16] = (5).to_bytes(4, "little")
    plain[16:20] = (3).to_bytes(4, "little")
    bad = Opened(bytes(plain), 3, 0, 3, 0, 0, "s", SENDER, 0, 0, False)
    with pytest.raises(DecodeError, match="offsets"):
        bundle_arrays(bad)
    good = opened([b"a"])
    other = Opened(good.plain, 2, 0, 2, 0, 0, "s", SENDER, 0, 0, False)
    with pytest.raises(DecodeError, match=r"holds 1 messages.*declares 2"):
        bundle_arrays(other)


@given(
    st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=5)), min_size=1, max_size=300),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
def test_bundles_made_from_columns_are_those_of_the_encoder(
    rows: list[tuple[bytes, bytes]], keyed: bool, with_headers: bool, skipped: int
) -> None:
    values = pa.array([b"skipped"] * skipped + [value for value, _ in rows], pa.binary()).slice(
        skipped
    )
    keys = pa.array([key for _, key in rows], pa.binary()) if keyed else None
    headers: list[Headers | None] | None = (
        [{"n": str(n)} if n % 2 else None for n in range(len(rows))] if with_headers else None
    )
    at = 0
    for plain, count in encode_bundles(values, keys, headers):
        payloads, found_keys, found_headers, packed = decode_keyed(plain)
        assert payloads == [value for value, _ in rows[at : at + count]]
        assert found_keys == ([key for _, key in rows[at : at + count]] if keyed else None)
        assert found_headers == (headers[at : at + count] if headers is not None else None)
        assert not packed
        assert plain == encode_bundle(payloads, found_headers, False, found_keys)
        at += count
    assert at == len(rows)


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_cut_where_a_builder_cuts_them(seed: int) -> None:
    rng = random.Random(seed)
    usual = rng.choice((100, 5_000, 30_000))
    values = [bytes(rng.choice((0, rng.randrange(usual), CUT_BYTES - 8))) for _ in range(400)]
    headers: list[Headers | None] = [
        {"h": "x" * 99} if rng.random() < 0.2 else None for _ in values
    ]
    builder, counts = BundleBuilder(), []
    for value, said in zip(values, headers, strict=True):
        size = message_bytes(value, said)
        if not builder.fits(size, False):
            counts.append(len(builder.cut()[0]))
        builder.append(value, said, False, size)
    counts.append(len(builder.cut()[0]))
    cut = encode_bundles(pa.array(values, pa.binary()), None, headers)
    assert [count for _, count in cut] == counts


def test_headers_count_where_bundles_are_cut() -> None:
    values = pa.array([b"tiny"] * 3000, pa.binary())
    headers: list[Headers | None] = [{"name": "x" * 230}] * 3000
    bundles = list(encode_bundles(values, None, headers))
    assert sum(count for _, count in bundles) == 3000
    assert max(len(plain) for plain, _ in bundles) < 100_000


@pytest.mark.parametrize(
    ("form", "value", "ddl"),
    [
        ("json", b"[" * 100_000, "a INT"),
        ("msgpack", msgspec.msgpack.encode({"a": float("nan")}), "a TIMESTAMP"),
        ("json", b'{"a": 1e400}', "a INT"),
        ("json", b'{"a": 123456789012345678901234567890}', "a BIGINT"),
    ],
)
def test_no_value_stops_a_query_that_is_permissive(form: str, value: bytes, ddl: str) -> None:
    (row,) = table(opened([value]), valueFormat=form, valueSchema=ddl)
    assert (row["a"], row["_corrupt_value"]) == (None, value)


@pytest.mark.parametrize("text", ["9" * 20, "-" + "9" * 20, "noon", "١٢٣"])
def test_a_time_that_is_none_is_malformed(text: str) -> None:
    with pytest.raises(SparkError, match="IRIS_MALFORMED"):
        table(opened([b"a"], headers=[{"at": text}]), timestampHeader="at")


def test_rows_of_large_and_small_bundles_stay_in_order() -> None:
    """Small ones are taken apart in Python, and their rows come between those of the large ones."""
    counts = [1, 1, 40, 2, 1, 33, 32, 1]
    records: list[Opened] = []
    expected: list[tuple[Any, Any, int, Any]] = []
    offset = 0
    for number, count in enumerate(counts):
        payloads = [b"%d-%d" % (number, row) for row in range(count)]
        keys = [b"" if row % 3 == 0 else b"k%d" % row for row in range(count)]
        headers = [{"n": str(row)} for row in range(count)] if number in (3, 5) else None
        skip = 1 if count > 2 else 0
        tombstone = number == 7
        records.append(
            opened(payloads, keys=keys if number else None, headers=headers, skip=skip, offset=offset, tombstone=tombstone)
        )  # fmt: skip
        expected += [
            (
                None if tombstone else payloads[row],
                (keys[row] or None) if number else None,
                offset + row,
                headers and [{"key": "n", "value": b"%d" % row}],
            )
            for row in range(skip, count)
        ]
        offset += count
    rows = table(*records, includeHeaders="true")
    assert [(r["value"], r["key"], r["offset"], r["headers"]) for r in rows] == expected


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_record_that_declares_another_count_than_its_bundle_is_refused(count: int) -> None:
    one = opened([b"x"] * count)
    wrong = msgspec.structs.replace(one, count=count + 1, rows=count + 1)
    with pytest.raises(DecodeError, match="its record declares"):
        table(wrong)
