"""Consumers of a stream from end to end: workers that share it, fail, and come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from iris.errors import ConfigError, StreamError
from iris.streams import Consumer, StreamMessage
from iris.testing import LocalCluster
from iris.wire.consumers import Range, Settle
from iris.wire.streams import Settled
from relay.store import consumer_calls


async def take(consumer: Consumer, count: int) -> list[StreamMessage]:
    """Return the next `count` messages, or fail."""
    async with asyncio.timeout(15.0):
        return [await anext(consumer) for _ in range(count)]


async def info(client: Any, stream: str, consumer: str) -> Any:
    (found,) = [one for one in await client.streams.consumers(stream) if one.name == consumer]
    return found


async def test_a_consumer_goes_on_where_it_has_settled(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(100)])
    async with other.streams.consumer("orders", "invoices") as work:
        work.ack(*await take(work, 40))
        await work.flush()
    async with client.streams.consumer("orders", "invoices") as work:
        found = await take(work, 60)
        assert [int(m.payload) for m in found] == list(range(40, 100))
        work.ack_through(found[-1])
        await work.flush()
    assert (await info(client, "orders", "invoices")).lag == 0


async def test_two_consumers_get_everything_each(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(50)])
    for name in ("invoices", "audit"):
        async with other.streams.consumer("orders", name, shared=True) as work:
            found = await take(work, 50)
            work.ack(*found)
        assert [int(m.payload) for m in found] == list(range(50))


async def test_the_workers_of_a_group_share_each_message_once(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    done: Counter[int] = Counter()
    by_worker: Counter[int] = Counter()

    async def worker(number: int) -> None:
        async with other.streams.consumer("orders", "invoices", shared=True, prefetch=10) as work:
            async for message in work:
                done[int(message.payload)] += 1
                by_worker[number] += 1
                work.ack(message)
                if by_worker[number] % 7 == 0:
                    await asyncio.sleep(0)

    workers = [asyncio.create_task(worker(n)) for n in range(4)]
    for start in range(0, 400, 10):
        await client.streams.append_many("orders", [b"%d" % n for n in range(start, start + 10)])
    async with asyncio.timeout(15.0):
        while len(done) < 400:  # noqa: ASYNC110 - what it waits for has no event of its own
            await asyncio.sleep(0.01)
    for one in workers:
        one.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert done == Counter(range(400))
    assert len(by_worker) > 1


async def test_workers_without_messages_count_as_workers_until_they_leave(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")

    async def reach(count: int) -> None:
        """Return when the consumer has this many workers."""
        async with asyncio.timeout(15.0):
            while [one.workers for one in await client.streams.consumers("orders")] != [count]:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)

    async def idle() -> None:
        async with other.streams.consumer("orders", "invoices", shared=True) as work:
            await anext(work)

    one, two = asyncio.create_task(idle()), asyncio.create_task(idle())
    await reach(2)
    one.cancel()
    await reach(1)
    await client.streams.append("orders", b"now it holds one")
    await two
    await reach(0)
    await asyncio.gather(one, return_exceptions=True)


async def test_a_bundle_is_shared_as_the_workers_asked_for_it(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(1000)])
    by_worker: list[list[int]] = [[], [], []]

    async def worker(mine: list[int]) -> None:
        async with other.streams.consumer("orders", "invoices", shared=True, prefetch=10) as work:
            async for batch in work.batches():
                assert 0 < len(batch) <= 10
                mine += [int(message.payload) for message in batch]
                work.ack(*batch)
                await work.flush()

    workers = [asyncio.create_task(worker(mine)) for mine in by_worker]
    async with asyncio.timeout(15.0):
        while sum(map(len, by_worker)) < 1000:
            assert not any(one.done() for one in workers)
            await asyncio.sleep(0.01)
    for one in workers:
        one.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert sorted(n for mine in by_worker for n in mine) == list(range(1000))
    assert min(map(len, by_worker)) >= 100, "each had a share"


async def test_what_a_worker_leaves_unsettled_goes_to_another(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    for number in range(10):
        await client.streams.append("orders", b"%d" % number)
    async with other.streams.consumer("orders", "invoices", shared=True) as first:
        found = await take(first, 10)
        first.ack(*found[:3])
    async with client.streams.consumer("orders", "invoices", shared=True) as second:
        again = await take(second, 7)
        assert [int(m.payload) for m in again] == list(range(3, 10))
        assert {m.deliveries for m in again} == {2}
        second.ack(*again)


async def test_a_message_that_is_not_acknowledged_in_time_is_delivered_again(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    async with (
        other.streams.consumer("orders", "invoices", shared=True, ack_timeout=1.0) as hung,
        client.streams.consumer("orders", "invoices", shared=True, ack_timeout=1.0) as work,
    ):
        (held,) = await take(hung, 1)
        (again,) = await take(work, 1)
        assert (again.payload, again.deliveries) == (b"x", 2)
        work.ack(again)
        await work.flush()
        # It has done the work, too: that is late, and no error.
        hung.ack(held)
        await hung.flush()
    assert (await info(client, "orders", "invoices")).late == 1


async def test_touch_keeps_a_message_from_being_delivered_again(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    async with other.streams.consumer("orders", "invoices", shared=True, ack_timeout=2.5) as work:
        (held,) = await take(work, 1)
        for _ in range(30):
            await asyncio.sleep(0.1)
            work.touch(held)
        work.ack(held)
        await work.flush()
    found = await info(client, "orders", "invoices")
    assert (found.lag, found.late, found.redelivering) == (0, 0, 0)


async def test_a_failed_message_comes_again_after_its_delay_and_then_is_a_dead_letter(
    setting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    for number in range(5):
        await client.streams.append("orders", b"%d" % number, headers={"n": str(number)})
    deliveries: list[tuple[int, int]] = []
    async with other.streams.consumer("orders", "invoices", shared=True, max_deliver=3) as work:
        for message in [await anext(work) for _ in range(5)]:
            if message.payload == b"2":
                deliveries.append((message.offset, message.deliveries))
                work.nack(message, delay=0.05, reason="no such customer")
            else:
                work.ack(message)
        for _ in range(2):
            (message,) = await take(work, 1)
            deliveries.append((message.offset, message.deliveries))
            work.nack(message, delay=0.05, reason="no such customer")
        await work.flush()
        async with client.streams.read("orders.dead", patience=5.0) as reader:
            async with asyncio.timeout(15.0):
                letter = await anext(reader)
    assert deliveries == [(2, 1), (2, 2), (2, 3)]
    assert (letter.payload, letter.headers, letter.name) == (b"2", {"n": "2"}, "orders")
    assert (letter.dead.offset, letter.dead.consumer, letter.dead.deliveries) == (2, "invoices", 3)
    assert letter.dead.reason == "no such customer"
    (line,) = [one for one in caplog.records if one.message == "store.dead_letters"]
    assert line.fields == {  # type: ignore[attr-defined]  # what our log lines have
        "stream": "orders", "consumer": "invoices", "messages": 1, "offset": 2, "deliveries": 3, "reason": "no such customer",
    }  # fmt: skip
    assert [(i.name, i.messages) for i in await client.streams.list()] == [
        ("orders", 5),
        ("orders.dead", 1),
    ]


async def test_messages_of_one_key_go_one_after_the_other(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    for number in range(12):
        await client.streams.append("orders", b"%d" % number, key=f"customer {number % 2}")
    async with (
        other.streams.consumer("orders", "invoices", shared=True, prefetch=1) as one,
        client.streams.consumer("orders", "invoices", shared=True, prefetch=1) as two,
    ):
        seen: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(6):
            first, second = (await take(one, 1))[0], (await take(two, 1))[0]
            numbers = [int(first.payload), int(second.payload)]
            assert {n % 2 for n in numbers} == {0, 1}, "one key went to two workers at once"
            for number in numbers:
                seen[number % 2].append(number)
            one.ack(first)
            two.ack(second)
            await asyncio.gather(one.flush(), two.flush())
    assert seen == {0: [0, 2, 4, 6, 8, 10], 1: [1, 3, 5, 7, 9, 11]}


async def test_a_deferred_message_is_delivered_when_it_is_due(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    due = datetime.now(UTC) + timedelta(seconds=0.4)
    await client.streams.append("orders", b"later", deliver_at=due)
    await client.streams.append("orders", b"now")
    async with other.streams.consumer("orders", "invoices") as work:
        now, later = await take(work, 2)
        assert (now.payload, later.payload) == (b"now", b"later")
        assert datetime.now(UTC) >= due


async def test_a_consumer_that_is_there_with_other_settings_is_not_taken(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    async with other.streams.consumer("orders", "invoices", shared=True) as work:
        await take(work, 1)
        async with client.streams.consumer(
            "orders", "invoices", shared=True, max_deliver=7
        ) as another:
            with pytest.raises(
                StreamError, match=r"other settings: max_deliver 0, not 7; .*consumer delete"
            ):
                await anext(another)


async def test_a_deleted_consumer_starts_again(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(3)])
    for _ in range(2):
        async with other.streams.consumer("orders", "invoices") as work:
            found = await take(work, 3)
            work.ack(*found)
        await client.streams.delete_consumer("orders", "invoices")
    assert await client.streams.consumers("orders") == []
    with pytest.raises(StreamError, match="no consumer"):
        await client.streams.delete_consumer("orders", "invoices")


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_consumer_outlives_the_store(tmp_path: Path, how: str) -> None:
    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client() as client,
        cluster.client() as other,
    ):
        await client.streams.create("orders")
        await client.streams.append_many("orders", [b"%d" % n for n in range(100)])
        done: Counter[int] = Counter()
        async with other.streams.consumer("orders", "invoices", shared=True, prefetch=10) as work:
            for message in await take(work, 60):
                work.ack(message)
                done[int(message.payload)] += 1
            await work.flush()
            if how == "stopped":
                await cluster.stop_store()
            else:
                # Nothing more is saved: what the process had in memory is gone.
                for stream in cluster.store.store.streams.values():
                    stream.consumer_calls = None
                await cluster.stop_store()
            await cluster.start_store()
            while len(done) < 100 or (await info(client, "orders", "invoices")).lag:
                (message,) = await take(work, 1)
                work.ack(message)
                done[int(message.payload)] += 1
                if len(done) == 100:  # whatever came last: the lag is what the store has heard of
                    await work.flush()
        assert set(done) == set(range(100))
        if how == "stopped":
            assert done == Counter(range(100))


async def test_an_ephemeral_consumer_leaves_no_cursor(tmp_path: Path) -> None:
    async with LocalCluster(data=tmp_path) as cluster:
        async with cluster.client() as client:
            await client.streams.create("orders")
            await client.streams.append("orders", b"x")
            async with client.streams.consumer("orders", "looking", durable=False) as work:
                work.ack(*await take(work, 1))
            assert [one.durable for one in await client.streams.consumers("orders")] == [False]
        await cluster.stop_store()
        await cluster.start_store()
        async with cluster.client() as client:
            assert await client.streams.consumers("orders") == []


async def test_a_message_that_the_only_worker_forgot_comes_to_it_again(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    async with other.streams.consumer("orders", "invoices", ack_timeout=0.2) as work:
        (first,) = await take(work, 1)
        (again,) = await take(work, 1)
        assert (first.deliveries, again.deliveries) == (1, 2)
        work.ack(again)
        await work.flush()
    assert (await info(client, "orders", "invoices")).lag == 0


async def test_takes_that_were_given_up_swallow_nothing(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    async with other.streams.consumer("orders", "invoices", shared=True) as work:
        for number in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await anext(work)
            await client.streams.append("orders", b"%d" % number)
            (message,) = await take(work, 1)
            assert (message.payload, message.deliveries) == (b"%d" % number, 1)
            work.ack(message)
        await work.flush()
    assert (await info(client, "orders", "invoices")).lag == 0


@pytest.mark.parametrize("size", [1, 1040, 4000, 70_000])
async def test_a_backlog_of_small_records_is_handed_out_in_frames_that_fit(
    setting: Any, size: int
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    count = max(40, min(2500, (3 << 20) // size))
    # A key each: records of their own.
    await asyncio.gather(
        *(
            client.streams.append("orders", bytes(size), key=f"{n}", timeout=20.0)
            for n in range(count)
        )
    )
    async with other.streams.consumer("orders", "invoices", prefetch=5000) as work:
        found = await take(work, count)
        work.ack(*found)
        await work.flush()
    assert [m.offset for m in found] == list(range(count))


async def test_settings_that_no_store_takes_are_refused_in_words(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    for options in ({"max_deliver": 70_000}, {"ack_timeout": 0.0}, {"ack_timeout": 1e9}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            client.streams.consumer("orders", "invoices", **options)
    assert await client.streams.consumers("orders") == []


async def test_a_settle_that_names_what_is_not_there_is_refused(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    async with client.streams.consumer("orders", "invoices", shared=True) as work:
        await take(work, 1)
        for done in ([Range(0, 2)], [Range(0, 1 << 62)], [Range(0, 1), Range(0, 1)], [Range(1, 0)]):
            call = Settle("invoices", bytes(16), done)
            with pytest.raises(StreamError, match="ascending order"):
                await client.streams._stores.ask_stream("orders", "", call, Settled, timeout=5.0)


async def test_more_consumers_than_one_answer_takes_are_all_listed(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, _ = setting
    monkeypatch.setattr(consumer_calls, "MAX_LISTED", 3)
    await client.streams.create("orders")
    await client.streams.append("orders", b"x")
    names = [f"c{n}" for n in range(10)]
    for name in names:
        async with client.streams.consumer("orders", name) as work:
            work.ack(*await take(work, 1))
    assert [one.name for one in await client.streams.consumers("orders")] == names


async def test_messages_that_the_loop_never_saw_do_not_count_as_delivered(setting: Any) -> None:
    """Three workers that each take one message and leave do not bring the others closer to being dead letters."""
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(6)])
    for number in range(3):
        async with other.streams.consumer("orders", "w", shared=True, max_deliver=3) as work:
            (message,) = await take(work, 1)
            assert (message.offset, message.deliveries) == (number, 1)
            work.ack(message)
            await work.flush()
    found = await info(client, "orders", "w")
    assert (found.lag, found.redelivering + found.pending, found.dead) == (3, 3, 0)


async def test_messages_that_wait_for_the_loop_do_not_time_out_while_it_makes_progress(
    setting: Any,
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(12)])
    seen: Counter[int] = Counter()
    async with other.streams.consumer("orders", "w", shared=True, ack_timeout=1.0) as work:
        for _ in range(12):
            (message,) = await take(work, 1)
            seen[message.offset] += 1
            await asyncio.sleep(0.2)  # 2.4 s in all: longer than the timeout
            work.ack(message)
        await work.flush()
        found = await info(client, "orders", "w")
    assert set(seen.values()) == {1}
    assert (found.lag, found.late) == (0, 0)


async def test_a_worker_that_stops_settles_what_it_has_and_gives_the_rest_back(
    setting: Any,
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(4)])
    done = []
    async with other.streams.consumer("orders", "w", shared=True) as work:
        async for message in work:
            work.stop()
            done.append(message.offset)
            work.ack(message)  # what is in hand can still be settled
        waiting = asyncio.create_task(work.batch())
        with pytest.raises(StopAsyncIteration):
            await waiting
    assert done == [0]
    async with client.streams.consumer("orders", "w", shared=True) as work:
        assert [(m.offset, m.deliveries) for m in await take(work, 3)] == [(1, 1), (2, 1), (3, 1)]


async def test_stop_ends_a_worker_that_waits_for_messages(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")

    async def work(worker: Consumer) -> int:
        return len([message async for message in worker])

    async with other.streams.consumer("orders", "w", shared=True) as worker:
        task = asyncio.create_task(work(worker))
        while not await client.streams.consumers("orders"):  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)
        worker.stop()
        assert await task == 0


async def test_a_dead_letter_keeps_its_key(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"x", key="anna", headers={"trace": "7"})
    async with other.streams.consumer("orders", "w", max_deliver=1) as work:
        (message,) = await take(work, 1)
        work.nack(message, reason="bad")
        await work.flush()
    async for dead in client.streams.read("orders.dead"):
        assert (dead.key, dead.headers) == (b"anna", {"trace": "7"})
        break
