"""Calls in a federation, one scenario each: answered once if there is a member, and an error otherwise."""

from __future__ import annotations

import pytest
from sim.kit import REACH_S, federation, notified_ms, rest, settle, wans
from support.sim import SimNetwork
from support.sim.members import FOREVER_US
from support.sim.network import LinkEnd

from iris.wire.kinds import HERE, Cause, Kind, Refusal

pytestmark = pytest.mark.timeout(120)


def test_calls_stay_home_while_anybody_there_takes_them_even_into_a_queue(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    home = net.at("ams", 1).session("home").serve("db", concurrency=1)
    home.service_us = 50_000
    far = net.at("ber").session("far").serve("db")
    settle(net)
    calls = [caller.request("db", timeout_ms=5_000) for _ in range(10)]
    calls += [caller.push("db") for _ in range(5)]
    tunnel = caller.open_tunnel("db")
    net.run(2.0)
    assert {call.by for call in calls[:10]} == {home.member_id}
    assert not far.executed
    assert tunnel.state == "open"
    assert net.ledger.over_wan == 0


def test_calls_that_all_at_home_refuse_go_to_the_nearest_site_at_once() -> None:
    net = federation(costs_ms={"ber": 300, "cph": 100})
    caller = net.at("ams", 2).session("caller")
    for index in (0, 1, 2):
        for _ in range(2):
            net.at("ams", index).session("full").serve("db").refuse = Refusal.FULL
    near = net.at("cph", 2).session("near").serve("db")
    net.at("ber", 2).session("far").serve("db")
    settle(net)
    calls = [caller.request("db", timeout_ms=2_000) for _ in range(5)]
    pushes = [caller.push("db") for _ in range(5)]
    tunnel = caller.open_tunnel("db")
    net.run(REACH_S)
    assert [call.by for call in calls] == [near.member_id] * 5
    assert tunnel.state == "open"
    net.run(2.0)
    assert [push.outcome for push in pushes] == ["handed"] * 5
    assert len(near.executed) == 10
    tunnel.close()
    rest(net)


def test_a_request_that_every_site_refuses_is_overloaded_and_ran_nowhere(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    for relay in net.relays:
        relay.session("full").serve("db").refuse = Refusal.FULL
    settle(net)
    call = caller.request("db", timeout_ms=10_000)
    net.run(2.0)
    assert call.outcome == "overloaded"
    assert not call.may_have_run
    assert "sites" in call.detail
    rest(net)


def test_calls_go_to_the_cheapest_site_and_come_home_when_members_return() -> None:
    net = federation(costs_ms={"ber": 100, "cph": 400})
    caller = net.at("ams", 2).session("caller")
    near, far = net.at("ber", 1).session("near"), net.at("cph", 1).session("far")
    members = [near.serve("db"), far.serve("db")]
    settle(net)

    def served_by() -> str:
        call = caller.request("db")
        net.run(REACH_S)
        assert call.outcome == "reply"
        return call.by

    assert served_by() == members[0].member_id
    near.leave(members[0])
    settle(net)
    assert served_by() == members[1].member_id
    home = net.at("ams").session("home").serve("db")
    settle(net)
    assert served_by() == home.member_id


def test_of_sites_at_one_cost_the_one_with_the_shorter_round_trip_is_asked() -> None:
    net = SimNetwork(seed=5, sites={"ams": 2, "ber": 2, "cph": 2}, gateways=1)
    net.run(0.01)
    caller = net.at("ams", 1).session("caller")
    members = {site: net.at(site, 1).session(site).serve("db") for site in ("ber", "cph")}
    net.run(4.0)
    delays = {site: net.wire(*wans(net, "ams", site)[0]).delay_us for site in members}
    call = caller.request("db")
    net.run(REACH_S)
    assert call.by == members[min(delays, key=lambda site: delays[site])].member_id


def test_a_call_goes_to_the_site_that_it_names(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    members = {site: net.at(site, 2).session(site).serve("db") for site in ("ams", "ber", "cph")}
    settle(net)
    for site, member in members.items():
        request, push = caller.request("db", site=site), caller.push("db", site=site)
        tunnel, survey = caller.open_tunnel("db", site=site), caller.survey("db", site=site)
        tag = caller.broadcast("db", site=site)
        net.run(2 * REACH_S)
        assert request.by == member.member_id
        assert push.tag in member.executed
        assert tunnel.state == "open"
        assert survey.answers == [member.member_id]
        assert [tag in other.casts for other in members.values()] == [
            other is member for other in members.values()
        ]
        tunnel.close()
    nowhere = caller.request("db", site="nowhere")
    net.run(0.1)
    assert nowhere.outcome == "no_members"
    assert "nowhere" in nowhere.detail
    net.run(1.0)
    rest(net)


def test_what_is_for_this_site_alone_does_not_leave_it(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    home = net.at("ams", 1).session("home").serve("db")
    far = net.at("ber", 1).session("far").serve("db")
    web = net.at("ber", 1).session("web").serve("web")
    settle(net)
    survey, tag = caller.survey("db", site=HERE), caller.broadcast("db", site=HERE)
    request, away = caller.request("db", site=HERE), caller.request("web", site=HERE)
    net.run(REACH_S)
    assert survey.answers == [home.member_id]
    assert home.casts == [tag]
    assert not far.casts
    assert request.by == home.member_id
    assert away.outcome == "no_members"
    assert not web.executed
    assert net.ledger.over_wan == 0


def test_a_stream_is_looked_for_in_another_site_only_where_that_is_named(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    store = net.at("ber", 1).session("store").serve("orders", kinds=(Kind.STREAM,))
    settle(net)
    home = caller.call(Kind.STREAM, "orders")
    there = caller.call(Kind.STREAM, "orders", site="ber")
    net.run(REACH_S)
    assert (home.outcome, home.detail) == ("no_members", "no store holds it")
    assert there.by == store.member_id


def test_deadlines_are_mapped_over_every_hop_and_time_on_a_stalled_way_counts() -> None:
    net = SimNetwork(seed=6, sites={"ams": 2, "ber": 2}, gateways=1)
    net.run(2.0)
    caller = net.at("ams", 1).session("caller")
    member = net.at("ber", 1).session("far").serve("db")
    settle(net)
    ((a, b),) = wans(net, "ams", "ber")
    call = caller.request("db", timeout_ms=1_500)
    net.run(0.01)
    net.stop(a, b)
    late = caller.request("db", timeout_ms=1_000)
    net.run(1.7)
    net.heal(a, b)
    net.run(1.0)
    assert (call.outcome, late.outcome) == ("timeout", "timeout")
    assert not member.executed  # the ledger compares each deadline with the length of the path
    rest(net)


def test_a_lost_gateway_ends_what_is_in_flight_at_once_and_nothing_runs_twice() -> None:
    for side in ("ams", "ber"):
        net = federation(7)
        caller = net.at("ams", 2).session("caller")
        member = net.at("ber", 2).session("far").serve("db")
        member.service_us = FOREVER_US
        settle(net)
        calls = [caller.request("db", timeout_ms=60_000) for _ in range(16)]
        tunnels = [caller.open_tunnel("db") for _ in range(6)]
        survey = caller.survey("db", timeout_ms=60_000)
        net.run(REACH_S)
        assert {tunnel.state for tunnel in tunnels} == {"open"}
        for gateway in net.gateways[side]:
            net.relays[gateway].crash()
        died_us = net.now_us
        net.run(0.5)
        assert {call.outcome for call in calls} == {"lost"}
        assert all(call.may_have_run and notified_ms(call, died_us) < 300 for call in calls)
        assert {tunnel.cause for tunnel in tunnels} == {Cause.LOST}
        assert survey.outcome == "done"
        assert survey.lost == [member.member_id]
        member.service_us = 500
        member.finish_all()
        rest(net)


def test_a_tunnel_crosses_three_hops_in_order_and_ends_on_both_sides(net: SimNetwork) -> None:
    opener = net.at("ams", 2).session("opener")
    far = net.at("ber", 2).session("far")
    far.serve("db")
    settle(net)
    tunnel = opener.open_tunnel("db")
    net.run(REACH_S)
    (other,) = far.tunnels.values()
    for _ in range(20):
        tunnel.send(5)
        other.send(3)
        net.run(0.01)
    net.run(REACH_S)
    assert (other.received, tunnel.received) == (100, 60)
    tunnel.close()
    net.run(REACH_S)
    assert other.cause is Cause.CLOSED
    rest(net)


def test_pushes_are_credited_back_over_every_hop(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    member = net.at("ber", 2).session("far").serve("db", concurrency=2, limit_bytes=1 << 20)
    settle(net)
    for _ in range(50):
        caller.push("db")
    net.run(3.0)
    assert len(member.executed) == 50
    rest(net)


def test_a_survey_reaches_all_members_of_all_sites(net: SimNetwork) -> None:
    members = [relay.session("s").serve("db").session for relay in net.relays for _ in range(2)]
    settle(net)
    for index in (0, 2):
        survey = net.at("cph", index).session("surveyor").survey("db")
        net.run(2 * REACH_S)
        ids = {member.member_id for session in members for member in session.members.values()}
        assert set(survey.answers) == set(survey.roster) == ids
        assert survey.outcome == "done"
        assert not survey.lost
    rest(net)


def test_a_site_that_is_lost_in_the_middle_of_a_survey_is_named(net: SimNetwork) -> None:
    surveyor = net.at("ams", 2).session("surveyor")
    members = [
        net.at(site, index).session("s").serve("db")
        for site in ("ams", "ber")
        for index in (0, 1, 2)
    ]
    for member in members[3:]:
        member.service_us = FOREVER_US
    settle(net)
    known = surveyor.survey("db", timeout_ms=20_000)
    net.run(REACH_S)
    for pair in wans(net, "ams", "ber"):
        net.stop(*pair)
    unknown = surveyor.survey("db", timeout_ms=20_000)
    net.run(4.0)
    assert known.outcome == unknown.outcome == "done"
    assert len(known.answers) == len(unknown.answers) == 3
    assert sorted(known.lost) == sorted(member.member_id for member in members[3:])
    assert sorted(unknown.lost) == ["ber:1", "ber:2", "ber:3"]
    for member in members:
        member.finish_all()
    rest(net)


def test_who_was_not_named_yet_when_a_site_is_lost_is_counted() -> None:
    net = SimNetwork(seed=8, sites={"ams": 2, "ber": 2}, gateways=1)
    net.run(2.0)
    surveyor = net.at("ams", 1).session("surveyor")
    near = net.at("ber", 0).session("near").serve("db")
    net.at("ber", 1).session("beyond").serve("db")
    settle(net)
    near.service_us = FOREVER_US
    net.stop(2, 3)  # the gateway's answer arrives, that of the relay behind it does not
    survey = surveyor.survey("db", timeout_ms=20_000)
    net.run(REACH_S)
    assert survey.roster == [near.member_id]
    net.cut(0, 2)
    net.run(0.5)
    assert survey.outcome == "done"
    assert survey.lost == [near.member_id, "ber:2"]
    near.finish_all()
    rest(net)


def test_nobody_is_not_said_while_a_site_was_lost_a_moment_ago(net: SimNetwork) -> None:
    for index in (0, 2):  # at a gateway, and behind one
        caller, server = net.at("ams", index).session("c"), net.at("ber", 1).session("s")
        server.serve("db")
        settle(net)
        for pair in wans(net, "ams", "ber"):
            net.cut(*pair)
        net.until(lambda caller=caller: "ber" not in caller.relay.router.sites.site_routes)
        call = caller.request("db", timeout_ms=10_000)
        net.run(1.5)
        assert call.outcome == "reply"
        assert notified_ms(call, call.sent_us) > 20
        server.bye()
        rest(net)


def test_nobody_is_not_said_to_a_call_that_meets_the_loss_of_its_site_on_the_way() -> None:
    net = federation(sites={"ams": 2, "ber": 2}, gateways=1, delays_us=(4_000, 5_000))
    caller, server = net.at("ams", 1).session("c"), net.at("ber", 1).session("s")
    server.serve("db")
    settle(net)
    (end,) = [end for end in net.at("ams").ends if isinstance(end, LinkEnd) and end.wan]
    calls = []
    for number in range(60):
        calls.append(caller.request("db", timeout_ms=5_000))
        if number == 30:
            end.lost()
        net.run(0.000_5)
    net.run(2.0)
    outcomes = [call.outcome for call in calls]
    assert set(outcomes) <= {"lost", "overloaded", "reply"}
    assert outcomes[0] == "lost"
    assert outcomes[-1] == "reply"
    assert not any(call.may_have_run for call in calls if call.outcome == "overloaded")
    rest(net)


def test_nobody_is_said_once_a_lost_site_has_not_come_back(net: SimNetwork) -> None:
    for index in (0, 2):
        caller, server = net.at("ams", index).session("c"), net.at("ber", 1).session("s")
        server.serve("db")
        settle(net)
        for pair in wans(net, "ams", "ber"):
            net.stop(*pair)
        net.run(2.0)
        net.until(lambda: "ber" not in net.at("ams", 2).router.sites.site_routes)
        lost_us = net.now_us
        call = caller.request("db", timeout_ms=60_000)
        net.until(lambda call=call: bool(call.outcome))
        assert call.outcome == "no_members"
        assert 2_500 < notified_ms(call, lost_us) < 3_200
        at_once = caller.request("db", timeout_ms=60_000)
        net.run(0.01)
        assert at_once.outcome == "no_members"
        net.calm()
        server.bye()
        rest(net)


def test_no_members_is_not_reported_before_a_site_that_is_back_has_advertised_its_own() -> None:
    net = federation(sites={"ams": 2, "ber": 2}, gateways=1)
    caller, server = net.at("ams").session("c"), net.at("ber", 1).session("s")
    server.serve("db")
    settle(net)
    ((a, b),) = wans(net, "ams", "ber")
    net.stop(a, b)
    net.run(8.0)
    net.heal(a, b)
    router = net.at("ams").router
    net.until(lambda: "ber" in router.sites.site_routes)
    assert not any(way.clusters for way in router.sites.site_routes["ber"].values())
    call = caller.request("db", timeout_ms=5_000)
    net.run(1.0)
    assert call.outcome == "reply"
    rest(net)
