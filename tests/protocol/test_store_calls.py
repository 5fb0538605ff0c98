"""A store relies on no relay: a call that no holder of the stream's key authenticated is refused, and changes nothing.

The relay between them sends any frames that a test requires.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from protocol.stores import (
    ATTACKS,
    KEY,
    NAME,
    NOW_US,
    OTHER,
    OTHERS_UUID,
    STORE_KEY,
    UUID,
    Caller,
    Frames,
    Relay,
    Waiter,
    append,
    order,
    raw,
    state,
)
from support.founded import creation, founded

from iris.crypto.channel import LONG_BYTES, MARK, SEALED_BYTES, Offer, accept_offer
from iris.crypto.keys import StoreKey
from iris.errors import ConnectionLost, IrisError, OpenError, PeerProtocolError
from iris.wire import consumers, frames, stream_items, streams
from iris.wire.codec import BODY_AT, END_AT, HOP
from iris.wire.kinds import NO_KEY, Kind
from iris.wire.orders import END, KEEP, Definition, Order, SignedOrder
from iris.wire.streams import Refused, decode_answer, encode
from relay.store import channels

# -- without the key ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_a_call_without_the_key_is_refused_and_changes_nothing_whatever_a_relay_claims(
    relay: Relay, name: str
) -> None:
    before = state(relay.store)
    answer = raw(relay, encode(ATTACKS[name]))
    assert isinstance(answer, Refused)
    assert "open a channel first" in answer.detail
    assert state(relay.store) == before
    assert relay.store.calls.refused == 1


def test_a_party_without_the_key_learns_no_name_of_a_stream(relay: Relay) -> None:
    store = relay.store.address
    old = streams.msgspec.msgpack.encode({"op": "list", "key_ids": [KEY.key_id], "after": ""})
    answer = raw(relay, old, name=store, key_id=NO_KEY)
    assert isinstance(answer, Refused)
    assert "open a channel first" in answer.detail
    # A holder of another key cannot do it through its own channel, either.
    answer = relay.ask(Caller(OTHER), streams.ListStreams(), key=OTHER, name=store, own=True)
    assert isinstance(answer, Refused)
    assert answer.code == "no-stream"
    # The holder of a key sees the streams of that key.
    theirs = OTHERS_UUID
    relay.ask(Caller(), creation(order(OTHER, uuid=theirs, name="other")), key=None, name=store)  # fmt: skip
    for key, uuid in ((KEY, UUID), (OTHER, theirs)):
        listed = relay.ask(Caller(key), streams.ListStreams(), key=key, name=store, own=True)
        assert [found.uuid for found in listed.streams] == [uuid]


def test_a_stream_is_there_under_its_own_keys_alone_and_listed_under_them(relay: Relay) -> None:
    store = relay.store
    theirs = order(OTHER, uuid=founded(OTHER, bytes(range(1, 17))), name="bills")
    made = relay.ask(Caller(OTHER), creation(theirs), key=None, name=store.address)
    assert isinstance(made, streams.Described)
    both = Caller(KEY, OTHER)
    for key, name in ((KEY, "bills"), (OTHER, NAME)):
        answer = relay.ask(both, streams.Describe(), key=key, name=name)
        assert isinstance(answer, Refused)
        assert answer.code == "no-stream"
    for key, name in ((KEY, NAME), (OTHER, "bills")):
        listed = relay.ask(both, streams.ListStreams(), key=key, name=store.address, own=True)
        assert [found.definition.name for found in listed.streams] == [name]


def test_a_channel_to_a_store_lists_and_does_nothing_else(relay: Relay) -> None:
    caller = Caller(KEY)
    before = state(relay.store)
    for call in ATTACKS.values():
        answer = relay.ask(caller, call, name=relay.store.address, own=True)
        assert isinstance(answer, Refused)
    assert isinstance(
        relay.ask(caller, streams.ListStreams()), Refused
    )  # refused in a channel of a stream
    assert state(relay.store) == before


@pytest.mark.parametrize("case", ["own key", "no key's signature", "a signature of another door"])
def test_nobody_opens_a_channel_without_the_key_of_the_stream(relay: Relay, case: str) -> None:
    offer = Offer(OTHER if case == "own key" else KEY, os.urandom)
    door = raw(relay, encode(streams.Knock(offer.nonce)))
    assert isinstance(door, streams.Door)
    signed_for = os.urandom(32) if "door" in case else door.nonce
    share, signature = offer.sign(door.store, door.uuid, signed_for)
    if case == "no key's signature":
        signature = os.urandom(64)
    public = OTHER.public_key if case == "own key" else KEY.public_key
    opens = len(relay.store.calls.channels)
    answer = raw(relay, encode(streams.Open(offer.nonce, door.nonce, public, share, signature)))
    assert isinstance(answer, Refused)
    assert len(relay.store.calls.channels) == opens


def test_a_share_of_low_order_opens_nothing(relay: Relay) -> None:
    said = accept_offer.__globals__["transcript"](
        STORE_KEY.public_key, UUID, KEY.key_id, bytes(32), bytes(32), bytes(32)
    )
    with pytest.raises(OpenError):
        accept_offer(
            STORE_KEY, UUID, 1, nonce=bytes(32), door=bytes(32), public_key=KEY.public_key, share=bytes(32),
            signature=KEY.sign_caller(said), secret=bytes(32),
        )  # fmt: skip


# -- on the way --------------------------------------------------------------------------------------------------


def flipped(at: int) -> Frames:
    """Change one bit of authenticated bodies; calls that open a channel pass unchanged."""

    def change(frame: bytearray) -> list[bytearray]:
        if frame[BODY_AT] == MARK:
            frame[at if at >= 0 else len(frame) + at] ^= 1
        return [frame]

    return change


PARTS = {
    "end fields": END_AT + 8,
    "channel": BODY_AT + 1,
    "counter": BODY_AT + 9,
    "code": BODY_AT + 17,
    "body": BODY_AT + SEALED_BYTES + 3,
    "last byte": -1,
}


@pytest.mark.parametrize("size", [100, LONG_BYTES + 100])
@pytest.mark.parametrize("part", PARTS)
def test_an_altered_call_is_refused_and_not_done(
    relay: Relay, part: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "relay.store.calls")
    before = state(relay.store)
    relay.calls = flipped(PARTS[part])
    answer = relay.ask(Caller(KEY), append(3, size=size), writes=True)
    assert isinstance(answer, ConnectionLost)
    assert answer.may_have_run
    assert state(relay.store) == before
    assert relay.store.calls.refused == 1
    logged = [(each.message, each.levelname) for each in caplog.records]
    assert logged == [("store.call_refused", "WARNING")]


def test_a_call_over_a_channel_of_another_store_is_refused_without_a_warning(
    relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    caller = Caller(KEY)
    relay.ask(caller, streams.Describe())
    caplog.set_level("DEBUG", "relay.store.calls")
    relay.store.calls.channels.clear()  # as if the stream had moved to a store that knows no caller
    assert isinstance(relay.ask(caller, append(3), writes=True), ConnectionLost)
    assert isinstance(relay.ask(caller, append(3), writes=True), streams.Appended)
    logged = [(each.message, each.levelname) for each in caplog.records]
    assert logged == [("store.channel_unknown", "DEBUG")]


@pytest.mark.parametrize("part", PARTS)
def test_an_altered_answer_is_dropped(relay: Relay, part: str) -> None:
    relay.answers = flipped(PARTS[part])
    caller = Caller(KEY)
    answer = relay.ask(caller, append(3), writes=True)
    assert isinstance(answer, ConnectionLost)
    assert answer.may_have_run
    assert caller.session.dropped["unauthenticated"] == 1
    relay.answers = lambda frame: [frame]
    again = relay.ask(caller, append(3), writes=True)
    assert again.outcomes == [streams.Outcome(streams.DUPLICATE, 3)]


def test_a_replayed_call_is_done_once_and_its_answer_cannot_replace_the_first(relay: Relay) -> None:
    relay.calls = lambda frame: [frame, bytearray(frame)] if frame[BODY_AT] == MARK else [frame]
    answers: list[bytes] = []

    def keep(frame: bytearray) -> list[bytearray]:
        answers.append(bytes(frame[BODY_AT:]))
        return [frame]

    relay.answers = keep
    caller = Caller(KEY)
    settle = consumers.Settle("billing", b"w" * 16, failed=[consumers.Range(0, 1)])
    assert relay.ask(caller, settle, writes=True) == streams.Settled(1)
    # The second is refused without a code, because a refusal with one would fit the first call.
    refusals = [decode_answer(body) for body in answers if body[0] != MARK]
    assert [r.code for r in refusals if isinstance(r, Refused)] == ["channel"]
    assert relay.store.calls.refused == 1
    assert caller.session.dropped["late answers"] == 1


def test_calls_that_overtake_each_other_are_each_done(relay: Relay) -> None:
    caller = Caller(KEY)
    assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    waiters = [relay.send(caller, streams.Fetch(n, 1 << 20)) for n in range(3)]
    held: list[bytearray] = []

    def late(frame: bytearray) -> list[bytearray]:
        held.append(frame)
        return held[::-1] if len(held) == 3 else []

    relay.calls = late
    relay.run(caller)
    assert [w.got.items[0].offset for w in waiters] == [0, 1, 2]


def test_an_answer_to_another_call_is_dropped(relay: Relay) -> None:
    caller = Caller(KEY)
    relay.ask(caller, streams.Describe())
    waiters = [relay.send(caller, streams.Fetch(n, 1 << 20)) for n in range(2)]
    held: list[bytearray] = []

    def swap(frame: bytearray) -> list[bytearray]:
        held.append(frame)
        if len(held) < 2:
            return []
        hops = [bytes(one[HOP.size - 16 : HOP.size]) for one in held]
        for one, hop in zip(held, reversed(hops), strict=True):
            one[HOP.size - 16 : HOP.size] = hop
        return held

    relay.answers = swap
    relay.run(caller)
    assert [type(w.got) for w in waiters] == [ConnectionLost, ConnectionLost]


def test_an_answer_that_a_relay_makes_up_for_a_store_is_not_believed(relay: Relay) -> None:
    forged = encode(streams.Appended([streams.Outcome(streams.STORED, 99)]))

    def forge(frame: bytearray) -> list[bytearray]:
        if frame[BODY_AT] != MARK:
            return [frame]
        hop = HOP.unpack_from(frame)
        frame[:] = HOP.pack(46 + len(forged), *hop[1:]) + frame[END_AT:BODY_AT] + forged
        return [frame]

    relay.answers = forge
    answer = relay.ask(Caller(KEY), append(3), writes=True)
    assert isinstance(answer, ConnectionLost)
    assert answer.may_have_run


def test_a_forged_refusal_never_means_that_a_write_was_not_done(relay: Relay) -> None:
    for code in ("channel", "invalid", "no-stream", "paused"):
        forged = encode(Refused(code, "says the relay"))

        def forge(frame: bytearray, forged: bytes = forged) -> list[bytearray]:
            if frame[BODY_AT] == MARK:
                head = HOP.pack(46 + len(forged), *HOP.unpack_from(frame)[1:])
                frame[:] = head + frame[END_AT:BODY_AT] + forged
            return [frame]

        relay.answers = forge
        answer = relay.ask(Caller(KEY), append(0, code.ljust(16).encode()), writes=True)
        assert isinstance(answer, ConnectionLost)
        assert answer.may_have_run
        # A call that changes nothing is repeated once.
        count = len(relay.recorded)
        answer = relay.ask(Caller(KEY), streams.Describe())
        assert isinstance(answer, ConnectionLost)
        assert len(relay.recorded) - count == 6  # twice each: knock, open, describe


# -- who the store is --------------------------------------------------------------------------------------------


def test_a_store_without_the_key_that_the_order_names_is_not_accepted(relay: Relay) -> None:
    liar = StoreKey(bytes(range(3, 35)))
    signed = relay.store.streams[UUID].orders[KEY.key_id][1]
    other = encode(Order(KEEP, UUID, OTHER.key_id, liar.public_key, NOW_US, Definition(NAME)))
    cases: dict[str, tuple[bytes, list[SignedOrder], bytes]] = {
        "its own key, our order": (liar.public_key, [signed], UUID),
        "its own key, an order of its own": (
            liar.public_key, [SignedOrder(other, OTHER.public_key, OTHER.sign_order(other))], UUID
        ),
        "an order of another log": (STORE_KEY.public_key, [order(uuid=b"x" * 16)], UUID),
        "an order that ends it": (STORE_KEY.public_key, [order(action=END)], UUID),
        "another stream": (STORE_KEY.public_key, [order(name="billing")], UUID),
        "no order": (STORE_KEY.public_key, [], UUID),
        "the store itself": (STORE_KEY.public_key, [signed], streams.NO_LOG),
    }  # fmt: skip
    for case, (public, orders, uuid) in cases.items():
        relay.answers = replaced(streams.Door(public, uuid, os.urandom(32), orders))
        count = len(relay.recorded)
        answer = relay.ask(Caller(KEY), append(3), writes=True)
        assert isinstance(answer, Refused), case
        assert "is not signed by a key of this keyring" in answer.detail
        assert len(relay.recorded) == count + 1, case  # only the knock was sent, not the call


def test_a_store_that_shows_the_order_and_lacks_the_store_key_cannot_open_a_channel(
    relay: Relay,
) -> None:
    def forge(frame: bytearray) -> list[bytearray]:
        answer = decode_answer(frame[BODY_AT:])
        if isinstance(answer, streams.Opened):
            body = encode(streams.Opened(answer.channel, os.urandom(32), answer.signature))
            frame[:] = (
                HOP.pack(46 + len(body), *HOP.unpack_from(frame)[1:]) + frame[END_AT:BODY_AT] + body
            )
        return [frame]

    relay.answers = forge
    count = len(relay.recorded)
    answer = relay.ask(Caller(KEY), append(3), writes=True)
    assert isinstance(answer, ConnectionLost)
    assert not answer.may_have_run
    assert len(relay.recorded) == count + 2  # the call was not sent


def replaced(answer: Any) -> Frames:
    """Answer calls instead of the store."""
    body = encode(answer)

    def change(frame: bytearray) -> list[bytearray]:
        frame[:] = (
            HOP.pack(46 + len(body), *HOP.unpack_from(frame)[1:]) + frame[END_AT:BODY_AT] + body
        )
        return [frame]

    return change


# -- replays of a whole conversation -----------------------------------------------------------------------------


def test_a_recorded_conversation_does_nothing_again_here_or_on_another_connection(
    relay: Relay,
) -> None:
    caller = Caller(KEY)
    del relay.recorded[:]
    settle = consumers.Settle("billing", b"w" * 16, failed=[consumers.Range(0, 1)])
    for call in (append(3, streams.NO_PRODUCER), settle, consumers.DeleteConsumer("billing")):
        assert not isinstance(relay.ask(caller, call, writes=True), Refused | IrisError)
    recorded = relay.recorded
    assert isinstance(relay.ask(Caller(KEY), ATTACKS["consume"]), consumers.Delivered)
    before, opened = state(relay.store), len(relay.store.calls.channels)
    for again in (relay, Relay(relay.store)):  # the store attaches to the second one
        for declared, frame in list(recorded[:5]):
            again.hand(declared, frame, Caller())
        relay.store.commit()
        answers = [decode_answer(one[BODY_AT:]) for one in again.received()]
        assert isinstance(answers[0], streams.Door)  # a knock from any sender is answered
        assert [type(one) for one in answers[1:]] == [Refused] * 4
        assert state(relay.store) == before
    assert len(relay.store.calls.channels) == opened


# -- bounds ------------------------------------------------------------------------------------------------------


def test_knocks_of_strangers_leave_nothing_at_the_store(relay: Relay) -> None:
    table = relay.store.calls.channels
    held = (len(table), len(table._spent))
    for _ in range(300):
        assert isinstance(raw(relay, encode(streams.Knock(os.urandom(32)))), streams.Door)
    assert (len(table), len(table._spent)) == held


def test_a_door_closes_after_half_a_minute(relay: Relay) -> None:
    caller = Caller(KEY)
    waiter = relay.send(caller, streams.Describe())
    late = iter([0, channels.DOOR_US + 1])

    def wait(frame: bytearray) -> list[bytearray]:
        relay.store.now_us += next(late, 0)
        return [frame]

    relay.calls = wait
    relay.run(caller)
    assert isinstance(waiter.got, ConnectionLost)
    assert "knock again" in str(waiter.got)
    assert not waiter.got.may_have_run
    relay.store.now_us = NOW_US


def test_in_a_full_table_the_channel_idle_longest_makes_room_and_is_opened_again(
    relay: Relay,
) -> None:
    table = relay.store.calls.channels = channels.Channels(
        STORE_KEY, os.urandom, most=4, most_of_log=3
    )
    callers = [Caller(KEY) for _ in range(4)]
    for caller in callers[:3]:
        relay.ask(caller, streams.Describe())
    relay.ask(callers[0], streams.Describe())  # the second has been idle for the longest time now
    relay.ask(callers[3], streams.Describe())
    assert len(table) == 3
    for caller in (callers[0], callers[2], callers[3]):
        assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    assert relay.store.calls.refused == 0
    # A read is repeated automatically; the outcome of a write is reported to its caller.
    lost = relay.ask(callers[1], append(3), writes=True)
    assert isinstance(lost, ConnectionLost)
    assert isinstance(relay.ask(callers[1], append(3), writes=True), streams.Appended)
    assert isinstance(relay.ask(callers[0], streams.Describe()), streams.Described)
    assert relay.store.calls.refused == 2


def test_a_client_that_uses_too_many_streams_opens_the_first_again(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iris.core.store_calls.MAX_CHANNELS", 2)
    caller = Caller(KEY)
    for name in (NAME, UUID.hex(), NAME, UUID.hex()):
        assert isinstance(relay.ask(caller, streams.Describe(), name=name), streams.Described)
    assert len(relay.store.calls.channels) == 3  # one belongs to the owner
    waiters = [relay.send(caller, append(n), name=name, writes=True) for n, name in ((3, "a"), (4, NAME), (5, "b"))]  # fmt: skip
    relay.run(caller)
    assert [type(w.got) for w in waiters] == [Refused, streams.Appended, Refused]
    assert len(caller.session.store_calls._channels) <= 2


def test_channels_of_one_key_never_end_those_of_another(relay: Relay) -> None:
    table = relay.store.calls.channels = channels.Channels(
        STORE_KEY, os.urandom, most=4, most_of_log=3
    )
    relay.ask(Caller(KEY), creation(order(OTHER, uuid=OTHERS_UUID, name="other")), key=None, name=relay.store.address)  # fmt: skip
    quiet = Caller(OTHER)
    assert isinstance(relay.ask(quiet, streams.Describe(), key=OTHER, name="other"), streams.Described)  # fmt: skip
    for _ in range(10):
        relay.ask(Caller(KEY), streams.Describe())
    assert len(table) == 4
    assert isinstance(relay.ask(quiet, streams.Describe(), key=OTHER, name="other"), streams.Described)  # fmt: skip
    assert relay.store.calls.refused == 0


def test_calls_that_wait_for_a_channel_leave_in_order_and_not_if_they_were_given_up(relay: Relay) -> None:  # fmt: skip
    caller = Caller(KEY)
    waiters = [relay.send(caller, append(n), writes=True) for n in range(3, 6)]
    given_up = caller.session.store_calls.send(NAME, KEY, encode(append(9)), timeout_ms=5000, waiter=Waiter(), writes=True)  # fmt: skip
    caller.session.store_calls.forget(given_up)
    relay.run(caller)
    assert [w.got.outcomes[0].value for w in waiters] == [3, 4, 5]
    assert caller.session.store_calls.writes == 0


def test_calls_that_wait_when_their_session_ends_are_reported_as_not_run(
    relay: Relay,
) -> None:
    caller = Caller(KEY)
    sent, unsent = Waiter(), Waiter()
    relay.ask(caller, streams.Describe())
    sent = relay.send(caller, append(3), writes=True)
    unsent = relay.send(caller, append(3), name=f"{NAME}.dead", writes=True)
    caller.session.end("gone")
    assert isinstance(sent.got, ConnectionLost)
    assert sent.got.may_have_run
    assert isinstance(unsent.got, ConnectionLost)
    assert not unsent.got.may_have_run
    assert caller.session.store_calls.writes == 0


def test_dead_letters_are_read_by_a_channel_under_the_order_of_their_stream(relay: Relay) -> None:
    caller = Caller(KEY)
    last = consumers.Consume("strict", b"w" * 16, 1 << 20, 1, max_deliver=1)
    assert isinstance(relay.ask(caller, last), consumers.Delivered)
    assert isinstance(
        relay.ask(caller, consumers.Settle("strict", b"w" * 16, failed=[consumers.Range(0, 1)])),
        streams.Settled,
    )
    relay.ask(caller, last)
    found = relay.ask(caller, streams.Describe(), name=f"{NAME}.dead")
    assert isinstance(found, streams.Described)
    assert found.uuid == stream_items.dead_uuid(UUID)


def test_garbage_behind_the_mark_is_refused(relay: Relay) -> None:
    for body in (b"\xc1", b"\xc1" + bytes(16), b"\xc1" + bytes(48), b"\xc1" + os.urandom(500)):
        answer = raw(relay, body)
        assert isinstance(answer, Refused)
        assert answer.code == "channel"


def test_an_unknown_call_through_a_channel_is_refused_with_a_code(relay: Relay) -> None:
    caller, waiter = Caller(KEY), Waiter()
    caller.session.store_calls.send(NAME, KEY, b"\x80", timeout_ms=5000, waiter=waiter)
    relay.run(caller)
    assert isinstance(waiter.got, Refused)
    assert waiter.got.code == "invalid"


def test_a_channel_to_one_log_is_refused_at_another_log_of_the_same_key(relay: Relay) -> None:
    relay.ask(Caller(KEY), creation(order(uuid=founded(KEY, b"o" * 16), name="other")), key=None, name=relay.store.address)  # fmt: skip
    caller = Caller(KEY)
    relay.ask(caller, streams.Describe())
    before = state(relay.store)
    relay.send(caller, append(3), writes=True)
    (frame,) = caller.frames()
    relay.hand(frames.Declare(0, Kind.STREAM, (b"o" * 16).hex(), KEY.key_id, bytes(16)), bytes(frame), caller)  # fmt: skip
    relay.store.commit()
    (answer,) = relay.received()
    refused = decode_answer(answer[BODY_AT:])
    assert isinstance(refused, Refused)
    assert refused.code == "channel"
    assert state(relay.store) == before


def test_a_malformed_store_answer_from_a_relay_ends_the_session_with_it() -> None:
    caller = Caller(KEY)
    with pytest.raises(PeerProtocolError):
        caller.frame(HOP.pack(20, Kind.STREAM_REPLY, 0, 0, 1, 0))
