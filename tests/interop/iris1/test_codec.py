"""Frames and names, without a socket: in reads of any size, and with any content."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interop.iris1.binding import blob, hello, number

from iris.wire.names import check_cluster, check_topic, split_site
from relay.bridges.iris1.core import codec
from relay.bridges.iris1.core.decoder import Decoder
from relay.bridges.iris1.core.frames import (
    Broadcast,
    Close,
    Frame,
    Init,
    Oversized,
    Publish,
    Reply,
    Request,
    Subscribe,
    TunAllow,
    TunClose,
    TunConfirm,
    TunInit,
    TunTransfer,
    Unsubscribe,
    Violation,
)  # fmt: skip
from relay.bridges.iris1.core.names import BadName, cluster_name, topic_name

LIMIT = 300
numbers = st.one_of(st.integers(0, 300), st.integers(0, (1 << 64) - 1))
names = st.binary(max_size=20)
payloads = st.binary(max_size=2 * LIMIT)


def kept(data: bytes) -> bytes | Oversized:
    return data if len(data) <= LIMIT else Oversized(len(data), LIMIT)


def frame(*parts: bytes | int) -> bytes:
    """Return an operation, followed by varints for numbers and binaries for bytes."""
    op, *fields = parts
    assert isinstance(op, int)
    said = (blob(field) if isinstance(field, bytes) else number(field) for field in fields)
    return bytes([op]) + b"".join(said)


frames = st.one_of(
    st.builds(lambda c, m: (frame(3, c, m), Broadcast(c, kept(m))), names, payloads),
    st.builds(lambda i, c, m, t: (frame(4, i, c, m, t), Request(i, c, kept(m), t)), numbers, names, payloads, numbers),
    st.builds(lambda i, b, m: (frame(5, i, b, m), Reply(i, bool(b), kept(m))), numbers, st.integers(0, 1), payloads),
    st.builds(lambda t: (frame(6, t), Subscribe(t)), names),
    st.builds(lambda t: (frame(7, t), Unsubscribe(t)), names),
    st.builds(lambda t, m: (frame(8, t, m), Publish(t, kept(m))), names, payloads),
    st.builds(lambda i, c, t: (frame(9, i, c, t), TunInit(i, c, t)), numbers, names, numbers),
    st.builds(lambda b, i: (frame(10, b, i), TunConfirm(b, i)), numbers, numbers),
    st.builds(lambda i, n: (frame(11, i, n), TunAllow(i, n)), numbers, numbers),
    st.builds(lambda i, n, c: (frame(12, i, n, c), TunTransfer(i, n, c)), numbers, numbers, payloads),
    st.builds(lambda i: (frame(13, i), TunClose(i)), numbers),
    st.just((b"\x02", Close())),
)  # fmt: skip


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 50), min_size=1))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    said: list[tuple[bytes, Frame]], sizes: list[int]
) -> None:
    decoder = Decoder(LIMIT)
    stream = hello(b"c") + b"".join(data for data, _ in said)
    got: list[Frame] = []
    turn = 0
    while stream:
        size = sizes[turn % len(sizes)]
        turn += 1
        decoder.feed(stream[:size])
        stream = stream[size:]
        while (found := decoder.next_frame()) is not None:
            got.append(found)
        assert decoder.held_bytes < LIMIT + 70_000
    assert got == [
        Init(b"iris-client-magic", b"v1.0-draft2", b"c"),
        *(wanted for _, wanted in said),
    ]
    assert not decoder.mid_frame


@pytest.mark.parametrize("size", [1 << 20, 1 << 30])
def test_a_message_that_is_announced_and_not_sent_takes_no_memory(size: int) -> None:
    decoder = Decoder(LIMIT)
    decoder.feed(hello() + b"\x08" + blob(b"t") + number(size))
    assert isinstance(decoder.next_frame(), Init)
    for _ in range(100):
        decoder.feed(bytes(10_000))
        assert decoder.next_frame() is None
        assert decoder.held_bytes == 0


@given(st.binary(max_size=300))
def test_any_bytes_are_frames_or_a_violation(data: bytes) -> None:
    decoder = Decoder(LIMIT)
    decoder.feed(data)
    try:
        while decoder.next_frame() is not None:
            continue
    except Violation:
        return


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 65_536, (1 << 64) - 1])
def test_numbers_are_seven_bits_a_byte_the_least_significant_first(value: int) -> None:
    assert codec.varint(value) == number(value)
    assert codec.varint(300) == b"\xac\x02"


def test_what_a_relay_says_is_as_described() -> None:
    magic = blob(b"iris-relay-magic")
    assert codec.init() == b"\x00" + magic + blob(b"v1.0-draft2")
    assert codec.deny("no") == b"\x01" + magic + blob(b"no")
    assert codec.close("") == b"\x02\x00"
    assert codec.broadcast(b"m") == b"\x03\x01m"
    assert codec.request(300, b"m", 1) == b"\x04\xac\x02\x01m\x01"
    assert codec.reply(7, b"", success=True) == b"\x05\x07\x00\x01\x00"
    assert codec.reply(7, b"f", success=False) == b"\x05\x07\x00\x00\x01f"
    assert codec.no_reply(7) == b"\x05\x07\x01"
    assert codec.publish(b"t", b"e") == b"\x08\x01t\x01e"
    assert codec.tun_init(3) == b"\x09\x03\x80\x80\x04"
    assert codec.tun_confirm(3) == b"\x0a\x03\x00\x80\x80\x04"
    assert codec.tun_refuse(3) == b"\x0a\x03\x01"
    assert codec.tun_allow(3, 300) == b"\x0b\x03\xac\x02"
    assert codec.tun_transfer(3, 0, b"c") == b"\x0c\x03\x00\x01c"
    assert codec.tun_close(3, "r") == b"\x0d\x03\x01r"


@pytest.mark.parametrize("name", ["databases", "news.eu.today", "größe", "a-b_c/d", "x" * 255])
def test_a_name_that_is_one_of_ours_stays_as_it_is(name: str) -> None:
    assert cluster_name(name.encode()) == topic_name(name.encode()) == name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("two words", "two%20words"), ("a.*", "a.%2A"), ("100%", "100%25"), (".a..b.", "%2Ea%2E%2Eb%2E"), ("eu:db", "eu%3Adb"), (".", "%2E")],
)  # fmt: skip
def test_what_does_not_fit_is_escaped(theirs: str, ours: str) -> None:
    assert cluster_name(theirs.encode()) == ours


@given(
    st.one_of(st.binary(min_size=1, max_size=60), st.text(".:*>% ab\n", min_size=1).map(str.encode))
)
def test_every_name_becomes_one_of_ours_and_no_two_become_the_same(name: bytes) -> None:
    cluster, topic = check_cluster(cluster_name(name)), check_topic(topic_name(name))
    assert split_site(cluster)[0] == ""
    assert unquote_to_bytes(cluster) == unquote_to_bytes(topic) == name


@pytest.mark.parametrize("name", [b"", b"x" * 256, b" " * 100])
def test_a_name_that_cannot_be_is_refused(name: bytes) -> None:
    with pytest.raises(BadName):
        topic_name(name)
