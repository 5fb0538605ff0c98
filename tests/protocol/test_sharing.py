"""A queue group shares the messages that are published in one turn."""

from __future__ import annotations

from protocol.kit import Host, Inbox, Network

from iris.wire.codec import KIND_AT
from iris.wire.kinds import MAX_PARTS, Kind


def burst(publisher: Host, count: int, size: int = 0) -> None:
    """Publish `count` messages in one turn, with payloads of at least `size` bytes."""
    out = publisher.session.out
    flow = out.flow(0x47, "t", publisher.key)
    for number in range(count):
        out.add(flow, b"%d" % number + b" " * size, None, False)


def group(net: Network, members: int, *, relays: int = 1) -> list[Inbox]:
    return [net.host(f"m{n}", relay=n % relays).subscribe("t", group="g") for n in range(members)]


def numbers(inbox: Inbox) -> list[int]:
    return [int(payload) for payload in inbox.payloads]


def check(inboxes: list[Inbox], least: int, most: int) -> None:
    """Check that each member received a part of the numbers 0 to 199, in rising order, and no number twice."""
    assert sorted(n for inbox in inboxes for n in numbers(inbox)) == list(range(200))
    for inbox in inboxes:
        assert least <= len(inbox.messages) <= most
        assert numbers(inbox) == sorted(numbers(inbox))
        assert not inbox.gaps


def begin(net: Network, inboxes: list[Inbox]) -> Host:
    """Publish a first bundle of one message, from which the relay learns of the publisher."""
    publisher = net.host("publisher")
    publisher.publish("t", b"0")
    net.run()
    for inbox in inboxes:
        inbox.messages.clear()
    return publisher


def test_two_members_have_about_half_of_a_burst_each(net: Network) -> None:
    inboxes = group(net, 2)
    publisher = begin(net, inboxes)
    burst(publisher, 200)
    net.run()
    check(inboxes, 80, 120)


def test_four_members_have_about_a_quarter_each(net: Network) -> None:
    inboxes = group(net, 4)
    publisher = begin(net, inboxes)
    burst(publisher, 200)
    net.run()
    check(inboxes, 30, 70)


def test_the_first_burst_of_a_publisher_is_shared_too(net: Network) -> None:
    inboxes = group(net, 4)
    burst(net.host("publisher"), 200)
    net.run()
    check(inboxes, 30, 70)


def test_a_relay_says_at_once_that_an_address_has_no_groups(net: Network) -> None:
    publisher = net.host("publisher")
    inbox = net.host("plain").subscribe("t")
    burst(publisher, 200)
    net.run()
    assert publisher.session.out.flow(0x47, "t", publisher.key).parts == 1
    bundles = 0

    def see(host: Host, frame: bytes) -> list[bytes]:
        nonlocal bundles
        bundles += frame[KIND_AT] == Kind.PUBLISH
        return [frame]

    net.tamper = see
    burst(publisher, 200)
    net.run()
    assert bundles == 1
    assert len(inbox.messages) == 400


def test_what_is_not_published_is_not_cut(net: Network) -> None:
    out = net.host("sender").session.out
    assert out.flow(Kind.BROADCAST, "c", net.hosts[0].key).parts == 1


def test_a_burst_of_several_full_bundles_is_shared_in_fewer_parts(net: Network) -> None:
    inboxes = group(net, 4)
    publisher = begin(net, inboxes)
    bundles = 0

    def see(host: Host, frame: bytes) -> list[bytes]:
        nonlocal bundles
        bundles += frame[KIND_AT] == Kind.PUBLISH
        return [frame]

    net.tamper = see
    burst(publisher, 200, 1024)
    net.run()
    check(inboxes, 30, 70)
    assert bundles <= 3 * 4 + 8, "three that were full, one part for each member; and the rest"
    bundles = 0
    for inbox in inboxes:
        inbox.messages.clear()
    burst(publisher, 2000, 1024)
    net.run()
    assert bundles <= 8 * 4 + 26 + 8, "a long burst is spread by whole bundles"
    assert all(400 <= len(inbox.messages) <= 600 for inbox in inboxes)


def test_members_behind_another_relay_have_their_part() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    inboxes = group(net, 4, relays=2)
    publisher = begin(net, inboxes)
    burst(publisher, 200)
    net.run()
    check(inboxes, 30, 70)


def test_a_publisher_is_notified_when_a_group_comes_grows_and_goes(net: Network) -> None:
    publisher, plain = net.host("publisher"), net.host("plain")
    inbox = plain.subscribe("t")
    flow = publisher.session.out.flow(0x47, "t", publisher.key)

    def parts() -> int:
        publisher.publish("t", b"0")
        net.run()
        return flow.parts

    assert parts() == 1
    hosts = [net.host(f"m{n}") for n in range(12)]
    hosts[0].subscribe("t", group="g")
    assert parts() == 1, "one member needs no sharing"
    hosts[1].subscribe("t", group="g")
    assert parts() == 4
    for host in hosts[2:]:
        host.subscribe("t", group="g")
    assert parts() == MAX_PARTS
    for host in hosts[1:]:
        host.lose()
    assert parts() == 1
    assert len(inbox.messages) == 5


def test_without_a_group_a_turn_s_messages_stay_one_bundle(net: Network) -> None:
    inbox = net.host("one").subscribe("t")
    publisher = begin(net, [inbox])
    burst(publisher, 200)
    before = publisher.session.out.sent_messages
    publisher.session.flush()
    assert publisher.session.out.sent_messages - before == 200
    assert len(publisher.session.out.chunks) <= 2, "its header and its body"
    net.run()
    assert len(inbox.messages) == 200
