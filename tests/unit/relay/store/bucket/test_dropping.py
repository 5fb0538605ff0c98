"""Copies of a store that is gone for good are dropped. If it comes back, it copies its streams once more."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from support.founded import founded
from support.lost_streams import GROUP, KEY, Maker, copy_to, new_log
from support.points import points
from typer.testing import CliRunner

from iris.errors import ConfigError
from iris.wire.codec import END
from iris.wire.stream_items import dead_uuid
from relay.store.__main__ import app
from relay.store.bucket.copy_reading import read_copies
from relay.store.bucket.directory import Directory
from relay.store.bucket.dropping import NOT_MOVED, Dropping
from relay.store.bucket.sealing import Sealer
from relay.store.log import Log
from relay.store.records import Entry, Record

UUID, MADE = (founded(KEY, letter * 16) for letter in (b"u", b"m"))


def entry(number: int) -> Entry:
    return Entry(0x48, "orders", KEY.key_id, b"s" * 16, END.pack(1_000, 0, 1, 7), b"%d" % number)


def bodies(path: Path) -> list[bytes]:
    with Log.open(str(path)) as log:
        return [one.body for one in log.read(0, 1 << 20, now_us=1).items if isinstance(one, Record)]


async def copied(objects: Directory, directory: Path) -> dict[bytes, list[bytes]]:
    """Return the copies in the bucket: uuid -> bodies."""
    found = await read_copies(objects, GROUP, directory / "read")
    return {one.uuid: bodies(one.path) for one in found}


async def dropping(objects: Directory) -> Dropping:
    made = Dropping(objects, Sealer(GROUP, bytes))
    await made.read()
    return made


def left(bucket: Path) -> list[str]:
    """Return the objects of journals and their checkpoints."""
    return [str(one.relative_to(bucket)) for kind in ("journal", "checkpoint") for one in sorted((bucket / kind).rglob("*")) if one.is_file()]  # fmt: skip


@pytest.fixture
def objects(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "bucket")


async def copy_with_checkpoint(objects: Directory, directory: Path, log: Log) -> None:
    """Copy a log, and return when its journal has a checkpoint."""
    bucket = directory / "bucket"
    await copy_to(
        objects, directory / "copies", log, checkpoint_bytes=1,
        until=lambda: (bucket / "checkpoint").is_dir() and any((bucket / "checkpoint").rglob("0*")),
    )  # fmt: skip
    log.copy_to(None)


async def test_copies_that_another_log_has_replaced_are_dropped(
    objects: Directory, tmp_path: Path
) -> None:
    with new_log(tmp_path / "log", UUID) as log:
        log.append([entry(number) for number in range(5)], 1)
        await copy_to(objects, tmp_path / "copies", log)
    (one,) = (await dropping(objects)).found
    assert (one.label, [(each.name, each.next, each.needed) for each in one.streams]) == ("db-1", [("orders", 5, NOT_MOVED)])  # fmt: skip
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    await maker.force(maker.wish(found, MADE))
    (stream,) = (await dropping(objects)).named(one.journal[:6]).streams
    assert stream.needed.endswith("on db-2, which has no other copy in the bucket")
    with maker.open(MADE) as log:
        await copy_to(objects, tmp_path / "more", log, store=maker.key)
    drops = await dropping(objects)
    (stream,) = drops.named(one.journal).streams
    assert stream.needed == ""
    await drops.drop(one.journal)
    assert [key for key in left(tmp_path / "bucket") if one.journal in key] == [f"journal/{one.journal}/000000000002"]  # fmt: skip
    assert one.journal not in [each.journal for each in (await dropping(objects)).found]
    assert list(await copied(objects, tmp_path)) == [MADE]
    (found,) = await Maker(objects, tmp_path, 3).find()
    assert (found.uuid, found.next) == (MADE, 6)


async def test_a_journal_that_is_not_there_or_not_named_clearly_is_not_dropped(
    objects: Directory, tmp_path: Path
) -> None:
    for name, uuid in (("one", UUID), ("two", MADE)):
        with new_log(tmp_path / name, uuid) as log:
            await copy_to(objects, tmp_path / f"{name}-copies", log)
    drops = await dropping(objects)
    for text, count in (("", 2), ("x", 0)):
        with pytest.raises(ConfigError, match=f"begins the ids of {count} journals"):
            drops.named(text)
    name = drops.found[0].journal
    with new_log(tmp_path / "three", dead_uuid(UUID)) as log:  # its store goes on
        await copy_to(objects, tmp_path / "one-copies", log)
    with pytest.raises(ConfigError, match="a moment ago, so its store runs"):
        await drops.drop(name)


async def test_a_store_that_runs_nevertheless_copies_its_streams_once_more(
    objects: Directory, tmp_path: Path
) -> None:
    with new_log(tmp_path / "log", UUID) as log:
        log.append([entry(0)], 1)
        tasks: list[asyncio.Task[None]] = []

        async def drop() -> None:
            drops = await dropping(objects)
            await drops.drop(drops.found[0].journal)
            log.append([entry(1)], 1)

        def dropped() -> bool:
            if not tasks:
                tasks.append(asyncio.create_task(drop()))
            return tasks[0].done() and log.next == 2

        await copy_to(objects, tmp_path / "copies", log, until=dropped)
        tasks[0].result()
    assert await copied(objects, tmp_path) == {UUID: [b"0", b"1"]}


class Dying(Directory):
    """A bucket for a command that is killed at one of its requests."""

    def __init__(self, root: Path, dies_at: int) -> None:
        super().__init__(root)
        self.requests = 0
        self._dies_at = dies_at

    async def create(self, key: str, data: bytes) -> bool:
        self._live()
        return await super().create(key, data)

    async def delete(self, key: str) -> None:
        self._live()
        await super().delete(key)

    def _live(self) -> None:
        self.requests += 1
        if self.requests == self._dies_at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("at", points(range(1, 6), 2))
def test_a_command_that_was_killed_half_way_leaves_copies_that_are_whole_or_gone(
    tmp_path: Path, at: int, checkpoint: bool, comes_back: bool
) -> None:
    async def make() -> None:
        objects = Directory(tmp_path / "bucket")
        with new_log(tmp_path / "log", UUID) as log:
            log.append([entry(number) for number in range(3)], 1)
            if checkpoint:
                await copy_with_checkpoint(objects, tmp_path, log)
            else:
                await copy_to(objects, tmp_path / "copies", log)

    async def drop() -> None:
        objects = Dying(tmp_path / "bucket", at)
        drops = Dropping(objects, Sealer(GROUP, bytes))
        await drops.read()
        await drops.drop(drops.found[0].journal)

    async def check() -> None:
        objects = Directory(tmp_path / "bucket")
        there = await copied(objects, tmp_path)
        assert there in ({}, {UUID: [b"0", b"1", b"2"]})
        if comes_back:
            with Log.open(str(tmp_path / "log")) as log:
                await copy_to(objects, tmp_path / "copies", log)
            assert await copied(objects, tmp_path) == {UUID: [b"0", b"1", b"2"]}
        elif there:
            await drop_all(objects)
            assert await copied(objects, tmp_path) == {}

    async def drop_all(objects: Directory) -> None:
        drops = await dropping(objects)
        await drops.drop(drops.found[0].journal)

    asyncio.run(make())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(drop())
    asyncio.run(check())


def test_the_command_lists_the_copies_and_drops_those_that_are_not_needed_or_all_that_are_named(
    tmp_path: Path,
) -> None:
    async def make() -> str:
        objects = Directory(tmp_path / "bucket")
        with new_log(tmp_path / "log", UUID) as log:
            log.append([entry(0)], 1)
            await copy_to(objects, tmp_path / "copies", log)
        return (await dropping(objects)).found[0].journal

    def said(*args: str) -> tuple[int, str]:
        done = CliRunner().invoke(
            app, ["drop-copies", str(tmp_path), *args, "--bucket", f"file://{tmp_path}/bucket"]
        )
        return done.exit_code, done.output

    (tmp_path / "group.key").write_text(GROUP.reveal() + "\n")
    (tmp_path / "group.key").chmod(0o600)
    journal = asyncio.run(make())
    code, listed = said()
    assert code == 0
    assert f"journal {journal[:8]} of db-1" in listed
    assert f"orders (log {UUID.hex()}, up to 1): needed: {NOT_MOVED}" in listed
    code, text = said(journal[:8])
    assert code == 1
    assert "nothing was dropped" in text
    assert said()[1] == listed
    code, text = said(journal[:8], "--yes")
    assert code == 0
    assert text.endswith("dropped\n")
    assert said() == (0, f"file://{tmp_path}/bucket: no copies\n")
    assert said(journal)[0] == 2
