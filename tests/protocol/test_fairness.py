"""No act or failure of one session keeps other clusters, senders or members from using the relay."""

from __future__ import annotations

from protocol.kit import KEY, Network, Result

from iris.core.interfaces import Delivery
from iris.wire import frames
from iris.wire.codec import END, HOP, encode_control
from iris.wire.kinds import Kind
from relay.core.limits import Limits


def test_sequential_requests_take_turns_among_equals(net: Network) -> None:
    ran = {"a": 0, "b": 0}
    caller = net.host()
    for name in ran:

        def echo(delivery: Delivery, name: str = name) -> None:
            ran[name] += 1
            delivery.reply(b"", None, False)

        net.host().serve("db", echo)
    for _ in range(100):
        caller.send("db", b"x")
        net.run()
    assert ran == {"a": 50, "b": 50}


def test_a_lost_push_is_reported_to_its_sender_and_to_no_other(net: Network) -> None:
    member, slow, quick = net.host(), net.host(), net.host()
    taken: list[Delivery] = []
    member.serve("db", taken.append)
    slow.push("db", b"slow")
    net.run()
    quick.push("db", b"quick")
    net.run()
    taken[1].finish()
    member.session.flush()
    net.run()
    member.lose()
    net.run()
    assert [loss.count for loss in slow.losses] == [1]
    assert not quick.losses


def test_a_key_is_checked_only_so_often_however_often_it_is_proven() -> None:
    net = Network(limits=Limits(keys=3))
    host = net.host()
    for _ in range(4):
        host.session.out._proven.clear()
        host.session.out.prove(host.key)
    net.run()
    assert "at most 3 keys" in host.ended_because


def test_a_session_has_a_limit_of_members() -> None:
    net = Network(limits=Limits(joins=2))
    host = net.host()
    for name in ("a", "b"):
        host.serve(name)
    ack = Result()
    kinds = {int(Kind.REQUEST): frames.Serving(1, 1)}
    host.session.ask(lambda number: frames.Join(number, "c", [KEY.key_id], kinds), ack)
    net.run()
    assert "already has 2 members" in ack.message.error
    assert len(host.peer.members) == 2


def test_a_session_has_a_limit_of_filter_tokens() -> None:
    net = Network(limits=Limits(subscriptions=4))
    host = net.host()
    host.subscribe("a.b.c")
    ack = Result()
    host.session.ask(lambda number: frames.Subscribe(number, "d.e", [KEY.key_id]), ack)
    net.run()
    assert "would exceed 4 tokens" in ack.message.error
    host.subscribe("d")
    assert len(host.peer.subscriptions) == 2


def test_an_alias_beyond_those_that_a_relay_keeps_ends_the_session() -> None:
    net = Network(limits=Limits(aliases=16))
    host = net.host()
    host.session.out.prove(KEY)
    host.speak()
    for alias in (15, 16):
        host.say(encode_control(frames.Declare(alias, Kind.PUBLISH, "a", KEY.key_id, bytes(16))))
        assert host.peer.closed == (alias == 16)
    assert host.ended_because == "alias 16 is over the limit of 16"


def test_an_alias_is_for_frames_of_the_kind_that_it_was_declared_for(net: Network) -> None:
    host, other = net.host(), net.host()
    service = other.serve("a")
    host.session.out.prove(KEY)
    host.speak()
    host.say(encode_control(frames.Declare(0, Kind.PUBLISH, "a", KEY.key_id, bytes(16))))
    host.say(HOP.pack(46 + 64, Kind.BROADCAST, 0, 0, 0, 0) + END.pack(0, 0, 1, 0) + bytes(64))
    assert host.ended_because == "alias 0 was not declared for this kind of frame"
    assert service.casts == []


def test_a_session_that_left_is_not_remembered_with_its_tables(net: Network) -> None:
    net.host().serve("db", lambda delivery: delivery.reply(b"", None, False))
    caller = net.host()
    caller.send("db", b"x")
    net.run()
    (session,) = [s for s in net.router.sessions.values() if s.routes and not s.members]
    caller.lose()
    net.run()
    assert (session.routes, session.gaps, len(session.aliases)) == ([], {}, 0)
