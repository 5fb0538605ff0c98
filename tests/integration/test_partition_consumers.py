"""Consumers of a stream with several partitions: workers share all of them, with the order of each key."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from integration.stores import created

import iris
from iris.errors import ConfigError, StreamError, StreamUnavailable


async def test_workers_share_all_partitions_and_get_the_messages_of_a_key_in_order(
    pair: Any,
) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=4)
    for turn in range(5):
        for key in "abcdefgh":
            await client.streams.append("orders", f"{key}{turn}", key=key)
    done: list[tuple[int, str]] = []
    busy: Counter[bytes] = Counter()

    async def work(who: iris.Client, number: int) -> None:
        async with who.streams.consumer("orders", "billing", shared=True, prefetch=2) as worker:
            async for message in worker:
                busy[message.key or b""] += 1
                assert busy[message.key or b""] == 1  # the next of a key waits
                await asyncio.sleep(0)
                done.append((number, message.payload.decode()))
                busy[message.key or b""] -= 1
                worker.ack(message)
                if len(done) == 40:
                    finished.set()

    finished = asyncio.Event()
    tasks = [asyncio.create_task(work(who, n)) for n, who in enumerate((client, other, client))]
    async with asyncio.timeout(20):
        await asyncio.wait([*tasks, asyncio.create_task(finished.wait())], return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(what for _, what in done) == sorted(f"{k}{t}" for k in "abcdefgh" for t in range(5))  # fmt: skip
    for key in "abcdefgh":
        assert [what for _, what in done if what[0] == key] == [f"{key}{t}" for t in range(5)]
    (info,) = await client.streams.consumers("orders")
    assert (info.name, info.lag, info.floor) == ("billing", 0, 40)
    per_partition = [await client.streams.consumers("orders", partition=n) for n in range(4)]
    assert sum(infos[0].floor for infos in per_partition) == 40


async def test_a_worker_settles_in_the_partition_of_each_message(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=3)
    for number in range(9):
        await client.streams.append("orders", b"%d" % number, partition=number % 3)
    async with client.streams.consumer("orders", "billing", shared=True) as worker:
        messages = [await anext(worker) for _ in range(9)]
        worker.nack(*(m for m in messages if m.offset == 0))
        worker.touch(*messages[:1])
        worker.ack(*(m for m in messages if m.offset == 1))
        await worker.flush()
        again = [await anext(worker) for _ in range(3)]
        assert {(m.offset, m.partition, m.deliveries) for m in again} == {
            (0, partition, 2) for partition in range(3)
        }
        for partition in range(3):
            last = max((m for m in messages if m.partition == partition), key=lambda m: m.offset)
            worker.ack_through(last)
        await worker.flush()
        (info,) = await other.streams.consumers("orders")
        assert (info.lag, info.pending, info.floor) == (0, 0, 9)
        stranger = messages[0]
        stranger.partition = 7
        with pytest.raises(StreamError, match="no partition 7"):
            worker.ack(stranger)
    async with other.streams.consumer("orders", "one", partition=2) as single:
        assert [(await anext(single)).payload for _ in range(3)] == [b"2", b"5", b"8"]
    async with other.streams.consumer("orders", "none", partition=3) as nowhere:
        with pytest.raises(ConfigError, match="no partition 3"):
            await anext(nowhere)


async def test_messages_that_wait_in_a_worker_do_not_time_out_while_it_works_on_another_partition(
    pair: Any,
) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=2)
    for number in range(8):
        await client.streams.append("orders", b"%d" % number, partition=number % 2)
    async with client.streams.consumer("orders", "billing", shared=True, ack_timeout=0.4) as worker:
        seen = []
        async for message in worker:
            seen.append((message.payload, message.deliveries))
            await asyncio.sleep(0.15)  # the second partition waits for 0.6 s
            worker.ack(message)
            if len(seen) == 8:
                break
    assert sorted(seen) == [(b"%d" % number, 1) for number in range(8)]
    (info,) = await other.streams.consumers("orders")
    assert (info.lag, info.late) == (0, 0)


async def test_what_a_worker_has_not_begun_with_goes_to_others_when_it_stops(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=2)
    for number in range(6):
        await client.streams.append("orders", b"%d" % number, partition=number % 2)
    async with client.streams.consumer("orders", "billing", shared=True, max_deliver=1) as worker:
        first = await anext(worker)
        await asyncio.sleep(0.05)  # the other partition's messages arrive
        worker.stop()
        worker.ack(first)
        with pytest.raises(StopAsyncIteration):
            await anext(worker)
    async with other.streams.consumer("orders", "billing", shared=True, max_deliver=1) as worker:
        rest = [await anext(worker) for _ in range(5)]
        assert {message.deliveries for message in rest} == {1}
        assert first.payload not in {message.payload for message in rest}


async def test_a_worker_goes_on_without_a_store_and_finds_partitions_that_are_added(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, other, second = pair
    monkeypatch.setattr("iris.streams.interleaving.LAYOUT_S", 0.05)
    monkeypatch.setattr("iris.streams.interleaving.RETRY_S", 0.05)
    name, away = await created(client, second), 1
    async with client.streams.consumer(name, "billing", shared=True, patience=0.3) as worker:
        for partition in (0, 1):
            await client.streams.append(name, b"x", partition=partition)
        worker.ack(*[await anext(worker) for _ in range(2)])
        await worker.flush()
        await client.streams.change(name, partitions=3)
        await client.streams.append(name, b"new", partition=2)
        message = await anext(worker)
        assert (message.payload, message.partition) == (b"new", 2)
        worker.ack(message)
        await worker.flush()
        await second.stop()
        waiting = asyncio.ensure_future(anext(worker))
        while away not in worker.missing:  # noqa: ASYNC110 - it is found out by calls
            await asyncio.sleep(0.01)
        await client.streams.append(name, b"here", partition=0)
        assert (await waiting).payload == b"here"
        with pytest.raises(StreamUnavailable, match="could not be asked; try again"):
            await other.streams.consumers(name, timeout=0.4)
        await second.start()
        await other.streams.append(name, b"there", partition=away)
        assert (await anext(worker)).payload == b"there"
        assert away not in worker.missing


async def test_consumers_are_paused_changed_and_deleted_in_every_partition(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=3)
    async with client.streams.consumer("orders", "billing", shared=True) as worker:
        waiting = asyncio.ensure_future(anext(worker))
        while not await other.streams.consumers("orders", partition=2):  # noqa: ASYNC110 - it asks
            await asyncio.sleep(0.01)
        await other.streams.append("orders", b"0", partition=0)
        worker.ack(await waiting)
        info = await other.streams.change_consumer("orders", "billing", max_deliver=7)
        assert info.max_deliver == 7
        assert (await other.streams.pause_consumer("orders", "billing")).paused
        infos = [(await other.streams.consumers("orders", partition=n))[0] for n in range(3)]
        assert [(one.paused, one.max_deliver) for one in infos] == [(True, 7)] * 3
        assert not (await other.streams.resume_consumer("orders", "billing")).paused
    await other.streams.delete_consumer("orders", "billing")
    assert await client.streams.consumers("orders") == []
    with pytest.raises(StreamError, match="no consumer 'billing'"):
        await other.streams.delete_consumer("orders", "billing")
    async with client.streams.consumer("orders", "solo", partition=1) as single:
        await client.streams.append("orders", b"1", partition=1)
        single.ack(await anext(single))
    assert (await other.streams.pause_consumer("orders", "solo")).paused
    with pytest.raises(StreamError, match="no consumer 'other'"):
        await other.streams.pause_consumer("orders", "other")


async def test_dead_letters_of_all_partitions_are_shown_and_redriven(pair: Any) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=3)
    for number in range(6):
        await client.streams.append("orders", b"%d" % number, partition=number % 3)
    options: Any = {"shared": True, "max_deliver": 1}
    async with client.streams.consumer("orders", "billing", **options) as worker:
        messages = [await anext(worker) for _ in range(6)]
        worker.nack(*messages, reason="broken")
        await worker.flush()
        while len(letters := await other.streams.dead_letters("orders")) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert sorted(letter.payload for letter in letters) == [b"%d" % n for n in range(6)]
        assert Counter(letter.partition for letter in letters) == {0: 2, 1: 2, 2: 2}
        assert len(await other.streams.dead_letters("orders", limit=4)) == 4
        with pytest.raises(StreamError, match="pass partition="):
            await other.streams.redrive("orders", "billing", offset=0)
        done = await other.streams.redrive("orders", "billing", offset=1, partition=2)
        assert done.redriven == 1
        assert (await anext(worker)).payload == b"5"
        assert (await other.streams.redrive("orders", "billing", limit=2)).redriven == 2
        assert (await other.streams.redrive("orders", "billing")).redriven == 3
        rest = [(await anext(worker)).payload for _ in range(5)]
        assert sorted(rest) == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(StreamError, match="has no consumer 'other'; it has billing"):
        await other.streams.redrive("orders", "other")
    with pytest.raises(
        StreamError, match=r"each partition has its own dead letters: .*orders/1\.dead"
    ):
        async with other.streams.read("orders.dead", follow=False) as reader:
            await anext(reader)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("kind", ["consumer", "reader"])
@pytest.mark.parametrize("by", ["message", "batch"])
async def test_tasks_that_share_one_worker_or_reader_get_each_message_once(
    pair: Any, kind: str, by: str, partitions: int
) -> None:
    _, client, other, _ = pair
    await client.streams.create("orders", partitions=partitions)
    done: Counter[bytes] = Counter()
    all_done = asyncio.Event()

    async def work(source: Any) -> None:
        if by == "message":
            async for message in source:
                note(message)
        else:
            async for messages in source.batches():
                for message in messages:
                    note(message)

    def note(message: Any) -> None:
        done[message.payload] += 1
        if len(done) == 200:
            all_done.set()

    source = other.streams.consumer("orders", "billing") if kind == "consumer" else other.streams.read("orders", "first")  # fmt: skip
    async with source:
        tasks = [asyncio.create_task(work(source)) for _ in range(3)]
        for start in range(0, 200, 20):
            await client.streams.append_many("orders", [b"%d" % (start + n) for n in range(20)])
        async with asyncio.timeout(20):
            await all_done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert set(done.values()) == {1}
