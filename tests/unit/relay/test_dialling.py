"""Whom a relay dials, at which address, and when again; the dials themselves are made up."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from relay.dialling import (
    BACKOFF_MAX_S,
    LINKED,
    MAX_DIALS,
    OURSELVES,
    SELF_S,
    UP,
    Address,
    Dialler,
    Outcome,
    Target,
)
from relay.discovery import Sighting

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

    def hear(self, relay_id: bytes, *addresses: Address) -> None:
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


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - dials end in turns of the loop
            await asyncio.sleep(0.001)


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
    assert target.error == "172.17.0.1:7430: ourselves"
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
    net.hear(X, SHARED, GOOD)
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
    net.at[GOOD] = Outcome(UP, Y)  # started anew, with another id
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
    monkeypatch.setattr("relay.dialling.MAX_TARGETS", MAX_DIALS + 8)
    net.held.clear()
    known = net.see(GOOD, relay_id=X)
    for number in range(MAX_DIALS + 7):
        net.hear(bytes([9, number]) * 8, DEAD)
    await until(lambda: len(net.dialler._ready) == 8)
    # All dials hang, and the rest waits: those that wait, the oldest first, are the ones to go.
    waiting = [target.key for target in net.dialler._ready]
    for number in range(3):
        net.hear(bytes([10, number]) * 8, DEAD)
    assert net.dialler.evicted == 3
    assert not {*waiting[:3]} & {*net.keys}
    assert {*waiting[3:]} <= {*net.keys}
    assert net.target(X) is known
    assert len(net.dialler._ready) == 5
    assert net.dialler.ignored == 0


async def test_a_peer_does_not_make_us_forget_a_relay_whose_link_was_lost_just_now(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.dialling.MAX_TARGETS", 1)
    net.at = {GOOD: Outcome(UP, X)}
    net.hear(X, GOOD)
    target = net.target(X)
    await until(lambda: X in net.up and not target.dialling)
    net.up.discard(X)
    net.dialler.lost(X, 100.0, True)
    net.hear(Y, DEAD)
    assert net.keys == [X]
    assert net.dialler.ignored == 1
