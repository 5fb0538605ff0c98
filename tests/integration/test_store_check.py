"""`iris store check` finds what is wrong in a bucket and on the disk, and finds nothing where nothing is."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import warm
from support.buckets import Group, check, numbered

from iris.crypto.keys import GroupKey
from relay.store.batches import PLACE_ROW
from relay.store.bucket.replica import Place
from relay.store.bucket.shelf import DIRECTORY
from relay.store.database import Database

pytestmark = pytest.mark.timeout(180)

MESSAGES = 30


async def fill(group: Group) -> None:
    """Make a stream, and append one message per object to it."""
    group.start(1)
    async with group.rig.client() as client:
        await group.create(client, "orders")
        for message in numbered("", MESSAGES):
            await client.streams.append("orders", message)


def objects(group: Group) -> list[Path]:
    return sorted((group.bucket / "journal").glob("*/*"))


async def test_a_bucket_in_use_and_one_at_rest_are_not_objected_to(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await fill(group)
        before = {path: path.read_bytes() for path in group.bucket.rglob("*") if path.is_file()}
        code, found = await check(group, 1)
        assert (code, found["damage"], found["garbage"], found["databases"]) == (0, [], [], [])
        assert "so its streams were not compared" in found["skipped"]
        assert found["streams"] == 1
        assert await group.stop(1) == 0
        code, found = await check(group, 1)
        assert (code, found["damage"], found["garbage"], found["skipped"]) == (0, [], [], "")
        assert [one["state"] for one in found["databases"]] == ["same"]
        assert {
            path: path.read_bytes() for path in group.bucket.rglob("*") if path.is_file()
        } == before
        # The next life takes the journal of this one.
        group.start(1)
        await group.logged(1, "store.bucket_opened", 2)
        assert await group.stop(1) == 0
        code, found = await check(group, 1)
        assert (code, found["damage"]) == (0, [])
        first, second = found["journals"]
        assert (first["taken_by"], second["taken_by"]) == (second["journal"], "")
        assert [one["state"] for one in found["databases"]] == ["same"]


def put(path: Path, key: bytes, value: bytes) -> None:
    """Write one row of a database."""
    database = Database.open(str(path))
    try:
        batch = database.batch()
        batch.put(key, value)
        database.write(batch, 0, sync=False)
    finally:
        database.close()


def swap(group: Group) -> str:
    one, other = objects(group)[10:12]
    one.write_bytes(other.read_bytes())
    return "it was not written with this group key, or was changed"


def cut(group: Group) -> str:
    path = objects(group)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    return "and is shorter; restore it"


def bloat(group: Group) -> str:
    path = objects(group)[-1]
    os.truncate(path, 1 << 40)
    return f"{path.name} of bucket file://{group.bucket}: it was written with"


def pipe(group: Group) -> str:
    path = objects(group)[-1]
    path.unlink()
    os.mkfifo(path)
    return f"{path.name} of bucket file://{group.bucket}: it is not a regular file"


def remove(group: Group) -> str:
    path = objects(group)[9]
    path.unlink()
    return f"{path.name}: it is missing"


def remove_newest(group: Group) -> str:
    objects(group)[-1].unlink()
    return "objects and now has"


def remove_registration(group: Group) -> str:
    (path,) = (group.bucket / "journals").iterdir()
    path.rename(path.with_name(f"{2:012d}"))
    return "000000000001: it is missing"


@pytest.mark.parametrize(
    "harm", [swap, cut, bloat, pipe, remove, remove_newest, remove_registration]
)
async def test_each_damage_of_a_bucket_is_named(
    tmp_path: Path, harm: Callable[[Group], str]
) -> None:
    with Group(tmp_path) as group:
        await fill(group)
        assert await group.stop(1) == 0
        says = harm(group)
        code, found = await check(group, 1)
        assert code == 1
        assert any(says in one for one in found["damage"]), found["damage"]


async def test_a_database_that_differs_is_named_and_one_that_is_behind_is_not_damaged(
    tmp_path: Path,
) -> None:
    with Group(tmp_path) as group:
        await fill(group)
        assert await group.stop(1) == 0
        directory = group.data(1) / DIRECTORY
        (path,) = [each for each in directory.iterdir() if each.is_dir()]
        saved = tmp_path / "saved"
        shutil.copytree(path, saved)

        put(path, b"x", b"nobody wrote this")
        code, found = await check(group, 1)
        assert code == 1
        assert [one["state"] for one in found["databases"]] == ["different"], found
        assert "has another value than in the bucket" in found["damage"][0]

        shutil.rmtree(path)
        shutil.copytree(saved, path)
        put(path, PLACE_ROW, Place(found["journals"][0]["journal"], 1).pack())
        code, found = await check(group, 1)
        assert (code, found["damage"]) == (0, [])
        assert [one["state"] for one in found["databases"]] == ["behind"]

        shutil.copytree(saved, directory / ("f" * 32))
        code, found = await check(group, 1)
        assert (code, found["damage"]) == (0, [])
        assert [one["state"] for one in found["databases"]] == ["behind", "not held"]
        assert len(found["garbage"]) == 1


async def test_objects_behind_a_fence_are_garbage_and_no_damage(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await fill(group)
        group.kill(1)
        last = objects(group)[-1]
        group.start(1)
        await group.logged(1, "store.bucket_opened", 2)
        assert await group.stop(1) == 0
        fence = last.with_name(f"{int(last.name) + 1:012d}")
        assert fence.exists()
        last.with_name(f"{int(last.name) + 2:012d}").write_bytes(last.read_bytes())
        code, found = await check(group, 1)
        assert (code, found["damage"]) == (0, [])
        assert "1 objects after its end" in found["garbage"][0]


async def test_what_cannot_be_checked_is_said_in_one_line(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await fill(group)
        assert await group.stop(1) == 0
        other = tmp_path / "other.key"
        other.touch(0o600)
        other.write_text(GroupKey(bytes(32)).reveal())
        code, found = await check(group, 1, "--bucket-key", str(other))
        assert code == 1
        assert "it was not written with this group key" in found["damage"][0]
        code, said = await check(group, 1, "--bucket-key", str(tmp_path / "none.key"))
        assert (code, said.count("\n")) == (2, 1)
        assert "none.key, the key of the stores that share the bucket, is missing" in said
        shutil.rmtree(group.bucket)
        code, said = await check(group, 1)
        assert (code, said.count("\n")) == (2, 1)
        assert "no store has written to it" in said


async def test_people_get_lines(tmp_path: Path) -> None:
    with Group(tmp_path) as group:
        await fill(group)
        assert await group.stop(1) == 0
        command = [sys.executable, "-m", "relay.store", "check", str(group.data(1)), "--bucket", group.url]  # fmt: skip
        done = await asyncio.to_thread(warm.run, command, text=True)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == f"{group.url}: 1 journal, 1 log"
        assert lines[-1] == "no damage found"
        assert any(line.endswith(": same") for line in lines)
