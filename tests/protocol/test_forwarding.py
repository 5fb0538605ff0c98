"""False frames from other relays and sites, and what a relay forwards: only the sender of false frames may lose."""

from __future__ import annotations

from typing import Any

import pytest
from protocol.kit import FRESHNESS_US, KEY, OTHER_KEY, Host, LinkEnd, Network, control_of, kind_of
from protocol.test_sites import Sites

from iris.core.conversation import State
from iris.core.guard import MAX_REPORTED, Guard
from iris.errors import ConnectionLost
from iris.wire import codec, frames
from iris.wire.codec import END, HOP, TUNNEL_BODY_AT, encode_control, tunnel_frame
from iris.wire.kinds import HopClass, Kind
from relay.core import overdue
from relay.core import surveys as surveys_module
from relay.core.limits import Limits
from relay.core.tunnels import MAX_RECORD_FRAME

SENDER = b"\x55" * 16
OURS, STRANGE = KEY.key_id, OTHER_KEY.key_id
MISFITS = [
    (Kind.REQUEST, Kind.REPLY, "db", STRANGE),
    (Kind.REQUEST, Kind.REPLY, "other", OURS),
    (Kind.REQUEST, Kind.FAULT, "db", STRANGE),
    (Kind.REQUEST, Kind.ANSWER, "db", OURS),
    (Kind.REQUEST, Kind.STREAM_REPLY, "db", OURS),
    (Kind.SURVEY, Kind.ANSWER, "db", STRANGE),
    (Kind.SURVEY, Kind.REPLY, "db", OURS),
    (Kind.SURVEY, Kind.FAULT, "other", OURS),
    (Kind.PUSH, Kind.REPLY, "db", OURS),
    (Kind.TUNNEL_OPEN, Kind.FAULT, "db", OURS),
]


def ask(host: Host, kind: int) -> Any:
    """Send a message of a kind to `db`."""
    if kind == Kind.REQUEST:
        return host.request("db")
    if kind == Kind.SURVEY:
        return host.survey("db")
    return host.push("db") if kind == Kind.PUSH else host.open_tunnel("db")


def answer(end: LinkEnd, kind: int, name: str, key_id: bytes, hop_class: int, site: str = "") -> None:  # fmt: skip
    """Let the other end of a connection answer all calls dispatched to it."""
    declared = frames.Declare(900, kind, name, key_id, SENDER, True, [], 0, hop_class, site)
    hops = list(end.link.in_flight)
    for data in (encode_control(declared), *(misfit(kind, hop) for hop in hops)):
        view = memoryview(bytearray(data))
        end._frame(view, 0, len(view))


def misfit(kind: int, hop: int) -> bytes:
    return HOP.pack(86, kind, 0, 900, hop, 0) + END.pack(0, 0, 1, 0) + bytes(40)


@pytest.mark.parametrize(("asked", "kind", "name", "key_id"), MISFITS)
def test_an_answer_over_a_link_that_is_of_another_address_or_kind_is_dropped(
    asked: int, kind: int, name: str, key_id: bytes
) -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db", lambda delivery: None)
    waiting = ask(alice, asked)
    net.run()
    answer(here, kind, name, key_id, HopClass.MESH)
    net.run()
    assert not here.why
    assert not there.why
    assert not alice.ended_because
    assert alice.session.state is State.UP
    assert net.router.accounts.dropped == {"misdirected answer": 1}
    assert net.router.accounts.balance() == 0
    if asked == Kind.REQUEST:
        assert isinstance(waiting.error, ConnectionLost)
        assert waiting.error.may_have_run
        service.deliveries[0].reply(b"late", None, False)
        net.run()
        net.check()
    elif asked == Kind.SURVEY:
        assert waiting.end is None
        service.deliveries[0].reply(b"here", None, False)
        net.run()
        assert waiting.payloads == [b"here"]
        net.check()
    elif asked == Kind.PUSH:
        service.deliveries[0].finish()
        bob.session.flush()
        net.run()
        net.check()


@pytest.mark.parametrize(("asked", "kind", "name", "key_id"), MISFITS[:-2])
def test_an_answer_of_a_site_that_is_of_another_address_or_kind_stops_at_the_gateway(
    asked: int, kind: int, name: str, key_id: bytes
) -> None:
    net = Sites("ams", "ams", "ber")
    link = net.ends[:2]
    ours, theirs = net.connect(0, 2)
    alice, bob = net.host("alice", relay=1), net.host("bob", relay=2)
    bob.serve("db", lambda delivery: None)
    net.settle()
    waiting = ask(alice, asked)
    net.settle()
    answer(ours, kind, name, key_id, HopClass.TO_WAN, "ams")
    net.settle()
    assert alice.session.state is State.UP
    assert not any(end.why for end in (*link, ours, theirs))
    assert net.routers[0].accounts.dropped == {"misdirected answer": 1}
    assert not net.routers[1].accounts.dropped
    if asked == Kind.REQUEST:
        assert isinstance(waiting.error, ConnectionLost)
        assert waiting.error.may_have_run
    bob.lose()
    net.settle()
    net.check()


def test_credit_for_a_call_that_was_given_up_ends_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site finishes no calls: the caller's relay forgets them, and the gateway may still receive their ends."""
    monkeypatch.setattr(overdue, "LATE_US", 0)
    net = Sites("ams", "ams", "ber")
    for router in net.routers:
        router._calls._limits = Limits(pending=1)
    link = net.ends[:2]
    wans = net.connect(0, 2)
    alice, bob = net.host("alice", relay=1), net.host("bob", relay=2)
    service = bob.serve("db", lambda delivery: None)
    net.settle()
    alice.push("db", b"first")
    net.settle()
    net.pass_time(5)
    alice.push("db", b"second")
    net.settle()
    service.deliveries[0].finish()
    bob.session.flush()
    net.settle()
    assert not any(end.why for end in (*link, *wans))


def test_credit_for_a_message_that_is_not_a_push_ends_its_sender() -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", lambda delivery: None)
    alice.request("db")
    net.run()
    (hop,) = here.link.in_flight
    credit = encode_control(frames.Credit(0, Kind.PUSH, [hop]))
    here._frame(memoryview(bytearray(credit)), 0, len(credit))
    assert "a call that is not a push" in here.why


# -- lists and losses of another site ------------------------------------------------------------------------------


LONG = [f"{number:064}" for number in range(60)]


@pytest.mark.parametrize("relay", [0, 1])
def test_sites_that_name_more_than_a_frame_holds_end_no_link_and_no_session(
    relay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Sites("ams", "ams", "ber", "cph")
    link = net.ends[:2]
    wans = [net.connect(0, 2)[0], net.connect(0, 3)[0]]
    hosts = [net.host("bob", relay=2), net.host("carol", relay=3)]
    for host in hosts:
        host.serve("db", lambda delivery: None)
    net.settle()
    alice = net.host("alice", relay=relay)
    answers = alice.survey("db")
    net.settle()
    for module in (codec, surveys_module):
        monkeypatch.setattr(module, "MAX_REPORT_BYTES", 4_100)
    for wan in wans:
        (hop,) = wan.link.in_flight
        wan.receive(frames.Roster(hop, LONG), frames.Done(hop, LONG))
        assert not wan.why
    net.settle()
    assert not any(end.why for end in link)
    assert alice.session.state is State.UP
    assert answers.end is not None
    assert answers.end[0]
    assert set(answers.roster_ids) >= set(LONG)


def test_a_loss_that_names_many_groups_ends_no_link() -> None:
    """The frame has the largest size, and grows when its default fields are added."""
    net = Sites("ams", "ams", "ber")
    link = net.ends[:2]
    ours, _ = net.connect(0, 2)
    bob = net.host("bob", relay=1)
    plain, grouped = bob.subscribe("news"), bob.subscribe("news", group="g")
    net.settle()
    fields: dict[str, Any] = {
        "kind": Kind.PUBLISH, "name": "news", "key_id": OURS, "sender_id": SENDER, "first": 0, "count": 1, "cause": "",
        "groups": ["g"], "site": "ams",
    }  # fmt: skip
    while True:
        body = codec._ENCODE(fields)
        room = codec.MAX_CONTROL_BYTES - len(body)
        if room < 300:
            fields["cause"] = "c" * (room - (1 if room < 257 else 2))
            body = codec._ENCODE(fields)
            break
        fields["groups"].append(f"{len(fields['groups']):0255}")
    assert len(body) == codec.MAX_CONTROL_BYTES
    assert ours.receive_frame((2 + len(body)).to_bytes(4, "little") + bytes((Kind.GAP, 0)) + body) == ""  # fmt: skip
    net.settle()
    assert not any(end.why for end in link)
    assert [gap.count for gap in plain.gaps] == [None]
    assert [gap.count for gap in grouped.gaps] == [None]


# -- records of tunnels --------------------------------------------------------------------------------------------


def test_a_record_that_is_too_long_ends_its_sender() -> None:
    """Otherwise the next relay would refuse the frame and end the link."""
    net = Network(relays=2)
    here, there = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db")
    near = alice.open_tunnel("db")
    net.run()
    longest = MAX_RECORD_FRAME - TUNNEL_BODY_AT
    alice.say(tunnel_frame(Kind.TUNNEL_DATA, near.hop, bytes(longest)))
    assert not alice.ended_because
    alice.say(tunnel_frame(Kind.TUNNEL_DATA, near.hop, bytes(longest + 1)))
    assert f"tunnel record of {longest + 1} bytes" in alice.ended_because
    assert not here.why
    assert not there.why


def test_a_relay_that_forwards_a_long_record_is_ended() -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db")
    near = alice.open_tunnel("db")
    net.run()
    long = MAX_RECORD_FRAME - TUNNEL_BODY_AT + 1

    def lengthen(data: bytes) -> list[bytes]:
        if kind_of(data) != Kind.TUNNEL_DATA:
            return [data]
        return [tunnel_frame(Kind.TUNNEL_DATA, HOP.unpack_from(data)[4], bytes(long))]

    here.tamper = lengthen
    near.write(memoryview(b"x"), 0)
    net.run()
    assert f"tunnel record of {long} bytes" in there.why


# -- words about others' senders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("over_a_link", [False, True])
@pytest.mark.parametrize("group", ["", "g"])
def test_a_loss_that_a_relay_makes_up_hides_no_message(over_a_link: bool, group: str) -> None:
    """The GAP names a sender of another relay, and a sequence that never arrives."""
    net = Network(relays=2)
    _, there = net.link(0, 1)
    alice, bob = net.host("alice", relay=1), net.host("bob", relay=1)
    inbox = bob.subscribe("news", group=group)
    said: list[frames.Declare] = []

    def listen(host: Host, data: bytes) -> list[bytes]:
        said.extend([control_of(data)] if kind_of(data) == Kind.DECLARE else [])
        return [data]

    net.tamper = listen
    alice.publish("news", b"0")
    net.run()
    address = (Kind.PUBLISH, "news", OURS, said[0].sender_id)
    delivery = (not group, [group] if group else [])
    gap = encode_control(frames.Gap(*address, 1 << 62, 5, "made up", *delivery))
    if over_a_link:
        there._frame(memoryview(bytearray(gap)), 0, len(gap))
    else:
        bob.receive(gap)
    net.run()
    assert inbox.gaps
    gaps_before = len(inbox.gaps)
    for number in range(1, 4):
        alice.publish("news", b"%d" % number)
    net.run()
    assert inbox.payloads == [b"0", b"1", b"2", b"3"]
    assert len(inbox.gaps) == gaps_before
    assert not bob.session.dropped.get("late or repeated")


def test_losses_of_senders_that_a_relay_makes_up_take_no_senders_place() -> None:
    net = Network()
    guard = Guard(FRESHNESS_US, max_sequences=4)
    alice, bob = net.host("alice"), net.host("bob", guard=guard)
    inbox = bob.subscribe("news")
    for number in range(MAX_REPORTED + 10):
        gap = frames.Gap(Kind.PUBLISH, "news", OURS, number.to_bytes(16), 3, 2, "made up")
        bob.receive(encode_control(gap))
    alice.publish("news", b"text")
    net.run()
    assert inbox.payloads == [b"text"]
    assert guard.refused_senders == 0
    assert len(guard._reported) == MAX_REPORTED
