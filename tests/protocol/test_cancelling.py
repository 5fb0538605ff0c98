"""Members that asked for it are told of callers that left: those that cancel, reach their timeout or are lost."""

from __future__ import annotations

import random

import pytest
from protocol.kit import KEY, Answers, Host, Network, Result, Service
from protocol.test_quotas import Party
from protocol.test_sites import Sites

from iris.core.interfaces import Delivery
from iris.core.requests import Pending
from iris.errors import RequestTimeout
from iris.wire import frames
from iris.wire.codec import END, FLAGS_AT, KIND_AT, encode_control
from iris.wire.frames import CallerLeft
from iris.wire.kinds import FLAG_REFUSED, Kind, Refusal
from iris.wire.runs import call_run
from relay.core.leaving import REST_US
from relay.core.limits import Limits
from relay.core.link import SUSPENDED_US

RELAYS = pytest.mark.parametrize("relays", [1, 2])
REST_S = REST_US / 1e6


class Member:
    """A member that asks for callers that left, and notes which of its calls ended by that."""

    def __init__(self, host: Host, name: str = "db", *, cancel: bool = True) -> None:
        self.host = host
        self.ended: list[bytes] = []
        self.service: Service = host.serve(name, cancel=cancel)
        self.service.handler = self._began

    def _began(self, delivery: Delivery) -> None:
        payload = delivery.message.payload
        self.host.session.cancels[delivery.hop] = lambda: self.ended.append(payload)

    def answer_all(self) -> None:
        for delivery in self.service.deliveries:
            self.host.session.cancels.pop(delivery.hop, None)
            delivery.reply(delivery.message.payload, None, False)
        self.service.deliveries.clear()


def network(relays: int) -> tuple[Network, Host, Member]:
    net = Network(relays=relays)
    if relays == 2:
        net.link(0, 1)
    caller = net.host("caller")
    member = Member(net.host("member", relay=relays - 1))
    net.run()
    return net, caller, member


def ask(caller: Host, payload: bytes, timeout_ms: int = 60_000) -> Pending:
    return caller.send("db", payload, Result(), timeout_ms=timeout_ms)


@RELAYS
def test_a_caller_that_cancels_ends_its_call_and_no_other(relays: int) -> None:
    net, caller, member = network(relays)
    bystander = net.host("bystander")
    calls = [ask(caller, b"%d" % number) for number in range(5)]
    ask(bystander, b"bystander")
    net.run()
    for number in (1, 3):
        caller.session.requests.forget(calls[number])
    net.pass_time(REST_S)
    assert sorted(member.ended) == [b"1", b"3"]
    assert member.host.session.callers_left == 2
    member.answer_all()
    net.run()
    assert caller.session.dropped == {"late answers": 2}
    assert all(calls[number].waiter.value == b"%d" % number for number in (0, 2, 4))  # type: ignore[union-attr]
    net.pass_time(1.0)
    assert len(member.ended) == 2
    net.check()


@RELAYS
def test_a_caller_whose_timeout_is_over_ends_its_call(relays: int) -> None:
    net, caller, member = network(relays)
    late = ask(caller, b"late", timeout_ms=300)
    ask(caller, b"patient")
    net.run()
    net.pass_time(0.5)
    assert isinstance(late.waiter.error, RequestTimeout)  # type: ignore[union-attr]
    assert member.ended == [b"late"]
    member.answer_all()
    net.run()
    net.check()


@RELAYS
def test_a_session_that_is_lost_ends_its_calls(relays: int) -> None:
    net, caller, member = network(relays)
    ask(caller, b"1")
    ask(caller, b"2")
    net.run()
    caller.lose()
    net.pass_time(REST_S)
    assert sorted(member.ended) == [b"1", b"2"]
    member.answer_all()
    net.hosts.remove(caller)
    net.run()
    net.check()


@RELAYS
def test_a_survey_that_is_given_up_ends_its_handlers(relays: int) -> None:
    net, caller, member = network(relays)
    pending = caller.send("db", b"count", survey=Answers(), timeout_ms=60_000)
    net.run()
    caller.session.requests.forget(pending)
    net.pass_time(REST_S)
    assert member.ended == [b"count"]
    member.answer_all()
    net.run()
    net.check()


def test_a_member_that_did_not_ask_is_not_told_of_callers_that_cancel() -> None:
    net = Network()
    caller, member = net.host(), Member(net.host("member"), cancel=False)
    pending = ask(caller, b"1")
    net.run()
    caller.session.requests.forget(pending)
    net.pass_time(1.0)
    assert member.host.session.callers_left == 0
    assert net.router._calls.leaving.notified == 0
    assert not caller.peer.left_hops, "nobody is searched for"
    asking = Member(net.host("another member"), "other")
    pending = ask(caller, b"2")
    net.run()
    caller.session.requests.forget(pending)
    net.pass_time(1.0)
    assert member.host.session.callers_left == asking.host.session.callers_left == 0
    caller.lose()
    net.pass_time(1.0)
    assert member.host.session.callers_left == 2, "of callers that are lost everybody is told"
    net.hosts.remove(caller)


def test_join_says_nothing_of_cancelling_if_the_member_does_not_ask() -> None:
    plain = encode_control(frames.Join(1, "db", [bytes(16)], {64: frames.Serving(1, 1)}))
    asking = encode_control(frames.Join(1, "db", [bytes(16)], {64: frames.Serving(1, 1, True)}))
    assert b"cancel" not in plain
    assert b"cancel" in asking


@RELAYS
def test_a_cancel_that_crosses_the_reply_changes_nothing(relays: int) -> None:
    net, caller, member = network(relays)
    pending = ask(caller, b"1")
    net.run()
    member.answer_all()  # it is not read by the relay yet
    caller.session.requests.forget(pending)
    net.pass_time(1.0)
    assert member.ended == []
    assert caller.session.dropped == {"late answers": 1}
    after = ask(caller, b"2")
    net.run()
    member.answer_all()
    net.run()
    assert after.waiter.value == b"2"  # type: ignore[union-attr]
    net.check()


def test_a_cancel_in_the_turn_of_its_request_follows_it() -> None:
    net, caller, member = network(1)
    pending = ask(caller, b"1")
    caller.session.requests.forget(pending)
    net.pass_time(REST_S)
    assert member.ended == [b"1"]
    member.answer_all()
    net.run()
    net.check()


def test_cancels_of_one_turn_travel_together_and_in_bounded_frames() -> None:
    net, caller, member = network(1)
    calls = [ask(caller, b"x") for _ in range(frames.MAX_CREDIT + 10)]
    sizes: list[int] = []
    control = caller.session.out.control

    def note(body: frames.Control) -> None:
        if isinstance(body, CallerLeft):
            sizes.append(len(body.hops))
        control(body)

    caller.session.control = note  # type: ignore[method-assign]
    net.run()
    for pending in calls:
        caller.session.requests.forget(pending)
    net.run()
    for _ in range(3):  # the search is made in parts
        net.pass_time(0.5)
    assert sizes == [frames.MAX_CREDIT, 10]
    assert len(member.ended) == len(calls)
    member.answer_all()
    net.run()
    net.check()


def test_ids_that_are_not_its_own_end_nobody_elses_calls() -> None:
    net, caller, member = network(1)
    hostile = net.host("hostile")
    ask(caller, b"victim")
    net.run()
    (hop,) = member.host.peer.in_flight
    mine = next(iter(caller.session.requests._pending))
    for hops in ([hop], [mine], [hop, mine, 0, 1 << 62, (1 << 63) + 5], []):
        hostile.session.control(CallerLeft(hops))
        member.host.session.control(CallerLeft(hops))  # nor does the member end a caller's
        net.pass_time(2 * REST_S)
    assert member.ended == []
    assert not hostile.ended_because
    assert not hostile.peer.left_hops
    member.answer_all()
    net.run()
    net.check()


def test_what_a_session_reports_is_bounded() -> None:
    net = Network(limits=Limits(pending=100))
    caller, member = net.host(), Member(net.host("member"))
    ask(caller, b"1")
    net.run()
    caller.session.control(CallerLeft([]))
    net.run()
    for start in range(2, 4000, 1000):
        caller.session.control(CallerLeft(list(range(start, start + 1000))))
        caller.speak()
        assert len(caller.peer.left_hops) <= 100
    assert caller.peer.dropped_entries > 0
    net.pass_time(REST_S)
    assert not caller.peer.left_hops
    member.answer_all()
    net.run()
    net.check()


def test_a_link_that_blinks_ends_nobodys_call_and_one_that_stays_away_does() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    caller, member = net.host("caller"), Member(net.host("member", relay=1))
    net.run()
    ask(caller, b"blink")
    net.run()
    net.cut(ends)
    net.pass_time(SUSPENDED_US / 2e6)
    ends = net.link(0, 1)
    net.pass_time(SUSPENDED_US / 1e6)
    assert member.ended == []
    ask(caller, b"away")
    net.run()
    net.cut(ends)
    net.pass_time(SUSPENDED_US / 1e6 - 0.5)
    assert member.ended == []
    net.pass_time(1.0)
    assert member.ended == [b"away"]
    member.answer_all()
    net.run()
    net.check()


def test_the_members_own_session_ends_its_calls() -> None:
    net, caller, member = network(1)
    ask(caller, b"1")
    net.run()
    member.host.lose()
    assert member.ended == [b"1"], "no answer can reach the caller"
    net.hosts.remove(member.host)


def test_a_call_that_waits_for_a_relay_is_dropped_when_its_caller_leaves() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    caller, member = net.host("caller"), Member(net.host("member", relay=1))
    net.run()
    net.cut(ends)
    given_up, waiting = ask(caller, b"given up"), ask(caller, b"waiting")
    caller.push("db", b"push", timeout_ms=60_000)
    net.run()
    assert len(net.router._calls.parking.waiting) == 3
    caller.session.requests.forget(given_up)
    net.pass_time(0.5)
    assert len(net.router._calls.parking.waiting) == 2
    net.link(0, 1)
    net.pass_time(0.5)
    assert [delivery.message.payload for delivery in member.service.deliveries] == [
        b"waiting", b"push",
    ]  # fmt: skip
    member.service.deliveries.pop().finish()
    member.answer_all()
    net.run()
    assert waiting.waiter.value == b"waiting"  # type: ignore[union-attr]
    net.check()


@pytest.mark.parametrize("sites", [("ams", "ber"), ("ams", "ams", "ber", "ber")])
def test_a_cancel_crosses_sites(sites: tuple[str, ...]) -> None:
    net = Sites(*sites)
    middle = len(sites) // 2
    ends = net.connect(middle - 1, middle)
    caller, member = net.host("caller"), Member(net.host("member", relay=len(sites) - 1))
    net.pass_time(1.0)
    given_up, other = ask(caller, b"given up"), ask(caller, b"other")
    net.run()
    caller.session.requests.forget(given_up)
    net.pass_time(1.0)
    assert member.ended == [b"given up"]
    member.answer_all()
    net.pass_time(1.0)
    assert other.waiter.value == b"other"  # type: ignore[union-attr]
    net.check()
    ask(caller, b"lost")
    net.run()
    for end in ends:
        net.ends.remove(end)
        end.router.wan_down(end.link)
    net.pass_time(SUSPENDED_US / 1e6 - 0.5)
    assert member.ended == [b"given up"]
    net.pass_time(1.5)
    assert member.ended == [b"given up", b"lost"], "the other site has not come back"
    member.answer_all()
    net.run()
    net.check()


@pytest.mark.parametrize("seed", range(10))
@RELAYS
def test_whatever_crosses_whatever_the_accounts_balance(relays: int, seed: int) -> None:
    rng = random.Random(seed)
    net, caller, member = network(relays)
    other = net.host("other")
    calls: list[Pending] = []
    given_up: set[bytes] = set()
    number = 0
    for _ in range(300):
        what = rng.random()
        if what < 0.4:
            number += 1
            calls.append(ask(caller, b"%d" % number))
            ask(other, b"other")
        elif what < 0.6 and calls:
            pending = calls.pop(rng.randrange(len(calls)))
            if not pending.waiter.done():  # type: ignore[union-attr]
                caller.session.requests.forget(pending)
                given_up.add(pending.payload)
        elif what < 0.8 and member.service.deliveries:
            delivery = member.service.deliveries.pop(rng.randrange(len(member.service.deliveries)))
            member.host.session.cancels.pop(delivery.hop, None)
            delivery.reply(b"", None, False)
        elif what < 0.9:
            net.pass_time(rng.choice((0.01, 0.2)))
        else:
            rng.choice((caller, member.host)).speak()
    net.run()
    net.pass_time(1.0)
    assert set(member.ended) <= given_up
    assert len(member.ended) == len(set(member.ended))
    unanswered = {delivery.message.payload for delivery in member.service.deliveries} & given_up
    assert unanswered <= set(member.ended)
    member.answer_all()
    net.run()
    assert sum(len(neighbor.in_flight) for neighbor in net.router.neighbors.values()) == 0
    net.check()


@pytest.mark.parametrize("count", [1, 3], ids=["a call", "a run of calls"])
def test_a_call_whose_holder_was_told_and_then_refuses_it_is_offered_to_nobody_else(
    count: int,
) -> None:
    router = Network().router
    caller, first, second = (Party(router) for _ in range(3))
    serving: dict[int, frames.Serving] = {int(Kind.REQUEST): frames.Serving(8, 1 << 20, True)}
    first.ask(lambda number: frames.Join(number, "db", first.keys, serving))
    caller.say(frames.Declare(0, Kind.REQUEST, "db", KEY.key_id, bytes(16)))
    deadline_us = router.now_us + 10_000_000
    caller.say(call_run(0, 0, 100, deadline_us, END.pack(0, 0, 1, 0), [b"x" * 16] * count))
    (dispatched,) = [bytearray(frame) for frame in first.port.out if frame[KIND_AT] >= Kind.REQUEST]
    second.ask(lambda number: frames.Join(number, "db", second.keys, serving))
    caller.say(CallerLeft([100]))
    router.now_us += REST_US
    router.expire()
    assert len(first.received(CallerLeft)) == 1
    dispatched[FLAGS_AT] = FLAG_REFUSED | Refusal.LEAVING << 4
    first.say(bytes(dispatched))
    offered = [frame for frame in second.port.out if frame[KIND_AT] >= Kind.REQUEST]
    assert len(offered) == count - 1  # those whose callers wait
    assert [fail.hop for fail in caller.received(frames.Fail)] == [100]
    for party in (caller, first, second):
        router.session_down(party.session)
    assert router.accounts.balance() == 0
