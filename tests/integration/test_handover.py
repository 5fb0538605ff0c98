"""A copy takes the place of its stream: with its messages, consumers, dead letters, producers and message ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from integration.mirrors import whole
from support.waiting import PATIENCE_S

import iris
from iris.errors import StreamError, StreamSuperseded


async def handed_over(client: iris.Client, name: str = "orders", to: str = "copy") -> Any:
    return await client.streams.handover(name, to, durability="disk")


async def test_a_copy_takes_the_place_of_its_stream_with_everything_that_this_has(
    setting: Any,
) -> None:
    _, client, other = setting
    old = await client.streams.create("orders", dedup_window=3600, max_messages=1000)
    for number in range(20):
        at = await client.streams.append("orders", b"%d" % number, key="k", message_id=b"%d" % number)  # fmt: skip
        assert at == number
    async with client.streams.consumer(
        "orders", "billing", max_deliver=2, max_messages=1
    ) as worker:
        for _ in range(2):
            worker.nack(await anext(worker), reason="broken")
            await worker.flush()
        for number in range(1, 10):
            message = await anext(worker)
            assert message.offset == number
            if number != 5:
                worker.ack(message)
        await worker.flush()
    async with asyncio.timeout(PATIENCE_S):
        while not await client.streams.dead_letters("orders"):  # noqa: ASYNC110 - it is written in a moment
            await asyncio.sleep(0.01)
    before = await client.streams.consumers("orders")

    new = await handed_over(client)
    assert (new.name, new.max_messages, new.dedup_window, new.next) == ("orders", 1000, 3600, 20)
    assert new.uuid != old.uuid
    assert await client.streams.consumers("orders") == before
    (letter,) = await client.streams.dead_letters("orders")
    assert (letter.payload, letter.dead.offset, letter.dead.reason) == (b"0", 0, "broken")
    # The same client is the same producer, and ids are remembered.
    assert await client.streams.append("orders", b"3", message_id=b"3") == 3
    assert await other.streams.append("orders", b"7", message_id=b"7") == 7
    assert await client.streams.append("orders", b"20") == 20
    async with other.streams.consumer("orders", "billing", max_deliver=2) as worker:
        again = [await anext(worker) for _ in range(12)]
        worker.ack(*again)
    found = [bytes(one.payload) for one in again]
    assert found == [b"5", *(b"%d" % number for number in range(10, 21))]
    done = await client.streams.redrive("orders", "billing")
    assert (done.redriven, done.gone, done.left) == (1, 0, 0)
    # A program that creates it at every start gets it.
    again = await client.streams.create("orders", dedup_window=3600, max_messages=1000)
    assert again.uuid == new.uuid
    assert (await handed_over(client)).uuid == new.uuid  # a repetition
    assert [info.name for info in await client.streams.list()].count("copy") == 0

    # The old stream is read by its uuid, and names the new one.
    kept = await client.streams.describe("orders", uuid=old.uuid)
    assert (kept.superseded_by, kept.superseded_at) == (new.uuid, 20)
    async with client.streams.read("orders", uuid=old.uuid, follow=False) as reader:
        assert [bytes(one.payload) async for one in reader] == [b"%d" % n for n in range(20)]
    for refused in (
        client.streams.append("orders", b"x", uuid=old.uuid),
        client.streams.change("orders", max_messages=1, uuid=old.uuid),
        anext(client.streams.read("orders", "new", uuid=old.uuid)),
        anext(client.streams.consumer("orders", "billing", uuid=old.uuid)),
    ):
        with pytest.raises(StreamSuperseded, match=f"{old.uuid} was superseded by log {new.uuid}"):
            await refused
    await client.streams.delete("orders", uuid=old.uuid)
    assert (await client.streams.describe("orders")).uuid == new.uuid


async def test_what_is_appended_during_a_handover_waits_and_is_stored_once(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    stop = asyncio.Event()
    stored: dict[bytes, int] = {}

    async def produce(name: str) -> None:
        number = 0
        while not stop.is_set():
            payload = f"{name}-{number}".encode()
            stored[payload] = await other.streams.append("orders", payload, timeout=PATIENCE_S)
            number += 1

    seen: dict[bytes, list[int]] = {}

    async def consume() -> None:
        while True:
            try:
                async with client.streams.consumer("orders", "work", group=True) as worker:
                    async for message in worker:
                        seen.setdefault(bytes(message.payload), []).append(message.offset)
                        worker.ack(message)
                        if message.payload == b"last":
                            return
            except StreamSuperseded:
                continue

    tasks = [asyncio.create_task(produce(name)) for name in ("a", "b", "c")]
    consuming = asyncio.create_task(consume())
    async with asyncio.timeout(PATIENCE_S):
        for to in ("first", "second"):
            before = len(stored)
            while len(stored) < before + 50:  # noqa: ASYNC110 - producers run
                await asyncio.sleep(0.001)
            await handed_over(client, to=to)
    count = len(stored)
    async with asyncio.timeout(PATIENCE_S):
        while len(stored) < count + 50:  # noqa: ASYNC110 - producers run
            await asyncio.sleep(0.001)
    stop.set()
    await asyncio.gather(*tasks)
    await client.streams.append("orders", b"last")
    stored[b"last"] = -1
    await asyncio.wait_for(consuming, PATIENCE_S)
    found, gaps = await whole(client, "orders")
    assert gaps == []
    assert sorted(bytes(one.payload) for one in found) == sorted(stored)
    assert set(seen) == set(stored)
    assert all(found[at].payload == payload for payload, at in stored.items() if at >= 0)


async def test_a_stream_that_is_being_handed_over_waits_and_can_be_resumed(
    setting: Any, monkeypatch: Any
) -> None:
    _, client, other = setting
    await client.streams.create("orders", topic="orders.>")
    await client.streams.append("orders", b"0")

    async def fails(self: Any) -> None:
        raise StreamError("orders", "killed here")

    with monkeypatch.context() as patched:
        patched.setattr("iris.streams.handover._Handover.carry", fails)
        with pytest.raises(StreamError, match="killed here"):
            await handed_over(client)
    info = await client.streams.describe("orders")
    copy = await client.streams.describe("copy")
    assert info.successor == copy.uuid
    waiting = asyncio.create_task(other.streams.append("orders", b"1", timeout=PATIENCE_S))
    with pytest.raises(StreamError, match="being handed over"):
        await anext(client.streams.consumer("orders", "work", patience=0.2))
    with pytest.raises(StreamError, match="to take the place of its source"):
        await anext(client.streams.consumer("copy", "work"))
    with pytest.raises(StreamError, match=f"is being handed over to log {copy.uuid}"):
        await client.streams.handover("orders", "another", durability="disk")
    await client.streams.resume("orders")
    assert await asyncio.wait_for(waiting, PATIENCE_S) == 2  # behind the gap
    found, gaps = await whole(client, "orders")
    assert [one.payload for one in found] == [b"0", b"1"]
    assert [(gap.count, gap.cause) for gap in gaps] == [(None, "it was being handed over")]
    assert (await handed_over(client)).uuid == copy.uuid
    found, gaps = await whole(client, "orders")
    assert [one.payload for one in found] == [b"0", b"1"]
    assert [gap.first for gap in gaps] == [1, 3]
    await other.publish("orders.new", b"2")
    await other.flush()
    async with client.streams.read("orders", 4) as reader:
        assert (await asyncio.wait_for(anext(reader), PATIENCE_S)).payload == b"2"
