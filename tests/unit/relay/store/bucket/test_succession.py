"""A journal ends at the first number that is absent, whatever stands behind it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from iris.crypto.keys import GroupKey
from relay.store.bucket.history import Registration, end_of
from relay.store.bucket.objects import Directory
from relay.store.bucket.sealing import WINDOW, Fence, Intent, Sealer, journal_key
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
