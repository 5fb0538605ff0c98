"""A bucket that is away, full, locked or harmed, and a store too many: told, and nothing wrong is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import warm
from support.buckets import Group, numbered, whole
from support.lossy_s3 import Service, never
from support.required import cannot
from support.stores import small_disk

import iris
from iris.crypto.keys import GroupKey
from iris.errors import ConfigError, StreamUnavailable
from relay.store.bucket_check import check_bucket

pytestmark = pytest.mark.timeout(120)


async def test_an_append_to_a_bucket_that_is_away_waits_for_its_timeout_and_may_have_run(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            away = tmp_path / "away"
            group.bucket.rename(away)
            group.bucket.write_text("not a directory")
            with pytest.raises(StreamUnavailable) as caught:
                await client.streams.append("orders", b"first", timeout=1)
            assert caught.value.may_have_run
            await group.logged(1, "store.bucket_away")
            assert "Not a directory" in group.log(1)
            group.bucket.unlink()
            away.rename(group.bucket)
            await client.streams.append("orders", b"second", timeout=60)
            assert await whole(client, "orders") == [b"first", b"second"]


@contextlib.contextmanager
def mounted(directory: Path, size_mb: int) -> Iterator[Path]:
    """Mount a small disk. Skip the test where that is not allowed, unless tests of hosts are required."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(directory, size_mb))
        except PermissionError as err:
            cannot("HOSTS", str(err))
        yield disk


async def test_a_full_bucket_is_told_and_what_waits_is_stored_when_it_has_room(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "small", 4) as disk:
        bucket = disk / "bucket"
        bucket.mkdir()
        with Group(tmp_path, f"file://{bucket}") as group:
            group.start(1)
            async with group.rig.client() as client:
                await group.create(client, "orders")
                filler = disk / "filler"
                filler.write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
                large = bytes(1 << 20)
                waiting = asyncio.create_task(client.streams.append("orders", large, timeout=60))
                await group.logged(1, "store.bucket_away")
                assert "No space left on device" in group.log(1)
                assert not waiting.done()
                filler.unlink()
                assert await waiting == 0
                assert await whole(client, "orders") == [large]


def fill(path: Path) -> None:
    """Write a file until its disk is full. Raises OSError then."""
    with path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


async def test_a_full_disk_of_a_store_is_not_taken_for_a_bucket_that_is_away(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group, mounted(group.data(1), 32) as disk:
        disk.chmod(0o700)  # or the store refuses it
        group.start(1)
        try:
            async with group.rig.client() as client:
                await group.create(client, "orders")
                filler = disk / "filler"
                with pytest.raises(OSError, match="No space left"):
                    fill(filler)
                with pytest.raises(StreamUnavailable, match="No space left"):
                    await client.streams.append("orders", bytes(1 << 20), timeout=60)
                await group.logged(1, "store.bucket_streams_failed")
                assert "store.bucket_away" not in group.log(1)
                filler.unlink()
                await group.logged(1, "store.stream_reopened")
                await client.streams.append("orders", b"after", timeout=60)
        finally:
            group.kill(1)


async def test_credentials_that_are_revoked_are_named_and_nothing_is_acknowledged(
    tmp_path: Path,
) -> None:
    with Service() as service, Group(tmp_path, service.url, **service.environ) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            await client.streams.append("orders", b"before")
            service.faults = lambda method, path: "denied"
            with pytest.raises(StreamUnavailable) as caught:
                await client.streams.append("orders", b"during", timeout=1)
            assert caught.value.may_have_run
            await group.logged(1, "store.bucket_away")
            assert "check the credentials of this store" in group.log(1)
            service.faults = never
            await client.streams.append("orders", b"after", timeout=60)
            assert await whole(client, "orders") == [b"before", b"during", b"after"]


async def stop_and_remove(group: Group, client: iris.Client, count: int, at: int) -> tuple[Path, bytes]:  # fmt: skip
    """Append so many messages, stop the store, and remove the object `at` of its journal; return it."""
    group.start(1)
    await group.create(client, "orders")
    for message in numbered("", count):
        await client.streams.append("orders", message)
    assert await group.stop(1) == 0
    removed = sorted((group.bucket / "journal").glob("*/*"))[at]
    content = removed.read_bytes()
    removed.unlink()
    return removed, content


@pytest.mark.parametrize("at", [-1, -4])
async def test_an_object_that_was_removed_by_hand_is_noticed_at_the_next_start(
    tmp_path: Path, at: int
) -> None:
    with Group(tmp_path) as group:
        async with group.rig.client() as client:
            removed, content = await stop_and_remove(group, client, 6, at)
            left = sorted((group.bucket / "journal").glob("*/*"))
            group.start(1)
            await group.logged(1, "store.bucket_rolled_back")
            assert "bring the newer objects back" in group.log(1)
            assert sorted((group.bucket / "journal").glob("*/*")) == left, (
                "nothing was written to a bucket that lacks some"
            )
            removed.write_bytes(content)
            await group.logged(1, "store.bucket_opened", 2)
            assert await whole(client, "orders") == numbered("", 6)


@pytest.mark.parametrize("harm", ["huge", "pipe"])
async def test_an_object_that_is_huge_or_a_pipe_is_named_and_the_streams_on_the_disk_go_on(
    tmp_path: Path, harm: str
) -> None:
    with Group(tmp_path) as group:
        async with group.rig.client() as client:
            harmed, content = await stop_and_remove(group, client, 12, 1)
            if harm == "pipe":
                os.mkfifo(harmed)
            else:
                harmed.write_bytes(content)
                os.truncate(harmed, 1 << 40)  # more than any machine could read
            group.start(1)
            await group.logged(1, "store.bucket_damaged")
            said = (
                "it is not a regular file"
                if harm == "pipe"
                else f"it was written with {len(content)} bytes, and is longer"
            )
            assert (
                f"object {harmed.relative_to(group.bucket)} of bucket {group.url}: {said}"
                in group.log(1)
            )
            await client.streams.create("on-the-disk", durability="disk")
            assert await client.streams.append("on-the-disk", b"1") == 0
            harmed.unlink()
            harmed.write_bytes(content)
            await group.logged(1, "store.bucket_opened", 2)
            assert await whole(client, "orders") == numbered("", 12)


async def test_an_object_that_is_missing_in_the_middle_is_named_until_it_is_back(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        async with group.rig.client() as client:
            removed, content = await stop_and_remove(group, client, 12, 1)
            group.start(1)
            await group.logged(1, "store.bucket_damaged")
            name = removed.relative_to(group.bucket)
            assert f"object {name} is missing, and later ones" in group.log(1)
            assert "must be read again" not in group.log(1)
            removed.write_bytes(content)
            await group.logged(1, "store.bucket_opened", 2)
            assert await whole(client, "orders") == numbered("", 12)


async def test_a_second_store_on_the_same_data_says_so_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            command = [
                sys.executable, "-m", "relay.store", "--data", str(group.data(1)), "--relay", str(group.rig.socket), "--bucket", group.url,
            ]  # fmt: skip
            done = await asyncio.to_thread(warm.run, command, text=True, env=group.rig.environ)
            assert done.returncode == 2
            assert "another store" in done.stderr
            assert str(group.data(1)) in done.stderr
            assert await client.streams.append("orders", b"m") == 0
            assert len(list((group.bucket / "journals").iterdir())) == 1


async def test_a_stream_that_cannot_be_created_names_the_timeout_of_the_caller(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        group.start(1)
        async with group.rig.client() as client:
            await group.create(client, "orders")
            group.bucket.rename(tmp_path / "away")
            with pytest.raises(StreamUnavailable, match=r"no answer within 1\.5 s"):
                await client.streams.create("new", durability="bucket", timeout=1.5)


async def test_a_check_of_a_bucket_that_nobody_has_used_is_an_error(tmp_path: Path) -> None:
    key = tmp_path / "group.key"
    key.touch(mode=0o600)
    key.write_text(GroupKey(bytes(32)).reveal())
    with pytest.raises(ConfigError, match="no store has written to it"):
        await check_bucket(tmp_path, f"file://{tmp_path}/nowhere", None)
