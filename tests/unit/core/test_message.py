"""Payloads: what becomes bytes, and what bytes become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.core.message import Message, decode_payload, encode_payload
from iris.errors import DecodeError
from iris.streams import partition_of
from iris.streams.spreading import offset_in

OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(OBJECTS.filter(lambda value: not isinstance(value, str)))
def test_an_object_comes_back_as_it_was(value: Any) -> None:
    payload, packed = encode_payload(value)
    assert packed
    assert decode_payload(payload, packed, None) == value


@given(st.binary())
def test_bytes_come_back_as_they_were(value: bytes) -> None:
    assert encode_payload(value) == (value, False)
    assert decode_payload(value, False, None) == value
    assert Message(value, "a").value == value


@given(
    st.binary(max_size=60),
    st.booleans(),
    st.sampled_from([None, str, int, list[str], dict[str, int], bool]),
)
def test_any_bytes_decode_as_any_type_or_raise_decode_error(
    payload: bytes, packed: bool, wanted: Any
) -> None:
    try:
        decode_payload(payload, packed, wanted)
    except DecodeError:
        return


def test_nested_bytes_do_not_exhaust_the_stack() -> None:
    with pytest.raises(DecodeError):
        decode_payload(b"\x91" * 100_000, True, None)
    with pytest.raises(DecodeError):
        decode_payload(b"\x91" * 100_000, True, Any)


@pytest.mark.parametrize("value", [object(), {1, object()}, 1 << 70, "\udcff", ["\udcff"]])
def test_what_cannot_travel_raises_decode_error(value: object) -> None:
    with pytest.raises(DecodeError):
        encode_payload(value)


def test_a_type_that_nothing_can_decode_into_raises_decode_error() -> None:
    with pytest.raises(DecodeError):
        decode_payload(b"\x01", True, pytest)


def test_an_offset_of_a_partition_is_sent_as_its_number() -> None:
    offset = offset_in(7, 3)
    assert partition_of(offset) == 3
    assert partition_of(7) == 0
    assert encode_payload([offset]) == encode_payload([7])
