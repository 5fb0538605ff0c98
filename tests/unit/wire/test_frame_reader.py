"""Frames are found by length alone, however their bytes arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.errors import PeerProtocolError
from iris.wire.codec import PREFIX, FrameReader, ReceiveBuffer

LIMIT = 200_000
SHARED = 16_384


class Sink:
    """A reader, its buffer, and copies of the frames that it found."""

    def __init__(self, *, limit: int = LIMIT, shared: ReceiveBuffer | None = None) -> None:
        self.frames: list[bytes] = []
        self.reader = FrameReader(self.found, shared or ReceiveBuffer(SHARED), limit)

    def found(self, buf: memoryview, start: int, end: int) -> None:
        self.frames.append(bytes(buf[start:end]))
        buf[start:end] = bytes(end - start)  # a frame may be changed in place

    def feed(self, data: bytes, at_most: int = 1 << 30) -> None:
        pos = 0
        while pos < len(data):
            buffer = self.reader.get_buffer()
            size = min(len(buffer), len(data) - pos, at_most)
            assert size > 0
            buffer[:size] = data[pos : pos + size]
            pos += size
            self.reader.received(size)


def frame(kind: int, body: bytes) -> bytes:
    return PREFIX.pack(2 + len(body), kind, 0) + body


FRAMES = st.lists(
    st.builds(
        frame,
        st.integers(0, 255),
        st.one_of(
            st.binary(max_size=80),
            st.integers(0, 40_000).map(lambda size: bytes([size % 251]) * size),
        ),
    ),
    max_size=12,
)


@given(FRAMES, st.lists(st.integers(1, 20_000), min_size=1, max_size=40))
def test_frames_in_any_chunks_are_the_frames_in_one(frames: list[bytes], cuts: list[int]) -> None:
    sink = Sink()
    data = b"".join(frames)
    pos = turn = 0
    while pos < len(data):
        size = cuts[turn % len(cuts)]
        sink.feed(data[pos : pos + size])
        pos += size
        turn += 1
    assert sink.frames == frames
    assert sink.reader.held_bytes == 0


def test_a_frame_that_comes_byte_by_byte_is_whole() -> None:
    sink = Sink()
    frames = [frame(1, b""), frame(2, b"x"), frame(3, b"yy" * 300)]
    sink.feed(b"".join(frames), at_most=1)
    assert sink.frames == frames


@pytest.mark.parametrize(
    "size", [SHARED - 4104, SHARED - 4102, SHARED - 4096, SHARED - 6, SHARED, SHARED + 1, LIMIT - 2]
)
def test_a_frame_longer_than_the_shared_buffer_gets_one_of_its_own(size: int) -> None:
    sink = Sink()
    frames = [frame(1, b"before"), frame(2, b"b" * size), frame(3, b"after")]
    sink.feed(b"".join(frames), at_most=5000)
    assert sink.frames == frames
    assert sink.reader.held_bytes == 0


def test_unfinished_frames_of_two_connections_share_the_buffer_without_mixing() -> None:
    shared = ReceiveBuffer(SHARED)
    left, right = Sink(shared=shared), Sink(shared=shared)
    first, second = frame(1, b"l" * 3000), frame(2, b"r" * 3000)
    for start in range(0, len(first), 700):
        left.feed(first[start : start + 700])
        right.feed(second[start : start + 700])
    assert (left.frames, right.frames) == ([first], [second])


@pytest.mark.parametrize("length", [LIMIT + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_frame_over_the_limit_raises_before_a_byte_of_it_is_kept(length: int) -> None:
    sink = Sink()
    with pytest.raises(PeerProtocolError, match=f"declares {length} bytes; 2 to {LIMIT} are"):
        sink.feed(length.to_bytes(4, "little") + b"\x01\x00")
    assert sink.frames == []


@pytest.mark.parametrize("length", [0, 1])
def test_a_frame_without_kind_and_flags_raises(length: int) -> None:
    with pytest.raises(PeerProtocolError, match=f"a frame declares {length} bytes"):
        Sink().feed(length.to_bytes(4, "little"))


def test_frames_before_a_bad_one_are_handed_on() -> None:
    sink = Sink()
    with pytest.raises(PeerProtocolError):
        sink.feed(frame(1, b"good") + b"\0\0\0\0")
    assert sink.frames == [frame(1, b"good")]


def test_the_limit_may_rise_while_a_batch_is_read() -> None:
    sink = Sink(limit=100)

    def found(buf: memoryview, start: int, end: int) -> None:
        sink.found(buf, start, end)
        sink.reader.limit = LIMIT
        sink.reader.on_frame = sink.found

    sink.reader.on_frame = found
    frames = [frame(1, b"proof"), frame(2, b"b" * 5000)]
    sink.feed(b"".join(frames))
    assert sink.frames == frames


@given(st.binary(max_size=3000))
def test_garbage_is_frames_or_the_peers_error(data: bytes) -> None:
    sink = Sink(limit=1000)
    try:
        sink.feed(data)
    except PeerProtocolError:
        return
    assert len(b"".join(sink.frames)) + sink.reader.held_bytes == len(data)
