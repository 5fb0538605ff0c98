"""Casts, surveys, tunnels and watches, one scenario each, in virtual time."""

from __future__ import annotations

import itertools

import pytest
from support.sim import SimNetwork
from support.sim.members import FOREVER_US
from support.sim.network import NOTICE_US

from iris.wire.kinds import UNKNOWN_COUNT, Cause, Refusal

pytestmark = pytest.mark.timeout(120)


def test_one_copy_goes_to_each_relay_that_wants_a_publication_and_none_to_the_others() -> None:
    net = SimNetwork(seed=8, relays=4)
    publisher = net.relays[0].session("publisher")
    wanting = [net.relays[host].session(f"s{n}") for host in (0, 1, 1, 1, 2) for n in range(2)]
    for session in wanting:
        session.subscribe("a.*")
    net.run(0.1)
    before = {host: net.relays[host].router.accounts.in_ for host in range(4)}
    tag = publisher.publish("a.b")
    net.run(0.1)
    assert all(session.casts == [tag] for session in wanting)
    came = [net.relays[host].router.accounts.in_ - before[host] for host in range(4)]
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
    workers = [net.relays[host].session(f"w{n}") for host in spread for n in range(2)]
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


def test_what_was_sent_while_a_link_was_down_is_reported_behind_it_when_it_is_back(
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
    seen = len(listener.gaps)
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
        ([gap for gap in listener.gaps[seen:] if gap.plain], publishers),
        ([gap for gap in listener.gaps[seen:] if not gap.plain], publishers),
        (member.gaps, casters),
    ):
        assert {gap.sender_id for gap in gaps} == senders
        assert {gap.count for gap in gaps} == {UNKNOWN_COUNT}
        assert len(gaps) == len(senders)
    assert net.relays[0].router.status()["away"] == 0


def test_the_loss_of_a_link_on_the_way_is_reported_to_a_subscriber_at_once(net: SimNetwork) -> None:
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


def test_what_a_full_link_drops_is_reported_to_the_subscriber_behind_it() -> None:
    net = SimNetwork(seed=9, relays=2, port_bytes=20_000)
    publisher, listener = net.relays[0].session("publisher"), net.relays[1].session("listener")
    listener.subscribe("a.b")
    net.run(1.5)
    for _ in range(200):
        publisher.publish("a.b", size=2_000)
    net.run(1.0)
    assert len(listener.casts) < 200
    reported = sum(gap.count for gap in listener.gaps)
    assert len(listener.casts) + reported == 200
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


def test_many_stalled_subscribers_share_one_budget_and_each_loss_is_reported() -> None:
    net = SimNetwork(seed=11, relays=2, port_bytes=200_000, queue_bytes=100_000)
    publisher, theirs = net.relays[0].session("publisher"), net.relays[1].session("theirs")
    stalled = [net.relays[1].session(f"stalled {n}") for n in range(4)]
    awake = net.relays[1].session("awake")
    for session in (*stalled, awake):
        session.subscribe("a.b")
    stalled[0].subscribe("c")
    net.run(1.5)
    for session in stalled:
        session.stall()
    for n in range(200):
        publisher.publish("a.b", size=2_000)
        if n % 20 == 0:
            theirs.publish("c", size=3_000)
        net.run(0.01)
    budget = net.relays[1].budget
    assert 80_000 < budget.bytes <= 101_000  # control frames always queue
    assert budget.shed
    assert len(awake.casts) == 200
    assert not awake.gaps
    for session in stalled:
        session.wake()
    net.run(1.0)
    for session in stalled[1:]:
        assert len(session.casts) + sum(gap.count for gap in session.gaps) == 200
    first = stalled[0]
    assert len(first.casts) + sum(gap.count for gap in first.gaps) == 210
    assert not budget.bytes
    net.ledger.audit()


def test_a_full_link_gives_way_to_a_session_that_is_slow_for_a_moment() -> None:
    net = SimNetwork(seed=12, relays=2, port_bytes=200_000, queue_bytes=100_000)
    publisher, slow = net.relays[0].session("publisher"), net.relays[0].session("slow")
    far = net.relays[1].session("far")
    far.subscribe("a.b")
    slow.subscribe("c")
    net.run(1.5)
    slow.stall()
    for _ in range(100):
        publisher.publish("a.b", size=2_000)
    for _ in range(60):
        publisher.publish("c", size=2_000)
    net.run(0.003)
    slow.wake()
    net.run(1.0)
    budget = net.relays[0].budget
    assert budget.shed
    assert len(slow.casts) + sum(gap.count for gap in slow.gaps) == 60
    assert len(far.casts) + sum(gap.count for gap in far.gaps) == 100
    assert far.gaps
    assert not budget.bytes
    net.ledger.audit()


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


def test_the_members_of_a_lost_relay_are_reported_as_missing_from_a_survey(net: SimNetwork) -> None:
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


def test_of_a_lost_relay_whose_members_answered_in_part_all_others_are_reported_as_missing(
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
    # Answers are sealed, so only the surveyor knows which members of a lost relay have answered.
    assert set(survey.lost) - set(survey.answers) == {member.member_id for member in there[1:]}


def test_a_member_that_refuses_a_survey_elsewhere_is_reported_as_missing(net: SimNetwork) -> None:
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
    assert (other.received, tunnel.received) == (500, 300)
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


def test_a_watch_shows_members_on_every_relay_and_a_flap_makes_nobody_leave(
    net: SimNetwork,
) -> None:
    watcher = net.relays[0].session("watcher")
    watch = watcher.watch("db")
    net.run(0.1)
    servers = [relay.session("server") for relay in net.relays]
    members = [server.serve("db") for server in servers]
    net.run(0.1)
    assert watch.members == {member.member_id for member in members}
    before = watch.changes
    net.cut(0, 1)
    net.run(2.0)
    assert watch.changes == before
    gone = net.relays[1].relay_id.hex()
    net.relays[1].crash()
    net.run(1.0)
    assert any(member.startswith(gone) for member in watch.members)
    net.run(3.0)
    assert watch.members == {members[0].member_id, members[2].member_id}
    assert watch.changes == before + 1
