"""Sessions of callers and of a store, and between them a relay that forwards or replaces their frames as a test
requires.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.founded import creation, founded

from iris.core.guard import Guard
from iris.core.session import Session
from iris.crypto.keys import ClusterKey, StoreKey
from iris.wire import consumers, frames, streams
from iris.wire.codec import BODY_AT, HOP, KIND_AT, decode_control, encode_control
from iris.wire.kinds import Kind
from iris.wire.orders import END, KEEP, MOVE, Definition, Order, SignedOrder
from iris.wire.streams import decode_answer, encode
from relay.store.session import StoreSession
from relay.store.store import Store

KEY = ClusterKey(bytes(range(32)))
OTHER = ClusterKey(bytes(range(1, 33)))
STORE_KEY = StoreKey(bytes(range(2, 34)))
UUID = founded(KEY, bytes(range(16)))
OTHERS_UUID = founded(OTHER, b"o" * 16)
NAME = "orders"
NOW_US = 1_700_000_000_000_000
UNASKED = object()
Frames = Callable[[bytearray], list[bytearray]]


class Waiter:
    """Holds the result of a call."""

    def __init__(self) -> None:
        self.got: Any = UNASKED

    def done(self) -> bool:
        return self.got is not UNASKED

    def set_result(self, result: Any, /) -> None:
        self.got = result

    set_exception = set_result


class Caller:
    """A client's session with some keys; `said` are the frames of its calls."""

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
        """Return the calls that it sent, and note its declarations."""
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
    """A relay between callers and a store. It applies the functions `calls` and `answers` to the frames."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: Frames = lambda frame: [frame]
        self.answers: Frames = lambda frame: [frame]
        self.recorded: list[tuple[frames.Declare, bytes]] = []
        """All calls that reached the store, with their addresses."""
        self._hops: dict[int, tuple[Caller, int]] = {}
        self._next = 0
        self._aliases: dict[tuple[str, bytes], int] = {}
        self.session = StoreSession(store, os.urandom, label="", pid=0, message_limit=1 << 20)
        self._tell(frames.Welcome(1, 1, bytes(16), bytes(8), bytes(32), 1 << 20))
        store.attached(self.session, first=True)
        self.received()

    def _tell(self, body: frames.Control) -> None:
        buf = memoryview(bytearray(encode_control(body)))
        self.session.frame(buf, 0, len(buf))

    def received(self) -> list[bytearray]:
        """Acknowledge the store's frames, and return its answers."""
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
        """Deliver a call of any sender and address to the store, and claim that the sender has proven the key."""
        target = (declared.name, declared.key_id)
        alias = self._aliases.get(target)
        if alias is None:
            alias = self._aliases[target] = len(self._aliases)
            self._tell(frames.Declare(alias, Kind.STREAM, *target, bytes(16)))
        out = memoryview(bytearray(frame))
        size, kind, flags, _, hop, deadline = HOP.unpack_from(out)
        self._next += 1
        self._hops[self._next] = (caller, hop)
        HOP.pack_into(out, 0, size, kind, flags, alias, self._next, deadline)
        self.recorded.append((declared, bytes(out)))
        self.session.turn(NOW_US, NOW_US)
        self.session.frame(out, 0, len(out))

    def run(self, *callers: Caller) -> None:
        """Forward frames until there are no more."""
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
            for answer in self.received():
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
        """Return the result of a call."""
        waiter = self.send(caller, call, key=key, name=name, own=own, writes=writes)
        self.run(caller)
        return waiter.got

    def send(self, caller: Caller, call: Any, *, key: ClusterKey | None = KEY, name: str = NAME, own: bool = False, writes: bool = False) -> Waiter:  # fmt: skip
        """Make a call, which `run` forwards."""
        waiter = Waiter()
        caller.session.store_calls.send(
            name, key, encode(call), timeout_ms=5000, waiter=waiter, writes=writes, to_store=own
        )
        return waiter


def order(key: ClusterKey = KEY, *, action: str = KEEP, issued_us: int = NOW_US, uuid: bytes = UUID, name: str = NAME, **fields: Any) -> SignedOrder:  # fmt: skip
    definition = Definition(name, **fields)
    body = encode(Order(action, uuid, key.key_id, STORE_KEY.public_key, issued_us, definition))
    return SignedOrder(body, key.public_key, key.sign_order(body))


def append(number: int, producer: bytes = b"p" * 16, size: int = 8) -> streams.Append:
    end = NOW_US.to_bytes(8, "little") + bytes(4) + (1).to_bytes(4, "little") + bytes(8)
    return streams.Append(
        bytes(16), [streams.NewRecord(number, end, b"sealed %d" % number * (size // 8))], producer
    )


def state(store: Store) -> Any:
    """Return all state that a call could change."""
    return [
        (
            stream.uuid,
            sorted(stream.orders),
            stream.definition,
            stream.log.next if stream.log else None,
            stream.log.oldest if stream.log else None,
            stream.log.staging.rows.bytes if stream.log else None,
            stream.consumer_calls.described("") if stream.consumer_calls else None,
        )
        for stream in store.streams.values()
    ]


ATTACKS: dict[str, Any] = {
    "append": append(0, b"q" * 16),
    "stage": streams.Stage("etl", 1, b"a" * 16, bytes(16), append(0).records),
    "commit": streams.Commit("etl", 1, [streams.Attempt(b"a" * 16, 1)]),
    "plan": streams.Plan("etl", 1, [streams.PlannedPart(1, [streams.Attempt(b"a" * 16, 1)])]),
    "discard": streams.Discard("etl", 1),
    "copy": streams.Copy(UUID, 3, 3, []),
    "consume": consumers.Consume("billing", b"w" * 16, 1 << 20, 1),
    "settle": consumers.Settle("billing", b"w" * 16, through=0),
    "consumers": consumers.DescribeConsumers(),
    "delete-consumer": consumers.DeleteConsumer("billing"),
    "change-consumer": consumers.ChangeConsumer("billing", paused=True),
    "redrive": consumers.RedriveLetters("billing", [0]),
    "attend": consumers.Attend("billing", b"l" * 16),
    "hand-over": consumers.HandOver("billing"),
    "fetch": streams.Fetch(0, 1 << 20),
    "find": streams.Find(0),
    "describe": streams.Describe(),
    "change": streams.Change([order(OTHER, issued_us=1 << 62), order(issued_us=NOW_US + 1)]),
    "delete": streams.Delete([order(action=END, issued_us=NOW_US + 1)]),
    "move": streams.Move([order(action=MOVE, issued_us=NOW_US + 1)]),
}


def raw(relay: Relay, body: bytes, *, name: str = UUID.hex(), key_id: bytes = KEY.key_id) -> Any:
    """Deliver a body directly to the store, claiming that its sender has proven the key; return the answer."""
    caller = Caller()
    declared = frames.Declare(0, Kind.STREAM, name, key_id, bytes(16))
    end = NOW_US.to_bytes(8, "little") + bytes(4) + (1).to_bytes(4, "little") + bytes(8)
    relay.hand(declared, HOP.pack(46 + len(body), Kind.STREAM, 0, 0, 1, 0) + end + body, caller)
    relay.store.commit()
    (answer,) = relay.received()
    return decode_answer(bytes(answer[BODY_AT:]))


def open_store(directory: Path) -> Store:
    """Return a store on a directory. The caller closes it."""
    (directory / "streams").mkdir(exist_ok=True)
    made = Store(directory, STORE_KEY, "here", lambda: None, lambda: None)
    made.load(NOW_US)
    return made


def relay_of(store: Store) -> Relay:
    """Return a relay of a store with one stream: three messages, a consumer with one in flight, and an attempt."""
    relay = Relay(store)
    owner = Caller(KEY)
    made = relay.ask(owner, creation(order()), key=None, name=store.address)
    assert isinstance(made, streams.Described)
    for number in range(3):
        assert isinstance(relay.ask(owner, append(number)), streams.Appended)
    assert isinstance(relay.ask(owner, ATTACKS["stage"]), streams.Staged)
    assert isinstance(relay.ask(owner, ATTACKS["consume"]), consumers.Delivered)
    return relay
