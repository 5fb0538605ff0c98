"""Durable streams from end to end in one process: created, written, read, changed, deleted, and through restarts."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.stores import whole
from msgspec import structs

import iris
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import (
    AmbiguousStream,
    NoStream,
    OffsetConflict,
    StreamDamaged,
    StreamError,
    StreamExists,
    StreamUnavailable,
)
from iris.streams import StreamGap
from iris.testing import LocalCluster
from iris.wire.codec import END, HOP
from iris.wire.frames import Declare, Kind
from iris.wire.streams import (
    Append,
    Create,
    Definition,
    NewRecord,
    Order,
    Refused,
    SignedOrder,
    dead_uuid,
    decode_order,
    encode,
)
from relay.store.errors import LogWriteFailed
from relay.store.records import Entry
from relay.store.stream import Stream

# -- creating ------------------------------------------------------------------------------------------------


async def test_creating_a_stream_again_returns_it(setting: Any) -> None:
    _, client, other = setting
    made = await client.streams.create("orders", topic="orders.>", max_messages=1000)
    again = await other.streams.create("orders", topic="orders.>", max_messages=1000)
    assert made.uuid == again.uuid
    assert (made.next, made.topic, made.max_messages) == (0, "orders.>", 1000)


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


async def test_a_stream_is_no_member_of_a_cluster_of_its_name(setting: Any) -> None:
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
    heard: list[bytes] = []
    async with client.subscribe("orders.*", lambda m: heard.append(m.payload)):
        for number in range(100):
            await other.publish("orders.eu", b"%d" % number)
        await other.flush()
        await cluster.settle()
    assert heard == [b"%d" % number for number in range(100)]
    assert [m.payload for m in await whole(client, "orders")] == heard


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
    heard: list[bytes] = []
    service.on_push(pushed.append)
    service.on_broadcast(heard.append)
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
    assert heard == [b"b%d" % number for number in range(200)]
    assert [p for p in payloads if p[:1] == b"b"] == heard


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


# -- appending -----------------------------------------------------------------------------------------------


async def test_appends_of_one_turn_are_stored_together_in_order(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("log")
    offsets = await asyncio.gather(*(client.streams.append("log", b"%d" % n) for n in range(1000)))
    assert offsets == list(range(1000))
    assert await client.streams.append_many("log", [b"x" * 3000] * 500) == list(range(1000, 1500))
    found = await whole(client, "log")
    assert [m.payload for m in found[:1000]] == [b"%d" % n for n in range(1000)]
    assert len(found) == 1500


async def test_a_message_at_the_limit_is_appended_and_read(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log")
    big = bytes(client.message_limit)
    assert await client.streams.append("log", big, headers={"h": "x" * 3000}) == 0
    (found,) = await whole(other, "log")
    assert found.payload == big
    with pytest.raises(iris.MessageTooLarge):
        await client.streams.append("log", big + b"x")


async def test_an_append_that_expects_another_offset_stores_nothing(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("log")
    assert await client.streams.append("log", b"0", expect=0) == 0
    with pytest.raises(OffsetConflict) as refused:
        await client.streams.append("log", b"x", expect=0)
    assert refused.value.next == 1
    assert not refused.value.may_have_run
    assert await client.streams.append("log", b"1", expect=1) == 1
    assert [m.payload for m in await whole(client, "log")] == [b"0", b"1"]


async def test_an_append_whose_time_to_live_is_over_is_a_gap_to_readers(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("log")
    await client.streams.append("log", b"short", ttl=0.05)
    await client.streams.append("log", b"long", ttl=1000.0)
    await asyncio.sleep(0.1)
    async with client.streams.read("log", follow=False) as reader:
        assert [m.payload async for m in reader] == [b"long"]
    assert [gap.cause for gap in reader.gaps] == ["expired"]


async def test_a_key_is_read_with_its_message(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"one", key="AA", headers={"a": "b"})
    await client.streams.append("orders", b"two", key=b"\xff", expect=1)
    await client.streams.append("orders", b"three")
    await asyncio.gather(*(client.streams.append("orders", b"x", key="BB") for _ in range(3)))
    async with client.streams.stage("orders", writer="w", batch=0) as staging:
        await staging.append(b"four", key="CC")
        attempt = await staging.finish()
    await client.streams.commit("orders", writer="w", batch=0, attempts=[attempt])
    found = await whole(other, "orders")
    assert [m.key for m in found] == [b"AA", b"\xff", None, b"BB", b"BB", b"BB", b"CC"]
    assert found[0].headers == {"a": "b"}
    with pytest.raises(iris.MessageTooLarge, match="key"):
        await client.streams.append("orders", b"", key=bytes(4097))


async def test_compaction_keeps_the_last_message_of_each_key(setting: Any) -> None:
    cluster, client, _ = setting
    await client.streams.create("state", compact=True)
    for number in range(30):
        await client.streams.append("state", b"%d" % number, key=f"k{number % 3}")
    await client.streams.append("state", b"", key="k0", tombstone=True)
    store = cluster.store.store
    (stream,) = store.streams.values()
    while not stream.log.compact(store.now_us):
        pass
    found = await whole(client, "state")
    assert [(m.payload, m.tombstone) for m in found] == [
        (b"28", False),
        (b"29", False),
        (b"", True),
    ]


async def test_cancelled_appends_are_stored_and_nobody_waits_for_them(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("log")
    task = asyncio.create_task(client.streams.append("log", b"gone"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await client.streams.append("log", b"next") == 1


async def test_closing_the_client_waits_for_what_it_appended(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        async with cluster.client() as client:
            await client.streams.create("log")
            tasks = [
                asyncio.create_task(client.streams.append("log", b"%d" % n)) for n in range(100)
            ]
            await asyncio.sleep(0)
        assert [await task for task in tasks] == list(range(100))


async def test_a_client_closes_at_once_after_an_append_that_failed(tmp_path: Path) -> None:
    cluster = LocalCluster(data=tmp_path)
    async with cluster, asyncio.timeout(10.0), cluster.client() as client:
        with pytest.raises(NoStream):
            await client.streams.append("nothing", b"x")
        await client.streams.create("log")
        assert await client.streams.append("log", b"x") == 0


async def test_what_a_full_disk_refuses_fails_and_what_comes_after_is_stored_once(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client, _ = setting
    await client.streams.create("log")
    await client.streams.append("log", b"0")
    (stream,) = cluster.store.store.streams.values()
    append = type(stream.log).append

    def full(self: Any, entries: Any, now_us: int) -> Any:
        raise LogWriteFailed("log", "No space left on device")

    monkeypatch.setattr(type(stream.log), "append", full)
    results = await asyncio.gather(
        *(client.streams.append("log", b"%d" % n) for n in range(1, 4)), return_exceptions=True
    )
    assert all(isinstance(r, StreamUnavailable) and r.may_have_run for r in results), results
    monkeypatch.setattr(type(stream.log), "append", append)
    assert await asyncio.gather(
        *(client.streams.append("log", b"%d" % n) for n in range(4, 8))
    ) == [1, 2, 3, 4]
    assert [m.payload for m in await whole(client, "log")] == [b"0", b"4", b"5", b"6", b"7"]


async def test_a_call_that_no_store_understands_is_refused_and_costs_nobody_anything(
    setting: Any,
) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders")
    store = cluster.store.store
    await other.status()
    session = other._attachment.session
    for body in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"op": "nonsense"}), bytes(1000)):
        waiter = asyncio.get_running_loop().create_future()
        session.calling.send(store.address, None, body, timeout_ms=5000, waiter=waiter)
        other._runtime.touch()
        assert (await waiter).code == ("channel" if body[:1] == b"\xc1" else "invalid")
    key = ClusterKey(bytes(32))
    broken = SignedOrder(b"not an order", key.public_key, key.sign_order(b"not an order"))
    for call in (Create([broken]), Append(bytes(16), [NewRecord(0, bytes(24), b"x")])):
        waiter = asyncio.get_running_loop().create_future()
        session.calling.send(store.address, None, encode(call), timeout_ms=5000, waiter=waiter)
        other._runtime.touch()
        assert isinstance(await waiter, Refused)
    assert (await client.streams.describe("orders")).uuid == made.uuid


async def test_the_first_order_of_a_deleted_stream_makes_no_new_one(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders")
    store = cluster.store.store
    (stream,) = store.streams.values()
    kept = [signed for _, signed in stream.orders.values()]
    await client.streams.delete("orders")
    await other.status()
    waiter = asyncio.get_running_loop().create_future()
    other._attachment.session.calling.send(
        store.address, None, encode(Create(kept)), timeout_ms=5000, waiter=waiter
    )
    other._runtime.touch()
    answer = await waiter
    assert (answer.code, "deleted" in answer.detail) == ("order", True)


async def test_what_its_store_says_of_a_stream_counts_only_if_our_key_signed_it(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    described = Stream.described

    def lying(self: Stream, store: bytes, label: str) -> Any:
        said = described(self, store, label)
        key = ClusterKey(b"z" * 32)
        order = decode_order(said.orders[0].order)
        wider = structs.replace(
            order, definition=structs.replace(order.definition, topic=">"), key_id=key.key_id
        )
        data = encode(wider)
        return structs.replace(
            said,
            definition=wider.definition,
            orders=[SignedOrder(data, key.public_key, key.sign_order(data))],
        )

    monkeypatch.setattr(Stream, "described", lying)
    for call in (
        other.streams.pause("orders"),
        other.streams.delete("orders"),
        other.streams.describe("orders"),
    ):
        with pytest.raises(StreamError, match="no key of this keyring signed"):
            await call
    with pytest.raises(StreamError, match="no key of this keyring signed"):
        await anext(other.streams.read("orders"))


async def test_a_record_that_the_stream_never_recorded_is_not_shown(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    await client.streams.create("wages", topic="wages")
    await other.publish("wages", b"secret")
    await other.publish("orders.eu", b"true")
    await other.flush()
    await cluster.settle()
    logs = {s.name: s.log for s in cluster.store.store.streams.values()}
    (record,) = logs["wages"].read(0, 1 << 20, now_us=0).items
    moved = Entry(
        record.kind, record.name, record.key_id, record.sender_id, record.end, record.body
    )
    logs["orders"].append([moved], 0)
    async with client.streams.read("orders", follow=False) as reader:
        assert [m.payload async for m in reader] == [b"true"]
    assert [gap.cause for gap in reader.gaps] == ["unreadable: it is not of this stream"]


async def test_a_stream_takes_no_more_keys_than_its_relay_does(setting: Any) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders", topic="orders")
    store = cluster.store.store
    definition, now_us = Definition("orders", topic="orders"), time.time_ns() // 1000
    keys = [ClusterKey(bytes([number]) * 32) for number in range(1, 65)]
    orders = []
    for key in keys:
        order = Order("keep", bytes(16), key.key_id, store.key.public_key, now_us, definition)
        orders.append(SignedOrder(encode(order), key.public_key, key.sign_order(encode(order))))
    await other.status()
    waiter = asyncio.get_running_loop().create_future()
    other._attachment.session.calling.send(
        store.address, None, encode(Create(orders)), timeout_ms=5000, waiter=waiter
    )
    other._runtime.touch()
    answer = await waiter
    assert (answer.code, "65 keys" in answer.detail) == ("full", True)
    assert (await client.streams.describe("orders")).uuid == made.uuid


async def test_nobody_makes_a_log_in_the_place_of_a_streams_dead_letters(setting: Any) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders")
    store = cluster.store.store
    key = ClusterKey(b"z" * 32)
    uuid = dead_uuid(bytes.fromhex(made.uuid))
    order = encode(Order("keep", uuid, key.key_id, store.key.public_key, 1, Definition("mine")))
    orders = [SignedOrder(order, key.public_key, key.sign_order(order))]
    await other.status()
    waiter = asyncio.get_running_loop().create_future()
    other._attachment.session.calling.send(
        store.address, None, encode(Create(orders)), timeout_ms=5000, waiter=waiter
    )
    other._runtime.touch()
    assert "dead letters" in (await waiter).detail


async def test_sequences_that_a_publisher_made_up_break_nothing(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", topic="orders")
    await other.publish("orders", b"0")
    await other.flush()
    flow = other._attachment.out.topics["orders"]
    for first in (1 << 40, 1 << 62, (1 << 63) - 5, (1 << 64) - 5):
        flow.first = first
        await other.publish("orders", b"%d" % first)
        await other.flush()
    await cluster.settle()
    assert await client.streams.append("orders", b"after") > 0
    described = await client.streams.describe("orders")
    assert described.lost > 1 << 40
    assert (await whole(client, "orders"))[-1].payload == b"after"


async def test_a_stream_is_created_again_at_once_after_its_end(setting: Any) -> None:
    _, client, _ = setting
    async with asyncio.timeout(8.0):
        for number in range(3):
            await client.streams.create("orders", topic=f"orders.{number}")
            assert await client.streams.append("orders", b"x") == 0
            await client.streams.delete("orders")


async def test_a_time_that_no_clock_shows_is_refused_and_holds_up_nothing(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("log")
    for options in ({"ttl": 1e14}, {"ttl": -1.0}, {"deliver_at": datetime(1900, 1, 1, tzinfo=UTC)}):
        with pytest.raises(iris.IrisError):
            await client.streams.append("log", b"x", **options)
    assert await client.streams.append("log", b"0") == 0


async def test_a_damaged_log_is_told_and_costs_no_other_stream(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        async with cluster.client() as client:
            bad = await client.streams.create("bad", topic="t")
            await client.streams.create("good", topic="t")
            await client.streams.append("bad", b"x")
        await cluster.stop_store()
        for path in (tmp_path / "streams" / bad.uuid).glob("MANIFEST*"):
            path.write_bytes(path.read_bytes()[:-5] + b"wrong")
        await cluster.start_store()
        async with cluster.client() as client:
            listed = {info.name: info for info in await client.streams.list()}
            assert listed["bad"].failed
            assert not listed["good"].failed
            await client.publish("t", b"y")
            await client.flush()
            await cluster.settle()
            assert [m.payload for m in await whole(client, "good")] == [b"y"]
            with pytest.raises(StreamDamaged):
                await whole(client, "bad")
            with pytest.raises(StreamError):
                await client.streams.append("bad", b"z")
            await client.streams.delete("bad")
            again = await client.streams.create("bad", topic="t")
            assert again.uuid != bad.uuid


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


async def test_what_retention_took_is_told(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("log", max_messages=10)
    for number in range(30):
        await client.streams.append("log", b"%d" % number)
    gaps: list[StreamGap] = []
    async with other.streams.read("log", 5, follow=False, on_gap=gaps.append) as reader:
        assert [int(m.payload) async for m in reader] == list(range(20, 30))
    assert [(gap.first, gap.next, gap.cause) for gap in gaps] == [(0, 20, "retention")] or [
        (gap.next, gap.cause) for gap in gaps
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


# -- keys ----------------------------------------------------------------------------------------------------


async def test_who_lacks_the_key_finds_no_stream_and_cannot_delete_it(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        stranger = Keyring.single(ClusterKey(bytes(32)))
        async with cluster.client() as client, cluster.client(keyring=stranger) as other:
            await client.streams.create("orders", topic="orders")
            with pytest.raises(NoStream):
                await other.streams.describe("orders")
            with pytest.raises(NoStream):
                await other.streams.delete("orders")
            assert await other.streams.list() == []
            assert len(await client.streams.list()) == 1


async def test_a_rotated_key_opens_the_past_while_the_keyring_has_it(tmp_path: Path) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    async with LocalCluster(data=tmp_path) as cluster:
        first = Keyring.single(old)
        async with cluster.client(keyring=first) as client:
            await client.streams.create("orders", topic="orders")
            await client.streams.append("orders", b"under the old")
        both = first.add("default", new).promote("default")
        async with cluster.client(keyring=both) as client:
            (changed,) = await client.streams.share_keys()
            assert await client.streams.share_keys() == []
            assert set(changed.key_ids) == {old.key_id.hex(), new.key_id.hex()}
            await client.streams.append("orders", b"under the new")
            await client.publish("orders", b"published under the new")
            await client.flush()
            await cluster.settle()
            assert len(await whole(client, "orders")) == 3
        async with cluster.client(keyring=both.retire("default")) as client:
            async with client.streams.read("orders", follow=False) as reader:
                payloads = [m.payload async for m in reader]
            assert payloads == [b"under the new", b"published under the new"]
            assert [gap.cause for gap in reader.gaps] == [
                f"unreadable: sealed under key {old.key_id.hex()[:8]}, which is not in our keyring"
            ]


async def test_a_reader_that_goes_on_opens_nothing_with_a_key_that_was_retired_meanwhile(
    tmp_path: Path,
) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    single = Keyring.single(old)
    both = single.add("default", new)
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client(keyring=both) as writer,
        cluster.client(keyring=single) as client,
    ):
        await writer.streams.create("orders")
        await writer.streams.append("orders", b"before")
        async with client.streams.read("orders") as reader:
            arriving = aiter(reader)
            assert (await anext(arriving)).payload == b"before"
            await client.reload_keys(both.promote("default").retire("default"))
            await writer.streams.append("orders", b"under the old")
            await writer.reload_keys(both.promote("default"))
            await writer.streams.append("orders", b"under the new")
            assert (await anext(arriving)).payload == b"under the new"
            assert [gap.cause for gap in reader.gaps] == [
                f"unreadable: sealed under key {old.key_id.hex()[:8]}, which is not in our keyring"
            ]
        proven = [s["keys"] for s in (await client.status())["sessions"]]
        assert [new.key_id.hex()[:8]] in proven


async def test_streams_of_one_topic_under_different_keys_all_record_it_after_a_restart(
    tmp_path: Path,
) -> None:
    old, new = ClusterKey(b"o" * 32), ClusterKey(b"n" * 32)
    names = [f"s{number}" for number in range(6)]
    async with LocalCluster(data=tmp_path) as cluster:
        both = Keyring.single(old).add("default", new)
        async with cluster.client(keyring=both) as client:
            await client.streams.create("both", topic="orders")
        async with cluster.client(keyring=Keyring.single(new)) as client:
            for name in names:
                await client.streams.create(name, topic="orders")
            await cluster.stop_store()
            await cluster.start_store()
            await client.publish("orders", b"x")
            await client.flush()
            await cluster.settle()
            for name in ("both", *names):
                assert [m.payload for m in await whole(client, name)] == [b"x"], name


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
