"""One frame, one look at what is due, and one end of a connection do bounded work, whatever a session has set up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from protocol.kit import KEY, OTHER_KEY, Network, Port
from protocol.test_quotas import Party, receive

from iris.wire import frames, link_frames
from iris.wire.codec import END, HOP, encode_control, tunnel_frame
from iris.wire.frames import Serving
from iris.wire.kinds import UNLIMITED, Cause, Kind
from iris.wire.link_frames import MemberEntry
from iris.wire.runs import call_run
from relay.core import audience, control
from relay.core import credit as credit_module
from relay.core import leaving as leaving_module
from relay.core import mesh as mesh_module
from relay.core import overdue as overdue_module
from relay.core.credit import Credits
from relay.core.interest import Interest
from relay.core.limits import Limits
from relay.core.router import Router

KEY_ID = KEY.key_id
MOST = 64
"""Looks at flows or parked calls in one step, and a few more."""
MOST_ENDED = 300
"""Entries of an ended session that are removed in one step, and a few more."""


def party(router: Router, user: str = "uid 1") -> Party:
    return Party(router, user)


def step(router: Router) -> None:
    """Let time pass until something is due, and do that once."""
    router.now_us = max(router.now_us, router.deadline_us)
    router.expire()


def declare(sender: Party, alias: int, name: str, kind: Kind = Kind.PUBLISH) -> None:
    sender.say(frames.Declare(alias, kind, name, KEY_ID, bytes(16)))


def data(kind: Kind, alias: int, hop: int = 0, deadline_us: int = 0) -> bytes:
    body = END.pack(0, 0, 1, 0) + bytes(64)
    return HOP.pack(22 + len(body), kind, 0, alias, hop, deadline_us) + body


def publish(sender: Party, alias: int) -> None:
    sender.say(data(Kind.PUBLISH, alias))


def wait(publisher: Party, topics: range, prefix: str = "t") -> None:
    """Publish once to each topic, as a publisher that waits."""
    for alias in topics:
        declare(publisher, alias, f"{prefix}.{alias}")
        publisher.say(frames.Wait(alias, 1))
        publish(publisher, alias)


def stop(publisher: Party, subscriber: Party, topics: range) -> None:
    """Let a subscriber's queue be long, so that the publisher has no credit for these topics."""
    subscriber.port.crowded = True
    for alias in topics:
        publisher.say(frames.Wait(alias, 2))
    publisher.port.out.clear()


def spied(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Counter[str]:
    """Count the calls of a method."""
    calls: Counter[str] = Counter()
    real: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **named: Any) -> Any:
        calls[name] += 1
        return real(*args, **named)

    monkeypatch.setattr(owner, name, counted)
    return calls


def without_completing(sender: Party, body: frames.Control) -> None:
    """Let the relay handle a frame as its ports do, which do the unfinished part later."""
    frame = bytearray(encode_control(body))
    sender.router.entry(sender.session)(memoryview(frame), 0, len(frame))


# -- flows that wait for credit ----------------------------------------------------------------------------------------


def test_a_step_looks_at_a_bounded_number_of_flows_and_each_gets_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Network().router
    publisher, subscriber = party(router), party(router)
    subscriber.subscribe(">")
    topics = range(300)
    wait(publisher, topics)
    stop(publisher, subscriber, topics)
    assert router.credits.waiting == len(topics)
    reviews = spied(monkeypatch, Credits, "review")
    router.now_us += 50_000
    router.expire()
    assert 0 < reviews["review"] <= MOST
    party(router).subscribe("unrelated")
    reviews.clear()
    router.now_us = max(router.now_us, router.credits.deadline_us)
    router.expire()
    assert 0 < reviews["review"] <= MOST, "a change of the interest makes them due, not all at once"
    subscriber.port.crowded = False
    for _ in range(2 * len(topics)):
        if router.credits.waiting:
            step(router)
    assert not router.credits.waiting
    assert len({window.alias for window in publisher.received(frames.Window)}) == len(topics)


def test_flows_of_other_sessions_do_not_delay_one_that_may_go_on() -> None:
    router = Network().router
    busy, idle = party(router), party(router)
    busy.subscribe("t.>")
    idle.subscribe("honest.>")
    topics = range(200)
    for _ in range(4):
        attacker = party(router, "uid 2")
        wait(attacker, topics)
        stop(attacker, busy, topics)
    publisher = party(router)
    wait(publisher, range(1), "honest")
    stop(publisher, idle, range(1))
    step(router)
    idle.port.crowded = False
    router.now_us += 50_000
    for _ in range(3):
        step(router)
    assert [window.limit > 0 for window in publisher.received(frames.Window)] == [True]


def test_over_the_limit_of_a_session_a_topic_is_published_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credit_module, "MAX_WAITING", 4, raising=False)
    router = Network().router
    publisher, subscriber = party(router), party(router)
    subscriber.subscribe(">")
    topics = range(6)
    wait(publisher, topics)
    subscriber.port.crowded = True
    publisher.port.out.clear()
    for alias in topics:
        publisher.say(frames.Wait(alias, 2))
    limits = [window.limit for window in publisher.received(frames.Window)]
    assert limits == [0, 0, 0, 0, UNLIMITED, UNLIMITED]
    assert router.credits.waiting == 4
    assert router.status()["publishers_unlimited"] == 2
    other = party(router)
    wait(other, range(1))
    other.port.out.clear()
    other.say(frames.Wait(0, 2))
    assert [window.limit for window in other.received(frames.Window)] == [0]


def test_one_window_reviews_a_bounded_number_of_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Network().router
    publisher, subscriber = party(router), party(router)
    subscriber.subscribe(">")
    subscriber.port.out.clear()
    aliases = range(200)
    for alias in aliases:
        declare(publisher, alias, "t")
        publisher.say(frames.Wait(alias, 1))
        publish(publisher, alias)
    asked = subscriber.received(frames.Wait)[-1]
    reviews = spied(monkeypatch, Credits, "review")
    subscriber.say(frames.Window(asked.alias, asked.serial, 0))
    assert 0 < reviews["review"] <= MOST
    for alias in aliases:
        publish(publisher, alias)
    router.session_down(publisher.session)
    while router.ending:
        step(router)
    assert not router.credits._credits


def test_a_stalled_publisher_leaves_out_its_many_subscribers_in_parts() -> None:
    router = Network().router
    publisher = party(router)
    subscribers = [party(router) for _ in range(100)]
    for subscriber in subscribers:
        subscriber.subscribe(">")
    wait(publisher, range(1))
    for subscriber in subscribers:
        subscriber.port.crowded = True
        subscriber.port.out.clear()
    without_completing(publisher, frames.Wait(0, 2, True))
    asked = sum(bool(subscriber.received(frames.Wait)) for subscriber in subscribers)
    assert asked <= MOST
    publisher.session.complete()
    asked += sum(bool(subscriber.received(frames.Wait)) for subscriber in subscribers)
    assert asked == len(subscribers)


# -- dispatch ----------------------------------------------------------------------------------------------------------


class CountingPort(Port):
    """A full port that counts how often it is asked."""

    asked = 0

    def has_room(self, size: int) -> bool:
        self.asked += 1
        return False


def test_a_full_connection_is_asked_a_few_times_whatever_the_number_of_its_members() -> None:
    net = Network()
    full, free, caller = party(net.router), party(net.router), party(net.router)
    for _ in range(100):
        assert not full.join("db")
    port = full.session.port = CountingPort()
    caller.call(Kind.REQUEST, 1)
    (fail,) = caller.received(frames.Fail)
    assert fail.cause == Cause.OVERLOADED
    assert 0 < port.asked <= 4
    assert not free.join("db")
    free.port.out.clear()
    caller.call(Kind.REQUEST, 2)
    assert [frame[4] for frame in free.port.out if frame[4] >= 0x40] == [Kind.REQUEST]


# -- the end of a session ----------------------------------------------------------------------------------------------


def test_the_subscriptions_of_a_session_that_ends_are_removed_in_parts_and_get_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Network().router
    subscriber, publisher = party(router), party(router)
    for number in range(1000):
        subscriber.subscribe(f"t.{number}")
    declare(publisher, 0, "t.1")
    declare(publisher, 1, "t.999")
    publish(publisher, 0)
    held = router.quotas.subscriptions.total
    removed = spied(monkeypatch, Interest, "unsubscribe")
    subscriber.port.out.clear()
    router.session_down(subscriber.session)
    assert 0 < removed["unsubscribe"] <= MOST_ENDED
    assert 0 < router.quotas.subscriptions.total < held, "given back as they become free"
    for _ in range(2):
        publish(publisher, 0)
        publish(publisher, 1)
        before = removed["unsubscribe"]
        step(router)
        assert removed["unsubscribe"] - before <= MOST_ENDED
    assert not subscriber.port.out
    assert router.accounts.unwanted == 4
    while router.ending:
        step(router)
    assert removed["unsubscribe"] == 1000
    assert router.quotas.subscriptions.total == 0
    assert not router.interest._topics
    assert router.accounts.balance() == 0


def test_a_session_that_ends_gets_nothing_while_its_aliases_are_freed() -> None:
    router = Network().router
    subscriber, publisher = party(router), party(router)
    subscriber.subscribe("t")
    for alias in range(1000):
        declare(subscriber, alias, "other")
    declare(publisher, 0, "t")
    publish(publisher, 0)
    subscriber.port.out.clear()
    router.session_down(subscriber.session)
    assert subscriber.session.subscriptions, "not reached yet"
    publish(publisher, 0)
    assert not subscriber.port.out
    assert router.accounts.unwanted == 1
    while router.ending:
        step(router)
    assert not router.interest._topics


def test_the_members_and_calls_of_a_session_that_ends_go_in_parts_and_it_is_called_no_more() -> (
    None
):
    router = Network(limits=Limits(joins=1000)).router
    member, caller = party(router), party(router)
    served: dict[int, Serving] = {Kind.REQUEST: Serving(10_000, 1 << 30)}
    for _ in range(300):
        assert not member.ask(lambda number: frames.Join(number, "db", [KEY_ID], served))
    for hop in range(1000):
        caller.call(Kind.REQUEST, hop)
    caller.port.out.clear()
    member.port.out.clear()
    router.session_down(member.session)
    assert router.quotas.members.total > 0
    caller.call(Kind.REQUEST, 1000)
    assert not member.port.out
    (fail,) = caller.received(frames.Fail)
    assert (fail.hop, fail.cause, fail.may_have_run) == (1000, Cause.NO_MEMBERS, False)
    lost: list[int] = []
    while router.ending:
        step(router)
        fails = caller.received(frames.Fail)
        assert len(fails) <= MOST_ENDED
        lost += [fail.hop for fail in fails if fail.cause == Cause.LOST]
    assert sorted(lost) == list(range(1000))
    assert caller.session.pending == 0
    assert router.quotas.members.total == 0
    assert not router.interest._clusters
    assert router.accounts.balance() == 0


def test_the_aliases_of_a_session_that_ends_are_freed_in_parts() -> None:
    router = Network().router
    publisher, subscriber = party(router), party(router)
    subscriber.subscribe(">")
    wait(publisher, range(1000))
    held = len(subscriber.session.aliases)
    router.session_down(publisher.session)
    assert held - MOST_ENDED <= len(subscriber.session.aliases) < held
    while router.ending:
        step(router)
    assert len(subscriber.session.aliases) == 0
    assert not router.credits._credits
    assert not router.credits.waiting


def test_the_unfinished_frame_of_a_session_that_ends_reaches_the_others() -> None:
    router = Network().router
    publisher = party(router)
    subscribers = [party(router) for _ in range(100)]
    for subscriber in subscribers:
        subscriber.subscribe(">")
        subscriber.port.out.clear()
    declare(publisher, 0, "t")
    frame = bytearray(data(Kind.PUBLISH, 0))
    router.entry(publisher.session)(memoryview(frame), 0, len(frame))
    router.session_down(publisher.session)
    while router.ending:
        step(router)
    reached = [s for s in subscribers if any(f[4] == Kind.PUBLISH for f in s.port.out)]
    assert len(reached) == len(subscribers)
    assert not any(len(subscriber.session.aliases) for subscriber in subscribers)
    assert router.accounts.balance() == 0


def test_a_key_is_released_in_parts() -> None:
    router = Network().router
    session = party(router)
    session.session.proven.add(OTHER_KEY.key_id)
    session.session.proofs = 2
    router.quotas.keys.take(session.session.user, 2)
    for alias in range(0, 60_001, 4):  # numbers that leave more out are refused
        declare(session, alias, "t")
    session.say(frames.Declare(7, Kind.PUBLISH, "t", OTHER_KEY.key_id, bytes(16)))
    without_completing(session, frames.Release(OTHER_KEY.key_id))
    assert session.session.unfinished is not None
    session.session.complete()
    assert session.session.proven == {KEY_ID}
    assert session.session.routes[7] is None
    assert session.session.routes[60_000] is not None


# -- what falls due ----------------------------------------------------------------------------------------------------


def test_parked_calls_that_fall_due_together_end_a_few_at_a_time() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    far = party(net.routers[1])
    assert not far.join("db")
    net.run()
    net.cut(ends)
    router = net.router
    caller = party(router)
    for hop in range(200):
        caller.call(Kind.REQUEST, hop, deadline_us=router.now_us + 1_000)
    assert router.status()["parked"] == 200
    ended = 0
    router.now_us += 100_000
    while router.status()["parked"]:
        step(router)
        fails = caller.received(frames.Fail)
        assert len(fails) <= MOST
        ended += len(fails)
    assert ended == 200
    assert router.accounts.expired == 200
    assert caller.session.pending == 0
    assert router.accounts.balance() == 0


def test_callers_that_left_are_searched_a_few_calls_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving_module, "SEARCH_STEP", 16, raising=False)
    router = Network().router
    member, caller = party(router), party(router)
    served: dict[int, Serving] = {Kind.REQUEST: Serving(1000, 1 << 30)}
    assert not member.ask(lambda number: frames.Join(number, "db", [KEY_ID], served))
    for hop in range(100):
        caller.call(Kind.REQUEST, hop)
    member.port.out.clear()
    router.session_down(caller.session)
    told = 0
    for _ in range(20):
        hops = [len(left.hops) for left in member.received(frames.CallerLeft)]
        assert sum(hops) <= 16
        told += sum(hops)
        step(router)
    assert told == 100


def test_calls_without_a_deadline_are_given_up_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overdue_module, "STEP", 16, raising=False)
    router = Network().router
    member, caller = party(router), party(router)
    served: dict[int, Serving] = {Kind.REQUEST: Serving(1000, 1 << 30)}
    assert not member.ask(lambda number: frames.Join(number, "db", [KEY_ID], served))
    for hop in range(100):
        caller.call(Kind.REQUEST, hop)
    router.now_us += 2 * overdue_module.LIFE_US
    given_up = 0
    for _ in range(20):
        step(router)
        fails = caller.received(frames.Fail)
        assert len(fails) <= 16
        given_up += len(fails)
    assert given_up == 100
    assert caller.session.pending == 0


# -- members at other relays -------------------------------------------------------------------------------------------


def test_a_call_that_nobody_serves_does_not_look_at_every_member_under_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Network(relays=2)
    end, _ = net.link(0, 1)
    entries = [MemberEntry(n, "db", [OTHER_KEY.key_id], {Kind.REQUEST: 1}) for n in range(500)]
    assert not receive(end, link_frames.Interest(end.link.replica.version, 9, entries))
    looked_at = 0
    listed = mesh_module.is_listed

    def counted(kinds: Any) -> bool:
        nonlocal looked_at
        looked_at += 1
        return listed(kinds)

    monkeypatch.setattr(mesh_module, "is_listed", counted)
    caller = party(net.router)
    net.router.now_us += 10_000_000
    caller.call(Kind.REQUEST, 1)
    (fail,) = caller.received(frames.Fail)
    assert f"500 under {OTHER_KEY.key_id[:4].hex()}" in fail.detail
    assert looked_at < MOST
    assert not receive(end, link_frames.Interest(9, 10, left=list(range(500))))
    assert not end.link.copy.names


def test_a_relay_that_links_while_a_session_is_taken_apart_learns_that_its_members_left() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    member = party(net.router)
    for _ in range(300):
        assert not member.join("db")
    net.run()
    net.cut((net.ends[0], net.ends[1]))
    net.router.session_down(member.session)
    assert net.router.ending
    _, end = net.link(0, 1)
    while net.router.ending:
        step(net.router)
        net.run()
    net.run()
    assert not end.why
    assert not end.link.closed
    assert not end.link.copy.members


def test_the_tunnels_of_a_session_that_ends_go_in_parts_and_carry_nothing_more() -> None:
    router = Network().router
    member, opener = party(router), party(router)
    served: dict[int, Serving] = {Kind.TUNNEL_OPEN: Serving(10_000, 1 << 30)}
    assert not member.ask(lambda number: frames.Join(number, "db", [KEY_ID], served))
    declare(opener, 0, "db", Kind.TUNNEL_OPEN)
    for hop in range(400):
        opener.say(data(Kind.TUNNEL_OPEN, 0, hop))
    member.port.out.clear()
    router.session_down(member.session)
    assert 0 < len(opener.session.tunnels) < 400
    opener.say(tunnel_frame(Kind.TUNNEL_DATA, max(opener.session.tunnels), bytes(10)))
    assert not member.port.out
    assert router.accounts.dropped["late tunnel frame"] == 1
    while router.ending:
        step(router)
    ends = [frame for frame in opener.port.out if frame[4] == Kind.TUNNEL_END]
    assert len(ends) == 400
    assert not opener.session.tunnels
    assert opener.session.pending == 0
    assert router.accounts.balance() == 0


def test_a_run_of_calls_to_many_members_is_dispatched_in_parts() -> None:
    router = Network().router
    member, caller = party(router), party(router)
    for _ in range(100):
        assert not member.join("db")
    member.session.port = port = CountingPort()
    caller.call(Kind.REQUEST, 0)
    caller.port.out.clear()
    port.asked = 0
    late_us = router.now_us + 1_000_000
    declare(caller, 9, "db", Kind.REQUEST)
    # Without a deadline, each of its calls is routed for itself, and under a new alias nothing was looked up yet.
    for alias, deadline_us in ((0, late_us), (0, 0), (9, 0)):
        calls = [b"x"] * 50
        frame = bytearray(
            call_run(alias, 0, 100, deadline_us, END.pack(0, 0, len(calls), 0), calls)
        )
        router.entry(caller.session)(memoryview(frame), 0, len(frame))
        frame[:] = bytes(len(frame))  # it was borrowed
        assert len(caller.received(frames.Fail)) <= 1
        caller.session.complete()
        fails = caller.received(frames.Fail)
        assert [fail.hop for fail in fails] == list(range(150 - len(fails), 150))
        assert len(fails) >= 49
    assert caller.session.pending == 0
    assert router.accounts.balance() == 0


# -- questions about topics -----------------------------------------------------------------------------------------


def test_questions_that_other_relays_do_not_answer_end_a_few_at_a_time() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    assert not Party(net.routers[1]).subscribe("news")
    net.run()
    asking = Party(net.router)
    for _ in range(3 * audience.ENDED):
        asking.say(frames.Topic(1, "news", KEY_ID, slow=True))
    assert not asking.received(frames.Audience)
    net.router.now_us += audience.ASK_US
    answered = []
    while net.router.audiences.deadline_us <= net.router.now_us:
        net.router.audiences.expire(net.router.now_us)
        answered.append(len(asking.received(frames.Audience)))
    assert answered == [audience.ENDED] * 3


# -- STATUS -------------------------------------------------------------------------------------------------------


def ask_status(asking: Party) -> None:
    asking.session.ours = True
    frame = memoryview(bytearray(encode_control(frames.Status(9))))
    asking.router.entry(asking.session)(frame, 0, len(frame))


def test_each_part_of_a_status_shows_one_name_and_the_whole_is_what_a_relay_shows_at_once() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    many = Party(net.router, keys=tuple(bytes([number]) * 16 for number in range(1, 61)))
    far = Party(net.routers[1])
    assert not any(many.join(f"many{number}") for number in range(100))
    assert not any(far.join(f"far{number}") for number in range(100))
    for _ in range(100):
        net.run()
    asking = Party(net.router)
    ask_status(asking)
    assert not asking.received(frames.Report)
    work = asking.session.unfinished
    assert work is not None
    parts = sum(1 for _ in work)
    sizes = [len(json.dumps(part)) for part in net.router.status_in_parts()]
    (report,) = asking.received(frames.Report)
    assert json.loads(report.document) == net.router.status()
    assert parts == len(sizes) - 1 > 200
    assert max(sizes) < 4000


def test_so_many_sessions_make_a_status_at_once_and_others_hear_that_it_is_too_many() -> None:
    router = Network().router
    asking = [Party(router) for _ in range(control.MAX_REPORTS + 2)]
    for each in asking[:-1]:
        ask_status(each)
    (report,) = asking[-2].received(frames.Report)
    assert json.loads(report.document)["limited"] == control.TOO_MANY
    router.session_down(asking[0].session)  # while it is made
    while router.deadline_us <= router.now_us:
        router.expire()
    asking[1].session.complete()
    (report,) = asking[1].received(frames.Report)
    assert "limited" not in json.loads(report.document)
    for each in (asking[0], asking[1]):
        each.session.unfinished = None
    ask_status(asking[-1])
    assert not asking[-1].received(frames.Report)
    asking[-1].session.complete()
    (report,) = asking[-1].received(frames.Report)
    assert "limited" not in json.loads(report.document)
