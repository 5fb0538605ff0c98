"""A topic with subscribers only under other keys: publishers are notified, and an audience names the other keys."""

from __future__ import annotations

from typing import Any

import pytest
from protocol.kit import KEY, OTHER_KEY, Host, Network, Result, control_of, kind_of

from iris.crypto.keys import ClusterKey
from iris.wire import frames
from iris.wire.kinds import MAX_OTHER_KEYS, OTHER_KEYS, Kind
from relay.core import other_keys

OURS, THEIRS = KEY.key_id[:4].hex(), OTHER_KEY.key_id[:4].hex()


def noted(net: Network, publisher: Host) -> list[frames.Unrouted]:
    """Return the list of UNROUTED frames that this host receives from now on."""
    found: list[frames.Unrouted] = []

    def look(host: Host, frame: bytes) -> list[bytes]:
        if host is publisher and kind_of(frame) == Kind.UNROUTED:
            found.append(control_of(frame))
        return [frame]

    net.tamper = look
    return found


def ask(host: Host, topic: str = "orders.new", *, slow: bool = False) -> frames.Audience:
    audience = Result()
    host.session.out.prove(KEY)
    host.session.ask(lambda number: frames.Topic(number, topic, KEY.key_id, slow), audience)
    host.net.run()
    message: frames.Audience = audience.message
    return message


def publish(net: Network, host: Host, topic: str = "orders.new", *payloads: bytes) -> None:
    host.publish(topic, *(payloads or (b"1",)))
    net.run()


@pytest.mark.parametrize("there", [0, 1])
def test_a_publisher_whose_topic_has_subscribers_only_under_another_key_is_notified(
    there: int,
) -> None:
    net = Network(relays=2)
    net.link(0, 1)
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,), relay=there)
    notes = noted(net, publisher)
    inbox = subscriber.subscribe("orders.*")
    publish(net, publisher, "orders.new", b"1", b"2")
    assert notes == [
        frames.Unrouted(
            int(Kind.PUBLISH), "orders.new", KEY.key_id, 2, OTHER_KEYS, {THEIRS: 1}
        )
    ]  # fmt: skip
    assert publisher.other_key_notes == [("orders.new", KEY.key_id, {THEIRS: 1})]
    assert not publisher.losses, "a publication without subscribers is not a loss"
    assert not inbox.messages
    assert ask(publisher).others == ask(publisher, slow=True).others == {THEIRS: 1}
    assert net.router.status()["other_keys"] == [
        {"topic": "orders.new", "key": OURS, "others": {THEIRS: 1}}
    ]


def test_a_publisher_is_notified_once_until_the_interest_changes_and_ten_seconds_have_passed() -> (
    None
):
    net = Network()
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,))
    notes = noted(net, publisher)
    subscriber.subscribe("orders.new")
    for _ in range(3):
        publish(net, publisher)
    net.pass_time(60)
    publish(net, publisher)
    assert len(notes) == 1, "nothing changed"
    subscriber.subscribe("orders.>")
    publish(net, publisher)
    subscriber.subscribe("orders.*")
    publish(net, publisher)
    assert [each.others for each in notes] == [{THEIRS: 1}, {THEIRS: 2}]
    net.pass_time(other_keys.AGAIN_US / 1e6)
    publish(net, publisher)
    assert [each.others for each in notes] == [{THEIRS: 1}, {THEIRS: 2}, {THEIRS: 3}]


def test_subscribers_that_come_within_a_second_after_a_look_are_found_after_it() -> None:
    net = Network()
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,))
    notes = noted(net, publisher)
    publish(net, publisher)
    subscriber.subscribe("orders.new")
    publish(net, publisher)
    assert not notes
    net.pass_time(other_keys.LOOK_US / 1e6)
    publish(net, publisher)
    assert len(notes) == 1


def test_nothing_is_reported_while_other_relays_may_still_name_subscribers() -> None:
    net = Network()
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,))
    notes = noted(net, publisher)
    subscriber.subscribe("orders.new")
    net.router.mesh.settle_us = net.mono_us + 1_000_000
    publish(net, publisher)
    assert not notes
    net.pass_time(1.0)
    publish(net, publisher)
    assert len(notes) == 1


@pytest.mark.parametrize("pattern", [">", "*.new"])
def test_filters_that_begin_with_a_wildcard_count_in_the_audience_and_cause_no_report(
    pattern: str,
) -> None:
    """Whoever watches all topics of another key does not expect this one."""
    net = Network()
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,))
    notes = noted(net, publisher)
    subscriber.subscribe(pattern)
    publish(net, publisher)
    assert not notes
    assert ask(publisher).others == {THEIRS: 1}
    assert ask(publisher, "other.old").others == ({THEIRS: 1} if pattern == ">" else {})


def test_a_subscriber_under_both_keys_does_not_count_as_one_under_another() -> None:
    net = Network(relays=2)
    net.link(0, 1)
    publisher = net.host()
    for relay in (0, 1):
        both = net.host(keys=(KEY, OTHER_KEY), relay=relay)
        for key in (KEY, OTHER_KEY):
            both.session.out.prove(key)
        ids = [KEY.key_id, OTHER_KEY.key_id]
        both.session.ask(lambda n, ids=ids: frames.Subscribe(n, "orders.new", ids), Result())
        net.run()
    audience = ask(publisher)
    assert (audience.subscribers, audience.others) == (2, {})
    net.host(keys=(OTHER_KEY,), relay=1).subscribe("orders.new")
    net.host(keys=(OTHER_KEY,), relay=0).subscribe("orders.new")
    assert ask(publisher).others == {THEIRS: 2}


def test_the_status_report_forgets_what_no_longer_holds() -> None:
    net = Network()
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,))
    subscriber.subscribe("orders.new")
    subscriber.subscribe("bills.new")
    for topic in ("orders.new", "bills.new"):
        publish(net, publisher, topic)

    def shown() -> list[Any]:
        return [each["topic"] for each in net.router.status()["other_keys"]]

    assert shown() == ["orders.new", "bills.new"]
    net.host().subscribe("orders.new")
    assert shown() == ["bills.new"]
    publisher.lose()
    assert shown() == []


def test_a_status_report_shows_the_latest_64_topics() -> None:
    net = Network()
    publisher, subscriber = net.host(), net.host(keys=(OTHER_KEY,))
    subscriber.subscribe("orders.>")
    for number in range(other_keys.MAX_REMEMBERED + 2):
        publish(net, publisher, f"orders.{number}")
    shown = net.router.status()["other_keys"]
    assert len(shown) == other_keys.MAX_REMEMBERED
    assert shown[0]["topic"] == "orders.2"


def test_at_most_64_other_keys_are_named_whatever_keys_others_make_up() -> None:
    net = Network()
    publisher = net.host()
    for number in range(MAX_OTHER_KEYS + 6):
        made_up = ClusterKey(number.to_bytes(32, "little"))
        net.host(keys=(made_up,)).subscribe("orders.new")
    others = ask(publisher, slow=True).others
    assert isinstance(others, dict)
    assert len(others) == MAX_OTHER_KEYS
    assert not publisher.ended_because


def test_the_index_of_first_tokens_is_empty_once_all_have_unsubscribed() -> None:
    net = Network()
    table = net.router.interest
    hosts = [net.host(keys=(key,)) for key in (KEY, OTHER_KEY)]
    for host in hosts:
        for pattern in ("a.b", "a.>", "a", ">", "*.b", "*", "b.a"):
            host.subscribe(pattern)
    assert table._heads.keys() == {"a", "b", ">", "*"}
    hosts[0].lose()
    assert [[*keys] for keys in table._heads.values()] == [[OTHER_KEY.key_id]] * 4
    hosts[1].lose()
    assert table._heads == {}
