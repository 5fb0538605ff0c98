"""Programs on hosts without a relay, which connect to a relay on another host over TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hosts.kit import Failed, Network
from support.namespaces import Lan

pytestmark = [pytest.mark.timeout(120), pytest.mark.net]
PORT = 7431


def test_a_host_without_a_relay_serves_and_calls_through_one_of_another_host(
    lan: Lan, network: Network
) -> None:
    """The guest's relay is `a`, and the member is on `b`."""
    a, b, batch = (lan.host(name) for name in ("a", "b", "batch"))
    for host in (a, b, batch):
        host.plug()
    first = network.relay(a, "--listen", f"tls://0.0.0.0:{PORT}")
    second = network.relay(b)
    network.meshed()
    member = second.member()
    guest = network.guest(batch, f"tls://{a.nics['eth0'].ipv4}:{PORT}", network.access("batch.pem"))
    guest.sees_members(1)
    assert guest.request("echo", "hello") == "b: hello"
    assert guest.do("tunnel", cluster="echo", count=50, size=40_000, timeout=20.0) == 50
    guest.do("serve", cluster="batch")
    guest.do("subscribe", pattern="news.>")
    member.sees_members(1, "batch")
    assert member.request("batch", "hello") == "batch: hello"
    assert member.do("survey", cluster="batch", payload="who", timeout=20.0)["answers"] == [
        "batch: who"
    ]
    member.reaches("news.ready", guest)
    member.do("publish", topic="news.today", first=0, count=2000)
    assert guest.received("publish", 2000) == [str(number) for number in range(2000)]
    waiting = member.begin("request", cluster="batch", payload="hold", timeout=60.0)
    guest.event("holding")
    batch.nics["eth0"].cut()
    with pytest.raises(Failed, match="ConnectionLost"):
        waiting.result()
    member.sees_members(0, "batch")
    batch.nics["eth0"].heal()
    member.sees_members(1, "batch")
    guest.do("release")
    assert member.request("batch", "again") == "batch: again"
    for relay in (first, second):
        relay.settled()


def test_an_access_file_of_another_network_opens_no_door(
    lan: Lan, make_network: Callable[..., Network]
) -> None:
    red, blue = make_network("red"), make_network("blue")
    blue.share_keyring(red)
    a, batch = lan.host("a"), lan.host("batch")
    a.plug(), batch.plug()
    relay = red.relay(a, "--listen", f"tls://[::]:{PORT}")
    relay.member()
    address = f"tls://[{a.nics['eth0'].ipv6}]:{PORT}"
    stranger = blue.guest(batch, address, blue.access("batch.pem"))
    assert stranger.process.wait(30) != 0
    assert [session["label"] for session in relay.status()["sessions"]].count("batch") == 0
    known = lan.host("known")
    known.plug()
    assert red.guest(known, address, red.access("known.pem")).request("echo", "hello") == "a: hello"
