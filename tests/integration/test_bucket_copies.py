"""Streams on a disk have a copy in the bucket that follows them, and nothing waits for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from support.buckets import Group, append_all, followed, numbered, whole
from support.stores import PATIENCE_S

from relay.store.bucket.copy_reading import read_copies
from relay.store.bucket.directory import Directory
from relay.store.log import Log
from relay.store.records import Record

pytestmark = pytest.mark.timeout(120)


async def copies(group: Group) -> dict[str, list[Record]]:
    """Return what the bucket has: uuid -> records."""
    found = await read_copies(Directory(group.bucket), group.key, group.directory / "read")
    return {one.uuid.hex(): records_of(one.path) for one in found}


def records_of(path: Path) -> list[Record]:
    """Return the records of a log."""
    with Log.open(str(path)) as log:
        records: list[Record] = []
        at = log.oldest
        while at < log.next:
            chunk = log.read(at, max_bytes=1 << 20, now_us=1 << 62)
            records += [item for item in chunk.items if isinstance(item, Record)]
            at = chunk.next
        return records


def on_disk(group: Group, number: int, uuid: str) -> list[Record]:
    """Return the records of a stream of a stopped store."""
    return records_of(group.data(number) / "streams" / uuid)


async def test_a_copy_follows_its_stream_record_by_record(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            info = await client.streams.create("orders")
            assert info.durability == "disk"
            for turn in range(3):
                await asyncio.gather(*await append_all(client, "orders", numbered(f"{turn}-", 100)))
            info = await followed(client, "orders")
            assert await group.stop(1) == 0
            assert "store.copies_late" not in group.log(1)
            found = await copies(group)
            assert found == {info.uuid: on_disk(group, 1, info.uuid)}
            assert found[info.uuid]


async def test_a_killed_store_goes_on_with_its_copy_and_does_not_begin_again(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            info = await client.streams.create("orders")
            await followed(client, "orders")
            for turn in range(3):
                tasks = await append_all(client, "orders", numbered(f"{turn}-", 200))
                await tasks[0]
                group.kill(1)
                group.start(1)
                await asyncio.gather(*tasks)
                await group.logged(1, "store.copies_opened", turn + 2)
            info = await followed(client, "orders")
            assert await group.stop(1) == 0
            assert "store.copy_behind" not in group.log(1)
            assert await copies(group) == {info.uuid: on_disk(group, 1, info.uuid)}


async def test_a_bucket_that_is_away_stops_no_stream_and_gets_everything_when_it_is_back(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            info = await client.streams.create("orders")
            await client.streams.append("orders", b"before")
            await followed(client, "orders")
            away = tmp_path / "away"
            group.bucket.rename(away)
            group.bucket.write_text("not a directory")
            body = bytes(1 << 20)
            for _ in range(3 * 64):  # three times what may wait for a bucket
                await client.streams.append("orders", body, timeout=PATIENCE_S)
            info = await client.streams.describe("orders")
            assert info.copy_behind
            assert info.copy_lag_bytes is not None
            assert info.copy_lag_bytes > 3 * (60 << 20)
            group.bucket.unlink()
            away.rename(group.bucket)
            info = await followed(client, "orders")
            await client.streams.append("orders", b"after")
            await followed(client, "orders")
            assert await group.stop(1) == 0
            found = await copies(group)
            assert len(found[info.uuid]) == 3 * 64 + 2
            assert found == {info.uuid: on_disk(group, 1, info.uuid)}


async def test_consumers_and_dead_letters_are_copied_and_a_deleted_stream_is_not_restored(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            await client.streams.create("orders")
            await client.streams.create("gone")
            await client.streams.append("gone", b"m")
            await client.streams.append("orders", b"m")
            async with client.streams.consumer("orders", "billing", max_deliver=1) as worker:
                worker.nack(await anext(worker), reason="broken")
            until_s = time.monotonic() + PATIENCE_S
            while (await client.streams.consumers("orders"))[0].redelivering:
                assert time.monotonic() < until_s
                await asyncio.sleep(0.05)
            await followed(client, "gone")
            await client.streams.delete("gone")
            await followed(client, "orders.dead")
            info = await followed(client, "orders")
            assert await group.stop(1) == 0
            found = await copies(group)
            assert len(found) == 2
            with Log.open(str(group.directory / "read" / info.uuid)) as log:
                assert [row[:7] for row, _ in log.database.rows(b"c")] == [b"billing"]


async def test_a_stream_without_a_copy_is_not_in_the_bucket_until_it_is_changed(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            await group.logged(1, "store.copies_opened")
            info = await client.streams.create("orders", copy=False)
            assert (info.copy, info.copy_lag_bytes) == (False, None)
            await client.streams.append("orders", b"m")
            await client.streams.change("orders", copy=True)
            await followed(client, "orders")
            assert list(await copies(group)) == [info.uuid]
            info = await client.streams.change("orders", copy=False)
            assert info.copy_lag_bytes is None
            await client.streams.append("orders", b"n")
            assert await group.stop(1) == 0
            assert await copies(group) == {}


async def test_checkpoints_keep_the_copies_small(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        group.start(1, None, "--checkpoint-bytes", "100000")
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            await client.streams.create("orders", max_messages=20)
            await followed(client, "orders")
            sent = numbered("x" * 2000, 400)
            for at in range(0, len(sent), 20):
                await asyncio.gather(*await append_all(client, "orders", sent[at : at + 20]))
            await group.logged(1, "store.checkpoint")
            info = await followed(client, "orders")
            journals = group.bucket / "journal"
            assert sum(path.stat().st_size for path in journals.rglob("*")) < 600_000
            assert await whole(client, "orders") == sent[-20:]
            group.kill(1)
            group.start(1, None, "--checkpoint-bytes", "100000")
            await client.streams.append("orders", b"next", timeout=PATIENCE_S)
            await followed(client, "orders")
            assert await group.stop(1) == 0
            assert await copies(group) == {info.uuid: on_disk(group, 1, info.uuid)}


async def test_what_was_written_while_the_store_had_no_bucket_is_copied_later(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        await group.logged(1, "store.attached")
        async with group.rig.client() as client:
            info = await client.streams.create("orders")
            await client.streams.append("orders", b"a")
            await followed(client, "orders")
            assert await group.stop(1) == 0
            url, group.url = group.url, ""  # without a bucket
            group.start(1)
            await client.streams.append("orders", b"b", timeout=PATIENCE_S)
            assert await group.stop(1) == 0
            group.url = url
            group.start(1)
            await group.logged(1, "store.copies_opened", 2)
            await followed(client, "orders")
            assert await group.stop(1) == 0
            found = await copies(group)
            assert len(found[info.uuid]) == 2
            assert found == {info.uuid: on_disk(group, 1, info.uuid)}
