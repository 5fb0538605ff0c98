"""Attacks by holders of a stream's key, and by relays on the path to it: a store and its other callers continue."""

from __future__ import annotations

import os
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol.stores import (
    KEY,
    NAME,
    NOW_US,
    OTHER,
    OTHERS_UUID,
    STORE_KEY,
    UUID,
    Caller,
    Relay,
    Waiter,
    append,
    open_store,
    order,
    relay_of,
    state,
)
from support.founded import countersigned, creation, founded

from iris.crypto.channel import MARK
from iris.crypto.keys import ClusterKey, verify_order
from iris.errors import ConnectionLost, Overloaded, RequestTimeout
from iris.wire import frames, streams
from iris.wire.codec import BODY_AT, END_AT, HOP
from iris.wire.kinds import Kind
from iris.wire.orders import SignedOrder
from iris.wire.streams import Refused, decode_answer, encode
from relay.store.channels import Channels
from relay.store.store import Store

# -- bodies that others chose ------------------------------------------------------------------------------------

HUGE = (
    0,
    1,
    2,
    3,
    4,
    255,
    4096,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
)
WRONG: st.SearchStrategy[Any] = st.sampled_from(
    (-1, -(1 << 63), 1 << 63, (1 << 64) - 1, "", b"", None, [], {})
)
ends = st.builds(
    lambda sent, ttl, count, first: b"".join(
        (sent.to_bytes(8, "little"), ttl.to_bytes(4, "little"), count.to_bytes(4, "little"), first.to_bytes(8, "little"))
    ),
    st.sampled_from((0, NOW_US, (1 << 64) - 1)), st.sampled_from((0, (1 << 32) - 1)), st.sampled_from((0, 1, 1, 65_536, (1 << 32) - 1)),
    st.sampled_from((0, (1 << 64) - 1)),
)  # fmt: skip


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values for a field of this type: mostly valid ones, at the limits."""
    if isinstance(kind, msgspec.inspect.IntType):
        low, high = kind.ge or 0, kind.le or (1 << 63) - 1
        fits = [n for n in (*HUGE, low, high) if low <= n <= high]
        return st.sampled_from(fits)
    if isinstance(kind, msgspec.inspect.BytesType):
        if (kind.min_length, kind.max_length) == (24, 24):
            return ends
        sizes = {kind.min_length or 0, min(kind.max_length or 64, 64)}
        return st.sampled_from(
            [letter * size for size in sorted(sizes) for letter in (b"w", b"\0", b"\xff")]
        )
    if isinstance(kind, msgspec.inspect.StrType):
        return st.sampled_from(
            ("", "etl", "billing", NAME, UUID.hex(), "a" * 255, "\0", "ü" * 200, "a.>")
        )
    if isinstance(kind, msgspec.inspect.BoolType):
        return st.booleans()
    if isinstance(kind, msgspec.inspect.NoneType):
        return st.none()
    if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        return st.lists(values(kind.item_type), min_size=0, max_size=4)
    if isinstance(kind, msgspec.inspect.UnionType):
        return st.one_of(*(values(one) for one in kind.types))
    if isinstance(kind, msgspec.inspect.StructType):
        given = {field.encode_name: values(field.type) for field in kind.fields}
        if not kind.array_like:
            return st.fixed_dictionaries({}, optional=given)
        tag = [] if kind.tag is None else [st.just(kind.tag)]
        return st.tuples(*tag, *given.values()).map(list)
    raise AssertionError(kind)


def call_of(kind: type) -> st.SearchStrategy[Any]:
    """Return bodies of calls of a kind: fields at their limits, some missing, some unknown."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {f.encode_name: values(f.type) for f in info.fields}
    due = {
        name: one
        for name, one in fields.items()
        if any(f.encode_name == name and f.required for f in info.fields)
    }
    rest = {name: one for name, one in fields.items() if name not in due}
    right = st.fixed_dictionaries(due, optional={**rest, "unknown": WRONG})
    wrong = st.tuples(right, st.sampled_from(sorted(fields) or ["x"]), WRONG).map(
        lambda of: {**of[0], of[1]: of[2]}
    )
    return st.one_of(right, right, right, wrong).map(lambda body: {"op": info.tag, **body})


def written(
    relay: Relay, caller: Caller, body: bytes, *, name: str = NAME, own: bool = False
) -> Any:
    """Send a body through a channel, as a holder of the key; return the outcome."""
    waiter = Waiter()
    caller.session.store_calls.send(name, KEY, body, timeout_ms=5000, waiter=waiter, to_store=own)
    relay.run(caller)
    if not waiter.done():  # a reader that waits for messages
        relay.store.now_us += 61_000_000
        relay.store.tend()
        relay.store.now_us = NOW_US
        relay.run(caller)
    return waiter.got


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", get_args(streams.Call), ids=lambda kind: kind.__struct_config__.tag
)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_call_of_any_numbers_is_answered_and_the_store_serves_the_others(
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    kind: type,
    data: st.DataObject,
) -> None:
    store = KEPT.get(kind) or open_store(tmp_path_factory.mktemp("data"))
    if kind not in KEPT:
        KEPT[kind] = store
        relay_of(store)
        Relay(store).ask(
            Caller(OTHER),
            creation(order(OTHER, uuid=OTHERS_UUID, name="other")),
            key=None,
            name=store.address,
        )
    relay = Relay(store)
    caller = Caller(KEY)
    for body in data.draw(st.lists(call_of(kind), min_size=1, max_size=4)):
        encoded = msgspec.msgpack.encode(body)
        encoded = data.draw(
            st.sampled_from((encoded, *([encoded] * 8), encoded[:-1], encoded + b"\0"))
        )
        answer = written(relay, caller, encoded)
        assert isinstance(answer, get_args(streams.Answer)), answer
        if isinstance(answer, Refused):
            assert answer.code in streams.REFUSALS
            assert answer.code != "failed", answer
    assert "store.fault" not in caplog.text, caplog.text
    other = Caller(OTHER)
    got = relay.ask(other, append(0, os.urandom(16)), key=OTHER, name="other")
    assert isinstance(got, streams.Appended), got


KEPT: dict[type, Store] = {}


# -- a client whose relay, or whose own program, does its worst ----------------------------------------------------


def refuse_sealed(relay: Relay, code: str = "channel") -> None:
    """Let the relay answer each call of a channel itself, with a refusal."""
    forged = encode(Refused(code, "says the relay"))

    def forge(frame: bytearray) -> list[bytearray]:
        if frame[BODY_AT] == MARK:
            head = HOP.pack(46 + len(forged), *HOP.unpack_from(frame)[1:])
            frame[:] = head + frame[END_AT:BODY_AT] + forged
        return [frame]

    relay.answers = forge


def test_a_call_that_finds_no_room_to_knock_fails_and_the_next_is_made(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iris.core.store_calls.MAX_PENDING", 2)
    caller = Caller(KEY)
    first = relay.send(caller, streams.FindStore(), key=None, name=relay.store.address)
    full = relay.send(caller, streams.Describe())
    assert isinstance(full.got, Overloaded)
    relay.run(caller)
    assert isinstance(first.got, streams.StoreInfo)
    assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    assert not caller.session.store_calls._pending


def test_a_forged_refusal_while_a_client_is_busy_does_not_end_its_session(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(KEY)
    assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    monkeypatch.setattr("iris.core.store_calls.MAX_PENDING", 2)
    refuse_sealed(relay)
    waiters = [relay.send(caller, streams.Describe()) for _ in range(2)]
    relay.run(caller)
    for waiter in waiters:
        assert isinstance(waiter.got, Overloaded | ConnectionLost)
    assert not caller.session.store_calls._pending
    relay.answers = lambda frame: [frame]
    assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)


def test_calls_that_were_given_up_while_a_channel_opens_hold_nothing(relay: Relay) -> None:
    caller = Caller(KEY)
    calling = caller.session.store_calls
    knock: list[bytearray] = []

    def keep(frame: bytearray) -> list[bytearray]:
        knock.append(frame)
        return []

    relay.calls = keep
    given_up = [
        calling.send(NAME, KEY, bytes(1 << 16), timeout_ms=100, waiter=Waiter()) for _ in range(20)
    ]
    relay.run(caller)
    channel = given_up[0].channel
    assert channel is not None
    for called in given_up[:10]:
        calling.forget(called)
    caller.session.mono_us += 2_000_000
    calling.expire(caller.session.mono_us)
    assert len(channel.held) == 0
    assert all(isinstance(called.waiter.got, RequestTimeout) for called in given_up[10:])
    # Later callers are served by the channel that was requested.
    waiter = relay.send(caller, streams.Describe())
    relay.calls = lambda frame: [frame]
    relay.hand(caller.declared[HOP.unpack_from(knock[0])[3]], bytes(knock[0]), caller)
    relay.run(caller)
    assert isinstance(waiter.got, streams.Described)
    assert not calling._pending


def test_the_first_of_those_who_wait_for_a_channel_may_leave(relay: Relay) -> None:
    caller = Caller(KEY)
    calling = caller.session.store_calls
    first = calling.send(NAME, KEY, encode(streams.Describe()), timeout_ms=5000, waiter=Waiter())
    others = [relay.send(caller, streams.Describe()) for _ in range(3)]
    calling.forget(first)
    relay.run(caller)
    assert all(isinstance(waiter.got, streams.Described) for waiter in others)
    assert not first.waiter.done()
    assert not calling._pending


def test_a_door_full_of_orders_costs_a_client_no_more_than_a_few_signatures(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def verify(*given: bytes) -> bytes:
        checked.append(given)
        return verify_order(*given)

    monkeypatch.setattr("iris.core.channels.verify_order", verify)
    strange = SignedOrder(b"x" * 100, OTHER.public_key, bytes(64))
    ours = SignedOrder(b"x" * 100, KEY.public_key, bytes(64))

    for many in ([strange] * 60, [ours] * 5000):

        def forge(frame: bytearray, many: list[SignedOrder] = many) -> list[bytearray]:
            door = decode_answer(bytes(frame[BODY_AT:]))
            assert isinstance(door, streams.Door)
            forged = encode(streams.Door(door.store, door.uuid, door.nonce, many))
            frame[:] = (
                HOP.pack(46 + len(forged), *HOP.unpack_from(frame)[1:])
                + frame[END_AT:BODY_AT]
                + forged
            )
            return [frame]

        relay.answers = forge
        assert isinstance(relay.ask(Caller(KEY), streams.Describe()), Refused | ConnectionLost)
        assert checked == []


# -- channels ----------------------------------------------------------------------------------------------------


def test_a_recorded_open_opens_nothing_however_many_channels_others_open(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.store.channels.MAX_SPENT", 4)
    caller = Caller(KEY)
    assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    (declared, opening) = relay.recorded[-2]
    for _ in range(8):
        assert isinstance(relay.ask(Caller(KEY), streams.Describe()), streams.Described)
    held = len(relay.store.calls.channels)
    relay.hand(declared, opening, caller)
    (answer,) = relay.received()
    refused = decode_answer(bytes(answer[BODY_AT:]))
    assert isinstance(refused, Refused)
    assert refused.code == "channel"
    assert len(relay.store.calls.channels) == held
    assert len(relay.store.calls.channels._spent) <= 4


def test_who_made_up_many_keys_ends_no_channels_of_another_stream(relay: Relay) -> None:
    table = relay.store.calls.channels = Channels(STORE_KEY, os.urandom, most=8, most_of_log=6)
    honest = [Caller(KEY) for _ in range(3)]
    for caller in honest:
        assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    made_up = [ClusterKey(os.urandom(32)) for _ in range(12)]
    founder, uuid = made_up[0], founded(made_up[0], bytes(16))
    first, *rest = (order(key, uuid=uuid, name="other") for key in made_up)
    theirs = creation(first, *(countersigned(founder, one) for one in rest))
    assert isinstance(
        relay.ask(Caller(), theirs, key=None, name=relay.store.address), streams.Described
    )
    for key in made_up:
        assert isinstance(
            relay.ask(Caller(key), streams.Describe(), key=key, name="other"), streams.Described
        )
    assert len(table) == 8
    for caller in honest:
        assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    assert relay.store.calls.refused == 0
    # Honest callers are still served.
    assert isinstance(relay.ask(Caller(KEY), streams.Describe()), streams.Described)


def test_a_call_of_another_time_or_stream_is_nothing_through_a_channel_of_today(
    relay: Relay,
) -> None:
    """Recorded calls are refused after a restart, and in a stream of the same name under another key or uuid."""
    old = Caller(KEY)
    assert isinstance(relay.ask(old, append(3), writes=True), streams.Appended)
    recorded = [(declared, frame) for declared, frame in relay.recorded if frame[BODY_AT] == MARK]
    again = order(OTHER, uuid=founded(OTHER, b"s" * 16), name=NAME)
    made = relay.ask(Caller(OTHER), creation(again), key=None, name=relay.store.address)
    assert isinstance(made, streams.Described)
    other = Caller(OTHER)
    assert isinstance(relay.ask(other, streams.Describe(), key=OTHER), streams.Described)
    addresses = [frames.Declare(0, Kind.STREAM, name, key.key_id, bytes(16))
              for name in (NAME, UUID.hex(), founded(OTHER, b"s" * 16).hex(), relay.store.address) for key in (KEY, OTHER)]  # fmt: skip
    relay.store.detached()  # our session with the relay ends, and another begins
    after = Relay(relay.store)
    before = state(relay.store)
    for declared in (*addresses, *(declared for declared, _ in recorded)):
        for _, frame in recorded:
            after.hand(declared, frame, old)
            (answer,) = after.received()
            refused = decode_answer(bytes(answer[BODY_AT:]))
            assert isinstance(refused, Refused)
            assert refused.code == "channel"
    assert state(relay.store) == before
    assert not len(relay.store.calls.channels)


def test_a_key_that_is_retired_while_its_channel_opens_or_is_refused_leaves_nobody_waiting(
    relay: Relay,
) -> None:
    """Calls under the key end with an answer; a session with the new keyring opens new channels."""
    caller = Caller(KEY)
    opening = [relay.send(caller, streams.Describe()), relay.send(caller, append(3), writes=True)]
    caller.keys.clear()
    relay.run(caller)
    assert [type(waiter.got) for waiter in opening] == [streams.Described, streams.Appended]
    refuse_sealed(relay)
    under_way = [relay.send(caller, streams.Describe()), relay.send(caller, append(4), writes=True)]
    relay.run(caller)
    assert [type(waiter.got) for waiter in under_way] == [ConnectionLost, ConnectionLost]
    assert under_way[1].got.may_have_run
    assert not caller.session.store_calls._pending
    assert caller.session.store_calls.writes == 0
