"""A site without a stream's key, behind a gateway that claims to have it: real stores, relays and gateways."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from adversity.kit import OTHER_KEY
from integration.test_stream_links import created
from support.gateways import World, joined
from support.relays import KEY
from support.waiting import eventually

import iris
from iris.crypto.channel import Offer
from iris.wire import streams
from iris.wire.consumers import Consume, DeleteConsumer, DescribeConsumers, Settle
from iris.wire.orders import END, KEEP, Definition, Order, SignedOrder
from iris.wire.streams import Refused, encode
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(60)


class Swear(set[bytes]):
    """The proven keys of a session, as a lying relay reports them: all keys."""

    def __contains__(self, key_id: object) -> bool:
        return True


class Claimed:
    """A key with a known id, but without its secret."""

    key_id = KEY.key_id


@pytest.fixture
async def sites(tmp_path: Path) -> AsyncIterator[tuple[Relay, Relay]]:
    """Two sites; the first has a store."""
    world = World(tmp_path)
    eu = await world.start("eu", world.peer("us"), data=tmp_path / "data")
    us = await world.start("us", world.peer("eu", eu))
    await eventually(lambda: joined((eu, us)))
    yield eu, us
    for relay in (us, eu):
        await world.stop(relay)


def client(relay: Relay, key: iris.ClusterKey) -> iris.Client:
    return iris.connect(relay.config.socket_path, keyring=iris.Keyring.single(key))


def orders(info: Any, action: str) -> list[SignedOrder]:
    """Return the signed orders that a site without a key can make."""
    order = Order(
        action, bytes.fromhex(info.uuid), OTHER_KEY.key_id, bytes(32), 1 << 62, Definition(info.name, max_messages=1)
    )  # fmt: skip
    body = encode(order)
    return [SignedOrder(body, OTHER_KEY.public_key, OTHER_KEY.sign_order(body))]


async def test_a_site_without_the_key_can_do_nothing_to_a_stream_and_learns_nothing_of_it(
    sites: tuple[Relay, Relay],
) -> None:
    eu, us = sites
    async with client(eu, KEY) as owner, client(us, KEY) as far, client(us, OTHER_KEY) as thief:
        made = await created(owner, "orders")
        await owner.streams.append_many("orders", [b"%d" % n for n in range(50)])
        async with owner.streams.consumer("orders", "billing") as work:
            work.ack(*await work.batch())
        # A holder of the key can do all of it from there ...
        async with asyncio.timeout(20.0):
            while True:
                try:
                    assert await far.streams.append("eu:orders", b"50") == 50
                    break
                except iris.IrisError:
                    await asyncio.sleep(0.05)
        before = await owner.streams.describe("orders")
        consumers = await owner.streams.consumers("orders")

        # ... and others nothing, although the relay and its gateway forward all of it.
        for session in us.router.sessions.values():
            session.proven = Swear(session.proven)
        await thief.status()
        attachment: Any = thief._attachment
        calling = attachment.session.store_calls
        attachment.session.out._proven.add(KEY.key_id)

        async def call(body: Any, name: str) -> Any:
            waiter = asyncio.get_running_loop().create_future()
            calling.plain(name, Claimed, encode(body), timeout_ms=10_000, waiter=waiter, shown="it")
            thief._runtime.touch()
            return await waiter

        end = bytes(8) + bytes(4) + (1).to_bytes(4, "little") + bytes(8)
        record = streams.NewRecord(0, end, b"garbage")
        worker = b"w" * 16
        attacks = (
            streams.Append(bytes(16), [record], b"q" * 16),
            streams.Stage("etl", 1, b"a" * 16, bytes(16), [record]),
            streams.Commit("etl", 1, [streams.Attempt(b"a" * 16, 0)]),
            streams.Discard("etl", 1),
            streams.Copy(bytes.fromhex(made.uuid), 51, 51, []),
            Consume("billing", worker, 1 << 20, 100),
            Settle("billing", worker, through=50, gone=True),
            DescribeConsumers(),
            DeleteConsumer("billing"),
            streams.Fetch(0, 1 << 20),
            streams.Find(0),
            streams.Describe(),
            streams.Change(orders(made, KEEP)),
            streams.Delete(orders(made, END)),
        )
        for name in (f"eu:{made.uuid}", "eu:orders"):
            for attack in attacks:
                answer = await call(attack, name)
                assert isinstance(answer, Refused), attack
                assert "open a channel first" in answer.detail
        # To open a channel it would have to sign with the key.
        offer = Offer(OTHER_KEY, os.urandom)
        door = await call(streams.Knock(offer.nonce), f"eu:{made.uuid}")
        assert isinstance(door, streams.Door)
        share, signature = offer.sign(door.store, door.uuid, door.nonce)
        for key in (OTHER_KEY, KEY):
            opening = streams.Open(offer.nonce, door.nonce, key.public_key, share, signature)
            assert isinstance(await call(opening, f"eu:{made.uuid}"), Refused)
        with pytest.raises(iris.IrisError):
            await thief.streams.describe("eu:orders", timeout=1.0)
        assert await owner.streams.describe("orders") == before
        assert await owner.streams.consumers("orders") == consumers
        async with owner.streams.read("orders", follow=False) as reader:
            assert [m.payload async for m in reader] == [b"%d" % n for n in range(51)]
