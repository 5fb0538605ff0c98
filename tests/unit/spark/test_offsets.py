"""Offsets: what a checkpoint holds comes back, and ranges are split without a seam."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.spark.errors import SparkError
from iris.spark.offsets import (
    Part,
    Position,
    check_same_log,
    decode_offsets,
    encode_offsets,
    split,
    spread,
)
from iris.spark.reading import EXPECTED_HOLES
from iris.wire.stream_items import HOLES
from relay.store.records import Reason


def test_offsets_are_kafkas_json_and_the_log() -> None:
    offsets = {
        Part("orders", 0): Position("ab" * 16, 23),
        Part("bills", 0): Position("cd" * 16, 0),
        Part("orders", 10): Position("ab" * 16, 7),
    }
    packed = json.dumps(encode_offsets(offsets))
    assert json.loads(packed)["orders"] == {"0": 23, "10": 7, "log": "ab" * 16}
    assert json.loads(packed)["bills"] == {"0": 0, "log": "cd" * 16}
    assert decode_offsets(json.loads(packed)) == offsets


@pytest.mark.parametrize(
    "found",
    [
        None, [], {"a": 1}, {"a": {"0": 1}}, {"a": {"0": -1, "log": ""}}, {"a": {"0": "1", "log": ""}}, {"a": {"1": 1, "log": ""}},
        {"a": {"0": 1, "01": 1, "log": ""}}, {"a": {"0": 1, "256": 1, "log": ""}},
    ],
)  # fmt: skip
def test_a_foreign_checkpoint_is_refused(found: Any) -> None:
    with pytest.raises(SparkError, match=r"^IRIS_CONFIG: the checkpoint"):
        decode_offsets(found)


def test_another_log_of_the_name_is_never_read_under_old_numbers() -> None:
    check_same_log("orders", Position("a", 1), "a")
    with pytest.raises(SparkError, match=r"^IRIS_DATA_LOSS: .*deleted and created again"):
        check_same_log("orders", Position("a", 1), "b")
    superseded = r"^IRIS_DATA_LOSS: .*log a was superseded by log b.*or 7 if they are higher"
    with pytest.raises(SparkError, match=superseded):
        check_same_log("orders", Position("a", 3), "b", "a", 7)
    with pytest.raises(SparkError, match="deleted and created again"):
        check_same_log("orders", Position("c", 3), "b", "a", 7)


@given(st.integers(0, 1000), st.integers(0, 5000), st.integers(0, 40), st.integers(0, 700))
def test_ranges_lie_side_by_side(start: int, length: int, parts: int, most: int) -> None:
    ranges = split(start, start + length, parts, most)
    at = start
    for first, last in ranges:
        assert first == at
        assert first < last
        assert not most or last - first <= most
        at = last
    assert at == start + length
    assert len(ranges) >= min(parts, length)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000), min_size=1), st.integers(0, 2000)
)
def test_a_limit_is_shared_out_whole(wanted: dict[str, int], most: int) -> None:
    taken = spread(wanted, most)
    assert sum(taken.values()) == (
        min(most, sum(wanted.values())) if most else sum(wanted.values())
    )
    assert all(0 <= taken[name] <= wanted[name] for name in wanted)


def test_a_small_stream_is_not_starved_by_a_large_one() -> None:
    assert spread({"large": 10**6, "small": 10}, 100) == {"large": 99, "small": 1}


def test_damage_fails_a_query_as_other_gaps_do() -> None:
    assert HOLES[Reason.DAMAGED] == "damaged"
    assert "damaged" not in EXPECTED_HOLES
