"""A store believes nobody's relay: what is not authenticated by a holder of the stream's key is refused, and changes nothing.

A caller's session and a store's, whole frames between them, and in the middle a relay that says whatever a test wants.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iris.core.guard import Guard
from iris.core.session import Session
from iris.crypto.channel import LONG_BYTES, MARK, SEALED_BYTES, Offer, accept_offer
from iris.crypto.keys import ClusterKey, StoreKey
from iris.errors import ConnectionLost, IrisError, OpenError, PeerProtocolError
from iris.wire import frames, streams
from iris.wire.codec import BODY_AT, END_AT, HOP, KIND_AT, decode_control, encode_control
from iris.wire.frames import NO_KEY, Kind
from iris.wire.streams import Refused, SignedOrder, decode_answer, encode
from relay.store import channels
from relay.store.keeper import Store
from relay.store.session import StoreSession

KEY = ClusterKey(bytes(range(32)))
OTHER = ClusterKey(bytes(range(1, 33)))
STORE_KEY = StoreKey(bytes(range(2, 34)))
UUID = bytes(range(16))
NAME = "orders"
NOW_US = 1_700_000_000_000_000
UNASKED = object()
Frames = Callable[[bytearray], list[bytearray]]


class Waiter:
    """Holds what a call ended with."""

    def __init__(self) -> None:
        self.got: Any = UNASKED

    def done(self) -> bool:
        return self.got is not UNASKED

    def set_result(self, result: Any, /) -> None:
        self.got = result

    set_exception = set_result


class Caller:
    """A session of a client with some keys; `said` are the frames of its calls."""

    def __init__(self, *keys: ClusterKey) -> None:
        self.keys = {key.key_id: key for key in keys}
        self.session = Session(
            self,  # type: ignore[arg-type]  # nothing else of an owner is asked for here
            Guard(600_000_000), os.urandom, label="", pid=0, message_limit=1 << 20,
        )  # fmt: skip
        self.tell(frames.Welcome(1, 1, bytes(16), bytes(8), bytes(32), 1 << 20))
        self.declared: dict[int, frames.Declare] = {}
        self.turn(NOW_US)

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        return self.keys.get(key_id)

    def out_full(self) -> None: ...

    def turn(self, now_us: int) -> None:
        self.session.turn(now_us, now_us)

    def tell(self, body: frames.Control) -> None:
        self.frame(encode_control(body))

    def frame(self, data: bytes | bytearray) -> None:
        buf = memoryview(bytearray(data))
        self.session.frame(buf, 0, len(buf))

    def frames(self) -> list[bytearray]:
        """Return the calls that it sent, and note what it declared."""
        said, calls = b"".join(self.session.out.chunks), []
        self.session.out.chunks.clear()
        while said:
            size = 4 + int.from_bytes(said[:4], "little")
            frame, said = said[:size], said[size:]
            if frame[KIND_AT] == Kind.STREAM:
                calls.append(bytearray(frame))
            elif isinstance(
                body := decode_control(memoryview(frame), 0, len(frame)), frames.Declare
            ):
                self.declared[body.alias] = body
        return calls


class Relay:
    """Joins callers with a store that it attaches to itself. `calls` and `answers` are what it does with a frame."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: Frames = lambda frame: [frame]
        self.answers: Frames = lambda frame: [frame]
        self.recorded: list[tuple[frames.Declare, bytes]] = []
        """Every call that came to the store, as it was addressed."""
        self._hops: dict[int, tuple[Caller, int]] = {}
        self._next = 0
        self._aliases: dict[tuple[str, bytes], int] = {}
        self.session = StoreSession(store, os.urandom, label="", pid=0, message_limit=1 << 20)
        self._tell(frames.Welcome(1, 1, bytes(16), bytes(8), bytes(32), 1 << 20))
        store.attached(self.session, first=True)
        self.heard()

    def _tell(self, body: frames.Control) -> None:
        buf = memoryview(bytearray(encode_control(body)))
        self.session.frame(buf, 0, len(buf))

    def heard(self) -> list[bytearray]:
        """Take what the store said: it is acknowledged, and its answers returned."""
        answers: list[bytearray] = []
        while self.session.out.chunks:
            said = memoryview(b"".join(self.session.out.chunks))
            self.session.out.chunks.clear()
            at = 0
            while at < len(said):
                end = at + 4 + int.from_bytes(said[at : at + 4], "little")
                if said[at + KIND_AT] == Kind.STREAM_REPLY:
                    answers.append(bytearray(said[at:end]))
                elif isinstance(
                    body := decode_control(said, at, end),
                    frames.Grant | frames.Join | frames.Subscribe,
                ):
                    self._tell(frames.Ack(body.id, member=1))
                at = end
        return answers

    def hand(self, declared: frames.Declare, frame: bytes, caller: Caller) -> None:
        """Give the store a call, whoever sent it, under whatever address, and swear that its sender holds the key."""
        place = (declared.name, declared.key_id)
        alias = self._aliases.get(place)
        if alias is None:
            alias = self._aliases[place] = len(self._aliases)
            self._tell(frames.Declare(alias, Kind.STREAM, *place, bytes(16)))
        out = memoryview(bytearray(frame))
        size, kind, flags, _, hop, deadline = HOP.unpack_from(out)
        self._next += 1
        self._hops[self._next] = (caller, hop)
        HOP.pack_into(out, 0, size, kind, flags, alias, self._next, deadline)
        self.recorded.append((declared, bytes(out)))
        self.session.turn(NOW_US, NOW_US)
        self.session.frame(out, 0, len(out))

    def run(self, *callers: Caller) -> None:
        """Pass frames on until nobody says anything more."""
        busy = True
        while busy:
            busy = False
            for caller in callers:
                for call in caller.frames():
                    declared = caller.declared[HOP.unpack_from(call)[3]]
                    for frame in self.calls(call):
                        self.hand(declared, bytes(frame), caller)
                        busy = True
            self.store.commit()
            for answer in self.heard():
                for frame in self.answers(answer):
                    busy = True
                    self._answer(frame)

    def _answer(self, frame: bytearray) -> None:
        size, kind, flags, _, number, deadline = HOP.unpack_from(frame)
        caller, hop = self._hops[number]
        caller.tell(frames.Declare(0, Kind.STREAM_REPLY, NAME, KEY.key_id, bytes(16)))
        HOP.pack_into(frame, 0, size, kind, flags, 0, hop, deadline)
        caller.frame(frame)

    def ask(self, caller: Caller, call: Any, *, key: ClusterKey | None = KEY, name: str = NAME, own: bool = False, writes: bool = False) -> Any:  # fmt: skip
        """Return what becomes of a call."""
        waiter = self.send(caller, call, key=key, name=name, own=own, writes=writes)
        self.run(caller)
        return waiter.got

    def send(self, caller: Caller, call: Any, *, key: ClusterKey | None = KEY, name: str = NAME, own: bool = False, writes: bool = False) -> Waiter:  # fmt: skip
        """Let a caller make a call; `run` passes it on."""
        waiter = Waiter()
        caller.session.calling.send(
            name, key, encode(call), timeout_ms=5000, waiter=waiter, writes=writes, own=own
        )
        return waiter


def order(key: ClusterKey = KEY, *, action: str = streams.KEEP, issued_us: int = NOW_US, uuid: bytes = UUID, name: str = NAME, **fields: Any) -> SignedOrder:  # fmt: skip
    definition = streams.Definition(name, **fields)
    body = encode(
        streams.Order(action, uuid, key.key_id, STORE_KEY.public_key, issued_us, definition)
    )
    return SignedOrder(body, key.public_key, key.sign_order(body))


def append(number: int, producer: bytes = b"p" * 16, size: int = 8) -> streams.Append:
    end = NOW_US.to_bytes(8, "little") + bytes(4) + (1).to_bytes(4, "little") + bytes(8)
    return streams.Append(
        bytes(16), [streams.NewRecord(number, end, b"sealed %d" % number * (size // 8))], producer
    )


def state(store: Store) -> Any:
    """Return all that a call could change."""
    return [
        (
            stream.uuid,
            sorted(stream.orders),
            stream.definition,
            stream.log.next if stream.log else None,
            stream.log.oldest if stream.log else None,
            stream.log.staged_bytes if stream.log else None,
            stream.consuming.described("") if stream.consuming else None,
        )
        for stream in store.streams.values()
    ]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "streams").mkdir()
    made = Store(tmp_path, STORE_KEY, "here", lambda: None, lambda: None)
    made.load(NOW_US)
    yield made
    made.close()


@pytest.fixture
def relay(store: Store) -> Relay:
    """A relay of a store with one stream: three messages, a consumer that holds one of them, and an attempt."""
    relay = Relay(store)
    owner = Caller(KEY)
    made = relay.ask(owner, streams.Create([order()]), key=None, name=store.address)
    assert isinstance(made, streams.Described)
    for number in range(3):
        assert isinstance(relay.ask(owner, append(number)), streams.Appended)
    assert isinstance(relay.ask(owner, ATTACKS["stage"]), streams.Staged)
    assert isinstance(relay.ask(owner, ATTACKS["consume"]), streams.Delivered)
    return relay


ATTACKS: dict[str, Any] = {
    "append": append(0, b"q" * 16),
    "stage": streams.Stage("etl", 1, b"a" * 16, bytes(16), append(0).records),
    "commit": streams.Commit("etl", 1, [streams.Attempt(b"a" * 16, 1)]),
    "discard": streams.Discard("etl", 1),
    "copy": streams.Copy(UUID, 3, 3, []),
    "consume": streams.Consume("billing", b"w" * 16, 1 << 20, 1),
    "settle": streams.Settle("billing", b"w" * 16, through=0),
    "consumers": streams.DescribeConsumers(),
    "delete-consumer": streams.DeleteConsumer("billing"),
    "fetch": streams.Fetch(0, 1 << 20),
    "find": streams.Find(0),
    "describe": streams.Describe(),
    "change": streams.Change([order(OTHER, issued_us=1 << 62), order(issued_us=NOW_US + 1)]),
    "delete": streams.Delete([order(action=streams.END, issued_us=NOW_US + 1)]),
}


def raw(relay: Relay, body: bytes, *, name: str = UUID.hex(), key_id: bytes = KEY.key_id) -> Any:
    """Hand a body straight to the store, as a relay may that swears its sender has proven the key; return the answer."""
    caller = Caller()
    declared = frames.Declare(0, Kind.STREAM, name, key_id, bytes(16))
    end = NOW_US.to_bytes(8, "little") + bytes(4) + (1).to_bytes(4, "little") + bytes(8)
    relay.hand(declared, HOP.pack(46 + len(body), Kind.STREAM, 0, 0, 1, 0) + end + body, caller)
    relay.store.commit()
    (answer,) = relay.heard()
    return decode_answer(answer[BODY_AT:])


# -- without the key ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_whatever_a_relay_swears_a_call_without_the_key_is_refused_and_changes_nothing(
    relay: Relay, name: str
) -> None:
    before = state(relay.store)
    answer = raw(relay, encode(ATTACKS[name]))
    assert isinstance(answer, Refused)
    assert "upgrade the client" in answer.detail
    assert state(relay.store) == before
    assert relay.store.refused == 1


def test_who_holds_no_key_learns_no_name_of_a_stream(relay: Relay) -> None:
    store = relay.store.address
    old = streams.msgspec.msgpack.encode({"op": "list", "key_ids": [KEY.key_id], "after": ""})
    answer = raw(relay, old, name=store, key_id=NO_KEY)
    assert isinstance(answer, Refused)
    assert "upgrade the client" in answer.detail
    # Nor does the holder of another key, by a channel of its own.
    answer = relay.ask(Caller(OTHER), streams.ListStreams(), key=OTHER, name=store, own=True)
    assert isinstance(answer, Refused)
    assert answer.code == "no-stream"
    # Each key's holder sees what is there under that key.
    theirs = b"o" * 16
    relay.ask(Caller(), streams.Create([order(OTHER, uuid=theirs, name="other")]), key=None, name=store)  # fmt: skip
    for key, uuid in ((KEY, UUID), (OTHER, theirs)):
        listed = relay.ask(Caller(key), streams.ListStreams(), key=key, name=store, own=True)
        assert [found.uuid for found in listed.streams] == [uuid]


def test_a_stream_is_there_under_its_own_keys_alone_and_listed_under_them(relay: Relay) -> None:
    store = relay.store
    theirs = order(OTHER, uuid=bytes(range(1, 17)), name="bills")
    made = relay.ask(Caller(OTHER), streams.Create([theirs]), key=None, name=store.address)
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
    assert isinstance(relay.ask(caller, streams.ListStreams()), Refused)  # by one to a stream
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
    opens = len(relay.store.channels)
    answer = raw(relay, encode(streams.Open(offer.nonce, door.nonce, public, share, signature)))
    assert isinstance(answer, Refused)
    assert len(relay.store.channels) == opens


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
    """Change one bit of what is authenticated; what opens a channel passes."""

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
def test_an_altered_call_is_refused_and_not_done(relay: Relay, part: str, size: int) -> None:
    before = state(relay.store)
    relay.calls = flipped(PARTS[part])
    answer = relay.ask(Caller(KEY), append(3, size=size), writes=True)
    assert isinstance(answer, ConnectionLost)
    assert answer.may_have_run
    assert state(relay.store) == before
    assert relay.store.refused == 1


@pytest.mark.parametrize("part", PARTS)
def test_an_altered_answer_is_no_answer(relay: Relay, part: str) -> None:
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
    settle = streams.Settle("billing", b"w" * 16, failed=[streams.Range(0, 1)])
    assert relay.ask(caller, settle, writes=True) == streams.Settled(1)
    # The second is refused without a code: a refusal with one could pass for the answer to the first.
    refusals = [decode_answer(body) for body in answers if body[0] != MARK]
    assert [r.code for r in refusals if isinstance(r, Refused)] == ["channel"]
    assert relay.store.refused == 1
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


def test_an_answer_to_another_call_is_no_answer(relay: Relay) -> None:
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


def test_what_a_relay_answers_in_a_store_s_place_is_not_believed(relay: Relay) -> None:
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
        # A call that changes nothing is made once more, and no oftener.
        count = len(relay.recorded)
        answer = relay.ask(Caller(KEY), streams.Describe())
        assert isinstance(answer, ConnectionLost)
        assert len(relay.recorded) - count == 6  # twice: knock, open, describe


# -- who the store is --------------------------------------------------------------------------------------------


def test_a_store_without_the_key_that_the_order_names_is_no_store(relay: Relay) -> None:
    liar = StoreKey(bytes(range(3, 35)))
    signed = relay.store.streams[UUID].orders[KEY.key_id][1]
    other = encode(
        streams.Order(
            streams.KEEP, UUID, OTHER.key_id, liar.public_key, NOW_US, streams.Definition(NAME)
        )
    )
    cases: dict[str, tuple[bytes, list[SignedOrder], bytes]] = {
        "its own key, our order": (liar.public_key, [signed], UUID),
        "its own key, an order of its own": (
            liar.public_key, [SignedOrder(other, OTHER.public_key, OTHER.sign_order(other))], UUID
        ),
        "an order of another log": (STORE_KEY.public_key, [order(uuid=b"x" * 16)], UUID),
        "an order that ends it": (STORE_KEY.public_key, [order(action=streams.END)], UUID),
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
        assert len(relay.recorded) == count + 1, case  # the knock, and nothing of the call


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
    assert len(relay.recorded) == count + 2  # nothing of the call left


def replaced(answer: Any) -> Frames:
    """Answer in the store's place."""
    body = encode(answer)

    def change(frame: bytearray) -> list[bytearray]:
        frame[:] = (
            HOP.pack(46 + len(body), *HOP.unpack_from(frame)[1:]) + frame[END_AT:BODY_AT] + body
        )
        return [frame]

    return change


def test_an_older_store_is_named_as_what_it_is(relay: Relay) -> None:
    relay.answers = replaced(Refused("invalid", "a call to a store: Invalid value 'knock'"))
    answer = relay.ask(Caller(KEY), streams.Describe())
    assert isinstance(answer, Refused)
    assert "its store does not support authenticated calls: upgrade the store" in answer.detail


# -- replays of a whole conversation -----------------------------------------------------------------------------


def test_a_recorded_conversation_does_nothing_again_here_or_on_another_connection(
    relay: Relay,
) -> None:
    caller = Caller(KEY)
    del relay.recorded[:]
    settle = streams.Settle("billing", b"w" * 16, failed=[streams.Range(0, 1)])
    for call in (append(3, streams.NO_PRODUCER), settle, streams.DeleteConsumer("billing")):
        assert not isinstance(relay.ask(caller, call, writes=True), Refused | IrisError)
    recorded = relay.recorded
    assert isinstance(relay.ask(Caller(KEY), ATTACKS["consume"]), streams.Delivered)
    before, opened = state(relay.store), len(relay.store.channels)
    for again in (relay, Relay(relay.store)):  # the store attaches anew to the second
        for declared, frame in list(recorded[:5]):
            again.hand(declared, frame, Caller())
        relay.store.commit()
        answers = [decode_answer(one[BODY_AT:]) for one in again.heard()]
        assert isinstance(answers[0], streams.Door)  # a knock is answered to anybody
        assert [type(one) for one in answers[1:]] == [Refused] * 4
        assert state(relay.store) == before
    assert len(relay.store.channels) == opened


# -- bounds ------------------------------------------------------------------------------------------------------


def test_knocks_of_strangers_leave_nothing_at_the_store(relay: Relay) -> None:
    table = relay.store.channels
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
    table = relay.store.channels = channels.Channels(STORE_KEY, os.urandom, most=4, most_of_key=3)
    callers = [Caller(KEY) for _ in range(4)]
    for caller in callers[:3]:
        relay.ask(caller, streams.Describe())
    relay.ask(callers[0], streams.Describe())  # the second is idle longest now
    relay.ask(callers[3], streams.Describe())
    assert len(table) == 3
    for caller in (callers[0], callers[2], callers[3]):
        assert isinstance(relay.ask(caller, streams.Describe()), streams.Described)
    assert relay.store.refused == 0
    # A read is sent again by itself, of a write its caller hears.
    lost = relay.ask(callers[1], append(3), writes=True)
    assert isinstance(lost, ConnectionLost)
    assert isinstance(relay.ask(callers[1], append(3), writes=True), streams.Appended)
    assert isinstance(relay.ask(callers[0], streams.Describe()), streams.Described)
    assert relay.store.refused == 2


def test_a_client_that_uses_too_many_streams_opens_the_first_again(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iris.core.calling.MAX_LINES", 2)
    caller = Caller(KEY)
    for name in (NAME, UUID.hex(), NAME, UUID.hex()):
        assert isinstance(relay.ask(caller, streams.Describe(), name=name), streams.Described)
    assert len(relay.store.channels) == 3  # one is of the owner
    waiters = [relay.send(caller, append(n), name=name, writes=True) for n, name in ((3, "a"), (4, NAME), (5, "b"))]  # fmt: skip
    relay.run(caller)
    assert [type(w.got) for w in waiters] == [Refused, streams.Appended, Refused]
    assert len(caller.session.calling._lines) <= 2


def test_channels_of_one_key_never_end_those_of_another(relay: Relay) -> None:
    table = relay.store.channels = channels.Channels(STORE_KEY, os.urandom, most=4, most_of_key=3)
    relay.ask(Caller(KEY), streams.Create([order(OTHER, uuid=b"o" * 16, name="other")]), key=None, name=relay.store.address)  # fmt: skip
    quiet = Caller(OTHER)
    assert isinstance(relay.ask(quiet, streams.Describe(), key=OTHER, name="other"), streams.Described)  # fmt: skip
    for _ in range(10):
        relay.ask(Caller(KEY), streams.Describe())
    assert len(table) == 4
    assert isinstance(relay.ask(quiet, streams.Describe(), key=OTHER, name="other"), streams.Described)  # fmt: skip
    assert relay.store.refused == 0


def test_calls_that_wait_for_a_channel_leave_in_order_and_not_if_they_were_given_up(relay: Relay) -> None:  # fmt: skip
    caller = Caller(KEY)
    waiters = [relay.send(caller, append(n), writes=True) for n in range(3, 6)]
    given_up = caller.session.calling.send(NAME, KEY, encode(append(9)), timeout_ms=5000, waiter=Waiter(), writes=True)  # fmt: skip
    caller.session.calling.forget(given_up)
    relay.run(caller)
    assert [w.got.outcomes[0].value for w in waiters] == [3, 4, 5]
    assert caller.session.calling.writes == 0


def test_a_session_that_ends_says_of_calls_that_waited_that_they_were_not_made(
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
    assert caller.session.calling.writes == 0


def test_dead_letters_are_read_by_a_channel_under_the_order_of_their_stream(relay: Relay) -> None:
    caller = Caller(KEY)
    last = streams.Consume("strict", b"w" * 16, 1 << 20, 1, max_deliver=1)
    assert isinstance(relay.ask(caller, last), streams.Delivered)
    assert isinstance(
        relay.ask(caller, streams.Settle("strict", b"w" * 16, failed=[streams.Range(0, 1)])),
        streams.Settled,
    )
    relay.ask(caller, last)
    found = relay.ask(caller, streams.Describe(), name=f"{NAME}.dead")
    assert isinstance(found, streams.Described)
    assert found.uuid == streams.dead_uuid(UUID)


def test_garbage_behind_the_mark_is_refused(relay: Relay) -> None:
    for body in (b"\xc1", b"\xc1" + bytes(16), b"\xc1" + bytes(48), b"\xc1" + os.urandom(500)):
        answer = raw(relay, body)
        assert isinstance(answer, Refused)
        assert answer.code == "channel"


def test_a_call_through_a_channel_that_is_no_call_is_refused_with_a_code(relay: Relay) -> None:
    caller, waiter = Caller(KEY), Waiter()
    caller.session.calling.send(NAME, KEY, b"\x80", timeout_ms=5000, waiter=waiter)
    relay.run(caller)
    assert isinstance(waiter.got, Refused)
    assert waiter.got.code == "invalid"


def test_a_channel_of_one_log_is_none_to_another_of_the_same_key(relay: Relay) -> None:
    relay.ask(Caller(KEY), streams.Create([order(uuid=b"o" * 16, name="other")]), key=None, name=relay.store.address)  # fmt: skip
    caller = Caller(KEY)
    relay.ask(caller, streams.Describe())
    before = state(relay.store)
    relay.send(caller, append(3), writes=True)
    (frame,) = caller.frames()
    relay.hand(frames.Declare(0, Kind.STREAM, (b"o" * 16).hex(), KEY.key_id, bytes(16)), bytes(frame), caller)  # fmt: skip
    relay.store.commit()
    (answer,) = relay.heard()
    refused = decode_answer(answer[BODY_AT:])
    assert isinstance(refused, Refused)
    assert refused.code == "channel"
    assert state(relay.store) == before


def test_a_relay_s_nonsense_in_a_store_s_answer_frame_is_its_own_offence() -> None:
    caller = Caller(KEY)
    with pytest.raises(PeerProtocolError):
        caller.frame(HOP.pack(20, Kind.STREAM_REPLY, 0, 0, 1, 0))
