"""Relays of a network on one LAN discover each other, on any interfaces, and no other relays."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hosts.kit import Failed, Network, Relay, wait_until
from support.namespaces import Host, Lan, ip
from zeroconf import DNSOutgoing, DNSPointer  # type: ignore[attr-defined]  # public, not in __all__

from relay.discovery.zeroconf import MOST_INTERFACES

pytestmark = [pytest.mark.timeout(120), pytest.mark.net]

FLAGS_RESPONSE, TYPE_PTR, CLASS_IN = 0x8400, 12, 1


def talk(*relays: Relay) -> None:
    """Check that a request passes between each two hosts, in both directions."""
    programs = relays[0].network.members(*relays)
    for one, other in itertools.permutations(programs, 2):
        cluster = f"only-{one.name}-{other.name}"
        other.do("serve", cluster=cluster)
        one.sees_members(1, cluster)
        assert one.request(cluster, "hello") == f"{other.name}: hello"


# -- multicast -----------------------------------------------------------------------------------------------------


def test_hosts_find_each_other_with_nothing_but_the_network_key(network: Network) -> None:
    relays = network.hosts("abcd")
    network.meshed()
    talk(*relays)
    for relay in relays:
        assert relay.settled()["links_refused"] == {}


@pytest.mark.parametrize(
    "plug",
    [{"ipv6": "off"}, {"ipv4": False}, {"ipv4": False, "ipv6": "link-local"}],
    ids=["IPv4 only", "IPv6 only", "link-local IPv6 only"],
)
def test_hosts_find_each_other_by_the_one_family_that_they_have(
    plug: dict[str, Any], network: Network
) -> None:
    network.hosts("ab", **plug)
    network.meshed()


def test_a_host_alone_serves_and_says_what_was_tried_and_what_to_type(network: Network) -> None:
    (relay,) = network.hosts("a")
    member = relay.member()
    assert member.request("echo", "hello") == "a: hello"
    said = relay.says("discovery.nothing_found")
    assert "eth0" in str(said["tried"])
    assert "--join" in said["try"]
    with pytest.raises(Failed) as failed:
        member.request("nobody", "hello")
    assert (failed.value.error, failed.value.may_have_run) == ("NoMembers", False)
    status = relay.status()
    assert status["links"] == []
    assert "eth0" in str(status["discovery"])


def test_a_late_host_is_found(lan: Lan, network: Network) -> None:
    network.hosts("ab")
    network.meshed()
    late = lan.host("late")
    late.plug()
    network.relay(late)
    network.meshed()


def test_an_interface_that_appears_later_is_used(lan: Lan, network: Network) -> None:
    network.hosts("a")
    bare = lan.host("bare")
    relay = network.relay(bare)
    assert relay.member(name="local").request("echo", "alone") == "local: alone"
    bare.plug()
    network.meshed()


def test_an_interface_that_is_replaced_is_used_in_its_place(network: Network) -> None:
    a, b = network.hosts("ab")
    network.meshed()
    b.host.nics["eth0"].unplug()
    a.linked_to()
    b.linked_to()
    b.host.plug()
    network.meshed()


def test_two_relays_of_one_host_find_each_other_and_those_of_other_hosts(
    lan: Lan, network: Network
) -> None:
    """The second relay uses another port, because the first has the usual one."""
    first, _ = network.hosts("ab")
    network.relay(first.host, name="second")
    network.meshed()


def test_interfaces_without_a_cable_do_not_hide_the_one_that_has_one(
    lan: Lan, network: Network
) -> None:
    a, b = lan.host("a"), lan.host("b")
    a.plug("unplugged").cut()
    a.plug("off").down()
    a.plug(), b.plug()
    network.relays_on(a, b)
    network.meshed()


def bridges(host: Host, count: int) -> list[str]:
    """Give a host bridges as Docker makes them: with an address and a container each, and named before eth0."""
    names = [f"br-{number:02}" for number in range(count)]
    for number, name in enumerate(names):
        lines = (
            f"link add {name} type bridge", f"link set {name} up",
            f"link add port-{number:02} type veth peer name {host.name}-{number:02} netns {host.lan.wires}",
            f"link set port-{number:02} master {name} up", f"address add 172.20.{number}.1/24 dev {name}",
        )  # fmt: skip
        ip("-n", host.namespace, batch="\n".join(lines) + "\n")
        ip("-n", host.lan.wires, "link", "set", f"{host.name}-{number:02}", "up")
    return names


@pytest.mark.parametrize("ipv6", ["full", "off"])
def test_bridges_of_containers_do_not_hide_the_interface_of_the_lan(
    lan: Lan, network: Network, ipv6: Any
) -> None:
    """Linux lets a socket join on 20 interfaces by IPv4, and an advert has 32 addresses: both are for the LAN first."""
    a, b = lan.host("a"), lan.host("b")
    made = bridges(a, 40)
    a.plug(ipv6=ipv6), b.plug(ipv6=ipv6)
    ip("-n", a.namespace, "route", "add", "default", "dev", "eth0")
    one, _ = network.relays_on(a, b)
    network.meshed()
    left_out = one.says("discovery.left_out")["interfaces"]
    found = one.status()["discovery"]["mdns"]
    assert found["left_out"] == left_out
    assert found["errors"] == {}
    assert found["announced"][0] == a.nics["eth0"].ipv4
    used = {each["name"] for each in found["interfaces"] if each["used"]}
    assert len(used) <= MOST_INTERFACES
    assert used == {"eth0", *made[: len(used) - 1]}
    assert set(made) - used <= set(left_out)


def test_a_host_that_moves_to_another_switch_finds_who_is_there(lan: Lan, network: Network) -> None:
    here, there, mover = lan.host("here"), lan.host("there"), lan.host("mover")
    here.plug("first"), there.plug("second"), mover.plug("first")
    one, other, moving = network.relays_on(here, there, mover)
    network.meshed(one, moving)
    other.linked_to()
    mover.nics["eth0"].cut()
    mover.plug("second")
    network.meshed(other, moving)
    one.linked_to()


def test_a_host_whose_address_changes_is_found_again(lan: Lan, network: Network) -> None:
    a, b = network.hosts("ab", ipv6="off")
    network.meshed()
    b.host.nics["eth0"].readdress("10.77.1.200")
    a.says("link.down")
    network.meshed()
    talk(a, b)


def test_hosts_of_two_switches_meet_only_where_they_have_a_way(lan: Lan, network: Network) -> None:
    """`b` is on both switches. Relays do not forward from link to link, so `a` and `c` do not reach each other."""
    a, b, c = (lan.host(name) for name in "abc")
    a.plug("left"), b.plug("left"), b.plug("right"), c.plug("right")
    left, middle, right = network.relays_on(a, b, c)
    left.linked_to(middle)
    middle.linked_to(left, right)
    right.linked_to(middle)
    middle.member()
    for relay in (left, right):
        caller = relay.program()
        caller.sees_members(1)
        assert caller.request("echo", "hello") == "b: hello"
    left.member("left")
    with pytest.raises(Failed, match="NoMembers"):
        right.program("far").request("left", "hello")


def test_two_networks_on_one_lan_never_meet(lan: Lan, make_network: Callable[..., Network]) -> None:
    """They do not even if they have the same cluster keys."""
    red, blue = make_network("red"), make_network("blue")
    blue.share_keyring(red)
    reds, blues = red.hosts("ab"), blue.hosts("cd")
    for network in (red, blue):
        network.meshed()
    callers = {network: network.members(*network.relays.values()) for network in (red, blue)}
    for network, names in ((red, {"a", "b"}), (blue, {"c", "d"})):
        for caller in callers[network]:
            answered = caller.do("survey", cluster="echo", payload="who", timeout=20.0)
            assert {answer[0] for answer in answered["answers"]} == names
    for relay in (*reds, *blues):
        status = relay.status()
        assert len(status["links"]) == 1
        assert status["links_refused"] == {}, "another network's relay was dialled"


GOODBYE_S = 1.2
"""A record that was said goodbye to is removed after a second."""


def says_goodbye(host: Host, relay: Relay) -> None:
    """Send a goodbye in the name of `relay` to the LAN, as any host there could."""
    name = "_iris-relay._tcp.local."
    message = DNSOutgoing(FLAGS_RESPONSE)
    message.add_answer_at_time(DNSPointer(name, TYPE_PTR, CLASS_IN, 0, f"{relay.id}.{name}"), 0.0)

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            ours = socket.inet_aton(host.nics["eth0"].ipv4)
            made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, ours)
            made.bind(("", 5353))
            for packet in message.packets():
                made.sendto(packet, ("224.0.0.251", 5353))

    host.inside(send)


def test_an_advert_that_vanishes_does_not_cut_a_live_link(lan: Lan, network: Network) -> None:
    a, b = network.hosts("ab", ipv6="off")
    network.meshed()
    stranger = lan.host("stranger")
    stranger.plug(ipv6="off")
    # b may have dialled first. A goodbye only counts for relays that a has discovered.
    received = lambda: any(line["relay"] == b.id for line in a.lines("discovery.sighted"))  # noqa: E731
    wait_until(received, "a has heard of b")

    def gone() -> bool:
        # An announcement of b within a second undoes a goodbye (RFC 6762, 10.1), and b still announces itself.
        says_goodbye(stranger, b)
        time.sleep(GOODBYE_S)
        return any(line["gone"] for line in a.lines("discovery.sighted"))

    wait_until(gone, "it is heard")
    a.linked_to(b)
    talk(a, b)
    assert a.lines("link.down") == b.lines("link.down") == []


# -- restarts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_relay_back_under_the_same_address_is_linked_again(end: str, network: Network) -> None:
    a, b, c = network.hosts("abc")
    network.meshed()
    before = b.id
    if end == "killed":
        b.kill()
    else:
        assert b.stop() == 0
    network.meshed(a, c)
    b.start()
    assert b.id != before
    network.meshed()


# -- without multicast ---------------------------------------------------------------------------------------------


def test_where_multicast_does_not_reach_one_address_is_enough_for_all(
    lan: Lan, network: Network
) -> None:
    """`b` and `c` only have the address of `a`, which introduces them to each other."""
    hosts = [lan.host(name) for name in "abc"]
    for host in hosts:
        host.plug(ipv6="off").deafen()
    network.relay(hosts[0])
    join = ("--join", f"{hosts[0].nics['eth0'].ipv4}:7430")
    network.relays_on(*hosts[1:], arguments=join)
    network.meshed()
    for relay in network.relays.values():
        assert "mdns" not in {line["source"] for line in relay.lines("discovery.sighted")}


def test_without_mdns_a_joined_relay_is_the_only_one_that_is_found(
    lan: Lan, network: Network
) -> None:
    a, b, c = (lan.host(name) for name in "abc")
    for host in (a, b, c):
        host.plug()
    first = network.relay(a, "--no-mdns")
    second = network.relay(b, "--no-mdns", "--join", "[fd77:1::1]:7430")
    third = network.relay(c, "--no-mdns")
    network.meshed(first, second)
    third.linked_to()


def test_a_relay_that_is_named_before_it_is_there_is_joined_when_it_comes(
    lan: Lan, network: Network
) -> None:
    a, b = lan.host("a"), lan.host("b")
    for host in (a, b):
        host.plug(ipv6="off")
    network.relay(b, "--no-mdns", "--join", "10.77.1.1:7430").says("link.not_reached")
    network.relay(a, "--no-mdns")
    network.meshed()


def test_all_addresses_of_a_name_are_joined_and_it_is_resolved_again(
    lan: Lan, network: Network
) -> None:
    """The name has an address for each relay, as that of a headless service of Kubernetes."""
    a, b, c = (lan.host(name) for name in "abc")
    for host in (a, b, c):
        host.plug()
    first, second = network.relays_on(a, b, arguments=["--no-mdns"])
    c.names({"relays.test": [a.nics["eth0"].ipv4]})
    third = network.relay(c, "--no-mdns", "--join", "dns:relays.test")
    third.linked_to(first)
    c.names({"relays.test": [a.nics["eth0"].ipv4, b.nics["eth0"].ipv6]})
    third.linked_to(first, second)


def test_a_relay_of_another_network_that_is_named_by_hand_is_refused_and_counted(
    lan: Lan, make_network: Callable[..., Network]
) -> None:
    red, blue = make_network("red"), make_network("blue")
    a, b = lan.host("a"), lan.host("b")
    a.plug(ipv6="off"), b.plug(ipv6="off")
    relay = red.relay(a, "--no-mdns")
    other = blue.relay(b, "--no-mdns", "--join", "10.77.1.1:7430")
    wait_until(lambda: sum(relay.status()["links_refused"].values()) >= 2, "it is refused twice")
    relay.says("link.refused")
    assert relay.status()["links"] == other.status()["links"] == []
    assert relay.member().request("echo", "hello") == "a: hello"
