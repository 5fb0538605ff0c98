"""A copy takes the place of a stream whose store is lost; if that comes back, it keeps the old log to be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from integration.mirrors import copy_all, whole
from integration.stores import Store
from support.waiting import PATIENCE_S

import iris
from iris.cli.check import judge_stores
from iris.errors import ConfigError, StreamError, StreamExists, StreamSuperseded
from relay.store.calls import LOST


class Lost(NamedTuple):
    client: iris.Client
    other: iris.Client
    store: Store
    """The one that had the stream. It is stopped."""
    uuid: str


@asynccontextmanager
async def lost(pair: Any, monkeypatch: Any, **settings: Any) -> AsyncIterator[Lost]:
    """A stream of 15 messages, of which its copy at another store has 10."""
    monkeypatch.setattr("iris.streams.handover.LOST_S", 0.3)
    cluster, client, other, second = pair
    await cluster.stop_store()
    old = await client.streams.create("orders", **settings)
    assert old.store == second.id
    await cluster.start_store()
    for number in range(10):
        await client.streams.append("orders", b"%d" % number)
    await copy_all(client, "orders", "copy")
    assert (await client.streams.describe("copy")).store != second.id
    for number in range(10, 15):
        await client.streams.append("orders", b"%d" % number)
    with pytest.raises(StreamError, match="has it and answers, so copy does not take its place"):
        await client.streams.promote("copy", place="orders", force=True)
    await second.stop()
    yield Lost(client, other, second, old.uuid)


async def test_a_copy_takes_the_place_of_a_lost_stream_and_says_where(
    pair: Any, monkeypatch: Any
) -> None:
    async with lost(pair, monkeypatch) as (client, other, _, uuid):
        with pytest.raises(ConfigError, match="force: it is for a copy that takes the place"):
            await client.streams.promote("copy", force=True)
        with pytest.raises(StreamError, match="it is a copy of 'orders', and can take the place"):
            await client.streams.promote("copy", place="bills", force=True)
        with pytest.raises(StreamError, match="lost for good, use force"):
            await client.streams.promote("copy", place="orders")
        new = await client.streams.promote("copy", place="orders", force=True)
        assert (new.name, new.replaces, new.replaced_at) == ("orders", uuid, 10)
        again = await client.streams.promote("copy", place="orders", force=True)
        assert again.uuid == new.uuid
        assert await other.streams.append("orders", b"new") == 11
        found, gaps = await whole(client, "orders")
        assert [one.payload for one in found] == [*(b"%d" % n for n in range(10)), b"new"]
        assert [(gap.first, gap.count, gap.cause) for gap in gaps] == [(10, None, LOST)]
        # Whoever holds the old uuid is told, although no store has that log.
        both = f"log {uuid} was superseded by log {new.uuid}.*below offset 10"
        for refused in (
            anext(other.streams.read("orders", 12, uuid=uuid)),
            anext(other.streams.consumer("orders", "work", uuid=uuid)),
            other.streams.append("orders", b"x", uuid=uuid),
            other.streams.fetch("orders", 12, uuid=uuid),
        ):
            with pytest.raises(StreamSuperseded, match=both):
                await refused


@pytest.mark.parametrize("meets", ["by-name", "by-uuid", "in-a-list"])
async def test_a_store_that_comes_back_keeps_the_old_log_to_be_read(
    pair: Any, monkeypatch: Any, meets: str
) -> None:
    async with lost(pair, monkeypatch, topic="orders.>") as (client, other, store, uuid):
        new = await client.streams.promote("copy", place="orders", force=True)
        await store.start()
        if meets == "by-name":
            assert (await other.streams.describe("orders")).uuid == new.uuid
        elif meets == "by-uuid":
            with pytest.raises(StreamSuperseded):
                await other.streams.append("orders", b"x", uuid=uuid)
        else:
            await other.streams.list()
        old = await other.streams.describe("orders", uuid=uuid)
        # 5 messages, and the gap of the time when the store was away.
        assert (old.superseded_by, old.superseded_at, old.end) == (new.uuid, 10, 16)
        # Both were recorded by topic; now one is.
        await client.publish("orders.new", b"once")
        await client.flush()
        async with asyncio.timeout(PATIENCE_S):
            while not (await whole(client, "orders", 11))[0]:  # noqa: ASYNC110 - it is on its way
                await asyncio.sleep(0.005)
        for _ in range(2):
            async with other.streams.read("orders", uuid=uuid, follow=False) as reader:
                assert [one.payload async for one in reader] == [b"%d" % n for n in range(15)]
            healths = {one.store: one for one in await other.streams.stores()}
            assert (healths[store.id].superseded, healths[store.id].only_there) == (1, 6)
            state, text = judge_stores(list(healths.values()))
            assert (
                state,
                "1 stream whose place others have taken, with up to 6 messages" in text,
            ) == (
                "warning",
                True,
            )
            with pytest.raises(StreamError, match="superseded"):
                await other.streams.resume("orders", uuid=uuid)
            await store.stop()  # it knows it after a restart, too
            await store.start()
            assert (await client.streams.describe("orders")).uuid == new.uuid
        await other.streams.delete("orders", uuid=uuid)
        assert (await client.streams.describe("orders")).uuid == new.uuid
        assert judge_stores(await other.streams.stores())[0] == "ok"


async def test_a_copy_does_not_take_a_name_that_another_stream_has(
    pair: Any, monkeypatch: Any
) -> None:
    async with lost(pair, monkeypatch) as (client, stranger, *_):
        made = await stranger.streams.create("orders")
        with pytest.raises(StreamExists, match=f"another stream of this name, as log {made.uuid}"):
            await client.streams.promote("copy", place="orders", force=True)
        assert (await client.streams.describe("copy")).mirror
