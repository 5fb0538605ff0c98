"""A member may answer `describe` with anything: it is read, or named as an error, at a bounded cost."""

from __future__ import annotations

import tracemalloc

import pytest

from iris.describing import read_description
from iris.errors import DecodeError


def test_a_description_over_the_limit_is_not_decoded() -> None:
    """Sixteen million empty lists of one byte each would take 900 MB."""
    count = 1 << 24
    packed = b"\x81\xa1a\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="over the limit of 1048576"):
            read_description(packed)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x05", b"\x80", b"\x81\xa1a" * 2000 + b"\xc0", b"\x81\x80\x01"]
)
def test_an_answer_that_is_not_a_description_is_an_error_with_a_name(packed: bytes) -> None:
    with pytest.raises(DecodeError, match="does not decode as Description"):
        read_description(packed)
