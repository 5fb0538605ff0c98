"""A store notices a bucket that has less than it has seen there. Deletions of a checkpoint raise no alarm."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from pathlib import Path

import pytest
from support.bucket_sim import KEY, Owner, Scripted, keeper, run

from relay.store.batches import PUT, Op
from relay.store.bucket.checkpointing import delete, note, write_all
from relay.store.bucket.history import Registration, registrations
from relay.store.bucket.sealing import Covered, Intent, Rows, Sealer, journal_key
from relay.store.bucket.seen import MAX_JOURNALS, SEEN_FILE, RolledBack, Seen
from relay.store.bucket.succession import begin, fence
from relay.store.bucket.writer import Writer

_NONCE = itertools.count()
SEALER = Sealer(KEY, lambda size: next(_NONCE).to_bytes(size, "big"))
ROWS = Rows(bytes(range(16)), [Op(PUT, b"x", b"")])
THEIRS = "f" * 32


async def write(objects: Scripted, writer: Writer, count: int, seen: Seen | None = None) -> None:
    """Bring `count` objects of a journal to the bucket."""
    for _ in range(count):
        writer.add(ROWS, 10, 0)
        writer.close_object()
        for one in writer.take_off(0):
            assert await objects.create(one.key, one.sealed)
            writer.landed(one)
            if seen is not None:
                seen.note_landed(writer, one)


async def journal(
    objects: Scripted, count: int, seen: Seen | None = None
) -> tuple[Registration, Writer]:
    """Begin a journal, and bring `count` objects there."""
    began, _ = await begin(objects, SEALER, bytes([1]) * 32, "", 0)
    if seen is not None:
        seen.note_begun(began)
    writer = Writer(began.registered.journal, SEALER, began.hash)
    await write(objects, writer, count, seen)
    return began, writer


async def remembered(objects: Scripted, directory: Path, seen: Seen) -> Seen:
    """Save what was seen; return it as the next run of the store reads it."""
    seen.save()
    again = Seen(objects, SEALER, directory)
    await again.verify([])
    return again


async def rolled_back(objects: Scripted, directory: Path) -> str:
    """Return what a store that starts now says about its bucket; empty if nothing is wrong."""
    try:
        await Seen(objects, SEALER, directory).verify([])
    except RolledBack as err:
        return str(err)
    return ""


def test_a_store_misses_each_newest_object_that_is_withheld(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        seen = Seen(objects, SEALER, tmp_path)
        began, _ = await journal(objects, 7, seen)
        name = began.registered.journal
        await remembered(objects, tmp_path, seen)
        whole = dict(objects.objects)
        for left in range(7):
            objects.objects = {
                key: value
                for key, value in whole.items()
                if not key.startswith("journal/") or int(key[-12:]) <= left
            }
            found = await rolled_back(objects, tmp_path)
            assert f"journal {name} had 7 objects and now has {left}" in found
            assert f"delete {tmp_path} on each" in found
        objects.objects = {
            key: value for key, value in whole.items() if not key.startswith("journals/")
        }
        assert "it had 1 journals and now has 0" in await rolled_back(objects, tmp_path)

    run(main())


def test_a_store_notices_that_a_journal_went_on_differently(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        seen = Seen(objects, SEALER, tmp_path)
        began, _ = await journal(objects, 7, seen)
        name = began.registered.journal
        await remembered(objects, tmp_path, seen)
        withheld = {number: objects.objects.pop(journal_key(name, number)) for number in (6, 7)}
        await fence(objects, SEALER, began, THEIRS, 1)  # by a store that has not seen them
        assert f"journal {name} had 7 objects and now has 6" in await rolled_back(objects, tmp_path)
        objects.objects[journal_key(name, 7)] = withheld[7]
        assert f"journal {name} had 7 objects and now has 6" in await rolled_back(objects, tmp_path)

    run(main())


def test_a_store_that_saw_less_accepts_an_older_copy_and_one_that_saw_more_does_not(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects = Scripted()
        ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
        for directory in (ours, theirs):
            directory.mkdir()
        seen, other = Seen(objects, SEALER, ours), Seen(objects, SEALER, theirs)
        began, writer = await journal(objects, 3, seen)
        other.note_registered([began])
        await remembered(objects, theirs, other)
        older = dict(objects.objects)
        await write(objects, writer, 2, seen)
        later, _ = await journal(objects, 1, seen)
        await remembered(objects, ours, seen)
        objects.objects = older
        assert await rolled_back(objects, theirs) == ""
        assert "it had 2 journals and now has 1" in await rolled_back(objects, ours)
        # Somebody went on with the copy, so that it has as many again.
        again, _ = await journal(objects, 1)
        assert again.number == later.number
        assert "its journal 2 is not the one that was there before" in await rolled_back(
            objects, ours
        )

    run(main())


def test_what_a_checkpoint_covers_may_be_gone(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        seen = Seen(objects, SEALER, tmp_path)
        began, writer = await journal(objects, 5, seen)
        name = began.registered.journal
        await remembered(objects, tmp_path, seen)
        # The journal's own checkpoint, which the store made after it had last written down what it saw.
        first = await write_all(writer, {}, 0)
        covers = [Covered(name, 1, first)]
        await note(objects, SEALER, name, first, writer.before_watched, 1, covers)
        await delete(objects, covers)
        assert await rolled_back(objects, tmp_path) == ""

    run(main())


@pytest.mark.parametrize("deleted", [False, True])
def test_what_a_successors_checkpoint_covers_may_be_gone(tmp_path: Path, deleted: bool) -> None:
    async def main() -> None:
        objects = Scripted()
        seen = Seen(objects, SEALER, tmp_path)
        began, _ = await journal(objects, 5, seen)
        name = began.registered.journal
        await remembered(objects, tmp_path, seen)
        following, writer = await journal(objects, 0)
        intent = writer.add(Intent(name), 10, 0)
        await write(objects, writer, 1)
        by = following.registered.journal
        _, end = await fence(objects, SEALER, began, by, intent)
        first = await write_all(writer, {}, 0)
        covers = [Covered(name, 1, end.number)]
        if deleted:
            await note(objects, SEALER, by, first, writer.before_watched, 1, covers)
        await delete(objects, covers)
        found = await rolled_back(objects, tmp_path)
        assert found == "" if deleted else f"journal {name} had 5 objects and now has 0" in found

    run(main())


def test_a_store_that_starts_registers_and_takes_nothing_in_a_bucket_that_was_rolled_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        objects = Scripted()
        for life in range(2):
            ours, shelf = keeper(objects, tmp_path, 1, Owner())
            running = asyncio.create_task(ours.run())
            async with asyncio.timeout(20 if life else 100):
                while shelf.writer is None and not (life and caplog.records):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.01)
            if not life:
                assert shelf.writer is not None
                for _ in range(3):
                    shelf.writer.add(ROWS, 10, int(asyncio.get_running_loop().time() * 1e6))
                    await asyncio.sleep(0.5)
                await asyncio.sleep(2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if not life:
                caplog.set_level(logging.ERROR)
                caplog.clear()
                last = max(key for key in objects.objects if key.startswith("journal/"))
                del objects.objects[last]
                before = len(await registrations(objects, SEALER))
        assert shelf.writer is None
        assert {record.message for record in caplog.records} == {"store.bucket_rolled_back"}
        assert len(await registrations(objects, SEALER)) == before

    run(main())


def test_the_file_is_bounded_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        seen = Seen(objects, SEALER, tmp_path)
        for _ in range(MAX_JOURNALS + 5):
            await journal(objects, 1, seen)
        again = await remembered(objects, tmp_path, seen)
        assert again is not seen
        state = json.loads((tmp_path / SEEN_FILE).read_text())
        assert sorted(one[0] for one in state["journals"].values()) == list(
            range(6, MAX_JOURNALS + 6)
        )
        (tmp_path / SEEN_FILE).write_text("{}")
        with pytest.raises(Exception, match=r"seen.json is damaged: .*; delete the file"):
            await Seen(objects, SEALER, tmp_path).verify([])

    run(main())
