"""Casts in a federation, one scenario each: one copy for an interested site, none for others,
and the policies of sites.
"""

from __future__ import annotations

import pytest
from sim.kit import REACH_S, federation, got, rest, settle, wans
from support.sim import OTHER_KEY, SimNetwork, SimRelay, SimSession
from support.sim.network import LinkEnd

from iris.wire.codec import KIND_AT
from iris.wire.kinds import FIRST_DATA_KIND, Kind

pytestmark = pytest.mark.timeout(120)


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
    # Ams and Cph, and Cph and Ber, are connected, but messages do not pass through a third site.
    for relay in (net.relays[host] for host in net.hosts["ams"]):
        assert set(relay.router.sites.site_routes) == {"cph"}
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


def test_a_caller_without_members_learns_of_those_of_other_sites_under_another_key(
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
    # The nearest site gets all of them, and spreads them over its members.
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
    assert ways() == before  # each keeps its route
    assert set(before.values()) == set(net.gateways["ams"])
    lost = net.gateways["ams"][0]
    net.relays[lost].crash()
    net.run(1.0)
    during = ways()
    assert set(during.values()) == {net.gateways["ams"][1]}
    net.calm()
    # A moved flow stays on its route until that is lost, so no message overtakes another.
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
        assert net.ledger.wan_via[(tag, "ber")][0] == publisher.relay.host
        assert got(subscriber, tag) == 1


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
    assert not refused  # unused kinds are not even tried
    rest(net)


def test_a_topic_is_received_where_it_is_exported_and_imported() -> None:
    net = federation(
        policies={"ams": (("news.>", "!news.secret"), ()), "ber": ((), (">", "!news.local.>"))}
    )
    publisher, own = net.at("ams", 2).session("publisher"), net.at("ams").session("own")
    subscribers = {site: net.at(site, 2).session(site) for site in ("ams", "ber", "cph")}
    for subscriber in subscribers.values():
        subscriber.subscribe(">")
    settle(net)

    def reached(topic: str, by: SimSession = publisher) -> set[str]:
        tag = by.publish(topic)
        net.run(REACH_S)
        return {site for site, subscriber in subscribers.items() if got(subscriber, tag)}

    assert reached("news.today") == {"ams", "ber", "cph"}
    assert reached("news.local.today") == {"ams", "cph"}  # Ber does not import it
    assert reached("news.secret") == {"ams"}
    assert reached("other") == {"ams"}
    assert reached("other", own) == {"ams"}
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
        before = gateway.router.federation.resyncs

        def once(at: SimRelay, from_host: int, frame: bytes, copies: int = copies) -> int:
            if at is not net.at("ams") or net.site_of(from_host) != "ber":
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
        assert gateway.router.federation.resyncs > before
        net.check_converged()
        session.bye()
        rest(net)
