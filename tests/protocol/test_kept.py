"""What a relay keeps of sessions that have gone: nothing, a few seconds later."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest
from protocol.kit import KEY, OTHER_KEY, Host, Network
from protocol.test_quotas import Party
from support.tables import grown, tables

from iris.core.interfaces import Delivery
from iris.wire import frames
from iris.wire.codec import END, HOP, encode_control
from iris.wire.kinds import Kind
from relay.core.credit import Credit
from relay.core.endings import STEP
from relay.core.link import Link
from relay.core.missed_casts import ABSENT_US, LOOK_US, UNSURE_US
from relay.core.neighbor import (
    FORGOTTEN_EACH,
    SPARE_TARGETS,
    Dispatched,
    Route,
    Survey,
    Target,
    Tunnel,
)
from relay.core.router import Router
from relay.core.session import Member, Session, Watch

WHILE_S = (UNSURE_US + LOOK_US) / 1e6
"""How long a relay remembers casts that a lost link may not have delivered."""


def pong(delivery: Delivery) -> None:
    """Answer what can be answered."""
    if delivery.flow.kind == Kind.PUSH:
        delivery.finish()
    else:
        delivery.reply(b"pong", None, False)


def never(delivery: Delivery) -> None:
    """Do not answer."""


def visit(net: Network, number: int) -> list[Host]:
    """Connect two hosts to the first relay and one to the last, which use every verb. Return them."""
    name = f"visited.n{number}"
    one, two, far = net.host("one"), net.host("two", user="bob"), net.host("far", relay=-1)
    two.serve(name, pong, keys=(KEY, OTHER_KEY), methods=3, cancel=True)
    far.serve(name, pong)
    far.serve(f"{name}.hung", never)
    for host in (one, two, far):
        host.subscribe(f"{name}.>")
        host.subscribe(f"{name}.*", group="g")
        host.subscribe(f"{name}.wait", waits=True)
        host.subscribe(f"{name}.other.>", key=OTHER_KEY)
        key_ids = [KEY.key_id, OTHER_KEY.key_id]
        for asked in (
            frames.Members(901, name, key_ids, True),
            frames.Members(902, "nobody", key_ids, True),
            frames.Members(903, name, key_ids, False),
            frames.Topic(904, f"{name}.a", KEY.key_id),
            frames.Settle(905),
            frames.Status(906),
            frames.Unwatch(902),
        ):
            host.say(encode_control(asked))
    net.run()
    for host in (one, two, far):
        for called in (name, f"{name}.hung"):
            host.request(called, b"x")
            host.push(called, b"x")
            host.survey(called, b"x")
            host.publish(called, b"x", kind=Kind.BROADCAST)
            host.open_tunnel(called)
        for topic in ("a", "other.a"):
            host.publish(f"{name}.{topic}", b"x")
        host.publish_waiting(f"{name}.wait", b"x")
        host.request("nobody", b"x")
        host.publish("nothing", b"x", kind=Kind.BROADCAST)
    net.run()
    assert not any(host.ended_because for host in (one, two, far)), [
        host.ended_because for host in (one, two, far)
    ]
    assert far.peer.in_flight
    return [one, two, far]


def lose(host: Host) -> None:
    host.lose()


def say_goodbye(host: Host) -> None:
    host.say(encode_control(frames.Bye()))


def break_a_rule(host: Host) -> None:
    host.say(encode_control(frames.Ack(1)))


ENDS = (lose, say_goodbye, break_a_rule)


def end(net: Network, hosts: list[Host], how: Callable[[Host], None]) -> None:
    """End these sessions while their calls are under way."""
    for host in hosts:
        how(host)
        if not host.peer.closed:  # the last of a queue group leaves when the other relays know
            net.run()
        assert host.peer.closed
        net.hosts.remove(host)
    net.run()


BOUNDED = {
    "Accounts.dropped", "Seen._last", "Heartbeat.samples", "Heartbeat.offsets", "PeerInterest._key_ids",
    "PeerInterest._kinds",
}  # fmt: skip
"""A few causes, where members were lately, windows of the latest samples, and values that copies of members share."""


def left_by(net: Network, before: dict[str, int]) -> dict[str, int]:
    """Return what the relays' tables still hold of what came since, once no lost link would matter."""
    net.pass_time(WHILE_S)
    return {
        path: n for path, n in grown(before, tables(*net.routers)).items() if path not in BOUNDED
    }


@pytest.mark.parametrize("how", ENDS)
def test_no_table_keeps_anything_of_sessions_that_have_gone(how: Callable[[Host], None]) -> None:
    net = Network()
    before = tables(net.router)
    assert len(before) > 60
    for number in range(3):
        end(net, visit(net, number), how)
    assert "MissedCasts._sent" in grown(before, tables(net.router))
    assert left_by(net, before) == {}
    net.check()


@pytest.mark.parametrize("how", ENDS)
def test_what_a_link_keeps_does_not_grow(how: Callable[[Host], None]) -> None:
    """A relay forgets an alias of another one when its number is declared again."""
    net = Network(relays=2)
    net.link(0, 1)
    end(net, visit(net, 0), how)
    net.pass_time(WHILE_S)
    before = tables(*net.routers)
    for number in range(1, 4):
        end(net, visit(net, number), how)
    assert left_by(net, before) == {}


def test_links_that_were_lost_leave_nothing() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    before = tables(*net.routers)
    for number in range(3):
        hosts = visit(net, number)
        net.cut((net.ends[0], net.ends[1]))
        end(net, hosts, lose)
        net.link(0, 1)
    assert left_by(net, before) == {}


def test_a_member_that_stays_keeps_little_of_callers_that_have_gone() -> None:
    net = Network()
    member = net.host("member")
    member.serve("db", pong)
    for _ in range(300):
        caller = net.host("caller")
        answer = caller.request("db")
        net.run()
        assert answer.value == b"pong"
        end(net, [caller], lose)
    (reply,) = [
        route for route in member.peer.routes if route is not None and route.kind == Kind.REPLY
    ]
    assert len(reply.targets) <= SPARE_TARGETS


def counted() -> Counter[str]:
    """Return how many objects there are of the types that connections and calls are made of."""
    kinds = (Session, Link, Route, Target, Dispatched, Survey, Tunnel, Member, Watch)
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))


@pytest.mark.parametrize("how", ENDS)
def test_sessions_and_links_that_have_gone_are_freed_without_the_collector(
    how: Callable[[Host], None],
) -> None:
    net = Network(relays=2)
    gc.collect()
    before = counted()
    gc.disable()
    try:
        ends = net.link(0, 1)
        hosts = visit(net, 0)
        assert counted() - before > Counter(Session=2, Link=1, Route=9, Dispatched=2)
        end(net, hosts, how)
        net.cut(ends)
        net.pass_time(ABSENT_US / 1e6 + WHILE_S)  # the other relay may come back within an hour
        for host in hosts:
            del host.peer
        for each in ends:
            del each.link
        assert counted() - before == {}
    finally:
        gc.enable()


MOST_FREED = 300
"""Objects of an ended session that are freed in one step, and a few more."""


def publisher(router: Router, topics: int, *, waits: bool) -> Party:
    """Return a session that has published to so many topics, and may wait for their subscribers."""
    made = Party(router, "ann")
    for alias in range(topics):
        made.say(frames.Declare(alias, Kind.PUBLISH, f"t.{alias}", KEY.key_id, bytes(16)))
        if waits:
            made.say(frames.Wait(alias, 1))
        body = END.pack(0, 0, 1, 0) + bytes(8)
        made.say(HOP.pack(22 + len(body), Kind.PUBLISH, 0, alias, 0, 0) + body)
    return made


@pytest.mark.parametrize("kind", [Credit, Member])
def test_what_a_session_held_is_freed_in_parts(kind: type) -> None:
    """Freed at once, thousands of objects would keep the relay from all other frames."""
    router = Network().router
    subscriber = Party(router, "bob")
    many = 1000
    if kind is Member:
        for number in range(many):
            assert not subscriber.join(f"db.n{number}")
    else:
        assert not subscriber.subscribe("t.>")
        publisher(router, many, waits=True)

    def count() -> int:
        return sum(isinstance(each, kind) for each in gc.get_objects())

    at_most = before = count()
    assert at_most >= many
    subscriber.port.out.clear()
    router.session_down(subscriber.session)
    gc.disable()
    try:
        while True:
            left = count()
            assert before - left <= MOST_FREED
            before = left
            if not router.ending:
                break
            router.now_us = max(router.now_us, router.deadline_us)
            router.expire()
    finally:
        gc.enable()
    assert at_most - left >= many


def test_aliases_of_a_session_that_has_gone_are_forgotten_in_parts() -> None:
    router = Network().router
    subscriber = Party(router, "bob")
    assert not subscriber.subscribe("t.>")
    publisher(router, 5000, waits=False)
    aliases = subscriber.session.aliases
    assert len(aliases) == 5000
    router.session_down(subscriber.session)
    steps = 1
    while aliases:
        steps += 1
        router.now_us = max(router.now_us, router.deadline_us)
        router.expire()
    assert steps > 5000 // (STEP * FORGOTTEN_EACH)
    assert not router.ending
