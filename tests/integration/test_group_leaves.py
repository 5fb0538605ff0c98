"""Members of a queue group leave, one after another, while messages are published to it: each message still arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from support.links import Site, linked
from support.relays import client
from support.waiting import eventually

from iris import Client, Message
from relay.daemon import Relay

LEAVES = 20
BURST = 10
"""Messages of one turn of the publisher's loop."""

pytestmark = pytest.mark.timeout(60)


def connected(relay: Relay) -> Client:
    return client(relay.config.socket_path)


async def published_while_members_leave(here: Relay, there: Relay, stays: Relay) -> Counter[int]:
    """Publish at the relay `here` while members of a group at `there` join and leave; one stays at `stays`.

    Returns how often each message was received; messages that were never are counted 0.
    """
    got: Counter[int] = Counter()

    def received(message: Message) -> None:
        got[int(message.payload)] += 1

    async with connected(here) as publisher, connected(there) as leaver, connected(stays) as other:
        await other.subscribe("jobs.>", received, group="workers").ready()
        left = asyncio.Event()
        sent = 0

        async def publish() -> None:
            nonlocal sent
            while not left.is_set():
                for _ in range(BURST):
                    await publisher.publish("jobs.all", str(sent).encode())
                    sent += 1
                await asyncio.sleep(0.001)

        publishing = asyncio.create_task(publish())
        for _ in range(LEAVES):
            member = leaver.subscribe("jobs.>", received, group="workers")
            await member.ready()
            before = sent
            await eventually(lambda before=before: sent > before)
            await member.close()
        left.set()
        await publishing
        await publisher.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                while sum(got.values()) < sent:
                    await asyncio.sleep(0.005)
        assert not [*leaver.losses, *other.losses, *publisher.losses]
    return Counter({number: got[number] for number in range(sent)})


@pytest.mark.parametrize("where", ["here", "there", "apart"])
async def test_each_message_reaches_a_group_although_members_leave(site: Site, where: str) -> None:
    one = await site.start()
    two = await site.start(one)
    await eventually(lambda: linked(one, two))
    relays = {"here": (one, one, one), "there": (one, two, two), "apart": (one, two, one)}[where]
    counts = await published_while_members_leave(*relays)
    assert {number for number, times in counts.items() if times != 1} == set()
