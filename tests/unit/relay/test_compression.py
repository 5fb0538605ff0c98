"""Runs of frames that cross to another site compressed: what is saved, and how little a peer can make of it."""

from __future__ import annotations

import os
import random
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import END, HOP, KIND_AT, PREFIX, encode_control
from iris.wire.frames import Kind
from relay.compression import (
    FRAME_BYTES,
    LONG_BYTES,
    MAX_RUN_BYTES,
    compressed,
    expanded,
    frames_in,
)

rng = random.Random(7)


def cast(size: int, number: int = 0) -> bytes:
    """Return a publication whose body looks as if it were sealed."""
    end = END.pack(1_700_000_000_000_000 + 40 * number, 0, 1, number)
    return HOP.pack(46 + size, Kind.PUBLISH, 0, 3, 0, 0) + end + rng.randbytes(size)


def packed(run: bytes, **settings: bool) -> bytes:
    frame = zstandard.ZstdCompressor(**settings).compress(run)
    return PREFIX.pack(2 + len(frame), Kind.COMPRESSED, 0) + frame


def received(stream: bytes) -> list[bytes]:
    """Return the frames that a gateway takes from what another one wrote."""
    found: list[bytes] = []
    buf = memoryview(bytearray(stream))
    start = 0
    while start < len(buf):
        end = start + 4 + int.from_bytes(buf[start : start + 4], "little")
        if buf[start + KIND_AT] == Kind.COMPRESSED:
            run = expanded(buf, start, end)
            most = (end - start) // FRAME_BYTES
            found += [bytes(run[begin:stop]) for begin, stop in frames_in(run, most)]
        else:
            found.append(bytes(buf[start:end]))
        start = end
    return found


chunk = st.lists(
    st.one_of(
        st.binary(max_size=300).map(lambda body: PREFIX.pack(2 + len(body), Kind.INTEREST, 0) + body),
        st.integers(0, 2 * LONG_BYTES).map(cast),
        st.just(MAX_RUN_BYTES).map(cast),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(st.lists(chunk, min_size=1, max_size=8))
def test_frames_arrive_in_order_and_whole_and_never_take_more_bytes(
    written: list[list[bytes]],
) -> None:
    chunks = [b"".join(one) for one in written]
    stream = b"".join(compressed(chunks))
    assert received(stream) == [frame for one in written for frame in one]
    assert len(stream) <= sum(map(len, chunks))


def test_heads_of_small_messages_shrink_and_so_does_what_gateways_tell() -> None:
    casts = b"".join(cast(64, number) for number in range(100))
    (one,) = filter(None, compressed([casts]))
    assert len(one) < 0.75 * len(casts)
    topics = [frames.TopicEntry(f"orders.eu.{n}", bytes(16), "", 1) for n in range(500)]
    told = encode_control(frames.Interest(0, 1, [], [], topics, True))
    (one,) = filter(None, compressed([told]))
    assert len(one) < len(told) // 4


def test_what_is_sealed_and_alone_or_long_or_short_is_not_even_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tried() -> None:
        raise AssertionError("compressed for nothing")

    monkeypatch.setattr("relay.compression.codecs", tried)
    for chunks in (
        [cast(1000)],
        [cast(60_000), cast(60_000, 1)],
        [cast(5000) * 3],
        [encode_control(frames.Beat(1, 2, 3, 4))],
        [cast(2 * MAX_RUN_BYTES)],
    ):
        assert [one for one in compressed(chunks) if one] == chunks


def test_a_run_never_grows_past_what_a_peer_takes() -> None:
    chunks = [cast(3000, number) for number in range(500)]
    stream = b"".join(compressed(chunks))
    assert received(stream) == chunks
    zeros = [PREFIX.pack(60_000, Kind.INTEREST, 0) + bytes(59_998)] * 8
    assert b"".join(compressed(zeros)) == b"".join(zeros)  # 32 times longer than it would come as


def test_many_frames_in_little_are_neither_sent_nor_taken() -> None:
    topics = [frames.TopicEntry(f"t.{n}", bytes(16), "", 1) for n in range(99)]
    told = encode_control(frames.Interest(0, 1, [], [], topics, True))
    resync = encode_control(frames.Resync(0))
    few, many = [told] + [resync] * 8, [told] + [resync] * 80
    (one,) = filter(None, compressed(few))
    assert one[KIND_AT] == Kind.COMPRESSED
    assert len(one) >= FRAME_BYTES * len(few)
    assert received(one) == few
    assert b"".join(compressed(many)) == b"".join(many)
    with pytest.raises(PeerProtocolError, match="more frames"):
        received(packed(b"".join(many)))


def test_a_run_may_be_written_to() -> None:
    buf = memoryview(bytearray(packed(cast(100) * 4)))
    run = expanded(buf, 0, len(buf))
    run[6:10] = struct.pack("<I", 9)
    assert [bytes(run[b + 6 : b + 10])[0] for b, _ in frames_in(run)] == [9, 3, 3, 3]


GOOD = cast(100) * 20


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (packed(GOOD)[:-1], "zstd|did not decompress"),
        (packed(GOOD) + b"\0", "unused"),
        (packed(GOOD, write_content_size=False), "compressed from -1"),
        (packed(b""), "compressed from 0"),
        (PREFIX.pack(2, Kind.COMPRESSED, 0), "COMPRESSED frame"),
        (PREFIX.pack(40, Kind.COMPRESSED, 0) + b"no zstd at all".ljust(38), "COMPRESSED frame"),
        (packed(bytes(MAX_RUN_BYTES + 1)), f"compressed from {MAX_RUN_BYTES + 1}"),
        (packed(bytes(100_000)), "compressed from 100000"),
        (packed(os.urandom(MAX_RUN_BYTES + 1)), f"compressed from {MAX_RUN_BYTES + 1}"),
    ],
)
def test_what_does_not_expand_to_what_it_says_or_may_be_is_refused(frame: bytes, why: str) -> None:
    buf = memoryview(bytearray(frame))
    with pytest.raises(PeerProtocolError, match=why):
        expanded(buf, 0, len(buf))


def test_no_more_is_allocated_than_a_run_may_be() -> None:
    """Its own word is checked before anything is expanded: 4 GiB of zeros in 16 bytes, say."""
    bomb = b"\x28\xb5\x2f\xfd\xa0" + (0xFFFFFFFF).to_bytes(4, "little") + b"\x02\0\0\0" + b"\0" * 20
    buf = memoryview(bytearray(PREFIX.pack(2 + len(bomb), Kind.COMPRESSED, 0) + bomb))
    with pytest.raises(PeerProtocolError, match="compressed from 4294967295"):
        expanded(buf, 0, len(buf))


@pytest.mark.parametrize(
    "run",
    [
        cast(100)[:-1],
        cast(100) + b"\0\0\0",
        cast(100) + b"\1\0\0\0\x47\0",
        cast(100) + packed(GOOD),
        b"\xff\xff\xff\xff\x47\0",
    ],
)
def test_a_run_is_whole_frames_and_none_of_them_is_a_run(run: bytes) -> None:
    with pytest.raises(PeerProtocolError, match=r"no frame|in another"):
        list(frames_in(memoryview(bytearray(run))))
