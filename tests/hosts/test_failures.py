"""Cables are cut, relays are killed and frozen: calls in flight end, others are served elsewhere, and nothing
runs twice.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts.kit import PATIENCE_S, Command, Failed, Network, wait_until
from support.namespaces import Lan
from support.proxy import FaultProxy

pytestmark = [pytest.mark.timeout(120), pytest.mark.net]
LONG_S = 60.0
"""A deadline so late that calls end for another reason."""


class Scene:
    """A caller on `a`, a member on `b` that holds two of its requests, and later a member on `c` that holds none."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.a, self.b, self.c = network.hosts("abc")
        network.meshed()
        self.caller = self.a.program("caller")
        self.keeper = self.b.member()
        self.caller.sees_members(1)
        self.once = self.begin("hold once")
        self.again = self.begin("hold again", idempotent=True)
        self.keeper.event("holding", 2)
        self.spare = self.c.program()
        self.spare.do("release")
        self.spare.do("serve", cluster="echo")
        self.caller.sees_members(2)

    def begin(self, payload: str, *, idempotent: bool = False) -> Command:
        return self.caller.begin(
            "request", cluster="echo", payload=payload, timeout=LONG_S, idempotent=idempotent
        )

    def check_ends(self) -> None:
        """Check that the two requests held by `b` end correctly, and that further ones are answered by `c`."""
        with pytest.raises(Failed) as failed:
            self.once.result()
        assert (failed.value.error, failed.value.may_have_run) == ("ConnectionLost", True)
        assert self.again.result() == "c: hold again"
        ended = self.caller.do("requests", cluster="echo", count=200, in_flight=8, timeout=LONG_S)
        assert ended == {"c": 200}
        assert self.spare.received("request", 201).count("hold once") == 0

    def check_return(self) -> None:
        """Check that all are linked again and that `b` answers again; its old requests have no effect."""
        self.network.meshed()
        self.caller.sees_members(2)
        self.keeper.do("release")
        self.spare.do("leave", cluster="echo")
        self.caller.sees_members(1)
        assert self.caller.request("echo", "back") == "b: back"
        for relay in (self.a, self.b, self.c):
            relay.settled()


@pytest.fixture
def scene(network: Network) -> Scene:
    return Scene(network)


# -- a host is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["the cable is pulled", "the interface is switched off"])
def test_a_host_that_is_cut_off_loses_what_it_kept_and_serves_again_when_it_is_back(
    how: str, scene: Scene
) -> None:
    nic = scene.b.host.nics["eth0"]
    cut, heal = (nic.cut, nic.heal) if "cable" in how else (nic.down, nic.up)
    cut()
    scene.check_ends()
    scene.a.linked_to(scene.c)
    scene.b.linked_to()
    assert scene.keeper.request("echo", "alone") == "b: alone"
    heal()
    scene.check_return()


def test_a_relay_that_is_killed_is_noticed_by_its_connection_not_by_its_silence(
    scene: Scene,
) -> None:
    scene.b.kill()
    scene.check_ends()
    assert "silent" not in scene.a.says("link.down")["reason"]
    scene.a.linked_to(scene.c)
    scene.b.start()
    scene.check_return()


def test_a_relay_that_is_frozen_is_noticed_by_its_silence_and_taken_back_when_it_thaws(
    scene: Scene,
) -> None:
    scene.b.freeze()
    scene.check_ends()
    assert "silent" in scene.a.says("link.down")["reason"]
    scene.a.linked_to(scene.c)
    scene.b.thaw()
    scene.check_return()


def test_a_member_that_is_killed_loses_what_it_kept_and_its_relay_stays(scene: Scene) -> None:
    scene.keeper.kill()
    scene.check_ends()
    scene.network.meshed()
    assert scene.a.lines("link.down") == []
    for relay in (scene.a, scene.b, scene.c):
        relay.settled()


def test_a_relay_that_is_stopped_lets_what_it_kept_be_answered(scene: Scene) -> None:
    scene.b.process.terminate()
    scene.caller.sees_members(1)
    scene.keeper.do("release")
    assert scene.once.result() == "b: hold once"
    assert scene.again.result() == "b: hold again"
    assert scene.b.process.wait(PATIENCE_S) == 0
    assert scene.caller.request("echo", "hello") == "c: hello"
    scene.a.linked_to(scene.c)


def test_the_callers_own_relay_is_killed_and_the_caller_goes_on_with_the_next(
    scene: Scene,
) -> None:
    scene.a.kill()
    with pytest.raises(Failed) as failed:
        scene.once.result()
    assert (failed.value.error, failed.value.may_have_run) == ("ConnectionLost", True)
    scene.keeper.do("release")
    scene.a.start()
    scene.network.meshed()
    assert scene.again.result() in {"b: hold again", "c: hold again"}


# -- tunnels and surveys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_tunnel_to_a_host_that_is_lost_breaks_on_both_ends(how: str, network: Network) -> None:
    a, b = network.hosts("ab")
    network.meshed()
    caller, member = a.program("caller"), b.member()
    caller.sees_members(1)
    caller.do("open_tunnel", cluster="echo", number="one", timeout=LONG_S)
    assert caller.do("pass", number="one", payload="hello") == "hello"
    waiting = caller.begin("pass", number="one", payload="hold")
    member.event("holding")
    {"cut": b.host.nics["eth0"].cut, "killed": b.kill}[how]()
    with pytest.raises(Failed, match="TunnelBroken"):
        waiting.result()
    member.do("release")
    member.event("tunnel broken")


def test_a_survey_ends_without_the_host_that_is_lost_and_names_its_member(
    network: Network,
) -> None:
    a, _, c = network.hosts("abc")
    network.meshed()
    members = network.members(*network.relays.values())
    survey = members[0].begin("survey", cluster="echo", payload="hold", timeout=LONG_S)
    for member in members:
        member.event("holding")
    lost = next(
        member_id
        for member_id in members[0].do("wait_members", cluster="echo", count=3, timeout=LONG_S)
        if member_id.startswith(c.id)
    )
    c.kill()
    a.says("link.down")
    for member in members[:2]:
        member.do("release")
    answered = survey.result()
    assert answered["answers"] == ["a: hold", "b: hold"]
    assert answered["missing"] == [lost]


# -- a way that is slow, lossy or cut ------------------------------------------------------------------------------


class Way:
    """`a` and `b` on separate switches, with a proxy as the only path between them."""

    def __init__(self, network: Network, lan: Lan) -> None:
        self.lan = lan
        self.network = network
        left, middle, right = lan.host("a"), lan.host("middle"), lan.host("b")
        left.plug("left"), middle.plug("left"), middle.plug("right"), right.plug("right")
        self._target = (left.nics["eth0"].ipv4, 7430)
        self._middle = middle
        self._address = f"{middle.nics['eth1'].ipv4}:7000"
        self._left, self._right = left, right

    @contextmanager
    def open(self) -> Iterator[FaultProxy]:
        """Start the proxy and the relays, which are linked when the block begins."""

        def listen() -> socket.socket:
            return socket.create_server(("", 7000))

        def dial() -> tuple[socket.socket, tuple[str, int]]:
            return self._middle.inside(socket.socket), self._target

        with FaultProxy(self._middle.inside(listen), dial) as proxy:
            self.a = self.network.relay(self._left, "--no-mdns")
            self.b = self.network.relay(self._right, "--no-mdns", "--join", self._address)
            self.linked()
            yield proxy

    def linked(self) -> None:
        """Return when the two have a link."""
        self.network.meshed(self.a, self.b)


@pytest.fixture
def way(network: Network, lan: Lan) -> Way:
    return Way(network, lan)


def test_a_slow_and_lossy_way_costs_time_alone(way: Way) -> None:
    with way.open() as proxy:
        caller, member = way.a.program("caller"), way.b.member()
        caller.sees_members(1)
        member.do("subscribe", pattern="news.>")
        caller.reaches("news.ready", member)
        proxy.delay_s = 0.1
        wait_until(lambda: way.a.links()[way.b.id]["rtt_us"] >= 200_000, "the way's time is seen")
        proxy.loss = 0.1
        ended = caller.do("requests", cluster="echo", count=100, in_flight=20, timeout=LONG_S)
        assert ended == {"b": 100}
        caller.do("publish", topic="news.today", first=0, count=3000)
        assert member.received("publish", 3000) == [str(number) for number in range(3000)]
        assert caller.do("tunnel", cluster="echo", count=20, size=40_000, timeout=LONG_S) == 20
        with pytest.raises(Failed) as failed:
            caller.request("echo", "too late", timeout=0.05)
        assert failed.value.error == "RequestTimeout"
        # It reached the member after its deadline or not at all, so it never started.
        way.b.settled()
        assert "too late" not in member.received("request", 0)
        assert way.a.lines("link.down") == []


def test_a_way_that_goes_dead_is_given_up_and_linked_again_when_it_works(way: Way) -> None:
    with way.open() as proxy:
        caller, member = way.a.program("caller"), way.b.member()
        caller.sees_members(1)
        waiting = caller.begin("request", cluster="echo", payload="hold", timeout=LONG_S)
        member.event("holding")
        proxy.stall()
        with pytest.raises(Failed, match="ConnectionLost"):
            waiting.result()
        assert "silent" in way.a.says("link.down")["reason"]
        way.b.says("link.down")
        proxy.cut()
        proxy.flow()
        way.linked()
        member.do("release")
        assert caller.request("echo", "hello") == "b: hello"


def test_while_a_link_flaps_no_caller_gets_no_members(way: Way) -> None:
    with way.open() as proxy:
        caller = way.a.program("caller")
        way.b.member()
        caller.sees_members(1)
        for number in range(8):
            accepted = proxy.accepted
            assert proxy.cut() >= 1
            reply = caller.request("echo", str(number), idempotent=True)
            assert reply == f"b: {number}"
            way.linked()
            assert proxy.accepted > accepted
        caller.sees_members(1)
        assert way.a.settled()["accounts"]["dropped"] == {}


def test_through_flaps_nothing_is_received_twice_or_out_of_order_and_gaps_are_reported(
    way: Way,
) -> None:
    with way.open() as proxy:
        caller, listener = way.a.program("caller"), way.b.member()
        caller.sees_members(1)
        listener.do("subscribe", pattern="news.>")
        caller.reaches("news.ready", listener)
        sent = 0
        for _ in range(6):
            sending = caller.begin("publish", topic="news.today", first=sent, count=5000)
            casting = caller.begin(
                "broadcast", cluster="echo", payloads=[str(sent + n) for n in range(500)]
            )
            proxy.passes()
            proxy.cut()
            sending.result()
            casting.result()
            sent += 5000
            way.linked()
            listener.do("forget_probes")
            caller.reaches("news.ready", listener)
        caller.do("publish", topic="news.today", first=sent, count=1)
        caller.do("broadcast", cluster="echo", payloads=[str(sent)])
        for what, count in (("publish", sent + 1), ("broadcast", 3001)):
            listener.do("await_last", what=what, item=str(sent), timeout=PATIENCE_S * 0.8)
            numbers = [int(text) for text in listener.do("received", what=what)]
            assert numbers == sorted(set(numbers)), f"{what} repeated, or out of order"
            assert numbers[-1] == sent
            reported = [
                gap["count"] for gap in listener.do("received", what="gap") if gap["kind"] == what
            ]
            lost = count - len(numbers)
            # None stands for a loss of unknown size.
            assert sum(filter(None, reported)) == lost or (None in reported and lost), (
                what,
                reported,
                lost,
            )


def test_what_a_relay_routed_before_its_links_were_back_is_reported_to_those_behind_them(
    network: Network,
) -> None:
    a, b = network.hosts("ab")
    network.meshed()
    caller, listener = a.program("caller"), b.member()
    caller.sees_members(1)
    listener.do("subscribe", pattern="news")
    caller.do("publish", topic="news", first=0, count=1)
    caller.do("broadcast", cluster="echo", payloads=["0"])
    for what in ("publish", "broadcast"):
        assert listener.received(what, 1) == ["0"]
    assert a.stop() == 0
    nic = a.host.nics["eth0"]
    nic.cut()
    a.start()
    a.says("door.late")
    caller.do("publish", topic="news", first=1, count=3)
    caller.do("broadcast", cluster="echo", payloads=["1", "2", "3"])
    nic.heal()
    network.meshed()
    caller.sees_members(1)
    caller.do("publish", topic="news", first=4, count=1)
    caller.do("broadcast", cluster="echo", payloads=["4"])
    for what in ("publish", "broadcast"):
        assert listener.received(what, 2) == ["0", "4"]
    reported = {(gap["kind"], gap["count"], gap["cause"]) for gap in listener.received("gap", 2)}
    cause = "sent while a link on the way was down"
    assert reported == {("broadcast", None, cause), ("publish", None, cause)}
