"""The interest of relays in each other's replicas, one scenario each, in virtual time."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.sim import KEY, SimNetwork, SimRelay
from support.sim.chaos import is_change
from support.sim.members import FOREVER_US

from iris.wire.codec import KIND_AT
from iris.wire.kinds import Cause, Kind

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("copies", [0, 2])
def test_a_change_that_is_lost_or_comes_twice_is_noticed_and_made_good(
    net: SimNetwork, copies: int
) -> None:
    server = net.relays[1].session("server")
    server.serve("db")
    net.run(0.1)
    garbled: list[bytes] = []

    def once(relay: SimRelay, host: int, frame: bytes) -> int:
        if relay is net.relays[0] and host == 1 and is_change(frame) and not garbled:
            garbled.append(frame)
            return copies
        return 1

    net.copies_of_control = once
    server.serve("web")
    net.run(0.1)
    server.subscribe("a.b")
    net.run(2.0)
    assert len(garbled) == 1
    assert net.relays[0].router.peer_interest.resyncs == 1
    assert net.relays[2].router.peer_interest.resyncs == 0
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
        if table.startswith(
            ("Link.", "Mesh.", "Advertiser.", "PeerInterest.", "Copy.", "Interest.", "Calls.")
        )
    }
    grown.pop("Link.routes", None)
    assert {table: size for table, size in grown.items() if size > 20} == {}


def test_control_frames_over_an_idle_link_are_beats_alone(net: SimNetwork) -> None:
    kinds: Counter[int] = Counter()

    def count(relay: SimRelay, host: int, frame: bytes) -> int:
        kinds[frame[KIND_AT]] += 1
        return 1

    net.run(1.0)
    net.copies_of_control = count
    net.run(10.0)
    assert 6 * 9 <= kinds.pop(Kind.BEAT) <= 6 * 11
    assert set(kinds) <= {Kind.ASK_PEERS, Kind.PEERS}


@pytest.mark.parametrize("host", [0, 1])
def test_an_answer_that_finds_no_room_makes_its_member_missing(host: int) -> None:
    net = SimNetwork(seed=12, relays=2, port_bytes=2_000)
    caller, publisher = net.relays[0].session("caller"), net.relays[0].session("publisher")
    members = [net.relays[host].session("server").serve("poll") for _ in range(6)]
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


def test_a_relay_learns_how_busy_others_keep_the_members_elsewhere() -> None:
    net = SimNetwork(seed=13, relays=4)
    first, second = net.relays[0].session("first"), net.relays[1].session("second")
    busy = net.relays[2].session("busy").serve("work", concurrency=8)
    net.run(0.1)
    busy.service_us = FOREVER_US
    for _ in range(8):
        first.request("work", timeout_ms=60_000)
    second.request("work", timeout_ms=60_000)  # relays with recent calls are notified
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
    net.run(20.0)  # all samples of the clocks are taken
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
    for host in (0, 1):
        grown = {
            table: (early[host].get(table, 0), size)
            for table, size in late[host].items()
            if size > early[host].get(table, 0) + 4
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


def test_a_relay_that_is_stopped_loses_nothing_and_leaves_at_once(
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
