"""The last member of a queue group at a relay leaves: what others have sent it by what they knew still arrives."""

from __future__ import annotations

import pytest
from protocol.kit import Host, Inbox, Network, Result

from iris.wire import frames
from relay.core import parts
from relay.core.settling import SETTLE_US

GRACE_MS = 10_000


def two_relays() -> tuple[Network, Host, Host, Inbox]:
    """Return linked relays, a publisher at the first, and a member of the group at the second."""
    net = Network(relays=2)
    net.link(0, 1)
    publisher, member = net.host("publisher"), net.host("member", relay=1)
    inbox = member.subscribe("t", group="g")
    publish(publisher, b"first")
    net.run()
    return net, publisher, member, inbox


def publish(publisher: Host, payload: bytes) -> None:
    """Publish, and let the publisher's relay route it."""
    publisher.publish("t", payload)
    publisher.speak()


def leave(member: Host) -> Result:
    """Unsubscribe, and let the member's relay know."""
    answer = Result()
    member.session.ask(lambda number: frames.Unsubscribe(number, "t", "g"), answer)
    member.speak()
    return answer


def bye(host: Host) -> None:
    host.session.out.control(frames.Bye("closed"))
    host.speak()


def check(net: Network, dropped: dict[str, int] | None = None, unwanted: int = 0) -> None:
    """Check that nothing is left of the leavers, what the relays dropped, and what nobody wanted."""
    net.check()
    assert [len(router._casts.leavers) for router in net.routers] == [0] * len(net.routers)
    assert {c: n for r in net.routers for c, n in r.accounts.dropped.items()} == (dropped or {})
    assert sum(router.accounts.unwanted for router in net.routers) == unwanted


def test_what_was_on_its_way_reaches_the_last_member_of_a_relay_before_its_answer() -> None:
    net, publisher, member, inbox = two_relays()
    left = leave(member)
    publish(publisher, b"second")
    assert not left.done()
    net.run()
    assert left.message.error == ""
    assert inbox.payloads == [b"first", b"second"]
    publish(publisher, b"third")
    net.run()
    assert inbox.payloads == [b"first", b"second"]
    check(net, unwanted=1)


def test_what_was_on_its_way_reaches_another_member_of_the_relay() -> None:
    net, publisher, member, inbox = two_relays()
    other = net.host("other", relay=1).subscribe("t", group="g")
    left = leave(member)
    while member.listen():
        pass
    assert left.message.error == "", "nobody has to be waited for"
    publish(publisher, b"second")
    net.run()
    assert (inbox.payloads, other.payloads) == ([b"first"], [b"second"])
    check(net)


def test_a_member_that_joins_meanwhile_gets_what_comes_after_it() -> None:
    net, publisher, member, inbox = two_relays()
    leave(member)
    other = net.host("other", relay=1).subscribe("t", group="g")
    publish(publisher, b"second")
    net.run()
    assert (inbox.payloads, other.payloads) == ([b"first"], [b"second"])
    check(net)


def test_what_was_on_its_way_reaches_a_member_that_says_bye() -> None:
    net, publisher, member, inbox = two_relays()
    bye(member)
    publish(publisher, b"second")
    assert not member.peer.closed
    net.run()
    assert member.peer.closed
    assert inbox.payloads == [b"first", b"second"]
    check(net)


def test_a_bye_does_not_overtake_the_leaving_of_a_group() -> None:
    net, publisher, member, inbox = two_relays()
    left = leave(member)
    bye(member)
    publish(publisher, b"second")
    net.run()
    assert left.message.error == ""
    assert member.peer.closed
    assert inbox.payloads == [b"first", b"second"]
    check(net)


@pytest.mark.parametrize("says_bye", [False, True])
def test_a_member_of_a_relay_that_stops_gets_what_others_send_before_they_know(
    says_bye: bool,
) -> None:
    net, publisher, member, inbox = two_relays()
    near = net.host("near", relay=1)
    near.publish("t", b"near first")
    net.run()
    net.routers[1].drain(GRACE_MS)
    left = Result()
    if says_bye:
        bye(member)
    else:
        left = leave(member)
    publish(publisher, b"second")
    net.hosts.remove(near)  # it reads nothing for a while
    net.run()
    assert not left.done()
    assert not member.peer.closed
    publish(near, b"near second")
    net.hosts.append(near)
    net.run()
    assert inbox.payloads == [b"first", b"near first", b"second", b"near second"]
    assert member.peer.closed == says_bye
    assert left.done() != says_bye
    check(net)


def test_a_relay_that_does_not_answer_is_not_waited_for_long() -> None:
    net, _, member, _ = two_relays()
    ends = list(net.ends)
    net.ends.clear()
    left = leave(member)
    net.run()
    assert not left.done()
    net.pass_time(SETTLE_US / 1e6)
    assert left.message.error == ""
    net.ends += ends
    net.run()
    check(net)


def test_a_member_that_comes_back_and_goes_again_leaves_nothing_behind() -> None:
    net, publisher, member, inbox = two_relays()
    for _ in range(3):
        leave(member)
        member.session.ask(
            lambda number: frames.Subscribe(number, "t", [member.key.key_id], "g"), Result()
        )
        member.speak()
    left = leave(member)
    publish(publisher, b"second")
    net.run()
    assert left.message.error == ""
    assert inbox.payloads == [b"first", b"second"]
    assert (member.peer.leaving, member.peer.topic_nodes, member.peer.groups) == (0, 0, {})
    check(net)


def test_a_member_that_is_lost_while_it_leaves_leaves_nothing_behind() -> None:
    net, publisher, member, inbox = two_relays()
    leave(member)
    member.lose()
    publish(publisher, b"second")
    net.run()
    assert inbox.payloads == [b"first"]
    assert net.routers[1].quotas.subscriptions.total == 0
    check(net, unwanted=1)


def test_only_so_many_of_a_session_are_being_left_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "MAX_LEAVING", 2)
    net = Network(relays=2)
    net.link(0, 1)
    member = net.host("member", relay=1)
    for topic in "abc":
        member.subscribe(topic, group="g")
    answers = [Result() for _ in "abc"]
    for topic, answer in zip("abc", answers, strict=True):
        ask = frames.Unsubscribe(0, topic, "g")
        member.session.ask(lambda number, ask=ask: frames.Unsubscribe(number, ask.filter, "g"), answer)  # fmt: skip
    member.speak()
    while member.listen():
        pass
    assert [answer.done() for answer in answers] == [False, False, True]
    net.run()
    assert all(answer.done() for answer in answers)
    check(net)


def test_the_quota_counts_a_subscription_until_it_is_left() -> None:
    net, _, member, _ = two_relays()
    used = net.routers[1].quotas.subscriptions.total
    leave(member)
    assert net.routers[1].quotas.subscriptions.total == used
    net.run()
    assert net.routers[1].quotas.subscriptions.total == used - 1


def test_a_member_that_stays_gets_what_nobody_else_takes_until_it_ends() -> None:
    net, publisher, member, inbox = two_relays()
    left = Result()
    member.session.ask(lambda number: frames.Unsubscribe(number, "t", "g", stay=True), left)
    net.run()
    assert left.message.error == ""
    publish(publisher, b"second")
    net.run()
    other = net.host("other", relay=1).subscribe("t", group="g")
    publish(publisher, b"third")
    net.run()
    assert (inbox.payloads, other.payloads) == ([b"first", b"second"], [b"third"])
    bye(member)
    net.run()
    assert member.peer.closed
    assert net.routers[1].quotas.subscriptions.total == 1
    check(net)
