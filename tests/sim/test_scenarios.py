"""What relays promise together, one scenario each, in virtual time."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable

import pytest
from support.sim import KEY, OTHER_KEY, SimCall, SimNetwork, SimRelay
from support.sim.chaos import is_change
from support.sim.members import FOREVER_US
from support.sim.network import DEAD_US, NOTICE_US

from iris.wire.codec import KIND_AT
from iris.wire.frames import UNKNOWN_COUNT, Cause, Kind, Refusal

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def net() -> SimNetwork:
    """Three relays, fully linked, whose hosts' clocks show different times."""
    return SimNetwork(seed=1, relays=3)


def told_ms(call: SimCall, since_us: int) -> float:
    return (call.done_us - since_us) / 1000


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


def test_a_request_under_another_key_finds_nobody_and_is_told_who_is_there(net: SimNetwork) -> None:
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
    assert told_ms(call, died_us) < 100


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
    assert told_ms(call, died_us) < 100


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
    assert told_ms(call, silent_us) <= DEAD_US / 1000 + 100


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


def test_while_a_link_flaps_a_request_waits_for_it_and_is_not_told_that_nobody_is_there(
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
    assert net.relays[0].router.accounts.expired == 1


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


def test_when_all_refuse_the_caller_hears_that_they_are_overloaded_and_nothing_ran(
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
    # The ledger holds every deadline against the caller's own, give or take the slowest delay of the link.
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


def test_a_reply_that_finds_no_room_at_its_callers_relay_is_told() -> None:
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
    """Let `callers` (place -> how many) request one after the other until `count` are answered; return all calls."""
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

    for place, number in callers.items():
        for index in range(number):
            session = net.relays[place].session(f"caller{index}")
            again(lambda session=session: session.request("work", timeout_ms=5_000))  # type: ignore[misc]
    net.until(lambda: len(ended) == len(calls), 600)
    return calls


def shares(calls: list[SimCall]) -> list[float]:
    found = Counter(call.by for call in calls)
    return sorted((number / len(calls) for number in found.values()), reverse=True)


def test_four_equal_members_on_two_hosts_get_equal_shares() -> None:
    net = SimNetwork(seed=5, relays=2, delays_us=(100, 200))
    for place in (0, 0, 0, 1):
        net.relays[place].session("server").serve("work", concurrency=4).service_us = 2_000
    net.run(0.1)
    calls = closed_loop(net, {0: 16, 1: 16}, 3_000)
    assert {call.outcome for call in calls} == {"reply"}
    found = shares(calls)
    assert len(found) == 4
    assert found[0] <= 0.30


def test_all_callers_on_the_host_of_one_member_use_the_three_of_the_other_too() -> None:
    net = SimNetwork(seed=6, relays=2, delays_us=(100, 200))
    for place in (0, 0, 0, 1):
        net.relays[place].session("server").serve("work", concurrency=4).service_us = 2_000
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


# -- publish and broadcast -----------------------------------------------------------------------------------------


def test_one_copy_goes_to_each_relay_that_wants_a_publication_and_none_to_the_others() -> None:
    net = SimNetwork(seed=8, relays=4)
    publisher = net.relays[0].session("publisher")
    wanting = [net.relays[place].session(f"s{n}") for place in (0, 1, 1, 1, 2) for n in range(2)]
    for session in wanting:
        session.subscribe("a.*")
    net.run(0.1)
    before = {place: net.relays[place].router.accounts.in_ for place in range(4)}
    tag = publisher.publish("a.b")
    net.run(0.1)
    assert all(session.casts == [tag] for session in wanting)
    came = [net.relays[place].router.accounts.in_ - before[place] for place in range(4)]
    assert came == [1, 1, 1, 0]


def test_a_broadcast_reaches_every_member_on_every_relay_once(net: SimNetwork) -> None:
    sender = net.relays[0].session("sender")
    members = [relay.session("server").serve("all") for relay in net.relays for _ in range(2)]
    net.run(0.1)
    tags = [sender.broadcast("all", 2) for _ in range(10)]
    net.run(0.1)
    assert all(member.casts == tags for member in members)


@pytest.mark.parametrize("spread", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2)])
def test_a_queue_group_gets_each_publication_exactly_once_across_relays(
    net: SimNetwork, spread: tuple[int, ...]
) -> None:
    publisher = net.relays[0].session("publisher")
    workers = [net.relays[place].session(f"w{n}") for place in spread for n in range(2)]
    for worker in workers:
        worker.subscribe("jobs.*", group="workers")
    everybody = net.relays[2].session("plain")
    everybody.subscribe("jobs.>")
    both = net.relays[1].session("both")
    both.subscribe("jobs.a")
    both.subscribe("*.a", group="others")
    net.run(0.1)
    tags = [publisher.publish("jobs.a") for _ in range(40)]
    net.run(0.2)
    got = sorted(itertools.chain.from_iterable(worker.casts for worker in workers))
    assert got == tags
    assert sum(bool(worker.casts) for worker in workers) > 1
    assert everybody.casts == both.casts == tags


def test_order_holds_and_nothing_comes_twice_while_links_flap(net: SimNetwork) -> None:
    # The ledger ends the run at the first duplicate or inversion.
    publisher = net.relays[0].session("publisher")
    listener = net.relays[1].session("listener")
    listener.subscribe("a.b")
    net.run(0.1)
    tags = []
    for step in range(400):
        tags.append(publisher.publish("a.b", 1 + step % 3))
        if step % 40 == 20:
            net.cut(0, 1)
        net.run(0.01)
    net.run(1.0)
    assert 200 < len(listener.casts) < 400
    assert listener.casts == sorted(set(listener.casts) & set(tags))
    assert any(gap.count == UNKNOWN_COUNT for gap in listener.gaps)


def test_what_was_sent_while_a_link_was_down_is_told_behind_it_when_it_is_back(
    net: SimNetwork,
) -> None:
    listener, member = net.relays[1].session("listener"), net.relays[1].session("member")
    listener.subscribe("a.b")
    listener.subscribe("a.b", group="g")
    member.serve("db")
    before = net.relays[0].session("before")
    net.run(0.1)
    before.publish("a.b")
    net.stop(0, 1)
    net.run(8.0)
    told = len(listener.gaps)
    publisher, gone = net.relays[0].session("publisher"), net.relays[0].session("gone")
    for sender in (publisher, gone):
        sender.publish("a.b")
        sender.broadcast("db")
    before.publish("a.b")
    net.run(0.1)
    gone.bye()
    net.heal(0, 1)
    net.run(4.0)
    casters = {publisher.sender_id, gone.sender_id}
    publishers = {*casters, before.sender_id}
    for gaps, senders in (
        ([gap for gap in listener.gaps[told:] if gap.plain], publishers),
        ([gap for gap in listener.gaps[told:] if not gap.plain], publishers),
        (member.gaps, casters),
    ):
        assert {gap.sender_id for gap in gaps} == senders
        assert {gap.count for gap in gaps} == {UNKNOWN_COUNT}
        assert len(gaps) == len(senders)
    assert net.relays[0].router.status()["away"] == 0


def test_a_subscriber_hears_at_once_that_a_link_on_the_way_was_lost(net: SimNetwork) -> None:
    publisher, listener = net.relays[0].session("publisher"), net.relays[1].session("listener")
    listener.subscribe("a.b")
    net.run(0.1)
    publisher.publish("a.b")
    net.run(0.1)
    net.cut(0, 1)
    net.run(NOTICE_US / 1e6 + 0.01)
    assert [(gap.count, gap.name, gap.sender_id) for gap in listener.gaps] == [
        (UNKNOWN_COUNT, "a.b", publisher.sender_id)
    ]


def test_what_a_full_link_drops_is_told_to_the_subscriber_behind_it() -> None:
    net = SimNetwork(seed=9, relays=2, port_bytes=20_000)
    publisher, listener = net.relays[0].session("publisher"), net.relays[1].session("listener")
    listener.subscribe("a.b")
    net.run(1.5)
    for _ in range(200):
        publisher.publish("a.b", size=2_000)
    net.run(1.0)
    assert len(listener.casts) < 200
    told = sum(gap.count for gap in listener.gaps)
    assert len(listener.casts) + told == 200
    net.ledger.audit()


def test_one_stalled_subscriber_does_not_hold_up_another_behind_the_same_link() -> None:
    net = SimNetwork(seed=10, relays=2, port_bytes=20_000)
    publisher = net.relays[0].session("publisher")
    stalled, awake = net.relays[1].session("stalled"), net.relays[1].session("awake")
    for session in (stalled, awake):
        session.subscribe("a.b")
    net.run(0.1)
    stalled.stall()
    for _ in range(200):
        publisher.publish("a.b", size=2_000)
        net.run(0.01)
    assert len(awake.casts) == 200
    stalled.wake()
    net.run(1.0)
    assert len(stalled.casts) + sum(gap.count for gap in stalled.gaps) == 200


# -- surveys, tunnels, watches ---------------------------------------------------------------------------------------


def test_a_survey_is_answered_by_all_members_of_all_relays(net: SimNetwork) -> None:
    caller = net.relays[0].session("caller")
    members = [relay.session("server").serve("poll") for relay in net.relays for _ in range(2)]
    net.run(0.1)
    survey = caller.survey("poll")
    net.run(0.2)
    everybody = sorted(member.member_id for member in members)
    assert sorted(survey.roster) == sorted(survey.answers) == everybody
    assert survey.outcome == "done"
    assert survey.lost == []


def test_the_members_of_a_lost_relay_are_told_as_missing_from_a_survey(net: SimNetwork) -> None:
    caller = net.relays[0].session("caller")
    here = net.relays[0].session("server").serve("poll")
    there = [net.relays[1].session("server").serve("poll") for _ in range(3)]
    for member in there:
        member.service_us = FOREVER_US
    net.run(0.1)
    survey = caller.survey("poll", timeout_ms=60_000)
    net.run(0.1)
    net.relays[1].crash()
    net.run(0.2)
    assert survey.outcome == "done"
    assert survey.answers == [here.member_id]
    assert sorted(survey.lost) == sorted(member.member_id for member in there)


def test_of_a_lost_relay_whose_members_answered_in_part_all_others_are_told_as_missing(
    net: SimNetwork,
) -> None:
    caller = net.relays[0].session("caller")
    there = [net.relays[1].session("server").serve("poll") for _ in range(3)]
    for member in there[1:]:
        member.service_us = FOREVER_US
    net.run(0.1)
    survey = caller.survey("poll", timeout_ms=60_000)
    net.run(0.1)
    net.relays[1].crash()
    net.run(0.2)
    assert survey.outcome == "done"
    assert len(survey.answers) == 1
    # Answers are sealed: who of a lost relay did answer, only the surveyor can tell.
    assert set(survey.lost) - set(survey.answers) == {member.member_id for member in there[1:]}


def test_a_member_that_refuses_a_survey_elsewhere_is_told_as_missing(net: SimNetwork) -> None:
    caller = net.relays[0].session("caller")
    member = net.relays[1].session("server").serve("poll")
    member.refuse = Refusal.FULL
    net.run(0.1)
    survey = caller.survey("poll")
    net.run(0.2)
    assert survey.outcome == "done"
    assert survey.lost == [member.member_id]


def test_a_tunnel_over_a_link_carries_both_ways_in_order_and_ends_on_both_sides(
    net: SimNetwork,
) -> None:
    opener, server = net.relays[0].session("opener"), net.relays[1].session("server")
    server.serve("files")
    net.run(0.1)
    tunnel = opener.open_tunnel("files")
    net.run(0.1)
    (other,) = server.tunnels.values()
    tunnel.send(500)
    other.send(300)
    net.run(0.5)
    assert (other.heard, tunnel.heard) == (500, 300)
    tunnel.close()
    net.run(0.1)
    assert (tunnel.state, other.state) == ("ended", "ended")
    assert other.cause == Cause.CLOSED
    net.check_idle()


@pytest.mark.parametrize("fault", ["cut", "crash", "member dies", "opener dies"])
def test_a_tunnel_breaks_loudly_at_the_end_that_is_left(net: SimNetwork, fault: str) -> None:
    opener, server = net.relays[0].session("opener"), net.relays[1].session("server")
    server.serve("files")
    net.run(0.1)
    tunnel = opener.open_tunnel("files")
    net.run(0.1)
    (other,) = server.tunnels.values()
    if fault == "cut":
        net.cut(0, 1)
    elif fault == "crash":
        net.relays[1].crash()
    elif fault == "member dies":
        server.die()
    else:
        opener.die()
    net.run(0.2)
    assert (tunnel.state, other.state) == ("ended", "ended")
    assert tunnel.cause == other.cause == Cause.LOST


def test_a_watch_hears_of_members_on_every_relay_and_a_flap_makes_nobody_leave(
    net: SimNetwork,
) -> None:
    watcher = net.relays[0].session("watcher")
    watch = watcher.watch("db")
    net.run(0.1)
    servers = [relay.session("server") for relay in net.relays]
    members = [server.serve("db") for server in servers]
    net.run(0.1)
    assert watch.members == {member.member_id for member in members}
    told = watch.changes
    net.cut(0, 1)
    net.run(2.0)
    assert watch.changes == told
    gone = net.relays[1].relay_id.hex()
    net.relays[1].crash()
    net.run(1.0)
    assert any(member.startswith(gone) for member in watch.members)
    net.run(3.0)
    assert watch.members == {members[0].member_id, members[2].member_id}
    assert watch.changes == told + 1


# -- interest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [0, 2])
def test_a_change_that_is_lost_or_comes_twice_is_noticed_and_made_good(
    net: SimNetwork, copies: int
) -> None:
    server = net.relays[1].session("server")
    server.serve("db")
    net.run(0.1)
    garbled: list[bytes] = []

    def once(relay: SimRelay, place: int, frame: bytes) -> int:
        if relay is net.relays[0] and place == 1 and is_change(frame) and not garbled:
            garbled.append(frame)
            return copies
        return 1

    net.copies_of_control = once
    server.serve("web")
    net.run(0.1)
    server.subscribe("a.b")
    net.run(2.0)
    assert len(garbled) == 1
    assert net.relays[0].router.mesh.resyncs == 1
    assert net.relays[2].router.mesh.resyncs == 0
    net.check_converged()
    status = server_status(net)
    assert status["resyncs"] == 1


def server_status(net: SimNetwork) -> dict[str, object]:
    session = net.relays[0].session("status")
    session.ask_status()
    net.run(0.1)
    document: dict[str, object] = json.loads(session.document)
    return document


def test_serve_and_subscribe_are_acknowledged_by_the_relay_alone_while_no_link_passes_anything(
    net: SimNetwork,
) -> None:
    net.stop(0, 1)
    net.stop(1, 2)
    session = net.relays[1].session("server")
    member = session.serve("db")
    session.subscribe("a.b")
    net.run(0.001)
    assert member.serial
    assert session.subscriptions[("a.b", "", KEY)] <= net.now_us


def test_a_relay_that_returns_under_a_new_id_takes_the_place_of_the_old(net: SimNetwork) -> None:
    caller = net.relays[0].session("caller")
    net.relays[1].session("server").serve("db")
    net.run(0.1)
    net.relays[1].crash(silent=True)
    net.run(0.2)
    relay = net.come_back(1)
    relay.session("server").serve("db")
    net.run(1.0)
    calls = [caller.request("db", timeout_ms=8_000) for _ in range(5)]
    net.calm()
    net.check_converged()
    assert {call.outcome for call in calls} <= {"reply", "lost"}
    again = caller.request("db")
    net.run(0.1)
    assert again.outcome == "reply"


def test_tables_are_as_small_as_before_when_thousands_of_addresses_have_come_and_gone() -> None:
    net = SimNetwork(seed=11, relays=2)
    caller = net.relays[0].session("caller")
    server = net.relays[1].session("server")
    before = net.table_sizes()
    for number in range(300):
        member = server.serve(f"c{number}")
        net.run(0.02)
        call = caller.request(f"c{number}")
        net.run(0.05)
        assert call.outcome == "reply"
        server.leave(member)
        net.run(0.02)
    net.run(5.0)
    grown = {
        table: size - before[0].get(table, 0)
        for table, size in net.table_sizes()[0].items()
        if table.startswith(("Link.", "Mesh.", "Copy.", "Interest.", "Calls."))
    }
    grown.pop("Link.routes", None)
    assert {table: size for table, size in grown.items() if size > 20} == {}


def test_control_frames_over_an_idle_link_are_beats_alone(net: SimNetwork) -> None:
    kinds: Counter[int] = Counter()

    def count(relay: SimRelay, place: int, frame: bytes) -> int:
        kinds[frame[KIND_AT]] += 1
        return 1

    net.run(1.0)
    net.copies_of_control = count
    net.run(10.0)
    assert 6 * 9 <= kinds.pop(Kind.BEAT) <= 6 * 11
    assert set(kinds) <= {Kind.ASK_PEERS, Kind.PEERS}


@pytest.mark.parametrize("place", [0, 1])
def test_an_answer_that_finds_no_room_makes_its_member_missing(place: int) -> None:
    net = SimNetwork(seed=12, relays=2, port_bytes=2_000)
    caller, publisher = net.relays[0].session("caller"), net.relays[0].session("publisher")
    members = [net.relays[place].session("server").serve("poll") for _ in range(6)]
    caller.subscribe("noise")
    net.run(0.1)
    caller.stall()
    for _ in range(1_000):
        publisher.publish("noise")
    survey = caller.survey("poll", timeout_ms=5_000)
    net.run(0.5)
    caller.wake()
    net.run(0.5)
    assert survey.outcome == "done"
    assert len(survey.answers) < 6
    assert {*survey.answers, *survey.lost} == {member.member_id for member in members}


def test_a_relay_hears_how_busy_others_keep_the_members_elsewhere() -> None:
    net = SimNetwork(seed=13, relays=4)
    first, second = net.relays[0].session("first"), net.relays[1].session("second")
    busy = net.relays[2].session("busy").serve("work", concurrency=8)
    net.run(0.1)
    busy.service_us = FOREVER_US
    for _ in range(8):
        first.request("work", timeout_ms=60_000)
    second.request("work", timeout_ms=60_000)  # who has asked lately is told
    net.run(0.1)
    free = net.relays[3].session("free").serve("work", concurrency=8)
    net.run(0.1)
    calls = []
    for _ in range(20):
        calls.append(second.request("work", timeout_ms=200))
        net.run(0.02)
    assert [call.outcome for call in calls] == ["reply"] * 20
    assert len(free.executed) == 20


@pytest.mark.parametrize("change", ["leave", "join", "unsubscribe", "subscribe"])
def test_what_changes_while_a_relay_has_no_link_is_in_its_next_snapshot(change: str) -> None:
    net = SimNetwork(seed=14, relays=2)
    session = net.relays[0].session("server")
    left, stays = session.serve("a"), session.serve("b")
    session.subscribe("a.b")
    session.subscribe("x.y", group="g")
    net.run(0.1)
    net.check_converged()
    net.stop(0, 1)
    net.run(3.5)
    assert not net.relays[0].router.links
    if change == "leave":
        session.leave(left)
    elif change == "join":
        session.serve("c")
    elif change == "unsubscribe":
        session.unsubscribe("a.b", "", KEY)
    else:
        session.subscribe("x.y")
    net.run(0.1)
    net.calm()
    net.check_converged()
    link = net.relays[1].link_to(net.relays[0])
    assert stays.serial in link.copy.members
    assert (left.serial in link.copy.members) is (change != "leave")


@pytest.mark.parametrize("how", ["bye", "die"])
def test_a_link_keeps_nothing_of_processes_that_came_spoke_and_went(how: str) -> None:
    net = SimNetwork(seed=15, relays=2)
    server = net.relays[1].session("server")
    server.serve("db")
    server.subscribe("a.b")
    net.run(20.0)  # all samples of clocks are there
    sizes = []
    for number in range(100):
        session = net.relays[0].session("short")
        session.serve("mail")
        session.publish("a.b")
        session.broadcast("db")
        session.push("db")
        call = session.request("db")
        net.run(0.03)
        server.request("mail")
        net.run(0.03)
        assert call.outcome == "reply"
        if how == "bye":
            session.bye()
        else:
            session.die()
        net.run(0.03)
        if number in (9, 99):
            net.run(20.0)
            sizes.append(net.table_sizes())
    early, late = sizes
    for place in (0, 1):
        grown = {
            table: (early[place].get(table, 0), size)
            for table, size in late[place].items()
            if size > early[place].get(table, 0) + 4
        }
        assert grown == {}


def test_a_tunnel_that_is_given_up_while_it_waits_for_a_link_is_never_opened(
    net: SimNetwork,
) -> None:
    opener, server = net.relays[0].session("opener"), net.relays[1].session("server")
    server.serve("files")
    net.run(0.1)
    net.cut(0, 1)
    net.until(lambda: net.relays[0].link_to(net.relays[1]) is None)
    tunnel = opener.open_tunnel("files", timeout_ms=5_000)
    net.run(0.001)
    tunnel.close(Cause.BROKEN)
    net.run(6.0)
    assert not server.tunnels
    net.check_idle()


def test_a_relay_that_is_stopped_takes_nothing_with_it_and_is_gone_at_once(
    net: SimNetwork,
) -> None:
    caller = net.relays[0].session("caller")
    here, there = (relay.session("server").serve("echo") for relay in net.relays[1:])
    only = net.relays[1].session("server").serve("only")
    for member in (here, there):
        member.service_us = 50_000
    net.run(0.1)
    calls = []
    for step in range(100):
        calls.append(caller.request("echo"))
        net.run(0.005)
        if step == 30:
            net.relays[1].retire(200_000)
    net.run(0.2)
    assert {call.outcome for call in calls} == {"reply"}
    assert len(here.executed) + len(there.executed) == 100
    assert here.executed
    assert max(here.executed) < calls[40].tag
    assert only.serial
    call = caller.request("only", timeout_ms=60_000)
    net.run(0.01)
    assert call.outcome == "no_members"
