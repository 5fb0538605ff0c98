"""A member that runs the call of a caller that left is notified, wherever both are, and can finish the call."""

from __future__ import annotations

import pytest
from protocol.kit import Network, control_of, kind_of

from iris.core.interfaces import Delivery
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.frames import CallerLeft
from iris.wire.kinds import Kind
from relay.core.leaving import REST_US
from relay.core.limits import Limits


def callers_left(net: Network) -> list[int]:
    """Return for each host of how many calls it was notified that their caller had left."""
    return [host.session.callers_left for host in net.hosts]


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.SURVEY])
def test_a_member_is_notified_once_and_runs_to_its_end(relays: int, kind: Kind) -> None:
    net = Network(relays=relays)
    if relays == 2:
        net.link(0, 1)
    caller, member, bystander = net.host("caller"), net.host("member", relay=relays - 1), net.host()
    running: list[Delivery] = []
    member.serve("db", running.append)
    net.run()
    for _ in range(3):
        if kind == Kind.REQUEST:
            caller.request("db", b"x")
        else:
            caller.survey("db", b"x")
    bystander.request("db", b"y")
    net.run()
    assert len(running) == 4
    assert callers_left(net) == [0, 0, 0]
    caller.lose()
    net.pass_time(0.5)
    assert callers_left(net) == [0, 3, 0], "not of calls of a caller that stays"
    for delivery in running:
        delivery.reply(b"done", None, False)
    net.run()
    net.pass_time(0.5)
    assert callers_left(net) == [0, 3, 0]
    net.hosts.remove(caller)
    net.check()


def test_a_link_that_is_cut_takes_its_callers_with_it() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    caller, member = net.host(), net.host("member", relay=1)
    member.serve("db", lambda _: None)
    net.run()
    caller.request("db")
    net.run()
    net.cut(ends)
    net.pass_time(0.5)
    assert callers_left(net) == [0, 1]


def test_calls_that_were_answered_or_that_nobody_waits_for_are_not_notified() -> None:
    net = Network()
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", lambda delivery: delivery.reply(b"", None, False))
    member.serve("slow", lambda _: None)
    caller.request("db")
    caller.push("slow")
    caller.open_tunnel("slow")
    net.run()
    caller.lose()
    net.pass_time(0.5)
    assert callers_left(net) == [0, 0]


def test_what_a_relay_says_of_calls_that_are_not_there_is_ignored_and_bounded() -> None:
    net = Network(relays=2, limits=Limits(pending=100))
    ends = net.link(0, 1)
    caller, member = net.host(), net.host("member", relay=1)
    member.serve("db", lambda _: None)
    net.run()
    caller.request("db")
    net.run()
    (hop,) = ends[0].link.in_flight
    ends[0].control(encode_control(CallerLeft([hop + 1, 1 << 62, 0])))
    net.pass_time(0.5)
    assert callers_left(net) == [0, 0]
    ends[1].link.left_hops = set(range(1 << 20, (1 << 20) + 99))
    ends[0].control(encode_control(CallerLeft([hop, *range(50)])))
    net.run()
    assert ends[1].link.dropped_entries == 50
    net.pass_time(0.2)
    assert callers_left(net) == [0, 1]
    assert not ends[1].link.left_hops
    assert not ends[1].link.closed


def test_many_that_leave_at_once_are_looked_for_together() -> None:
    net = Network()
    member = net.host("member")
    member.serve("db", lambda _: None, concurrency=1000)
    callers = [net.host() for _ in range(50)]
    for caller in callers:
        caller.request("db", timeout_ms=60_000)
    net.run()
    received: list[int] = []

    def tamper(host: object, frame: bytes) -> tuple[bytes, ...]:
        if kind_of(frame) == Kind.CALLER_LEFT:
            received.append(len(control_of(frame).hops))
        return (frame,)

    net.tamper = tamper  # type: ignore[method-assign]
    for caller in callers:
        caller.lose()
    net.pass_time(REST_US / 1e6 / 2)
    assert received == [1], "the first is reported at once"
    net.pass_time(REST_US / 1e6)
    assert received == [1, 49]
    assert net.router.deadline_us > net.router.now_us
    assert frames.MAX_CREDIT >= 49
