"""Calls in flight: what the sessions of one user can have at a relay, and what members of one user can be given."""

from __future__ import annotations

from typing import Any

import pytest
from protocol.kit import KEY, Network
from protocol.test_quotas import Party

from iris.wire import frames
from iris.wire.codec import END, HOP
from iris.wire.frames import Declare, Fail, Serving
from iris.wire.kinds import Cause, Kind
from iris.wire.runs import call_run
from relay.core.allowances import FIRST, STEP, SWEEP_US
from relay.core.endings import REST_US
from relay.core.limits import Limits

KEY_ID = KEY.key_id
RUN = 32


def served() -> tuple[Network, list[Party]]:
    """Return a network that has room for `4 * STEP` calls, and members that accept every call and answer none."""
    net = Network(limits=Limits(all_pending=4 * STEP))
    return net, [member(net, f"uid {number}") for number in range(20, 24)]


def member(net: Network, user: str) -> Party:
    party = Party(net.router, user)
    kinds = {kind: Serving(1 << 20, 1 << 40) for kind in (Kind.REQUEST, Kind.PUSH, Kind.SURVEY)}
    assert not party.ask(lambda number: frames.Join(number, "db", [KEY_ID], kinds))
    return party


def caller(net: Network, user: str = "uid 1") -> Party:
    party = Party(net.router, user)
    for alias, kind in enumerate((Kind.REQUEST, Kind.SURVEY)):
        party.say(Declare(alias, kind, "db", KEY_ID, bytes(16)))
    return party


def call(party: Party, runs: int) -> list[Fail]:
    """Send `RUN` requests each `runs` times; return what fails."""
    for _ in range(runs):
        first = party.number * RUN + 1
        party.number += 1
        deadline_us = 1 << 60
        party.say(call_run(0, 0, first, deadline_us, END.pack(0, 0, 1, 0), [b"?"] * RUN))
    return party.received(Fail)


def test_sessions_of_one_user_share_the_calls_in_flight_and_leave_a_quarter_to_others() -> None:
    net, _ = served()
    first, second, other = caller(net), caller(net), caller(net, "uid 2")
    assert not call(first, (FIRST + 2 * STEP) // RUN)
    assert not call(second, (FIRST + STEP) // RUN)
    fails = [*call(first, 1), *call(second, 1)]
    assert {(fail.cause, fail.may_have_run) for fail in fails} == {(Cause.OVERLOADED, False)}
    assert len(fails) == 2 * RUN
    assert f"the sessions of uid 1 already use their share of the relay's unanswered calls ({3 * STEP} of {4 * STEP}" in fails[0].detail  # fmt: skip
    assert not call(caller(net), FIRST // RUN)  # a new session can always make a few
    assert not call(other, 2 * FIRST // RUN)
    status: Any = net.router.status()["quotas"]
    assert status["calls"]["held"] == 4 * STEP
    assert status["calls"]["refused"] == 2 * RUN
    assert net.router.accounts.balance() == 0


def take_apart(net: Network) -> None:
    """Let a relay take apart what sessions that have ended held."""
    while net.router.endings:
        net.router.now_us += REST_US
        net.router.expire()


def test_places_of_sessions_that_ended_are_free_again() -> None:
    net = Network(limits=Limits(all_pending=4 * STEP))
    for _ in range(3):
        for number in range(20, 24):
            member(net, f"uid {number}")
        first = caller(net)
        assert not call(first, (FIRST + 3 * STEP) // RUN)
        assert call(caller(net), 2 * FIRST // RUN)
        for session in list(net.router.sessions.values()):
            net.router.session_down(session)
        take_apart(net)
    quotas = net.router.quotas
    assert (quotas.calls.total, quotas.in_flight.total) == (0, 0)
    assert not quotas.calls.held
    assert not quotas.in_flight.held


def test_a_session_that_has_no_calls_in_flight_any_more_keeps_no_places_from_others() -> None:
    net, members = served()
    busy, late = caller(net), caller(net)
    assert not call(busy, (FIRST + 3 * STEP) // RUN)
    for each in members:
        net.router.session_down(each.session)  # which ends their calls
    take_apart(net)
    busy.port.out.clear()
    assert busy.session.pending == 0
    member(net, "uid 9")
    net.router.now_us += SWEEP_US
    assert not call(late, 2 * FIRST // RUN)
    assert not call(busy, 2 * FIRST // RUN)
    assert net.router.quotas.calls.refused == 0


@pytest.mark.parametrize("survey", [False, True])
def test_members_of_one_user_are_given_no_more_than_its_share(survey: bool) -> None:
    net = Network(limits=Limits(all_pending=4 * STEP))
    serving = member(net, "uid 9")
    callers = [caller(net, f"uid {number}") for number in range(60)]
    frame_of = lambda hop: HOP.pack(HOP.size - 4 + END.size + 12, Kind.SURVEY, 0, 1, hop, 1 << 60) + END.pack(0, 0, 1, 0) + bytes(12)  # noqa: E731  # fmt: skip
    for each in callers:
        if survey:
            for hop in range(FIRST):
                each.say(frame_of(hop + 1))
        else:
            call(each, FIRST // RUN)
        each.port.out.clear()
        serving.port.out.clear()
    assert len(serving.session.in_flight) == FIRST + 3 * STEP
    quotas: Any = net.router.status()["quotas"]
    assert quotas["in_flight"]["held"] == 3 * STEP
    assert quotas["in_flight"]["refused"] > 0
    other = member(net, "uid 10")
    assert not call(caller(net, "uid 11"), FIRST // RUN)
    assert len(other.session.in_flight) == FIRST
