"""Ids of appended messages: whoever appends a message again under its id, it is stored once, for as long as the
stream says.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from iris.crypto.keys import ClusterKey
from iris.errors import MessageTooLarge, OffsetConflict, StreamError
from iris.testing import LocalCluster
from relay.store import ids as ids_module
from relay.store import stream as stream_module
from relay.store.ids import Ids

KEY = ClusterKey(bytes(range(32)))


def ids_of(cluster: Any) -> Ids:
    (stream,) = cluster.store.store.streams.values()
    ids: Ids = stream.log.ids
    return ids


async def payloads(client: Any) -> list[bytes]:
    async with client.streams.read("orders", follow=False) as reader:
        return [message.payload async for message in reader]


async def test_a_message_that_another_client_appends_again_is_stored_once(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", dedup_window=60.0)
    assert (await client.streams.describe("orders")).dedup_window == 60.0
    first = await client.streams.append("orders", b"7", message_id="order-7")
    assert await other.streams.append("orders", b"7 again", message_id="order-7") == first
    assert await other.streams.append("orders", b"8", message_id=b"order-8") == first + 1
    # The client goes on behind it, as if it had been stored.
    assert await other.streams.append("orders", b"9") == first + 2
    assert await client.streams.append("orders", b"9", key="order-7") == first + 3, "a key is no id"
    assert await payloads(client) == [b"7", b"8", b"9", b"9"]


async def test_in_one_turn_and_beside_others_each_id_is_stored_once(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", dedup_window=60.0)
    work = [
        party.streams.append("orders", b"%d" % (n % 10), message_id=f"{n % 10}", timeout=20.0)
        for n in range(60)
        for party in (client, other)
    ]
    work += [client.streams.append("orders", b"plain", timeout=20.0) for _ in range(10)]
    offsets = await asyncio.gather(*work)
    assert len(set(offsets[:120])) == 10
    found = await payloads(client)
    assert sorted(found) == sorted([b"%d" % n for n in range(10)] + [b"plain"] * 10)


async def test_ids_outlive_the_store_and_end_with_their_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids_module, "FORGET", 3)
    async with LocalCluster(data=tmp_path) as cluster, cluster.client() as client:
        await client.streams.create("orders", dedup_window=3600.0)
        for n in range(8):
            assert await client.streams.append("orders", b"%d" % n, message_id=f"{n}") == n
        await cluster.stop_store()
        await cluster.start_store()
        assert ids_of(cluster).count == 8
        for n in range(8):
            assert (
                await client.streams.append("orders", b"again", message_id=f"{n}", timeout=20.0)
                == n
            )
        clock = cluster.store.store.clock
        clock.elapsed_us += 3_599_000_000
        assert await client.streams.append("orders", b"again", message_id="3", timeout=20.0) == 3
        clock.elapsed_us += 2_000_000
        assert await client.streams.append("orders", b"3", message_id="3", timeout=20.0) == 8
        async with asyncio.timeout(20.0):
            while ids_of(cluster).count > 1:  # noqa: ASYNC110 - a tick of the store forgets some
                await asyncio.sleep(0.01)
        assert ids_of(cluster).count == 1
        assert len(list(ids_of(cluster)._database.rows(b"h"))) == 1


async def test_a_clock_that_is_set_ends_no_window(setting: Any) -> None:
    cluster, client, other = setting
    await client.streams.create("orders", dedup_window=60.0)
    await client.streams.append("orders", b"7", message_id="7")
    clock = cluster.store.store.clock
    assert clock._running_us is not None
    for hours in (1, -2):
        cluster.store.store.update_time(clock.wall_us + hours * 3_600_000_000, clock._running_us)
        assert await other.streams.append("orders", b"7", message_id="7") == 0


async def test_a_stream_without_a_window_refuses_ids_and_says_what_to_do(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    with pytest.raises(StreamError, match="--dedup-window"):
        await client.streams.append("orders", b"7", message_id="7")
    await client.streams.change("orders", dedup_window=60.0)
    assert await client.streams.append("orders", b"7", message_id="7") == 0
    assert await other.streams.append("orders", b"7", message_id="7") == 0
    await client.streams.change("orders", dedup_window=0.0)
    with pytest.raises(StreamError, match="no dedup window"):
        await other.streams.append("orders", b"7", message_id="7")
    for wrong in ("", b"x" * 4097):
        with pytest.raises(MessageTooLarge, match="message_id"):
            await client.streams.append("orders", b"7", message_id=wrong)
    assert await payloads(client) == [b"7"]


async def test_where_no_more_ids_fit_appends_with_one_are_refused_and_none_is_forgotten(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, _ = setting
    monkeypatch.setattr(stream_module, "MAX_IDS", 2)
    await client.streams.create("orders", dedup_window=60.0)
    for n in range(2):
        await client.streams.append("orders", b"%d" % n, message_id=f"{n}")
    with pytest.raises(StreamError, match="shorten its dedup window"):
        await client.streams.append("orders", b"2", message_id="2")
    assert await client.streams.append("orders", b"3") == 2


async def test_an_expected_offset_comes_after_the_id(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", dedup_window=60.0)
    assert await client.streams.append("orders", b"7", message_id="7", expect=0) == 0
    assert await other.streams.append("orders", b"7", message_id="7", expect=0) == 0
    with pytest.raises(OffsetConflict):
        await other.streams.append("orders", b"8", message_id="8", expect=0)
    assert await other.streams.append("orders", b"8", message_id="8", expect=1) == 1


async def test_a_pause_of_consumers_loses_nothing(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    await client.streams.append("orders", b"0")
    async with other.streams.consumer("orders", "work", shared=True) as work:
        held = await asyncio.wait_for(anext(work), 15.0)
        info = await client.streams.pause("orders", consumers=True)
        assert (info.paused, info.consumers_paused) == (False, True)
        await client.streams.append("orders", b"1")
        await client.publish("orders.new", b"2")
        waiting = asyncio.create_task(anext(work))  # type: ignore[arg-type]
        async with client.streams.read("orders") as reader:
            async with asyncio.timeout(15.0):
                assert [(await anext(reader)).payload for _ in range(3)] == [b"0", b"1", b"2"]
        work.ack(held)
        await asyncio.sleep(0.2)  # a delivery would have come in a millisecond
        assert not waiting.done()
        info = await client.streams.resume("orders")
        assert not info.consumers_paused
        found = [await asyncio.wait_for(waiting, 15.0), await asyncio.wait_for(anext(work), 15.0)]
        assert [(m.payload, m.deliveries) for m in found] == [(b"1", 1), (b"2", 1)]
    assert (await client.streams.describe("orders")).lost_messages == 0


async def test_a_pause_of_recording_says_what_it_loses(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    await client.streams.append("orders", b"0")
    await client.streams.pause("orders")
    with pytest.raises(StreamError, match="paused"):
        await client.streams.append("orders", b"lost")
    await client.publish("orders.new", b"lost")
    async with other.streams.consumer("orders", "work") as work:
        assert (await asyncio.wait_for(anext(work), 15.0)).payload == b"0"
    await client.streams.resume("orders")
    await client.streams.append("orders", b"1")
    async with client.streams.read("orders", follow=False) as reader:
        assert [m.payload async for m in reader] == [b"0", b"1"]
        assert [gap.cause for gap in reader.gaps] == ["it was paused"]
