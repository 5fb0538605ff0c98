"""Bundles: what is in them comes out; what does not add up raises DecodeError and nothing else."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.core.bundle import (
    MAX_HEADERS_BYTES,
    Headers,
    check_headers,
    decode_bundle,
    decode_keyed,
    decode_single,
    encode_bundle,
    encode_single,
    find_columns,
    split_single,
)
from iris.errors import DecodeError, EncodeError, MessageTooLarge

PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=20)
HEADERS = st.one_of(
    st.none(), st.dictionaries(st.text(max_size=8), st.text(max_size=8), min_size=1, max_size=4)
)


@given(PAYLOADS, st.booleans())
def test_payloads_come_out_as_they_went_in(payloads: list[bytes], packed: bool) -> None:
    assert decode_bundle(encode_bundle(payloads, None, packed)) == (payloads, None, packed)


@given(st.lists(st.tuples(st.binary(max_size=60), HEADERS), min_size=1, max_size=20), st.booleans())
def test_each_message_keeps_its_own_headers(
    messages: list[tuple[bytes, Headers | None]], packed: bool
) -> None:
    payloads, headers = [p for p, _ in messages], [h for _, h in messages]
    assert decode_bundle(encode_bundle(payloads, headers, packed)) == (payloads, headers, packed)


@settings(max_examples=200)
@given(PAYLOADS, st.booleans(), st.booleans(), st.data())
def test_a_damaged_bundle_raises_decode_error_only(
    payloads: list[bytes], with_headers: bool, with_keys: bool, data: st.DataObject
) -> None:
    headers: list[Headers | None] | None = (
        [{"a": "b"} if i % 2 else None for i in range(len(payloads))] if with_headers else None
    )
    keys = [b"%d" % i for i in range(len(payloads))] if with_keys else None
    plain = bytearray(encode_bundle(payloads, headers, False, keys))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(plain) - 1))
        plain[at] = data.draw(st.integers(0, 255))
    damaged = bytes(plain[: data.draw(st.integers(0, len(plain)))])
    damaged += data.draw(st.binary(max_size=9))
    try:
        found, found_headers, _ = decode_bundle(damaged)
    except DecodeError:
        return
    assert found
    assert found_headers is None or len(found_headers) == len(found)
    assert sum(map(len, found)) <= len(damaged)


@given(
    st.lists(
        st.tuples(st.binary(max_size=60), st.binary(max_size=9), HEADERS), min_size=1, max_size=20
    )
)
def test_each_message_keeps_its_own_key(
    messages: list[tuple[bytes, bytes, Headers | None]],
) -> None:
    payloads, keys, headers = (list(column) for column in zip(*messages, strict=True))
    plain = encode_bundle(payloads, headers, True, keys)
    assert decode_keyed(plain) == (payloads, keys, headers, True)
    assert decode_bundle(plain) == (payloads, headers, True)
    plain = encode_bundle(payloads, None, False, keys)
    assert decode_keyed(plain) == (payloads, keys, None, False)


@settings(max_examples=200)
@given(st.binary(max_size=120))
def test_garbage_raises_decode_error_only(plain: bytes) -> None:
    try:
        payloads, _, _ = decode_bundle(plain)
    except DecodeError:
        return
    assert payloads


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        bytes(15),
        struct.pack("<IIii", 0, 0, 0, 0),
        struct.pack("<IIii", 1, 0, 0, 1),
        struct.pack("<IIii", 1, 0, 1, 0),
        struct.pack("<IIii", 1, 0, 0, 0) + b"x",
        struct.pack("<IIiii", 2, 0, 0, 2, 1) + b"xx",
        struct.pack("<IIiii", 2, 0, 0, -1, 0),
        struct.pack("<IIiii", 2, 0, 0, 1, 2) + b"xxx",
        struct.pack("<IIiii", 2, 4, 0, 1, 2) + b"xx",
        struct.pack("<II", 9, 0) + bytes(36),
        struct.pack("<II", 0xFFFFFFFF, 0) + bytes(64),
        struct.pack("<IIii", 1, 1, 0, 0) + struct.pack("<ii", 0, 1) + b"\xc1",
        struct.pack("<IIii", 1, 1, 0, 0) + struct.pack("<ii", 0, 4) + b"\x81\xa1a\x01",
    ],
)
def test_columns_that_do_not_add_up_are_refused(plain: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_bundle(plain)


def test_one_message_costs_sixteen_bytes() -> None:
    assert encode_bundle([b"abc"], None, False) == struct.pack("<IIii", 1, 0, 0, 3) + b"abc"


def test_columns_are_arrow_arrays_as_they_stand() -> None:
    plain = encode_bundle([b"ab", b"", b"cde"], [None, {"k": "v"}, None], True)
    count, flags = struct.unpack_from("<II", plain)
    assert (count, flags) == (3, 3)
    assert array("i", plain[8:24]).tolist() == [0, 2, 2, 5]
    assert plain[24:29] == b"abcde"
    second = 32
    assert plain[29:second] == bytes(3)
    assert array("i", plain[second : second + 16]).tolist() == [0, 0, 5, 5]
    assert plain[second + 16 :] == b"\x81\xa1k\xa1v"


def test_a_bundle_of_empty_messages_keeps_their_number() -> None:
    payloads = [b""] * 8000
    assert decode_bundle(encode_bundle(payloads, None, False))[0] == payloads


@pytest.mark.parametrize("headers", [{"a": 1}, {1: "a"}, {"a": None}, {b"a": "b"}])
def test_headers_are_text(headers: Headers) -> None:
    with pytest.raises(EncodeError, match="str"):
        check_headers(headers)


def test_headers_have_a_bound() -> None:
    assert check_headers({"a": "x" * (MAX_HEADERS_BYTES - 10)})
    with pytest.raises(MessageTooLarge, match="over"):
        check_headers({"a": "x" * MAX_HEADERS_BYTES})


METHOD_NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", fullmatch=True)


@given(st.binary(max_size=60), HEADERS, st.booleans(), st.one_of(st.just(""), METHOD_NAMES))
def test_a_call_keeps_its_method(
    payload: bytes, headers: Headers | None, packed: bool, method: str
) -> None:
    plain = encode_single(payload, headers, packed, method)
    assert decode_single(plain) == (payload, headers, packed, method)


@given(st.binary(max_size=60), HEADERS, METHOD_NAMES)
def test_only_a_receiver_of_single_messages_opens_a_bundle_with_a_method(
    payload: bytes, headers: Headers | None, method: str
) -> None:
    plain = encode_single(payload, headers, False, method)
    for receiver in (decode_bundle, decode_keyed, find_columns):
        with pytest.raises(DecodeError, match="may run a later version"):
            receiver(plain)


@pytest.mark.parametrize("name", [b"", b"a b", b"9", b"a" * 65, b"\xff", b"a\n"])
def test_a_method_outside_the_grammar_is_a_decode_error(name: bytes) -> None:
    plain = encode_single(b"ping", None, False, "x")
    size = len(plain)
    assert plain[-9:] == struct.pack("<ii", 0, 1) + b"x"
    with pytest.raises(DecodeError, match="method of a call cannot be decoded"):
        decode_single(plain[: size - 5] + struct.pack("<i", len(name)) + name)


@settings(max_examples=200)
@given(st.binary(max_size=30), HEADERS, st.data())
def test_a_damaged_call_raises_decode_error_only(
    payload: bytes, headers: Headers | None, data: st.DataObject
) -> None:
    plain = bytearray(encode_single(payload, headers, False, "place"))
    for _ in range(data.draw(st.integers(1, 4))):
        plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(plain[: data.draw(st.integers(0, len(plain)))])
    try:
        found = decode_single(damaged)
    except DecodeError:
        return
    assert len(found[0]) <= len(damaged)


@given(
    st.binary(max_size=20), st.one_of(st.none(), st.binary(max_size=9)), st.booleans(), st.data()
)
def test_one_message_is_taken_apart_quickly_as_it_is_slowly(
    payload: bytes, key: bytes | None, packed: bool, data: st.DataObject
) -> None:
    """What is damaged is left to the slow way, which says what is wrong."""
    plain = encode_bundle([payload], None, packed, None if key is None else [key])
    assert split_single(plain) == (payload, key or b"")
    at = data.draw(st.integers(0, len(plain) - 1))
    harmed = bytearray(plain)
    harmed[at] ^= data.draw(st.integers(1, 255))
    for one in (bytes(harmed), plain[:at], plain + b"\0"):
        pair = split_single(one)
        if pair is not None:
            payloads, keys, headers, _ = decode_keyed(one)
            assert (payloads, keys or [b""], headers) == ([pair[0]], [pair[1]], None)
    assert split_single(encode_bundle([payload, payload], None, packed)) is None
    assert split_single(encode_bundle([payload], [{"a": "b"}], packed)) is None
