"""Relays on one LAN find each other: real multicast, on the loopback interface alone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from zeroconf import DNSOutgoing, DNSPointer
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from relay.discovery import Sighting, sightings
from relay.discovery.adverts import SERVICE_TYPE, Advert, encode_txt, instance_name
from relay.discovery.interfaces import Address
from relay.discovery.sightings import MAX_FOLLOW_UPS
from relay.discovery.zeroconf import MulticastDiscovery

pytestmark = pytest.mark.timeout(60)

WAIT_S = 20.0
HERE = "127.0.0.1"
LO = Address("lo", 1, HERE, 8)
ANSWER = 0x8400


class Relay:
    """One relay's discovery, with all that it saw."""

    def __init__(self, discovery: MulticastDiscovery, relay_id: bytes, port: int) -> None:
        self.discovery = discovery
        self.relay_id = relay_id
        self.address = (HERE, port)
        self.seen: list[Sighting] = []
        self._changed = asyncio.Event()

    async def read(self) -> None:
        async for sighting in self.discovery.sightings():
            self.seen.append(sighting)
            self._changed.set()

    async def sees(self, condition: Callable[[list[Sighting]], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self.seen):
                self._changed.clear()
                await self._changed.wait()

    async def sees_relay(self, relay_id: bytes, *, gone: bool = False) -> Sighting:
        await self.sees(lambda seen: [s for s in seen if (s.relay_id, s.gone) == (relay_id, gone)])
        return next(s for s in self.seen if (s.relay_id, s.gone) == (relay_id, gone))

    async def counts(self, reason: str, at_least: int = 1) -> None:
        """Return when so many adverts were dropped for `reason`."""
        async with asyncio.timeout(WAIT_S):
            while self.dropped(reason) < at_least:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.02)

    def dropped(self, reason: str) -> int:
        dropped = self.discovery.status()["dropped"]
        assert isinstance(dropped, dict)
        return int(dropped.get(reason, 0))


class Lan:
    """What runs on the loopback interface during one test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._ports = iter(range(7001, 7100))

    def relay(
        self, *networks: bytes, look: Callable[[], frozenset[Address]] | None = None, **settings: float
    ) -> Relay:  # fmt: skip
        relay_id, port = os.urandom(16), next(self._ports)
        only = {"interfaces": [HERE]} if look is None else {"look": look}
        discovery = MulticastDiscovery(relay_id, networks, port, **only, **settings)  # type: ignore[arg-type]
        relay = Relay(discovery, relay_id, port)
        task = asyncio.create_task(relay.read())

        async def stop() -> None:
            await discovery.close()
            await task

        self._stack.push_async_callback(stop)
        return relay

    async def stranger(self) -> AsyncZeroconf:
        """Return a responder that announces whatever it is told to."""
        stranger = AsyncZeroconf(interfaces=[HERE])
        self._stack.push_async_callback(stranger.async_close)
        return stranger


@pytest.fixture
async def lan() -> AsyncIterator[Lan]:
    async with AsyncExitStack() as stack:
        yield Lan(stack)


@asynccontextmanager
async def announced(
    stranger: AsyncZeroconf,
    relay_id: bytes,
    text: bytes,
    *,
    name: str | None = None,
    port: int = 7999,
    addresses: tuple[str, ...] = (HERE,),
) -> AsyncIterator[None]:
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        name or instance_name(relay_id),
        port=port,
        properties=text,
        server=f"{relay_id.hex()}.local.",
        parsed_addresses=list(addresses),
    )
    await (await stranger.async_register_service(info, cooperating_responders=True, strict=False))
    yield
    await (await stranger.async_unregister_service(info))


async def test_two_relays_of_a_network_see_each_other_and_neither_itself(lan: Lan) -> None:
    network = os.urandom(16)
    first = lan.relay(network)
    second = lan.relay(os.urandom(16), network)
    seen = await first.sees_relay(second.relay_id)
    assert seen.addresses == (second.address,)
    assert seen.source == "mdns"
    assert network in seen.networks
    assert len(seen.networks) == 2
    assert (await second.sees_relay(first.relay_id)).addresses == (first.address,)
    for relay in (first, second):
        assert relay.relay_id not in {s.relay_id for s in relay.seen}


async def test_relays_of_different_networks_never_meet(lan: Lan) -> None:
    ours, theirs = os.urandom(16), os.urandom(16)
    first, other, friend = lan.relay(ours), lan.relay(theirs), lan.relay(ours)
    await first.counts("other_network")
    await other.counts("other_network")
    await first.sees_relay(friend.relay_id)
    assert {s.relay_id for s in first.seen} == {friend.relay_id}
    assert other.seen == []


async def test_a_relay_that_closes_says_goodbye(lan: Lan) -> None:
    network = os.urandom(16)
    first, second = lan.relay(network), lan.relay(network)
    await first.sees_relay(second.relay_id)
    await second.discovery.close()
    gone = await first.sees_relay(second.relay_id, gone=True)
    assert gone.addresses == (second.address,)


async def test_a_relay_that_is_back_under_its_address_replaces_the_one_that_crashed(
    lan: Lan,
) -> None:
    network = os.urandom(16)
    relay, stranger = lan.relay(network), await lan.stranger()
    crashed, back = os.urandom(16), os.urandom(16)
    async with announced(stranger, crashed, encode_txt(Advert(crashed, (network,)))):
        await relay.sees_relay(crashed)
        async with announced(stranger, back, encode_txt(Advert(back, (network,)))):
            await relay.sees_relay(crashed, gone=True)
            await relay.sees_relay(back)
        await relay.sees_relay(back, gone=True)
    assert [(s.relay_id, s.gone) for s in relay.seen[:3]] == [
        (crashed, False),
        (crashed, True),
        (back, False),
    ]


async def test_a_network_that_is_added_brings_its_relays(lan: Lan) -> None:
    old, new = os.urandom(16), os.urandom(16)
    relay, other = lan.relay(old), lan.relay(new)
    await relay.counts("other_network")
    relay.discovery.set_networks((old, new))
    await relay.sees_relay(other.relay_id)
    assert set((await other.sees_relay(relay.relay_id)).networks) == {old, new}


async def test_malformed_adverts_are_dropped_and_counted(lan: Lan) -> None:
    network = os.urandom(16)
    relay, stranger = lan.relay(network), await lan.stranger()
    relay_id = os.urandom(16)
    good = encode_txt(Advert(relay_id, (network,)))
    other_id = encode_txt(Advert(os.urandom(16), (network,)))
    async with AsyncExitStack() as stack:

        async def announce(text: bytes, **how: object) -> None:
            shown = announced(stranger, os.urandom(16), text, **how)  # type: ignore[arg-type]
            await stack.enter_async_context(shown)

        await announce(b"")
        await announce(good[:-1])
        await announce(other_id)
        await announce(good, name=f"printer.{SERVICE_TYPE}")
        for reason in ("bad_version", "cut_txt", "other_id", "bad_name"):
            await relay.counts(reason)
        await stack.enter_async_context(announced(stranger, relay_id, good, port=0))
        await relay.counts("bad_port")
        lost = os.urandom(16)
        text = encode_txt(Advert(lost, (network,)))
        await stack.enter_async_context(announced(stranger, lost, text, addresses=("224.0.0.9",)))
        await relay.counts("no_address")
        friend = lan.relay(network)
        await relay.sees_relay(friend.relay_id)
    assert {s.relay_id for s in relay.seen} == {friend.relay_id}


async def test_a_flood_of_names_is_bounded_and_hides_no_relay(lan: Lan) -> None:
    network = os.urandom(16)
    relay, stranger = lan.relay(network), await lan.stranger()
    await stranger.zeroconf.async_wait_for_start()
    names = 3000
    for _ in range(names // 20):
        flood = DNSOutgoing(ANSWER)
        for _ in range(20):
            pointer = DNSPointer(SERVICE_TYPE, 12, 1, 4500, instance_name(os.urandom(16)))
            flood.add_answer_at_time(pointer, 0)
        stranger.zeroconf.async_send(flood)
        await asyncio.sleep(0)
    # no more than this wait for the rest of their advert, the others are dropped at once
    await relay.counts("incomplete", 500)
    assert len(relay.discovery._sightings._follow_ups) <= MAX_FOLLOW_UPS
    friend = lan.relay(network)
    await relay.sees_relay(friend.relay_id)
    await friend.sees_relay(relay.relay_id)
    assert {s.relay_id for s in relay.seen} == {friend.relay_id}


async def test_a_host_without_interfaces_waits_for_one(lan: Lan) -> None:
    network = os.urandom(16)
    present: set[Address] = set()
    late = lan.relay(network, look=lambda: frozenset(present), poll_s=0.05, confirm_s=0.05)
    early = lan.relay(network)
    third = lan.relay(network)
    await early.sees_relay(third.relay_id)
    assert late.seen == []
    assert late.discovery.status()["tried"] == []
    present.add(LO)
    await late.sees_relay(early.relay_id)
    await early.sees_relay(late.relay_id)
    assert late.discovery.status()["tried"] == [f"lo {HERE}"]


async def test_an_interface_that_goes_and_comes_is_announced_on_again(lan: Lan) -> None:
    network = os.urandom(16)
    present = {LO}
    flaky = lan.relay(network, look=lambda: frozenset(present), poll_s=0.05, confirm_s=0.05)
    first = lan.relay(network)
    await first.sees_relay(flaky.relay_id)
    present.clear()
    async with asyncio.timeout(WAIT_S):
        while flaky.discovery.status()["tried"]:  # noqa: ASYNC110 - a fact has no event
            await asyncio.sleep(0.02)
    second = lan.relay(network)
    await first.sees_relay(second.relay_id)
    present.add(LO)
    await second.sees_relay(flaky.relay_id)
    await flaky.sees_relay(second.relay_id)


async def test_a_dead_interface_is_shown_and_costs_nothing(lan: Lan) -> None:
    network = os.urandom(16)
    dead = Address("eth9", 999, "203.0.113.1", 24, up=False)
    foreign = Address("eth8", 998, "203.0.113.2", 24)
    relay = lan.relay(network, look=lambda: frozenset({LO, dead}))
    wrong = lan.relay(network, look=lambda: frozenset({LO, foreign}), poll_s=0.05)
    friend = lan.relay(network)
    await relay.sees_relay(friend.relay_id)
    status = relay.discovery.status()
    assert status["tried"] == ["eth9 203.0.113.1 (down)", f"lo {HERE}"]
    assert status["announced"] == [HERE]
    assert status["errors"] == {}
    # an address that cannot be bound is said, and tried again
    async with asyncio.timeout(WAIT_S):
        while "sockets" not in wrong.discovery.status()["errors"]:  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_system_that_lists_no_interfaces_is_asked_again(lan: Lan) -> None:
    network = os.urandom(16)
    failures = iter([OSError("no buffer space"), ValueError("no netmask")])

    def look() -> frozenset[Address]:
        for failure in failures:
            raise failure
        return frozenset({LO})

    relay, friend = lan.relay(network, look=look, poll_s=0.05), lan.relay(network)
    await relay.sees_relay(friend.relay_id)
    assert relay.discovery.status()["errors"] == {}


async def test_a_fault_in_the_search_reaches_the_reader() -> None:
    def broken() -> frozenset[Address]:
        raise KeyError("a fault of ours")

    discovery = MulticastDiscovery(os.urandom(16), (os.urandom(16),), 7, look=broken)
    try:
        with pytest.raises(KeyError, match="a fault of ours"):
            async with asyncio.timeout(WAIT_S):
                await anext(discovery.sightings())
    finally:
        await discovery.close()


async def test_it_keeps_asking_so_that_a_parted_lan_meets_again(lan: Lan) -> None:
    relay = lan.relay(os.urandom(16), poll_s=0.05, ask_s=0.05)
    async with asyncio.timeout(WAIT_S):
        while not relay.discovery.status()["asked"]:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.02)


async def test_a_full_table_refuses_further_relays_and_counts_them(
    lan: Lan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "MAX_ADVERTS", 2)
    network = os.urandom(16)
    relays = [lan.relay(network) for _ in range(4)]
    for relay in relays:
        await relay.counts("table_full")
        assert len(relay.seen) == 2
    # a place that gets free is given to the next one that is heard
    first = relays[0]
    known = {s.relay_id for s in first.seen}
    leaving = next(relay for relay in relays if relay.relay_id in known)
    await leaving.discovery.close()
    await first.sees_relay(leaving.relay_id, gone=True)
    late = lan.relay(network)
    await first.sees_relay(late.relay_id)


async def test_an_address_that_moved_to_another_interface_is_joined_again(lan: Lan) -> None:
    network = os.urandom(16)
    present = {Address("old", 7, HERE, 8)}
    moving = lan.relay(network, look=lambda: frozenset(present), poll_s=0.05, confirm_s=0.05)
    first = lan.relay(network)
    await first.sees_relay(moving.relay_id)
    present.symmetric_difference_update({Address("old", 7, HERE, 8), LO})
    async with asyncio.timeout(WAIT_S):
        while moving.discovery.status()["tried"] != [f"lo {HERE}"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    second = lan.relay(network)
    await second.sees_relay(moving.relay_id)
    await moving.sees_relay(second.relay_id)


async def test_what_the_responder_warns_of_is_one_event_of_ours_while_a_search_runs(
    lan: Lan, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("zeroconf")
    network = os.urandom(16)
    relay, friend = lan.relay(network), lan.relay(network)
    await relay.sees_relay(friend.relay_id)
    text = f"socket {os.urandom(4).hex()} is %s"
    for _ in range(5):
        log.warning(text, "broken")
    events = [record for record in caplog.records if record.message == "discovery.zeroconf"]
    assert [record.fields["text"] for record in events] == [text % "broken"]  # type: ignore[attr-defined]
    await relay.discovery.close()
    await friend.discovery.close()
    log.warning(text, "theirs")
    assert caplog.records[-1].name == "zeroconf"
