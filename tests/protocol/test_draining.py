"""A relay that drains: messages sent before their sender is notified still arrive, and no session can delay the relay
for long.
"""

from __future__ import annotations

import pytest
from protocol.kit import Host, Network, Result

from iris.core.interfaces import Delivery
from iris.wire import frames
from iris.wire.kinds import Kind
from relay.core.draining import DRAIN_WAIT_US, RUNNING_US

GRACE_MS = 10_000


def pong(delivery: Delivery) -> None:
    delivery.reply(b"pong", None, False)


def receive_all(host: Host) -> None:
    """Let a host read its frames, without sending anything yet."""
    while host.listen():
        pass


def leave(host: Host, member: int) -> Result:
    """Let a member leave, as its client does when the relay drains."""
    ack = Result()
    host.session.ask(lambda number: frames.Leave(number, member), ack)
    return ack


def pass_look(net: Network) -> None:
    """Let the relay look again at whether calls are in flight."""
    net.pass_time(RUNNING_US / 1e6)
    net.run()


def test_a_call_that_was_sent_before_its_caller_was_notified_reaches_the_member_that_leaves() -> (
    None
):
    net = Network()
    alice, bob = net.host("alice"), net.host("bob")
    service = bob.serve("db", pong)
    alice.request("db")
    net.run()
    net.router.drain(GRACE_MS)
    receive_all(bob)
    left = leave(bob, service.member)
    bob.speak()
    answer = alice.request("db")
    alice.speak()  # alice has not read the notice yet
    assert not left.done()
    net.run()
    assert answer.value == b"pong"
    pass_look(net)
    assert left.message.error == ""
    assert net.router.drains.acknowledged


def test_a_call_from_another_relay_that_was_on_the_way_finds_the_member_that_leaves() -> None:
    net = Network(relays=2)
    here, _ = net.link(0, 1)
    alice, bob = net.host("alice"), net.host("bob", relay=1)
    service = bob.serve("db", pong)
    answer = alice.request("db")
    alice.speak()  # it is in transit on the link
    net.routers[1].drain(GRACE_MS)
    receive_all(bob)
    left = leave(bob, service.member)
    bob.speak()
    assert not left.done()
    assert here.link.port is here
    net.run()
    assert answer.value == b"pong"
    pass_look(net)
    assert left.message.error == ""


def test_who_says_nothing_holds_up_a_member_that_leaves_for_two_seconds_and_no_longer() -> None:
    net = Network()
    silent, bob = net.host("silent"), net.host("bob")
    service = bob.serve("db", pong)
    net.router.drain(GRACE_MS)
    silent.port.out.clear()
    left = leave(bob, service.member)
    net.run()
    assert not left.done()
    net.pass_time(DRAIN_WAIT_US / 1e6)
    net.run()
    assert left.message.error == ""
    assert net.router.drains.acknowledged


def test_of_a_short_grace_a_quarter_is_waited_for_who_says_nothing() -> None:
    net = Network()
    silent, bob = net.host("silent"), net.host("bob")
    service = bob.serve("db", pong)
    net.router.drain(400)
    silent.port.out.clear()
    left = leave(bob, service.member)
    net.run()
    net.pass_time(0.1)
    net.run()
    assert left.message.error == ""


def test_a_leaving_session_has_received_what_was_sent_to_it() -> None:
    net = Network()
    silent, bob = net.host("silent"), net.host("bob")
    service = bob.serve("db", pong)
    net.router.drain(GRACE_MS)
    silent.port.out.clear()
    left = leave(bob, service.member)
    net.run()
    assert not left.done()
    silent.lose()
    net.run()
    assert left.message.error == ""


def test_a_leave_that_is_repeated_is_not_kept_twice() -> None:
    net = Network()
    silent, bob = net.host("silent"), net.host("bob")
    service = bob.serve("db", pong)
    net.router.drain(GRACE_MS)
    silent.port.out.clear()
    first = leave(bob, service.member)
    second = leave(bob, service.member)
    net.run()
    assert second.message.error == ""
    net.pass_time(DRAIN_WAIT_US / 1e6)
    net.run()
    assert "does not have member 1" in first.message.error


def test_a_relay_without_sessions_has_been_acknowledged_at_once() -> None:
    net = Network()
    net.router.drain(GRACE_MS)
    assert net.router.drains.acknowledged


@pytest.mark.parametrize("kind", ["request", "push", "tunnel"])
def test_members_stay_while_a_call_is_in_flight_at_any_of_them_so_that_its_handler_can_call(
    kind: str,
) -> None:
    net = Network()
    alice, bob, carol = net.host("alice"), net.host("bob"), net.host("carol")
    running: list[Delivery] = []
    front, back = bob.serve("front", running.append), carol.serve("back", pong)
    if kind == "tunnel":
        end = alice.open_tunnel("front")
    else:
        (alice.request if kind == "request" else alice.push)("front")
    net.run()
    net.router.drain(GRACE_MS)
    receive_all(carol)
    left = [leave(carol, back.member), leave(bob, front.member)]
    net.run()
    assert net.router.drains.acknowledged
    pass_look(net)
    answer = bob.request("back")  # the handler of `front` calls
    net.run()
    assert answer.value == b"pong"
    assert not any(each.done() for each in left)
    if kind == "tunnel":
        alice.session.tunnels.drop(end)
    elif kind == "request":
        running[0].reply(b"", None, False)
    else:
        running[0].finish()
    net.run()
    pass_look(net)
    assert [each.message.error for each in left] == ["", ""]


def test_a_call_that_waits_at_a_store_keeps_no_member_of_a_relay_that_stops() -> None:
    net = Network()
    alice, store, bob = net.host("alice"), net.host("store"), net.host("bob")
    store.serve("kept", only=[Kind.STREAM])
    service = bob.serve("db", pong)
    table = store.session._table  # it reads the call, and does not answer
    table[Kind.STREAM] = lambda *_: None
    alice.session.store_calls.send("kept", alice.key, b"", timeout_ms=5_000, waiter=Result())
    net.run()
    assert store.peer.in_flight
    net.router.drain(GRACE_MS)
    left = leave(bob, service.member)
    net.run()
    pass_look(net)
    assert left.message.error == ""
