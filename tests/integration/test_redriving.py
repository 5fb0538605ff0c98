"""Dead letters that are delivered again, and consumers that are paused, resumed and changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import iris
from iris import RedriveInfo, StreamMessage
from iris.errors import NoStream, StreamError, StreamUnavailable
from iris.streams import Consumer
from iris.testing import LocalCluster
from relay.store.errors import LogWriteFailed
from relay.store.log import Log


async def take(consumer: Consumer, count: int) -> list[StreamMessage]:
    """Return the next `count` messages, or fail."""
    async with asyncio.timeout(15.0):
        return [await anext(consumer) for _ in range(count)]


async def info(client: iris.Client, consumer: str = "invoices") -> Any:
    (found,) = [one for one in await client.streams.consumers("orders") if one.name == consumer]
    return found


async def offsets(client: iris.Client, consumer: str = "invoices") -> list[int]:
    """Return the offsets of the messages of a consumer's dead letters."""
    letters = await client.streams.dead_letters("orders", consumer)
    return [letter.dead.offset for letter in letters if letter.dead is not None]


async def bury(client: iris.Client, count: int, consumer: str = "invoices") -> None:
    """Make `count` messages dead letters, after one delivery each."""
    async with client.streams.consumer("orders", consumer, shared=True, max_deliver=1) as work:
        work.nack(*await take(work, count), reason="no such customer")
        await work.flush()


@pytest.fixture
async def client(setting: Any) -> iris.Client:
    """A client of a store with the stream "orders" of six messages, which are dead letters of "invoices"."""
    _, client, _ = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(6)])
    await bury(client, 6)
    made: iris.Client = client
    return made


async def test_dead_letters_can_be_looked_at_with_their_messages_and_stay(
    client: iris.Client,
) -> None:
    found = await client.streams.dead_letters("orders", "invoices", limit=4)
    assert [letter.payload for letter in found] == [b"0", b"1", b"2", b"3"]
    assert {letter.dead.reason for letter in found if letter.dead} == {"no such customer"}
    assert len(await offsets(client, "")) == len(await offsets(client)) == 6
    with pytest.raises(StreamError, match="no consumer 'another'; it has invoices"):
        await offsets(client, "another")


async def test_a_redriven_message_is_delivered_again_and_counted_and_its_letter_goes(
    client: iris.Client,
) -> None:
    assert await client.streams.redrive("orders", "invoices", offset=[4, 1]) == RedriveInfo(2)
    assert await offsets(client) == [0, 2, 3, 5]
    assert await client.streams.redrive("orders", "invoices", limit=1) == RedriveInfo(1)
    found = await info(client)
    assert (found.redriven, found.lag) == (3, 3)
    async with client.streams.consumer("orders", "invoices", shared=True, max_deliver=1) as work:
        got = await take(work, 3)
        assert [(m.offset, m.deliveries) for m in got] == [(0, 1), (1, 1), (4, 1)]
        work.ack(*got)
        await work.flush()
    assert (await info(client)).lag == 0
    assert await client.streams.redrive("orders", "invoices") == RedriveInfo(3)
    assert await offsets(client) == []
    assert (await client.streams.describe("orders.dead")).messages == 0


async def test_a_worker_that_waits_gets_what_is_redriven_and_a_failure_is_a_dead_letter_again(
    client: iris.Client,
) -> None:
    async with client.streams.consumer("orders", "invoices", shared=True, max_deliver=1) as work:
        coming = asyncio.create_task(take(work, 1))
        assert await client.streams.redrive("orders", "invoices", offset=5) == RedriveInfo(1)
        (message,) = await coming
        assert message.payload == b"5"
        work.nack(message, reason="still not")
        await work.flush()
    letters = await client.streams.dead_letters("orders", "invoices")
    assert [(one.dead.offset, one.dead.reason) for one in letters if one.dead][-1] == (5, "still not")  # fmt: skip


async def test_a_redriven_letter_belongs_to_one_consumer(client: iris.Client) -> None:
    await bury(client, 6, "audit")
    assert await client.streams.redrive("orders", "audit") == RedriveInfo(6)
    assert await offsets(client, "audit") == []
    assert len(await offsets(client)) == 6
    assert (await info(client)).lag == 0


async def test_what_does_not_exist_cannot_be_redriven(client: iris.Client) -> None:
    assert await client.streams.redrive("orders", "invoices", offset=17) == RedriveInfo(0)
    assert await client.streams.redrive("orders", "invoices", offset=[]) == RedriveInfo(0)
    for misspelt in (client.streams.redrive, client.streams.dead_letters):
        with pytest.raises(StreamError, match="no consumer 'invoces'; it has invoices"):
            await misspelt("orders", "invoces")
    await client.streams.create("empty")
    with pytest.raises(StreamError, match="no consumer 'invoices'; it has none"):
        await client.streams.redrive("empty", "invoices")
    with pytest.raises(NoStream):
        await client.streams.redrive("nothing", "invoices")
    await client.streams.delete_consumer("orders", "invoices")
    with pytest.raises(StreamError, match="no consumer 'invoices'"):
        await client.streams.redrive("orders", "invoices")
    assert len(await offsets(client)) == 6


async def test_a_consumer_that_is_not_durable_is_not_redriven(client: iris.Client) -> None:
    async with client.streams.consumer("orders", "audit", durable=False, max_deliver=1) as work:
        work.nack(*await take(work, 6))
        await work.flush()
        with pytest.raises(StreamError, match="not durable"):
            await client.streams.redrive("orders", "audit")


async def test_a_letter_whose_message_was_removed_stays_and_is_counted(client: iris.Client) -> None:
    await client.streams.append_many("orders", [b"6", b"7"])
    await client.streams.change("orders", max_messages=2)
    await client.streams.append("orders", b"8")
    await client.streams.change("orders", max_messages=0)
    left = (await client.streams.describe("orders")).oldest
    assert left >= 6
    letters = await offsets(client)
    assert letters  # the limit of the stream also holds for its dead letters
    assert await client.streams.redrive("orders", "invoices") == RedriveInfo(0, gone=len(letters))
    assert await offsets(client) == letters


async def test_a_consumer_without_room_keeps_the_other_letters(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    for _ in range(6):
        await client.streams.append("orders", b"x")
    await bury(client, 6)
    with mock.patch("relay.store.cursor.MAX_RECORDS_BYTES", 40):
        done = await client.streams.redrive("orders", "invoices")
        assert (done.redriven + done.left, done.gone) == (6, 0)
        assert 0 < done.redriven < 6
        assert len(await offsets(client)) == done.left
    assert await client.streams.redrive("orders", "invoices") == RedriveInfo(done.left)


async def test_more_letters_than_one_call_holds_are_redriven(setting: Any) -> None:
    _, client, _ = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"x"] * 30)
    await bury(client, 30)
    with mock.patch("iris.streams.redriving.MAX_REDRIVEN", 7):
        assert await client.streams.redrive("orders", "invoices") == RedriveInfo(30)
    assert (await info(client)).lag == 30


@pytest.mark.parametrize("at", ["before the consumer is saved", "before the letters go", "after"])
async def test_a_store_that_dies_while_it_redrives_loses_no_message(
    tmp_path: Path, at: str
) -> None:
    """At any point, each message is a dead letter or will be delivered, or both."""

    class Died(Exception):
        pass

    async with (
        LocalCluster(data=tmp_path) as cluster,
        cluster.client() as client,
        cluster.client() as other,
    ):
        await client.streams.create("orders")
        await client.streams.append_many("orders", [b"%d" % n for n in range(6)])
        await bury(client, 6)
        for stream in cluster.store.store.streams.values():  # type: ignore[union-attr]  # it runs
            if stream.consumer_calls is not None:
                stream.consumer_calls.close()  # saves what was settled, which otherwise is saved a moment later
        where = {
            "before the consumer is saved": "relay.store.consumer.Consumer.save",
            "before the letters go": "relay.store.log.Log.remove",
            "after": "relay.store.consumer_calls.ConsumerCalls._after_settle",
        }
        with mock.patch(where[at], side_effect=Died), pytest.raises(StreamUnavailable):
            await client.streams.redrive("orders", "invoices", limit=3)
        for stream in cluster.store.store.streams.values():  # type: ignore[union-attr]  # it runs
            stream.consumer_calls = None  # nothing more is saved
        await cluster.stop_store()
        await cluster.start_store()
        letters, found = await offsets(client), await info(client)
        saved = at != "before the consumer is saved"
        assert found.lag == (3 if saved else 0)
        assert letters == ([3, 4, 5] if at == "after" else [0, 1, 2, 3, 4, 5])
        assert await client.streams.redrive("orders", "invoices") == RedriveInfo(len(letters))
        async with other.streams.consumer("orders", "invoices", shared=True, max_deliver=1) as work:
            got = await take(work, 6)
            assert sorted(message.offset for message in got) == list(range(6))
            work.ack(*got)
            await work.flush()
        assert (await offsets(client), (await info(client)).lag) == ([], 0)


async def test_a_disk_that_fails_while_the_consumer_is_saved_keeps_the_letters(
    client: iris.Client,
) -> None:
    with (
        mock.patch.object(Log, "remove") as remove,
        mock.patch(
            "relay.store.consumer.Consumer.save", side_effect=LogWriteFailed("p", "disk full")
        ),
        pytest.raises(StreamUnavailable, match="disk full"),
    ):
        await client.streams.redrive("orders", "invoices")
    assert not remove.called
    assert len(await offsets(client)) == 6


# -- pausing -----------------------------------------------------------------------------------------------------


async def test_a_paused_consumer_gets_nothing_loses_nothing_and_others_go_on(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"0", b"1"])
    async with (
        other.streams.consumer("orders", "invoices", prefetch=1) as work,
        other.streams.consumer("orders", "audit") as audit,
    ):
        (held,) = await take(work, 1)
        assert (await client.streams.pause_consumer("orders", "invoices")).paused
        await client.streams.append("orders", b"2")
        coming = asyncio.create_task(take(work, 2))
        assert [m.payload for m in await take(audit, 3)] == [b"0", b"1", b"2"]
        work.ack(held)  # what a worker holds may still be settled
        await work.flush()
        found = await info(client)
        assert (found.paused, found.lag, found.pending, coming.done()) == (True, 2, 0, False)
        assert not (await info(client, "audit")).paused
        assert not (await client.streams.resume_consumer("orders", "invoices")).paused
        assert [m.payload for m in await coming] == [b"1", b"2"]


async def test_a_pause_outlives_the_store_and_stays_when_all_consumers_are_resumed(
    tmp_path: Path,
) -> None:
    async with LocalCluster(data=tmp_path) as cluster, cluster.client() as client:
        await client.streams.create("orders")
        await client.streams.append("orders", b"0")
        await bury(client, 1)
        await client.streams.pause_consumer("orders", "invoices")
        await client.streams.redrive("orders", "invoices")
        await client.streams.pause("orders", consumers=True)
        await client.streams.resume("orders")
        for stream in cluster.store.store.streams.values():  # type: ignore[union-attr]  # it runs
            stream.consumer_calls = None  # nothing more is saved
        await cluster.stop_store()
        await cluster.start_store()
        found = await info(client)
        assert (found.paused, found.redriven, found.lag) == (True, 1, 1)
        async with client.streams.consumer(
            "orders", "invoices", shared=True, max_deliver=1
        ) as work:
            coming = asyncio.create_task(take(work, 1))
            await client.streams.resume_consumer("orders", "invoices")
            assert [m.payload for m in await coming] == [b"0"]


# -- settings ----------------------------------------------------------------------------------------------------


async def test_settings_change_without_a_new_position_and_workers_go_on(setting: Any) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append_many("orders", [b"%d" % n for n in range(4)])
    async with other.streams.consumer(
        "orders", "invoices", shared=True, max_deliver=1, prefetch=1
    ) as work:
        work.ack(*await take(work, 1))
        await work.flush()
        found = await client.streams.change_consumer(
            "orders", "invoices", max_deliver=2, ack_timeout=45.0
        )
        assert (found.max_deliver, found.ack_timeout_us, found.floor) == (2, 45_000_000, 1)
        for expected in (1, 2):  # the worker was written for one delivery
            (message,) = await take(work, 1)
            assert (message.offset, message.deliveries) == (1, expected)
            work.nack(message)
        (message,) = await take(work, 1)
        assert message.offset == 2
        work.ack(message)
        await work.flush()
    assert await offsets(client) == [1]
    async with other.streams.consumer(
        "orders", "invoices", shared=True, max_deliver=2, ack_timeout=45.0
    ) as work:
        assert [m.offset for m in await take(work, 1)] == [3]
    with pytest.raises(StreamError, match="max_deliver 2, not 7"):
        async with other.streams.consumer("orders", "invoices", shared=True, max_deliver=7) as work:
            await take(work, 1)


async def test_a_changed_ack_timeout_holds_for_what_is_held_and_for_the_worker(
    setting: Any,
) -> None:
    _, client, other = setting
    await client.streams.create("orders")
    await client.streams.append("orders", b"0")
    async with (
        other.streams.consumer("orders", "invoices", shared=True) as first,
        other.streams.consumer("orders", "invoices", shared=True) as second,
    ):
        await take(first, 1)
        await client.streams.change_consumer("orders", "invoices", ack_timeout=0.05)
        (message,) = await take(second, 1)  # long before 30 s are over
        assert second._worker is not None
        assert second._worker.lease_us == 50_000
        second.ack(message)
        await second.flush()


async def test_settings_that_are_out_of_range_are_refused(client: iris.Client) -> None:
    for change in (
        {"max_deliver": -1},
        {"max_deliver": 65_536},
        {"ack_timeout": 0.0},
        {"ack_timeout": 9e4},
    ):
        with pytest.raises(iris.ConfigError, match=next(iter(change))):
            await client.streams.change_consumer("orders", "invoices", **change)  # type: ignore[arg-type]  # one of both
    with pytest.raises(StreamError, match="no consumer"):
        await client.streams.pause_consumer("orders", "nobody")
