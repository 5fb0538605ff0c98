"""What one session does, or fails to do, never closes the relay to another cluster, sender or member."""

from __future__ import annotations

from protocol.kit import Network

from iris.core.parties import Delivery
from relay.core.router import Limits


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


def test_the_sender_whose_push_died_hears_of_it_and_the_other_does_not(net: Network) -> None:
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
    assert "more than 3 keys" in host.ended_because


def test_a_session_that_left_is_not_remembered_with_its_tables(net: Network) -> None:
    net.host().serve("db", lambda delivery: delivery.reply(b"", None, False))
    caller = net.host()
    caller.send("db", b"x")
    net.run()
    (session,) = [s for s in net.router.sessions.values() if s.routes and not s.members]
    caller.lose()
    net.run()
    assert (session.routes, session.gaps, len(session.aliases)) == ([], {}, 0)
