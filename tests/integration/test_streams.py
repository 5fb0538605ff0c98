"""Durable streams from end to end in one process: created, written, read, changed, deleted, and through restarts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from integration.stores import whole

import iris
from iris.errors import (
    AmbiguousStream,
    NoStream,
    StreamError,
    StreamExists,
    StreamUnavailable,
)
from iris.streams import StreamGap
from iris.testing import LocalCluster
from iris.wire.codec import END, HOP
from iris.wire.frames import Declare
from iris.wire.kinds import Kind

# -- creating ------------------------------------------------------------------------------------------------


async def test_creating_a_stream_again_returns_it(setting: Any) -> None:
    _, client, other = setting
    made = await client.streams.create("orders", topic="orders.>", max_messages=1000)
    again = await other.streams.create("orders", topic="orders.>", max_messages=1000)
    assert made.uuid == again.uuid
    assert (made.end, made.topic, made.max_messages) == (0, "orders.>", 1000)


async def test_a_stream_that_is_defined_otherwise_is_not_created_and_its_holder_is_named(
    setting: Any,
) -> None:
    _, client, other = setting
    made = await client.streams.create("orders", topic="orders.>")
    with pytest.raises(StreamExists, match=rf"{made.host}.*{made.uuid}.*topic"):
        await other.streams.create("orders", topic="orders.eu")


async def test_two_who_create_one_stream_at_once_get_the_same(setting: Any) -> None:
    _, client, other = setting
    one, two = await asyncio.gather(client.streams.create("orders"), other.streams.create("orders"))
    assert one.uuid == two.uuid
    assert len(await client.streams.list()) == 1


async def test_without_a_store_creating_is_refused_with_the_reason() -> None:
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(StreamUnavailable, match="iris relay --data DIR"):
            await client.streams.create("orders")


async def test_a_stream_that_is_not_there_is_named_at_once(setting: Any) -> None:
    _, client, _ = setting
    for call in (
        client.streams.describe("nothing"),
        client.streams.append("nothing", b"x", timeout=5.0),
        anext(aiter(client.streams.read("nothing"))),
        client.streams.delete("nothing"),
    ):
        with pytest.raises(NoStream, match="nothing"):
            await call


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.dead", {}),
        ("no spaces", {}),
        ("orders", {"topic": "a..b"}),
        ("orders", {"topic": "a", "cluster": "b"}),
        ("orders", {"max_bytes": -1}),
    ],
)
async def test_a_bad_definition_is_refused_before_anything_is_sent(
    setting: Any, name: str, options: dict[str, Any]
) -> None:
    _, client, _ = setting
    with pytest.raises(iris.IrisError):
        await client.streams.create(name, **options)
    assert await client.streams.list() == []


async def test_a_stream_is_not_a_member_of_a_cluster_of_its_name(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    assert len(await client.members("orders")) == 0
    with pytest.raises(iris.NoMembers):
        await client.request("orders", b"?", timeout=5.0)


# -- recording -----------------------------------------------------------------------------------------------


async def test_what_is_published_to_a_matching_topic_is_recorded_once_and_in_order(
    setting: Any,
) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    for number in range(500):
        await other.publish("orders.eu" if number % 2 else "orders.us", b"%d" % number)
        await other.publish("invoices.eu", b"not this")
        if number % 50 == 0:
            await asyncio.sleep(0)
    await other.flush()
    await cluster.settle()
    found = await whole(client, "orders")
    assert [m.offset for m in found] == list(range(500))
    for name, first in (("orders.us", 0), ("orders.eu", 1)):
        numbers = [int(m.payload) for m in found if m.name == name]
        assert numbers == list(range(first, 500, 2))


async def test_a_live_subscriber_gets_what_a_stream_records_too(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    received: list[bytes] = []
    async with client.subscribe("orders.*", lambda m: received.append(m.payload)):
        for number in range(100):
            await other.publish("orders.eu", b"%d" % number)
        await other.flush()
        await cluster.settle()
    assert received == [b"%d" % number for number in range(100)]
    assert [m.payload for m in await whole(client, "orders")] == received


async def test_two_streams_of_overlapping_filters_record_one_message_each(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("all", topic="orders.>")
    await client.streams.create("europe", topic="orders.eu")
    await client.streams.create("again", topic="orders.eu")
    await other.publish("orders.eu", b"x")
    await other.flush()
    await cluster.settle()
    for name in ("all", "europe", "again"):
        assert [m.payload for m in await whole(client, name)] == [b"x"]


async def test_a_stream_takes_its_share_of_a_clusters_pushes_and_all_its_broadcasts(
    setting: Any,
) -> None:
    cluster, client, other = setting
    await client.streams.create("billing", cluster="billing")
    service = iris.Service("billing")
    pushed: list[bytes] = []
    received: list[bytes] = []
    service.on_push(pushed.append)
    service.on_broadcast(received.append)
    async with other.serve(service):
        for number in range(200):
            await client.push("billing", b"p%d" % number)
            await client.broadcast("billing", b"b%d" % number)
        await client.flush()
        await cluster.settle()
    assert not client.losses
    payloads = [m.payload for m in await whole(client, "billing")]
    recorded = [p for p in payloads if p[:1] == b"p"]
    assert recorded, "the stream had no share of the pushes"
    assert sorted(recorded + pushed) == sorted(b"p%d" % number for number in range(200))
    assert received == [b"b%d" % number for number in range(200)]
    assert [p for p in payloads if p[:1] == b"b"] == received


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.BROADCAST])
async def test_a_stream_of_a_cluster_records_nothing_of_another_whatever_the_relay_says(
    setting: Any, kind: int
) -> None:
    cluster, client, _ = setting
    await client.streams.create("billing", cluster="billing")
    relay = cluster.relay
    key = client.keyring.for_cluster("billing")[0].key_id
    (load,) = relay.router.interest.loads("billing", key, kind)
    session = load.neighbor
    for alias, (name, key_id) in enumerate((("other", key), ("billing", b"?" * 16))):
        declared = Declare(60_000 + alias, kind, name, key_id, bytes(16), True, [], load.serial)
        frame = HOP.pack(86, kind, 0, 60_000 + alias, 1 << 63, 0) + END.pack(0, 0, 1, 0) + bytes(40)
        session.control(declared)
        session.port.control(frame)
    relay.driver.settle()
    await client.push("billing", b"its own")
    await client.flush()
    await cluster.settle()
    assert [(m.offset, m.payload) for m in await whole(client, "billing")] == [(0, b"its own")]


async def test_headers_and_objects_come_back_as_they_were_published(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders")
    await other.publish("orders", {"total": 7}, headers={"trace": "1"})
    await other.flush()
    await cluster.settle()
    await client.streams.append("orders", "text", headers={"trace": "2"})
    first, second = await whole(client, "orders")
    assert (first.value, first.headers) == ({"total": 7}, {"trace": "1"})
    assert (second.payload, second.headers, second.name) == (b"text", {"trace": "2"}, "orders")


async def test_a_paused_stream_records_nothing_and_says_so_in_a_gap(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders")
    await client.streams.append("orders", b"before")
    await client.streams.pause("orders")
    await other.publish("orders", b"missed")
    await other.flush()
    await cluster.settle()
    with pytest.raises(StreamError, match="paused"):
        await client.streams.append("orders", b"refused")
    await client.streams.resume("orders")
    await other.publish("orders", b"after")
    await other.flush()
    await cluster.settle()
    async with client.streams.read("orders", follow=False) as reader:
        assert [m.payload async for m in reader] == [b"before", b"after"]
    assert [(gap.count, gap.cause) for gap in reader.gaps] == [(None, "it was paused")]


# -- reading -------------------------------------------------------------------------------------------------


async def test_a_reader_starts_where_it_is_told(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    await client.streams.append_many("log", [b"%d" % n for n in range(100)])
    between = datetime.now(UTC)
    await asyncio.sleep(0.01)
    await client.streams.append("log", b"100")
    for start, first in (("first", 0), ("last", 100), (37, 37), (between, 100), (101, None)):
        numbers = [int(m.payload) for m in await whole(other, "log", start)]
        assert numbers == ([] if first is None else list(range(first, 101))), start
    with pytest.raises(StreamError, match="beyond the end"):
        await whole(other, "log", 102)
    assert await whole(other, "log", datetime.now(UTC) + timedelta(hours=1)) == []


async def test_a_reader_follows_what_comes(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    await client.streams.append("log", b"old")
    async with other.streams.read("log", 1) as reader:
        for number in range(20):
            waiting = asyncio.create_task(anext(reader))
            await asyncio.sleep(0)
            await client.streams.append("log", b"%d" % number)
            assert (await waiting).payload == b"%d" % number
    assert reader.offset == 21


async def test_batches_are_lists_of_neighbouring_messages(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    await client.streams.append_many("log", [b"x" * 1000] * 5000)
    sizes = []
    async with other.streams.read("log", follow=False) as reader:
        async for batch in reader.batches():
            sizes.append(len(batch))
    assert sum(sizes) == 5000
    assert max(sizes) > 500


async def test_a_cancelled_read_misses_nothing(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    found = []
    async with other.streams.read("log") as reader:
        for number in range(50):
            waiting = asyncio.create_task(anext(reader))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            waiting.cancel()
            done = await asyncio.gather(waiting, return_exceptions=True)
            found += [m.payload for m in done if not isinstance(m, BaseException)]
            await client.streams.append("log", b"%d" % number)
        while len(found) < 50:
            found.append((await anext(reader)).payload)
    assert found == [b"%d" % number for number in range(50)]


async def test_what_retention_removed_is_reported(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log", max_messages=10)
    for number in range(30):
        await client.streams.append("log", b"%d" % number)
    gaps: list[StreamGap] = []
    async with other.streams.read("log", 5, follow=False, on_gap=gaps.append) as reader:
        assert [int(m.payload) async for m in reader] == list(range(20, 30))
    assert [(gap.first, gap.end, gap.cause) for gap in gaps] == [(0, 20, "retention")] or [
        (gap.end, gap.cause) for gap in gaps
    ] == [(20, "retention")]


async def test_changed_limits_hold_from_then_on(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    for number in range(30):
        await client.streams.append("log", b"%d" % number)
    changed = await other.streams.change("log", max_messages=5)
    assert changed.max_messages == 5
    await client.streams.append("log", b"30")
    assert [int(m.payload) for m in await whole(client, "log")] == list(range(26, 31))


# -- restarts ------------------------------------------------------------------------------------------------


async def test_a_store_that_comes_back_has_everything_and_notes_that_it_was_away(
    setting: Any,
) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders", topic="orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(100)])
    await cluster.stop_store()
    await other.publish("orders", b"nobody records this")
    await cluster.start_store()
    assert await client.streams.append("orders", b"after") == 101
    assert (await client.streams.describe("orders")).uuid == made.uuid
    async with other.streams.read("orders", follow=False) as reader:
        assert len([m async for m in reader]) == 101
    assert [(gap.first, gap.count, gap.cause) for gap in reader.gaps] == [
        (100, None, "the store was not running")
    ]


async def test_a_store_opens_a_directory_that_holds_files_it_does_not_know(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster, cluster.client() as client:
        await client.streams.create("orders")
        await client.streams.append("orders", b"kept")
        await cluster.stop_store()
        (tmp_path / "streams" / "notes.ended").write_text("not a stream")
        (tmp_path / "streams" / "lost+found").mkdir()
        await cluster.start_store()
        assert [m.payload for m in await whole(client, "orders")] == [b"kept"]
        assert (tmp_path / "streams" / "notes.ended").exists()


async def test_appends_and_a_reader_go_on_over_a_restart_of_the_store(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("log")

    async def read() -> list[int]:
        async with other.streams.read("log") as reader:
            return [int((await anext(reader)).payload) for _ in range(300)]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    appended = []
    for part in range(3):
        appended += [
            asyncio.create_task(client.streams.append("log", b"%d" % n, timeout=20.0))
            for n in range(100 * part, 100 * part + 100)
        ]
        await asyncio.sleep(0)
        await cluster.stop_store()
        await cluster.start_store()
    assert await asyncio.gather(*appended) == list(range(300))
    assert await asyncio.wait_for(reading, 20.0) == list(range(300))


async def test_appends_and_a_reader_go_on_over_a_restart_of_the_relay(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("log")
    appended = [await client.streams.append("log", b"%d" % n) for n in range(10)]
    reader = other.streams.read("log")
    assert [int((await anext(reader)).payload) for _ in range(10)] == list(range(10))
    tasks = [
        asyncio.create_task(client.streams.append("log", b"%d" % n, timeout=20.0))
        for n in range(10, 20)
    ]
    await asyncio.sleep(0)
    await cluster.stop_relay()
    cluster.store.up.clear()
    await cluster.start_relay()
    appended += await asyncio.gather(*tasks)
    assert sorted(appended) == appended
    assert len(set(appended)) == 20
    assert [int((await asyncio.wait_for(anext(reader), 20.0)).payload) for _ in range(10)] == list(
        range(10, 20)
    )
    await reader.close()


async def test_two_holders_of_one_name_are_listed_and_have_to_be_named(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path / "one") as cluster, cluster.client() as client:
        first = await client.streams.create("orders")
        await client.streams.append("orders", b"first")
        await cluster.stop_store()
        cluster.data = tmp_path / "two"
        one = cluster.store
        await cluster.start_store()
        async with cluster.client() as other:
            second = await other.streams.create("orders")
            # The first store comes back, as after a partition.
            two = cluster.store
            cluster.store = one
            one.open()
            running = asyncio.create_task(one.run())
            await one.up.wait()
            await cluster.settle()
            assert {info.uuid for info in await other.streams.list()} == {first.uuid, second.uuid}
        async with cluster.client() as other:
            with pytest.raises(AmbiguousStream, match=f"uuid={min(first.uuid, second.uuid)}"):
                await other.streams.describe("orders")
            (found,) = await whole(other, "orders", uuid=first.uuid)
            assert found.payload == b"first"
            assert await whole(other, "orders", uuid=second.uuid) == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await one.close()
        cluster.store = two


async def test_a_stream_that_is_deleted_is_gone_and_a_new_one_is_another(setting: Any) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders", topic="orders")
    await client.streams.append("orders", b"x")
    reader = other.streams.read("orders", patience=1.0)
    await anext(reader)
    await client.streams.delete("orders")
    with pytest.raises(NoStream):
        await anext(reader)
    await reader.close()
    again = await client.streams.create("orders", topic="orders")
    assert again.uuid != made.uuid
    assert await whole(other, "orders") == []
    left = sorted(path.name for path in (cluster.data / "streams").iterdir())
    assert left == sorted([again.uuid, f"{again.uuid}.orders", f"{made.uuid}.ended"])
