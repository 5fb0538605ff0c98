"""Calls that name a method: they reach the handler of that name, and members of earlier versions refuse them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from protocol.kit import KEY, Answers, Host, Network, kind_of

import iris.core.serving
from iris.core.bundle import Headers, decode_bundle, encode_single
from iris.errors import DecodeError, RelayError
from iris.wire import frames
from iris.wire.kinds import Kind, Refusal


def pair(net: Network) -> tuple[Host, Host]:
    return net.host("caller"), net.host("member")


@pytest.fixture
def earlier_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members open calls as versions before minor 5 did."""

    def decode_single(plain: bytes) -> tuple[bytes, Headers | None, bool, str]:
        payloads, headers, packed = decode_bundle(plain)
        if len(payloads) != 1:
            raise DecodeError(f"a frame of this kind must carry 1 message, not {len(payloads)}")
        return payloads[0], headers[0] if headers else None, packed, ""

    monkeypatch.setattr(iris.core.serving, "decode_single", decode_single)


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


def test_a_member_of_an_earlier_version_never_runs_a_call_that_names_a_method(
    net: Network, earlier_members: None
) -> None:
    caller, member = pair(net)
    service = member.serve("db", lambda delivery: delivery.reply(b"ran", None, False))
    alone = caller.request("db", b"1", method="place")
    caller.push("db", b"2", method="place")
    answers = Answers()
    caller.send("db", b"3", survey=answers, method="place")
    net.run()
    run = [caller.request("db", b"4", method="place"), caller.request("db", b"5"), caller.request("db", b"6", method="place")]  # fmt: skip
    net.run()
    assert [d.message.payload for d in service.deliveries] == [b"5"]
    assert run[1].value == b"ran"
    for refused in (alone, run[0], run[2]):
        assert isinstance(refused.error, RelayError)
        assert not refused.error.may_have_run
        assert "or it runs a version of Iris without methods" in str(refused.error)
    (lost,) = caller.losses
    assert isinstance(lost.error, RelayError)
    assert "or it runs a version of Iris without methods" in lost.cause
    assert not lost.error.may_have_run
    assert (answers.payloads, answers.faults) == ([], {})


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


def test_a_call_without_a_method_that_is_unreadable_is_not_explained_by_one(net: Network) -> None:
    caller, member = pair(net)
    member.serve("db").refusal = Refusal.UNREADABLE
    plain, named = caller.request("db", b"1"), caller.request("db", b"1", method="place")
    net.run()
    assert str(plain.error).endswith("the member could not decrypt it")
    assert "without methods" in str(named.error)


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


def test_a_session_of_an_earlier_version_is_not_sent_the_number_of_methods() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    older = net.host()
    older.peer.minor = 4
    said: list[bytes] = []

    def look(host: Host, frame: bytes) -> list[bytes]:
        if host is older:
            said.append(frame)
        return [frame]

    net.tamper = look
    for relay in (0, 1):
        net.host(relay=relay).serve("db", methods=3)
    watching = members(older, watch=True)
    for relay in (0, 1):
        net.host(relay=relay).serve("db", methods=3)
    assert counts(watching) == [0, 0, 0, 0]
    assert not any(b"methods" in frame for frame in said)


@pytest.mark.parametrize("minor", [4, 5])
def test_a_link_of_an_earlier_version_is_sent_entries_without_methods(
    minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the snapshot of a new link, in changes, and in the snapshot that a lost change needs."""
    net = Network(relays=3)
    net.link(0, 2)  # of this version, served from the same frames
    net.host().serve("db", methods=3)
    monkeypatch.setattr(net.routers[1], "hello", hello_of(net.routers[1].hello, minor))
    here, _ = ends = net.link(0, 1)
    entries: list[Any] = []

    def look(frame: bytes) -> list[bytes]:
        if kind_of(frame) == Kind.INTEREST:
            entries.extend(msgspec.msgpack.decode(frame[6:])["joined"])
        return [frame]

    here.tamper = look
    assert here.link.minor == minor
    net.host().serve("db", methods=4)
    net.router.advertiser.on_resync(here.link, None)
    net.run()
    length = 6 if minor == 4 else 7
    assert [len(entry) for entry in entries] == [length] * 3
    assert counts(members(net.host(relay=1))) == ([0, 0] if minor == 4 else [3, 4])
    assert counts(members(net.host(relay=2))) == [3, 4]
    assert [end.why for end in ends] == ["", ""]


def hello_of(hello: Any, minor: int) -> Any:
    return lambda dial_us: msgspec.structs.replace(hello(dial_us), minor=minor)
