"""Appending to a durable stream: in order, stored once or refused; and what a store refuses from anybody."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.stores import whole
from msgspec import structs
from support.founded import countersigned, creation, founded

import iris
from iris.crypto.keys import ClusterKey
from iris.errors import NoStream, OffsetConflict, StreamDamaged, StreamError, StreamUnavailable
from iris.testing import LocalCluster
from iris.wire.orders import Definition, Order, SignedOrder, decode_order
from iris.wire.stream_items import dead_uuid
from iris.wire.streams import Append, Create, NewRecord, Refused, encode
from relay.store.errors import LogWriteFailed
from relay.store.records import Entry
from relay.store.stream import Stream


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
    assert refused.value.end == 1
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
        session.store_calls.send(store.address, None, body, timeout_ms=5000, waiter=waiter)
        other._runtime.touch()
        assert (await waiter).code == ("channel" if body[:1] == b"\xc1" else "invalid")
    key = ClusterKey(bytes(32))
    broken = SignedOrder(b"not an order", key.public_key, key.sign_order(b"not an order"))
    for call in (Create([broken], bytes(16)), Append(bytes(16), [NewRecord(0, bytes(24), b"x")])):
        waiter = asyncio.get_running_loop().create_future()
        session.store_calls.send(store.address, None, encode(call), timeout_ms=5000, waiter=waiter)
        other._runtime.touch()
        assert isinstance(await waiter, Refused)
    assert (await client.streams.describe("orders")).uuid == made.uuid


async def test_the_first_order_of_a_deleted_stream_makes_no_new_one(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders")
    store = cluster.store.store
    (stream,) = store.streams.values()
    kept = Create([signed for _, signed in stream.orders.values()], stream.charter.salt)
    await client.streams.delete("orders")
    await other.status()
    waiter = asyncio.get_running_loop().create_future()
    other._attachment.session.store_calls.send(
        store.address, None, encode(kept), timeout_ms=5000, waiter=waiter
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

    def lying(self: Stream, *facts: Any) -> Any:
        said = described(self, *facts)
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
        with pytest.raises(StreamError, match="is not signed by a key of this keyring"):
            await call
    with pytest.raises(StreamError, match="is not signed by a key of this keyring"):
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
    assert [gap.cause for gap in reader.gaps] == [
        "unreadable: the record does not belong to this stream"
    ]


async def test_a_stream_takes_no_more_keys_than_its_relay_does(setting: Any) -> None:
    cluster, client, other = setting
    made = await client.streams.create("orders", topic="orders")
    store = cluster.store.store
    definition, now_us = Definition("orders", topic="orders"), time.time_ns() // 1000
    keys = [ClusterKey(bytes([number]) * 32) for number in range(1, 65)]
    uuid, orders = founded(keys[0], bytes(16)), []
    for key in keys:
        order = Order("keep", uuid, key.key_id, store.key.public_key, now_us, definition)
        signed = SignedOrder(encode(order), key.public_key, key.sign_order(encode(order)))
        orders.append(countersigned(keys[0], signed) if orders else signed)
    await other.status()
    waiter = asyncio.get_running_loop().create_future()
    other._attachment.session.store_calls.send(
        store.address, None, encode(creation(*orders)), timeout_ms=5000, waiter=waiter
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
    other._attachment.session.store_calls.send(
        store.address, None, encode(creation(*orders)), timeout_ms=5000, waiter=waiter
    )
    other._runtime.touch()
    assert "was not made of key" in (await waiter).detail


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
    assert described.lost_messages > 1 << 40
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


async def test_a_damaged_log_is_reported_and_costs_no_other_stream(tmp_path: Path) -> None:
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
