"""Streams in a bucket that are larger than the disk of their store."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.buckets import Group, append_all, check, whole
from support.stores import PATIENCE_S

import iris
from iris.errors import StreamDamaged

pytestmark = pytest.mark.timeout(180)

LIMIT = 256 << 10
# With the pause of a directory all messages are there before the store has looked at how large segments may be.
SMALL = ("--disk-limit", str(LIMIT), "--checkpoint-bytes", "300000", "--bucket-pause-ms", "100")
BODY = 4000


def body(number: int) -> bytes:
    return f"{number:08d}".encode() + b"x" * BODY


def numbers(messages: list[bytes]) -> list[int]:
    return [int(message[:8]) for message in messages]


async def fill(client: iris.Client, name: str, first: int, count: int) -> None:
    """Append `count` messages in order."""
    for at in range(first, first + count, 20):
        await asyncio.gather(*await append_all(client, name, [body(one) for one in range(at, min(at + 20, first + count))]))  # fmt: skip


def objects(group: Group) -> list[Path]:
    return sorted((group.bucket / "segment").glob("*/*"))


async def until(holds: object) -> None:
    assert callable(holds)
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it did not happen in time"
        await asyncio.sleep(0.05)


async def test_a_stream_of_twenty_times_the_disk_is_served_and_taken_over(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, *SMALL)
        group.start(2, None, *SMALL)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            for number in (1, 2):
                await group.logged(number, "store.peer_seen")
            count = 20 * LIMIT // BODY
            await fill(client, "orders", 0, count // 2)
            middle = datetime.now(UTC)
            await fill(client, "orders", count // 2, count - count // 2)
            await until(lambda: sum(one.stat().st_size for one in objects(group)) > 18 * LIMIT)
            assert numbers(await whole(client, "orders")) == list(range(count))
            async with client.streams.read("orders", middle, follow=False) as reader:
                found = [bytes(message.payload) async for message in reader]
            assert set(range(count // 2, count)) <= set(numbers(found))
            assert len(found) < count // 2 + 40
            first = await group.holder(client, "orders")
            await group.logged(first, "store.checkpoint")
            info = await client.streams.describe("orders")
            assert info.size_bytes - 2 * LIMIT < info.moved_bytes < info.size_bytes
            group.kill(first)
            group.lose_disk(first)
            assert await group.holder(client, "orders") == 3 - first
            assert numbers(await whole(client, "orders")) == list(range(count))
            async with client.streams.consumer("orders", "billing", start="first") as worker:
                taken: list[int] = []
                while len(taken) < count:
                    message = await anext(worker)
                    taken.append(int(bytes(message.payload)[:8]))
                    worker.ack(message)
            assert taken == list(range(count))


async def test_retention_and_deletion_delete_objects(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, *SMALL)
        async with group.rig.client() as client:
            await group.create(client, "orders", max_bytes=6 * LIMIT)
            await fill(client, "orders", 0, 12 * LIMIT // BODY)
            await until(lambda: 3 * LIMIT < sum(one.stat().st_size for one in objects(group)) < 7 * LIMIT)  # fmt: skip
            kept = numbers(await whole(client, "orders"))
            assert kept == list(range(kept[0], 12 * LIMIT // BODY))
            await client.streams.delete("orders")
            await until(lambda: not objects(group))


async def test_old_records_that_cannot_be_read_hold_up_nothing_else(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, *SMALL)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await group.create(client, "payments")
            await fill(client, "orders", 0, 6 * LIMIT // BODY)
            await until(lambda: sum(one.stat().st_size for one in objects(group)) > 4 * LIMIT)
            objects(group)[0].unlink()
            with pytest.raises(StreamDamaged, match=r"segment/.* is missing"):
                await whole(client, "orders")
            last = (await client.streams.describe("orders")).end
            assert await client.streams.append("orders", body(last)) == last
            async with client.streams.read("orders", last, follow=False) as reader:
                assert numbers([bytes(message.payload) async for message in reader]) == [last]
            await client.streams.append("payments", body(1))
            assert numbers(await whole(client, "payments")) == [1]


async def test_a_bucket_that_is_silent_for_old_records_serves_the_tail_and_other_streams(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, *SMALL)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await group.create(client, "payments")
            count = 6 * LIMIT // BODY
            await fill(client, "orders", 0, count)
            await until(lambda: sum(one.stat().st_size for one in objects(group)) > 4 * LIMIT)
            segments, away = group.bucket / "segment", tmp_path / "away"
            segments.rename(away)
            segments.write_text("not a directory")
            reading = asyncio.create_task(whole(client, "orders"))
            assert await client.streams.append("orders", body(count)) == count
            await client.streams.append("payments", body(1))
            assert numbers(await whole(client, "payments")) == [1]
            async with client.streams.read("orders", count, follow=False) as reader:
                assert numbers([bytes(message.payload) async for message in reader]) == [count]
            assert not reading.done()
            segments.unlink()
            away.rename(segments)
            assert numbers(await reading)[:count] == list(range(count))


async def test_a_check_of_the_bucket_names_an_object_of_old_records_that_is_missing(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, *SMALL)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await fill(client, "orders", 0, 4 * LIMIT // BODY)
            await until(lambda: sum(one.stat().st_size for one in objects(group)) > 2 * LIMIT)
        assert await group.stop(1) == 0
        code, found = await check(group, 1)
        assert (code, found["damage"]) == (0, [])
        assert [one["state"] for one in found["databases"]] == ["same"]
        lost = objects(group)[1]
        lost.unlink()
        code, found = await check(group, 1)
        assert code == 1
        assert [lost.name in one and "is missing" in one for one in found["damage"]] == [True]
