"""Rate quotas: how much one session, and all sessions to one address, may send per second."""

from __future__ import annotations

import pytest
from protocol.kit import KEY, Host, Network, Result

from iris.errors import Overloaded
from iris.wire.kinds import Kind
from relay.core.limits import Limits, Quota

SECOND_US = 1_000_000


def network(session: Quota = (0, 0), **addresses: Quota) -> Network:
    named = [(name.replace("_", ".") + ".>", quota) for name, quota in addresses.items()]
    return Network(limits=Limits(session_rate=session, address_rates=named))


def wait(net: Network, us: int) -> None:
    for router in net.routers:
        router.now_us += us
    net.now_us += us


def refused(results: list[Result]) -> list[str]:
    errors = [result.error for result in results if result.error is not None]
    assert all(isinstance(error, Overloaded) and not error.may_have_run for error in errors)
    return [str(error) for error in errors]


def served(net: Network) -> Host:
    member = net.host("member")
    member.serve("db", lambda delivery: delivery.reply(b"ok", None, False))
    return member


def test_requests_over_the_session_quota_are_refused_by_name_and_do_not_run() -> None:
    net = network((10, 0))
    served(net)
    caller, other = net.host("caller"), net.host("other")
    results = []
    for _ in range(13):
        results.append(caller.request("db"))
        net.run()
    assert len(refused(results)) == 3
    assert (
        "over the session quota (session_rate) of 10 messages/s; wait 100 ms" in refused(results)[0]
    )
    assert net.router.accounts.refused == 3
    assert net.router.accounts.balance() == 0
    mine = other.request("db")
    net.run()
    assert mine.value == b"ok"  # a quota is each session's own
    wait(net, SECOND_US // 2)
    again = [caller.request("db")]
    net.run()
    assert not refused(again)


def test_a_run_of_requests_is_refused_call_by_call() -> None:
    net = network((10, 0))
    served(net)
    caller = net.host("caller")
    first = [caller.request("db") for _ in range(16)]  # one frame, accepted whole
    net.run()
    assert not refused(first)
    second = [caller.request("db") for _ in range(4)]
    net.run()
    assert len(refused(second)) == 4
    assert net.router.accounts.balance() == 0


def test_what_is_over_the_quota_of_an_address_is_refused_for_all_sessions_and_other_addresses_go_on() -> (
    None
):
    net = network(orders=(2, 0))
    reader = net.host("reader")
    orders, other = reader.subscribe("orders.>"), reader.subscribe("news")
    one, two = net.host("one"), net.host("two")
    for publisher in (one, two, one, two):
        publisher.publish("orders.new", b"x")
        publisher.publish("news", b"y")
        net.run()
    assert (len(orders.payloads), len(other.payloads)) == (2, 4)
    assert [
        (lost.kind, lost.name, lost.count, lost.source) for lost in one.losses + two.losses
    ] == [("publish", "orders.new", 1, b"")] * 2
    assert "quota of 'orders.>' (address_rate) of 2 messages/s" in one.losses[0].cause
    assert net.router.accounts.dropped == {"over quota": 2}
    assert net.router.accounts.balance() == 0
    assert net.router.status()["rates"] == {"orders.>": {"quota": "2 messages/s", "refused": 2}}


def test_a_receiver_learns_by_the_next_message_what_was_over_a_quota() -> None:
    net = network((2, 0))
    reader, publisher = net.host("reader"), net.host("publisher")
    orders = reader.subscribe("orders.>")
    for number in range(5):
        publisher.publish("orders.new", b"%d" % number)
        net.run()
    wait(net, 2 * SECOND_US)
    publisher.publish("orders.new", b"5")
    net.run()
    assert orders.payloads == [b"0", b"1", b"5"]
    assert [gap.count for gap in orders.gaps] == [3]
    assert sum(lost.count or 0 for lost in publisher.losses) == 3


def test_bytes_count_too_and_a_message_larger_than_a_second_of_them_passes_when_nothing_was_sent() -> (
    None
):
    net = network((0, 1000))
    reader, publisher = net.host("reader"), net.host("publisher")
    orders = reader.subscribe("orders")
    publisher.publish("orders", bytes(5000))
    net.run()
    publisher.publish("orders", b"small")
    net.run()
    wait(net, 3 * SECOND_US)
    publisher.publish("orders", b"early")
    net.run()
    wait(net, 2 * SECOND_US)
    publisher.publish("orders", b"late")
    net.run()
    assert [len(payload) for payload in orders.payloads] == [5000, 4]
    assert [lost.count for lost in publisher.losses] == [1, 1]


@pytest.mark.parametrize("kind", ["push", "survey", "tunnel"])
def test_every_kind_of_call_counts(kind: str) -> None:
    net = network((2, 0))
    member, caller = net.host("member"), net.host("caller")
    member.serve("db")
    for _ in range(4):
        if kind == "push":
            caller.push("db")
        elif kind == "survey":
            caller.survey("db")
        else:
            caller.open_tunnel("db")
        net.run()
    service = member.services[1]
    assert len(service.tunnels if kind == "tunnel" else service.deliveries) == 2
    assert net.router.accounts.refused == 2
    if kind == "push":
        assert [lost.kind for lost in caller.losses] == ["push", "push"]


def test_refusals_and_answers_of_a_member_are_not_counted() -> None:
    net = network((1, 0))
    member = served(net)
    for number in range(5):
        caller = net.host(f"caller{number}")
        asked = caller.request("db")
        net.run()
        assert asked.value == b"ok"
    assert len(member.services[1].deliveries) == 5


def test_without_quotas_frames_are_routed_as_before() -> None:
    net = Network()
    host = net.host("host")
    assert net.router._session_table[Kind.PUBLISH] == net.router._casts.cast
    limited = network((1, 0)).router
    assert limited._session_table[Kind.PUBLISH] != limited._casts.cast
    assert host.peer.rate is None


def test_a_broadcast_that_reaches_nobody_is_reported_to_its_sender() -> None:
    net = Network()
    sender = net.host("sender")
    sender.publish("db", b"one", b"two", kind=Kind.BROADCAST)
    net.run()
    assert [(lost.kind, lost.name, lost.count, lost.cause) for lost in sender.losses] == [
        ("broadcast", "db", 2, "no members")
    ]
    net.host("member").serve("db")
    sender.publish("db", b"three", kind=Kind.BROADCAST)
    net.run()
    assert len(sender.losses) == 1
    sender.publish("nobody.listens", b"x")  # a topic need not have subscribers
    net.run()
    assert len(sender.losses) == 1
    assert KEY.key_id in sender.keys
