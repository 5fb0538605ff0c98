"""Long frames in pieces: what arrives is what was sent, in the order of each alias, and short ones wait for none."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.errors import PeerProtocolError
from iris.wire import frames
from iris.wire.codec import (
    ALIAS,
    ALIAS_AT,
    BODY_AT,
    END,
    FLAGS_AT,
    HOP,
    KIND_AT,
    decode_control,
    encode_control,
    tunnel_frame,
)
from iris.wire.kinds import FLAG_MORE, FLAG_REFUSED, Kind
from relay.net.fragments import MAX_OPEN, MAX_OPEN_BYTES, PIECE_BYTES, WHOLE_BYTES, Assembly, Lanes

LIMIT = (1 << 20) + 4096
TURN = 2 * PIECE_BYTES


def frame(
    alias: int, body: bytes, *, kind: int = Kind.REQUEST, hop: int = 7, flags: int = 0, first: int = 0
) -> bytes:  # fmt: skip
    end = END.pack(11, 12, 1, first)
    return HOP.pack(22 + len(end) + len(body), kind, flags, alias, hop, 99) + end + body


def declare(
    alias: int, *, kind: int = Kind.REQUEST, name: str = "a", groups: tuple[str, ...] = ()
) -> bytes:
    body = frames.Declare(alias, kind, name, b"k" * 16, b"s" * 16, not groups, list(groups))
    return encode_control(body)


def split(data: bytes) -> list[bytes]:
    """Return the frames in what was written."""
    found = []
    while data:
        length = 4 + int.from_bytes(data[:4], "little")
        found.append(data[:length])
        data = data[length:]
    return found


def drained(lanes: Lanes) -> list[bytes]:
    """Return the frames of all turns until nothing waits."""
    found = []
    while lanes:
        taken = split(b"".join(lanes.take(TURN)))
        assert taken, "a turn sent nothing, and something waits"
        found += taken
    return found


def put_together(pieces: list[bytes], limit: int = LIMIT) -> list[bytes]:
    """Return the frames that a receiver gets."""
    parts = Assembly(limit)
    whole = []
    for piece in pieces:
        view = memoryview(bytearray(b"x" + piece))  # not at the start of its buffer
        got = parts.add(view, 1, 1 + len(piece))
        if got is view:
            whole.append(piece)
        elif got is not None:
            whole.append(bytes(got))
    assert not parts
    assert parts.held_bytes == 0
    return whole


def alias_of(data: bytes) -> int:
    return int(ALIAS.unpack_from(data, ALIAS_AT)[0])


@pytest.mark.parametrize("flags", [0, FLAG_REFUSED | 1 << 4])
def test_a_long_frame_comes_out_as_it_went_in(flags: int) -> None:
    body = bytes(range(256)) * 4000
    lanes = Lanes()
    lanes.put(3, frame(3, body, flags=flags), 1)
    pieces = drained(lanes)
    assert len(pieces) == -(-len(body) // PIECE_BYTES)
    assert [piece[FLAGS_AT] & FLAG_MORE for piece in pieces] == [1] * (len(pieces) - 1) + [0]
    assert all(len(piece) <= BODY_AT + PIECE_BYTES for piece in pieces)
    assert put_together(pieces) == [frame(3, body, flags=flags)]
    assert (lanes.bytes, lanes.messages) == (0, 0)


def test_two_aliases_take_turns_piece_by_piece() -> None:
    lanes = Lanes()
    lanes.put(1, frame(1, bytes(4 * PIECE_BYTES)), 1)
    lanes.put(2, frame(2, bytes(4 * PIECE_BYTES)), 1)
    assert [alias_of(piece) for piece in drained(lanes)] == [1, 2] * 4


def test_a_turn_sends_a_bounded_amount_whatever_waits() -> None:
    lanes = Lanes()
    for alias in range(8):
        lanes.put(alias, frame(alias, bytes(1 << 20)), 1)
    while lanes:
        assert sum(map(len, lanes.take(TURN))) <= TURN + 3 * BODY_AT + PIECE_BYTES


def test_what_follows_a_long_frame_of_its_alias_stays_behind_it() -> None:
    lanes = Lanes()
    lanes.put(1, frame(1, bytes(200_000), first=1), 1)
    assert 1 in lanes
    assert 2 not in lanes
    lanes.put(1, frame(1, b"short", first=2), 1)
    assert lanes.control(declare(1, name="b"))
    lanes.put(1, frame(1, bytes(100_000), first=3), 1)
    assert not lanes.control(declare(2, name="c"))
    assert lanes.messages == 3
    kinds = [piece[KIND_AT] for piece in drained(lanes)]
    assert kinds == [Kind.REQUEST] * 5 + [Kind.DECLARE] + [Kind.REQUEST] * 2


def test_a_gap_stays_behind_the_frames_that_it_comes_after_and_overtakes_others() -> None:
    gap = frames.Gap(Kind.PUBLISH, "a", b"k" * 16, b"s" * 16, 5, 0, "slow receiver")
    lanes = Lanes()
    assert not lanes.control(declare(1, kind=Kind.PUBLISH))
    assert not lanes.control(declare(2, kind=Kind.PUBLISH, name="b"))
    assert not lanes.control(encode_control(gap))  # nothing waits
    lanes.put(2, frame(2, bytes(200_000), kind=Kind.PUBLISH), 1)
    assert not lanes.control(encode_control(gap))  # nothing of its delivery waits
    lanes.put(1, frame(1, bytes(200_000), kind=Kind.PUBLISH), 1)
    assert lanes.control(encode_control(gap))
    sent = [piece for piece in drained(lanes) if piece[KIND_AT] == Kind.GAP or alias_of(piece) == 1]
    assert [piece[KIND_AT] for piece in sent] == [Kind.PUBLISH] * 4 + [Kind.GAP]


def test_a_gap_finds_its_alias_after_the_number_was_taken_for_something_else() -> None:
    lanes = Lanes()
    lanes.control(declare(1, kind=Kind.PUBLISH))
    lanes.control(declare(1, kind=Kind.PUBLISH, name="b"))
    lanes.put(1, frame(1, bytes(200_000), kind=Kind.PUBLISH), 1)
    of_a = frames.Gap(Kind.PUBLISH, "a", b"k" * 16, b"s" * 16, 5, 0, "slow receiver")
    of_b = frames.Gap(Kind.PUBLISH, "b", b"k" * 16, b"s" * 16, 5, 0, "slow receiver")
    assert not lanes.control(encode_control(of_a))
    assert lanes.control(encode_control(of_b))


def test_a_short_cast_stays_behind_a_long_one_of_its_flow_under_another_alias() -> None:
    lanes = Lanes()
    assert not lanes.control(declare(1, kind=Kind.PUBLISH))
    assert not lanes.control(declare(3, kind=Kind.PUBLISH, name="b"))
    lanes.put(1, frame(1, bytes(200_000), kind=Kind.PUBLISH), 1)
    assert 3 not in lanes
    # A group joins: the same topic and sender, for another delivery set.
    assert lanes.control(declare(2, kind=Kind.PUBLISH, groups=("g",)))
    assert 2 in lanes
    lanes.put(2, frame(2, b"short", kind=Kind.PUBLISH), 1)
    sent = drained(lanes)
    assert [piece[KIND_AT] for piece in sent] == [Kind.PUBLISH] * 4 + [Kind.DECLARE, Kind.PUBLISH]
    assert alias_of(sent[-1]) == 2
    assert 2 not in lanes


def test_an_alias_that_is_declared_again_means_its_new_flow_only_after_the_old_is_through() -> None:
    lanes = Lanes()
    assert not lanes.control(declare(1, kind=Kind.PUBLISH))
    lanes.put(1, frame(1, bytes(300_000), kind=Kind.PUBLISH), 1)
    lanes.take(1)
    assert lanes.control(declare(1, kind=Kind.PUBLISH, name="b"))
    lanes.put(1, frame(1, b"short", kind=Kind.PUBLISH), 1)
    assert not lanes.control(declare(2, kind=Kind.PUBLISH, name="c"))
    assert lanes.control(declare(2, kind=Kind.PUBLISH, name="a"))
    lanes.put(2, frame(2, bytes(100_000), kind=Kind.PUBLISH), 1)
    assert lanes.control(declare(2))
    lanes.put(2, frame(2, b"a request"), 1)
    sent = drained(lanes)
    kinds = [(piece[KIND_AT], alias_of(piece)) for piece in sent if piece[KIND_AT] != Kind.DECLARE]
    first, second = kinds.index((Kind.PUBLISH, 2)), kinds.index((Kind.REQUEST, 2))
    assert kinds[:4] == [(Kind.PUBLISH, 1)] * 4
    assert kinds[first : first + 2] == [(Kind.PUBLISH, 2)] * 2
    assert first < second
    assert (lanes.bytes, lanes.messages) == (0, 0)


def test_done_stays_behind_long_answers_and_a_goodbye_behind_everything() -> None:
    lanes = Lanes()
    lanes.put(1, frame(1, bytes(500_000), kind=Kind.REPLY), 1)
    assert not lanes.control(encode_control(frames.Done(4)))
    lanes.put(2, frame(2, bytes(100_000), kind=Kind.ANSWER), 1)
    assert lanes.control(encode_control(frames.Done(4)))
    assert lanes.control(encode_control(frames.Bye()))
    assert not lanes.control(encode_control(frames.Beat(1)))
    kinds = [piece[KIND_AT] for piece in drained(lanes)]
    assert kinds.index(Kind.DONE) > max(i for i, k in enumerate(kinds) if k == Kind.ANSWER)
    assert kinds.index(Kind.DONE) < max(i for i, k in enumerate(kinds) if k == Kind.REPLY)
    assert kinds[-1] == Kind.BYE


def test_the_sender_begins_no_more_than_the_receiver_has_room_for() -> None:
    lanes = Lanes()
    for alias in range(MAX_OPEN + 40):
        lanes.put(alias, frame(alias, bytes(1 << 20)), 1)
    parts = Assembly(LIMIT)
    most = 0
    received = 0
    while lanes:
        for piece in split(b"".join(lanes.take(TURN))):
            received += parts.add(memoryview(bytearray(piece)), 0, len(piece)) is not None
            most = max(most, parts.held_bytes)
    assert received == MAX_OPEN + 40
    assert MAX_OPEN_BYTES // 2 < most <= MAX_OPEN_BYTES


def test_a_frame_larger_than_all_that_is_begun_at_once_goes_alone() -> None:
    size = MAX_OPEN_BYTES + 100_000
    lanes = Lanes()
    lanes.put(1, frame(1, bytes(size)), 1)
    lanes.put(2, frame(2, bytes(100_000)), 1)
    whole = put_together(drained(lanes), size + 4096)
    assert [len(found) - BODY_AT for found in whole] == [size, 100_000]


def test_forgotten_lanes_hold_nothing() -> None:
    lanes = Lanes()
    lanes.put(1, frame(1, bytes(300_000)), 1)
    lanes.take(1)
    lanes.clear()
    assert not lanes
    assert (lanes.bytes, lanes.messages) == (0, 0)
    assert lanes.take(TURN) == []


# -- what a peer may not do ----------------------------------------------------------------------------------


def refused(*pieces: bytes, limit: int = LIMIT) -> str:
    """Return why the last of these is refused; the others have to pass."""
    parts = Assembly(limit)
    for piece in pieces[:-1]:
        parts.add(memoryview(bytearray(piece)), 0, len(piece))
    with pytest.raises(PeerProtocolError) as raised:
        parts.add(memoryview(bytearray(pieces[-1])), 0, len(pieces[-1]))
    return str(raised.value)


def test_pieces_that_break_the_rules_are_refused() -> None:
    begun = frame(1, b"x", flags=FLAG_MORE)
    assert "unfinished" in refused(begun, frame(1, b"x", hop=8))
    assert "unfinished" in refused(begun, frame(1, b"x", kind=Kind.REPLY, flags=FLAG_MORE))
    assert "unfinished" in refused(begun, declare(1))
    assert "is empty" in refused(begun, frame(1, b""))
    assert "not cut" in refused(frame(1, bytes(WHOLE_BYTES)))
    assert "40 bytes" in refused(begun, begun[:40])
    more = bytearray(encode_control(frames.Beat(1)))
    more[FLAGS_AT] = FLAG_MORE
    assert "only data frames are cut" in refused(bytes(more))
    record = bytearray(tunnel_frame(Kind.TUNNEL_DATA, 1, b"x"))
    record[FLAGS_AT] = FLAG_MORE
    assert Assembly(LIMIT).add(memoryview(record), 0, len(record)) == record  # the router's


def test_a_body_in_pieces_has_the_limit_of_a_whole_one() -> None:
    pieces = [frame(1, bytes(PIECE_BYTES), flags=FLAG_MORE)] * 17
    assert f"over {LIMIT} bytes" in refused(*pieces)


def test_unfinished_bodies_are_bounded_in_number_and_in_bytes() -> None:
    begun = [frame(alias, b"x", flags=FLAG_MORE) for alias in range(MAX_OPEN + 1)]
    assert f"more than {MAX_OPEN}" in refused(*begun)
    many = [
        frame(alias, bytes(PIECE_BYTES), flags=FLAG_MORE)
        for _ in range(9)
        for alias in range(MAX_OPEN)
    ]
    assert f"over the limit of {MAX_OPEN_BYTES}" in refused(
        *many[: MAX_OPEN_BYTES // PIECE_BYTES + 1]
    )


def test_others_pass_while_a_body_is_unfinished() -> None:
    parts = Assembly(LIMIT)
    for between in (
        frame(2, b"x"), declare(2), encode_control(frames.Beat(1)), tunnel_frame(Kind.TUNNEL_DATA, 1, b"x"),
    ):  # fmt: skip
        parts.add(memoryview(bytearray(frame(1, b"x", flags=FLAG_MORE))), 0, BODY_AT + 1)
        view = memoryview(bytearray(between))
        assert parts.add(view, 0, len(between)) is view


# -- any order ---------------------------------------------------------------------------------------------------

SENT = st.tuples(
    st.integers(0, 4),
    st.sampled_from([0, 100, PIECE_BYTES, WHOLE_BYTES, WHOLE_BYTES + 1, 200_000, 900_000]),
    st.sampled_from(["frame", "frame", "frame", "declare"]),
    st.integers(0, 2),
)


@given(st.lists(SENT, max_size=40))
def test_whatever_is_sent_arrives_once_whole_and_in_the_order_of_its_alias(
    sent: list[tuple[int, int, str, int]],
) -> None:
    lanes = Lanes()
    written: list[bytes] = []
    expected: dict[int, list[bytes]] = defaultdict(list)
    for number, (alias, size, what, turns) in enumerate(sent):
        if what == "declare":
            data = declare(alias, name=f"n{number}")
            expected[alias].append(data)
            if not lanes.control(data):
                written.append(data)
        else:
            data = frame(alias, number.to_bytes(4, "little") + bytes(size), first=number)
            expected[alias].append(data)
            if len(data) > WHOLE_BYTES or alias in lanes:
                lanes.put(alias, data, 1)
            else:
                written.append(data)
        for _ in range(turns):
            written += split(b"".join(lanes.take(TURN)))
    written += drained(lanes)
    got: dict[int, list[bytes]] = defaultdict(list)
    for whole in put_together(written):
        if whole[KIND_AT] == Kind.DECLARE:
            name = whole.split(b"name")[1]
            alias = next(a for a, list_ in expected.items() for d in list_ if name in d)
        else:
            alias = alias_of(whole)
        got[alias].append(whole)
    assert got == expected
    assert (lanes.bytes, lanes.messages) == (0, 0)


CAST = st.tuples(
    st.integers(0, 2),  # flow
    st.integers(0, 1),  # delivery set
    st.integers(0, 3),  # alias
    st.sampled_from([0, 100, PIECE_BYTES, WHOLE_BYTES, WHOLE_BYTES + 1, 200_000]),
    st.integers(0, 2),  # turns
)


@given(st.lists(CAST, max_size=40))
def test_the_casts_of_a_flow_arrive_in_order_whatever_aliases_they_go_under(
    sent: list[tuple[int, int, int, int, int]],
) -> None:
    """Aliases are given to flow after flow, a flow has several, and one of them is for requests now and then."""
    lanes = Lanes()
    written: list[bytes] = []
    means: dict[int, tuple[int, int]] = {}
    expected: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
    for number, (flow, groups, alias, size, turns) in enumerate(sent):
        kind = Kind.PUBLISH if flow else Kind.REQUEST
        if means.get(alias) != (flow, groups):
            means[alias] = (flow, groups)
            data = declare(alias, kind=kind, name=f"n{flow}", groups=("g",) * groups)
            if not lanes.control(data):
                written.append(data)
        data = frame(alias, bytes(size), kind=kind, first=number)
        # Requests have an order by alias.
        expected[flow or -1 - alias].append((data, groups))
        if len(data) > WHOLE_BYTES or alias in lanes:
            lanes.put(alias, data, 1)
        else:
            written.append(data)
        for _ in range(turns):
            written += split(b"".join(lanes.take(TURN)))
    written += drained(lanes)
    # The receiver knows what each alias means from what came before.
    means.clear()
    got: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
    for whole in put_together(written):
        if whole[KIND_AT] == Kind.DECLARE:
            body = decode_control(memoryview(whole), 0, len(whole))
            assert isinstance(body, frames.Declare)
            means[body.alias] = (int(body.name[1:]), len(body.groups))
        else:
            flow, groups = means[alias_of(whole)]
            got[flow or -1 - alias_of(whole)].append((whole, groups))
    assert got == expected
    assert (lanes.bytes, lanes.messages) == (0, 0)
    assert not lanes._tails
