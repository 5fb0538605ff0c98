"""Members of a queue group leave, one after another, while messages are published to it: each message still arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from support.links import Site, linked
from support.relays import KEY, client
from support.waiting import eventually

from iris import Client, Keyring, Message, Subscription
from relay.daemon import Relay

LEAVES = 20
BURST = 10
"""Messages of one turn of the publisher's loop."""

pytestmark = pytest.mark.timeout(60)


def connected(relay: Relay) -> Client:
    return client(relay.config.socket_path)


class Group:
    """A queue group and a publisher, whose messages are numbered."""

    def __init__(self, publisher: Client) -> None:
        self.publisher = publisher
        self.got: Counter[int] = Counter()
        self.sent = 0
        self.left = asyncio.Event()

    def received(self, message: Message) -> None:
        self.got[int(message.payload)] += 1

    async def handled(self, message: Message) -> None:
        """As `received`, a moment later."""
        await asyncio.sleep(0)
        self.received(message)

    def member(self, client: Client) -> Subscription:
        return client.subscribe("jobs.>", self.received, group="workers")

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish while the block runs; then each message was received once."""
        publishing = asyncio.create_task(self._publish())
        yield
        self.left.set()
        await publishing
        await self.publisher.flush()
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: sum(self.got.values()) >= self.sent)
        assert {n for n in range(self.sent) if self.got[n] != 1} == set()

    async def _publish(self) -> None:
        while not self.left.is_set():
            for _ in range(BURST):
                await self.publisher.publish("jobs.all", str(self.sent).encode())
                self.sent += 1
            await asyncio.sleep(0.001)

    async def goes_on(self) -> None:
        """Return when something more was published."""
        before = self.sent
        await eventually(lambda: self.sent > before)


async def two_relays(site: Site) -> tuple[Relay, Relay]:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    return one, two


@pytest.mark.parametrize("where", ["here", "there", "apart"])
async def test_each_message_reaches_a_group_although_members_leave(site: Site, where: str) -> None:
    one, two = await two_relays(site)
    there, stays = {"here": (one, one), "there": (two, two), "apart": (two, one)}[where]
    async with connected(one) as publisher, connected(there) as leaver, connected(stays) as other:
        group = Group(publisher)
        await group.member(other).ready()
        async with group.publishing():
            for _ in range(LEAVES):
                member = await group.member(leaver).ready()
                await group.goes_on()
                await member.close()
        assert not [*leaver.losses, *other.losses, *publisher.losses]


@pytest.mark.parametrize("where", ["here", "apart"])
@pytest.mark.parametrize("handler", ["function", "coroutine"])
async def test_each_message_reaches_a_group_although_clients_of_members_close(
    site: Site, where: str, handler: str
) -> None:
    one, two = await two_relays(site)
    async with connected(one) as publisher, connected(one) as other:
        group = Group(publisher)
        await group.member(other).ready()
        handle = group.received if handler == "function" else group.handled
        async with group.publishing():
            for _ in range(LEAVES):
                async with connected(one if where == "here" else two) as leaver:
                    await leaver.subscribe("jobs.>", handle, group="workers").ready()
                    await group.goes_on()
                assert not leaver.losses


async def test_each_message_reaches_a_group_although_keys_of_a_member_are_reloaded(
    site: Site,
) -> None:
    one, two = await two_relays(site)
    async with connected(one) as publisher, connected(two) as member:
        group = Group(publisher)
        await group.member(member).ready()
        async with group.publishing():
            for _ in range(LEAVES):
                await member.reload_keys(Keyring.single(KEY))
                await group.goes_on()
        assert not member.losses


async def test_each_message_reaches_a_group_although_the_relay_of_a_member_stops(
    site: Site,
) -> None:
    one = await site.start()
    async with connected(one) as publisher, connected(one) as other:
        group = Group(publisher)
        await group.member(other).ready()
        async with group.publishing():
            for _ in range(LEAVES // 4):
                two = await site.start(one)
                await eventually(lambda two=two: linked(one, two))
                async with connected(two) as leaver:
                    await group.member(leaver).ready()
                    await group.goes_on()
                    await site.stop(two, drain_s=2)


async def test_an_iterator_of_a_group_ends_after_what_was_on_its_way(site: Site) -> None:
    one, two = await two_relays(site)
    async with connected(one) as publisher, connected(two) as leaver, connected(one) as other:
        group = Group(publisher)
        await group.member(other).ready()
        async with group.publishing():
            for _ in range(LEAVES):
                member = await leaver.subscribe("jobs.>", group="workers").ready()

                async def iterate(member: Subscription = member) -> None:
                    async for message in member:
                        group.received(message)

                iterating = asyncio.create_task(iterate())
                await group.goes_on()
                await member.close()
                await iterating
        assert not leaver.losses


async def test_what_nobody_iterates_over_is_reported_when_a_member_leaves(site: Site) -> None:
    one, two = await two_relays(site)
    async with connected(one) as publisher, connected(two) as leaver:
        async with leaver.subscribe("jobs.>", group="workers") as member:
            for number in range(10):
                await publisher.publish("jobs.all", str(number).encode())
            async for message in member:
                if message.payload == b"3":
                    break
        await eventually(lambda: member.lost_messages)
        assert sum(lost.count or 0 for lost in leaver.losses) == 6
        assert {lost.cause for lost in leaver.losses} == {"subscription closed"}
