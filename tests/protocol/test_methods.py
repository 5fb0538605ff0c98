"""Calls that name a method: they reach the handler of that name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from protocol.kit import KEY, Answers, Host, Network, kind_of

from iris.core.bundle import encode_single
from iris.wire import frames
from iris.wire.kinds import Kind


def pair(net: Network) -> tuple[Host, Host]:
    return net.host("caller"), net.host("member")


def test_calls_of_every_kind_name_their_method_under_the_seal(net: Network) -> None:
    caller, member = pair(net)
    seen: list[bytes] = []
    net.tamper = lambda _, frame: (seen.append(frame), (frame,))[1]
    service = member.serve("db", lambda delivery: delivery.finish() if delivery.flow.kind == Kind.PUSH else delivery.reply(b"", None, False))  # fmt: skip
    answer = caller.request("db", b"1", method="place")
    several = [caller.request("db", name.encode(), method=name) for name in "ab"]
    caller.push("db", b"2", method="note")
    answers = Answers()
    caller.send("db", b"3", survey=answers, method="ask")
    plain = caller.request("db", b"4")
    net.run()
    assert sorted(service.methods) == ["a", "ask", "b", "note", "place"]
    assert [each.value for each in (answer, *several, plain)] == [b""] * 4
    assert answers.payloads == [b""]
    named = {d.message.payload: d.message.method for d in service.deliveries}
    assert named[b"1"] == "place"
    assert named[b"4"] == ""
    assert not any(name in frame for frame in seen for name in (b"place", b"note"))


def test_an_answer_that_names_a_method_is_unreadable(net: Network, monkeypatch: Any) -> None:
    caller, member = pair(net)
    member.serve("db", lambda delivery: delivery.reply(b"odd", None, False))
    monkeypatch.setattr(
        "iris.core.outbound.encode_single",
        lambda payload, headers, packed, method="": encode_single(
            payload, headers, packed, "place" if payload == b"odd" else method
        ),
    )
    answer = caller.request("db", b"1")
    net.run()
    assert "an answer names a method" in str(answer.error)


# -- how many methods a member has -----------------------------------------------------------------------------


def members(host: Host, *, watch: bool = False) -> list[frames.Membership]:
    """Ask for the members of "db", and return the list of answers, which grows with a watch."""
    answers: list[frames.Membership] = []
    host.session.out.prove(KEY)
    host.session.watch("db", [KEY.key_id], answers.append, stay=watch)
    host.net.run()
    return answers


def counts(answers: list[frames.Membership]) -> list[int]:
    return [info.methods for answer in answers for info in answer.joined]


@pytest.mark.parametrize("before", [True, False])
def test_members_show_how_many_methods_they_have_here_and_at_other_relays(before: bool) -> None:
    net = Network(relays=2)
    if not before:
        net.link(0, 1)
    for relay, methods in ((0, 3), (1, 2), (1, 0)):
        net.host(relay=relay).serve("db", methods=methods)
    if before:
        net.link(0, 1)
    asker = net.host()
    assert counts(members(asker)) == [3, 2, 0]
    watching = members(asker, watch=True)
    net.host(relay=0).serve("db", methods=4)
    net.host(relay=1).serve("db", methods=5)
    assert counts(watching) == [3, 2, 0, 4, 5]


def test_a_link_is_sent_entries_with_the_number_of_methods() -> None:
    """In the snapshot of a new link, in changes, and in the snapshot that a lost change needs."""
    net = Network(relays=3)
    net.link(0, 2)
    net.host().serve("db", methods=3)
    here, _ = ends = net.link(0, 1)
    entries: list[Any] = []

    def look(frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.INTEREST:
            entries.extend(msgspec.msgpack.decode(frame[6:])["joined"])
        return [frame]

    here.tamper = look
    net.host().serve("db", methods=4)
    net.router.advertiser.on_resync(here.link, None)
    net.run()
    assert sorted(entry[-1] for entry in entries) == [3, 4, 4]
    assert counts(members(net.host(relay=1))) == [3, 4]
    assert counts(members(net.host(relay=2))) == [3, 4]
    assert [end.why for end in ends] == ["", ""]
