"""The outcome of a call or message is reported once, and the outcome of the first attempt counts."""

from __future__ import annotations

import pytest
from protocol.kit import KEY, Network, Result

from iris.errors import ConnectionLost, NoMembers, RequestTimeout
from iris.wire import frames
from iris.wire.kinds import Kind, Refusal


def test_a_repeated_request_that_finds_nobody_may_have_run_before() -> None:
    net = Network()
    caller, member = net.host(), net.host()
    member.serve("db")
    answer = caller.request("db", b"x", idempotent=True)
    net.run()
    member.lose()
    net.run()
    assert not answer.done(), "its member was there a moment ago"
    net.pass_time(1)
    assert isinstance(answer.error, NoMembers)
    assert answer.error.may_have_run
    assert str(answer.error).endswith("; an earlier attempt may have run")


def test_a_repeated_request_that_is_refused_may_have_run_before() -> None:
    net = Network()
    caller, first, second = net.host(), net.host(), net.host()
    first.serve("db")
    answer = caller.request("db", b"x", idempotent=True)
    net.run()
    second.serve("db").refusal = Refusal.FULL
    first.lose()
    net.run()
    assert answer.error is not None
    assert answer.error.may_have_run  # type: ignore[attr-defined]


def test_a_repeated_request_that_runs_out_of_time_says_so_as_before() -> None:
    net = Network()
    caller, first, second = net.host(), net.host(), net.host()
    first.serve("db")
    answer = caller.request("db", b"x", idempotent=True, timeout_ms=500)
    net.run()
    second.serve("db")
    first.lose()
    net.run()
    net.pass_time(1.0)
    assert isinstance(answer.error, (RequestTimeout, ConnectionLost))
    assert answer.error.may_have_run


def test_a_request_that_was_tried_once_and_found_nobody_did_not_run() -> None:
    net = Network()
    answer = net.host().request("db", b"x", idempotent=True)
    net.run()
    assert isinstance(answer.error, NoMembers)
    assert not answer.error.may_have_run


@pytest.mark.parametrize("relays", [1, 2])
def test_a_push_from_a_clock_too_far_off_is_reported_as_clock_skew(relays: int) -> None:
    net = Network(relays=relays)
    if relays == 2:
        net.link(0, 1)
    member, caller = net.host(), net.host(relay=relays - 1)
    service = member.serve("db")
    net.run()
    caller.clock_us = 601_000_000
    caller.push("db", b"x")
    net.run()
    assert service.deliveries == []
    (loss,) = caller.losses
    assert "clock" in str(loss.error)
    assert not loss.error.may_have_run  # type: ignore[union-attr]


def test_publications_from_a_clock_too_far_off_are_reported_once() -> None:
    net = Network()
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    sender.publish("a", b"0")
    net.run()
    sender.clock_us = 601_000_000
    net.pass_time(0.1)
    for _ in range(3):
        sender.publish("a", b"lost")
        net.run()
    assert [gap.count for gap in inbox.gaps] == [1, 1, 1]
    assert all("clock" in gap.cause for gap in inbox.gaps)
    sender.clock_us = 0
    net.pass_time(0.1)
    sender.publish("a", b"4")
    net.run()
    assert inbox.payloads == [b"0", b"4"]
    assert sum(gap.count or 0 for gap in inbox.gaps) == 3


def test_a_bundle_that_was_changed_on_the_way_and_comes_again_is_reported_once() -> None:
    net = Network()
    sender, receiver = net.host(), net.host()
    inbox = receiver.subscribe("a")
    net.tamper = lambda _, frame: [frame[:-1] + bytes((frame[-1] ^ 1,))] * 3 if frame[4] == Kind.PUBLISH else [frame]  # fmt: skip
    sender.publish("a", b"x")
    net.run()
    assert [gap.count for gap in inbox.gaps] == [1]
    assert receiver.session.dropped["late or repeated"] == 2


def test_a_loss_that_both_ends_of_a_link_report_is_reported_once() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    listener, sender = net.host(), net.host(relay=1)
    inbox = listener.subscribe("a")
    net.run()
    for _ in range(2):
        sender.publish("a", b"heard")
        net.pass_time(10)
        inbox.gaps.clear()
        net.cut(ends)
        sender.publish("a", b"lost")
        net.host(relay=1).publish("a", b"lost")
        net.run()
        ends = net.link(0, 1)
        assert [gap.count for gap in inbox.gaps] == [None, None]
        assert len({gap.source for gap in inbox.gaps}) == 2
    sender.publish("a", b"heard")
    net.run()
    assert [gap.count for gap in inbox.gaps] == [None, None, 1]
    assert inbox.payloads == [b"heard"] * 3
    net.check()


def test_what_a_relay_sent_before_it_stood_still_is_reported_when_it_is_back() -> None:
    """A stopped process neither receives nor sends. However long it stops, its last frames may not have arrived yet."""
    net = Network(relays=2)
    ends = net.link(0, 1)
    sender, listener = net.host(), net.host(relay=1)
    inbox = listener.subscribe("a")
    net.run()
    net.pass_time(10)
    ends[0].tamper = lambda frame: ()
    sender.publish("a", b"lost")
    net.run()
    for router in net.routers:
        router.now_us += 60_000_000
    net.host().publish("b", b"something else")  # before it notices that the link is down
    net.cut(ends)
    net.link(0, 1)
    assert [gap.count for gap in inbox.gaps] == [None]
    assert inbox.payloads == []
    net.check()


def test_settle_is_answered_once_the_linked_relays_know() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    near = net.host()
    for wanted in ("a", "b"):
        near.subscribe(wanted)
        settled = Result()
        near.session.ask(frames.Settle, settled)
        net.run()
        net.pass_time(0.1)
        assert isinstance(settled.message, frames.Ack)
        assert net.routers[1].interest.audience(wanted, KEY.key_id) == 1
