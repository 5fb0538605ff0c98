"""A proof of a key is valid only in its session, at its relay and for its key. No session can use the id of another
sender.
"""

from __future__ import annotations

import re

import pytest
from protocol.kit import KEY, OTHER_KEY, Host, Network, Result, control_of

from iris.errors import LocalProtocolError
from iris.wire import frames
from iris.wire.codec import END, HOP, encode_control
from iris.wire.kinds import Kind


def proof_of(host: Host) -> bytes:
    """Return the PROVE frame that this host would send."""
    return encode_control(
        frames.Prove(
            0,
            KEY.public_key,
            KEY.sign_proof(
                relay_id=host.session.relay_id,
                session_id=host.peer.session_id,
                challenge=host.peer.challenge,
            ),
        )
    )


def test_a_proof_holds_in_its_own_session(net: Network) -> None:
    host = net.host()
    host.say(proof_of(host))
    assert host.peer.proven == {KEY.key_id}


def test_a_proof_relayed_from_another_session_is_refused(net: Network) -> None:
    honest, thief = net.host(), net.host()
    thief.say(proof_of(honest))
    assert "proof" in thief.ended_because
    assert thief.peer.closed
    assert not thief.peer.proven


def test_a_proof_relayed_from_another_relay_is_refused(net: Network) -> None:
    elsewhere = Network(relay_seed=1)
    honest, thief = elsewhere.host(), net.host()
    thief.peer.challenge = honest.peer.challenge  # even if the challenges were made equal
    thief.say(proof_of(honest))
    assert "proof" in thief.ended_because


def test_a_proof_under_another_public_key_is_refused(net: Network) -> None:
    host = net.host()
    body = control_of(proof_of(host))
    host.say(encode_control(frames.Prove(0, OTHER_KEY.public_key, body.signature)))
    assert "proof" in host.ended_because


def test_an_alias_under_a_key_that_was_not_proven_is_refused(net: Network) -> None:
    host = net.host()
    host.say(encode_control(frames.Declare(0, Kind.PUBLISH, "a", KEY.key_id, bytes(16))))
    assert f"{KEY.key_id.hex()[:8]}, which this session has not proven" in host.ended_because


@pytest.mark.parametrize("what", ["join", "subscribe"])
def test_joining_or_subscribing_under_a_key_that_was_not_proven_is_refused(
    net: Network, what: str
) -> None:
    host = net.host()
    host.session.out.prove(KEY)
    ack = Result()
    ids = [KEY.key_id, OTHER_KEY.key_id]
    kinds = {int(Kind.REQUEST): frames.Serving(1, 1)}
    host.session.ask(
        lambda number: (
            frames.Join(number, "db", ids, kinds)
            if what == "join"
            else frames.Subscribe(number, "a.>", ids)
        ),
        ack,
    )
    net.run()
    assert f"has not proven key {OTHER_KEY.key_id.hex()[:8]}" in ack.message.error
    assert not host.peer.members
    assert not host.peer.subscriptions


def test_asking_for_members_under_a_key_that_was_not_proven_ends_the_session(net: Network) -> None:
    host = net.host()
    host.say(encode_control(frames.Members(1, "db", [KEY.key_id])))
    assert "not proven" in host.ended_because


@pytest.mark.parametrize(
    "data",
    [
        encode_control(frames.Ping(1)),
        HOP.pack(46, Kind.PUBLISH, 0, 0, 0, 0) + bytes(24),
        b"\x03\0\0\0\xff\0\x80",
    ],
    ids=["control", "data", "unknown kind"],
)
def test_before_hello_nothing_is_accepted(net: Network, data: bytes) -> None:
    host = net.host()
    fresh = net.router.session_up(host.port)
    host.peer, old = fresh, host.peer
    host.say(data)
    assert host.ended_because
    assert fresh.closed
    host.peer = old


@pytest.mark.parametrize(
    "kind", [Kind.REQUEST, Kind.PUBLISH, Kind.REPLY, Kind.SURVEY, Kind.TUNNEL_OPEN]
)
def test_a_frame_of_an_undeclared_alias_is_the_senders_error(net: Network, kind: Kind) -> None:
    host = net.host()
    host.say(HOP.pack(46, kind, 0, 77, 1, 0) + END.pack(0, 0, 1, 0))
    assert "alias 77 was not declared" in host.ended_because


@pytest.mark.parametrize("kind", [k for k in Kind if k >= 0x40])
def test_a_data_frame_cut_short_is_the_senders_error(net: Network, kind: Kind) -> None:
    host = net.host()
    host.say(b"\x08\0\0\0" + bytes((kind, 0)) + bytes(6))
    assert re.search("cut short|shorter than", host.ended_because)


def test_an_answer_to_what_a_session_was_not_handed_is_dropped(net: Network) -> None:
    caller, member, thief = net.host(), net.host(), net.host()
    service = member.serve("db")
    answer = caller.request("db")
    net.run()
    hop = service.deliveries[0].hop
    thief.session.out.single(
        thief.session.out.flow(Kind.REPLY, "db", KEY), b"forged", None, False, hop, 0, 0
    )
    net.run()
    assert not answer.done()
    assert net.router.accounts.dropped == {"late answer": 1}
    service.deliveries[0].reply(b"real", None, False)
    net.run()
    assert answer.value == b"real"


def test_every_session_draws_new_sender_ids(net: Network) -> None:
    receiver = net.host()
    inbox = receiver.subscribe("a")
    first = net.host()
    first.publish("a", b"1")
    net.run()
    first.lose()
    second = net.host(guard=first.guard)
    second.publish("a", b"2")
    net.run()
    assert inbox.payloads == [b"1", b"2"]
    assert len({message.source for message in inbox.messages}) == 2
    assert not inbox.gaps


def test_a_poisoned_session_seals_no_more(net: Network) -> None:
    sender, member = net.host(), net.host()
    member.serve("db")
    sender.publish("a", b"1")
    tunnel = sender.open_tunnel("db")
    net.run()
    sender.session.out.poison()
    tunnel.poison()
    with pytest.raises(LocalProtocolError, match="forked"):
        sender.publish("a", b"2")
    tunnel.write(memoryview(b"x"), 0)
    framed = list(sender.session.out.chunks)
    tunnel.flush()
    assert sender.session.out.chunks == framed
    assert tunnel._send is not None
    with pytest.raises(LocalProtocolError, match="forked"):
        tunnel._send.encrypt(b"x")
    sender.lose()
