"""Calls that name a method: they reach the handler of that name, and members of earlier versions refuse them."""

from __future__ import annotations

from typing import Any

import pytest
from protocol.kit import Answers, Host, Network

import iris.core.session
from iris.core.bundle import Headers, decode_bundle, encode_single
from iris.errors import DecodeError, RelayError
from iris.wire.kinds import Kind


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

    monkeypatch.setattr(iris.core.session, "decode_single", decode_single)


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
    (lost,) = caller.losses
    assert isinstance(lost.error, RelayError)
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
