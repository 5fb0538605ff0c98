"""What a LAN full of lies makes a relay keep: adverts without a network, given to the judge one by one."""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

import pytest
from zeroconf import ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo

from relay.discovery import sightings
from relay.discovery.adverts import MAX_ADDRESSES, SERVICE_TYPE, Advert, encode_txt, instance_name
from relay.discovery.interfaces import Address, Rank
from relay.discovery.zeroconf import MOST_INTERFACES, MulticastDiscovery

NETWORK = b"\xab" * 16
OURS = b"\x01" * 16
ETH = Address("eth0", 2, "10.0.0.5", 16)


def relay_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def advert(number: int, addresses: list[str], port: int = 7) -> AsyncServiceInfo:
    return AsyncServiceInfo(
        SERVICE_TYPE,
        instance_name(relay_id(number)),
        port=port,
        properties=encode_txt(Advert(relay_id(number), (NETWORK,))),
        parsed_addresses=addresses,
    )


def addresses(count: int, start: str = "10.0.1.0") -> list[str]:
    first = ipaddress.IPv4Address(start)
    return [str(first + number) for number in range(count)]


class Cache:
    """A LAN that has nothing more to say than a name."""

    def __init__(self) -> None:
        self.cache = self

    def entries_with_name(self, name: str) -> list[Any]:
        return []


@pytest.fixture
def discovery() -> MulticastDiscovery:
    made = MulticastDiscovery(OURS, (NETWORK,), 7)
    made._sightings.local = frozenset({ETH})
    return made


def goodbye(discovery: MulticastDiscovery, name: str) -> None:
    discovery._on_change(Cache(), SERVICE_TYPE, name, ServiceStateChange.Removed)  # type: ignore[arg-type]


def test_of_an_advert_with_a_thousand_addresses_a_few_are_kept(
    discovery: MulticastDiscovery,
) -> None:
    discovery._sightings._evaluate(advert(5, addresses(1000)))
    assert len(discovery._sightings.known) == 1
    assert len(discovery._sightings.known[relay_id(5)].addresses) <= 8
    assert sum(map(len, discovery._sightings._by_endpoints)) <= MAX_ADDRESSES
    # Its place is still known for the same: one that is back under a new id takes it over.
    discovery._sightings._evaluate(advert(6, addresses(1000)[::-1]))
    assert list(discovery._sightings.known) == [relay_id(6)]
    goodbye(discovery, instance_name(relay_id(6)))
    assert not discovery._sightings.known
    assert not discovery._sightings._by_endpoints
    assert not discovery._sightings._endpoints_of
    assert not discovery._sightings._replaced


def test_a_flood_of_adverts_and_of_those_that_replace_each_other_is_bounded(
    discovery: MulticastDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "MAX_ADVERTS", 50)
    for number in range(2, 300):
        discovery._sightings._evaluate(
            advert(number, addresses(1, f"10.0.1.{number % 200}"), port=number)
        )
    assert len(discovery._sightings.known) == 50
    assert discovery.status()["dropped"] == {"table_full": 248}
    for number in range(300, 600):  # each says that it listens where the one before it does
        discovery._sightings._evaluate(advert(number, addresses(1, "10.0.1.2"), port=2))
    assert (
        len(discovery._sightings.known)
        == len(discovery._sightings._by_endpoints)
        == len(discovery._sightings._endpoints_of)
    )
    assert len(discovery._sightings.known) <= 50
    assert len(discovery._sightings._replaced) <= 51


def test_two_that_say_they_replaced_each_other_end_in_one(discovery: MulticastDiscovery) -> None:
    for _ in range(50):
        for number in (5, 6):
            discovery._sightings._evaluate(advert(number, addresses(1)))
    assert list(discovery._sightings.known) == [relay_id(6)]
    assert discovery._sightings._replaced == {relay_id(5): relay_id(6)}
    assert discovery.status()["dropped"] == {"replaced": 49}
    # Whoever says goodbye for the one that stays brings back only who is heard again.
    goodbye(discovery, instance_name(relay_id(6)))
    discovery._sightings._evaluate(advert(5, addresses(1)))
    assert list(discovery._sightings.known) == [relay_id(5)]


def test_goodbyes_of_nobody_cost_a_look_up_each(discovery: MulticastDiscovery) -> None:
    discovery._sightings._evaluate(advert(5, addresses(1)))
    waiting = len(discovery._feed)
    for number in range(1000, 3000):
        goodbye(discovery, instance_name(relay_id(number)))
    goodbye(discovery, instance_name(OURS))  # nobody says it for us
    assert list(discovery._sightings.known) == [relay_id(5)]
    assert len(discovery._feed) == waiting
    assert not discovery._sightings._replaced


@pytest.mark.parametrize(
    "name",
    [
        "\\." * 16 + "." + SERVICE_TYPE,
        "\\032" + "a" * 31 + "." + SERVICE_TYPE,
        "\x1b[2J" + "a" * 28 + "." + SERVICE_TYPE,
        "a" * 32 + "\0." + SERVICE_TYPE,
        "a" * 32 + "\n." + SERVICE_TYPE,
        "a" * 32 + "." + SERVICE_TYPE + "\n",
        "a" * 32 + "\u0131." + SERVICE_TYPE,
        "\uff41" * 32 + "." + SERVICE_TYPE,
        "",
        SERVICE_TYPE,
        "a" * 100_000,
    ],
)
@pytest.mark.parametrize("state", list(ServiceStateChange))
def test_a_name_that_is_not_of_a_relay_is_counted_and_nothing_else(
    discovery: MulticastDiscovery, name: str, state: ServiceStateChange
) -> None:
    discovery._on_change(Cache(), SERVICE_TYPE, name, state)  # type: ignore[arg-type]
    assert discovery.status()["dropped"] == {"bad_name": 1}
    assert not discovery._sightings._follow_ups


@pytest.mark.parametrize(
    ("rank", "level"), [(Rank.INNER, logging.INFO), (Rank.PHYSICAL, logging.WARNING)]
)
def test_what_is_left_out_is_named_once_and_again_when_it_changes(
    discovery: MulticastDiscovery, rank: Rank, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lan = Address("wlan0", 2, "10.0.0.5", 16, rank=Rank.DEFAULT_ROUTE)
    others = [Address(f"a{n:02}", 3 + n, f"172.20.{n}.1", 24, rank=rank) for n in range(30)]
    names = [address.interface for address in others]
    for _ in range(2):
        shown = discovery._choose(frozenset({lan, *others}))
    assert shown == ("10.0.0.5", *(f"172.20.{n}.1" for n in range(MOST_INTERFACES - 1)))
    assert discovery._sightings.local == {lan, *others[: MOST_INTERFACES - 1]}
    discovery._choose(frozenset({lan}))
    left_out = [(line.levelno, line.fields["interfaces"]) for line in caplog.records]  # type: ignore[attr-defined]
    assert left_out == [(level, names[MOST_INTERFACES - 1 :])]
    assert discovery.status()["left_out"] == []
