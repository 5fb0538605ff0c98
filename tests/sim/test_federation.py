"""What a federation promises, one scenario each: sites of several relays, joined by gateways, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from support.sim import OTHER_KEY, SimCall, SimNetwork, SimRelay, SimSession
from support.sim.members import FOREVER_US
from support.sim.network import DEAD_US, LinkEnd

from iris.wire.codec import KIND_AT
from iris.wire.frames import FIRST_DATA_KIND, HERE, UNKNOWN_COUNT, Cause, Kind, Refusal

pytestmark = pytest.mark.timeout(120)

REACH_S = 0.4
"""In which anything arrives anywhere."""


def federation(seed: int = 1, **shape: Any) -> SimNetwork:
    """Return three sites of three relays, the first two of each its gateways."""
    shape.setdefault("sites", {"ams": 3, "ber": 3, "cph": 3})
    net = SimNetwork(seed, **shape)
    net.run(2.0)
    net.check_converged()
    return net


@pytest.fixture
def net() -> SimNetwork:
    return federation()


def settle(net: SimNetwork) -> None:
    """Let everything arrive, and hold the network against what is true."""
    net.run(REACH_S)
    net.check_converged()


def rest(net: SimNetwork) -> None:
    """End every fault; all copies have to be true then, and nothing may be left over."""
    net.calm()
    net.check_converged()
    net.check_idle()
    if not net.policies:
        net.ledger.audit()


def wans(net: SimNetwork, one: str, other: str) -> list[tuple[int, int]]:
    """Return the WAN wires between two sites."""
    return [
        (a, b) for (a, b), wire in net.wires.items() if wire.wan and {net.site_of(a), net.site_of(b)} == {one, other}
    ]  # fmt: skip


def through(net: SimNetwork, place: int) -> list[tuple[int, int]]:
    """Return the WAN wires of a gateway."""
    return [pair for pair, wire in net.wires.items() if wire.wan and place in pair]


def got(session: SimSession, tag: int) -> int:
    return session.casts.count(tag)


def told_ms(call: SimCall, since_us: int) -> float:
    return (call.done_us - since_us) / 1000


# -- casts -------------------------------------------------------------------------------------------------------


def test_a_publication_crosses_once_to_each_site_that_wants_it_whatever_is_there(
    net: SimNetwork,
) -> None:
    publisher = net.at("ams", 2).session("publisher")
    subscribers = [
        net.at(site, index).session("subscriber")
        for site in ("ams", "ber", "cph")
        for index in (0, 1, 2)
        for _ in range(2)
    ]
    for subscriber in subscribers:
        subscriber.subscribe("news.*")
        subscriber.subscribe("news.today")
    settle(net)
    tag = publisher.publish("news.today", 3)
    net.run(REACH_S)
    assert [got(subscriber, tag) for subscriber in subscribers] == [1] * len(subscribers)
    assert net.ledger.wan_casts == {(tag, "ber"): 1, (tag, "cph"): 1}
    assert net.ledger.over_wan == 2
    rest(net)


def test_a_broadcast_crosses_once_to_each_site_and_reaches_every_member(net: SimNetwork) -> None:
    sender = net.at("ber", 2).session("sender")
    members = [
        net.at(site, index).session("member").serve("db")
        for site in ("ams", "ber", "cph")
        for index in (0, 2)
    ]
    settle(net)
    tag = sender.broadcast("db")
    net.run(REACH_S)
    assert [member.casts for member in members] == [[tag]] * 6
    assert net.ledger.wan_casts == {(tag, "ams"): 1, (tag, "cph"): 1}


def test_what_nobody_wants_over_there_costs_no_frame_over_the_wan(net: SimNetwork) -> None:
    sender = net.at("ams", 2).session("sender")
    net.at("ams", 1).session("here").serve("db")
    net.at("ber", 1).session("there").subscribe("other.>")
    settle(net)
    before = sum(end.port.total_frames for relay in net.relays for end in relay.ends if is_wan(end))
    for _ in range(10):
        sender.publish("news.today")
        sender.broadcast("db")
        sender.broadcast("nobody")
        sender.push("db")
        assert sender.request("db").outcome == ""
    net.run(0.2)
    after = sum(end.port.total_frames for relay in net.relays for end in relay.ends if is_wan(end))
    assert net.ledger.over_wan == 0
    assert after - before <= len([wire for wire in net.wires.values() if wire.wan]) * 2  # beats
    assert net.ledger.outcomes["request reply"] == 10


def is_wan(end: object) -> bool:
    return isinstance(end, LinkEnd) and end.wan


def test_a_ring_of_three_sites_with_redundant_gateways_delivers_nothing_twice(
    net: SimNetwork,
) -> None:
    sessions = [relay.session("both") for relay in net.relays]
    for session in sessions:
        session.subscribe("ring.>")
        session.serve("ring")
    settle(net)
    tags = [session.publish(f"ring.{number % 4}") for number in range(5) for session in sessions]
    casts = [session.broadcast("ring") for session in sessions]
    net.run(1.0)
    for session in sessions:
        assert sorted(session.casts) == sorted(tags)
        (member,) = session.members.values()
        assert sorted(member.casts) == sorted(casts)
    assert set(net.ledger.wan_casts.values()) == {1}
    assert len(net.ledger.wan_casts) == 2 * (len(tags) + len(casts))


def test_nothing_comes_back_to_the_site_that_it_was_sent_in(net: SimNetwork) -> None:
    publisher, neighbor = net.at("ams", 2).session("publisher"), net.at("ams", 1).session("near")
    far = net.at("ber").session("far")
    for session in (publisher, neighbor, far):
        session.subscribe("echo")
    settle(net)
    tag = publisher.publish("echo")
    net.run(1.0)
    assert [got(session, tag) for session in (publisher, neighbor, far)] == [1, 1, 1]
    assert set(net.ledger.wan_casts) == {(tag, "ber")}


def test_a_site_is_not_spoken_for_by_another(net: SimNetwork) -> None:
    publisher, far = net.at("ams", 2).session("publisher"), net.at("ber", 2).session("far")
    far.subscribe("news")
    far.serve("db")
    settle(net)
    for pair in wans(net, "ams", "ber"):
        net.stop(*pair)
    net.run(7.0)
    # Ams and Cph, and Cph and Ber, are connected: that is no way from Ams to Ber.
    for relay in (net.relays[place] for place in net.places["ams"]):
        assert set(relay.router.sites.ways) == {"cph"}
    tag, call = publisher.publish("news"), publisher.request("db")
    net.run(REACH_S)
    assert got(far, tag) == 0
    assert call.outcome == "no_members"
    assert net.ledger.over_wan == 0
    rest(net)


def test_interest_survives_the_reconnection_of_a_gateway(net: SimNetwork) -> None:
    publisher = net.at("ams", 2).session("publisher")
    early, late = net.at("ber", 1).session("early"), net.at("ber", 2).session("late")
    early.subscribe("news")
    settle(net)
    for pair in wans(net, "ams", "ber"):
        net.cut(*pair)
    net.run(0.03)
    late.subscribe("news")
    late.serve("db")
    net.run(3.0)
    net.check_converged()
    tag, call = publisher.publish("news"), publisher.request("db")
    net.run(REACH_S)
    assert (got(early, tag), got(late, tag)) == (1, 1)
    assert call.outcome == "reply"
    rest(net)


def test_interest_that_changes_at_any_moment_of_a_connection_is_known_afterwards() -> None:
    for step in range(40):
        net = SimNetwork(seed=step, sites={"ams": 1, "ber": 2}, gateways=1)
        publisher, other = net.at("ams").session("publisher"), net.at("ber", step % 2).session("o")
        other.subscribe("old")
        net.run(1.0)
        ((a, b),) = wans(net, "ams", "ber")
        net.cut(a, b)
        wire = net.wire(a, b)
        net.until(lambda wire=wire: any(not end.closed for end in wire.ends))
        net.until(lambda wire=wire: any(end.dialled and not end.closed for end in wire.ends))
        net.run(step * 0.008)
        other.subscribe("new")
        other.serve("db")
        other.unsubscribe("old", "", other.keys[0])
        net.run(2.0)
        net.check_converged()
        tag, call = publisher.publish("new"), publisher.request("db")
        net.run(REACH_S)
        assert got(other, tag) == 1, step
        assert call.outcome == "reply", step


def test_a_caller_without_members_hears_of_those_of_other_sites_under_another_key(
    net: SimNetwork,
) -> None:
    caller = net.at("ams", 2).session("caller")
    net.at("ber", 2).session("far").serve("db", key=OTHER_KEY)
    settle(net)
    call = caller.request("db")
    net.run(REACH_S)
    assert call.outcome == "no_members"
    assert f"1 under {OTHER_KEY[:4].hex()}" in call.detail


def test_a_queue_group_gives_each_message_to_one_member_of_the_whole_federation(
    net: SimNetwork,
) -> None:
    publisher = net.at("ams", 2).session("publisher")
    groups = [
        net.at(site, index).session("worker") for site in ("ber", "cph") for index in (0, 1, 2)
    ]
    plain = net.at("ber", 1).session("plain")
    plain.subscribe("jobs.>")
    for worker in groups:
        worker.subscribe("jobs.*", group="workers")
        worker.subscribe("jobs.a", group="workers")
    settle(net)
    tags = [publisher.publish("jobs.a") for _ in range(20)]
    net.run(REACH_S)
    for tag in tags:
        assert sum(got(worker, tag) for worker in groups) == 1
        assert got(plain, tag) == 1
        assert net.ledger.groups_reached(tag) == {"workers"}
    # The nearest site has them all, and there they are spread.
    assert {worker.relay.site for worker in groups if worker.casts} in ({"ber"}, {"cph"})
    assert len([worker for worker in groups if worker.casts]) > 1
    rest(net)


def test_a_queue_group_stays_home_while_it_has_a_member_there_and_then_goes_to_the_nearest() -> (
    None
):
    net = federation(costs_ms={"ber": 200, "cph": 500})
    publisher = net.at("ams", 2).session("publisher")
    workers = {site: net.at(site, 2).session(site) for site in ("cph", "ber", "ams")}
    for worker in workers.values():
        worker.subscribe("jobs", group="workers")
    settle(net)
    for site in ("ams", "ber", "cph"):
        tag = publisher.publish("jobs")
        net.run(REACH_S)
        assert [name for name, worker in workers.items() if got(worker, tag)] == [site]
        workers[site].bye()
        settle(net)
    assert net.ledger.over_wan == 2


def test_each_publication_takes_one_gateway_and_many_publishers_share_them() -> None:
    net = federation(pairs=True)
    publishers = [net.at("ams", 2).session(f"p{number}") for number in range(24)]
    subscriber = net.at("ber", 2).session("subscriber")
    subscriber.subscribe("news")
    settle(net)

    def ways() -> dict[str, int]:
        tags = {publisher.label: publisher.publish("news") for publisher in publishers}
        net.run(REACH_S)
        return {label: net.ledger.wan_via[(tag, "ber")][0] for label, tag in tags.items()}

    before = ways()
    assert ways() == before  # each keeps its way
    assert set(before.values()) == set(net.gateways["ams"])
    lost = net.gateways["ams"][0]
    net.relays[lost].crash()
    net.run(1.0)
    during = ways()
    assert set(during.values()) == {net.gateways["ams"][1]}
    net.calm()
    # What moved stays where it is until that is lost, so nothing overtakes anything.
    assert ways() == during
    rest(net)
    assert not net.ledger.late


def test_a_gateway_sends_what_its_own_sessions_say_over_its_own_connection(
    net: SimNetwork,
) -> None:
    subscriber = net.at("ber", 2).session("subscriber")
    subscriber.subscribe("news")
    publishers = [net.at("ams", index).session("p") for index in (0, 1) for _ in range(5)]
    settle(net)
    for publisher in publishers:
        tag = publisher.publish("news")
        net.run(REACH_S)
        assert net.ledger.wan_via[(tag, "ber")][0] == publisher.relay.place
        assert got(subscriber, tag) == 1


# -- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["ams", "ber"])
@pytest.mark.parametrize("how", ["killed", "without power", "frozen"])
def test_a_gateway_that_goes_away_costs_a_gap_that_is_told_and_no_duplicate_or_inversion(
    side: str, how: str
) -> None:
    net = federation(2)
    publishers = [net.at("ams", 2).session(f"p{number}") for number in range(12)]
    subscribers = [net.at("ber", index).session("s") for index in (1, 2)]
    for subscriber in subscribers:
        subscriber.subscribe("news")
    settle(net)
    victim = net.at(side)
    for number in range(120):
        for publisher in publishers:
            publisher.publish("news")
        if number == 20:
            if how == "frozen":
                victim.freeze()
            else:
                victim.crash(silent=how == "without power")
        if number == 75:  # its share has moved by then
            victim.thaw()
        net.run(0.08)
    rest(net)
    lost = [
        (publisher, subscriber)
        for publisher in publishers
        for subscriber in subscribers
        if len(subscriber.casts) < 120 * len(publishers)
    ]
    for publisher, subscriber in lost:
        gaps = [gap for gap in subscriber.gaps if gap.sender_id == publisher.sender_id]
        heard = [h for flow, h in net.ledger._heard.items() if flow[0] == subscriber.uid and flow[-1] == publisher.sender_id]  # fmt: skip
        # Either it was told, or it saw the sequence go on.
        assert gaps or (heard[0].since, heard[0].until) == (0, 120)
    for subscriber in subscribers:
        if subscriber.relay is not victim:
            assert len(subscriber.casts) > 70 * len(publishers)  # others carried on
    if how == "frozen":
        gaps = [gap for subscriber in subscribers for gap in subscriber.gaps]
        assert any(gap.count == UNKNOWN_COUNT for gap in gaps)


def test_a_gateway_that_stops_in_order_costs_at_most_what_is_overtaken_by_the_next(
    net: SimNetwork,
) -> None:
    for side in ("ams", "ber"):
        publishers = [net.at("ams", 2).session(f"p{number}") for number in range(6)]
        subscriber = net.at("ber", 2).session("s")
        subscriber.subscribe("news")
        settle(net)
        for number in range(60):
            for publisher in publishers:
                publisher.publish("news")
            if number == 20:
                net.at(side).retire(1_000_000)
            net.run(0.05)
        net.run(REACH_S)
        # What takes a faster way from now on may come before the last on the former.
        late, net.ledger.late = net.ledger.late, 0
        assert len(subscriber.casts) + late == 60 * len(publishers)
        assert late <= len(publishers)
        assert not subscriber.gaps
        subscriber.bye()
        rest(net)


@pytest.mark.parametrize("stalled_s", [1.0, 5.0])
def test_a_wan_that_stalls_and_heals_tells_what_it_cost(stalled_s: float) -> None:
    net = federation(3)
    publisher, subscriber = net.at("ams", 2).session("p"), net.at("ber", 2).session("s")
    subscriber.subscribe("news")
    settle(net)
    for number in range(100):
        publisher.publish("news")
        if number == 20:
            for pair in wans(net, "ams", "ber"):
                net.stop(*pair)
            net.run(stalled_s)
            for pair in wans(net, "ams", "ber"):
                net.heal(*pair)
        net.run(0.05)
    rest(net)
    if stalled_s < 3:
        assert len(subscriber.casts) == 100
        assert not subscriber.gaps
    else:
        assert 80 <= len(subscriber.casts) <= 100
        assert any(gap.count == UNKNOWN_COUNT for gap in subscriber.gaps)


@pytest.mark.parametrize("place", [0, 2])
def test_what_was_sent_while_a_site_was_away_is_told_there_when_it_is_back(place: int) -> None:
    net = federation(5)
    subscriber, member = net.at("ber", 2).session("s"), net.at("ber", 1).session("m")
    subscriber.subscribe("news")
    member.serve("db")
    settle(net)
    for pair in wans(net, "ams", "ber"):
        net.stop(*pair)
    net.run(8.0)
    told = len(subscriber.gaps), len(member.gaps)
    publisher, gone = net.at("ams", place).session("p"), net.at("ams", place).session("q")
    publisher.publish("news")
    publisher.broadcast("db")
    gone.publish("news")
    net.run(0.1)
    gone.bye()
    net.run(0.1)
    for pair in wans(net, "ams", "ber"):
        net.heal(*pair)
    net.run(4.0)
    told_now = [gap.sender_id for gap in subscriber.gaps[told[0] :]]
    assert sorted(set(told_now)) == sorted({publisher.sender_id, gone.sender_id})
    assert {gap.sender_id for gap in member.gaps[told[1] :]} == {publisher.sender_id}
    assert {gap.count for gap in subscriber.gaps[told[0] :]} == {UNKNOWN_COUNT}
    tag = publisher.publish("news")
    net.run(REACH_S)
    assert got(subscriber, tag) == 1
    rest(net)


@pytest.mark.parametrize("place", [0, 2])
def test_what_went_a_way_that_was_dead_already_is_told_another_way(place: int) -> None:
    net = federation(6)
    subscriber = net.at("ber", 2).session("s")
    subscriber.subscribe("news")
    settle(net)
    for pair in through(net, net.places["ams"][0]):
        net.stop(*pair)
    publishers = [net.at("ams", place).session(f"p{number}") for number in range(8)]
    tags = [publisher.publish("news") for publisher in publishers]
    net.run(6.0)
    lost = {
        p.sender_id for p, tag in zip(publishers, tags, strict=True) if not got(subscriber, tag)
    }
    assert lost
    assert place == 0 or len(lost) < 8
    assert {gap.sender_id for gap in subscriber.gaps} >= lost
    rest(net)


@pytest.mark.parametrize("wire", [(0, 1), (0, 2), (2, 3)])
def test_a_full_queue_anywhere_on_the_way_to_another_site_is_told(
    wire: tuple[int, int],
) -> None:
    net = SimNetwork(seed=4, sites={"ams": 2, "ber": 2}, gateways=1, port_bytes=40_000)
    net.run(1.0)
    publisher, subscriber = net.at("ams", 1).session("p"), net.at("ber", 1).session("s")
    subscriber.subscribe("news")
    net.run(1.0)
    publisher.publish("news")
    net.run(REACH_S)
    net.stop(*wire)
    for _ in range(200):
        publisher.publish("news", size=4_000)
        net.run(0.002)
    net.run(0.5)
    net.heal(*wire)
    net.run(2.0)
    publisher.publish("news")
    net.run(REACH_S)
    assert len(subscriber.casts) < 202
    counts = [gap.count for gap in subscriber.gaps]
    if wire == (2, 3):  # within the site that they were for
        assert len(subscriber.casts) + sum(counts) == 202
    else:  # no number is taken from another site, and once a second is enough
        assert 1 <= counts.count(UNKNOWN_COUNT) <= 4
    rest(net)


def test_the_loss_of_a_whole_site_and_its_return(net: SimNetwork) -> None:
    caller = net.at("ams", 2).session("caller")
    for relay in (net.relays[place] for place in net.places["ber"]):
        server = relay.session("server")
        server.serve("db").service_us = FOREVER_US
        server.subscribe("news")
    settle(net)
    call = caller.request("db", timeout_ms=60_000)
    net.run(REACH_S)
    for place in net.places["ber"]:
        net.relays[place].crash(silent=True)
    died_us = net.now_us
    net.run(8.0)
    assert call.outcome == "lost"
    assert call.may_have_run
    assert told_ms(call, died_us) < DEAD_US / 1000 + 500
    for place in (*net.places["ams"], *net.places["cph"]):
        assert "ber" not in net.relays[place].router.sites.ways
    assert caller.request("db").outcome == ""
    net.run(0.1)
    assert net.ledger.outcomes["request no_members"] == 1
    net.calm()
    server = net.at("ber", 2).session("server")
    server.serve("db")
    server.subscribe("news")
    settle(net)
    again, tag = caller.request("db"), caller.publish("news")
    net.run(REACH_S)
    assert again.outcome == "reply"
    assert got(server, tag) == 1
    rest(net)


def test_a_site_whose_relays_lose_each_other_is_told_as_it_is_again_afterwards(
    net: SimNetwork,
) -> None:
    for relay in net.relays:
        session = relay.session("s")
        session.serve("db")
        session.subscribe("news", group="workers")
    settle(net)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        net.cut(a, b)
    net.run(0.1)
    net.relays[2].session("late").serve("web")
    rest(net)


# -- calls -------------------------------------------------------------------------------------------------------


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
    assert not member.executed  # the ledger holds each deadline against the way's length
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
        assert all(call.may_have_run and told_ms(call, died_us) < 300 for call in calls)
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
    assert (other.heard, tunnel.heard) == (100, 60)
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


# -- surveys -----------------------------------------------------------------------------------------------------


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
    net.stop(2, 3)  # the gateway's word comes, that of the relay behind it does not
    survey = surveyor.survey("db", timeout_ms=20_000)
    net.run(REACH_S)
    assert survey.roster == [near.member_id]
    net.cut(0, 2)
    net.run(0.5)
    assert survey.outcome == "done"
    assert survey.lost == [near.member_id, "ber:2"]
    near.finish_all()
    rest(net)


# -- nobody ------------------------------------------------------------------------------------------------------


def test_nobody_is_not_said_while_a_site_was_lost_a_moment_ago(net: SimNetwork) -> None:
    for index in (0, 2):  # at a gateway, and behind one
        caller, server = net.at("ams", index).session("c"), net.at("ber", 1).session("s")
        server.serve("db")
        settle(net)
        for pair in wans(net, "ams", "ber"):
            net.cut(*pair)
        net.until(lambda caller=caller: "ber" not in caller.relay.router.sites.ways)
        call = caller.request("db", timeout_ms=10_000)
        net.run(1.5)
        assert call.outcome == "reply"
        assert told_ms(call, call.sent_us) > 20
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
        net.until(lambda: "ber" not in net.at("ams", 2).router.sites.ways)
        lost_us = net.now_us
        call = caller.request("db", timeout_ms=60_000)
        net.until(lambda call=call: bool(call.outcome))
        assert call.outcome == "no_members"
        assert 2_500 < told_ms(call, lost_us) < 3_200
        at_once = caller.request("db", timeout_ms=60_000)
        net.run(0.01)
        assert at_once.outcome == "no_members"
        net.calm()
        server.bye()
        rest(net)


def test_nobody_is_not_said_before_a_site_that_is_back_has_told_what_it_has() -> None:
    net = federation(sites={"ams": 2, "ber": 2}, gateways=1)
    caller, server = net.at("ams").session("c"), net.at("ber", 1).session("s")
    server.serve("db")
    settle(net)
    ((a, b),) = wans(net, "ams", "ber")
    net.stop(a, b)
    net.run(8.0)
    net.heal(a, b)
    router = net.at("ams").router
    net.until(lambda: "ber" in router.sites.ways)
    assert not any(way.clusters for way in router.sites.ways["ber"].values())
    call = caller.request("db", timeout_ms=5_000)
    net.run(1.0)
    assert call.outcome == "reply"
    rest(net)


# -- what sites let through --------------------------------------------------------------------------------------


def test_a_cluster_is_called_where_it_is_exported_and_imported() -> None:
    net = federation(
        policies={"ams": ((), ("db", "web")), "ber": (("db", "mail", "!secret.>"), ())}
    )
    caller, stranger = net.at("ams", 2).session("caller"), net.at("cph", 2).session("stranger")
    far = net.at("ber", 2).session("far")
    for name in ("db", "web", "mail", "secret.db"):
        far.serve(name)
    settle(net)

    def outcome(session: SimSession, name: str) -> str:
        call, survey = session.request(name), session.survey(name)
        tag = session.broadcast(name)
        net.run(2 * REACH_S)
        (member,) = [member for member in far.members.values() if member.name == name]
        assert (survey.outcome == "done") is (tag in member.casts) is (call.outcome == "reply")
        return call.outcome

    assert outcome(caller, "db") == "reply"
    assert outcome(caller, "web") == "no_members"  # not exported
    assert outcome(caller, "mail") == "no_members"  # exported, not imported
    assert outcome(stranger, "mail") == "reply"
    assert outcome(stranger, "secret.db") == "no_members"
    refused = net.at("ams").router.sites.policy.refused
    assert not refused  # what is not used is not even tried
    rest(net)


def test_a_topic_is_heard_where_it_is_exported_and_imported() -> None:
    net = federation(
        policies={"ams": (("news.>", "!news.secret"), ()), "ber": ((), (">", "!news.local.>"))}
    )
    publisher, own = net.at("ams", 2).session("publisher"), net.at("ams").session("own")
    subscribers = {site: net.at(site, 2).session(site) for site in ("ams", "ber", "cph")}
    for subscriber in subscribers.values():
        subscriber.subscribe(">")
    settle(net)

    def heard(topic: str, by: SimSession = publisher) -> set[str]:
        tag = by.publish(topic)
        net.run(REACH_S)
        return {site for site, subscriber in subscribers.items() if got(subscriber, tag)}

    assert heard("news.today") == {"ams", "ber", "cph"}
    assert heard("news.local.today") == {"ams", "cph"}  # Ber does not import it
    assert heard("news.secret") == {"ams"}
    assert heard("other") == {"ams"}
    assert heard("other", own) == {"ams"}
    for relay in net.relays:
        assert relay.router.accounts.balance() == 0
    ours = {rule for index in (0, 1) for rule in net.at("ams", index).router.sites.policy.refused}
    assert "ber: news.secret is not exported" in ours
    assert "cph: other is not exported" in ours
    theirs = {rule for index in (0, 1) for rule in net.at("ber", index).router.sites.policy.refused}
    assert theirs == {"ams: news.local.today is not imported"}
    assert "not allowed" in {
        cause for index in (0, 1) for cause in net.at("ber", index).router.accounts.dropped
    }
    rest(net)


# -- who is told what --------------------------------------------------------------------------------------------


def test_a_lost_or_repeated_change_is_made_good_by_a_snapshot(net: SimNetwork) -> None:
    for copies in (0, 2):
        gateway = net.at("ams")
        before = gateway.router.abroad.resyncs

        def once(at: SimRelay, from_place: int, frame: bytes, copies: int = copies) -> int:
            if at is not net.at("ams") or net.site_of(from_place) != "ber":
                return 1
            if frame[KIND_AT] != Kind.INTEREST or frame[KIND_AT] >= FIRST_DATA_KIND:
                return 1
            net.copies_of_control = None
            return copies

        net.copies_of_control = once
        session = net.at("ber", 2).session("s")
        session.serve("db")
        session.subscribe("news")
        net.run(2.5)
        assert net.copies_of_control is None
        assert gateway.router.abroad.resyncs > before
        net.check_converged()
        session.bye()
        rest(net)
