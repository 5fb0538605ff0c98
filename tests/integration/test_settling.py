"""A message is settled by the consumer that delivered it: any other one refuses it, and settles nothing."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

import iris
from iris.streams import Consumer, StreamMessage
from iris.testing import LocalCluster

SETTLE: Final[dict[str, Callable[[Any, StreamMessage], None]]] = {
    "ack": lambda work, message: work.ack(message),
    "ack_through": lambda work, message: work.ack_through(message),
    "nack": lambda work, message: work.nack(message),
    "touch": lambda work, message: work.touch(message),
}


@asynccontextmanager
async def client_of(data: Path) -> AsyncIterator[iris.Client]:
    async with LocalCluster(data=data) as cluster, cluster.client() as client:
        yield client


async def take(consumer: Consumer, count: int = 1) -> list[StreamMessage]:
    async with asyncio.timeout(15.0):
        return [await anext(consumer) for _ in range(count)]


async def lag(client: iris.Client, stream: str, consumer: str) -> int:
    (found,) = [one for one in await client.streams.consumers(stream) if one.name == consumer]
    return found.lag


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("how", SETTLE)
async def test_a_consumer_of_another_stream_refuses_a_message(
    how: str, partitions: int, tmp_path: Path
) -> None:
    async with client_of(tmp_path) as client:
        for name in ("a", "b"):
            await client.streams.create(name, partitions=partitions)
            await client.streams.append_many(name, [b"1", b"2"], partition=partitions - 1)
        async with (
            client.streams.consumer("a", "work", shared=True) as of_a,
            client.streams.consumer("b", "work", shared=True) as of_b,
        ):
            first, second = await take(of_a, 2)
            await take(of_b, 2)
            shown = "a" if partitions == 1 else r"a/2"
            with pytest.raises(ValueError, match=rf"is of stream '{shown}' .* reads stream 'b"):
                SETTLE[how](of_b, first)
            await of_b.flush()
            assert await lag(client, "b", "work") == 2  # nothing was settled there
            SETTLE[how](of_a, first)
            of_a.ack(second)
            await of_a.flush()


@pytest.mark.parametrize("how", SETTLE)
async def test_another_consumer_of_the_stream_refuses_a_message(how: str, tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("orders")
        await client.streams.append("orders", b"1")
        async with (
            client.streams.consumer("orders", "invoices", shared=True) as invoices,
            client.streams.consumer("orders", "audit", shared=True) as audit,
        ):
            (message,) = await take(invoices)
            await take(audit)
            with pytest.raises(
                ValueError, match="delivered by consumer 'invoices', not by 'audit'"
            ):
                SETTLE[how](audit, message)
            await audit.flush()
            assert await lag(client, "orders", "audit") == 1


async def test_of_several_messages_none_is_settled_if_one_is_of_another_stream(
    tmp_path: Path,
) -> None:
    async with client_of(tmp_path) as client:
        for name in ("a", "b"):
            await client.streams.create(name, partitions=2)
            for partition in (0, 1):
                await client.streams.append(name, b"1", partition=partition)
        async with (
            client.streams.consumer("a", "work", shared=True) as of_a,
            client.streams.consumer("b", "work", shared=True) as of_b,
        ):
            others = await take(of_a, 2)
            own = await take(of_b, 2)
            with pytest.raises(ValueError, match="is of stream 'a"):
                of_b.ack(*own, others[0])
            await of_b.flush()
            assert await lag(client, "b", "work") == 2


async def test_a_stream_that_was_made_again_does_not_settle_messages_of_the_one_before(
    tmp_path: Path,
) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("orders")
        await client.streams.append("orders", b"before")
        async with client.streams.consumer("orders", "work", shared=True) as work:
            (before,) = await take(work)
        await client.streams.delete("orders")
        await client.streams.create("orders")
        await client.streams.append("orders", b"after")
        async with client.streams.consumer("orders", "work", shared=True) as work:
            await take(work)
            with pytest.raises(ValueError, match=f"log {before.uuid[:8]}"):
                work.ack(before)
            await work.flush()
            assert await lag(client, "orders", "work") == 1


async def test_a_worker_that_has_received_nothing_settles_what_another_process_got(
    tmp_path: Path,
) -> None:
    async with client_of(tmp_path) as client:
        for name in ("a", "b"):
            await client.streams.create(name)
            await client.streams.append(name, b"1")
        async with client.streams.consumer("a", "work", shared=True) as work:
            (message,) = await take(work)
            message = pickle.loads(pickle.dumps(message))
            async with client.streams.consumer("a", "work", shared=True) as fresh:
                fresh.ack(message)
                await fresh.flush()
            assert await lag(client, "a", "work") == 0
            async with client.streams.consumer("b", "work", shared=True) as wrong:
                with pytest.raises(ValueError, match="is of stream 'a'"):
                    wrong.ack(message)


async def test_what_a_reader_read_is_settled_by_a_consumer_of_its_stream(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("a")
        await client.streams.append("a", b"1")
        async with client.streams.consumer("a", "work", shared=True) as work:
            await take(work)
            async for message in client.streams.read("a", follow=False):
                assert (message.stream, message.consumer) == ("a", "")
                work.ack(message)
            await work.flush()
        assert await lag(client, "a", "work") == 0


async def test_a_dead_letter_is_settled_in_its_own_stream(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("a")
        await client.streams.append_many("a", [b"1", b"2"])
        async with client.streams.consumer("a", "work", shared=True, max_deliver=1) as work:
            failed, done = await take(work, 2)
            work.ack(done)
            work.nack(failed)
            await work.flush()
            (letter,) = await client.streams.dead_letters("a", "work")
            assert letter.stream == "a.dead"
            with pytest.raises(ValueError, match=r"is of stream 'a\.dead'"):
                work.ack(letter)
        async with client.streams.consumer("a.dead", "clerk", shared=True) as clerk:
            (delivered,) = await take(clerk)
            assert delivered.uuid == letter.uuid
            clerk.ack(delivered)
            await clerk.flush()
        assert await lag(client, "a.dead", "clerk") == 0


OWN: Final[dict[str, Callable[[StreamMessage], None]]] = {
    "ack": lambda message: message.ack(),
    "nack": lambda message: message.nack(delay=1.0, reason="late"),
    "touch": lambda message: message.touch(),
}


@pytest.mark.parametrize("partitions", [1, 3])
async def test_a_message_settles_itself_with_the_worker_that_received_it(
    partitions: int, tmp_path: Path
) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("a", partitions=partitions)
        await client.streams.append_many("a", [b"1", b"2", b"3"], partition=partitions - 1)
        async with (
            client.streams.consumer("a", "work", shared=True, prefetch=3, max_deliver=1) as work,
            client.streams.consumer("a", "work", shared=True) as idle,
        ):
            done, failed, long = await take(work, 3)
            done.ack()
            failed.nack(reason="no such customer")
            long.touch()
            await work.flush()
            (state,) = await client.streams.consumers("a")
            assert (state.lag, state.pending) == (1, 1)
            (letter,) = await client.streams.dead_letters("a", "work")
            assert letter.dead is not None
            assert (letter.dead.offset, letter.dead.reason) == (1, "no such customer")
            copy.copy(long).ack()
            await work.flush()
            assert await lag(client, "a", "work") == 0
            assert idle.lag == 0


@pytest.mark.parametrize("how", OWN)
async def test_a_message_that_no_worker_received_says_that_it_cannot_settle_itself(
    how: str, tmp_path: Path
) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("a")
        await client.streams.append("a", b"1")
        async with client.streams.read("a", follow=False) as reader:
            (message,) = [each async for each in reader]
        with pytest.raises(
            ValueError, match="message 0 of stream 'a' was not delivered by a consumer"
        ):
            OWN[how](message)
        with pytest.raises(ValueError, match="message 5 of stream 'b' was not delivered"):
            OWN[how](StreamMessage(b"", "b", offset=5))


@pytest.mark.parametrize("how", OWN)
async def test_a_message_whose_worker_it_does_not_know_any_more_says_what_to_do(
    how: str, tmp_path: Path
) -> None:
    async with client_of(tmp_path) as client:
        await client.streams.create("a")
        await client.streams.append("a", b"1")
        async with client.streams.consumer("a", "work", shared=True) as work:
            (message,) = await take(work)
            for one in (pickle.loads(pickle.dumps(message)), copy.deepcopy(message)):
                assert one == message
                with pytest.raises(
                    ValueError, match="of consumer 'work', because the message was pickled"
                ):
                    OWN[how](one)
                work.touch(one)
            assert msgspec.json.decode(msgspec.json.encode(message))["offset"] == 0
        with pytest.raises(iris.Closed, match="consumer 'work'"):
            OWN[how](message)
        del work
        gc.collect()
        with pytest.raises(ValueError, match="or the worker no longer exists"):
            OWN[how](message)
