"""Whom a relay dials, at which address, and when again; the dials themselves are made up."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from support.waiting import until

from relay.discovery import Sighting
from relay.net.dialling import (
    BACKOFF_MAX_S,
    HOST_BURST,
    HOST_PER_S,
    LINKED,
    MAX_DIALS,
    OURSELVES,
    SELF_S,
    STRANGER_BACKOFF_MAX_S,
    STRANGERS_BURST,
    STRANGERS_PER_S,
    UP,
    Address,
    Dialler,
    Outcome,
    Target,
)

OWN, X, Y = b"\x01" * 16, b"\x02" * 16, b"\x03" * 16
SHARED, DEAD, GOOD = ("172.17.0.1", 7430), ("10.0.0.5", 7430), ("192.168.7.7", 7430)


class Net:
    """What answers at which address; `up` holds the relays that are linked."""

    def __init__(self) -> None:
        self.at: dict[Address, Outcome | Exception] = {}
        self.up: set[bytes] = set()
        self.tried: list[Address] = []
        self.held = asyncio.Event()
        self.held.set()
        self.dialler = Dialler(OWN, self.dial, self.up.__contains__, random.Random(1))

    async def dial(self, target: Target, address: Address) -> Outcome:
        self.tried.append(address)
        await self.held.wait()
        answer = self.at.get(address, Outcome("no answer"))
        if isinstance(answer, Exception):
            raise answer
        if answer.what == UP and answer.relay_id is not None:
            self.up.add(answer.relay_id)
        return answer

    def see(
        self, *addresses: Address, relay_id: bytes | None = None, source: str = "test"
    ) -> Target:
        self.dialler.sighted(Sighting(addresses, relay_id, (), source))
        return self.target(relay_id if relay_id is not None else (source,))

    def receive(self, relay_id: bytes, *addresses: Address) -> None:
        self.dialler.introduced(relay_id, addresses)

    def target(self, key: object) -> Target:
        return self.dialler._targets[key]

    @property
    def keys(self) -> Sequence[object]:
        return list(self.dialler._targets)


def wait_s(target: Target) -> float:
    """Return in how long a target is dialled again."""
    assert target.timer is not None
    return target.timer.when() - asyncio.get_running_loop().time()


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.dialler.stop()


async def test_an_address_of_a_known_relay_where_we_answer_is_passed_over(net: Net) -> None:
    net.at = {SHARED: Outcome(OURSELVES, OWN), GOOD: Outcome(UP, X)}
    target = net.see(DEAD, SHARED, GOOD, relay_id=X)
    await until(lambda: X in net.up and not target.dialling)
    assert net.tried == [DEAD, SHARED, GOOD]
    assert (target.relay_id, target.error) == (X, "")


async def test_a_known_relay_that_cannot_be_reached_is_dialled_again_soon_though_we_have_its_address(
    net: Net,
) -> None:
    net.at = {SHARED: Outcome(OURSELVES, OWN)}
    target = net.see(GOOD, SHARED, relay_id=X)
    await until(lambda: target.failures and target.timer)
    assert wait_s(target) < BACKOFF_MAX_S
    assert target.relay_id == X
    assert target.error.startswith("172.17.0.1:7430: this relay itself")
    net.up.add(X)
    net.dialler.up(X)
    net.up.discard(X)
    net.tried.clear()
    net.at[GOOD] = Outcome(UP, X)
    net.dialler.lost(X, 100.0, True)
    assert wait_s(target) < 1
    await until(lambda: X in net.up)


@pytest.mark.parametrize("what", [LINKED, UP])
async def test_another_relay_at_an_address_of_a_known_one_is_not_taken_for_it(
    what: str, net: Net
) -> None:
    net.up.add(Y)
    net.at = {SHARED: Outcome(what, Y)}
    net.receive(X, SHARED, GOOD)
    target = net.target(X)
    await until(lambda: target.failures)
    assert net.tried == [SHARED, GOOD]
    assert target.relay_id == X
    net.at[GOOD] = Outcome(UP, X)
    await until(lambda: X in net.up)
    assert net.tried[-2:] == [SHARED, GOOD]


async def test_a_relay_that_dials_us_meanwhile_is_dialled_no_further(net: Net) -> None:
    net.held.clear()
    target = net.see(DEAD, GOOD, relay_id=X)
    await until(lambda: net.tried)
    net.up.add(X)
    net.held.set()
    await until(lambda: not target.dialling)
    assert net.tried == [DEAD]
    assert target.timer is None


async def test_a_seed_stands_for_whoever_answers(net: Net) -> None:
    net.up.add(X)
    net.at = {SHARED: Outcome(OURSELVES, OWN), GOOD: Outcome(LINKED, X)}
    target = net.see(DEAD, SHARED, GOOD)
    await until(lambda: target.relay_id == X)
    net.at[GOOD] = Outcome(UP, Y)  # restarted, with another id
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    await until(lambda: target.relay_id == Y)


async def test_a_seed_that_is_ourselves_is_tried_seldom_and_one_that_is_partly_so_as_any(
    net: Net,
) -> None:
    net.at = {SHARED: Outcome(OURSELVES, OWN)}
    ours = net.see(SHARED, source="ours")
    partly = net.see(SHARED, DEAD, source="partly")
    await until(lambda: ours.error and ours.timer and partly.error and partly.timer)
    assert SELF_S - 10 < wait_s(ours) <= SELF_S
    assert (ours.error, ours.relay_id) == (OURSELVES, None)
    assert (partly.error, partly.relay_id) == ("no answer", None)
    assert wait_s(partly) < BACKOFF_MAX_S


async def test_a_fault_in_a_dial_is_said_once_and_the_target_is_dialled_again(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    net.at = {GOOD: RuntimeError("a bug")}
    target = net.see(GOOD)
    await until(lambda: target.failures >= 2)
    assert [record.message for record in caplog.records] == ["link.dial_fault"]
    net.at[GOOD] = Outcome(UP, X)
    await until(lambda: X in net.up)


async def test_what_peers_tell_and_nobody_links_gives_way_to_what_they_tell_later(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.dialling.MAX_TARGETS", MAX_DIALS + 8)
    net.held.clear()
    known = net.see(GOOD, relay_id=X)
    for number in range(MAX_DIALS + 7):
        net.receive(bytes([9, number]) * 8, DEAD)
    await until(lambda: len(net.dialler._ready) == 8)
    # All dials hang, and the rest waits: those that wait, the oldest first, are the ones to go.
    waiting = [target.key for target in net.dialler._ready]
    for number in range(3):
        net.receive(bytes([10, number]) * 8, DEAD)
    assert net.dialler.evicted == 3
    assert not {*waiting[:3]} & {*net.keys}
    assert {*waiting[3:]} <= {*net.keys}
    assert net.target(X) is known
    assert len(net.dialler._ready) == 5
    assert net.dialler.ignored == 0


async def test_a_peer_does_not_make_us_forget_a_relay_whose_link_was_lost_just_now(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.dialling.MAX_TARGETS", 1)
    net.at = {GOOD: Outcome(UP, X)}
    net.receive(X, GOOD)
    target = net.target(X)
    await until(lambda: X in net.up and not target.dialling)
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    net.receive(Y, DEAD)
    assert net.keys == [X]
    assert net.dialler.ignored == 1


# -- adverts: anybody on the LAN makes them ------------------------------------------------------------------------


def advert(net: Net, relay_id: bytes, *addresses: Address, gone: bool = False) -> None:
    net.dialler.sighted(Sighting(addresses, relay_id, (), "mdns", gone))


async def linked(net: Net, relay_id: bytes, *addresses: Address) -> Target:
    """Return a relay that was announced and is linked."""
    net.at[addresses[0]] = Outcome(UP, relay_id)
    advert(net, relay_id, *addresses)
    target = net.target(relay_id)
    await until(lambda: relay_id in net.up and not target.dialling)
    return target


async def test_a_goodbye_does_not_make_us_forget_a_relay_that_is_linked(net: Net) -> None:
    """Anybody can send a goodbye. When the link is lost later, its relay is dialled as usual."""
    await linked(net, X, GOOD)
    net.tried.clear()
    advert(net, X, GOOD, gone=True)
    assert net.keys == [X]
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    await until(lambda: X in net.up)
    assert net.tried == [GOOD]


async def test_a_goodbye_does_not_end_the_redialling_of_a_relay_whose_link_was_lost(
    net: Net,
) -> None:
    target = await linked(net, X, GOOD)
    net.at[GOOD] = Outcome("no answer")
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    advert(net, X, GOOD, gone=True)
    await until(lambda: target.failures >= 2)
    assert net.keys == [X]
    assert wait_s(target) <= 1.0, "as often as without the goodbye"
    net.at[GOOD] = Outcome(UP, X)
    await until(lambda: X in net.up)


async def test_a_relay_that_said_goodbye_is_given_up_when_it_stays_away(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await linked(net, X, GOOD)
    net.at[GOOD] = Outcome("no answer")
    net.up.discard(X)
    advert(net, X, GOOD, gone=True)
    monkeypatch.setattr("relay.net.dialling.GOODBYE_S", 0.2)
    net.dialler.lost(X, 100.0, True)
    shown = net.dialler.status()["unlinked"]
    assert shown == [], "nobody is missed who took leave"
    await until(lambda: not net.keys)
    assert target.gone
    advert(net, X, GOOD)
    net.at[GOOD] = Outcome(UP, X)
    await until(lambda: X in net.up)


async def test_a_relay_that_is_sighted_again_after_a_goodbye_is_kept(net: Net) -> None:
    target = await linked(net, X, GOOD)
    advert(net, X, GOOD, gone=True)
    advert(net, X, GOOD)
    assert not target.said_goodbye
    assert wait_or_none(target) is None


def wait_or_none(target: Target) -> float | None:
    return None if target.timer is None else wait_s(target)


async def test_a_relay_that_was_never_linked_is_forgotten_at_its_goodbye(net: Net) -> None:
    advert(net, X, DEAD)
    advert(net, X, DEAD, gone=True)
    assert net.keys == []


async def test_changing_adverts_do_not_make_us_redial_a_stranger(net: Net) -> None:
    """Without the limit each change would be dialled at once, as for a relay that moved."""
    for number in range(200):
        advert(net, X, ("10.0.0.5", 1000 + number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    target = net.target(X)
    await until(lambda: target.failures > 1)
    assert len(net.tried) <= 8


async def test_a_known_relay_that_moves_is_dialled_at_once(net: Net) -> None:
    target = await linked(net, X, GOOD)
    net.at[GOOD] = Outcome("no answer")
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    await until(lambda: target.failures)
    net.at[DEAD] = Outcome(UP, X)
    advert(net, X, DEAD)
    assert target.failures == 0
    await until(lambda: X in net.up)


async def test_one_host_is_not_flooded_with_dials_whatever_is_announced(net: Net) -> None:
    began_s = time.monotonic()
    for number in range(300):
        advert(net, number.to_bytes(16, "little"), ("10.0.0.5", 1 + number))
    advert(net, X, GOOD)
    net.at[GOOD] = Outcome(UP, X)
    await until(lambda: X in net.up)
    tried = [host for host, _ in net.tried]
    assert tried.count("10.0.0.5") <= HOST_BURST + HOST_PER_S * (time.monotonic() - began_s) + 1
    assert net.dialler.status()["held_back"]


async def test_dials_because_of_adverts_are_limited_in_total(net: Net) -> None:
    began_s = time.monotonic()
    for number in range(1000):
        advert(net, number.to_bytes(16, "little"), (f"10.0.{number >> 8}.{number & 255}", 7430))
    await until(lambda: net.dialler.dials >= 1000)
    passed_s = time.monotonic() - began_s
    assert len(net.tried) <= STRANGERS_BURST + STRANGERS_PER_S * passed_s + 1
    # Seeds, and relays that were linked before, are not strangers.
    net.at[GOOD] = Outcome(UP, Y)
    net.see(GOOD)
    await until(lambda: Y in net.up)


async def test_a_stranger_that_never_answers_is_dialled_at_growing_intervals(net: Net) -> None:
    advert(net, X, DEAD)
    target = net.target(X)
    await until(lambda: target.timer and target.failures)
    target.failures = 20
    assert BACKOFF_MAX_S < net.dialler._backoff_s(target) <= STRANGER_BACKOFF_MAX_S
    seed = net.see(DEAD)
    seed.failures = 20
    assert net.dialler._backoff_s(seed) <= BACKOFF_MAX_S


async def test_adverts_displace_neither_seeds_nor_linked_relays_nor_targets_from_peers(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.dialling.MAX_TARGETS", 4)
    await linked(net, X, GOOD)
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    net.held.clear()
    net.see(DEAD, source="join")
    net.receive(Y, SHARED)
    for number in range(8):
        advert(net, bytes([7, number]) * 8, DEAD)
    assert {X, ("join",), Y} <= {*net.keys}
    assert len(net.keys) == 4


async def test_an_advert_with_other_addresses_does_not_hide_the_last_good_one(net: Net) -> None:
    """Anybody can announce a known relay at wrong addresses."""
    target = await linked(net, X, GOOD)
    advert(net, X, DEAD)
    net.up.discard(X)
    net.tried.clear()
    net.dialler.lost(X, 100.0, True)
    await until(lambda: X in net.up and not target.dialling)
    assert net.tried == [DEAD, GOOD]


async def test_changing_adverts_do_not_make_us_redial_a_known_relay(net: Net) -> None:
    target = await linked(net, X, GOOD)
    net.at[GOOD] = Outcome("no answer")
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    net.tried.clear()
    for number in range(200):
        advert(net, X, ("10.0.0.5", 1000 + number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await until(lambda: target.failures > 1)
    assert len(net.tried) <= 16
