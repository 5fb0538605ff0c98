"""Calls to one member run there or nowhere, and handlers that ask for it end when their caller leaves, never before.

In random lives, and in cases that show that the checks notice.
"""

from __future__ import annotations

import pytest
from support.sim import SimNetwork, Violation, play

from iris.wire.kinds import Kind

SEEDS = (2, 5, 10, 17)
SITES_SEEDS = (6, 9)
STEPS = 360

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", SEEDS)
def test_members_that_are_chosen_and_callers_that_leave_keep_their_promises(seed: int) -> None:
    ledger = play(seed, STEPS).net.ledger
    assert ledger.aimed_runs > 20
    assert ledger.cancels > 5


@pytest.mark.parametrize("seed", SITES_SEEDS)
def test_they_keep_them_in_a_federation(seed: int) -> None:
    ledger = play(seed, STEPS, sites=True).net.ledger
    assert ledger.aimed_runs > 20
    assert ledger.cancels > 5


@pytest.mark.parametrize("relays", [1, 2])
def test_of_two_members_the_one_that_is_named_runs_all(relays: int) -> None:
    net = SimNetwork(1, relays=relays)
    caller = net.relays[0].session("caller")
    sessions = [net.relays[-1].session(name) for name in ("one", "two")]
    one, two = [session.serve("echo", concurrency=1) for session in sessions]
    net.run(0.5)
    calls = [caller.call(Kind.REQUEST, "echo", member=two.member_id) for _ in range(4)]
    calls += caller.run(Kind.REQUEST, "echo", 4, member=two.member_id)
    net.until(lambda: all(call.outcome for call in calls))
    assert {call.outcome for call in calls} == {"reply"}
    assert (len(one.executed), len(two.executed)) == (0, 8)
    sessions[1].bye()
    net.run(0.5)
    late = caller.call(Kind.REQUEST, "echo", member=two.member_id)
    net.until(lambda: bool(late.outcome))
    assert late.outcome == "no_members"
    assert not one.executed


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.SURVEY])
@pytest.mark.parametrize("relays", [1, 2])
def test_a_cancelled_call_ends_at_its_member_and_the_queued_one_does_not_run(
    relays: int, kind: Kind
) -> None:
    net = SimNetwork(1, relays=relays)
    caller = net.relays[0].session("caller")
    member = net.relays[-1].session("member").serve("slow", concurrency=1, cancel=True)  # fmt: skip
    member.service_us = 5_000_000
    net.run(0.5)
    calls = [caller.call(kind, "slow", timeout_ms=10_000) for _ in range(3)]
    net.run(0.2)
    caller.cancel(calls[0], calls[2])
    net.run(0.5)
    assert member.executed == [calls[0].tag, calls[1].tag]
    assert net.ledger.cancels == 2
    assert not member.waiting
    net.until(lambda: bool(calls[1].outcome))
    assert calls[1].outcome in ("reply", "done")
    net.calm()
    net.check_idle()


def test_a_call_that_runs_at_another_member_is_a_violation() -> None:
    net = SimNetwork(1, relays=1)
    session = net.relays[0].session("both")
    member = session.serve("echo")
    net.run(0.5)
    call = session.call(Kind.REQUEST, "echo", member=member.member_id)
    call.member = f"{net.relays[0].relay_id.hex()}.77"
    with pytest.raises(Violation, match=r"was for .*\.77, and runs on"):
        net.run(0.5)


def test_a_handler_that_is_cancelled_while_its_caller_waits_is_a_violation() -> None:
    net = SimNetwork(1, relays=1)
    caller, server = (net.relays[0].session(name) for name in ("a", "b"))
    member = server.serve("slow", cancel=True)
    member.service_us = 5_000_000
    net.run(0.5)
    caller.request("slow", timeout_ms=10_000)
    net.run(0.2)
    [hop] = member.running
    with pytest.raises(Violation, match=r"is cancelled on .*, and its caller waits"):
        member.caller_left(hop)


def test_a_handler_that_goes_on_without_its_caller_is_a_violation() -> None:
    net = SimNetwork(1, relays=1)
    caller, server = (net.relays[0].session(name) for name in ("a", "b"))
    member = server.serve("slow")  # it does not ask for callers that left
    member.service_us = 50_000_000
    net.run(0.5)
    call = caller.request("slow", timeout_ms=60_000)
    net.run(0.2)
    caller.cancel(call)
    net.run(3.0)
    net.ledger.check_cancelled(member)
    member.cancels = True
    with pytest.raises(Violation, match=r"still runs on .*, and its caller has left"):
        net.ledger.check_cancelled(member)
