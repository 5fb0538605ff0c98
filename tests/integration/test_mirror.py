"""Mirrors: a copy has what its source has, at the same offsets, and takes nothing else."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from integration.mirrors import (
    copy_all,
    fetched,
    log_of,
    same,
    whole,
)
from support.waiting import PATIENCE_S

import iris
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConfigError, NoStream, StreamError, StreamExists
from iris.streams import StreamGap
from iris.testing import LocalCluster
from iris.wire.stream_items import Hole
from iris.wire.streams import Copied, Copy

# -- what a copy has -----------------------------------------------------------------------------------------


async def test_a_copy_of_a_topic_has_every_senders_messages_at_their_offsets(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    for number in range(200):
        await client.publish("orders.eu", b"c%d" % number, headers={"n": str(number)})
        await other.publish("orders.us", {"number": number})
        if number % 20 == 0:
            await asyncio.sleep(0)
    await client.flush()
    await other.flush()
    await cluster.settle()
    assert await copy_all(other, "orders", "orders-copy") == 400
    found, gaps = await whole(client, "orders-copy")
    assert (len(found), gaps) == (400, [])
    assert {m.name for m in found} == {"orders.eu", "orders.us"}
    await same(client, "orders", "orders-copy")
    assert await fetched(client, "orders") == await fetched(client, "orders-copy")


async def test_a_copy_of_a_cluster_has_its_pushes_and_broadcasts(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("bills", cluster="billing")
    await other.push("billing", b"one")
    await other.broadcast("billing", b"two")
    await other.flush()
    await cluster.settle()
    await copy_all(client, "bills", "copy")
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"one", b"two"]
    await other.push("billing", b"three")
    await other.flush()
    await cluster.settle()
    assert (
        await client.streams.describe("copy")
    ).end == 2  # a mirror is not a member of the cluster
    assert (await client.streams.describe("bills")).end == 3


async def test_keys_tombstones_expiry_and_due_times_are_copied(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("prices")
    later = datetime.now(UTC) + timedelta(hours=1)
    await client.streams.append("prices", b"1", key="AA", headers={"h": "1"})
    await client.streams.append("prices", b"2", key=b"BB", ttl=3600.0)
    await client.streams.append("prices", b"", key="AA", tombstone=True)
    await client.streams.append("prices", b"3", deliver_at=later)
    await copy_all(client, "prices", "copy")
    await same(other, "prices", "copy")
    found, _ = await whole(other, "copy")
    assert [m.key for m in found] == [b"AA", b"BB", b"AA", None]
    assert [m.tombstone for m in found] == [False, False, True, False]
    items = await fetched(client, "copy")
    assert items == await fetched(client, "prices")
    assert items[0].key_hash == items[2].key_hash != b""
    assert items[1].expires_us > 0
    assert items[3].due_us == int(later.timestamp() * 1e6)


async def test_what_is_due_later_waits_for_consumers_of_the_copy_too(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("log")
    due = datetime.now(UTC) + timedelta(hours=1)
    await client.streams.append("log", b"later", deliver_at=due)
    await client.streams.append("log", b"now")
    await copy_all(client, "log", "copy")
    async with other.streams.consumer("copy", "work") as work:
        assert (await asyncio.wait_for(anext(work), PATIENCE_S)).payload == b"now"
    log = await log_of(cluster, client, "copy")
    assert log.due(1 << 62) == [(int(due.timestamp() * 1e6), 0)]


async def test_gaps_are_copied_and_reported_as_in_the_source(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders")
    await client.streams.append("orders", b"before")
    await cluster.stop_store()
    await cluster.start_store()
    await client.streams.append("orders", b"after")
    await copy_all(client, "orders", "copy")
    await same(other, "orders", "copy")
    _, gaps = await whole(other, "copy")
    assert gaps == [StreamGap(1, 2, None, "the store was not running")]


async def test_what_the_sources_retention_took_is_a_hole_in_the_copy(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log", max_messages=10)
    for number in range(30):
        await client.streams.append("log", b"%d" % number)
    await copy_all(client, "log", "copy")
    for number in range(30, 60):
        await client.streams.append("log", b"%d" % number)
    await copy_all(client, "log", "copy")
    found, gaps = await whole(other, "copy")
    assert [(m.offset, int(m.payload)) for m in found] == [
        (n, n) for n in (*range(20, 30), *range(50, 60))
    ]
    assert gaps == [StreamGap(0, 20, 0, "retention"), StreamGap(30, 50, 0, "retention")]
    assert (await client.streams.describe("copy")).messages == 20
    async with other.streams.consumer("copy", "work", on_gap=gaps.append) as work:
        handed = [(await asyncio.wait_for(anext(work), PATIENCE_S)).offset for _ in range(20)]
    assert handed == [*range(20, 30), *range(50, 60)]


async def test_holes_of_compaction_are_copied_and_a_copy_compacts_by_itself(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("prices", compact=True)
    for number in range(10):
        await client.streams.append("prices", b"%d" % number, key="AA")
    log = await log_of(cluster, client, "prices")
    assert log.compact(cluster.store.store.now_us)
    await copy_all(client, "prices", "copy", compact=True)
    assert [(m.offset, m.payload) for m in (await whole(other, "copy"))[0]] == [(9, b"9")]
    await client.streams.append("prices", b"10", key="AA")
    await copy_all(client, "prices", "copy", compact=True)
    copy = await log_of(cluster, client, "copy")
    assert copy.compact(cluster.store.store.now_us)
    assert [(m.offset, m.payload) for m in (await whole(other, "copy"))[0]] == [(10, b"10")]


async def test_what_was_compacted_over_the_end_of_the_copy_is_a_hole_from_there(
    setting: Any,
) -> None:
    cluster, client, other = setting
    await client.streams.create("prices")
    for number in range(4):
        await client.streams.append("prices", b"%d" % number, key="AA")
    await copy_all(client, "prices", "copy")
    for number in range(4, 8):
        await client.streams.append("prices", b"%d" % number, key="AA")
    log = await log_of(cluster, client, "prices")
    assert log.compact(cluster.store.store.now_us)
    assert await fetched(client, "prices") == [Hole(0, 7, 2), (await fetched(client, "prices"))[-1]]
    await copy_all(client, "prices", "copy")
    found, gaps = await whole(other, "copy")
    assert [(m.offset, m.payload) for m in found] == [
        (0, b"0"), (1, b"1"), (2, b"2"), (3, b"3"), (7, b"7"),
    ]  # fmt: skip
    assert gaps == [StreamGap(4, 7, 0, "compacted")]


async def test_a_copy_has_limits_of_its_own(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log", max_messages=100)
    for number in range(30):
        await client.streams.append("log", b"%d" % number)
    await copy_all(client, "log", "copy", max_messages=5)
    info = await client.streams.describe("copy")
    assert (info.max_messages, info.oldest, info.end) == (5, 25, 30)
    assert [m.offset for m in (await whole(other, "copy"))[0]] == list(range(25, 30))
    with pytest.raises(StreamExists, match="max_messages 5"):
        await copy_all(client, "log", "copy", max_messages=6)
    await client.streams.change("copy", max_messages=6)
    await copy_all(client, "log", "copy")


async def test_a_message_at_the_limit_is_copied(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    big = bytes(client.message_limit)
    await client.streams.append_many("log", [b"small", big, b"small", big])
    assert await copy_all(client, "log", "copy") == 4
    await same(other, "log", "copy")


async def test_a_copy_of_a_copy_is_read_and_hashes_its_keys_as_the_first(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("first", topic="t")
    await client.publish("t", b"published")
    await client.flush()
    await client.streams.append("first", b"1", key="AA")
    await copy_all(client, "first", "second")
    await client.streams.promote("second", record=False)
    await client.streams.append("second", b"2", key="AA")
    await copy_all(client, "second", "third")
    await same(other, "second", "third")
    await client.streams.promote("third", record=False)
    await client.streams.append("third", b"3", key="AA")
    found, gaps = await whole(other, "third")
    assert [(m.name, m.payload) for m in found] == [
        ("t", b"published"), ("first", b"1"), ("second", b"2"), ("third", b"3"),
    ]  # fmt: skip
    assert gaps == []
    assert len({item.key_hash for item in (await fetched(client, "third"))[1:]}) == 1


# -- what a copy refuses ---------------------------------------------------------------------------------------


async def test_a_copy_takes_nothing_but_copies(setting: Any) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders", topic="orders")
    await copy_all(client, "orders", "copy")
    refused = f"copy of log {made.uuid}.*promoted"
    with pytest.raises(StreamError, match=refused):
        await client.streams.append("copy", b"x")
    with pytest.raises(StreamError, match=refused):
        await client.streams.append("copy", b"x", expect=0)
    async with client.streams.stage("copy", writer="w", batch=1) as staging:
        await staging.append(b"x")
        with pytest.raises(StreamError, match=refused):
            await staging.finish()
    with pytest.raises(StreamError, match=refused):
        await client.streams.commit("copy", writer="w", batch=1, attempts=[])
    await other.publish("orders", b"recorded once")
    await other.flush()
    await cluster.settle()
    assert (await client.streams.describe("copy")).end == 0
    assert (await client.streams.describe("orders")).end == 1


async def test_a_stream_that_is_not_a_copy_takes_no_copies(setting: Any) -> None:
    _, client, _ = setting
    made = await client.streams.create("orders")
    await client.streams.create("mine")
    with pytest.raises(StreamExists, match="it is not a copy"):
        await copy_all(client, "orders", "mine")
    with pytest.raises(StreamError, match="it is not a copy"):
        await client.streams.promote("mine")
    call = Copy(bytes.fromhex(made.uuid), 0, 5, [Hole(0, 5, 1)])
    with pytest.raises(StreamError, match="is not a copy"):
        await client.streams._stores.ask_stream("mine", "", call, Copied, timeout=5.0)


@pytest.mark.parametrize(
    ("start", "next_", "items", "said"),
    [
        (1, 6, [Hole(1, 4, 1), Hole(3, 6, 1)], "expected an item that begins at"),
        (1, 6, [Hole(1, 4, 1), Hole(5, 6, 1)], "expected an item that begins at"),
        (1, 6, [Hole(0, 6, 1)], "expected an item that begins at"),
        (1, 6, [Hole(1, 5, 1)], "end at offset 5; they must end at 6"),
        (1, 4, [Hole(1, 5, 1)], "end at offset 5; they must end at 4"),
        (1, 1, [Hole(1, 1, 1)], "expected an item that begins at"),
        (1, 6, [Hole(1, 6, 4)], "deferred"),
        (1, 6, [Hole(1, 6, 9)], "9"),
        (1, (1 << 63) - 1, [Hole(1, 6, 1)], "must end at"),
    ],
)
async def test_items_that_do_not_lie_side_by_side_are_refused_and_change_nothing(
    setting: Any, start: int, next_: int, items: list[Any], said: str
) -> None:
    _, client, _ = setting
    made = await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    await copy_all(client, "orders", "copy")
    before = await fetched(client, "copy")
    call = Copy(bytes.fromhex(made.uuid), start, next_, items)
    with pytest.raises(StreamError, match=said):
        await client.streams._stores.ask_stream("copy", "", call, Copied, timeout=5.0)
    assert await fetched(client, "copy") == before
    await client.streams.append("orders", b"y")
    assert await copy_all(client, "orders", "copy") == 1


async def test_a_copy_that_comes_again_or_of_another_log_changes_nothing(setting: Any) -> None:
    _, client, _ = setting
    made = await client.streams.create("orders")
    await copy_all(client, "orders", "copy")

    async def ask(uuid: bytes, start: int, next_: int, high_water: int = 0) -> Copied:
        items = [Hole(start, next_, 1)] if next_ > start else []
        call = Copy(uuid, start, next_, items, high_water)
        return await client.streams._stores.ask_stream("copy", "", call, Copied, timeout=5.0)

    uuid = bytes.fromhex(made.uuid)
    assert await ask(uuid, 0, 5) == Copied(5, True)
    assert await ask(uuid, 0, 5) == Copied(5)
    assert await ask(uuid, 3, 9) == Copied(5)
    assert await ask(uuid, 7, 9) == Copied(5)
    assert await ask(uuid, 5, 5, 12) == Copied(5)
    assert (await client.streams.describe("copy")).lag == 7
    with pytest.raises(StreamError, match=f"copy of log {made.uuid}, not of"):
        await ask(bytes(16), 5, 6)
    await client.streams.pause("copy")
    with pytest.raises(StreamError, match="paused"):
        await ask(uuid, 5, 6)


async def test_names_that_make_no_sense_are_refused_before_anything_is_sent(setting: Any) -> None:
    _, client, _ = setting
    for source, name in (("orders", "orders"), ("orders.dead", "copy"), ("orders", "eu:copy")):
        with pytest.raises(ConfigError):
            client.streams.mirror(source, name)
    with pytest.raises(iris.InvalidName):
        client.streams.mirror("orders", "copy.dead")
    with pytest.raises(NoStream, match="nothing"):
        await copy_all(client, "nothing", "copy")
    assert await client.streams.list() == []


# -- keys --------------------------------------------------------------------------------------------------------


async def test_a_copy_is_kept_under_every_key_of_its_source_and_takes_later_ones(
    tmp_path: Path,
) -> None:
    names, topics, default = (ClusterKey(bytes([n]) * 32) for n in (1, 2, 3))
    keyring = Keyring.single(default).add("orders", names).add("topic:t", topics)
    async with LocalCluster(data=tmp_path) as cluster:
        async with cluster.client(keyring=keyring) as client:
            await client.streams.create("orders", topic="t.*")
            await client.publish("t.a", b"0")
            await client.flush()
            await cluster.settle()
            await client.streams.append("orders", b"1")
            await copy_all(client, "orders", "copy")
            info = await client.streams.describe("copy")
            assert set(info.key_ids) == {key.key_id.hex() for key in (names, topics, default)}
            assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"0", b"1"]
            assert await client.streams.share_keys() == []
        later = ClusterKey(b"l" * 32)
        rotated = keyring.add("orders", later).promote("orders")
        async with cluster.client(keyring=rotated) as client:
            changed = await client.streams.share_keys()
            assert [info.name for info in changed] == ["copy", "orders"]
            assert all(later.key_id.hex() in info.key_ids for info in changed)
            await client.streams.append("orders", b"2")
            await copy_all(client, "orders", "copy")
            await same(client, "orders", "copy")


async def test_a_copy_records_under_the_keys_that_promoted_it(tmp_path: Path) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    both = Keyring.single(old).add("default", new)
    async with LocalCluster(data=tmp_path) as cluster:
        async with cluster.client(keyring=both) as client:
            await client.streams.create("orders", topic="orders")
            await copy_all(client, "orders", "copy")
        async with cluster.client(keyring=Keyring.single(new)) as client:
            await client.streams.promote("copy")
            await client.publish("orders", b"under the new")
            await client.flush()
            async with cluster.client(keyring=Keyring.single(old)) as other:
                await other.publish("orders", b"under the old")
                await other.flush()
                await cluster.settle()
            assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"under the new"]
            await cluster.stop_store()
            await cluster.start_store()
            await client.publish("orders", b"again")
            await client.flush()
            await cluster.settle()
            assert (await whole(client, "copy"))[0][-1].payload == b"again"
