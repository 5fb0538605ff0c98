"""Several relays: real sessions and routers, links in memory, and a separate clock for each relay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol.kit import KEY, OTHER_KEY, Network, Port, Result, kind_of

from iris.errors import ConnectionLost, NoMembers, Overloaded, RequestTimeout
from iris.wire import frames, link_frames
from iris.wire.codec import encode_control
from iris.wire.kinds import NEVER_US, Kind, Refusal
from relay.core import advertiser, control
from relay.core.limits import Limits
from relay.core.link import Copy, Link


def reply(text: bytes):
    return lambda delivery: delivery.reply(text, None, False)


def linked(relays: int = 2) -> Network:
    net = Network(relays=relays)
    for one in range(relays):
        for other in range(one):
            net.link(one, other)
    return net


def test_a_request_reaches_a_member_of_another_relay() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    answer = alice.request("db", b"ping")
    net.run()
    assert answer.value == b"pong"
    net.check()


def test_an_empty_reply_arrives_as_an_empty_reply() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b""))
    answer = alice.request("db", b"ping")
    net.run()
    assert answer.value == b""


def test_a_member_that_was_there_before_the_link_is_in_the_snapshot() -> None:
    net = Network(relays=2)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    inbox = bob.subscribe("news.*")
    net.link(0, 1)
    answer = alice.request("db", b"ping")
    alice.publish("news.today", b"one")
    net.run()
    assert answer.value == b"pong"
    assert inbox.payloads == [b"one"]


def test_a_member_of_the_own_relay_is_preferred_while_it_has_a_free_handler() -> None:
    net = linked()
    alice, near, far = net.host("alice"), net.host("near"), net.host("far", relay=1)
    ours = near.serve("db", concurrency=2)
    theirs = far.serve("db", concurrency=2)
    for _ in range(4):
        alice.request("db", b"ping", timeout_ms=60_000)
        net.run()
    assert (len(ours.deliveries), len(theirs.deliveries)) == (2, 2)


def test_a_refused_request_comes_back_and_runs_once_elsewhere() -> None:
    net = linked(3)
    alice = net.host("alice")
    full, free = net.host("full", relay=1), net.host("free", relay=2)
    refusing = full.serve("db", reply(b"never"))
    refusing.refusal = Refusal.FULL
    taking = free.serve("db", reply(b"free"))
    answers = [alice.request("db", b"ping") for _ in range(8)]
    net.run()
    assert [answer.value for answer in answers] == [b"free"] * 8
    assert not refusing.deliveries
    assert len(taking.deliveries) == 8
    net.check()


def test_a_request_that_all_refuse_is_overloaded_and_ran_nowhere() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db").refusal = Refusal.FULL
    answer = alice.request("db", b"ping")
    net.run()
    with pytest.raises(Overloaded) as caught:
        _ = answer.value
    assert not caught.value.may_have_run
    net.check()


def test_deadlines_are_mapped_between_clocks() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    answer = alice.request("db", b"ping", timeout_ms=5000)
    net.run()
    (delivery,) = service.deliveries
    left_us = delivery.deadline_us - bob.mono_us
    assert 4_900_000 < left_us <= 5_000_000
    net.pass_time(6)
    with pytest.raises(RequestTimeout):
        _ = answer.value


def test_a_member_that_dies_in_the_middle_of_a_request_is_reported_at_once() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db")
    answer = alice.request("db", b"ping")
    net.run()
    bob.lose()
    net.run()
    with pytest.raises(ConnectionLost) as caught:
        _ = answer.value
    assert caught.value.may_have_run


def test_a_lost_link_ends_what_is_in_flight_and_idempotent_requests_go_elsewhere() -> None:
    net = Network(relays=3)
    ends = net.link(0, 1)
    net.link(0, 2)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    held = bob.serve("db")
    once = alice.request("db", b"once")
    again = alice.request("db", b"again", idempotent=True)
    net.run()
    assert len(held.deliveries) == 2
    carol = net.host("carol", relay=2)
    carol.serve("db", reply(b"carol"))
    net.cut(ends)
    with pytest.raises(ConnectionLost):
        _ = once.value
    assert again.value == b"carol"


def test_a_link_that_flaps_suspends_interest_and_a_request_waits_for_it() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    net.cut(ends)
    answer = alice.request("db", b"ping", timeout_ms=5000)
    net.pass_time(1)
    assert not answer.done()
    net.link(0, 1)
    assert answer.value == b"pong"
    net.check()


def test_a_relay_that_does_not_come_back_is_forgotten_after_the_dead_after_time() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    net.cut(ends)
    answer = alice.request("db", b"ping", timeout_ms=60_000)
    net.pass_time(4)
    with pytest.raises(NoMembers):
        _ = answer.value
    at_once = alice.request("db", b"ping", timeout_ms=60_000)
    net.run()
    with pytest.raises(NoMembers):
        _ = at_once.value
    assert not net.router.mesh.copies
    net.check()


def test_a_parked_request_ends_at_its_deadline() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    net.cut(ends)
    answer = alice.request("db", b"ping", timeout_ms=1000)
    net.pass_time(2)
    with pytest.raises(RequestTimeout):
        _ = answer.value
    net.check()


def test_nobody_is_not_said_before_the_first_discovery_interval() -> None:
    net = Network(relays=2)
    net.router.mesh.settle_us = net.router.now_us + 1_000_000
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    answer = alice.request("db", b"ping", timeout_ms=5000)
    net.run()
    assert not answer.done()
    net.link(0, 1)
    assert answer.value == b"pong"


def test_a_goodbye_drops_the_interest_at_once() -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db", reply(b"pong"))
    there.control(encode_control(frames.Bye("stopped")))
    net.run()
    assert here.link.closed
    answer = alice.request("db", b"ping", timeout_ms=5000)
    net.run()
    with pytest.raises(NoMembers):
        _ = answer.value


def test_a_draining_relay_is_handed_nothing_new_and_finishes_what_runs() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    running = alice.request("db", b"running")
    net.run()
    net.routers[1].drain(1000)
    net.run()
    late = alice.request("db", b"late")
    net.run()
    with pytest.raises(NoMembers):
        _ = late.value
    service.deliveries[0].reply(b"done", None, False)
    net.run()
    assert running.value == b"done"


def test_publish_sends_one_copy_per_relay_that_wants_it() -> None:
    net = Network(relays=3)
    wanted, unwanted = net.link(0, 1), net.link(0, 2)
    alice = net.host("alice")
    inboxes = [net.host(f"s{n}", relay=1).subscribe("news.>") for n in range(3)]
    seen: list[int] = []
    wanted[0].tamper = lambda frame: seen.append(kind_of(frame)) or (frame,)
    other: list[int] = []
    unwanted[0].tamper = lambda frame: other.append(kind_of(frame)) or (frame,)
    alice.publish("news.a", b"1", b"2")
    net.run()
    assert seen.count(Kind.PUBLISH) == 1
    assert Kind.PUBLISH not in other
    assert [inbox.payloads for inbox in inboxes] == [[b"1", b"2"]] * 3
    net.check()


def test_broadcast_reaches_every_member_of_every_relay_once() -> None:
    net = linked(3)
    alice = net.host("alice")
    services = [net.host(f"m{n}", relay=n % 3).serve("db") for n in range(6)]
    alice.publish("db", b"1", kind=Kind.BROADCAST)
    alice.publish("db", b"2", kind=Kind.BROADCAST)
    net.run()
    assert [[m.payload for m in service.casts] for service in services] == [[b"1", b"2"]] * 6
    net.check()


def test_a_queue_group_that_spans_relays_gets_each_bundle_once() -> None:
    net = linked(3)
    alice = net.host("alice")
    inboxes = [net.host(f"s{n}", relay=n % 3).subscribe("jobs.*", group="g") for n in range(6)]
    plain = net.host("plain", relay=2).subscribe("jobs.*")
    for number in range(60):
        alice.publish("jobs.a", b"%d" % number)
        net.run()
    got = sorted(int(p) for inbox in inboxes for p in inbox.payloads)
    assert got == list(range(60))
    assert [int(p) for p in plain.payloads] == list(range(60))
    assert all(inbox.payloads for inbox in inboxes)
    net.check()


def test_a_survey_asks_members_of_all_relays() -> None:
    net = linked(3)
    alice = net.host("alice")
    for number in range(4):
        net.host(f"m{number}", relay=number % 3).serve("db", reply(b"%d" % number))
    answers = alice.survey("db", b"?")
    net.run()
    assert sorted(answers.payloads) == [b"0", b"1", b"2", b"3"]
    assert answers.end == ([], None)
    assert len(answers.roster_ids) == 4
    net.check()


def test_a_lost_relays_members_are_missing_from_a_survey() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    net.host("near").serve("db", reply(b"near"))
    bob.serve("db")
    answers = alice.survey("db", b"?", timeout_ms=60_000)
    net.run()
    assert answers.end is None
    net.cut(ends)
    assert answers.payloads == [b"near"]
    assert answers.end is not None
    lost, error = answers.end
    assert error is None
    assert lost == [
        member for member in answers.roster_ids if member.startswith(net.routers[1].relay_id.hex())
    ]
    assert len(lost) == 1


def test_pushes_are_credited_over_a_link() -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    for number in range(10):
        alice.push("db", b"%d" % number)
    net.run()
    assert [d.message.payload for d in service.deliveries] == [b"%d" % n for n in range(10)]
    assert len(here.link.in_flight) == 10
    for delivery in service.deliveries:
        delivery.finish()
    net.run()
    assert not here.link.in_flight
    net.check()


def test_pushes_that_did_not_run_behind_a_link_are_reported() -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    for _ in range(3):
        alice.push("db")
    net.run()
    for delivery, started in zip(service.deliveries, (True, False, False), strict=True):
        delivery.finish(started=started)
    net.run()
    assert [(loss.kind, loss.name, loss.count) for loss in alice.losses] == [("push", "db", 1)] * 2
    assert not here.link.in_flight
    net.check()


def test_a_tunnel_passes_over_a_link_both_ways() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    near = alice.open_tunnel("db", {"a": "b"})
    net.run()
    (far,) = service.tunnels
    near.write(memoryview(b"hello"), 0)
    far.write(memoryview(b"there"), 0)
    net.run()
    assert far.next_chunk() == (3, b"hello")
    assert near.next_chunk() == (3, b"there")
    near.close()
    net.run()
    assert far.ended
    net.check()


def test_tunnels_opened_from_both_sides_of_a_link_do_not_mix() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    ours, theirs = alice.serve("a"), bob.serve("b")
    outward = [alice.open_tunnel("b") for _ in range(5)]
    inward = [bob.open_tunnel("a") for _ in range(5)]
    net.run()
    for number, end in enumerate(outward + inward):
        end.write(memoryview(b"%d" % number), 0)
    net.run()
    assert sorted(end.next_chunk()[1] for end in theirs.tunnels) == [b"0", b"1", b"2", b"3", b"4"]
    assert sorted(end.next_chunk()[1] for end in ours.tunnels) == [b"5", b"6", b"7", b"8", b"9"]


def test_a_tunnel_breaks_on_both_ends_when_the_link_is_lost() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db")
    near = alice.open_tunnel("db")
    net.run()
    (far,) = service.tunnels
    net.cut(ends)
    assert near.broken
    assert far.broken
    net.check()


def test_a_lost_link_is_reported_as_a_gap_of_unknown_length() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    inbox = bob.subscribe("news.*")
    alice.publish("news.a", b"1")
    net.run()
    net.cut(ends)
    assert [(gap.count, gap.cause) for gap in inbox.gaps] == [(None, "a link on the way was lost")]
    alice.publish("news.a", b"lost")
    net.run()
    net.link(0, 1)
    alice.publish("news.a", b"3")
    net.run()
    assert inbox.payloads == [b"1", b"3"]
    assert [gap.count for gap in inbox.gaps] == [None, 1]


def test_what_a_full_link_drops_is_reported_to_the_subscriber() -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    inbox = bob.subscribe("news.*")
    alice.publish("news.a", b"1")
    net.run()
    here.room = 0
    alice.publish("news.a", b"2", b"3")
    net.run()
    here.room = None
    net.router.writable(here.link)
    alice.publish("news.a", b"4")
    net.run()
    assert inbox.payloads == [b"1", b"4"]
    assert sum(gap.count or 0 for gap in inbox.gaps) == 2
    assert net.router.accounts.dropped["slow receiver"] == 2


def test_a_lost_change_of_interest_is_noticed_and_made_good() -> None:
    net = Network(relays=2)
    _, there = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    there.tamper = lambda frame: () if kind_of(frame) == Kind.INTEREST else (frame,)
    bob.serve("lost", reply(b"lost"))
    there.tamper = lambda frame: (frame,)
    bob.serve("db", reply(b"db"))
    net.run()
    answers = [alice.request(name, b"?") for name in ("lost", "db")]
    net.run()
    assert [answer.value for answer in answers] == [b"lost", b"db"]
    assert net.router.peer_interest.resyncs == 1


def test_a_repeated_change_of_interest_is_noticed_and_made_good() -> None:
    net = Network(relays=2)
    _, there = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    there.tamper = lambda frame: (frame, frame) if kind_of(frame) == Kind.INTEREST else (frame,)
    bob.serve("db", reply(b"db"))
    there.tamper = lambda frame: (frame,)
    net.run()
    answer = alice.request("db", b"?")
    net.run()
    assert answer.value == b"db"
    assert net.router.peer_interest.resyncs >= 1
    copy = net.router.mesh.copies[net.routers[1].relay_id]
    assert [entry.name for entry in copy.members.values()] == ["db"]


def test_a_silent_link_ends_after_three_seconds() -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    there.tamper = here.tamper = lambda frame: ()
    net.pass_time(2.5)
    assert not here.link.closed
    net.pass_time(1)
    assert here.link.closed
    assert there.link.closed
    assert "silent" in here.why


def test_members_of_other_relays_are_listed_and_watched() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    received: list[frames.Membership] = []
    alice.session.out.prove(KEY)
    alice.session.watch("db", [KEY.key_id], received.append, stay=True)
    service = bob.serve("db")
    member_id = f"{net.routers[1].relay_id.hex()}.{service.member}"
    assert [[info.member for info in each.joined] for each in received] == [[], [member_id]]
    assert received[1].joined[0].label == "bob"
    net.cut(ends)
    net.pass_time(1)
    net.link(0, 1)
    assert len(received) == 2  # a link that returns at once does not change the members
    assert [info.member for info in net.router.mesh.infos("db", [KEY.key_id])] == [member_id]
    assert not [*net.router.mesh.infos("db", [OTHER_KEY.key_id])]
    assert net.router.mesh.other_keys("db", [OTHER_KEY.key_id]) == {KEY.key_id[:4].hex(): 1}
    bob.lose()
    net.run()
    assert received[2].left == [member_id]


def test_a_long_list_of_members_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "INFOS", 2)
    net = linked()
    alice = net.host("alice")
    for number in range(5):
        net.host(f"m{number}", relay=number % 2).serve("db")
    received: list[frames.Membership] = []
    alice.session.out.prove(KEY)
    alice.session.watch("db", [KEY.key_id], received.append, stay=False)
    net.run()
    assert [(len(part.joined), part.more) for part in received] == [
        (2, True),
        (2, True),
        (1, False),
    ]


def test_a_frame_that_came_over_a_link_is_never_sent_over_another() -> None:
    net = Network(relays=3)
    net.link(0, 1)
    onward = net.link(1, 2)
    alice, far = net.host("alice"), net.host("far", relay=2)
    net.host("near", relay=1).subscribe("news.*")
    inbox = far.subscribe("news.*")
    far.serve("db", reply(b"far"))
    seen: list[int] = []
    onward[0].tamper = lambda frame: seen.append(kind_of(frame)) or (frame,)
    alice.publish("news.a", b"1")
    answer = alice.request("db", b"?")
    net.run()
    assert inbox.payloads == []
    assert Kind.PUBLISH not in seen
    with pytest.raises(NoMembers):
        _ = answer.value


def test_peers_are_introduced() -> None:
    net = Network(relays=3)
    for number, router in enumerate(net.routers):
        router.mesh.addresses = [f"10.0.0.{number}:7430"]
    met: list[tuple[bytes, list[str]]] = []
    net.routers[2].mesh.introduced = lambda relay_id, addresses: met.append((relay_id, addresses))
    net.link(0, 1)
    net.link(0, 2)
    assert met == [(net.routers[1].relay_id, ["10.0.0.1:7430"])]


def test_others_hear_how_busy_members_are_while_they_ask() -> None:
    net = linked(3)
    alice, carol = net.host("alice"), net.host("carol", relay=2)
    bob = net.host("bob", relay=1)
    bob.serve("db", concurrency=8)
    for _ in range(5):
        carol.request("db", b"?", timeout_ms=60_000)
    alice.request("db", b"?", timeout_ms=60_000)
    net.run()
    link = net.router.links[net.routers[1].relay_id]
    load = link.loads[(Kind.REQUEST, "db", KEY.key_id)]
    assert (load.messages, load.others) == (1, 5)


@pytest.mark.parametrize("hop_class", [0, 2])
def test_an_alias_of_another_hop_class_ends_the_link(hop_class: int) -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    here.control(
        encode_control(
            frames.Declare(0, Kind.PUBLISH, "a", KEY.key_id, bytes(16), hop_class=hop_class)
        )
    )
    net.run()
    assert there.link.closed
    assert "hop class" in there.why


def test_a_member_of_an_unknown_kind_ends_the_link() -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    member = link_frames.MemberEntry(1, "db", [KEY.key_id], {int(Kind.REPLY): 1})
    here.control(encode_control(link_frames.Interest(0, 9, joined=[member], reset=True)))
    net.run()
    assert there.link.closed
    assert "unknown kind" in there.why


def test_a_session_cannot_pose_as_a_link() -> None:
    net = Network()
    alice = net.host("alice")
    alice.session.out.prove(KEY)
    alice.publish("a", b"1")
    net.run()
    alice.say(
        encode_control(frames.Declare(9, Kind.PUBLISH, "a", KEY.key_id, bytes(16), hop_class=1))
    )
    assert alice.peer.closed
    assert "hop class" in alice.ended_because


def test_interest_frames_from_a_session_are_refused() -> None:
    net = Network()
    alice = net.host("alice")
    alice.say(encode_control(link_frames.Interest(0, 1)))
    assert alice.peer.closed


def test_a_snapshot_of_many_members_takes_several_frames() -> None:
    net = Network(relays=2)
    bob = net.host("bob", relay=1)
    for number in range(300):
        bob.subscribe(f"{'x' * 200}.{number}")
    _, there = net.link(0, 1)
    assert len(there.router.advertiser._snapshot) > 1
    assert len(net.router.links[net.routers[1].relay_id].topics) == 300


def test_the_aliases_of_a_session_that_left_are_used_again() -> None:
    net = Network(relays=2)
    here, there = net.link(0, 1)
    net.host("bob", relay=1).subscribe(">")
    for number in range(20):
        alice = net.host(f"alice{number}")
        for topic in range(5):
            alice.publish(f"news.{number}.{topic}", b"1")
        net.run()
        assert len(here.link.aliases) == 5
        alice.lose()
        assert len(here.link.aliases) == 0
    assert sum(route is not None for route in there.link.routes) == 5


def test_loads_are_reported_no_longer_than_somebody_asks() -> None:
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db")
    alice.request("db", b"held for long", timeout_ms=60_000)
    net.run()
    net.pass_time(2)
    assert net.routers[1].mesh.loads.report_us > net.routers[1].now_us + 60_000_000


def test_a_call_for_an_address_that_nobody_serves_leaves_nothing_to_report() -> None:
    """Otherwise each report, of a hundred a second, would scan all addresses that another relay ever made up."""
    net = linked()
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db")
    answer = alice.request("db", timeout_ms=60_000)
    alice.speak()  # it lies on the link
    bob.lose()
    net.run()
    (link,) = net.routers[1].links.values()
    assert isinstance(answer.error, Overloaded)
    assert not link.demands
    assert net.routers[1].mesh.loads.report_us == NEVER_US


def test_a_relay_takes_no_more_queue_groups_than_an_alias_over_a_link_can_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advertiser, "MAX_GROUPS_HERE", 3)
    net = linked()
    first, second = net.host("first", user="uid 1"), net.host("second", user="uid 2")
    for number in range(3):
        first.subscribe("jobs.*", group=f"g{number}")
    second.subscribe("jobs.*", group="g0")
    with pytest.raises(AssertionError, match="already in 3 queue groups"):
        second.subscribe("jobs.*", group="another")
    assert set(net.router.advertiser._groups[KEY.key_id]) == {"g0", "g1", "g2"}
    first.lose()
    second.lose()
    assert not net.router.advertiser._groups


def test_as_many_groups_as_a_relay_takes_fit_an_alias_over_a_link() -> None:
    net = linked()
    alice = net.host("alice")
    names = [f"{'x' * 240}.{number}" for number in range(advertiser.MAX_GROUPS_HERE)]
    inboxes = []
    for at in range(0, len(names), 64):
        bob = net.host("bob", relay=1, user=f"uid {at}")
        inboxes += [bob.subscribe("jobs.*", group=name) for name in names[at : at + 64]]
    alice.publish("jobs.a", b"1")
    net.run()
    assert net.router.links
    assert all(inbox.payloads == [b"1"] for inbox in inboxes)


def test_long_introductions_come_in_frames_that_fit() -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    mesh = net.routers[1].mesh
    received: list[bytes] = []
    net.router.mesh.introduced = lambda relay_id, addresses: received.append(relay_id)
    for number in range(150):
        hello = link_frames.LinkHello(
            1, 0, number.to_bytes(16, "big"), 1, 1, 1 << 20, addresses=["x" * 300] * 16
        )
        mesh.links[hello.relay_id] = Link(
            Port(), 1000 + number, hello, Copy("", "", ""), bytes(16), 1
        )
    here.link.control(link_frames.AskPeers())
    while here.speak() or here.other.speak():
        pass
    assert len(set(received)) == 150


def test_a_tunnel_id_that_waits_here_is_not_opened_twice() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    bob.serve("db")
    alice.open_tunnel("db")
    alice.speak()
    net.run()
    net.cut(ends)
    opening = alice.open_tunnel("db")
    alice.session.flush()
    data = b"".join(alice.session.out.chunks)
    alice.session.out.chunks = []
    alice.say(data)
    assert opening.hop
    alice.say(data)
    assert alice.peer.closed
    assert "already in use" in alice.ended_because


def test_loads_of_many_long_names_fit_their_frames() -> None:
    net = linked()
    alice, bob, carol = net.host("alice"), net.host("bob", relay=1), net.host("carol", relay=1)
    names = [f"{'n' * 250}.{number}" for number in range(120)]
    for name in names:
        bob.serve(name, concurrency=4)
    for name in names:
        carol.request(name, timeout_ms=60_000)
        alice.request(name, timeout_ms=60_000)
    net.run()
    link = net.router.links[net.routers[1].relay_id]
    assert [load.others for load in link.loads.values()] == [1] * 120


def test_surveys_that_nobody_answers_do_not_close_the_caller_for_good() -> None:
    net = Network(limits=Limits(pending=3))
    alice, bob = net.host("alice"), net.host("bob")
    bob.serve("db", concurrency=100)
    for _ in range(3):
        alice.survey("db", b"?", timeout_ms=500)
    net.pass_time(2)
    answers = alice.survey("db", b"?", timeout_ms=500)
    net.run()
    assert len(answers.roster_ids) == 1


def test_a_link_whose_snapshot_never_comes_keeps_nobody_waiting_for_long() -> None:
    net = Network(relays=2)
    alice = net.host("alice")
    silent = Port()
    hello = net.routers[1].hello(0)
    link = net.router.link_up(silent, hello)
    answer = alice.request("db", b"?", timeout_ms=60_000)
    net.run()
    assert not answer.done()
    for _ in range(8):
        link.beats.last_us = net.router.now_us
        net.pass_time(0.5)
    with pytest.raises(NoMembers):
        _ = answer.value


def test_labels_of_other_relays_are_cleaned_for_terminals() -> None:
    net = linked()
    net.host("\x1b]0;gotcha\x07", relay=1).serve("db")
    (info,) = net.router.mesh.infos("db", [KEY.key_id])
    assert info.label == "?]0;gotcha?"


def test_a_change_gathered_when_a_link_comes_up_is_advertised_once() -> None:
    net = Network(relays=3)
    net.link(0, 1)
    bob = net.host("bob")
    bob.session.out.prove(KEY)
    bob.session.ask(lambda number: frames.Subscribe(number, "a", [KEY.key_id], ""), Result())
    bob.speak()
    net.link(0, 2)
    assert [router.peer_interest.resyncs for router in net.routers] == [0, 0, 0]


WALL_US = 1_790_000_000_000_000


def test_a_link_shows_by_how_much_the_clock_of_the_other_relay_is_ahead() -> None:
    def wall(ahead_us: int) -> Callable[[], int]:
        return lambda: WALL_US + net.now_us + ahead_us

    net = Network(relays=2, walls=[wall(0), wall(90_000_000)])
    seen: list[bytes] = []
    end, _ = net.link(0, 1)

    def watch(frame: bytes) -> tuple[bytes, ...]:
        if kind_of(frame) == Kind.BEAT:
            seen.append(frame)
        return (frame,)

    end.tamper = watch
    net.pass_time(4)
    (entry,) = net.router.status()["links"]
    assert seen
    assert all(b"wall_us" in beat for beat in seen)
    assert abs(entry["clock_offset_us"] - 90_000_000) <= entry["clock_error_us"] + 1  # type: ignore[operator]
