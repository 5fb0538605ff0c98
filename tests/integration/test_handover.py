"""A copy takes the place of its stream: with its messages, consumers, dead letters, producers and message ids."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from integration.mirrors import whole
from support.waiting import PATIENCE_S

import iris
from iris.errors import StreamError, StreamExists, StreamSuperseded
from iris.streams.handover import _Handover
from iris.wire.streams import Carry, Copied


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
    async with client.streams.consumer("orders", "billing", max_deliver=2, prefetch=1) as worker:
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
    assert (new.name, new.max_messages, new.dedup_window, new.end) == ("orders", 1000, 3600, 20)
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
    settings = {"dedup_window": 3600, "max_messages": 1000}
    assert (await client.streams.create("orders", **settings)).uuid == new.uuid
    with pytest.raises(StreamExists, match="with durability 'disk'; bring it into a bucket with `iris stream handover"):  # fmt: skip
        await client.streams.create("orders", durability="bucket", **settings)
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
                async with client.streams.consumer("orders", "work", shared=True) as worker:
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


async def test_an_append_by_name_goes_on_at_the_new_log(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    assert await other.streams.append("orders", b"0") == 0
    await handed_over(client)
    # It knows the old log, which refuses it.
    assert await other.streams.append("orders", b"1") == 1
    assert await other.streams.append("orders", b"2", expect=2) == 2


async def test_a_store_that_starts_again_while_it_gets_the_state_gets_all_of_it(
    setting: Any, monkeypatch: Any
) -> None:
    cluster, client, _ = setting
    monkeypatch.setattr("relay.store.state.STATE_BYTES", 1)  # a row in each answer
    await client.streams.create("orders")
    await client.streams.append("orders", b"0")
    for number in range(3):
        async with client.streams.consumer("orders", f"work-{number}") as worker:
            worker.ack(await anext(worker))
    carried = _Handover._carried
    calls = 0

    async def restarts(self: _Handover, call: Carry) -> Copied:
        nonlocal calls
        calls += 1
        if calls == 3:
            await cluster.stop_store()
            await cluster.start_store()
        return await carried(self, call)

    monkeypatch.setattr(_Handover, "_carried", restarts)
    await handed_over(client)
    assert calls > 6
    found = await client.streams.consumers("orders")
    assert [(one.name, one.floor) for one in found] == [(f"work-{n}", 1) for n in range(3)]


async def test_a_deferred_message_that_is_due_by_then_is_delivered_after_a_handover(
    setting: Any,
) -> None:
    """The consumer has passed its offset, and its due time comes before it is copied."""
    _, client, _ = setting
    await client.streams.create("orders")
    due = datetime.now(UTC) + timedelta(seconds=0.3)
    await client.streams.append("orders", b"later", deliver_at=due)
    await client.streams.append("orders", b"now")
    async with client.streams.consumer("orders", "work") as worker:
        message = await anext(worker)
        assert message.payload == b"now"
        worker.ack(message)
    while datetime.now(UTC) < due:  # noqa: ASYNC110 - the time is what it is about
        await asyncio.sleep(0.05)
    await handed_over(client)
    async with client.streams.consumer("orders", "work") as worker:
        assert (await asyncio.wait_for(anext(worker), PATIENCE_S)).payload == b"later"


async def test_a_batch_that_is_staged_is_committed_after_a_handover_and_once(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    attempts = []
    for batch, payloads in ((1, [b"a", b"b"]), (2, [b"c"])):
        async with client.streams.stage("orders", writer="job", batch=batch) as staging:
            await staging.append_many(payloads)
            attempts.append(await staging.finish())
        if batch == 1:
            done = await client.streams.commit("orders", writer="job", batch=1, attempts=attempts)
    first, second = attempts
    await handed_over(client)
    again = await client.streams.commit("orders", writer="job", batch=1, attempts=[first])
    assert (again.first, again.end, again.replayed) == (done.first, done.end, True)
    assert (
        await client.streams.commit("orders", writer="job", batch=2, attempts=[second])
    ).first == 2
    assert [one.payload for one in (await whole(client, "orders"))[0]] == [b"a", b"b", b"c"]
