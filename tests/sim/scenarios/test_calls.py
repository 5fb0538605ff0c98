"""Calls over several relays, one scenario each, in virtual time: each is answered once by a free member, or fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from sim.kit import notified_ms
from support.sim import OTHER_KEY, SimCall, SimNetwork
from support.sim.members import FOREVER_US
from support.sim.network import DEAD_US

from iris.wire.kinds import Refusal

pytestmark = pytest.mark.timeout(120)


# -- calls -------------------------------------------------------------------------------------------------------


def test_a_request_is_answered_by_a_member_of_another_relay(net: SimNetwork) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    member = server.serve("echo")
    net.run(0.1)
    call = caller.request("echo")
    net.run(0.1)
    assert call.outcome == "reply"
    assert call.by == member.member_id
    assert call.done_us - call.sent_us < 50_000


def test_a_request_under_another_key_finds_nobody_and_its_error_names_the_other_key(
    net: SimNetwork,
) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo", key=OTHER_KEY)
    net.run(0.1)
    call = caller.request("echo")
    net.run(0.1)
    assert call.outcome == "no_members"
    assert f"1 under {OTHER_KEY[:4].hex()}" in call.detail


def test_a_fault_of_a_handler_comes_back_over_the_link(net: SimNetwork) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo").faults = True
    net.run(0.1)
    call = caller.request("echo")
    net.run(0.1)
    assert call.outcome == "fault"


def test_a_member_that_dies_while_it_runs_a_request_is_a_lost_connection_to_a_caller_elsewhere(
    net: SimNetwork,
) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo").service_us = FOREVER_US
    net.run(0.1)
    call = caller.request("echo", timeout_ms=60_000)
    net.run(0.1)
    server.die()
    died_us = net.now_us
    net.run(0.2)
    assert call.outcome == "lost"
    assert call.may_have_run
    assert notified_ms(call, died_us) < 100


def test_a_relay_that_is_killed_is_a_lost_connection_at_once(net: SimNetwork) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo").service_us = FOREVER_US
    net.run(0.1)
    call = caller.request("echo", timeout_ms=60_000)
    net.run(0.1)
    net.relays[1].crash()
    died_us = net.now_us
    net.run(0.2)
    assert call.outcome == "lost"
    assert notified_ms(call, died_us) < 100


@pytest.mark.parametrize("how", ["frozen", "without power", "unreachable"])
def test_a_relay_that_says_nothing_is_noticed_within_3_seconds_and_its_calls_end(
    net: SimNetwork, how: str
) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo").service_us = FOREVER_US
    net.run(1.5)
    call = caller.request("echo", timeout_ms=60_000)
    net.run(0.1)
    silent_us = net.now_us
    if how == "frozen":
        net.relays[1].freeze()
    elif how == "without power":
        net.relays[1].crash(silent=True)
    else:
        net.stop(0, 1)
    net.run(3.2)
    assert call.outcome == "lost"
    assert notified_ms(call, silent_us) <= DEAD_US / 1000 + 100


def test_after_a_relay_was_noticed_dead_nothing_fails_that_another_serves(net: SimNetwork) -> None:
    caller = net.relays[0].session("caller")
    for relay in net.relays[1:]:
        relay.session("server").serve("echo")
    net.run(0.1)
    net.relays[1].freeze()
    net.run(3.2)
    calls = [caller.request("echo") for _ in range(50)]
    net.run(1.0)
    assert {call.outcome for call in calls} == {"reply"}


def test_while_a_link_flaps_a_request_waits_for_it_instead_of_finding_no_members(
    net: SimNetwork,
) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo")
    net.run(0.1)
    net.cut(0, 1)
    net.until(lambda: net.relays[0].link_to(net.relays[1]) is None)
    call = caller.request("echo", timeout_ms=2_000)
    push = caller.push("echo")
    survey = caller.survey("echo", timeout_ms=2_000)
    net.run(0.001)
    assert not call.outcome
    net.run(2.0)
    assert call.outcome == "reply"
    assert push.outcome == "handed"
    assert net.ledger.runs[push.tag] == 1
    assert survey.outcome == "done"
    assert len(survey.answers) == 1


def test_a_request_that_waits_for_a_link_ends_with_its_deadline(net: SimNetwork) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo")
    net.run(0.1)
    net.stop(0, 1)
    net.cut(0, 1)
    net.relays[1].crash(silent=True)
    net.until(lambda: net.relays[0].link_to(net.relays[1]) is None)
    call = caller.request("echo", timeout_ms=500)
    net.run(0.7)
    assert call.outcome in ("expired", "timeout")
    assert not net.ledger.runs[call.tag]
    accounts = net.relays[0].router.accounts
    assert accounts.expired + accounts.dropped.get("given up", 0) == 1


def test_when_the_suspension_is_over_nobody_is_there_and_that_is_said_at_once(
    net: SimNetwork,
) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo")
    net.run(0.1)
    net.relays[1].crash()
    net.run(0.1)
    waiting = caller.request("echo", timeout_ms=60_000)
    net.run(1.0)
    assert not waiting.outcome
    net.run(3.0)
    assert waiting.outcome == "no_members"
    call = caller.request("echo")
    net.run(0.01)
    assert call.outcome == "no_members"


def test_a_relay_that_has_just_started_does_not_say_that_nobody_is_there() -> None:
    net = SimNetwork(seed=2, relays=2, settle_us=3_000_000)
    net.relays[1].session("server").serve("echo")
    net.run(3.0)
    net.relays[0].crash()
    relay = net.come_back(0)
    call = relay.session("caller").request("echo")
    net.run(1.0)
    assert call.outcome == "reply"


def test_a_refusal_is_tried_elsewhere_by_the_callers_relay_and_runs_once(net: SimNetwork) -> None:
    caller = net.relays[0].session("caller")
    full = net.relays[1].session("full").serve("echo")
    free = net.relays[2].session("free").serve("echo")
    full.refuse = Refusal.FULL
    net.run(0.1)
    calls = [caller.request("echo") for _ in range(20)]
    net.run(0.5)
    assert {call.outcome for call in calls} == {"reply"}
    assert not full.executed
    assert sorted(free.executed) == [call.tag for call in calls]


def test_when_all_refuse_the_caller_gets_overloaded_and_nothing_ran(
    net: SimNetwork,
) -> None:
    caller = net.relays[0].session("caller")
    for relay in net.relays:
        relay.session("full").serve("echo").refuse = Refusal.FULL
    net.run(0.1)
    call = caller.request("echo")
    net.run(0.5)
    assert call.outcome == "overloaded"
    assert not call.may_have_run


def test_a_member_that_leaves_is_handed_nothing_new_and_its_refusals_go_elsewhere(
    net: SimNetwork,
) -> None:
    caller = net.relays[0].session("caller")
    leaver = net.relays[1].session("leaver")
    member = leaver.serve("echo")
    stayer = net.relays[2].session("stayer").serve("echo")
    net.run(0.1)
    calls = [caller.request("echo") for _ in range(10)]
    leaver.leave(member)
    net.run(0.0005)
    calls += [caller.request("echo") for _ in range(10)]
    net.run(0.5)
    assert {call.outcome for call in calls} == {"reply"}
    assert len(stayer.executed) + len(member.executed) == 20


def test_a_deadline_is_the_callers_on_every_host_whatever_its_clock_shows(net: SimNetwork) -> None:
    # The ledger compares every deadline with the caller's, within the slowest delay of the link.
    assert len({relay.offset_us for relay in net.relays}) == 3
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    member = server.serve("echo", concurrency=1)
    member.service_us = 300_000
    net.run(0.1)
    first = caller.request("echo", timeout_ms=1000)
    net.run(0.01)
    second = caller.request("echo", timeout_ms=200)  # waits at the member until it is too late
    net.run(1.0)
    assert first.outcome == "reply"
    assert second.outcome == "timeout"
    assert member.executed == [first.tag]


def test_time_in_a_frozen_relay_counts_against_the_deadline(net: SimNetwork) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo")
    net.run(0.1)
    net.relays[1].freeze()
    call = caller.request("echo", timeout_ms=500)
    net.run(1.0)
    net.relays[1].thaw()
    net.run(1.0)
    assert call.outcome == "timeout"
    assert not net.ledger.runs[call.tag]


def test_pushes_are_credited_over_links(net: SimNetwork) -> None:
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    member = server.serve("jobs", concurrency=1)
    net.run(0.1)
    pushes = [caller.push("jobs") for _ in range(50)]
    net.run(2.0)
    assert len(member.executed) == 50
    assert {push.outcome for push in pushes} == {"handed"}
    net.check_idle()


def test_a_reply_that_finds_no_room_at_its_callers_relay_is_reported() -> None:
    net = SimNetwork(seed=4, relays=2, port_bytes=2_000)
    caller, server = net.relays[0].session("caller"), net.relays[1].session("server")
    server.serve("echo", concurrency=4096)
    publisher = net.relays[0].session("publisher")
    caller.subscribe("noise")
    net.run(0.1)
    caller.stall()
    for _ in range(1_000):
        publisher.publish("noise")
    calls = [caller.request("echo") for _ in range(5)]
    net.run(0.5)
    caller.wake()
    net.run(0.3)
    assert {call.outcome for call in calls} <= {"lost", "reply"}
    lost = [call for call in calls if call.outcome == "lost"]
    assert len(lost) >= 4
    assert all(call.may_have_run for call in lost)


# -- balancing -----------------------------------------------------------------------------------------------------


def closed_loop(net: SimNetwork, callers: dict[int, int], count: int) -> list[SimCall]:
    """Let `callers` (host -> number) send one request after another until `count` are answered; return all calls."""
    calls: list[SimCall] = []
    ended: list[SimCall] = []

    def again(session_call: Callable[[], SimCall]) -> None:
        if len(ended) < count:
            call = session_call()
            calls.append(call)
            watch(call, session_call)

    def watch(call: SimCall, session_call: Callable[[], SimCall]) -> None:
        if call.outcome:
            ended.append(call)
            again(session_call)
        else:
            net.clock.after(50, watch, call, session_call)

    for host, number in callers.items():
        for index in range(number):
            session = net.relays[host].session(f"caller{index}")
            again(lambda session=session: session.request("work", timeout_ms=5_000))  # type: ignore[misc]
    net.until(lambda: len(ended) == len(calls), 600)
    return calls


def shares(calls: list[SimCall]) -> list[float]:
    found = Counter(call.by for call in calls)
    return sorted((number / len(calls) for number in found.values()), reverse=True)


def test_four_equal_members_on_two_hosts_get_equal_shares() -> None:
    net = SimNetwork(seed=5, relays=2, delays_us=(100, 200))
    for host in (0, 0, 0, 1):
        net.relays[host].session("server").serve("work", concurrency=4).service_us = 2_000
    net.run(0.1)
    calls = closed_loop(net, {0: 16, 1: 16}, 3_000)
    assert {call.outcome for call in calls} == {"reply"}
    found = shares(calls)
    assert len(found) == 4
    assert found[0] <= 0.30


def test_all_callers_on_the_host_of_one_member_use_the_three_of_the_other_too() -> None:
    net = SimNetwork(seed=6, relays=2, delays_us=(100, 200))
    for host in (0, 0, 0, 1):
        net.relays[host].session("server").serve("work", concurrency=4).service_us = 2_000
    net.run(0.1)
    calls = closed_loop(net, {1: 32}, 3_000)
    assert {call.outcome for call in calls} == {"reply"}
    found = shares(calls)
    assert len(found) == 4
    assert found[0] <= 0.40


def test_one_slow_member_elsewhere_takes_little_of_the_throughput_and_no_call_times_out() -> None:
    spent_us = []
    for slow in (False, True):
        net = SimNetwork(seed=7, relays=2, delays_us=(100, 200))
        net.relays[0].session("fast").serve("work", concurrency=4).service_us = 1_000
        if slow:
            net.relays[1].session("slow").serve("work", concurrency=1).service_us = 50_000
        net.run(0.1)
        begin_us = net.now_us
        calls = closed_loop(net, {0: 32}, 2_000)
        assert {call.outcome for call in calls} == {"reply"}
        spent_us.append(sorted(call.done_us for call in calls)[1_999] - begin_us)
    assert spent_us[0] / spent_us[1] >= 0.9
