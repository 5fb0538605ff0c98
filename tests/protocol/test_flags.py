"""Every flag of every data frame in every direction: its allowed senders, what a relay forwards, what it closes."""

from __future__ import annotations

import pytest
from protocol.kit import KEY, LinkEnd, Network, kind_of

from iris.wire import frames
from iris.wire.codec import END, FLAGS_AT, HOP, encode_control
from iris.wire.kinds import (
    FLAG_MORE,
    FLAG_REFUSED,
    TUNNEL_KINDS,
    HopClass,
    Kind,
    Refusal,
)
from relay.core.link import LINK_HOP

CALLS = (Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.TUNNEL_OPEN, Kind.STREAM)
ANSWERS = (Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY)
CASTS = (Kind.PUBLISH, Kind.BROADCAST)
EVERY = (*CALLS, *ANSWERS, *CASTS, *TUNNEL_KINDS)
SENDER = b"\x77" * 16
FOREIGN = [FLAG_MORE, 0x04, 0x08, 0x10, 0x80, 0xF0, 0xFF]
"""Flags that a session may not send in any frame."""
BAD_REASONS = [
    FLAG_REFUSED | reason << 4 for reason in range(16) if reason not in {int(r) for r in Refusal}
]


def frame(kind: int, flags: int, *, hop: int = 5, body: bytes = b"body and offsets") -> bytes:
    """Return a data frame of alias 9."""
    end = b"" if kind in TUNNEL_KINDS else END.pack(0, 0, 1, 0)
    if kind == Kind.TUNNEL_END:
        body = body[:1]
    alias = 0 if kind in TUNNEL_KINDS else 9
    size = HOP.size - 4 + len(end) + len(body)
    return HOP.pack(size, kind, flags, alias, hop, 0) + end + body


def declared(kind: int, hop_class: int = 0, site: str = "") -> bytes:
    if kind in TUNNEL_KINDS:
        return b""
    declare = frames.Declare(
        9, kind, "db", KEY.key_id, SENDER, True, [], 0, hop_class=hop_class, site=site
    )
    return encode_control(declare)


# -- from sessions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *((kind, flags) for flags in FOREIGN for kind in EVERY),
        *((kind, FLAG_REFUSED | Refusal.FULL << 4) for kind in EVERY if kind not in CALLS),
        *((kind, flags) for kind in CALLS for flags in BAD_REASONS),
        *((kind, FLAG_REFUSED | Refusal.FULL << 4 | 0x04) for kind in CALLS),
        *((kind, FLAG_REFUSED | Refusal.FULL << 4 | FLAG_MORE) for kind in CALLS),
    ],
)
def test_a_session_that_sets_flags_of_a_relay_is_ended(kind: int, flags: int) -> None:
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    bob.serve("db")
    inbox = bob.subscribe("db")
    alice.session.out.prove(KEY)
    net.run()
    alice.say(declared(kind) + frame(kind, flags))
    net.run()
    assert f"flags 0x{flags:02x}" in alice.ended_because
    assert not bob.ended_because
    assert not inbox.messages
    net.check()


@pytest.mark.parametrize("kind", [*CALLS, *CASTS])
def test_frames_that_the_relay_forwards_have_no_flags(kind: int) -> None:
    net = Network(relays=2)
    net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    service.refusal = Refusal.FULL
    bob.subscribe("db")
    seen = []

    def look(host: object, data: bytes) -> list[bytes]:
        if kind_of(data) >= Kind.REQUEST:
            seen.append(data[FLAGS_AT])
        return [data]

    net.tamper = look
    alice.session.out.prove(KEY)
    net.run()
    alice.say(declared(kind) + frame(kind, 0))
    net.run()
    assert set(seen) <= {0}
    assert seen or kind == Kind.STREAM
    net.check()


# -- from other relays -------------------------------------------------------------------------------------------


def pair() -> tuple[Network, LinkEnd]:
    """Return two relays, and the link's end at the second, to which tests send frames."""
    net = Network(relays=2)
    _, there = net.link(0, 1)
    return net, there


def send(there: LinkEnd, data: bytes) -> None:
    there.router.now_us += 1
    view = memoryview(bytearray(data))
    if data:
        there._frame(view, 0, len(view))


@pytest.mark.parametrize("flags", [0x04, 0x08, 0x10, 0xF0, FLAG_REFUSED | 0x10])
@pytest.mark.parametrize("kind", EVERY)
def test_a_relay_is_ended_for_wrong_flags(kind: int, flags: int) -> None:
    if kind in CALLS and flags & FLAG_REFUSED:
        return
    _, there = pair()
    send(there, declared(kind, HopClass.MESH))
    send(there, frame(kind, flags, hop=5 | (there.link.own_hop ^ LINK_HOP)))
    assert f"flags 0x{flags:02x}" in there.why
    assert there.link.closed


@pytest.mark.parametrize("flags", [*BAD_REASONS, FLAG_REFUSED | Refusal.FULL << 4 | 0x0C])
def test_a_relay_that_forwards_a_refusal_without_a_reason_is_ended(flags: int) -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db").refusal = Refusal.UNREADABLE

    def tamper(data: bytes) -> list[bytes]:
        changed = bytearray(data)
        if kind_of(data) == Kind.REQUEST:
            changed[FLAGS_AT] = flags
        return [bytes(changed)]

    here.other.tamper = tamper
    answer = alice.request("db")
    net.run()
    assert not alice.ended_because
    assert answer.error is not None
    assert "in a refused frame" in here.why
