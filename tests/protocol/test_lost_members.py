"""Calls to a cluster whose last members have just left or were lost."""

from __future__ import annotations

from typing import Any, cast

from protocol.kit import Host, Network, Result

from iris.core.interfaces import Delivery
from iris.core.requests import MAX_PAUSE_US, SEEN_MS
from iris.errors import NoMembers, RequestTimeout
from relay.core import seen
from relay.core.link import SUSPENDED_US

LONG_MS = 60_000


def pong(delivery: Delivery) -> None:
    delivery.reply(b"pong", None, False)


def lost_with_their_relay() -> tuple[Network, Host]:
    """Return relays of which the second was lost a moment ago, with the only member, and a caller at the first."""
    net = Network(relays=2)
    net.routers[1].label = "host-b"
    ends = net.link(0, 1)
    caller = net.host("caller")
    net.host("member", relay=1).serve("db", pong)
    assert value_of(net, caller.request("db")) == b"pong"
    ends[0].link.copy.label = "host-b"
    net.cut(ends)
    return net, caller


def value_of(net: Network, result: Result) -> object:
    net.run()
    return result.value


def text_of(result: Result) -> str:
    assert isinstance(result.error, NoMembers), result.error
    assert not result.error.may_have_run
    return result.error.detail


def test_an_idempotent_call_waits_until_its_members_are_back() -> None:
    net, caller = lost_with_their_relay()
    answer = caller.request("db", idempotent=True, timeout_ms=LONG_MS)
    net.pass_time(3 * SUSPENDED_US / 1e6)
    assert not answer.done()
    net.host("another").serve("db", pong)
    net.pass_time(MAX_PAUSE_US / 1e6)
    assert answer.value == b"pong"
    net.check()


def test_an_idempotent_call_that_comes_later_waits_too() -> None:
    net, caller = lost_with_their_relay()
    net.pass_time(SEEN_MS / 1000 - 2)
    answer = caller.request("db", idempotent=True, timeout_ms=LONG_MS)
    net.pass_time(LONG_MS / 1000 - 3)
    assert not answer.done()
    net.host("another").serve("db", pong)
    net.pass_time(MAX_PAUSE_US / 1e6)
    assert answer.value == b"pong"


def test_an_idempotent_call_ends_at_its_deadline_and_says_where_the_members_were() -> None:
    net, caller = lost_with_their_relay()
    answer = caller.request("db", idempotent=True, timeout_ms=5_000)
    net.pass_time(4.5)
    assert not answer.done()
    net.pass_time(0.6)
    assert "connected to host-b until" in text_of(answer)
    net.check()


def test_a_call_that_is_not_idempotent_waits_until_the_relay_has_settled() -> None:
    net, caller = lost_with_their_relay()
    answer = caller.request("db", timeout_ms=LONG_MS)
    net.pass_time(SUSPENDED_US / 1e6 - 0.5)
    assert not answer.done()
    net.pass_time(0.6)
    assert "connected to host-b until 3 s ago" in text_of(answer)


def test_no_call_waits_longer_than_its_timeout() -> None:
    net, caller = lost_with_their_relay()
    answer = caller.request("db", timeout_ms=1_000)
    net.pass_time(1.1)
    assert isinstance(answer.error, RequestTimeout)


def test_a_call_to_a_service_that_was_never_there_fails_at_once() -> None:
    net, caller = lost_with_their_relay()
    for idempotent in (False, True):
        answer = caller.request("nowhere", idempotent=idempotent, timeout_ms=LONG_MS)
        net.run()
        assert "check its spelling" in text_of(answer)


def test_an_idempotent_call_long_after_the_last_member_fails_at_once() -> None:
    net, caller = lost_with_their_relay()
    net.pass_time(SEEN_MS / 1000)
    answer = caller.request("db", idempotent=True, timeout_ms=LONG_MS)
    net.run()
    assert "connected to host-b until 10 s ago" in text_of(answer)
    net.pass_time(seen.SEEN_US / 1e6)
    answer = caller.request("db", timeout_ms=LONG_MS)
    net.run()
    assert "check its spelling" in text_of(answer)


def test_a_member_that_left_this_relay_or_another_was_seen_there() -> None:
    net = Network(relays=2)
    net.routers[0].label = "host-a"
    net.link(0, 1)
    caller, here, there = net.host("caller"), net.host("here"), net.host("there", relay=1)
    here.serve("one", pong)
    there.serve("two", pong)
    here.lose()
    there.lose()
    net.run()
    for cluster, where in (
        ("one", "host-a"),
        ("two", "relay " + net.routers[1].relay_id.hex()[:8]),
    ):
        answer = caller.request(cluster, timeout_ms=LONG_MS)
        net.run()
        assert f"connected to {where} until 1 s ago" in text_of(answer)


def test_a_call_that_waits_can_be_given_up() -> None:
    net, caller = lost_with_their_relay()
    net.pass_time(SUSPENDED_US / 1e6)
    answer = Result()
    pending = caller.send("db", b"", answer, idempotent=True, timeout_ms=LONG_MS)
    net.run()
    assert not answer.done()
    caller.session.requests.forget(pending)
    net.pass_time(LONG_MS / 1000)
    assert not answer.done()


def test_a_call_that_waits_has_not_run_when_its_session_ends() -> None:
    net, caller = lost_with_their_relay()
    net.pass_time(SUSPENDED_US / 1e6)
    answer = caller.request("db", idempotent=True, timeout_ms=LONG_MS)
    net.run()
    caller.lose()
    assert answer.error is not None
    assert answer.error.may_have_run is False  # type: ignore[attr-defined]  # of every RequestError


def test_the_members_of_only_so_many_addresses_are_remembered() -> None:
    table = seen.Seen()
    for number in range(seen.MAX_SEEN + 1):
        table.left((str(number), b""), {1}, "host", 0)
    assert table.last(1, ("0", b""), 1) is None
    assert table.last(1, ("1", b""), 1) == ("host", 1)
    table.lost((((f"more {n}", b""), {1}) for n in range(seen.MAX_AT_ONCE + 1)), "host", 0)
    assert table.last(1, (f"more {seen.MAX_AT_ONCE}", b""), 1) is None
    assert len(table._last) == seen.MAX_SEEN


def test_a_browser_does_not_learn_the_names_of_hosts() -> None:
    net, caller = lost_with_their_relay()
    net.pass_time(SUSPENDED_US / 1e6)
    caller.peer.ticket = cast(Any, object())
    answer = caller.request("db", timeout_ms=LONG_MS)
    net.run()
    assert "connected to a relay until" in text_of(answer)
