"""A relay declares keys and addresses that are not ours: their frames are dropped and counted, others delivered."""

from __future__ import annotations

import pytest
from protocol.kit import KEY, OTHER_KEY, Host, Network, control_of, kind_of

from iris.core.conversation import State
from iris.core.session import NOT_OURS
from iris.errors import ConnectionLost
from iris.wire import frames
from iris.wire.codec import END, HOP, encode_control
from iris.wire.kinds import FLAG_REFUSED, Kind, Refusal

SENDER = b"\x66" * 16
ALIAS = 4000


def receive(host: Host, kind: int, hop: int = 0, key_id: bytes = OTHER_KEY.key_id, count: int = 1) -> None:  # fmt: skip
    """Let the relay declare an alias under a key, and send a frame of it."""
    declared = frames.Declare(ALIAS, kind, "db", key_id, SENDER)
    host.session.turn(host.net.now_us, host.mono_us)
    host.receive(encode_control(declared))
    body = bytes(40)
    host.receive(HOP.pack(46 + len(body), kind, 0, ALIAS, hop, 0) + END.pack(0, 0, count, 0) + body)


@pytest.mark.parametrize(
    "kind",
    [Kind.PUBLISH, Kind.BROADCAST, Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.REPLY, Kind.FAULT, Kind.ANSWER],
)  # fmt: skip
def test_a_frame_under_a_strange_key_is_dropped_and_the_session_goes_on(kind: int) -> None:
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    service = bob.serve("db", lambda delivery: delivery.reply(b"pong", None, False))
    near = alice.open_tunnel("db")
    net.run()
    casts = kind in (Kind.PUBLISH, Kind.BROADCAST)
    receive(alice, kind, hop=77, count=3 if casts else 1)
    alice.session.flush()
    assert alice.session.state is State.UP
    assert alice.session.dropped[NOT_OURS] == (3 if casts else 1)
    if kind in (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN):
        _, back, flags, _, hop, _ = HOP.unpack_from(alice.session.out.chunks.pop())
        assert (back, hop, flags) == (kind, 77, FLAG_REFUSED | Refusal.UNREADABLE << 4)
    assert not alice.session.out.chunks
    near.write(memoryview(b"hello"), 0)
    answer = alice.request("db", b"ping")
    net.run()
    assert answer.value == b"pong"
    assert service.tunnels[0].next_chunk() == (3, b"hello")


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.FAULT, Kind.ANSWER])
@pytest.mark.parametrize("key_id", [OTHER_KEY.key_id, KEY.key_id])
def test_an_answer_under_another_key_ends_its_request_alone(kind: int, key_id: bytes) -> None:
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    bob.serve("db", lambda delivery: None)
    one, other = alice.request("db"), alice.request("db")
    net.run()
    first = min(alice.session.requests._pending)
    receive(alice, kind, hop=first, key_id=key_id)
    assert isinstance(one.error, ConnectionLost)
    assert one.error.may_have_run
    assert not other.done()
    assert alice.session.state is State.UP


def test_in_a_survey_the_answers_of_others_count() -> None:
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    service = bob.serve("db")
    answers = alice.survey("db")
    net.run()
    receive(alice, Kind.ANSWER, hop=min(alice.session.requests._pending))
    assert answers.end is None
    service.deliveries[0].reply(b"here", None, False)
    net.run()
    assert answers.payloads == [b"here"]
    assert answers.end == ([], None)
    net.check()


def test_an_alias_that_came_before_its_key_opens_with_it() -> None:
    net = Network()
    alice = net.host("alice")
    bob = net.host("bob", keys=(KEY, OTHER_KEY))
    bob.key = OTHER_KEY
    bob.subscribe("news")
    alice.key = OTHER_KEY
    alice.session.out.prove(OTHER_KEY)
    del bob.keys[OTHER_KEY.key_id]
    alice.publish("news", b"one")
    net.run()
    assert bob.session.dropped == {NOT_OURS: 1}
    bob.keys[OTHER_KEY.key_id] = OTHER_KEY
    alice.publish("news", b"two")
    net.run()
    assert bob.inboxes[0].payloads == [b"two"]


def test_an_alias_declared_again_means_its_last_declaration() -> None:
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    inbox = bob.subscribe("news")
    said = []

    def tamper(host: Host, data: bytes) -> list[bytes]:
        if kind_of(data) != Kind.DECLARE:
            return [data]
        said.append(data)
        other = frames.Declare(control_of(data).alias, Kind.PUBLISH, "x", OTHER_KEY.key_id, SENDER)
        return [data, encode_control(other)]

    net.tamper = tamper
    alice.publish("news", b"lost")
    net.run()
    assert bob.session.dropped == {NOT_OURS: 1}
    assert not inbox.messages
    bob.receive(said[0])
    alice.publish("news", b"came")
    net.run()
    assert inbox.payloads == [b"came"]
    assert bob.session.dropped == {NOT_OURS: 1}


def test_a_stores_answer_belongs_to_its_hop_id_under_any_key() -> None:
    net = Network()
    alice = net.host("alice")
    receive(alice, Kind.STREAM_REPLY, hop=3)
    assert alice.session.dropped == {"late answers": 1}


@pytest.mark.parametrize("kind", [Kind.TUNNEL_DATA, Kind.HELLO, 0x7F])
def test_an_alias_for_a_kind_without_aliases_ends_the_session(kind: int) -> None:
    net = Network()
    alice = net.host("alice")
    with pytest.raises(Exception, match="cannot be declared for frame kind"):
        alice.receive(encode_control(frames.Declare(1, kind, "db", OTHER_KEY.key_id, SENDER)))
