"""Streams on the disk of a store join its bucket while they are in use: nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.buckets import Group, check, whole
from support.stores import PATIENCE_S

import iris
from iris.errors import ConfigError, StreamError, StreamExists, StreamUnavailable

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def loaded(client: iris.Client, name: str) -> AsyncIterator[list[bytes]]:
    """Append and consume all the while; yield what was acknowledged. At the end a worker was given all of it."""
    sent: list[bytes] = []
    given: list[bytes] = []
    going = True

    async def load(which: int) -> None:
        number = 0
        while going:
            message = b"%d-%d" % (which, number)
            await client.streams.append(name, message, timeout=PATIENCE_S)
            sent.append(message)
            number += 1

    async def work() -> None:
        async with client.streams.consumer(name, "billing", shared=True) as worker:
            async for message in worker:
                given.append(bytes(message.payload))
                worker.ack(message)

    working = asyncio.create_task(work())
    loads = [asyncio.create_task(load(which)) for which in range(4)]
    try:
        yield sent
        going = False
        await asyncio.gather(*loads)
        async with asyncio.timeout(PATIENCE_S):
            while not set(given) >= set(sent):  # noqa: ASYNC110 - the worker is given the rest
                await asyncio.sleep(0.02)
    finally:
        for task in (*loads, working):
            task.cancel()
        await asyncio.gather(*loads, working, return_exceptions=True)


async def test_a_stream_joins_under_load_and_outlives_its_store_and_its_disk(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.bucket_opened")
        async with group.rig.client() as client:
            made = await client.streams.create("orders", dedup_window=3600)
            await client.streams.append("orders", b"first", message_id="a")
            async with client.streams.consumer(
                "orders", "auditing", shared=True, max_deliver=1
            ) as worker:
                worker.nack(await anext(worker), reason="broken")
            async with loaded(client, "orders") as sent:
                while len(sent) < 100:  # noqa: ASYNC110 - others append
                    await asyncio.sleep(0.01)
                info = await client.streams.change("orders", durability="bucket", max_messages=10**6)  # fmt: skip
                assert (info.durability, info.uuid, info.max_messages) == ("bucket", made.uuid, 10**6)  # fmt: skip
                assert info.copy_lag_bytes is None
                joined = len(sent)
                while len(sent) < joined + 20:  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.01)
                group.start(2)
                await group.logged(2, "store.peer_seen")
                group.kill(1)
                group.lose_disk(1)
                killed = len(sent)
                while len(sent) < killed + 20:  # noqa: ASYNC110 - the second store takes over
                    await asyncio.sleep(0.01)
            there = await whole(client, "orders")
            assert there[0] == b"first"
            assert len(there) == len(set(there)) == len(sent) + 1
            assert set(there[1:]) == set(sent)
            for which in range(4):
                own = [one for one in there if one.startswith(b"%d-" % which)]
                assert own == [b"%d-%d" % (which, number) for number in range(len(own))]
            assert await client.streams.append("orders", b"first", message_id="a") == 0
            (letter,) = await client.streams.dead_letters("orders")
            assert bytes(letter.payload) == b"first"
            info = await client.streams.describe("orders")
            assert (info.durability, info.uuid, info.max_messages) == ("bucket", made.uuid, 10**6)


async def test_streams_that_record_or_are_compacted_join_without_a_gap(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.bucket_opened")
        async with group.rig.client() as client:
            await client.streams.create("news", topic="news.*")
            await client.streams.create("jobs", cluster="work")
            await client.streams.create("prices", compact=True)
            going = True
            published = 0

            async def publish() -> None:
                nonlocal published
                while going:
                    await client.publish("news.a", b"%d" % published)
                    await client.push("work", b"%d" % published)
                    published += 1
                    await client.flush()
                    await asyncio.sleep(0.002)

            publishing = asyncio.create_task(publish())
            for number in range(20):
                await client.streams.append("prices", b"%d" % number, key=f"k{number % 2}")
            for name in ("news", "jobs", "prices"):
                before = published
                while published < before + 20:  # noqa: ASYNC110 - it is being published
                    await asyncio.sleep(0.01)
                info = await client.streams.change(name, durability="bucket")
                assert info.durability == "bucket"
            going = False
            await publishing
            await client.streams.append("prices", b"last", key="k0")
            assert await group.stop(1) == 0
            group.start(1)
            for name in ("news", "jobs"):
                async with client.streams.read(name, "first", follow=False) as reader:
                    numbers = [int(bytes(message.payload)) async for message in reader]
                    assert not [
                        gap for gap in reader.gaps if gap.cause != "the store was not running"
                    ]
                assert numbers == list(range(published)), name
            assert (await whole(client, "prices"))[-1] == b"last"
            assert await group.stop(1) == 0
            code, report = await check(group, 1)
            assert (code, report["streams"]) == (0, 3), report
            assert {one["state"] for one in report["databases"]} == {"same"}


async def test_an_order_that_cannot_be_carried_out_is_an_error_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.bucket_opened")
        async with group.rig.client() as client:
            with pytest.raises(
                ConfigError, match="durability: 'tape' is unknown; use disk or bucket"
            ):
                await client.streams.change("orders", durability="tape")
            with pytest.raises(
                ConfigError, match="names a site; change the durability with a client of that site"
            ):
                await client.streams.change("eu:orders", durability="bucket")
            await client.streams.create("orders")
            assert (await client.streams.change("orders", durability="disk")).durability == "disk"
            with pytest.raises(StreamExists, match="with durability 'disk'; bring it into the bucket with `iris stream change orders"):  # fmt: skip
                await client.streams.create("orders", durability="bucket")
            assert (
                await client.streams.change("orders", durability="bucket")
            ).durability == "bucket"
            for durability in ("disk", "bucket"):
                there = await client.streams.create("orders", durability=durability)
                assert there.durability == "bucket"
            assert (
                await client.streams.change("orders", durability="bucket")
            ).durability == "bucket"
            with pytest.raises(StreamError, match="cannot go back to a disk; copy it"):
                await client.streams.change("orders", durability="disk")
            await client.streams.create("others")
            group.bucket.rename(tmp_path / "gone")
            group.bucket.touch()
            # The store gives up when nobody waits any more, which may be a moment before the client does.
            with pytest.raises(StreamUnavailable, match=r"no answer within 2 s|stays on the disk") as raised:  # fmt: skip
                await client.streams.change("others", durability="bucket", timeout=2)
            assert raised.value.may_have_run == ("no answer" in str(raised.value))
            await client.streams.append("others", b"it goes on")
            group.bucket.unlink()
            (tmp_path / "gone").rename(group.bucket)
            info = await client.streams.change("others", durability="bucket", timeout=PATIENCE_S)
            assert (info.durability, info.end) == ("bucket", 1)
            await client.streams.create("more")
            group.kill(1)
            group.start(1)  # and it has not opened the bucket yet
            info = await client.streams.change("more", durability="bucket", timeout=PATIENCE_S)
            assert info.durability == "bucket"
