"""Frames to bytes and back, and what of them is authenticated."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.errors import LocalProtocolError, PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import (
    ALIAS,
    ALIAS_AT,
    BODY_AT,
    END,
    END_AT,
    HOP,
    MAX_CONTROL_BYTES,
    PREFIX,
    PREFIX_BYTES,
    REWRITE,
    TUNNEL_BODY_AT,
    answer_suffix,
    decode_control,
    encode_control,
    metadata_prefix,
    tunnel_frame,
)
from iris.wire.frames import Control
from iris.wire.kinds import FIRST_DATA_KIND, Kind
from iris.wire.link_frames import CONTROLS

LAYOUT = struct.Struct("<IBBIQqqIIQ")
"""A data frame up to its body, as the protocol has it, in one piece."""
KEY_ID, SENDER = bytes(range(16)), bytes(range(16, 32))
SERVING = frames.Serving(4, 1 << 20)
INFO = frames.MemberInfo("00.1", [0x40], [KEY_ID], "00", "site", "label")
EXAMPLES: list[Control] = [
    frames.Hello(1, 0, "label", 77),
    frames.Welcome(1, 0, KEY_ID, bytes(8), bytes(32), 1 << 20, "site"),
    frames.Error("what was wrong"),
    frames.Bye("reason"),
    frames.Drain(1000),
    frames.Ack(3, "error", 4),
    frames.Prove(0, bytes(32), bytes(64)),
    frames.Grant(0, b"order", bytes(32), bytes(64), bytes(64)),
    frames.Declare(9, 0x47, "a.b", KEY_ID, SENDER, False, ["g"], 5, 2, "eu"),
    frames.Declare(9, 0x40, "db", KEY_ID, SENDER, member=5, relay=KEY_ID),
    frames.Join(1, "db", [KEY_ID], {0x40: SERVING}),
    frames.Join(1, "db", [KEY_ID], {0x40: SERVING, 0x44: frames.Serving(1, 1, True)}),
    frames.Leave(2, 7),
    frames.Subscribe(3, "a.>", [KEY_ID], "g"),
    frames.Unsubscribe(4, "a.>", "g"),
    frames.Credit(7, 0x43, [3, (1 << 63) + 1]),
    frames.Gap(0x47, "a.b", KEY_ID, SENDER, 1 << 40, 12, "slow receiver", False, ["g"], 3),
    frames.Fail(1 << 63 | 5, 4, "detail", True),
    frames.Roster(5, ["00.1"]),
    frames.Done(5, ["00.1"]),
    frames.Members(6, "db", [KEY_ID], True),
    frames.Membership(6, [INFO], ["00.2"], {"01020304": 3}),
    frames.Membership(6, [frames.MemberInfo("00.1", [0x40], [KEY_ID], "00", "", "", "", 3)]),
    frames.Join(2, "db", [KEY_ID], {0x40: frames.Serving(8, 1024)}, methods=3),
    frames.Unwatch(6),
    frames.Status(8),
    frames.Report(8, "{}"),
    frames.Ping(9),
    frames.Pong(9),
    frames.CallerLeft([1, 2]),
    frames.Share("t", bytes(16), 2),
    frames.Wait(3, 17, True),
    frames.Window(3, 17, 1 << 20),
    frames.Ticket(13, "a.b.c"),
    frames.Release(KEY_ID),
    frames.Direct(1 << 63 | 6),
    frames.Pair(6, KEY_ID),
    frames.Fetch(KEY_ID),
    frames.Carried(1, 1 << 40, 2, 1 << 41),
    frames.Trouble([frames.TroubleEntry("queue full", 3, {"t.>": 2})]),
    frames.Unrouted(int(Kind.BROADCAST), "db", bytes(16), 3, "no members"),
    frames.Settle(10),
    frames.Topic(11, "a.b", KEY_ID, True),
    frames.Unrouted(int(Kind.PUBLISH), "a.b", bytes(16), 3, "other keys", {"01020304": 3}),
    frames.Audience(12, 0, others={"01020304": 3}),
    frames.Audience(11, 3, 40, [frames.SlowEntry("label", 40, 9, 8, "host", 1, "10.0.0.1:7", True)]),
    link_frames.LinkHello(1, 0, KEY_ID, 5, 6, 1 << 20, 9, "site", "host", ["10.0.0.1:7430"]),
    frames.Beat(7, 6, 1, 2),
    frames.Beat(7, 6, 1, 2, 1 << 50),
    link_frames.Interest(
        1, 2, [link_frames.MemberEntry(1, "db", [KEY_ID], {0x40: 4}, "label", "", 3)], [3],
        [link_frames.TopicEntry("a.>", KEY_ID, "g", 2)], True, True,
    ),
    link_frames.Resync(4),
    link_frames.Loads([link_frames.Load(0x40, "db", KEY_ID, 5)]),
    link_frames.AskPeers(),
    link_frames.Peers([link_frames.PeerEntry(KEY_ID, ["10.0.0.1:7430"])]),
]  # fmt: skip


def decode(frame: bytes) -> Control:
    return decode_control(memoryview(frame), 0, len(frame))


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_a_control_frame_decodes_to_what_was_encoded(body: Control) -> None:
    frame = encode_control(body)
    length, kind, flags = PREFIX.unpack_from(frame)
    assert (length, kind, flags) == (len(frame) - 4, body.FRAME, 0)
    assert decode(frame) == body


def test_every_control_kind_has_an_example_here() -> None:
    assert {type(body) for body in EXAMPLES} == set(CONTROLS)
    assert sorted(cls.FRAME for cls in CONTROLS) == [k for k in Kind if k < FIRST_DATA_KIND]


def test_a_control_frame_is_found_inside_a_larger_buffer() -> None:
    frame = encode_control(frames.Ping(7))
    buf = memoryview(b"xx" + frame + b"yy")
    assert decode_control(buf, 2, 2 + len(frame)) == frames.Ping(7)


def test_map_keys_of_a_newer_minor_version_are_ignored() -> None:
    body = msgspec.msgpack.encode({"id": 7, "colour": "green"})
    frame = PREFIX.pack(2 + len(body), Kind.PING, 0) + body
    assert decode(frame) == frames.Ping(7)


@pytest.mark.parametrize("kind", [0x00, 0x3F, 0x50, 0xFF])
def test_an_unknown_kind_names_itself_in_the_error(kind: int) -> None:
    with pytest.raises(PeerProtocolError, match=f"0x{kind:02x}"):
        decode(PREFIX.pack(3, kind, 0) + b"\x80")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.PING, {"id": -1}), (Kind.PING, {}), (Kind.PING, {"id": "7"}), (Kind.PING, [7]),
        (Kind.JOIN, {"id": 1, "name": "", "key_ids": [KEY_ID], "kinds": {}}),
        (Kind.DECLARE, {"alias": 65536, "kind": 71, "name": "a", "key_id": KEY_ID, "sender_id": SENDER}),
        (Kind.DECLARE, {"alias": 1, "kind": 71, "name": "a", "key_id": b"short", "sender_id": SENDER}),
        (Kind.SUBSCRIBE, {"id": 1, "filter": "a", "key_ids": []}),
        (Kind.HELLO, {"version": 1, "minor": 0, "label": "x" * 65}),
    ],
)  # fmt: skip
def test_a_body_that_does_not_fit_its_struct_is_the_peers_error(kind: Kind, body: object) -> None:
    data = msgspec.msgpack.encode(body)
    with pytest.raises(PeerProtocolError, match=kind.name):
        decode(PREFIX.pack(2 + len(data), kind, 0) + data)


@given(st.sampled_from(sorted(cls.FRAME for cls in CONTROLS)), st.binary(max_size=200))
def test_garbage_in_a_control_frame_is_accepted_or_the_peers_error(kind: int, body: bytes) -> None:
    try:
        found = decode(PREFIX.pack(2 + len(body), kind, 0) + body)
    except PeerProtocolError:
        return
    assert kind == found.FRAME


def test_nested_garbage_does_not_exhaust_the_stack() -> None:
    body = b"\x81\xa1x" * 20_000
    with pytest.raises(PeerProtocolError):
        decode(PREFIX.pack(2 + len(body), Kind.PING, 0) + body)


def test_a_control_frame_over_its_limit_is_refused_on_both_sides() -> None:
    long = frames.Subscribe(1, "a", [KEY_ID] * 64, "")
    padded = msgspec.msgpack.encode(
        {"id": 1, "filter": "a", "key_ids": long.key_ids, "x": bytes(MAX_CONTROL_BYTES)}
    )
    with pytest.raises(PeerProtocolError, match="over the limit"):
        decode(PREFIX.pack(2 + len(padded), Kind.SUBSCRIBE, 0) + padded)
    with pytest.raises(LocalProtocolError, match="over the limit"):
        encode_control(frames.Error("x" * (MAX_CONTROL_BYTES + 1)))


def test_the_relays_own_lists_may_be_longer_than_other_control_frames() -> None:
    report = frames.Report(1, "x" * (4 * MAX_CONTROL_BYTES))
    assert decode(encode_control(report)) == report


@given(
    st.integers(0, 0xFFFFFFFF), st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF),
    st.integers(0, (1 << 64) - 1),
)  # fmt: skip
def test_what_a_relay_reads_and_writes_lies_where_the_sender_put_it(
    alias: int, hop: int, deadline: int, sent: int, timeout: int, count: int, first: int
) -> None:
    frame = bytearray(
        HOP.pack(46, Kind.REQUEST, 0, alias, hop, deadline) + END.pack(sent, timeout, count, first)
    )
    assert len(frame) == BODY_AT
    assert LAYOUT.unpack(frame) == (
        46, Kind.REQUEST, 0, alias, hop, deadline, sent, timeout, count, first,
    )  # fmt: skip
    end_fields = bytes(frame[END_AT:])
    REWRITE.pack_into(frame, ALIAS_AT, 5, 6)
    assert HOP.unpack_from(frame) == (46, Kind.REQUEST, 0, 5, 6, deadline)
    ALIAS.pack_into(frame, ALIAS_AT, 7)
    assert HOP.unpack_from(frame)[3] == 7
    assert frame[END_AT:] == end_fields


def test_a_tunnel_frame_has_hop_fields_and_a_body_only() -> None:
    frame = tunnel_frame(Kind.TUNNEL_DATA, 1 << 63 | 9, b"record")
    assert HOP.unpack_from(frame) == (len(frame) - 4, Kind.TUNNEL_DATA, 0, 0, 1 << 63 | 9, 0)
    assert frame[TUNNEL_BODY_AT:] == b"record"
    assert PREFIX_BYTES == 6


def test_metadata_is_fixed_to_the_byte() -> None:
    assert metadata_prefix(0x47, "a.ü", KEY_ID, SENDER) == (
        b"\x01\x47\x04\x00a.\xc3\xbc" + KEY_ID + SENDER
    )
    assert answer_suffix(SENDER, 258) == SENDER + b"\x02\x01\0\0\0\0\0\0"
