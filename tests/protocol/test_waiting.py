"""A publisher that waits sends what its subscribers have room for, and waits for at most its limit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from protocol.kit import KEY, Host, Inbox, Network, control_of, kind_of

from iris.core.credit import FIRST_WINDOW
from iris.wire import frames
from iris.wire.codec import encode_control
from iris.wire.kinds import UNLIMITED, Kind

BUNDLE = bytes(8 << 10)
WHOLE = FIRST_WINDOW // len(BUNDLE)
"""Bundles that fill a window. With their headers they exceed it."""
TOPIC = "t"


@pytest.fixture(params=[1, 2], ids=["one relay", "two relays"])
def linked(request: pytest.FixtureRequest) -> Network:
    """A network with publishers at the first relay and subscribers at the last one."""
    net = Network(relays=request.param)
    if request.param == 2:
        net.link(0, 1)
    return net


def subscriber(
    net: Network, label: str = "bob", *, group: str = "", waits: bool = True
) -> tuple[Host, Inbox]:
    host = net.host(label, relay=len(net.routers) - 1)
    return host, host.subscribe(TOPIC, group=group, waits=waits)


def fill(net: Network, publisher: Host, most: int = 1000, topic: str = TOPIC) -> int:
    """Publish bundles until there is no credit, at most `most`; return their number."""
    sent = 0
    while sent < most and publisher.publish_waiting(topic, BUNDLE):
        sent += 1
        net.run()
    return sent


def stall(net: Network, publisher: Host) -> None:
    """Let the publisher wait for its limit, after which it continues."""
    out = publisher.session.out
    flow = out.flow(Kind.PUBLISH, TOPIC, KEY)
    out.stalled(flow)
    publisher.publish(TOPIC, BUNDLE)
    net.run()


def dropped(net: Network) -> int:
    return sum(router.accounts.dropped.get("slow receiver", 0) for router in net.routers)


def test_a_publisher_is_held_back_until_the_subscriber_has_handled_what_it_has(
    linked: Network,
) -> None:
    publisher = linked.host("alice")
    bob, inbox = subscriber(linked)
    total = 0
    for _ in range(5):
        sent = fill(linked, publisher)
        assert WHOLE // 2 <= sent <= 4 * WHOLE
        assert not publisher.publish_waiting(TOPIC, BUNDLE)
        total += sent
        inbox.handle(bob)
        linked.run()
    assert len(inbox.messages) == total
    assert not inbox.gaps
    assert dropped(linked) == 0
    linked.check()


def test_a_subscriber_that_keeps_up_is_given_larger_windows(net: Network) -> None:
    publisher = net.host("alice")
    bob, inbox = subscriber(net)
    inbox.limit_bytes = 64 << 20

    def keep_up(host: Host, frame: bytes) -> Sequence[bytes]:
        inbox.handle(bob)
        return (frame,)

    net.tamper = keep_up
    assert fill(net, publisher, 200) == 200
    net.tamper = lambda host, frame: (frame,)
    held = fill(net, publisher)
    assert held > 8 * WHOLE, "it has grown"
    inbox.handle(bob)
    net.run()
    assert publisher.publish_waiting(TOPIC, BUNDLE)


def test_the_slowest_of_several_subscribers_counts(linked: Network) -> None:
    publisher = linked.host("alice")
    (bob, slow), (carol, other) = subscriber(linked), subscriber(linked, "carol")
    sent = fill(linked, publisher)
    other.handle(carol)
    linked.run()
    assert not publisher.publish_waiting(TOPIC, BUNDLE)
    slow.handle(bob)
    linked.run()
    assert publisher.publish_waiting(TOPIC, BUNDLE)
    linked.run()
    assert len(slow.messages) == len(other.messages) == sent + 1


def test_who_did_not_ask_for_it_holds_nobody_back(linked: Network) -> None:
    publisher = linked.host("alice")
    _, inbox = subscriber(linked, waits=False)
    assert fill(linked, publisher, 100) == 100
    assert len(inbox.messages) == 100


def test_nobody_there_holds_nobody_back(linked: Network) -> None:
    assert fill(linked, linked.host("alice"), 100) == 100


def test_a_subscriber_that_comes_later_is_waited_for(linked: Network) -> None:
    publisher = linked.host("alice")
    fill(linked, publisher, 50)
    bob, inbox = subscriber(linked)
    sent = fill(linked, publisher)
    assert sent <= 2 * WHOLE
    inbox.handle(bob)
    linked.run()
    assert publisher.publish_waiting(TOPIC, BUNDLE)


def test_what_was_allowed_before_is_taken_back_when_somebody_comes_who_has_less_room(
    linked: Network,
) -> None:
    publisher = linked.host("alice")
    fill(linked, publisher, 50)
    subscriber(linked)
    publisher.publish(TOPIC, BUNDLE)
    linked.run()
    credit = publisher.session.out.credit(publisher.session.out.flow(Kind.PUBLISH, TOPIC, KEY))
    assert credit.limit - credit.sent <= FIRST_WINDOW


def test_a_session_whose_second_subscription_waits_is_waited_for(linked: Network) -> None:
    publisher = linked.host("alice")
    bob, plain = subscriber(linked, waits=False)
    assert fill(linked, publisher, 50) == 50
    waiting = bob.subscribe(">", waits=True)
    linked.run()
    assert fill(linked, publisher) <= 6 * WHOLE
    waiting.handle(bob)
    linked.run()
    assert publisher.publish_waiting(TOPIC, BUNDLE)
    linked.run()
    assert len(plain.messages) == 50 + len(waiting.messages)


def test_other_topics_go_on(linked: Network) -> None:
    publisher = linked.host("alice")
    subscriber(linked)
    fill(linked, publisher)
    assert fill(linked, publisher, 100, "other") == 100


def test_a_group_is_waited_for_only_while_none_of_its_members_has_credit(linked: Network) -> None:
    publisher = linked.host("alice")
    (bob, one), (carol, other) = (
        subscriber(linked, "bob", group="g"),
        subscriber(linked, "carol", group="g"),
    )
    sent = fill(linked, publisher)
    assert sent > WHOLE
    taken = len(one.messages)
    for _ in range(5):
        other.handle(carol)
        linked.run()
        sent += fill(linked, publisher)
    assert len(one.messages) <= taken + 2, "it has no credit, and its fellow has"
    assert len(one.messages) + len(other.messages) == sent
    assert dropped(linked) == 0
    one.handle(bob)
    linked.run()
    assert fill(linked, publisher)
    assert len(one.messages) > taken


def test_members_of_a_group_at_two_relays_are_waited_for_only_while_none_has_credit() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    publisher = net.host("alice")
    near, far = net.host("near"), net.host("far", relay=1)
    inboxes = [
        near.subscribe(TOPIC, group="g", waits=True),
        far.subscribe(TOPIC, group="g", waits=True),
    ]
    sent = fill(net, publisher)
    inboxes[1].handle(far)
    net.run()
    more = fill(net, publisher)
    assert more >= WHOLE // 2
    assert sum(len(inbox.messages) for inbox in inboxes) == sent + more
    assert dropped(net) == 0


def test_a_subscriber_that_two_aliases_of_a_publisher_lead_to_has_one_credit_for_both() -> None:
    """The publisher's relay names a group in turn; the subscriber without a group gets everything."""
    net = Network(relays=2)
    net.link(0, 1)
    publisher = net.host("alice")
    near, far, bob = net.host("near"), net.host("far", relay=1), net.host("bob", relay=1)
    members = [(near, near.subscribe(TOPIC, group="g", waits=True)), (far, far.subscribe(TOPIC, group="g", waits=True))]  # fmt: skip
    inbox = bob.subscribe(TOPIC, waits=True)
    net.run()
    sent = 0
    for _ in range(20):
        more = fill(net, publisher)
        assert more, "time does not pass here, so nobody was asked again"
        sent += more
        for host, each in (*members, (bob, inbox)):
            each.handle(host)
        net.run()
    assert len(inbox.messages) == sum(len(each.messages) for _, each in members) == sent
    assert dropped(net) == 0


# -- whoever does not go on ------------------------------------------------------------------------------------


def test_one_that_stalls_is_dropped_for_until_it_has_room_and_the_others_get_everything(
    linked: Network,
) -> None:
    publisher = linked.host("alice")
    (bob, stalled), (carol, other) = subscriber(linked), subscriber(linked, "carol")
    sent = fill(linked, publisher)
    other.handle(carol)
    linked.run()
    stall(linked, publisher)
    sent += 1
    for _ in range(3):
        other.handle(carol)
        linked.run()
        more = fill(linked, publisher)
        assert more, "nobody waits for it any more"
        sent += more
    assert len(other.messages) == sent
    assert not other.gaps
    missing = sent - len(stalled.messages)
    assert 0 < missing == dropped(linked)
    slow = linked.routers[-1].slow.report(linked.routers[-1].now_us)
    assert "bob" in str(slow)
    assert "carol" not in str(slow)
    # Half of its window is free: it receives again, and its losses are reported.
    stalled.handle(bob)
    linked.run()
    other.handle(carol)
    linked.run()
    assert fill(linked, publisher)
    reported = sum(lost.count or 0 for lost in stalled.gaps)
    assert reported == missing
    assert len(stalled.messages) + missing == len(other.messages)
    linked.check()


def test_what_a_stalled_subscriber_missed_is_reported_to_it_though_nothing_follows(
    linked: Network,
) -> None:
    publisher = linked.host("alice")
    bob, inbox = subscriber(linked, group="g")  # a member of a group cannot notice a gap
    fill(linked, publisher)
    stall(linked, publisher)
    assert dropped(linked) == 1
    inbox.handle(bob)
    linked.run()
    assert [lost.count for lost in inbox.gaps] == [1]


def test_what_a_stalled_subscriber_missed_is_reported_to_it_though_its_publisher_left(
    linked: Network,
) -> None:
    publisher = linked.host("alice")
    bob, inbox = subscriber(linked, group="g")
    fill(linked, publisher)
    stall(linked, publisher)
    assert not inbox.gaps
    publisher.lose()
    linked.run()
    inbox.handle(bob)
    linked.run()
    assert [lost.count for lost in inbox.gaps] == [1]


def test_a_crowded_queue_at_the_relay_counts_and_is_given_up_likewise(net: Network) -> None:
    publisher = net.host("alice")
    bob, inbox = subscriber(net)
    assert fill(net, publisher, 2) == 2
    inbox.handle(bob)
    net.run()
    bob.port.crowded = True
    sent = 2 + fill(net, publisher)
    assert sent <= 2 * WHOLE
    stall(net, publisher)
    stall(net, publisher)
    assert dropped(net) == 2
    bob.port.crowded = False
    inbox.handle(bob)
    net.pass_time(0.1)
    publisher.publish(TOPIC, BUNDLE)
    net.run()
    assert len(inbox.messages) == sent + 1


@pytest.mark.parametrize("end", ["leaves", "is lost"])
def test_a_subscriber_that_goes_holds_nobody_back(linked: Network, end: str) -> None:
    publisher = linked.host("alice")
    bob, _ = subscriber(linked)
    fill(linked, publisher)
    if end == "leaves":
        bob.session.ask(lambda number: frames.Unsubscribe(number, TOPIC), _Ignored())
    else:
        bob.lose()
    linked.run()
    linked.pass_time(0.01)
    assert fill(linked, publisher, 50) == 50


class _Ignored:
    def done(self) -> bool:
        return False

    def set_result(self, result: object, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


def test_a_lost_link_holds_nobody_back_and_one_that_is_back_starts_again() -> None:
    net = Network(relays=2)
    ends = net.link(0, 1)
    publisher = net.host("alice")
    bob, inbox = subscriber(net)
    fill(net, publisher)
    net.cut(ends)
    net.pass_time(0.1)
    assert fill(net, publisher, 50) == 50
    inbox.handle(bob)
    net.link(0, 1)
    net.run()
    before = len(inbox.messages)
    sent = fill(net, publisher)
    assert sent <= 2 * WHOLE
    assert len(inbox.messages) == before + sent
    inbox.handle(bob)
    net.run()
    assert publisher.publish_waiting(TOPIC, BUNDLE)


def test_two_that_publish_to_each_other_and_handle_only_once_they_have_published_go_on(
    linked: Network,
) -> None:
    """Each makes the other wait. After `stall_s` it continues, and losses are reported."""
    alice, bob = linked.host("alice"), linked.host("bob", relay=len(linked.routers) - 1)
    to_alice, to_bob = alice.subscribe("a", waits=True), bob.subscribe("b", waits=True)
    fill(linked, alice, topic="b")
    fill(linked, bob, topic="a")
    for host, topic in ((alice, "b"), (bob, "a")):
        assert not host.publish_waiting(topic, BUNDLE)
        out = host.session.out
        out.stalled(out.flow(Kind.PUBLISH, topic, KEY))
        host.publish(topic, BUNDLE)
    linked.run()
    assert alice.publish_waiting("b", BUNDLE)
    assert bob.publish_waiting("a", BUNDLE)
    linked.run()
    to_alice.handle(alice)
    to_bob.handle(bob)
    linked.run()
    assert fill(linked, alice, topic="b") > 1
    assert fill(linked, bob, topic="a") > 1
    assert sum(lost.count or 0 for lost in (*to_alice.gaps, *to_bob.gaps)) == dropped(linked) == 4


# -- credit that is lost ---------------------------------------------------------------------------------------


def test_credit_that_is_lost_on_the_way_is_given_again(net: Network) -> None:
    publisher = net.host("alice")
    bob, inbox = subscriber(net)
    fill(net, publisher)
    lose = True
    say = bob.session.control

    def received(body: frames.Control) -> None:
        if not (lose and isinstance(body, frames.Window)):
            say(body)

    bob.session.casts.windows._send = received
    inbox.handle(bob)
    net.run()
    assert not publisher.publish_waiting(TOPIC, BUNDLE)
    lose = False
    net.pass_time(0.3)
    assert publisher.publish_waiting(TOPIC, BUNDLE)


def test_messages_that_are_dropped_on_the_way_do_not_cost_their_credit_for_good(
    net: Network,
) -> None:
    publisher = net.host("alice")
    bob, inbox = subscriber(net)
    fill(net, publisher, 1)
    bob.port.room = 0
    sent = 1 + fill(net, publisher)
    bob.port.room = None
    assert dropped(net) == sent - 1
    inbox.handle(bob)
    net.pass_time(0.3)
    assert fill(net, publisher) >= WHOLE // 2


def test_an_answer_to_an_earlier_question_is_ignored(net: Network) -> None:
    publisher = net.host("alice")
    bob, _ = subscriber(net)
    serials = asked(net, bob)
    fill(net, publisher)
    net.pass_time(0.3)
    assert len(serials) == 2, "it has given no credit, and is asked again"
    bob.say(encode_control(frames.Window(0, serials[0], UNLIMITED)))
    net.run()
    assert not publisher.publish_waiting(TOPIC, BUNDLE)
    bob.say(encode_control(frames.Window(0, serials[1], UNLIMITED)))
    net.run()
    assert fill(net, publisher)


def asked(net: Network, bob: Host) -> list[int]:
    """Return the serial numbers of the WAITs that are queued for a host."""
    seen: list[int] = []

    def see(host: Host, frame: bytes) -> Sequence[bytes]:
        if host is bob and kind_of(frame) == Kind.WAIT:
            seen.append(control_of(frame).serial)
        return (frame,)

    net.tamper = see
    return seen


def test_what_a_full_queue_refuses_whole_is_not_a_reason_to_wait(net: Network) -> None:
    publisher = net.host("alice")
    bob, _ = subscriber(net)
    bob.port.takes = False
    assert fill(net, publisher, 50) == 50
    assert dropped(net) == 50


# -- older versions, and what breaks the protocol --------------------------------------------------------------


@pytest.mark.parametrize("alias", [0, 7, 60_000])
def test_waiting_for_an_alias_that_was_not_declared_ends_the_session(
    net: Network, alias: int
) -> None:
    alice = net.host("alice")
    alice.say(encode_control(frames.Wait(alias, 1)))
    assert alice.ended_because == f"alias {alias} was not declared for PUBLISH"


def test_a_window_that_nobody_asked_for_is_ignored(net: Network) -> None:
    alice = net.host("alice")
    alice.say(encode_control(frames.Window(5, 1, UNLIMITED)))
    net.run()
    assert not alice.ended_because
    alice.receive(encode_control(frames.Window(5, 1, UNLIMITED)))
    assert alice.publish_waiting(TOPIC, BUNDLE)


def test_a_limit_beyond_all_bounds_is_passed_on_as_one_that_fits(net: Network) -> None:
    publisher = net.host("alice")
    bob, _ = subscriber(net)
    serials = asked(net, bob)
    fill(net, publisher, 1)
    bob.say(encode_control(frames.Window(0, serials[-1], UNLIMITED - 1)))
    net.run()
    assert not bob.ended_because
    assert not publisher.ended_because
    assert fill(net, publisher)
