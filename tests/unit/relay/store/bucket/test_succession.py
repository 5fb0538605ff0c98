"""A journal ends at the first number that is absent, whatever stands behind it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from iris.crypto.keys import GroupKey
from relay.store.bucket.checkpointing import delete, note
from relay.store.bucket.directory import Directory
from relay.store.bucket.history import Reader, Registration, beginning_of, end_of
from relay.store.bucket.sealing import (
    WINDOW,
    Covered,
    Fence,
    Intent,
    Numbered,
    ObjectDamaged,
    Sealer,
    journal_key,
)
from relay.store.bucket.succession import begin, fence
from relay.store.bucket.writer import Flying, Writer

_NONCE = itertools.count()
SEALER = Sealer(GroupKey(bytes(32)), lambda size: next(_NONCE).to_bytes(size, "big"))
OURS, THEIRS = "a" * 32, "b" * 32


async def journal(objects: Directory, count: int) -> tuple[Registration, Writer, list[Flying]]:
    """Begin a journal, bring `count` objects there, and let as many more take off as may."""
    began, _ = await begin(objects, SEALER, bytes(32), "db-1", 0)
    writer = Writer(began.registered.journal, SEALER, began.hash)
    for _ in range(count + 2 * WINDOW):
        writer.add(Intent("0" * 32), 10, 0)
        writer.close_object()
    while writer.known < count:
        for one in writer.take_off(0):
            if one.number <= count:
                assert await objects.create(one.key, one.sealed)
                writer.landed(one)
    writer.take_off(0)
    return began, writer, writer.flying


@pytest.mark.parametrize("count", range(2 * WINDOW + 1))
async def test_the_fence_stands_before_objects_that_overtook_one_that_is_missing(
    tmp_path: Path, count: int
) -> None:
    for lost in range(WINDOW):
        objects = Directory(tmp_path / str(lost))
        began, _, flying = await journal(objects, count)
        assert [one.number for one in flying] == [count + 1 + index for index in range(WINDOW)]
        late = flying.pop(lost)
        for one in flying:
            assert await objects.create(one.key, one.sealed)
        made, _ = await fence(objects, SEALER, began, OURS, 1)
        assert (made.by, (await end_of(objects, SEALER, began)).number) == (OURS, late.number)
        assert not await objects.create(late.key, late.sealed)


@pytest.mark.parametrize("count", range(2 * WINDOW + 1))
async def test_a_fence_is_found_whatever_arrives_behind_it_later(
    tmp_path: Path, count: int
) -> None:
    for arrives in itertools.product((False, True), repeat=WINDOW - 1):
        objects = Directory(tmp_path / "".join(str(int(one)) for one in arrives))
        began, _, flying = await journal(objects, count)
        first, _ = await fence(objects, SEALER, began, OURS, 1)
        for one, there in zip(flying[1:], arrives, strict=True):
            if there:
                assert await objects.create(one.key, one.sealed)
        assert (await fence(objects, SEALER, began, THEIRS, 1))[0] == first
        sealed = await objects.get(journal_key(began.registered.journal, count + 1))
        assert sealed is not None
        assert isinstance(SEALER.open(flying[0].key, sealed), Fence)


@pytest.mark.parametrize("number", [1, 2])
async def test_a_reader_notices_an_object_that_was_replaced_by_another_of_the_same_number(
    tmp_path: Path, number: int
) -> None:
    objects = Directory(tmp_path)
    began, writer, _ = await journal(objects, 3)
    key = journal_key(writer.journal, number)
    there = await objects.get(key)
    assert there is not None
    content = SEALER.open(key, there)
    assert isinstance(content, Numbered)
    # Its store may have written this, too, in a bucket that was rolled back since.
    await objects.delete(key)
    await objects.create(key, SEALER.seal(key, Numbered(content.before, [Intent("1" * 32)])))
    reader = Reader(objects, SEALER, writer.journal, await beginning_of(objects, SEALER, began))
    with pytest.raises(ObjectDamaged, match="does not follow the object before it"):
        [at async for at, _ in reader.rest()]
    assert reader.number == number + 1


class Racing(Directory):
    """A bucket in which something happens right before a journal's objects are looked for."""

    race: Callable[[], Awaitable[None]] | None = None

    async def exists(self, key: str) -> bool:
        if key.startswith("journal/") and self.race is not None:
            race, self.race = self.race, None
            await race()
        return await super().exists(key)


async def test_a_fence_below_a_checkpoint_is_void(tmp_path: Path) -> None:
    objects = Racing(tmp_path)
    began, writer, _ = await journal(objects, 3)
    name = writer.journal
    last = await objects.get(journal_key(name, 3))
    assert last is not None
    content = SEALER.open(journal_key(name, 3), last)
    assert isinstance(content, Numbered)

    async def race() -> None:
        """The journal's store writes a checkpoint; another one, which has not seen it, finds the first number free."""
        covers = [Covered(name, 1, 3)]
        await note(objects, SEALER, name, 3, content.before, 1, covers)
        await delete(objects, covers)
        first = journal_key(name, 1)
        assert await objects.create(first, SEALER.seal(first, Fence(began.hash, THEIRS, 1)))

    objects.race = race
    made, end = await fence(objects, SEALER, began, OURS, 1)
    assert (made.by, end.number) == (OURS, 4)
