"""The rights of a session without a key: exactly those that its order grants."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from iris.crypto.keys import ClusterKey, StoreKey
from iris.errors import PeerProtocolError
from iris.wire import frames, streams
from iris.wire.codec import decode_control, encode_control
from iris.wire.frames import Serving
from iris.wire.kinds import DECLARED_KINDS, NO_KEY, PROTOCOL_VERSION, STORES, Kind
from iris.wire.orders import DEAD, KEEP, Definition, Order
from iris.wire.stream_items import dead_uuid
from relay.core.router import Router

KEY, OTHER = ClusterKey(b"k" * 32), ClusterKey(b"o" * 32)
STORE = StoreKey(b"s" * 32)
UUID = bytes(range(16))
STREAM = {int(Kind.STREAM): Serving(1, 1)}
SHARE = {int(Kind.PUSH): Serving(1, 1), int(Kind.BROADCAST): Serving(1, 1)}


class Wire:
    """A port that collects control frames."""

    def __init__(self) -> None:
        self.received: list[frames.Control] = []
        self.held_messages = 0
        self.crowded = False

    def control(self, frame: bytes) -> None:
        self.received.append(decode_control(memoryview(bytearray(frame)), 0, len(frame)))

    unread = False

    def has_room(self, size: int) -> bool:
        return True

    def finish(self) -> None: ...
    def abort(self, reason: str) -> None: ...


@dataclasses.dataclass
class Party:
    """A session of a router that sends one frame at a time."""

    router: Router
    wire: Wire
    session: Any

    def say(self, body: frames.Control) -> None:
        frame = memoryview(bytearray(encode_control(body)))
        self.router.frame_in(self.session, frame, 0, len(frame))

    def ask(self, body: frames.Control) -> str:
        """Send a frame and return the error of its Ack."""
        self.say(body)
        return [said for said in self.wire.received if isinstance(said, frames.Ack)][-1].error

    def grant(
        self, order: Order, *, key: ClusterKey = KEY, store: StoreKey = STORE, proof: bytes = b""
    ) -> str:
        data = streams.encode(order)
        welcome = self.welcome
        proof = proof or store.sign_proof(
            data,
            relay_id=welcome.relay_id,
            session_id=welcome.session_id,
            challenge=welcome.challenge,
        )
        return self.ask(frames.Grant(7, data, key.public_key, key.sign_order(data), proof))

    @property
    def welcome(self) -> frames.Welcome:
        (welcome,) = [body for body in self.wire.received if isinstance(body, frames.Welcome)]
        return welcome


def party(*, ours: bool = True, router: Router | None = None) -> Party:
    router = router or Router(bytes(16), entropy=lambda n: b"e" * n, message_limit=1 << 20)
    wire = Wire()
    made = Party(router, wire, router.session_up(wire, ours=ours))  # type: ignore[arg-type]  # what is used of a Port
    made.say(frames.Hello(PROTOCOL_VERSION, 0))
    return made


def order(**changes: Any) -> Order:
    definition = Definition("orders", topic="orders.>")
    return structs.replace(
        Order(KEEP, UUID, KEY.key_id, STORE.public_key, 1, definition), **changes
    )


def test_an_order_lets_its_store_serve_the_stream_its_dead_letters_and_subscribe_to_what_it_records() -> (
    None
):
    store = party()
    assert store.grant(order()) == ""
    for name in ("orders", "orders" + DEAD, UUID.hex(), dead_uuid(UUID).hex()):
        assert store.ask(frames.Join(1, name, [KEY.key_id], STREAM)) == ""
    assert store.ask(frames.Subscribe(1, "orders.>", [KEY.key_id])) == ""


def test_an_order_that_its_key_did_not_sign_is_refused_and_grants_nothing() -> None:
    store = party()
    data = streams.encode(order())
    welcome = store.welcome
    session = {"relay_id": welcome.relay_id, "session_id": welcome.session_id, "challenge": welcome.challenge}  # fmt: skip
    proof = STORE.sign_proof(data, **session)
    for signature in (OTHER.sign_order(data), KEY.sign_order(data + b" "), KEY.sign_proof(**session)):  # fmt: skip
        answer = store.ask(frames.Grant(7, data, KEY.public_key, signature, proof))
        assert answer == "the signature of the order is not valid"
    assert not store.session.granted
    assert "not proven" in store.ask(frames.Join(1, "orders", [KEY.key_id], STREAM))


@pytest.mark.parametrize(("revision", "issued_us"), [(0, 1), (7, 1), (7, 1 << 62)])
def test_a_relay_is_shown_orders_of_any_revision_and_time_for_their_own_key_alone(
    revision: int, issued_us: int
) -> None:
    store = party()
    assert store.grant(order(revision=revision, issued_us=issued_us)) == ""
    assert store.ask(frames.Join(1, "orders", [KEY.key_id], STREAM)) == ""
    assert "not proven" in store.ask(frames.Join(1, "orders", [OTHER.key_id], STREAM))


def test_an_order_of_a_cluster_lets_its_store_take_pushes_and_broadcasts_and_nothing_else() -> None:
    store = party()
    assert store.grant(order(definition=Definition("bills", cluster="billing"))) == ""
    assert store.ask(frames.Join(1, "billing", [KEY.key_id], SHARE)) == ""
    for kind in (Kind.REQUEST, Kind.SURVEY, Kind.TUNNEL_OPEN):
        served = {**SHARE, int(kind): Serving(1, 1)}
        assert "not proven" in store.ask(frames.Join(1, "billing", [KEY.key_id], served))


@pytest.mark.parametrize(
    "body",
    [
        frames.Join(1, "invoices", [KEY.key_id], STREAM),
        frames.Join(1, "orders", [OTHER.key_id], STREAM),
        frames.Join(1, "orders", [KEY.key_id], SHARE),
        frames.Join(1, "orders", [KEY.key_id, OTHER.key_id], STREAM),
        frames.Subscribe(1, "orders.eu", [KEY.key_id]),
        frames.Subscribe(1, ">", [KEY.key_id]),
        frames.Subscribe(1, "orders.>", [OTHER.key_id]),
        frames.Subscribe(1, "orders.>", [KEY.key_id, OTHER.key_id]),
    ],
    ids=repr,
)
def test_an_order_lets_its_store_do_nothing_that_it_does_not_name(body: frames.Control) -> None:
    store = party()
    assert store.grant(order()) == ""
    assert "not proven" in store.ask(body)


@pytest.mark.parametrize("kind", [kind for kind in DECLARED_KINDS if kind != Kind.STREAM_REPLY])
def test_a_store_sends_nothing_under_a_key_that_it_was_granted(kind: Kind) -> None:
    store = party()
    assert store.grant(order()) == ""
    with pytest.raises(PeerProtocolError):
        store.say(frames.Declare(0, kind, "orders", KEY.key_id, bytes(16)))


def test_an_order_is_worth_nothing_to_another_store() -> None:
    thief = party()
    assert "proof" in thief.grant(order(), store=StoreKey(b"t" * 32))


def test_the_proof_of_one_session_is_worth_nothing_in_another() -> None:
    router = Router(bytes(16), entropy=lambda n: b"e" * n, message_limit=1 << 20)
    one, two = party(router=router), party(router=router)
    data = streams.encode(order())
    proof = STORE.sign_proof(
        data,
        relay_id=one.welcome.relay_id,
        session_id=one.welcome.session_id,
        challenge=one.welcome.challenge,
    )
    assert "proof" in two.grant(order(), proof=proof)
    assert one.grant(order(), proof=proof) == ""


@pytest.mark.parametrize(
    "changed", [{"key_id": OTHER.key_id}, {"action": "end"}], ids=["another key's id", "to end it"]
)
def test_an_order_that_is_none_to_keep_a_stream_of_the_signing_key_is_refused(
    changed: dict[str, Any],
) -> None:
    assert "another key" in party().grant(order(**changed))


def test_an_order_that_another_key_signed_is_refused() -> None:
    assert "another key" in party().grant(order(), key=OTHER)


def test_only_a_session_of_the_relays_own_user_may_be_a_store() -> None:
    stranger = party(ours=False)
    assert "own user" in stranger.grant(order())
    assert "own user" in stranger.ask(frames.Join(1, STORES, [NO_KEY], STREAM))


def test_under_no_key_streams_alone_are_served() -> None:
    store = party()
    assert store.ask(frames.Join(1, STORES, [NO_KEY], STREAM)) == ""
    assert "without a key" in store.ask(frames.Join(1, STORES, [NO_KEY], SHARE))
    assert "not proven" in store.ask(frames.Subscribe(1, "a", [NO_KEY]))


def test_calls_of_stores_need_no_key_and_calls_of_streams_do() -> None:
    caller = party(ours=False)
    caller.say(frames.Declare(0, Kind.STREAM, STORES, NO_KEY, bytes(16)))
    with pytest.raises(PeerProtocolError, match="not proven"):
        caller.say(frames.Declare(1, Kind.STREAM, "orders", KEY.key_id, bytes(16)))
    with pytest.raises(PeerProtocolError, match="not proven"):
        caller.say(frames.Declare(1, Kind.REQUEST, STORES, NO_KEY, bytes(16)))


def test_holders_of_a_stream_are_told_apart_from_members() -> None:
    store = party()
    assert store.grant(order()) == ""
    assert store.ask(frames.Join(1, "orders", [KEY.key_id], STREAM, UUID.hex())) == ""
    holder = party(router=store.router)
    proof = KEY.sign_proof(
        relay_id=holder.welcome.relay_id,
        session_id=holder.welcome.session_id,
        challenge=holder.welcome.challenge,
    )
    holder.say(frames.Prove(0, KEY.public_key, proof))
    holder.say(frames.Members(3, "orders", [KEY.key_id]))
    members = holder.wire.received[-1]
    holder.say(frames.Members(4, "orders", [KEY.key_id], streams=True))
    holders = holder.wire.received[-1]
    assert isinstance(members, frames.Membership)
    assert isinstance(holders, frames.Membership)
    assert members.joined == []
    assert [info.tag for info in holders.joined] == [UUID.hex()]


def test_a_session_without_the_key_does_not_learn_who_holds_a_stream() -> None:
    with pytest.raises(PeerProtocolError, match="not proven"):
        party().say(frames.Members(4, "orders", [KEY.key_id], streams=True))
