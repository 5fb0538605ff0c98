"""An object is read whole only when its length is authenticated, and what is not a file is damage."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from iris.crypto.keys import GroupKey
from relay.store.batches import PUT, Op
from relay.store.bucket.directory import Directory
from relay.store.bucket.history import end_of, registrations
from relay.store.bucket.objects import FIRST_BYTES
from relay.store.bucket.sealing import (
    NO_HASH,
    Numbered,
    ObjectDamaged,
    Rows,
    Sealer,
    checkpoint_key,
    journal_key,
    registration_key,
)
from relay.store.bucket.succession import begin
from relay.store.bucket.whole import fetch, fetch_all, holds

SEALER = Sealer(GroupKey(bytes(range(32))), os.urandom)
HUGE = 1 << 40
"""More than any machine has."""


def sealed(key: str, size: int = 1) -> bytes:
    return SEALER.seal(key, Numbered(NO_HASH, [Rows(bytes(16), [Op(PUT, b"k", bytes(size))])]))


class Watched(Directory):
    """Counts the bytes that it returns."""

    read = 0

    async def get(self, key: str) -> bytes | None:
        found = await super().get(key)
        self.read += len(found or b"")
        return found

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        found = await super().get_range(key, start, end)
        self.read += len(found or b"")
        return found


@pytest.mark.parametrize("size", [1, FIRST_BYTES - 200, FIRST_BYTES, 3 * FIRST_BYTES])
async def test_an_object_of_any_length_is_read_whole(tmp_path: Path, size: int) -> None:
    bucket = Directory(tmp_path)
    whole = sealed("journal/a", size)
    assert await bucket.create("journal/a", whole)
    assert await fetch(bucket, SEALER, "journal/a") == whole
    assert await fetch(bucket, SEALER, "journal/b") is None
    assert await holds(bucket, "journal/a", whole)
    assert await holds(bucket, "journal/a", whole[:-1]) is False
    assert await holds(bucket, "journal/b", whole) is None


async def test_an_object_whose_length_is_exactly_what_is_read_first(tmp_path: Path) -> None:
    bucket = Directory(tmp_path)
    size = FIRST_BYTES - (len(sealed("journal/a", FIRST_BYTES)) - FIRST_BYTES)
    for more in (-1, 0, 1):
        whole = sealed(f"journal/{more}", size + more)
        assert len(whole) == FIRST_BYTES + more
        assert await bucket.create(f"journal/{more}", whole)
        assert await fetch(bucket, SEALER, f"journal/{more}") == whole


@pytest.mark.parametrize("size", [1, FIRST_BYTES, 3 * FIRST_BYTES])
async def test_an_object_that_grew_or_shrank_is_damage_and_not_read(
    tmp_path: Path, size: int
) -> None:
    bucket = Watched(tmp_path)
    whole = sealed("journal/a", size)
    assert await bucket.create("journal/a", whole)
    os.truncate(tmp_path / "journal/a", HUGE)
    said = f"object journal/a of bucket file://{tmp_path}: it was written with {len(whole)} bytes, and is"
    with pytest.raises(ObjectDamaged, match=f"{said} longer; restore it"):
        await fetch(bucket, SEALER, "journal/a")
    assert bucket.read <= max(len(whole) + 1, FIRST_BYTES)
    os.truncate(tmp_path / "journal/a", len(whole) - 1)
    with pytest.raises(ObjectDamaged, match=f"{said} shorter; restore it"):
        await fetch(bucket, SEALER, "journal/a")


async def test_an_object_that_no_store_wrote_is_read_no_further_than_its_beginning(
    tmp_path: Path,
) -> None:
    bucket = Watched(tmp_path)
    (tmp_path / "journal").mkdir()
    for number, head in enumerate((b"", b"\1", sealed("journal/x", 5 * FIRST_BYTES)[:100])):
        path = tmp_path / f"journal/{number}"
        path.write_bytes(head)
        os.truncate(path, HUGE)
        bucket.read = 0
        with pytest.raises(
            ObjectDamaged, match=f"object journal/{number}: it was not written with"
        ):
            await fetch(bucket, SEALER, f"journal/{number}")
        assert bucket.read == FIRST_BYTES
        assert await holds(bucket, f"journal/{number}", head or b"x") is False


async def test_damage_behind_the_end_of_a_list_is_in_nobodys_way(tmp_path: Path) -> None:
    bucket = Directory(tmp_path)
    assert await bucket.create("journal/1", sealed("journal/1"))
    assert await bucket.create("journal/3", b"not an object")
    keys = [f"journal/{number}" for number in (1, 2, 3)]
    found = await fetch_all(bucket, SEALER, keys)
    assert next(found)[1] is not None
    assert next(found)[1] is None
    with pytest.raises(ObjectDamaged, match="object journal/3"):
        next(found)


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "link to a file": lambda path: (path.parent / "there").write_bytes(b"1") and path.symlink_to(path.parent / "there"),
    "link out of the bucket": lambda path: path.symlink_to("/proc/self/environ"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: _socket(path),
}  # fmt: skip


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)
        made.bind(path.name)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_a_regular_file_is_damage_that_is_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = Directory(tmp_path)
    (tmp_path / "journal").mkdir()
    KINDS[kind](tmp_path / "journal/a")
    said = f"object journal/a of bucket file://{tmp_path}: it is not a regular file, .* remove it"
    calls: list[Awaitable[object]] = [
        bucket.get("journal/a"), bucket.get_range("journal/a", 0, 10), fetch(bucket, SEALER, "journal/a")
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ObjectDamaged, match=said):
            await call
    assert await bucket.exists("journal/a")
    assert not await bucket.create("journal/a", b"1")
    assert await holds(bucket, "journal/a", b"1") is False


@pytest.mark.parametrize("which", ["registration", "journal", "checkpoint"])
async def test_the_lists_of_a_bucket_name_an_object_that_is_huge(
    tmp_path: Path, which: str
) -> None:
    bucket = Directory(tmp_path)
    began, _ = await begin(bucket, SEALER, bytes(32), "host", 1)
    name = began.registered.journal
    key = {
        "registration": registration_key(2),
        "journal": journal_key(name, 1),
        "checkpoint": checkpoint_key(name, 1),
    }[which]
    path = tmp_path / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, HUGE)
    reads = (
        registrations(bucket, SEALER) if which == "registration" else end_of(bucket, SEALER, began)
    )
    with pytest.raises(ObjectDamaged, match=f"object {key}: "):
        await reads
