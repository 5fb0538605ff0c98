"""What crosses a link: requests of any size, publications in their order, and nothing that costs the link."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from support.links import Site, hub, link, linked
from support.relays import client
from support.waiting import PATIENCE_S, eventually

import iris

pytestmark = pytest.mark.timeout(60)


def echo() -> iris.Service:
    service = iris.Service("echo")
    service.on_request(lambda payload: payload)
    return service


async def test_requests_of_any_size_cross_a_link_and_come_back(site: Site) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    async with (
        client(one.config.socket_path) as member,
        client(two.config.socket_path) as caller,
        member.serve(echo()),
    ):
        payloads = [os.urandom(size) for size in (0, 100, 70_000, 300_000, 1 << 20)] * 3
        answers = await asyncio.gather(
            *(caller.request("echo", payload, timeout=PATIENCE_S) for payload in payloads)
        )
        assert answers == payloads
        for relay in (one, two):
            assert relay.router.held_messages == 0
            assert relay.router.accounts.balance() == 0


async def test_what_is_published_across_a_link_keeps_its_order_whatever_its_size(
    site: Site,
) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    rng = random.Random(5)
    got: list[tuple[int, int]] = []

    def receive(message: iris.Message) -> None:
        got.append((int.from_bytes(message.payload[:4], "big"), len(message.payload)))

    async with (
        client(one.config.socket_path) as there,
        client(two.config.socket_path) as here,
        there.subscribe("news.>", receive),
    ):
        await eventually(lambda: two.router.status()["links"][0]["topics"])  # type: ignore[index]  # JSON
        sent = []
        for number in range(300):
            payload = number.to_bytes(4, "big") + bytes(rng.choice((0, 1000, 90_000, 400_000)))
            sent.append((number, len(payload)))
            await here.publish("news.a", payload)
        await eventually(lambda: len(got) == len(sent))
        assert got == sent
        assert not there.losses


async def test_the_first_words_on_very_many_topics_arrive_in_their_order(site: Site) -> None:
    """Each topic is declared before its message; the other relay receives this burst in parts, and loses nothing."""
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    numbers: list[int] = []
    port = link(two, one)
    assert port is not None

    async def receive(message: iris.Message) -> None:
        numbers.append(int(message.payload))

    async with (
        client(two.config.socket_path) as there,
        client(one.config.socket_path) as here,
        there.subscribe("news.>", receive),
    ):
        await eventually(lambda: one.router.status()["links"][0]["topics"])  # type: ignore[index]  # JSON
        for number in range(1000):
            await here.publish(f"news.{number}", str(number).encode())
        await eventually(lambda: len(numbers) == 1000)
        assert numbers == list(range(1000))
        assert two.driver.turns.pauses
        assert not port.waits
    for relay in (one, two):
        assert relay.router.accounts.balance() == 0


@pytest.mark.parametrize("side", [0, 1], ids=["sender", "receiver"])
async def test_a_link_that_is_cut_while_a_burst_is_handled_comes_back(
    site: Site, side: int
) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    numbers: set[int] = set()
    hearing = link(two, one)
    assert hearing is not None

    async def receive(message: iris.Message) -> None:
        numbers.add(int(message.payload))

    async with (
        client(two.config.socket_path) as there,
        client(one.config.socket_path) as here,
        there.subscribe("news.>", receive),
    ):
        await eventually(lambda: one.router.status()["links"][0]["topics"])  # type: ignore[index]  # JSON

        async def publish() -> None:
            for number in range(1000):
                await here.publish(f"news.{number}", str(number).encode())

        publishing = asyncio.create_task(publish())
        async with asyncio.timeout(PATIENCE_S):
            while not hearing.waits:  # noqa: ASYNC110 - it lasts for milliseconds
                await asyncio.sleep(0)
        cut = link(*((one, two), (two, one))[side])
        assert cut is not None
        cut.abort("cut by the test")
        await publishing
        await eventually(lambda: hearing not in hub(two).ports and linked(one, two))
        await eventually(lambda: not len(two.driver.turns))

        async def again() -> bool:
            await here.publish("news.0", b"1000")
            await asyncio.sleep(0.01)
            return 1000 in numbers

        async with asyncio.timeout(PATIENCE_S):
            while not await again():
                pass
    for relay in (one, two):
        assert relay.router.accounts.balance() == 0


async def test_a_message_that_the_other_relay_would_not_take_does_not_end_the_link(
    site: Site,
) -> None:
    small = await site.start(message_limit_bytes=64 << 10)
    large = await site.start(small)
    await eventually(lambda: linked(small, large))
    before = link(large, small)
    async with (
        client(small.config.socket_path) as member,
        client(large.config.socket_path) as caller,
        member.serve(echo()),
    ):
        assert await caller.request("echo", bytes(60_000), timeout=PATIENCE_S) == bytes(60_000)
        for size in (71_000, 500_000):
            with pytest.raises(iris.RequestError):
                await caller.request("echo", bytes(size), timeout=PATIENCE_S)
        assert await caller.request("echo", b"still", timeout=PATIENCE_S) == b"still"
    assert link(large, small) is before
