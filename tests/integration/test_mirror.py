"""Mirrors: a copy has what its source has, at the same offsets, goes on over every end of a process, and is a stream once promoted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from integration.stores import stored
from msgspec import structs
from support.commands import Shell, dev_relay, place
from support.stores import Rig
from support.waiting import until as turns_until
from support.waiting import wait_until

import iris
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConfigError, NoStream, StreamError, StreamExists, StreamUnavailable
from iris.streams import StreamGap, mirroring
from iris.testing import LocalCluster
from iris.wire.streams import Copied, Copy, Fetch, Fetched, Hole
from relay.store.process import StoreProcess

WAIT_S = 20.0


@asynccontextmanager
async def second_store(cluster: LocalCluster, directory: Path) -> AsyncIterator[StoreProcess]:
    """Yield another store of the cluster."""
    os.makedirs(directory, exist_ok=True)
    store = StoreProcess(directory, cluster._connect, entropy=os.urandom)
    store.open()
    running = asyncio.create_task(store.run())
    try:
        await store.up.wait()
        await cluster.settle()
        yield store
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def whole(client: iris.Client, name: str, start: Any = "first") -> tuple[list[Any], Any]:
    """Return all messages and gaps of a stream."""
    async with client.streams.read(name, start, follow=False) as reader:
        return [message async for message in reader], list(reader.gaps)


async def copy_all(client: iris.Client, source: str, name: str, **options: Any) -> int:
    """Copy up to the end; return how many messages that were."""
    async with client.streams.mirror(
        source, name, follow=False, patience=10.0, **options
    ) as mirror:
        await mirror.run()
        assert mirror.lag == 0
        return mirror.copied


async def same(client: iris.Client, source: str, name: str) -> None:
    """Assert that a copy has what its source has: messages with all that is told of them, and gaps."""
    assert await whole(client, source) == await whole(client, name)


async def fetched(client: iris.Client, name: str) -> list[Any]:
    """Return the items of a stream as its store tells them."""
    call = Fetch(0, 1 << 20)
    found = await client.streams._stores.ask_stream(name, "", call, Fetched, timeout=5.0)
    return found.items


async def come_to(client: iris.Client, name: str, offset: int) -> None:
    """Return when a stream has come to an offset."""
    async with asyncio.timeout(WAIT_S):
        while (await client.streams.describe(name, timeout=WAIT_S)).next < offset:  # noqa: ASYNC110 - a poll over processes
            await asyncio.sleep(0.005)


async def log_of(cluster: LocalCluster, client: iris.Client, name: str) -> Any:
    """Return the log of a stream at its store."""
    uuid = (await client.streams.describe(name)).uuid
    return cluster.store.store.streams[bytes.fromhex(uuid)].log


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
    assert (await client.streams.describe("copy")).next == 2  # it is no member
    assert (await client.streams.describe("bills")).next == 3


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
        assert (await asyncio.wait_for(anext(work), WAIT_S)).payload == b"now"
    log = await log_of(cluster, client, "copy")
    assert log.due(1 << 62) == [(int(due.timestamp() * 1e6), 0)]


async def test_gaps_are_copied_and_told_as_in_the_source(setting: Any) -> None:
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
        handed = [(await asyncio.wait_for(anext(work), WAIT_S)).offset for _ in range(20)]
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
    assert (info.max_messages, info.oldest, info.next) == (5, 25, 30)
    assert [m.offset for m in (await whole(other, "copy"))[0]] == list(range(25, 30))
    with pytest.raises(StreamExists, match="another max_messages, 5"):
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
    assert (await client.streams.describe("copy")).next == 0
    assert (await client.streams.describe("orders")).next == 1


async def test_a_stream_that_is_no_copy_takes_no_copies(setting: Any) -> None:
    _, client, _ = setting
    made = await client.streams.create("orders")
    await client.streams.create("mine")
    with pytest.raises(StreamExists, match="it is no copy"):
        await copy_all(client, "orders", "mine")
    with pytest.raises(StreamError, match="it is not a copy"):
        await client.streams.promote("mine")
    call = Copy(bytes.fromhex(made.uuid), 0, 5, [Hole(0, 5, 1)])
    with pytest.raises(StreamError, match="takes no copies: it is no copy"):
        await client.streams._stores.ask_stream("mine", "", call, Copied, timeout=5.0)


@pytest.mark.parametrize(
    ("start", "next_", "items", "said"),
    [
        (1, 6, [Hole(1, 4, 1), Hole(3, 6, 1)], "does not follow"),
        (1, 6, [Hole(1, 4, 1), Hole(5, 6, 1)], "does not follow"),
        (1, 6, [Hole(0, 6, 1)], "does not follow"),
        (1, 6, [Hole(1, 5, 1)], "end at 5 instead of 6"),
        (1, 4, [Hole(1, 5, 1)], "end at 5 instead of 4"),
        (1, 1, [Hole(1, 1, 1)], "does not follow"),
        (1, 6, [Hole(1, 6, 4)], "deferred"),
        (1, 6, [Hole(1, 6, 9)], "9"),
        (1, (1 << 63) - 1, [Hole(1, 6, 1)], "instead of"),
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


# -- going on --------------------------------------------------------------------------------------------------


async def test_a_mirror_follows_its_source_and_tells_its_lag(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        for number in range(100):
            await client.streams.append("log", b"%d" % number)
        await come_to(client, "copy", 100)
        await turns_until(lambda: mirror.next == 100)
        assert (mirror.copied, mirror.lag, mirror.source_next) == (100, 0, 100)
        with pytest.raises(StreamError, match="runs already"):
            await mirror.run()
        info = await client.streams.describe("copy")
        assert (info.lag, info.source, info.heard_us > 0) == (0, "log", True)
        await mirror.close()
        await asyncio.wait_for(running, WAIT_S)
    with pytest.raises(iris.Closed):
        await mirror.run()
    await same(client, "log", "copy")
    assert (await client.streams.describe("log")).lag is None


async def test_a_reader_and_workers_of_a_copy_get_what_is_copied_at_once(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        reader = client.streams.read("copy")
        work = client.streams.consumer("copy", "work")
        for number in range(5):
            waiting = [asyncio.create_task(anext(held)) for held in (reader, work)]
            await asyncio.sleep(0)
            assert await client.streams.append("log", b"%d" % number) == number
            got = await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
            assert [(m.offset, m.payload) for m in got] == [(number, b"%d" % number)] * 2
        for held in (reader, work):
            await held.close()
    await running


async def test_two_mirrors_that_begin_while_the_source_grows_agree(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    mirrors = [copy_all(one, "log", "copy") for one in (client, other, client, other)]
    await asyncio.gather(client.streams.append_many("log", [bytes(500)] * 2000), *mirrors)
    await copy_all(other, "log", "copy")
    await same(client, "log", "copy")


async def test_the_lag_is_what_the_copy_lacks(setting: Any, monkeypatch: Any) -> None:
    _, client, other = setting
    monkeypatch.setattr(mirroring, "FETCH_BYTES", 10_000)
    await client.streams.create("log")
    await client.streams.append_many("log", [bytes(5000)] * 40)
    async with other.streams.mirror("log", "copy") as mirror:
        assert (mirror.lag, mirror.source_next, mirror.next) == (40, 40, 0)
        running = asyncio.create_task(mirror.run())
        lags = []
        async with asyncio.timeout(WAIT_S):
            while mirror.lag:
                await asyncio.sleep(0)
                lags.append((await client.streams.describe("copy")).lag)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    told = [lag for lag in lags if lag is not None]
    assert told == sorted(told, reverse=True)
    assert (await client.streams.describe("copy")).lag == 0


async def test_a_cancelled_mirror_goes_on_where_it_was(setting: Any, monkeypatch: Any) -> None:
    _, client, other = setting
    monkeypatch.setattr(mirroring, "FETCH_BYTES", 4000)
    await client.streams.create("log")
    await client.streams.append_many("log", [b"%d" % n + bytes(500) for n in range(3000)])
    reached = 0
    for turns in range(1, 400):
        running = asyncio.create_task(copy_all(other, "log", "copy"))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if turns % 40 == 0:
            info = await client.streams.describe("copy")
            assert info.next >= reached
            reached = info.next
    assert reached > 0
    await copy_all(other, "log", "copy")
    await same(client, "log", "copy")


async def test_two_mirrors_at_once_write_nothing_twice(setting: Any, monkeypatch: Any) -> None:
    _, client, other = setting
    monkeypatch.setattr(mirroring, "FETCH_BYTES", 20_000)
    await client.streams.create("log")
    mirrors: list[Any] = []

    async def run(one: iris.Client) -> None:
        async with one.streams.mirror("log", "copy") as mirror:
            mirrors.append(mirror)
            with contextlib.suppress(asyncio.CancelledError):
                await mirror.run()

    running = [asyncio.create_task(run(one)) for one in (client, other, client)]
    for part in range(20):
        messages = [b"%d" % n + bytes(300) for n in range(100 * part, 100 * part + 100)]
        await client.streams.append_many("log", messages)
    await turns_until(lambda: [mirror.next for mirror in mirrors] == [2000] * 3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running)
    assert sum(mirror.copied for mirror in mirrors) == 2000
    await same(other, "log", "copy")
    assert len(await client.streams.list()) == 2


async def test_a_mirror_goes_on_over_restarts_of_either_store(tmp_path: Path) -> None:
    async with stored(tmp_path / "one") as (cluster, client, other):
        source = await client.streams.create("log")
        await client.streams.append("log", b"0")
        stores = contextlib.AsyncExitStack()
        second = await stores.enter_async_context(second_store(cluster, tmp_path / "two"))
        real = other.streams._stores.store

        async def at_the_second(*, timeout: float) -> Any:
            found = await real(timeout=timeout)
            return structs.replace(found, key=second.store.key.public_key)

        other.streams._stores.store = at_the_second
        async with other.streams.mirror("log", "copy") as mirror:
            running = asyncio.create_task(mirror.run())
            at = 1
            for part in range(6):
                if part % 2:
                    await cluster.stop_store()
                    await cluster.start_store()
                else:
                    await stores.aclose()
                    await stores.enter_async_context(second_store(cluster, tmp_path / "two"))
                offsets = await client.streams.append_many("log", [b"%d" % n for n in range(20)])
                assert offsets == list(range(at, at + 20))
                at += 20
            await come_to(client, "copy", at)
            assert not running.done()
            info = await client.streams.describe("copy")
            assert info.store != source.store
        await asyncio.wait_for(running, WAIT_S)
        await same(client, "log", "copy")
        await stores.aclose()


async def test_a_mirror_goes_on_over_a_restart_of_the_relay(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        for number in range(10):
            await client.streams.append("log", b"%d" % number)
        await cluster.stop_relay()
        cluster.store.up.clear()
        await cluster.start_relay()
        for number in range(10, 20):
            await client.streams.append("log", b"%d" % number, timeout=20.0)
        await come_to(client, "copy", 20)
    await asyncio.wait_for(running, WAIT_S)
    await same(client, "log", "copy")


async def test_a_mirror_says_what_it_waits_for_and_gives_up_when_it_has_no_more_patience(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async with stored(tmp_path / "one") as (cluster, client, other):
        await client.streams.create("log")
        async with other.streams.mirror("log", "copy", patience=0.5) as mirror:
            # Only while there is no store: one that is busy may take longer.
            with monkeypatch.context() as hasty:
                hasty.setattr(mirroring, "TRY_S", 0.2)
                running = asyncio.create_task(mirror.run())
                await come_to(client, "copy", 0)
                await cluster.stop_store()
                with pytest.raises((StreamUnavailable, NoStream)):
                    await asyncio.wait_for(running, WAIT_S)
            assert mirror.waiting
            await cluster.start_store()
            await client.streams.append("log", b"x")
            running = asyncio.create_task(mirror.run())
            await come_to(client, "copy", 1)


async def test_a_source_that_was_created_again_is_never_mixed_in(setting: Any) -> None:
    _, client, other = setting
    old = await client.streams.create("log")
    await client.streams.append("log", b"old")
    mirror = other.streams.mirror("log", "copy")
    async with mirror:
        running = asyncio.create_task(mirror.run())
        await come_to(client, "copy", 1)
        await client.streams.delete("log")
        with contextlib.suppress(StreamError):
            await client.streams.create("log")
        await client.streams.append_many("log", [b"new", b"newer"])
        new = await client.streams.describe("log")
        with pytest.raises(StreamError) as told:
            await asyncio.wait_for(running, WAIT_S)
        assert isinstance(told.value, NoStream) or new.uuid in str(told.value)
    with pytest.raises(StreamError, match=f"copy of log {old.uuid}, and log is log {new.uuid}"):
        await copy_all(client, "log", "copy")
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"old"]


async def test_a_source_that_lost_its_end_is_told(setting: Any) -> None:
    _, client, _ = setting
    made = await client.streams.create("log")
    await copy_all(client, "log", "copy")
    call = Copy(bytes.fromhex(made.uuid), 0, 5, [Hole(0, 5, 1)])
    await client.streams._stores.ask_stream("copy", "", call, Copied, timeout=5.0)
    with pytest.raises(StreamError, match="it ends at 0, and its copy copy at 5"):
        await copy_all(client, "log", "copy")


async def test_a_mirror_whose_copy_is_deleted_says_so_and_makes_no_other(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await client.streams.append("log", b"x")
        await come_to(client, "copy", 1)
        await client.streams.delete("copy")
        await client.streams.append("log", b"y")
        await turns_until(lambda: mirror.waiting or running.done())
        assert not running.done()
        assert "copy" in mirror.waiting
        assert [info.name for info in await client.streams.list()] == ["log"]
    await asyncio.gather(running, return_exceptions=True)


# -- promoting ---------------------------------------------------------------------------------------------------


async def test_a_promoted_copy_goes_on_as_a_stream(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders.>", compact=True)
    await client.publish("orders.eu", b"0")
    await client.flush()
    await cluster.settle()
    await client.streams.append("orders", b"1", key="AA")
    async with other.streams.mirror("orders", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await come_to(client, "copy", 2)
        reader = other.streams.read("copy")
        work = other.streams.consumer("copy", "work")
        assert [(await anext(reader)).offset for _ in range(2)] == [0, 1]
        for _ in range(2):
            work.ack(await anext(work))
        await client.streams.delete("orders")
        promoted = await client.streams.promote("copy")
        assert (promoted.mirror, promoted.topic, promoted.lag, promoted.next) == (
            "", "orders.>", None, 2,
        )  # fmt: skip
        with contextlib.suppress(StreamError):
            await asyncio.wait_for(running, WAIT_S)
    again = await client.streams.promote("copy")
    assert (again.uuid, again.key_ids) == (promoted.uuid, promoted.key_ids)
    assert await client.streams.append("copy", b"2", key="AA") == 2
    await client.publish("orders.us", b"3")
    await client.flush()
    await cluster.settle()
    for held in (reader, work):
        found = [await asyncio.wait_for(anext(held), WAIT_S) for _ in range(2)]
        assert [(m.offset, m.payload) for m in found] == [(2, b"2"), (3, b"3")]
        await held.close()
    items = await fetched(client, "copy")
    assert items[1].key_hash == items[2].key_hash != b""
    await client.streams.change("copy", compact=True)
    log = await log_of(cluster, client, "copy")
    assert log.compact(cluster.store.store.now_us)
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"0", b"2", b"3"]


async def test_a_promoted_copy_is_one_after_a_restart_and_takes_no_copies(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders")
    await client.streams.append("orders", b"0")
    await copy_all(client, "orders", "copy")
    await client.streams.promote("copy")
    await cluster.stop_store()
    await cluster.start_store()
    await other.publish("orders", b"1")
    await other.flush()
    await cluster.settle()
    found, gaps = await whole(client, "copy")
    assert [m.payload for m in found] == [b"0", b"1"]
    assert [gap.cause for gap in gaps] == ["the store was not running"]
    with pytest.raises(StreamExists, match="it was promoted"):
        await copy_all(client, "orders", "copy")


async def test_a_running_mirror_ends_when_its_copy_is_promoted(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    async with other.streams.mirror("log", "copy") as mirror:
        running = asyncio.create_task(mirror.run())
        await client.streams.append("log", b"0")
        await come_to(client, "copy", 1)
        await client.streams.promote("copy")
        await client.streams.append("log", b"1")
        with pytest.raises(StreamError, match="it was promoted"):
            await asyncio.wait_for(running, WAIT_S)
    assert await client.streams.append("copy", b"own") == 1


async def test_a_copy_that_is_promoted_without_recording_takes_appends_alone(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("bills", cluster="billing")
    await copy_all(client, "bills", "copy")
    info = await client.streams.promote("copy", record=False)
    assert (info.topic, info.cluster) == ("", "")
    await client.streams.delete("bills")
    assert len(await client.members("billing")) == 0
    assert await client.streams.append("copy", b"x") == 0
    assert await client.streams.append_many("copy", [b"y"]) == [1]


async def test_a_promoted_copy_of_a_cluster_takes_its_pushes(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("bills", cluster="billing")
    await copy_all(client, "bills", "copy")
    await client.streams.delete("bills")
    assert (await client.streams.promote("copy")).cluster == "billing"
    await other.push("billing", b"one")
    await other.broadcast("billing", b"two")
    await other.flush()
    await cluster.settle()
    assert [m.payload for m in (await whole(client, "copy"))[0]] == [b"one", b"two"]


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


# -- killed processes --------------------------------------------------------------------------------------------

MIRROR = """
import asyncio, sys, iris

async def main():
    key = iris.ClusterKey(bytes(range(32)))
    async with iris.connect(sys.argv[1], keyring=iris.Keyring.single(key)) as client:
        async with client.streams.mirror("log", "copy") as mirror:
            print("copying", flush=True)
            await mirror.run()

asyncio.run(main())
"""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="iris-mirror-") as name, Rig(Path(name)) as rig:
        yield rig


@pytest.mark.timeout(120)
async def test_killed_mirrors_and_stores_leave_a_copy_that_goes_on(rig: Rig) -> None:
    rig.start_relay()
    await rig.serve()
    mirrors: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", MIRROR, str(rig.socket)], env=rig.environ, stdout=subprocess.PIPE
        )
        mirrors.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"copying\n"
        return process

    try:
        async with rig.client() as client:
            await client.streams.create("log")
            total = 0
            process = start()
            for turn in range(6):
                messages = [b"%d" % n + bytes(2000) for n in range(total, total + 1000)]
                appending = asyncio.create_task(
                    client.streams.append_many("log", messages, timeout=60.0)
                )
                await asyncio.sleep(0.02 * (turn + 1))
                if turn % 2:
                    rig.end_store(signal.SIGKILL)
                    await rig.serve()
                else:
                    process.kill()
                    process.wait()
                    process = await asyncio.to_thread(start)
                await appending
                total += 1000
            await come_to(client, "copy", total)
            found, gaps = await whole(client, "copy")
            assert ([m.offset for m in found], gaps) == (list(range(total)), [])
            assert all(m.payload.startswith(b"%d\0" % m.offset) for m in found)
            await same(client, "log", "copy")
    finally:
        for process in mirrors:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """A shell beside a relay with a store."""
    with place("iris-mirror-") as root, dev_relay(root, "--data", str(root / "data")):
        shell = Shell(root)
        wait_until(lambda: _made(shell))
        yield shell
        shell.finish()


def _made(shell: Shell) -> bool:
    with contextlib.suppress(AssertionError):
        shell("stream", "create", "log")
        return True
    return False


def facts(shell: Shell, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shell("stream", "info", name, "--json"))
    return found


@pytest.mark.timeout(120)
def test_the_command_copies_follows_and_promotes(shell: Shell) -> None:
    for text in ("one", "two"):
        shell("stream", "append", "log", text)
    assert shell("stream", "mirror", "log", "copy") == b""
    assert shell("stream", "read", "copy") == b"one\ntwo\n"
    source = facts(shell, "log")["uuid"]
    info = facts(shell, "copy")
    assert (info["mirror"], info["source"], info["lag"], info["next"]) == (source, "log", 0, 2)
    said = dict(line.split("\t") for line in shell("stream", "info", "copy").decode().splitlines())
    assert (said["records"], said["source"], said["lag"]) == ("copy of log", "log", "0")
    assert b"copy of log" in shell("stream", "list")

    for number in (signal.SIGINT, signal.SIGTERM):
        process = shell.start("stream", "mirror", "log", "copy", "--follow", "-v")
        ends = facts(shell, "log")["next"] + 1
        shell("stream", "append", "log", "more")
        figures = f"copy: copied 1, next {ends}, lag 0".encode()
        assert process.stderr is not None
        # The store has it before the mirror has heard so.
        while figures not in (said := process.stderr.readline()):
            assert said, "it ended without saying so"
        assert facts(shell, "copy")["next"] == ends
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, b"")
        assert figures in err

    assert b"promoted" in shell("stream", "append", "copy", "no", code=1)
    assert b"not a copy" in shell("stream", "promote", "log", code=1)
    assert shell("stream", "promote", "copy") == b"4\n"
    assert shell("stream", "append", "copy", "own") == b"4\n"
    assert b"promoted" in shell("stream", "mirror", "log", "copy", code=1)
    assert b"nothing" in shell("stream", "mirror", "nothing", "copy2", code=3)
    assert "lag" not in shell("stream", "info", "copy").decode().split()
