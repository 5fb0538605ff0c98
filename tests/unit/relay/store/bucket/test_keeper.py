"""What a store does with its journals when the bucket, its disk or it itself fails half-way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.bucket_sim import (
    KEY,
    STREAM,
    Ack,
    Owner,
    Scripted,
    VirtualLoop,
    keeper,
    run,
    take_over,
    until,
)
from support.points import points

from iris.crypto.keys import public_id
from relay.store.batches import PUT, Op
from relay.store.bucket.checkpointing import delete, note, write_all
from relay.store.bucket.history import (
    Reader,
    Registration,
    beginning_of,
    end_of,
    registrations,
)
from relay.store.bucket.keeper import STATE_FILE, Keeper
from relay.store.bucket.lookout import FAILOVER_S, UNSEEN_S
from relay.store.bucket.objects import BucketError
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import (
    Covered,
    Intent,
    Numbered,
    Registered,
    Rows,
    Sealer,
    hash_of,
    journal_key,
    registration_key,
)
from relay.store.bucket.shelf import LEFT_US, Left, Shelf
from relay.store.bucket.succession import begin, fence, steps
from relay.store.bucket.writer import Writer
from relay.store.database import Database
from relay.store.errors import LogWriteFailed

_NONCE = itertools.count()
SEALER = Sealer(KEY, lambda size: next(_NONCE).to_bytes(size, "big"))
OTHER = bytes(range(16, 32))


def rows(*numbers: int) -> Rows:
    return Rows(STREAM, [Op(PUT, b"x%d" % number, b"") for number in numbers])


async def land(objects: Scripted, writer: Writer) -> None:
    """Bring everything of a journal to the bucket."""
    writer.close_object()
    while not writer.idle:
        for one in writer.take_off(0):
            assert await objects.create(one.key, one.sealed)
            writer.landed(one)


async def journal(objects: Scripted, count: int, store: int = 1) -> tuple[Registration, Writer]:
    """Begin a journal, and bring `count` objects there."""
    began, _ = await begin(objects, SEALER, bytes([store]) * 32, "", 0)
    writer = Writer(began.registered.journal, SEALER, began.hash)
    for number in range(count):
        writer.add(rows(number), 10, 0)
        writer.close_object()
    await land(objects, writer)
    return began, writer


def register(objects: Scripted, number: int) -> Registration:
    """Put the registration of journal `number` into the bucket, without a look at the earlier ones."""
    registered = Registered(f"{number:032x}", bytes([1]) * 32, "", 0)
    key = registration_key(number)
    objects.objects[key] = sealed = SEALER.seal(key, registered)
    return Registration(number, registered, hash_of(sealed))


def make_stream(shelf: Shelf, uuid: bytes = STREAM) -> tuple[Database, Replica]:
    """Create a stream's database in the journal of a store."""
    replica = shelf.replica(uuid)
    path = shelf.directory / uuid.hex()
    database = Database.create(str(path))
    database.make_mark(uuid, 0)
    database.copier = replica
    return database, replica


def put(database: Database, *numbers: int) -> None:
    batch = database.batch()
    for number in numbers:
        batch.put(b"x%d" % number, b"")
    database.write(batch, 0, sync=False)


def numbers_in(database: Database) -> list[int]:
    return sorted(int(row) for row, _ in database.rows(b"x"))


def address(store: int) -> str:
    return public_id(bytes([store]) * 32).hex()


@contextlib.asynccontextmanager
async def running(*keepers: Keeper) -> AsyncIterator[None]:
    """Run keepers; kill them at the end."""
    tasks = [asyncio.create_task(one.run()) for one in keepers]
    try:
        yield
    finally:
        for task in tasks:
            assert not task.done(), "a keeper has ended by itself"
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def history_of(objects: Scripted, name: str) -> list[int]:
    """Return the numbers of the rows that a fenced journal holds for `STREAM`, with what it took."""
    known = {one.registered.journal: one for one in await registrations(objects, SEALER)}
    found: dict[int, None] = {}
    async for _, _, content in steps(objects, SEALER, name, known, []):
        for entry in content.entries:
            if isinstance(entry, Rows) and entry.uuid == STREAM:
                found |= {int(op.key[1:]): None for op in entry.ops if op.key.startswith(b"x")}
    return sorted(found)


def failing(what: str, keys: Iterable[str], times: int = 1 << 30) -> object:
    """Return a fault of the bucket: the first `times` requests for keys that contain one of these fail."""
    left = [times]
    parts = tuple(keys)

    async def fault(did: str, key: str) -> None:
        await asyncio.sleep(0.001)
        if did == what and left[0] and any(part in key for part in parts):
            left[0] -= 1
            raise BucketError("bucket memory: no answer")

    return fault


# -- reading -------------------------------------------------------------------------------------------------


def test_a_read_that_fails_is_an_error_of_the_bucket() -> None:
    async def main() -> None:
        objects = Scripted()
        began, _ = await journal(objects, 3)
        reader = Reader(
            objects, SEALER, began.registered.journal, await beginning_of(objects, SEALER, began)
        )
        objects.fault = failing("get", ["journal"])  # type: ignore[assignment]
        with pytest.raises(BucketError):
            await registrations(objects, SEALER)
        with pytest.raises(BucketError):
            async for _ in reader.rest():
                pass

    run(main())


def test_a_chain_of_many_takeovers_is_read() -> None:
    async def main() -> None:
        objects = Scripted()
        last, writer = await journal(objects, 1)
        known = {last.registered.journal: last}
        for number in range(1, 1200):
            following = register(objects, number + 1)
            writer = Writer(following.registered.journal, SEALER, following.hash)
            known[following.registered.journal] = following
            intent = writer.add(Intent(last.registered.journal), 10, 0)
            await land(objects, writer)
            await fence(objects, SEALER, last, following.registered.journal, intent)
            writer.add(rows(number), 10, 0)
            await land(objects, writer)
            last = following
        await fence(objects, SEALER, last, "f" * 32, 1)
        assert await history_of(objects, last.registered.journal) == list(range(1200))

    run(main())


def test_a_takeover_needs_so_many_requests_that_some_fail(tmp_path: Path) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner()
        began, _ = await journal(objects, 500)
        asked = itertools.count()

        async def fault(what: str, key: str) -> None:
            await asyncio.sleep(0.001)
            if what == "get" and began.registered.journal in key and not next(asked) % 20:
                raise BucketError("bucket memory: 503 Slow Down")

        objects.fault = fault
        ours, _ = keeper(objects, tmp_path, 2, owner)
        async with asyncio.timeout(60):
            await take_over(ours)
        assert numbers_in(owner.served[STREAM][0]) == list(range(500))
        owner.close()

    run(main())


def test_a_chain_of_many_registrations_is_read_although_some_requests_fail() -> None:
    async def main() -> None:
        objects = Scripted()
        for number in range(1, 1001):
            register(objects, number)
        asked = itertools.count(1)
        began_s = asyncio.get_running_loop().time()

        async def fault(what: str, key: str) -> None:
            await asyncio.sleep(0.02)
            if not next(asked) % 20:
                raise BucketError("bucket memory: 503 Slow Down")

        objects.fault = fault
        assert len(await registrations(objects, SEALER)) == 1000
        assert asyncio.get_running_loop().time() - began_s < 10

    run(main())


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", range(1, 12))
def test_a_journal_of_which_a_part_was_deleted_is_never_held_again(fails: int) -> None:
    async def main() -> None:
        objects = Scripted()
        began, _ = await journal(objects, 11)
        name = began.registered.journal
        await fence(objects, SEALER, began, "a" * 32, 1)
        objects.fault = failing("delete", [journal_key(name, fails)])  # type: ignore[assignment]
        with pytest.raises(BucketError):
            await delete(objects, [Covered(name, 1, 12)])
        again, _ = await fence(objects, SEALER, began, "b" * 32, 1)
        assert again.by == "a" * 32 or await history_of(objects, name) == []

    run(main())


@pytest.mark.parametrize("behind", range(4))
def test_a_journal_that_was_deleted_can_be_taken_with_whatever_stands_behind_its_fence(
    behind: int,
) -> None:
    async def main() -> None:
        objects = Scripted()
        began, _ = await journal(objects, 2)
        name = began.registered.journal
        await fence(objects, SEALER, began, "a" * 32, 1)
        for number in range(4, 4 + behind):  # what the fenced store had on its way
            key = journal_key(name, number)
            objects.objects[key] = SEALER.seal(key, Numbered(bytes(32), []))
        await delete(objects, [Covered(name, 1, 3)])
        again, _ = await fence(objects, SEALER, began, "b" * 32, 1)
        assert again.by == "b" * 32
        assert await history_of(objects, name) == []

    run(main())


def test_a_checkpoint_of_a_journal_without_streams_can_be_read() -> None:
    async def main() -> None:
        objects = Scripted()
        began, writer = await journal(objects, 3)
        name = began.registered.journal
        first = await write_all(writer, {}, 0)
        await note(
            objects, SEALER, name, first, writer.before_watched, 1, [Covered(name, 1, first)]
        )
        writer.add(rows(7), 10, 0)
        await land(objects, writer)
        await fence(objects, SEALER, began, "a" * 32, 1)
        assert await history_of(objects, name) == [7]

    run(main())


def test_a_checkpoint_whose_answer_was_lost_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        ours, shelf = keeper(objects, tmp_path, 1, checkpoint_bytes=1000)
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            lost = []

            async def fault(what: str, key: str) -> None:
                await asyncio.sleep(0.001)
                if what == "created" and "checkpoint" in key and len(lost) < 2:
                    lost.append(key)
                    writer.add(rows(9), 10, 0)
                    raise BucketError("bucket memory: no answer")

            objects.fault = fault
            for turn in range(3):
                writer.add(rows(turn), 2000, 0)
                await until(lambda: writer.idle)
                await asyncio.sleep(100)
            assert len(lost) == 2
            noted = [key for key in objects.objects if key.startswith("checkpoint")]
            assert len(noted) == 3
            left = [key for key in objects.objects if key.startswith("journal/")]
            assert len(left) <= 1, "what it covers is deleted"

    run(main())


def test_what_could_not_be_deleted_is_deleted_later(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        ours, shelf = keeper(objects, tmp_path, 1, checkpoint_bytes=1000)
        objects.fault = failing("delete", ["journal/"], 3)  # type: ignore[assignment]
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            for turn in range(20):
                writer.add(rows(turn), 100, 0)
                writer.close_object()
            await until(lambda: writer.idle)
            await until(lambda: not any(key.startswith("journal/") for key in objects.objects), 500)

    run(main())


def test_a_bucket_that_refuses_deletes_gets_checkpoints_nevertheless(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Scripted()
        ours, shelf = keeper(objects, tmp_path, 1, checkpoint_bytes=1000)
        objects.fault = failing("delete", ["journal/"])  # type: ignore[assignment]
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            for turn in range(5):
                writer.add(rows(turn), 2000, 0)
                await until(lambda: writer.idle)
                await asyncio.sleep(100)
            assert sum(key.startswith("checkpoint/") for key in objects.objects) == 5
            known = {one.registered.journal: one for one in await registrations(objects, SEALER)}
            covers = (await beginning_of(objects, SEALER, known[writer.journal])).covers
            assert len(covers) == 1, "it does not grow"
            objects.fault = failing("", [])  # type: ignore[assignment]
            await until(lambda: not any(key.startswith("journal/") for key in objects.objects), 500)

    run(main())


def test_objects_of_deleted_streams_that_a_bucket_keeps_are_not_in_the_way_for_ever(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects = Scripted()
        ours, shelf = keeper(objects, tmp_path, 1, checkpoint_bytes=1000)
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            shelf.leave(Left(["segment/a"]))  # and nobody deletes it
            writer.add(rows(1), 2000, 0)
            await asyncio.sleep(LEFT_US / 1e6 - 60)
            assert not any(key.startswith("checkpoint/") for key in objects.objects)
            await asyncio.sleep(120)
            assert any(key.startswith("checkpoint/") for key in objects.objects)

    run(main(), 2 * LEFT_US / 1e6)


# -- takeovers that fail, and two stores with one key --------------------------------------------------------


def test_a_takeover_for_which_the_disk_has_no_room_leaves_it_as_it_was_and_is_tried_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(2)})
        theirs, _ = await journal(objects, 20)
        ours, shelf = keeper(objects, tmp_path, 2, owner)
        reads = []

        async def count(what: str, key: str) -> None:
            await asyncio.sleep(0.001)
            if (what, key) == ("get", journal_key(theirs.registered.journal, 2)):
                reads.append(asyncio.get_running_loop().time())

        objects.fault = count
        write, writes = Database.write, itertools.count()

        def full(database: Database, *args: Any, **more: Any) -> None:
            if next(writes) % 10 == 9:
                raise LogWriteFailed(database.path, "No space left on device")
            write(database, *args, **more)

        async with running(ours):
            await until(lambda: shelf.writer)
            with monkeypatch.context() as patch:
                patch.setattr(Database, "write", full)
                await asyncio.sleep(UNSEEN_S + 600)
                assert not (tmp_path / STREAM.hex()).exists()
                assert "No space left" in shelf.not_taken
                assert 5 < len(reads) < 30
            await until(lambda: STREAM in owner.served)
            assert numbers_in(owner.served[STREAM][0]) == list(range(20))
        owner.close()

    run(main(), 2 * 3600)


def test_two_stores_with_one_key_take_each_other_s_journals_more_and_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        objects = Scripted()
        twins = [keeper(objects, tmp_path / name, 1) for name in ("ours", "copy")]
        (ours, shelf), (copy, _) = twins

        async def write() -> None:
            for turn in itertools.count():
                for _, each in twins:
                    if each.writer is not None and not each.writer.ended:
                        each.writer.add(rows(turn), 10, 0)
                await asyncio.sleep(10)

        async with running(ours):
            await until(lambda: shelf.writer)
            assert shelf.writer is not None
            shelf.writer.add(rows(0), 10, 0)
            await until(lambda: shelf.writer and shelf.writer.idle)
            shutil.copytree(tmp_path / "ours", tmp_path / "copy")
            with caplog.at_level(logging.ERROR, "relay.store.bucket.keeper"):
                async with running(copy):
                    writing = asyncio.create_task(write())
                    await asyncio.sleep(2400)
                    writing.cancel()
        assert "store.key_used_twice" in [one.message for one in caplog.records]
        begun = len(await registrations(objects, SEALER))
        assert begun < 40, f"{begun} journals in 40 minutes"

    run(main(), 3 * 3600)


def test_a_store_that_restarts_is_not_its_own_twin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        objects = Scripted()

        async def start() -> None:
            ours, shelf = keeper(objects, tmp_path / "ours", 1)
            async with running(ours):
                await until(lambda: shelf.writer)

        for _ in range(3):
            await start()
        other, _ = keeper(objects, tmp_path / "other", 2)
        await other.restore()
        await start()

    with caplog.at_level(logging.ERROR, "relay.store.bucket.keeper"):
        run(main())
    assert not [one.message for one in caplog.records]


def test_a_takeover_that_fails_again_and_again_says_once_what_it_is_about_to_take(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects = Scripted()
        theirs, _ = await journal(objects, 20)
        ours, shelf = keeper(objects, tmp_path, 2, Owner({address(2)}))
        async with running(ours):
            await until(lambda: shelf.writer)
            objects.fault = failing("get", [journal_key(theirs.registered.journal, 2)])  # type: ignore[assignment]
            await asyncio.sleep(UNSEEN_S + 600)
        intents = [
            entry
            for key, sealed in objects.objects.items()
            if isinstance(content := SEALER.open(key, sealed), Numbered)
            for entry in content.entries
            if isinstance(entry, Intent)
        ]
        assert len(intents) == 1

    run(main(), 2 * 3600)


# -- a journal that is ours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [3, 60])
def test_a_journal_that_cannot_be_opened_again_registers_one_journal_and_no_more(
    tmp_path: Path, seconds: int
) -> None:
    async def main() -> None:
        objects = Scripted()
        ours, shelf = keeper(objects, tmp_path / "ours", 1)
        theirs, _ = keeper(objects, tmp_path / "theirs", 2)
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            writer.add(rows(1), 10, 0)
            await until(lambda: writer.idle)
            await theirs.restore()
            before = len(await registrations(objects, SEALER))
            objects.fault = failing("exists", ["checkpoint/"])  # type: ignore[assignment]
            await until(lambda: writer.ended)
            await asyncio.sleep(seconds)
            objects.fault = failing("", [])  # type: ignore[assignment]
            await until(lambda: shelf.writer)
            assert len(await registrations(objects, SEALER)) == before + 1

    run(main())


def test_a_disk_that_fails_after_rows_were_added_again_does_not_part_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        objects = Scripted()
        owner = Owner()
        ours, shelf = keeper(objects, tmp_path, 1)
        async with running(ours):
            await until(lambda: shelf.writer)
            database, replica = make_stream(shelf)
            put(database, 1)
            await until(lambda: replica.settled)
            objects.fault = failing("create", ["journal/"])  # type: ignore[assignment]
            put(database, 2, 3)
        database.close()
        objects.fault = failing("", [])  # type: ignore[assignment]
        ours, shelf = keeper(objects, tmp_path, 1, owner)
        save, times = ours._save, [2]

        def no_room() -> None:
            if times[0]:
                times[0] -= 1
                raise LogWriteFailed("journals.json", "no space left on device")
            save()

        monkeypatch.setattr(ours, "_save", no_room)
        async with running(ours):
            await until(lambda: owner.served)
            database, replica = owner.served[STREAM]
            put(database, 4)
            await until(lambda: replica.settled)
            here = numbers_in(database)
        owner.close()
        assert here == [1, 2, 3, 4]
        taker = Owner()
        theirs, _ = keeper(objects, tmp_path / "theirs", 2, taker)
        await theirs.restore()
        assert numbers_in(taker.served[STREAM][0]) == here
        taker.close()

    run(main())


async def served_by(owner: Owner, uuid: bytes = STREAM, seconds: float = 300.0) -> Database:
    """Return the database of a stream once a store serves it."""
    await until(lambda: uuid in owner.served, seconds)
    return owner.served[uuid][0]


async def killed_with(
    objects: Scripted, directory: Path, store: int, uuid: bytes, *unsent: int
) -> None:
    """Run a store that creates a stream with row 1 in the bucket, writes `unsent` to its disk, and is killed."""
    ours, shelf = keeper(objects, directory, store)
    async with running(ours):
        await until(lambda: shelf.writer)
        database, replica = make_stream(shelf, uuid)
        put(database, 1)
        await until(lambda: replica.settled)
        objects.fault = failing("create", ["journal/"])  # type: ignore[assignment]
        for number in unsent:
            put(database, number)
    database.close()
    objects.fault = failing("", [])  # type: ignore[assignment]


def test_a_store_that_killed_before_its_rows_left_adds_them_again_in_parts(tmp_path: Path) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner()
        await killed_with(objects, tmp_path, 1, STREAM, *range(2, 50))
        ours, _ = keeper(objects, tmp_path, 1, owner)
        async with running(ours):
            assert numbers_in(await served_by(owner)) == list(range(1, 50))
            replica = owner.served[STREAM][1]
            await until(lambda: replica.settled)
        owner.close()
        taker = Owner()
        theirs, _ = keeper(objects, tmp_path / "theirs", 2, taker)
        await theirs.restore()
        assert numbers_in(taker.served[STREAM][0]) == list(range(1, 50))
        taker.close()

    run(main())


def test_rows_of_a_killed_store_are_not_lost_if_it_is_killed_again_before_it_has_them_back(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner()
        await killed_with(objects, tmp_path, 1, STREAM, 2, 3)
        theirs = (await registrations(objects, SEALER))[0].registered.journal
        fenced = asyncio.Event()

        async def fault(what: str, key: str) -> None:
            await asyncio.sleep(0.001)
            if what == "created" and theirs in key:
                fenced.set()
                await asyncio.sleep(1e6)

        objects.fault = fault
        again, _ = keeper(objects, tmp_path, 1)
        async with running(again):
            await fenced.wait()
        objects.fault = failing("", [])  # type: ignore[assignment]
        ours, _ = keeper(objects, tmp_path, 1, owner)
        async with running(ours):
            assert numbers_in(await served_by(owner)) == [1, 2, 3]
        owner.close()

    run(main())


def test_rows_of_a_killed_store_are_dropped_if_another_store_has_taken_its_journal(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, middle, owner = Scripted(), Owner(), Owner()
        await killed_with(objects, tmp_path / "ours", 1, STREAM, 2, 3)
        theirs, _ = keeper(objects, tmp_path / "theirs", 2, middle)
        await theirs.restore()
        database, replica = middle.served[STREAM]
        put(database, 4)
        assert await theirs.drain(10)
        assert replica.settled
        middle.close()
        # The store that was killed is back, and serves nothing of it.
        ours, shelf = keeper(objects, tmp_path / "ours", 1, owner)
        async with running(ours):
            await until(lambda: shelf.writer)
            assert not owner.served
            assert not (shelf.directory / STREAM.hex()).exists()
        # It takes over in its turn: it has what was in the bucket, and not its own rows 2 and 3.
        await ours.restore()
        assert numbers_in(owner.served[STREAM][0]) == [1, 4]
        owner.close()

    run(main())


def test_rows_of_a_killed_store_are_dropped_if_it_takes_its_stream_back_at_once(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, middle, owner = Scripted(), Owner(), Owner()
        await killed_with(objects, tmp_path / "ours", 1, STREAM, 2, 3)
        theirs, _ = keeper(objects, tmp_path / "theirs", 2, middle)
        await theirs.restore()
        put(middle.served[STREAM][0], 4)
        assert await theirs.drain(10)
        middle.close()
        ours, _ = keeper(objects, tmp_path / "ours", 1, owner)
        await ours.restore()
        assert numbers_in(owner.served[STREAM][0]) == [1, 4]
        owner.close()

    run(main())


def test_a_store_whose_state_file_was_removed_finds_its_journal_in_the_bucket(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner()
        await killed_with(objects, tmp_path, 1, STREAM)
        (tmp_path / "journals.json").unlink()
        ours, _ = keeper(objects, tmp_path, 1, owner)
        async with running(ours):
            assert numbers_in(await served_by(owner)) == [1]
        owner.close()

    run(main())


# -- taking over from others ---------------------------------------------------------------------------------


async def two_are_gone(objects: Scripted, directory: Path) -> None:
    await killed_with(objects, directory / "first", 1, STREAM)
    await killed_with(objects, directory / "second", 2, OTHER)


@pytest.mark.parametrize("fails", points(range(0, 60, 2), 2))
def test_a_takeover_that_failed_half_way_is_repeated_as_the_same(
    tmp_path: Path, fails: int
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3)})
        await two_are_gone(objects, tmp_path)
        ours, shelf = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            await until(lambda: shelf.writer)
            before = len(await registrations(objects, SEALER))
            requests = itertools.count()
            ends = asyncio.get_running_loop().time() + UNSEEN_S - 1

            async def fault(what: str, key: str) -> None:
                await asyncio.sleep(0.001)
                began = asyncio.get_running_loop().time() > ends and "probe" not in key
                if (what, key.partition("/")[0]) == ("created", "journals"):
                    return  # a registration whose answer was lost would be one more
                if began and next(requests) in range(fails, fails + 3):
                    raise BucketError("bucket memory: no answer")

            objects.fault = fault
            for uuid in (STREAM, OTHER):
                assert numbers_in(await served_by(owner, uuid)) == [1]
            assert len(await registrations(objects, SEALER)) <= before + 2, "one for each store"
        owner.close()

    run(main())


@pytest.mark.parametrize("steps_done", points(range(0, 120, 4), 2))
def test_a_store_that_is_killed_while_it_takes_over_holds_it_after_its_restart(
    tmp_path: Path, steps_done: int
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3)})
        await two_are_gone(objects, tmp_path)
        ours, shelf = keeper(objects, tmp_path / "ours", 3, owner)
        dead = asyncio.Event()
        requests = itertools.count()

        async def fault(what: str, key: str) -> None:
            await asyncio.sleep(0.001)
            now_s = asyncio.get_running_loop().time()
            if now_s > UNSEEN_S - 1 and next(requests) == steps_done:
                dead.set()
                await asyncio.sleep(1e6)

        async with running(ours):
            await until(lambda: shelf.writer)
            objects.fault = fault
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNSEEN_S + 10):
                    await dead.wait()
        owner.close()
        objects.fault = failing("", [])  # type: ignore[assignment]
        owner.visible = {address(3)}
        ours, shelf = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            for uuid in (STREAM, OTHER):
                assert numbers_in(await served_by(owner, uuid)) == [1]
        owner.close()

    run(main())


@pytest.mark.parametrize("fails", [1, 4, 5, 9])
def test_an_intent_is_in_the_bucket_before_its_fence_however_often_it_failed(
    tmp_path: Path, fails: int
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner()
        await killed_with(objects, tmp_path / "first", 1, STREAM)
        theirs = (await registrations(objects, SEALER))[0].registered.journal
        ours, _ = keeper(objects, tmp_path / "ours", 2)
        refused = failing("create", ["journal/"], fails)

        async def fault(what: str, key: str) -> None:
            await refused(what, key)  # type: ignore[operator]
            if what == "created" and theirs in key:
                await asyncio.sleep(1e6)  # the store is killed as soon as its fence is there

        objects.fault = fault
        for _ in range(fails):
            with pytest.raises(BucketError):
                await ours.restore()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await ours.restore()
        objects.fault = failing("", [])  # type: ignore[assignment]
        third, _ = keeper(objects, tmp_path / "third", 3, owner)
        await third.restore()
        assert numbers_in(owner.served[STREAM][0]) == [1]
        owner.close()

    run(main())


def test_a_store_that_was_empty_when_it_was_gone_is_taken_over_when_it_is_gone_again(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(1), address(3)})
        first, shelf = keeper(objects, tmp_path / "first", 1)
        ours, mine = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            async with running(first):
                await until(lambda: shelf.writer and mine.writer)
                await asyncio.sleep(2)
                owner.visible = {address(3)}  # a link between relays is down
                await asyncio.sleep(2 * FAILOVER_S)
                owner.visible = {address(1), address(3)}
                await asyncio.sleep(2)
                database, replica = make_stream(shelf)
                put(database, 1)
                await until(lambda: replica.settled)
            database.close()
            owner.visible = {address(3)}
            assert numbers_in(await served_by(owner)) == [1]
        owner.close()

    run(main())


def test_a_journal_that_cannot_be_read_is_not_in_the_way_of_others(tmp_path: Path) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3)})
        await two_are_gone(objects, tmp_path)
        first = (await registrations(objects, SEALER))[0].registered.journal
        objects.objects[journal_key(first, 1)] = b"\x01" + bytes(100)
        ours, _ = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            assert numbers_in(await served_by(owner, OTHER)) == [1]
            assert STREAM not in owner.served
        owner.close()

    run(main())


def test_own_streams_and_those_of_others_are_opened_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3)})
        await two_are_gone(objects, tmp_path)
        ours, shelf = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            # While the takeover reads, the own journal is lost and opened again.
            slow = asyncio.Event()

            async def fault(what: str, key: str) -> None:
                taking = asyncio.get_running_loop().time() > UNSEEN_S
                if taking and what == "get" and "journal/" in key and not slow.is_set():
                    slow.set()
                    writer.end("an internal error")
                    await asyncio.sleep(5)
                await asyncio.sleep(0.001)

            objects.fault = fault
            for uuid in (STREAM, OTHER):
                database = await served_by(owner, uuid)
                assert numbers_in(database) == [1]
            await until(lambda: shelf.writer and shelf.writer is not writer)
            await asyncio.sleep(30)
            for uuid in (STREAM, OTHER):
                database, replica = owner.served[uuid]
                put(database, 2)
                await until(lambda replica=replica: replica.settled)
        owner.close()

    run(main())


def test_a_journal_that_was_taken_over_is_taken_again_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        caplog.set_level(logging.CRITICAL)
        objects, owner = Scripted(), Owner({address(2), address(3)})
        await killed_with(objects, tmp_path / "first", 1, STREAM)
        ours, _ = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            await served_by(owner)
            database, replica = owner.served[STREAM]
            monkeypatch.setattr(replica.writer, "take_off", None)
            await until(lambda: replica.writer.ended)
            await until(lambda: STREAM in owner.served and owner.served[STREAM][1] is not replica)
            database, replica = owner.served[STREAM]
            put(database, 2)
            await until(lambda: replica.settled)
            assert numbers_in(database) == [1, 2]
        owner.close()

    run(main())


def test_a_store_that_wakes_up_an_hour_later_acknowledges_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        objects, owner, taker = Scripted(), Owner(), Owner()
        slept = Scripted()
        slept.objects = objects.objects
        awake = asyncio.Event()

        async def asleep(what: str, key: str) -> None:
            await awake.wait()

        ours, shelf = keeper(slept, tmp_path / "ours", 1, owner)
        theirs, _ = keeper(objects, tmp_path / "theirs", 2, taker)
        async with running(ours):
            await until(lambda: shelf.writer)
            writer = shelf.writer
            assert writer is not None
            database, replica = make_stream(shelf)
            put(database, 1)
            await until(lambda: replica.settled)
            # What it has on its way arrives when it wakes up.
            slept.fault = asleep
            put(database, 2)
            acked: list[bytes] = []
            replica.hold(Ack(acked, b"2"))
            await asyncio.sleep(1)
            await theirs.restore()
            there, replica_there = taker.served[STREAM]
            put(there, 3)
            assert await theirs.drain(10)
            assert replica_there.settled
            await asyncio.sleep(3600)
            awake.set()
            await until(lambda: writer.ended)
            assert acked == []
            assert numbers_in(there) == [1, 3]
        database.close()
        taker.close()

    caplog.set_level(logging.ERROR)
    with asyncio.Runner(debug=False, loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert "store.journal_lost" in {record.message for record in caplog.records}


async def intends(objects: Scripted, store: int, victim: str) -> tuple[Registration, int]:
    """Begin a journal whose store intends to take `victim`, and gets no further; return it and the intent's number."""
    began, writer = await journal(objects, 0, store)
    intent = writer.add(Intent(victim), 10, 0)
    await land(objects, writer)
    return began, intent


@pytest.mark.parametrize("victims_store_is_there", [True, False])
def test_what_a_store_that_is_gone_was_about_to_take_is_not_lost_when_its_fence_arrives_late(
    tmp_path: Path, victims_store_is_there: bool
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(1), address(3)})
        await killed_with(objects, tmp_path / "first", 1, STREAM)
        victim = (await registrations(objects, SEALER))[-1]
        gone, intent = await intends(objects, 2, victim.registered.journal)
        if not victims_store_is_there:
            owner.visible = {address(3)}
        ours, _ = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            await until(lambda: any(key.startswith("journals/") for key in objects.objects))
            async with asyncio.timeout(600):
                while (await end_of(objects, SEALER, gone)).fence is None:  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(1)
            await asyncio.sleep(10)
            await fence(objects, SEALER, victim, gone.registered.journal, intent)
            assert numbers_in(await served_by(owner)) == [1]
            database, replica = owner.served[STREAM]
            put(database, 2)
            await until(lambda: replica.settled)
        owner.close()

    run(main())


def test_what_a_store_that_is_gone_was_about_to_take_is_not_lost_when_the_takeover_fails_once(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(1), address(3)})
        await killed_with(objects, tmp_path / "first", 1, STREAM)
        victim = (await registrations(objects, SEALER))[-1].registered.journal
        await intends(objects, 2, victim)
        failed: list[float] = []

        async def fault(what: str, key: str) -> None:
            await asyncio.sleep(0.001)
            is_fenced = journal_key(victim, 2) in objects.objects
            if is_fenced and (what, key) == ("get", journal_key(victim, 1)):
                failed.append(asyncio.get_running_loop().time())
                if failed[-1] < failed[0] + 30:
                    raise BucketError("bucket memory: no answer")

        objects.fault = fault
        ours, _ = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            assert numbers_in(await served_by(owner)) == [1]
        owner.close()
        assert failed, "nothing failed"

    run(main())


def test_a_store_takes_its_own_journal_again_if_one_that_is_gone_was_about_to_take_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3)})
        ours, shelf = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            await until(lambda: shelf.writer)
            own = (await registrations(objects, SEALER))[-1]
            database, replica = make_stream(shelf)
            owner.served[STREAM] = database, replica
            put(database, 1)
            await until(lambda: replica.settled)
            gone, intent = await intends(objects, 2, own.registered.journal)
            async with asyncio.timeout(600):
                while (await end_of(objects, SEALER, gone)).fence is None:  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(1)
            await asyncio.sleep(10)
            await fence(objects, SEALER, own, gone.registered.journal, intent)
            await until(lambda: STREAM in owner.served and not owner.served[STREAM][1].writer.ended)
            database, replica = owner.served[STREAM]
            assert numbers_in(database) == [1]
            put(database, 2)
            await until(lambda: replica.settled)
            await asyncio.sleep(20)
            assert owner.served[STREAM] == (database, replica)
        owner.close()

    run(main())


@pytest.mark.parametrize("back", [False, True])
def test_what_a_store_took_while_it_was_gone_is_taken_from_it_only_until_it_is_back(
    tmp_path: Path, back: bool
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3), address(4)} if back else {address(3)})
        await killed_with(objects, tmp_path / "first", 1, STREAM)
        (victim,) = await registrations(objects, SEALER)
        theirs, writer = await journal(objects, 0, 4)
        intent = writer.add(Intent(victim.registered.journal), 10, 0)
        await land(objects, writer)
        await fence(objects, SEALER, victim, theirs.registered.journal, intent)
        ours, mine = keeper(objects, tmp_path / "ours", 3, owner)
        async with running(ours):
            await until(lambda: mine.writer)
            await asyncio.sleep(2)
            # It began to take over when both were gone, and does it again after a failure.
            gone = {bytes([store]) * 32 for store in (1, 3, 4)}
            _, count = await ours._open([victim.registered.journal], gone)
            assert count == (0 if back else 1)
            fenced = (await end_of(objects, SEALER, theirs)).fence is not None
            assert fenced is not back
        owner.close()

    run(main())


def test_a_store_follows_what_it_took_itself_past_journals_of_stores_that_are_back(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, owner = Scripted(), Owner({address(3), address(4)})
        await killed_with(objects, tmp_path / "first", 1, STREAM)
        before, writer = (await registrations(objects, SEALER))[0], None
        for store in (4, 3):  # another store took it, and then we did, but served it never
            after, writer = await journal(objects, 0, store)
            intent = writer.add(Intent(before.registered.journal), 10, 0)
            await land(objects, writer)
            await fence(objects, SEALER, before, after.registered.journal, intent)
            before = after
        ours, mine = keeper(objects, tmp_path / "ours", 3, owner)
        mine.make_directory()
        (mine.directory / STATE_FILE).write_text('{"journals": []}')
        async with running(ours):
            await until(lambda: mine.writer)
            await asyncio.sleep(2)
            victim = (await registrations(objects, SEALER))[0].registered.journal
            _, count = await ours._open([victim], {bytes([store]) * 32 for store in (1, 3, 4)})
            assert count == 1
            assert numbers_in(await served_by(owner)) == [1]
        owner.close()

    run(main())
