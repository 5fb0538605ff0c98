"""Publishers that wait for subscribers: none waits forever, and between those that continue
nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.sim import SimNetwork, SimRelay, SimSession, Violation, play
from support.sim.members import KEY
from support.sim.waiting import SimPublisher, SimSink, left_out

from iris.core.credit import FIRST_WINDOW
from iris.wire.codec import KIND_AT
from iris.wire.kinds import Kind

SIZE = 8 << 10
WHOLE = FIRST_WINDOW // SIZE
"""Bundles that fill a first window."""
STALL_S = 1.0
MANY = 10 * WHOLE

pytestmark = pytest.mark.timeout(60)


def network(relays: int = 2, seed: int = 1, **shape: Any) -> SimNetwork:
    shape.setdefault("port_bytes", 1 << 20)
    return SimNetwork(seed, relays=relays, **shape)


def session(net: SimNetwork, label: str, host: int = 0) -> SimSession:
    return net.relays[host].session(label)


def publish(publisher: SimSession, count: int = MANY, topic: str = "t") -> SimPublisher:
    for _ in range(count):
        last = publisher.publish_waiting(topic, size=SIZE)
    return last


def drained(*publishers: SimSession) -> Callable[[], bool]:
    return lambda: not any(one.waiting.queued for one in publishers)


def rest(net: SimNetwork) -> None:
    """Let all handle their messages; check that nobody waits, losses were reported, and relays keep no state of
    ended sessions.
    """
    for one in net.sessions:
        for sink in one.waiting.sinks.values():
            sink.resume()
    net.calm()
    net.check_converged()
    net.check_idle()
    net.ledger.audit()


def dropped(net: SimNetwork) -> int:
    return sum(relay.router.accounts.dropped.get("slow receiver", 0) for relay in net.relays)


def recovers(relay: SimRelay) -> Callable[[], bool]:
    return lambda: not left_out(relay.router)


# -- nothing is lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relays", [1, 2])
def test_a_slow_subscriber_gets_everything_and_is_waited_for_without_a_stall(relays: int) -> None:
    net = network(relays)
    alice, bob = session(net, "alice"), session(net, "bob", relays - 1)
    slow = bob.subscribe_waiting("t", pace_us=20_000)
    net.run(0.5)
    sent = publish(alice)
    assert len(sent.queue) > MANY // 2, "it waits"
    net.until(drained(alice), 10)
    rest(net)
    assert slow.handled == MANY
    assert slow.most_bytes <= 2 * FIRST_WINDOW
    assert bob.casts == sent.sent
    assert sent.stalls == net.ledger.gaps == dropped(net) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_subscribers_of_every_pace_at_every_relay_get_everything_of_every_publisher(
    seed: int,
) -> None:
    net = network(3, seed)
    publishers = [session(net, f"p{host}", host) for host in range(3)]
    sinks = [
        session(net, f"s{host}", host).subscribe_waiting("t", pace_us=pace)
        for host in range(3)
        for pace in (0, 500, 4_000)
    ]
    net.run(0.5)
    flows = [publish(one) for one in publishers]
    net.until(drained(*publishers), 10)
    rest(net)
    assert [sink.handled for sink in sinks] == [3 * MANY] * len(sinks)
    assert not any(flow.stalls for flow in flows)
    assert net.ledger.gaps == dropped(net) == 0


def test_who_comes_and_who_leaves_meanwhile_costs_nobody_a_message() -> None:
    net = network(3)
    alice = session(net, "alice")
    steady = session(net, "steady", 1).subscribe_waiting("t", pace_us=5_000)
    net.run(0.5)
    flow = publish(alice)
    guests = []
    for turn in range(6):
        guest = session(net, f"guest{turn}", turn % 3)
        guest.subscribe_waiting("t", pace_us=30_000)
        guests.append(guest)
        net.run(0.1)
        if turn == 2:
            guests[0].bye()
            guests[1].die()
            guests[2].unsubscribe("t", "", KEY)
    net.until(drained(alice), 20)
    rest(net)
    assert steady.handled == MANY
    assert not flow.stalls
    assert dropped(net) == 0


@pytest.mark.parametrize("end", ["bye", "die"])
def test_publishers_that_come_and_leave_are_forgotten(end: str) -> None:
    net = network(2)
    bob = session(net, "bob", 1)
    bob.subscribe_waiting("t", pace_us=10_000)
    net.run(0.5)
    tables = ("Credits._credits", "Credits._watched", "Flow.credits", "Flow.by_group")
    for turn in range(6):
        alice = session(net, f"alice{turn}")
        flow = publish(alice, 3 * WHOLE)
        net.run(0.1)
        assert flow.queue
        getattr(alice, end)()
        net.run(0.5)
        if turn == 1:
            before = net.table_sizes()[
                1
            ]  # a declaration of a link stays until its alias is used again
    rest(net)
    here, there = net.table_sizes()
    for table in tables:
        assert not here.get(table, 0), table
        assert there.get(table, 0) <= before.get(table, 0), table


# -- nobody waits for good -------------------------------------------------------------------------------------


def held_back(*sinks: SimSink) -> None:
    for sink in sinks:
        sink.pause()


@pytest.mark.parametrize("relays", [1, 2, 3])
def test_a_ring_whose_members_handle_only_once_they_have_published_goes_on(relays: int) -> None:
    """Each makes the next one wait: all continue, first one message per stall, and then without stalls."""
    net = network(relays)
    size = max(2, relays)
    ring = [session(net, f"r{at}", at % relays) for at in range(size)]
    sinks = [one.subscribe_waiting(f"to.{at}") for at, one in enumerate(ring)]
    held_back(*sinks)
    net.run(0.5)
    flows = [publish(one, 4 * WHOLE, f"to.{(at + 1) % size}") for at, one in enumerate(ring)]
    for _ in range(3):
        before = [len(flow.sent) for flow in flows]
        net.run(STALL_S + 0.1)
        for flow, was in zip(flows, before, strict=True):
            assert len(flow.sent) > was or not flow.queue
            flow.check()
    net.run(4 * WHOLE * (STALL_S + 0.1))
    assert drained(*ring)(), "each has published all, and handled nothing"
    assert not any(sink.handled for sink in sinks)
    assert all(flow.stalls for flow in flows)
    lost = dropped(net)
    assert lost
    for sink in sinks:
        sink.resume()
    net.run(1.0)
    stalls = net.ledger.stalls
    for at, one in enumerate(ring):
        publish(one, 4 * WHOLE, f"to.{(at + 1) % size}")
    net.until(drained(*ring), 1.0)
    rest(net)
    assert net.ledger.stalls == stalls
    assert dropped(net) == lost == sum(gap.count for one in ring for gap in one.gaps)


@pytest.mark.parametrize("relays", [1, 2])
def test_messages_for_a_subscriber_that_stalls_are_dropped_and_reported_until_it_goes_on(
    relays: int,
) -> None:
    net = network(relays)
    alice = session(net, "alice")
    bob, carol = session(net, "bob", relays - 1), session(net, "carol", relays - 1)
    stuck, fine = bob.subscribe_waiting("t"), carol.subscribe_waiting("t", pace_us=1_000)
    held_back(stuck)
    net.run(0.5)
    flow = publish(alice)
    net.until(drained(alice), 5)
    assert flow.stalls == 1, "nobody waits for it any more"
    net.run(0.5)
    assert fine.handled == MANY
    missing = MANY - len(bob.casts)
    assert 0 < missing == dropped(net)
    assert left_out(net.relays[-1].router)
    stuck.resume()
    net.until(recovers(net.relays[-1]), 1.0)
    publish(alice)
    net.until(drained(alice), 1.0)
    rest(net)
    assert sum(gap.count for gap in bob.gaps) == missing == dropped(net)
    assert not carol.gaps
    assert fine.handled == 2 * MANY


@pytest.mark.parametrize("end", ["bye", "die", "unsubscribe"])
@pytest.mark.parametrize("relays", [1, 2])
def test_one_that_was_left_out_and_goes_is_forgotten(relays: int, end: str) -> None:
    net = network(relays)
    alice, bob = session(net, "alice"), session(net, "bob", relays - 1)
    held_back(bob.subscribe_waiting("t"))
    net.run(0.5)
    flow = publish(alice)
    net.until(drained(alice), 60)
    assert flow.stalls
    bob.unsubscribe("t", "", KEY) if end == "unsubscribe" else getattr(bob, end)()
    rest(net)
    publish(alice)
    assert drained(alice)()
    rest(net)


def test_a_group_is_served_by_whoever_goes_on_and_waited_for_while_nobody_does() -> None:
    net = network(3)
    alice = session(net, "alice")
    ones = [session(net, f"w{host}", host) for host in range(3)]
    sinks = [one.subscribe_waiting("t", group="g", pace_us=2_000) for one in ones]
    held_back(*sinks[1:])
    net.run(0.5)
    flow = publish(alice)
    net.until(drained(alice), 10)
    net.run(1.0)
    assert not flow.stalls
    assert sinks[0].handled > MANY // 2
    assert sum(len(one.casts) for one in ones) == MANY
    held_back(*sinks)
    publish(alice, 4 * MANY)
    net.run(STALL_S / 2)
    assert flow.queue
    net.run(STALL_S)
    assert flow.stalls
    for sink in sinks:
        sink.resume()
    net.until(drained(alice), 3.0)
    rest(net)
    assert sum(len(one.casts) for one in ones) + dropped(net) == 5 * MANY


# -- what is lost on the way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("relays", [1, 2])
def test_credit_that_a_session_gave_and_that_was_lost_is_given_again(relays: int) -> None:
    net = network(relays)
    alice, bob = session(net, "alice"), session(net, "bob", relays - 1)
    sink = bob.subscribe_waiting("t", pace_us=100)
    net.run(0.5)
    bob.waiting.mute = 2
    flow = publish(alice)
    net.until(drained(alice), 3)
    rest(net)
    assert bob.waiting.muted == 2
    assert bob.waiting.renewals
    assert not flow.stalls, "asked again before the publisher gives up"
    assert sink.handled == MANY
    assert net.ledger.gaps == 0


def test_credit_that_a_link_lost_is_given_again() -> None:
    net = network(2)
    alice, bob = session(net, "alice"), session(net, "bob", 1)
    sink = bob.subscribe_waiting("t", pace_us=100)
    net.run(0.5)
    lost = 0

    def lose(at: SimRelay, from_host: int, frame: bytes) -> int:
        nonlocal lost
        if frame[KIND_AT] != Kind.WINDOW or lost >= 2:
            return 1
        lost += 1
        return 0

    net.copies_of_control = lose
    flow = publish(alice)
    net.until(drained(alice), 3)
    rest(net)
    assert lost == 2
    assert not flow.stalls
    assert sink.handled == MANY
    assert net.ledger.gaps == 0


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("fault", ["cut", "stop", "crash", "freeze", "retire"])
def test_faults_on_the_way_hold_nobody_back_for_longer_than_a_stall(fault: str, seed: int) -> None:
    net = network(3, seed)
    alice = session(net, "alice")
    sinks = [
        session(net, f"s{host}", host).subscribe_waiting("t", pace_us=5_000) for host in range(3)
    ]
    net.run(0.5)
    flow = publish(alice, 3 * MANY)
    net.run(0.3 + 0.01 * seed)
    relay = net.relays[1]
    if fault in ("cut", "stop"):
        getattr(net, fault)(0, 1)
    elif fault == "retire":
        relay.retire(200_000)
    else:
        getattr(relay, fault)()
    for _ in range(12):
        before = len(flow.sent)
        net.run(STALL_S + 0.1)
        assert len(flow.sent) > before or not flow.queue
        flow.check()
    rest(net)
    if net.sessions and fault != "crash":
        again = session(net, "again", 1)
        sinks.append(again.subscribe_waiting("t"))
    net.run(0.5)
    net.ledger.stalls = 0
    lost = dropped(net)
    publish(alice)
    net.until(drained(alice), 3)
    rest(net)
    assert net.ledger.stalls == 0
    assert dropped(net) == lost
    assert sinks[0].handled == sinks[2].handled == 4 * MANY


def test_other_sites_are_not_waited_for() -> None:
    net = SimNetwork(1, sites={"ams": 2, "ber": 2}, port_bytes=4 << 20)
    net.run(2.0)
    alice = net.at("ams", 1).session("alice")
    far = net.at("ber", 1).session("far")
    held_back(far.subscribe_waiting("t"))
    near = net.at("ams").session("near").subscribe_waiting("t", pace_us=500)
    net.run(1.0)
    flow = publish(alice)
    net.until(drained(alice), 3)
    net.run(1.0)
    assert not flow.stalls
    assert near.handled == MANY
    assert len(far.casts) == MANY
    rest(net)


def test_sessions_that_do_not_wait_are_never_asked_and_hold_nobody_back() -> None:
    net = network(2)
    alice = session(net, "alice")
    old = net.relays[1].session("old")
    old.subscribe("t")
    net.run(0.5)
    publish(alice, 2 * MANY)
    net.until(drained(alice), STALL_S / 2)
    rest(net)
    assert not net.ledger.stalls
    assert len(old.casts) + dropped(net) == 2 * MANY


@pytest.mark.parametrize("seed", [2, 3, 15, 20])
def test_random_lives_stall_renew_and_recover_and_keep_every_promise(seed: int) -> None:
    chaos = play(seed, 360)
    assert chaos.net.ledger.stalls
    assert chaos.net.ledger.renewals
    assert chaos.recoveries


def test_who_would_wait_for_good_is_found_out() -> None:
    """The check itself is tested with a relay that grants no credit and a publisher that never stalls."""
    net = network(1)
    alice, bob = session(net, "alice"), session(net, "bob")
    held_back(bob.subscribe_waiting("t"))
    net.run(0.5)
    flow = publish(alice)
    flow._turn += 1
    net.run(STALL_S + 0.1)
    with pytest.raises(Violation, match="still waits to publish"):
        flow.check()
    with pytest.raises(Violation, match=r"publishers wait|still waits to publish"):
        net.check_idle()
