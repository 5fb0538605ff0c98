"""Where relays may be: what adverts and `--join` say, and when a change counts."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.errors import ConfigError
from iris.wire.kinds import PROTOCOL_VERSION
from relay.discovery import DEFAULT_PORT, Sighting
from relay.discovery.adverts import (
    MAX_ADDRESSES,
    MAX_DIALLED,
    MAX_NETWORKS,
    MAX_SITE_BYTES,
    Advert,
    BadAdvert,
    announced,
    best_first,
    decode_txt,
    encode_txt,
    instance_name,
    relay_id_in,
)
from relay.discovery.feed import Feed
from relay.discovery.interfaces import (
    Address,
    Damper,
    Rank,
    default_routes,
    preferred,
    rank_of,
    scan,
)
from relay.discovery.seeds import (
    MAX_ADDRESSES as MAX_SEED_ADDRESSES,
)
from relay.discovery.seeds import (
    MAX_JOINS,
    RETRY_MAX_S,
    Join,
    Seed,
    SeedDiscovery,
    parse_join,
    resolve,
)

RELAY = bytes(range(16))
NETWORK = b"\xab" * 16
WAIT_S = 10.0

LO = Address("lo", 1, "127.0.0.1", 8)
ETH = Address("eth0", 2, "10.0.0.5", 24)
ETH6 = Address("eth0", 2, "fe80::5", 64)
WIFI = Address("wlan0", 3, "192.168.1.5", 24)
DOCKER = Address("docker0", 4, "172.17.0.1", 16)
DEAD = Address("eth9", 9, "10.9.0.5", 24, up=False)


def txt(*entries: bytes) -> bytes:
    return b"".join(bytes((len(entry),)) + entry for entry in entries)


GOOD = (b"v=%d" % PROTOCOL_VERSION, b"id=" + RELAY.hex().encode(), b"net0=" + b"ab" * 16)


# Adverts


@given(
    st.binary(min_size=16, max_size=16),
    st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=MAX_NETWORKS, unique=True),
    st.text("abcxyz-é", max_size=MAX_SITE_BYTES // 2),
)
def test_an_advert_says_what_was_put_into_it(
    relay_id: bytes, networks: list[bytes], site: str
) -> None:
    advert = Advert(relay_id, tuple(networks), site)
    assert decode_txt(encode_txt(advert)) == advert


def test_networks_fill_entries_of_at_most_255_bytes() -> None:
    networks = tuple(bytes((number,)) * 16 for number in range(8))
    text = encode_txt(Advert(RELAY, networks))
    entries = []
    at = 0
    while at < len(text):
        entries.append(text[at + 1 : at + 1 + text[at]])
        at += 1 + text[at]
    assert [entry.partition(b"=")[0] for entry in entries] == [b"v", b"id", b"net0", b"net1"]
    assert entries[2].count(b",") == 6
    assert entries[3] == b"net1=" + networks[7].hex().encode()


@pytest.mark.parametrize(
    "advert",
    [
        Advert(RELAY, ()),
        Advert(RELAY, (NETWORK,) * (MAX_NETWORKS + 1)),
        Advert(RELAY, (b"short",)),
        Advert(RELAY, (NETWORK,), "s" * (MAX_SITE_BYTES + 1)),
    ],
)
def test_what_does_not_fit_an_advert_is_refused(advert: Advert) -> None:
    with pytest.raises(ValueError, match=r"network|site"):
        encode_txt(advert)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "bad_version"),
        (b"\xffv=1", "cut_txt"),
        (b"\0" * 4097, "long_txt"),
        (txt(b"v=one", *GOOD[1:]), "bad_version"),
        (txt(b"v=" + b"9" * 10, *GOOD[1:]), "bad_version"),
        (txt(b"v=999", *GOOD[1:]), "other_version"),
        (txt(GOOD[0], GOOD[2]), "bad_id"),
        (txt(GOOD[0], b"id=abcd", GOOD[2]), "bad_id"),
        (txt(GOOD[0], b"id=" + b" " * 32, GOOD[2]), "bad_id"),
        (txt(*GOOD[:2]), "no_network"),
        (txt(*GOOD[:2], b"net1=" + b"ab" * 16), "no_network"),
        (txt(*GOOD[:2], b"net0=" + b"ab" * 16 + b","), "bad_network"),
        (txt(*GOOD[:2], b"net0=" + b"g" * 32), "bad_network"),
        (txt(*GOOD, b"site=\xff"), "bad_site"),
        (txt(*GOOD, b"site=a\nb"), "bad_site"),
        (txt(*GOOD, b"site=" + b"s" * (MAX_SITE_BYTES + 1)), "bad_site"),
    ],
)
def test_a_malformed_advert_is_refused_with_its_reason(text: bytes, reason: str) -> None:
    with pytest.raises(BadAdvert) as refused:
        decode_txt(text)
    assert refused.value.reason == reason


def test_more_networks_than_an_advert_may_name_are_refused() -> None:
    entries = [
        b"net%d=" % entry + b",".join(bytes((entry, n)).hex().encode() * 8 for n in range(7))
        for entry in range(5)
    ]
    with pytest.raises(BadAdvert, match="many_networks"):
        decode_txt(txt(*GOOD[:2], *entries))


def test_unknown_keys_are_ignored_and_the_first_of_a_repeated_key_counts() -> None:
    text = txt(b"", b"new=1", *GOOD, b"ID=" + b"00" * 16, b"flag")
    assert decode_txt(text) == Advert(RELAY, (NETWORK,))


@given(st.binary(max_size=300))
def test_any_bytes_are_an_advert_or_refused(text: bytes) -> None:
    try:
        advert = decode_txt(text)
    except BadAdvert:
        return
    assert decode_txt(encode_txt(advert)) == advert


def test_an_instance_name_is_the_relay_id_and_nothing_else_is_one() -> None:
    assert relay_id_in(instance_name(RELAY)) == RELAY
    assert relay_id_in(instance_name(RELAY).upper()) == RELAY
    for name in ("printer._iris-relay._tcp.local.", "x" + instance_name(RELAY), "", "\n"):
        with pytest.raises(BadAdvert):
            relay_id_in(name)


# Addresses


def test_all_live_addresses_are_announced_and_loopback_only_without_others() -> None:
    assert announced({LO, ETH, ETH6, WIFI, DEAD}) == ("10.0.0.5", "192.168.1.5", "fe80::5")
    assert announced({LO, DEAD}) == ("127.0.0.1",)
    assert announced({DEAD}) == ()


def test_a_host_with_many_addresses_announces_its_routable_ones() -> None:
    links = {Address(f"veth{n}", n, f"fe80::{n:x}", 64) for n in range(1, 200)}
    shown = announced(links | {ETH})
    assert len(shown) == MAX_ADDRESSES
    assert shown[0] == ETH.ip


def test_a_host_with_many_bridges_announces_the_address_of_its_lan() -> None:
    bridges = {Address(f"br-{n:02}", n, f"172.17.{n}.1", 24, rank=Rank.INNER) for n in range(9, 99)}
    for rank in (Rank.DEFAULT_ROUTE, Rank.PHYSICAL, Rank.VIRTUAL):
        lan = Address("wlan0", 3, "192.168.1.5", 24, rank=rank)
        shown = announced(bridges | {lan})
        assert (len(shown), shown[0]) == (MAX_ADDRESSES, lan.ip)
    local_only = Address("wlan0", 3, "fe80::5", 64, rank=Rank.PHYSICAL)
    assert announced(bridges | {local_only})[-1] == "fe80::5"


ROUTES = """Iface	Destination	Gateway	Flags	RefCnt	Use	Metric	Mask	MTU	Window	IRTT
wlan0	00000000	0101A8C0	0003	0	0	600	00000000	0	0	0
down0	00000000	0101A8C0	0002	0	0	600	00000000	0	0	0
tun0	00000000	00000000	0001	0	0	0	00000080	0	0	0
docker0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
"""
ROUTES6 = """
fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fd000000000000000000000000000001 00000400 00000003 00000000 00000003     eth1
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
"""


def test_the_interfaces_of_default_routes_are_known(tmp_path: Path) -> None:
    assert default_routes(tmp_path) == set()
    (tmp_path / "route").write_text(ROUTES)
    assert default_routes(tmp_path) == {"wlan0"}
    (tmp_path / "ipv6_route").write_text(ROUTES6.lstrip())
    assert default_routes(tmp_path) == {"wlan0", "eth1"}


@pytest.mark.parametrize(
    ("type", "uevent", "rank"),
    [
        ("1", "INTERFACE=veth1a\n", Rank.INNER),
        ("1", "INTERFACE=tap0\n", Rank.INNER),
        ("1", "DEVTYPE=bridge\nINTERFACE=br-1\n", Rank.INNER),
        ("1", "DEVTYPE=vxlan\nINTERFACE=flannel.1\n", Rank.INNER),
        ("65534", "INTERFACE=tun0\n", Rank.INNER),
        ("65534", "DEVTYPE=wireguard\nINTERFACE=wg0\n", Rank.INNER),
        ("1", "DEVTYPE=bond\nINTERFACE=bond0\n", Rank.VIRTUAL),
        ("1", "DEVTYPE=vlan\nINTERFACE=eth0.7\n", Rank.VIRTUAL),
        ("x", "", Rank.VIRTUAL),
    ],
)
def test_an_interface_of_this_hosts_own_making_is_used_last(
    type: str, uevent: str, rank: Rank, tmp_path: Path
) -> None:
    place = tmp_path / "any0"
    assert rank_of("any0", tmp_path) is Rank.VIRTUAL
    place.mkdir()
    (place / "type").write_text(f"{type}\n")
    (place / "uevent").write_text(uevent)
    assert rank_of("any0", tmp_path) is rank
    (place / "device").mkdir()
    assert rank_of("any0", tmp_path) is Rank.PHYSICAL


def test_addresses_are_used_in_the_order_of_what_they_lead_to() -> None:
    a, b, c, d = (Address(name, 1, "10.0.0.1", 8, rank=rank) for name, rank in zip("dcba", Rank, strict=True))  # fmt: skip
    e = Address("a", 1, "fe80::1", 64, rank=Rank.INNER)
    assert preferred({e, d, c, b, a}) == [a, b, c, d, e]


def test_the_nearest_address_is_dialled_first() -> None:
    ours = frozenset({LO, ETH, ETH6, DOCKER, DEAD})
    advertised = ["172.17.0.1", "fe80::9%2", "10.0.0.9", "172.17.0.3"]
    assert best_first(advertised, 7, ours) == (
        ("10.0.0.9", 7),
        ("172.17.0.3", 7),
        ("fe80::9%eth0", 7),
        ("172.17.0.1", 7),
    )


@pytest.mark.parametrize("ip", ["203.0.113.9", "10.9.0.7", "10.0.1.9", "127.0.0.1", "169.254.1.2", "2001:db8:1::9"])  # fmt: skip
def test_addresses_outside_our_subnets_are_not_dialled_because_of_an_advert(ip: str) -> None:
    """Adverts stay on a link. 10.9.0.7 would be on one if its interface were up; loopback is only for this host."""
    ours = frozenset({ETH, ETH6, WIFI, DEAD, Address("eth0", 2, "2001:db8::5", 64)})
    assert best_first([ip], 7, ours) == ()
    assert best_first([ip, "192.168.1.9"], 7, ours) == (("192.168.1.9", 7),)


def test_relays_without_a_router_or_an_interface_meet_all_the_same() -> None:
    link_local = Address("eth0", 2, "169.254.7.1", 16)
    assert best_first(["169.254.1.2"], 7, frozenset({link_local})) == (("169.254.1.2", 7),)
    assert best_first(["127.0.0.1"], 7, frozenset({LO})) == (("127.0.0.1", 7),)


def test_only_the_best_addresses_of_an_advert_are_dialled() -> None:
    advertised = ["10.0.0.5", *(f"10.0.0.{n}" for n in range(40, 60))]
    found = best_first(advertised, 7, frozenset({ETH}))
    assert len(found) == MAX_DIALLED
    assert ("10.0.0.5", 7) not in found


def test_what_cannot_be_dialled_is_left_out() -> None:
    advertised = ["fe80::9", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "::ffff:10.0.0.9"]
    assert best_first(advertised, 7, frozenset({ETH, ETH6})) == ()


def test_a_scope_that_we_have_no_name_for_stays_a_number() -> None:
    assert best_first(["fe80::9%44"], 7, frozenset({ETH})) == (("fe80::9%44", 7),)


def test_an_advert_of_very_many_addresses_is_cut() -> None:
    advertised = [*(f"10.1.{n}.1" for n in range(MAX_ADDRESSES)), "10.0.0.9"]
    assert best_first(advertised, 7, frozenset({ETH})) == ()
    assert best_first(advertised[1:], 7, frozenset({ETH})) == (("10.0.0.9", 7),)


# Interfaces


def test_this_host_has_its_loopback_address() -> None:
    assert "127.0.0.1" in {address.ip for address in scan() if address.up and address.multicast}


def test_the_first_look_counts_at_once() -> None:
    damper = Damper()
    assert damper.look(frozenset({LO}))
    assert damper.settled == {LO}
    assert not damper.unsettled


def test_a_change_counts_when_it_was_seen_twice_running() -> None:
    damper = Damper()
    damper.look(frozenset({LO, WIFI}))
    assert not damper.look(frozenset({LO, ETH}))
    assert damper.unsettled
    assert damper.settled == {LO, WIFI}
    assert damper.look(frozenset({LO, ETH}))
    assert damper.settled == {LO, ETH}
    assert not damper.unsettled


def test_a_change_that_is_taken_back_never_counts() -> None:
    damper = Damper()
    damper.look(frozenset({LO}))
    for _ in range(5):
        assert not damper.look(frozenset({LO, ETH}))
        assert not damper.look(frozenset({LO}))
    assert damper.settled == {LO}


def test_an_interface_that_flaps_does_not_hide_that_another_one_came() -> None:
    damper = Damper()
    damper.look(frozenset({LO}))
    damper.look(frozenset({LO, WIFI, ETH}))
    assert damper.look(frozenset({LO, ETH}))
    assert damper.settled == {LO, ETH}


# Entries of --join


@pytest.mark.parametrize(
    ("text", "join"),
    [
        ("10.0.0.7:7431", ("join", "10.0.0.7", 7431, True)),
        ("10.0.0.7", ("join", "10.0.0.7", DEFAULT_PORT, True)),
        ("[fd00::7]:7431", ("join", "fd00::7", 7431, True)),
        ("[fe80::7%eth0]", ("join", "fe80::7%eth0", DEFAULT_PORT, True)),
        ("relay.example:1", ("join", "relay.example", 1, False)),
        ("my_host.", ("join", "my_host.", DEFAULT_PORT, False)),
        ("dns:relays.example", ("dns", "relays.example", DEFAULT_PORT, False)),
        ("dns:relays:65535", ("dns", "relays", 65_535, False)),
    ],
)
def test_an_entry_says_host_and_port(text: str, join: tuple[object, ...]) -> None:
    parsed = parse_join(text)
    assert (parsed.kind, parsed.host, parsed.port, parsed.numeric) == join
    assert parsed.text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7430",
        "host:",
        "host:0",
        "host:65536",
        "host:+1",
        "host:1:2",
        "fd00::7",
        "[fd00::7",
        "[fd00::7]7430",
        "[10.0.0.7]:7430",
        "[fe80::1%]:7430",
        "10.0.0.300:7430",
        "-host:1",
        "a b:1",
        "a..b:1",
        "x" * 64,
        "http://host:1",
        "dns:",
        "dns:10.0.0.7",
        "dns:[fd00::7]:1",
        "dns:host:port",
        "höst:1",
    ],
)
def test_a_malformed_entry_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_join(text)
    assert repr(text) in str(refused.value)


@given(st.text(max_size=40))
def test_any_text_is_an_entry_or_refused(text: str) -> None:
    try:
        join = parse_join(text)
    except ConfigError:
        return
    assert 1 <= join.port <= 65_535
    assert join.host


def seed(text: str) -> Seed:
    return Seed(parse_join(text), random.Random(7), 0.0)


def at(*ips: str, port: int = DEFAULT_PORT) -> tuple[tuple[str, int], ...]:
    return tuple((ip, port) for ip in ips)


def test_a_host_is_one_relay_with_all_its_addresses() -> None:
    host = seed("relay.example:9")
    source = "join relay.example:9"
    assert host.answered(["10.0.0.1", "fd00::1", "10.0.0.1"], 0.0) == [
        Sighting(at("10.0.0.1", "fd00::1", port=9), source=source)
    ]
    assert host.answered(["fd00::1", "10.0.0.1"], 10.0) == []
    assert host.answered(["10.0.0.2", "fd00::1"], 20.0) == [
        Sighting(at("10.0.0.2", "fd00::1", port=9), source=source),
        Sighting(at("10.0.0.1", port=9), source=source, gone=True),
    ]


def test_a_dns_name_is_one_relay_for_each_address() -> None:
    name = seed("dns:relays")
    source = f"dns:relays:{DEFAULT_PORT}"
    assert name.answered(["10.0.0.1", "10.0.0.2"], 0.0) == [
        Sighting(at("10.0.0.1"), source=source),
        Sighting(at("10.0.0.2"), source=source),
    ]
    assert name.answered(["10.0.0.3", "10.0.0.2"], 10.0) == [
        Sighting(at("10.0.0.3"), source=source),
        Sighting(at("10.0.0.1"), source=source, gone=True),
    ]


def test_a_name_is_looked_up_again_about_every_interval() -> None:
    name = seed("dns:relays")
    delays = []
    for now_s in range(0, 1000, 100):
        name.answered(["10.0.0.1"], float(now_s), interval_s=10.0)
        assert name.due_s is not None
        delays.append(name.due_s - now_s)
    assert all(8.0 <= delay <= 12.0 for delay in delays)
    assert len(set(delays)) > 5


def test_a_numeric_address_is_never_looked_up_again() -> None:
    host = seed("10.0.0.7")
    assert host.answered(["10.0.0.7"], 0.0) == [
        Sighting(at("10.0.0.7"), source=f"join 10.0.0.7:{DEFAULT_PORT}")
    ]
    assert host.due_s is None


def test_a_failed_lookup_changes_nothing_and_is_repeated_ever_more_rarely() -> None:
    name = seed("dns:relays")
    name.answered(["10.0.0.1"], 0.0)
    delays = []
    for _ in range(8):
        name.failed("no such name", 0.0)
        assert name.due_s is not None
        delays.append(name.due_s)
    assert 0.5 <= delays[0] <= 1.0
    assert delays[4] >= 8 * delays[0]
    assert max(delays) <= RETRY_MAX_S
    assert name.addresses == ("10.0.0.1",)
    assert name.answered(["10.0.0.1"], 0.0) == []
    assert (name.failures, name.error) == (0, None)


def test_a_failure_is_news_when_it_is_the_first_or_another_one() -> None:
    name = seed("dns:relays")
    assert [name.failed(error, 0.0) for error in ("a", "a", "b", "a")] == [True, False, True, True]
    name.answered(["10.0.0.1"], 0.0)
    assert name.failed("a", 0.0)


def test_a_name_with_too_many_addresses_keeps_those_it_has() -> None:
    name = seed("dns:relays")
    addresses = [f"10.1.{n // 250}.{n % 250}" for n in range(MAX_SEED_ADDRESSES + 50)]
    assert len(name.answered(addresses, 0.0)) == MAX_SEED_ADDRESSES
    assert name.left_out == 50
    assert name.answered(addresses[::-1], 10.0) == []


class Names:
    """A resolver whose answers the test gives."""

    def __init__(self, answers: dict[str, Sequence[str] | OSError]) -> None:
        self.answers = answers
        self._asked: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    async def asked_for(self, name: str, times: int) -> None:
        """Return when `name` was looked up so often, and the loop has taken the answer."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self._asked[name] >= times)
        await asyncio.sleep(0)

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        async with self._changed:
            self._asked[name] += 1
            self._changed.notify_all()
        answer = self.answers[name]
        if isinstance(answer, OSError):
            raise answer
        return answer


async def take(sightings: AsyncIterator[Sighting], count: int) -> list[Sighting]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(sightings) for _ in range(count)]


async def test_every_entry_is_sighted_and_a_name_that_fails_holds_up_no_other() -> None:
    names = Names({"bad": OSError(-2, "Name or service not known"), "many": ["10.0.0.1"]})
    discovery = SeedDiscovery(["bad:1", "dns:many", "10.9.9.9:2"], resolver=names)
    try:
        seen = await take(discovery.sightings(), 2)
        assert {each.addresses for each in seen} == {at("10.0.0.1"), at("10.9.9.9", port=2)}
        await names.asked_for("bad", 1)
        assert discovery.status()["tried"] == [
            "join bad:1 (Name or service not known)",
            f"dns:many:{DEFAULT_PORT}",
            "join 10.9.9.9:2",
        ]
    finally:
        await discovery.close()


async def test_a_name_that_resolves_later_is_sighted_then_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "relay.discovery.seeds")
    names = Names({"late": []})
    discovery = SeedDiscovery(["late:1"], resolver=names, interval_s=0.001)
    try:
        sightings = discovery.sightings()
        reading = asyncio.ensure_future(take(sightings, 1))
        await names.asked_for("late", 2)
        names.answers["late"] = ["10.0.0.1"]
        assert (await reading)[0].addresses == at("10.0.0.1", port=1)
        names.answers["late"] = ["10.0.0.2"]
        changed = await take(sightings, 2)
        assert [(each.addresses, each.gone) for each in changed] == [
            (at("10.0.0.2", port=1), False),
            (at("10.0.0.1", port=1), True),
        ]
    finally:
        await discovery.close()
    assert [record.message for record in caplog.records] == [
        "discovery.unresolved",
        "discovery.resolved",
    ]


async def test_a_fault_of_the_resolver_reaches_the_reader() -> None:
    discovery = SeedDiscovery(["x:1"], resolver=Names({}))
    try:
        with pytest.raises(KeyError):
            await take(discovery.sightings(), 1)
    finally:
        await discovery.close()


def test_malformed_and_too_many_entries_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a b'"):
        SeedDiscovery(["a b"])
    with pytest.raises(ConfigError, match="256"):
        SeedDiscovery([f"h{n}:1" for n in range(MAX_JOINS + 1)])


async def test_an_entry_given_twice_is_looked_up_once() -> None:
    discovery = SeedDiscovery(["10.0.0.1:1", "10.0.0.1:1"])
    assert discovery.status()["tried"] == ["join 10.0.0.1:1"]
    await discovery.close()


async def test_the_system_resolves_names() -> None:
    async with asyncio.timeout(WAIT_S):
        assert set(await resolve("localhost", 1)) & {"127.0.0.1", "::1"}


async def test_a_name_that_nobody_knows_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="not known"):
        async with asyncio.timeout(WAIT_S):
            await resolve("relay.invalid", 1)


async def test_a_scoped_answer_keeps_its_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    index = socket.if_nametoindex("lo")
    answer = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::7", 1, 0, index))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    async with asyncio.timeout(WAIT_S):
        assert await resolve("x", 1) == ["fe80::7%lo"]


def test_sources_are_unambiguous() -> None:
    assert Join("", "join", "fd00::1", 5, True).source == "join [fd00::1]:5"
    assert Join("", "dns", "relays", 5).source == "dns:relays:5"


# The feed


def sighting(number: int, *, gone: bool = False) -> Sighting:
    return Sighting(at(f"10.0.0.{number}"), gone=gone)


async def test_a_newer_sighting_replaces_the_waiting_one_of_its_key() -> None:
    feed = Feed()
    feed.put("a", sighting(1))
    feed.put("b", sighting(2))
    feed.put("a", sighting(1, gone=True))
    assert await take(feed.read(), 2) == [sighting(2), sighting(1, gone=True)]


async def test_a_full_feed_refuses_new_keys_and_takes_news_of_known_ones() -> None:
    feed = Feed(limit=2)
    assert [feed.put(key, sighting(key)) for key in (1, 2, 3)] == [True, True, False]
    assert feed.put(1, sighting(1, gone=True))
    assert len(feed) == 2


async def test_a_cancelled_reader_loses_nothing() -> None:
    feed = Feed()
    waiting = asyncio.ensure_future(take(feed.read(), 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    feed.put(1, sighting(1))
    assert await take(feed.read(), 1) == [sighting(1)]


async def test_a_feed_has_one_reader() -> None:
    feed = Feed()
    feed.put(1, sighting(1))
    async with aclosing(feed.read()) as first:
        await take(first, 1)
        with pytest.raises(RuntimeError, match="reader"):
            await take(feed.read(), 1)


async def test_an_ended_feed_ends_its_reader_with_the_error() -> None:
    feed = Feed()
    feed.put(1, sighting(1))
    feed.end()
    feed.end(OSError("late"))
    assert not feed.put(1, sighting(1))
    assert [each async for each in feed.read()] == []
    broken = Feed()
    broken.end(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        await anext(broken.read())
