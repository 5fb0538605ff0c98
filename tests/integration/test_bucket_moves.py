"""Moves of streams between stores of a bucket, as processes: nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from support.buckets import Group, numbered, whole
from support.stores import PATIENCE_S

from iris.crypto.keys import StoreKey, public_id
from iris.errors import ConfigError, StreamError

pytestmark = pytest.mark.timeout(180)


def id_of(group: Group, number: int) -> str:
    """Return the id of a store."""
    text = (group.data(number) / "store.key").read_text()
    return public_id(StoreKey.parse(text.strip()).public_key).hex()


async def both(group: Group) -> None:
    """Start two stores that see each other."""
    for number in (1, 2):
        group.start(number)
    for number in (1, 2):
        await group.logged(number, "store.bucket_opened")
        await group.logged(number, "store.peer_seen")


async def test_a_stream_moves_back_and_forth_under_load_and_each_message_is_there_once(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client, group.rig.client() as reading:
            await group.create(client, "orders")
            sent: list[bytes] = []
            moving = True

            async def load() -> None:
                while moving:
                    message = b"%d" % len(sent)
                    await client.streams.append("orders", message, timeout=PATIENCE_S)
                    sent.append(message)

            seen: list[bytes] = []

            async def read() -> None:
                async with reading.streams.read("orders", "first") as reader:
                    async for message in reader:
                        seen.append(bytes(message.payload))

            await reading.streams.describe("orders")  # or its first look may fall into a move
            loading, follower = asyncio.create_task(load()), asyncio.create_task(read())
            at = await group.holder(client, "orders")
            for _ in range(10):
                at = 3 - at
                before = len(sent)
                info = await client.streams.move("orders", to=id_of(group, at))
                assert info.store == id_of(group, at)
                while len(sent) < before + 5:  # noqa: ASYNC110 - others append
                    await asyncio.sleep(0.01)
            moving = False
            await loading
            assert await whole(client, "orders") == sent
            async with asyncio.timeout(PATIENCE_S):
                while len(seen) < len(sent) and not follower.done():  # noqa: ASYNC110 - it follows
                    await asyncio.sleep(0.01)
            if follower.done():
                await follower  # raises why it did not go on
            follower.cancel()
            for number in (1, 2):
                assert "store.call_refused" not in group.log(number)
            with contextlib.suppress(asyncio.CancelledError):
                await follower
            assert seen == sent
            assert await group.holder(client, "orders") == at


async def test_acks_message_ids_dead_letters_and_limits_move_along(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "orders", dedup_window=3600, max_messages=1000)
            await client.streams.append("orders", b"first", message_id="a")
            for message in numbered("", 9):
                await client.streams.append("orders", message)
            async with client.streams.consumer(
                "orders", "billing", shared=True, max_deliver=1
            ) as worker:
                for turn in range(5):
                    message = await anext(worker)
                    if turn == 0:
                        worker.nack(message, reason="broken")
                    else:
                        worker.ack(message)
                at = await group.holder(client, "orders")
                info = await client.streams.move("orders", to=id_of(group, 3 - at)[:8])
                assert (info.durability, info.max_messages, info.end) == ("bucket", 1000, 10)
                left = [await anext(worker) for _ in range(5)]
                assert [bytes(one.payload) for one in left] == numbered("", 9)[4:]
                worker.ack(*left)
            assert await client.streams.append("orders", b"first", message_id="a") == 0
            assert await client.streams.append("orders", b"next") == 10
            (letter,) = await client.streams.dead_letters("orders")
            assert bytes(letter.payload) == b"first"
            await client.streams.delete("orders")


async def test_a_stream_that_records_a_topic_says_that_it_was_moved(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "orders", topic="orders.*")
            await client.publish("orders.new", b"before")
            await client.flush()
            at = await group.holder(client, "orders")
            await client.streams.move("orders", to=id_of(group, 3 - at))
            await client.publish("orders.new", b"after")
            async with asyncio.timeout(PATIENCE_S):
                async with client.streams.read("orders", "first") as reader:
                    assert [bytes((await anext(reader)).payload) for _ in range(2)] == [
                        b"before",
                        b"after",
                    ]
                    assert [gap.cause for gap in reader.gaps] == ["the stream was moved"]


async def test_a_store_that_cannot_be_moved_to_is_refused_with_those_that_can(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await client.streams.create("local")
            at = await group.holder(client, "orders")
            host = (await client.streams.describe("orders")).host
            other = f"name one of {id_of(group, 3 - at)[:8]} on {host}"
            with pytest.raises(
                ConfigError, match=f"the stream is at the store .* already; {other}"
            ):
                await client.streams.move("orders", to=id_of(group, at))
            with pytest.raises(
                ConfigError, match=f"no store of the stream's bucket is called 'nowhere'; {other}"
            ):
                await client.streams.move("orders", to="nowhere")
            with pytest.raises(
                ConfigError,
                match=f"'{host}' means 2 stores of the bucket; name the one that you mean by its id: {id_of(group, 3 - at)[:8]}",
            ):
                await client.streams.move("orders", to=host)
            with pytest.raises(StreamError, match="on the disk of the store"):
                await client.streams.move("local", to=host)


async def test_a_store_that_is_killed_during_a_move_leaves_each_message_once(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            sent: list[bytes] = []
            for turn in range(6):
                at = await group.holder(client, "orders")
                victim = at if turn % 2 else 3 - at
                tasks = [
                    asyncio.create_task(
                        client.streams.append("orders", message, timeout=PATIENCE_S)
                    )
                    for message in numbered(f"{turn}-", 200)
                ]
                moving = asyncio.create_task(client.streams.move("orders", to=id_of(group, 3 - at)))
                await asyncio.sleep(0.02 * turn)
                group.kill(victim)
                await asyncio.sleep(0.1)
                group.start(victim)
                await asyncio.gather(moving, return_exceptions=True)
                assert len(set(await asyncio.gather(*tasks))) == 200
                sent += numbered(f"{turn}-", 200)
            assert await whole(client, "orders") == sent


async def test_a_partition_moves_alone_and_balance_says_where_it_should_be(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await both(group)
        async with group.rig.client() as client:
            await client.streams.create(
                "orders", partitions=2, durability="bucket", timeout=PATIENCE_S
            )
            infos = await client.streams.partitions("orders")
            ids = [info.store for info in infos]
            assert set(ids) == {id_of(group, 1), id_of(group, 2)}
            for message in numbered("", 10):
                await client.streams.append("orders", message, key=message, timeout=PATIENCE_S)
            assert await client.streams.balance() == []
            moved = await client.streams.move("orders/1", to=ids[0])
            assert (moved.name, moved.store, moved.partition) == ("orders/1", ids[0], 1)
            assert sorted(await whole(client, "orders")) == sorted(numbered("", 10))
            for message in numbered("more", 10):
                await client.streams.append("orders", message, key=message, timeout=PATIENCE_S)
            (found,) = await client.streams.balance("orders")
            assert (found.store, found.to_store, found.movable) == (ids[0], ids[1], True)
            await client.streams.move(found.name, to=found.to_store)
            assert await client.streams.balance() == []
            wanted = sorted(numbered("", 10) + numbered("more", 10))
            assert sorted(await whole(client, "orders")) == wanted
