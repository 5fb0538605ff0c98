"""Runs: calls of one sender to one address in one turn are one frame, and each has its own outcome."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from protocol.kit import Host, Network, Result, Service
from protocol.test_sites import Sites

from iris.core.interfaces import Delivery
from iris.errors import ConnectionLost, Overloaded, RelayError, RequestTimeout
from iris.wire.codec import BODY_AT, COUNT, COUNT_AT, DATA_LENGTH, HOP, KIND_AT
from iris.wire.frames import Fail
from iris.wire.kinds import FLAG_REFUSED, REFUSED_ALIAS, Cause, Kind, Refusal
from iris.wire.runs import MAX_RUN, answer_run, call_run, read_answers, read_calls, single_calls
from relay.core.limits import Limits


@pytest.fixture
def two() -> Iterator[Network]:
    """Two linked relays."""
    network = Network(relays=2)
    network.link(0, 1)
    yield network
    network.check()


class Wire:
    """Notes what the relays send to each host: (kind of frame, calls in it)."""

    def __init__(self, net: Network) -> None:
        self.to: dict[str, list[tuple[Kind, int]]] = {}
        net.tamper = self._see

    def _see(self, host: Host, frame: bytes) -> list[bytes]:
        kind = Kind(frame[KIND_AT])
        if kind >= Kind.REQUEST:
            (count,) = COUNT.unpack_from(frame, COUNT_AT)
            self.to.setdefault(host.label, []).append((kind, count))
        return [frame]


def echo(delivery: Delivery) -> None:
    delivery.reply(b"re " + delivery.message.payload, None, False)


def ask(caller: Host, count: int, name: str = "db", timeout_ms: int = 1000) -> list[Result]:
    return [caller.request(name, b"%d" % n, timeout_ms=timeout_ms) for n in range(count)]


def answer_all(net: Network, *services: Service) -> None:
    for service in services:
        for delivery in service.deliveries:
            echo(delivery)
    net.run()


def answered(results: list[Result]) -> bool:
    return [r.value for r in results] == [b"re %d" % n for n in range(len(results))]


def test_calls_of_one_turn_go_to_a_member_as_one_frame_and_come_back_as_one(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)
    wire = Wire(net)
    results = ask(caller, 5)
    net.run()
    assert answered(results)
    assert wire.to == {"member": [(Kind.CALLS, 5)], "caller": [(Kind.ANSWERS, 5)]}


def test_a_lone_call_travels_as_before(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)
    wire = Wire(net)
    results = ask(caller, 1)
    net.run()
    assert answered(results)
    assert wire.to == {"member": [(Kind.REQUEST, 1)], "caller": [(Kind.REPLY, 1)]}


def test_calls_of_two_addresses_and_of_two_timeouts_are_runs_of_their_own(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("a", echo)
    member.serve("b", echo)
    wire = Wire(net)
    results = [ask(caller, 2, "a"), ask(caller, 2, "b"), ask(caller, 3, "a", timeout_ms=500)]
    net.run()
    assert all(answered(several) for several in results)
    assert sorted(wire.to["member"]) == [(Kind.CALLS, 2), (Kind.CALLS, 2), (Kind.CALLS, 3)]


def test_a_run_is_cut_between_members_by_their_free_handlers(net: Network) -> None:
    caller = net.host("caller")
    services = [net.host(f"m{n}").serve("db", echo, concurrency=c) for n, c in enumerate((12, 4))]
    results = ask(caller, 16)
    net.run()
    assert answered(results)
    assert [len(service.deliveries) for service in services] == [12, 4]


def test_who_has_less_to_do_gets_what_makes_members_even(net: Network) -> None:
    caller = net.host("caller")
    busy = net.host("m0").serve("db", concurrency=64)
    ask(caller, 6)
    net.run()
    idle = net.host("m1").serve("db", concurrency=64)
    net.run()
    ask(caller, 8)
    net.run()
    assert (len(busy.deliveries), len(idle.deliveries)) == (7, 7)
    answer_all(net, busy, idle)


def test_a_run_is_not_cut_to_single_calls_between_busy_members(net: Network) -> None:
    caller = net.host("caller")
    services = [net.host(f"m{n}").serve("db", concurrency=64) for n in range(4)]
    ask(caller, 32)
    net.run()
    assert [len(service.deliveries) for service in services] == [8] * 4
    wire = Wire(net)
    ask(caller, 8)
    net.run()
    assert [frames for _, frames in sorted(wire.to.items())] == [[(Kind.CALLS, 4)]] * 2
    answer_all(net, *services)


def test_more_members_than_calls_get_one_each_at_most(net: Network) -> None:
    caller = net.host("caller")
    services = [net.host(f"m{n}").serve("db", echo) for n in range(20)]
    results = ask(caller, 16)
    net.run()
    assert answered(results)
    assert Counter(len(service.deliveries) for service in services) == {1: 16, 0: 4}


def test_a_run_over_a_link_stays_whole(two: Network) -> None:
    caller, member = two.host("caller"), two.host("member", relay=1)
    member.serve("db", echo, concurrency=64)
    wire = Wire(two)
    results = ask(caller, 8)
    two.run()
    assert answered(results)
    assert wire.to == {"member": [(Kind.CALLS, 8)], "caller": [(Kind.ANSWERS, 8)]}


def test_answers_of_one_turn_go_to_each_caller_as_a_run(net: Network) -> None:
    callers = [net.host("one"), net.host("two")]
    service = net.host("member").serve("db", concurrency=64)
    results = [ask(caller, 3) for caller in callers]
    net.run()
    wire = Wire(net)
    for pair in zip(service.deliveries[:3], service.deliveries[3:], strict=True):
        for delivery in pair:
            echo(delivery)
    net.run()
    assert all(answered(several) for several in results)
    assert wire.to == {"one": [(Kind.ANSWERS, 3)], "two": [(Kind.ANSWERS, 3)]}


def test_answers_of_one_turn_to_surveys_of_one_caller_leave_the_member_as_a_run(
    two: Network,
) -> None:
    callers = [two.host("near"), two.host("far", relay=1)]
    member = two.host("member")
    service = member.serve("db")
    two.run()
    surveys = [caller.survey("db") for caller in (*callers, callers[0])]
    two.run()
    sent: list[tuple[Kind, int]] = []
    out = member.session.out
    before = out.sent_messages
    for delivery in service.deliveries:
        echo(delivery)
    out.flush()
    for frame in out.chunks:
        if frame[KIND_AT] in (Kind.ANSWER, Kind.ANSWERS):
            sent.append((Kind(frame[KIND_AT]), *COUNT.unpack_from(frame, COUNT_AT)))
    assert sent == [(Kind.ANSWERS, 2), (Kind.ANSWER, 1)]
    assert out.sent_messages - before == 3
    wire = Wire(two)
    two.run()
    assert [survey.payloads for survey in surveys] == [[b"re "]] * 3
    assert all(survey.end == ([], None) for survey in surveys)
    assert sorted(wire.to.items()) == [
        ("far", [(Kind.ANSWER, 1)]),
        ("near", [(Kind.ANSWER, 1)] * 2),
    ]


def test_calls_of_a_run_are_answered_in_any_order_one_by_one(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db")
    results = ask(caller, 4)
    net.run()
    for delivery in reversed(service.deliveries):
        echo(delivery)
        net.run()
    assert answered(results)


def test_the_refused_part_of_a_run_is_run_by_another_member_as_a_run(net: Network) -> None:
    caller, full, free = net.host("caller"), net.host("full"), net.host("free")
    taken = {"left": 2}

    class Full(Service):
        def admit(self, kind: int, size: int) -> Refusal | None:
            taken["left"] -= 1
            return None if taken["left"] >= 0 else Refusal.FULL

    first = full.serve("db", echo)
    first.__class__ = Full
    second = free.serve("db", echo)
    wire = Wire(net)
    results = ask(caller, 16)
    net.run()
    assert answered(results)
    assert (len(first.deliveries), len(second.deliveries)) == (2, 14)
    assert wire.to["free"] == [(Kind.CALLS, 8), (Kind.CALLS, 6)]


def test_a_run_that_nobody_has_room_for_is_refused_call_by_call(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", echo)
    service.refusal = Refusal.FULL
    results = ask(caller, 3)
    net.run()
    assert [type(r.error) for r in results] == [Overloaded] * 3
    assert net.router.accounts.refused == 3


def test_a_run_counts_as_its_calls_against_a_session_s_bound() -> None:
    net = Network(limits=Limits(pending=5))
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", concurrency=64)
    results = ask(caller, 8)
    net.run()
    assert len(service.deliveries) == 5
    assert Counter(type(r.error) for r in results) == {type(None): 5, Overloaded: 3}
    for delivery in service.deliveries:
        echo(delivery)
    net.run()
    assert caller.peer.pending == 0


def test_a_member_that_is_lost_ends_each_call_of_its_runs(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db")
    results = ask(caller, 4)
    net.run()
    echo(service.deliveries[1])
    net.run()
    member.lose()
    net.run()
    assert [type(r.error) for r in results] == [ConnectionLost, type(None), *[ConnectionLost] * 2]
    assert results[1].value == b"re 1"
    assert caller.peer.pending == 0


def test_a_run_past_its_deadline_ends_call_by_call(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", echo)
    results = ask(caller, 3, timeout_ms=10)
    caller.session.flush()
    net.pass_time(20_000)
    net.run()
    assert not service.deliveries
    assert [type(r.error) for r in results] == [RequestTimeout] * 3


def test_pushes_of_one_turn_are_a_run_whose_credit_comes_back(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", lambda delivery: delivery.finish())
    wire = Wire(net)
    for n in range(6):
        caller.push("db", b"%d" % n)
    net.run()
    assert [d.message.payload for d in service.deliveries] == [b"%d" % n for n in range(6)]
    assert wire.to == {"member": [(Kind.CALLS, 6)]}
    assert not member.peer.in_flight
    assert caller.peer.pending == 0


def test_a_push_of_a_run_that_did_not_start_is_reported_to_its_sender(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db")
    for n in range(3):
        caller.push("db", b"%d" % n)
    net.run()
    for delivery, started in zip(service.deliveries, (True, False, True), strict=True):
        delivery.finish(started=started)
    net.run()
    assert [(lost.kind, lost.count) for lost in caller.losses] == [("push", 1)]


def test_a_repeated_run_runs_nothing_twice(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", echo)
    frames: list[bytes] = []

    def twice(host: Host, frame: bytes) -> list[bytes]:
        if frame[KIND_AT] == Kind.CALLS:
            frames.append(frame)
            return [frame, frame]
        return [frame]

    net.tamper = twice
    results = ask(caller, 4)
    net.run()
    assert len(frames) == 1
    assert len(service.deliveries) == 4
    errors = [r.error for r in results]
    assert all(isinstance(error, RelayError) and error.may_have_run for error in errors)


def test_answers_swapped_within_a_run_are_refused(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)

    def swap(host: Host, frame: bytes) -> list[bytes]:
        if frame[KIND_AT] != Kind.ANSWERS:
            return [frame]
        buf = memoryview(bytearray(frame))
        at, hops, sizes = read_answers(buf, 0, len(buf))
        assert sizes[0] == sizes[1]
        bodies = [bytes(buf[at : at + sizes[0]]), bytes(buf[at + sizes[0] :])]
        end = bytes(buf[26:38]) + COUNT.pack(1) + bytes(buf[42:50])
        (alias,) = COUNT.unpack_from(buf, 6)
        return [answer_run(alias, end, hops, bodies[::-1])]

    net.tamper = swap
    results = ask(caller, 2)
    net.run()
    assert [type(r.error) for r in results] == [ConnectionLost] * 2


def test_a_body_that_does_not_open_costs_its_own_call_alone(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    member.serve("db", echo)

    def damage(host: Host, frame: bytes) -> list[bytes]:
        if frame[KIND_AT] != Kind.CALLS:
            return [frame]
        buf = bytearray(frame)
        at, sizes = read_calls(memoryview(buf), 0, len(buf))
        buf[at + sum(sizes[:2]) - 1] ^= 1
        return [bytes(buf)]

    net.tamper = damage
    results = ask(caller, 3)
    net.run()
    assert isinstance(results[1].error, RelayError)
    assert [results[0].value, results[2].value] == [b"re 0", b"re 2"]


def test_a_call_of_an_older_relay_s_refusal_by_itself_is_handed_on(net: Network) -> None:
    """A member may send back one call of a run as a frame of its own."""
    caller, member, other = net.host("caller"), net.host("member"), net.host("other")
    service = member.serve("db", concurrency=64)
    results = ask(caller, 3)
    net.run()
    spare = other.serve("db", echo)
    handed = next(iter(member.peer.in_flight.values()))
    hop = handed.first_hop + 1
    sent = bytes(handed.length(hop) - BODY_AT)
    head = HOP.pack(
        DATA_LENGTH + len(sent), Kind.REQUEST, FLAG_REFUSED | Refusal.FULL << 4, 0, hop, 0
    )
    member.say(head + bytes(12) + COUNT.pack(1) + bytes(8) + sent)
    net.run()
    assert member.ended_because == ""
    assert not spare.deliveries, "its body was not what the caller sealed"
    assert isinstance(results[1].error, RelayError)
    for delivery in (service.deliveries[0], service.deliveries[2]):
        echo(delivery)
    net.run()
    assert [results[0].value, results[2].value] == [b"re 0", b"re 2"]


# -- what breaks the protocol ----------------------------------------------------------------------------------


def frame_of(kind: Kind, count: int, body: bytes, *, hop: int = 1, alias: int = 0) -> bytes:
    end = bytes(12) + COUNT.pack(count) + bytes(8)
    return HOP.pack(DATA_LENGTH + len(body), kind, 0, alias, hop, 0) + end + body


BAD = {
    "no calls": (frame_of(Kind.CALLS, 0, b""), "a run holds 0 calls"),
    "too many calls": (frame_of(Kind.CALLS, MAX_RUN + 1, bytes(4 * (MAX_RUN + 1))), "a run holds 257 calls"),
    "no room for the lengths": (frame_of(Kind.CALLS, 9, bytes(35)), "a CALLS frame of"),
    "lengths beyond the body": (frame_of(Kind.CALLS, 1, b"\x05\0\0\0abc"), "lengths in a run add up to"),
    "lengths short of the body": (frame_of(Kind.CALLS, 1, b"\x02\0\0\0abc"), "lengths in a run add up to"),
    "hop ids beyond their field": (
        frame_of(Kind.CALLS, 2, bytes(8), hop=(1 << 64) - 1), "go beyond",
    ),
    "hop ids of the relay's": (frame_of(Kind.CALLS, 1, bytes(4), hop=1 << 63), "not declared|reserved for this relay"),
    "an alias of nobody": (frame_of(Kind.CALLS, 1, bytes(4), alias=77), "was not declared"),
    "a run that is too long": (
        frame_of(Kind.CALLS, 1, (65_533).to_bytes(4, "little") + bytes(65_533)), "a CALLS frame of",
    ),
    "no answers": (frame_of(Kind.ANSWERS, 0, b""), "a run holds 0 calls"),
    "answers under an alias of nobody": (frame_of(Kind.ANSWERS, 1, bytes(12), alias=77), "was not declared"),
    "answers without lengths": (frame_of(Kind.ANSWERS, 2, bytes(16)), "an? ANSWERS frame of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_breaks_the_protocol_ends_its_own_session_alone(net: Network, name: str) -> None:
    frame, rule = BAD[name]
    offender, caller, member = net.host("offender"), net.host("caller"), net.host("member")
    member.serve("db", echo)
    ask(offender, 1)
    net.run()
    offender.say(frame)
    net.run()
    assert re.search(rule, offender.ended_because), offender.ended_because
    results = ask(caller, 3)
    net.run()
    assert answered(results)


def test_answers_that_were_not_asked_for_or_come_twice_are_dropped_and_counted(
    net: Network,
) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", concurrency=64)
    results = ask(caller, 3)
    net.run()
    for delivery in service.deliveries:
        echo(delivery)
    net.run()
    assert answered(results)
    alias = member.session.out.flow(Kind.REPLY, "db", member.key).alias
    assert alias is not None
    hops = [delivery.hop for delivery in service.deliveries]
    end = bytes(12) + COUNT.pack(1) + bytes(8)
    member.say(answer_run(alias.number, end, [hops[0], hops[0], 1 << 63], [b"x", b"y", b"z"]))
    net.run()
    assert member.ended_because == ""
    assert net.router.accounts.dropped["late answer"] == 3


def test_an_answer_that_is_twice_in_one_run_counts_once(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", concurrency=64)
    results = ask(caller, 3)
    net.run()
    echo(service.deliveries[2])
    net.run()
    alias = member.session.out.flow(Kind.REPLY, "db", member.key).alias
    assert alias is not None
    hops = [delivery.hop for delivery in service.deliveries]
    end = bytes(12) + COUNT.pack(1) + bytes(8)
    member.say(answer_run(alias.number, end, [hops[0], hops[0], hops[1]], [b"x", b"y", b"z"]))
    net.run()
    assert member.ended_because == ""
    assert net.router.accounts.dropped["late answer"] == 1
    assert [type(r.error) for r in results[:2]] == [ConnectionLost] * 2, "nobody sealed them"
    assert results[2].value == b"re 2"


def test_a_part_of_a_run_that_comes_back_changed_ends_the_member_s_session(net: Network) -> None:
    caller, member = net.host("caller"), net.host("member")
    service = member.serve("db", concurrency=64)
    results = ask(caller, 3)
    net.run()
    hop = service.deliveries[0].hop
    flags = FLAG_REFUSED | Refusal.FULL << 4
    member.say(
        call_run(REFUSED_ALIAS, flags, hop, 0, bytes(12) + COUNT.pack(1) + bytes(8), [b"a", b"b"])
    )
    net.run()
    assert member.ended_because.endswith("returned with another kind or length")
    assert all(isinstance(r.error, ConnectionLost) for r in results)


def test_a_relay_s_own_answer_ends_one_call_of_a_run(two: Network) -> None:
    caller, member = two.host("caller"), two.host("member", relay=1)
    service = member.serve("db", concurrency=64)
    results = ask(caller, 3)
    two.run()
    (link,) = two.routers[1].links.values()
    handed = next(iter(member.peer.in_flight.values()))
    link.control(Fail(handed.origin_hop(service.deliveries[1].hop), Cause.REFUSED, "for a reason"))
    two.run()
    assert isinstance(results[1].error, RelayError)
    for delivery in service.deliveries:
        echo(delivery)
    two.run()
    assert [results[0].value, results[2].value] == [b"re 0", b"re 2"]


def test_a_run_s_calls_as_single_frames_are_what_would_have_been_sent_alone(net: Network) -> None:
    caller = net.host("caller")
    ask(caller, 3)
    caller.session.flush()
    run = memoryview(bytearray(caller.session.out.chunks[-1]))
    singles = list(single_calls(run, 0, len(run), Kind.REQUEST))
    hops = [HOP.unpack_from(single)[4] for single in singles]
    assert hops == [hops[0], hops[0] + 1, hops[0] + 2]
    assert {single[KIND_AT] for single in singles} == {Kind.REQUEST}
    assert {COUNT.unpack_from(single, COUNT_AT)[0] for single in singles} == {1}


def test_a_run_crosses_to_another_site_and_its_answers_come_back_whole() -> None:
    net = Sites("ams", "ams", "ber", "ber")
    net.connect(1, 2)
    caller, member = net.host("caller"), net.host("member", relay=3)
    member.serve("db", echo, concurrency=64)
    net.settle()
    wire = Wire(net)
    results = ask(caller, 6)
    net.run()
    assert answered(results)
    assert wire.to == {"member": [(Kind.CALLS, 6)], "caller": [(Kind.ANSWERS, 6)]}
    net.check()


def test_what_another_site_refuses_of_a_run_ends_call_by_call() -> None:
    net = Sites("ams", "ams", "ber", "ber")
    net.connect(1, 2)
    caller, member = net.host("caller"), net.host("member", relay=3)
    service = member.serve("db", echo, concurrency=64)
    service.refusal = Refusal.FULL
    net.settle()
    results = ask(caller, 4)
    net.run()
    assert [type(r.error) for r in results] == [Overloaded] * 4
    net.check()
