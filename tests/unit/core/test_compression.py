"""Bundles compressed before they are sealed."""

from __future__ import annotations

import os
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from iris.core import compression
from iris.core.bundle import decode_bundle, decode_keyed, encode_bundle
from iris.core.compression import COMPRESSED, Compressor, expanded
from iris.errors import DecodeError

compressed = Compressor().compressed


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20), st.booleans())
def test_a_bundle_comes_back_whatever_was_saved(payloads: list[bytes], packed: bool) -> None:
    plain = encode_bundle(payloads, None, packed)
    assert expanded(compressed(plain)) == plain
    assert decode_bundle(compressed(plain)) == (payloads, None, packed)


def test_columns_survive_and_text_shrinks() -> None:
    payloads = [b"a departure from JFK to LAX, number %d" % number for number in range(200)]
    headers = [{"k": "v"} if number % 2 else None for number in range(200)]
    keys = [b"%d" % (number % 7) for number in range(200)]
    plain = encode_bundle(payloads, headers, False, keys)
    small = compressed(plain)
    assert len(small) < len(plain) // 4
    assert small[4] & COMPRESSED
    assert decode_keyed(small) == (payloads, keys, headers, False)


def test_what_saves_nothing_stays_as_it_is() -> None:
    for payload in (b"short", os.urandom(4096)):
        plain = encode_bundle([payload], None, False)
        assert compressed(plain) is plain
        assert expanded(plain) is plain


def _claiming(size: int, frame: bytes) -> bytes:
    return struct.pack("<III", 1, COMPRESSED, size) + frame


def test_a_frame_never_expands_to_more_than_it_says_or_a_message_may_be() -> None:
    body = bytes(1 << 20)
    frame = zstandard.ZstdCompressor().compress(body)
    anonymous = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    for bad in (
        _claiming(len(body) - 1, frame),
        _claiming(len(body) + 1, frame),
        _claiming(len(body), anonymous),
        _claiming(len(body), frame[:-3]),
        _claiming(len(body), b"no zstd at all"),
        _claiming(0, b""),
    ):
        with pytest.raises(DecodeError):
            expanded(bad)


def test_the_longest_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    monkeypatch.setattr(compression, "MAX_EXPANDED_BYTES", (1 << 20) - 1)
    with pytest.raises(DecodeError, match="1048576 bytes"):
        expanded(_claiming(1 << 20, frame))


def test_a_frame_inside_a_frame_is_not_a_bundle() -> None:
    plain = encode_bundle([b"x" * 1000], None, False)
    twice = bytearray(compressed(plain))
    inner = _claiming(len(twice) - 8, zstandard.ZstdCompressor().compress(bytes(twice[8:])))
    inner = inner[:4] + struct.pack("<I", COMPRESSED) + inner[8:]
    with pytest.raises(DecodeError):
        decode_bundle(inner)
