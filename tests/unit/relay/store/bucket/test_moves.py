"""A stream that moves between two stores is with one of them, whole, whichever dies at whatever point."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.bucket_moves import Host, make, move, numbers_in, put, remove
from support.bucket_sim import KEY, STREAM, Scripted, run, until
from support.points import points

from relay.store.bucket.history import registrations
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.shelf import Leaving
from relay.store.errors import Refuse

SEALER = Sealer(KEY, bytes)


async def two(directory: Path) -> tuple[Scripted, Host, Host]:
    """Return two stores that run; the first has the stream, with the rows 1 to 5 without 2."""
    objects = Scripted()
    hosts = [Host(objects, directory, number) for number in (1, 2)]
    for host in hosts:
        host.owner.visible = {one.address for one in hosts}
        host.start()
    old, new = hosts
    await until(lambda: old.shelf.writer and new.shelf.writer)
    database, replica = make(old)
    put(database, 1, 2, 3, 4, 5)
    remove(database, 2)
    await until(lambda: replica.settled)
    return objects, old, new


async def check(objects: Scripted, directory: Path, hosts: list[Host], rows: list[int]) -> None:
    """See that one store has the stream, that it can write to it, and that whoever takes everything has all of it."""
    await until(lambda: sum(host.serves for host in hosts) == 1)
    await asyncio.sleep(40)  # longer than a move that is not decided
    holders = [host for host in hosts if host.serves]
    assert len(holders) == 1
    database, replica = holders[0].owner.served[STREAM]
    assert numbers_in(database) == rows
    put(database, 9)
    await until(lambda: replica.settled)
    for host in hosts:
        await host.kill()
    last = Host(objects, directory, 9)
    last.start()
    await until(lambda: last.shelf.writer)
    await last.keeper.restore()
    assert numbers_in(last.owner.served[STREAM][0]) == sorted([*rows, 9])
    await last.kill()


def test_a_stream_moves_and_comes_back_without_what_was_removed_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        rows = [1, 3, 4, 5]
        for turn in range(6):
            assert await move(old, new)
            await until(lambda: not old.serves and new.serves)  # noqa: B023 - used at once
            database, replica = new.owner.served[STREAM]
            assert numbers_in(database) == rows
            put(database, 20 + turn)
            remove(database, rows[0])
            rows = [*rows[1:], 20 + turn]
            await until(lambda: replica.settled)  # noqa: B023 - the same
            old, new = new, old
        await check(objects, tmp_path, [old, new], rows)

    run(main())


REQUESTS = 40
"""More than either store makes during one move."""


@pytest.mark.parametrize("disk", ["kept", "lost"])
@pytest.mark.parametrize("dies", ["old", "new"])
@pytest.mark.parametrize("at", points(range(1, REQUESTS), 6))
def test_a_store_that_dies_during_a_move_and_starts_again_leaves_one_whole_stream(
    tmp_path: Path, dies: str, at: int, disk: str
) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        victim = old if dies == "old" else new
        victim.view.stops = victim.view.at + at
        moving = asyncio.create_task(move(old, new))
        await asyncio.wait([moving, asyncio.create_task(victim.view.stopped.wait())], return_when="FIRST_COMPLETED")  # fmt: skip
        await victim.kill()
        await moving
        if disk == "lost":
            victim.lose_disk()
        victim.start()
        await check(objects, tmp_path, [old, new], [1, 3, 4, 5])

    run(main())


@pytest.mark.parametrize("dies", ["old", "new", "both"])
@pytest.mark.parametrize("at", points(range(1, REQUESTS), 6))
def test_a_store_that_dies_or_sleeps_during_a_move_is_succeeded_and_the_stream_is_whole(
    tmp_path: Path, dies: str, at: int
) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        third = Host(objects, tmp_path, 3)
        third.owner.visible = {one.address for one in (old, new, third)}
        third.start()
        await until(lambda: third.shelf.writer)
        await asyncio.sleep(2)
        victims = [old, new] if dies == "both" else [old if dies == "old" else new]
        for victim in victims:
            victim.view.stops = victim.view.at + at
        moving = asyncio.create_task(move(old, new))
        await asyncio.wait([moving, asyncio.create_task(victims[0].view.stopped.wait())], return_when="FIRST_COMPLETED")  # fmt: skip
        gone = {one.address for one in victims}
        for host in (old, new, third):
            host.owner.visible = {one.address for one in (old, new, third)} - gone
        await moving
        await asyncio.sleep(30)
        for victim in victims:  # those that only slept wake up
            victim.view.awake.set()
        await check(objects, tmp_path, [old, new, third], [1, 3, 4, 5])

    run(main())


def test_a_move_that_nobody_goes_on_with_is_given_up_and_the_stream_stays(tmp_path: Path) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        mover = old.shelf.mover
        assert mover is not None
        await new.kill()
        await move(old, new, 1.0)
        assert not old.serves
        new.start()
        await check(objects, tmp_path, [old, new], [1, 3, 4, 5])

    run(main())


def test_a_store_that_stops_begins_no_move(tmp_path: Path) -> None:
    async def main() -> None:
        _, old, new = await two(tmp_path)
        leaves, takes = old.shelf.mover, new.shelf.mover
        assert leaves is not None
        assert takes is not None
        _, replica = old.owner.served[STREAM]
        for host in (old, new):
            await host.kill()
        ends: list[object] = []
        with pytest.raises(Refuse, match="the store is stopping"):
            leaves.release(
                replica,
                new.key,
                Leaving("orders", [], 1000),
                lambda ticket: pytest.fail("it was released"),
            )
        with pytest.raises(Refuse, match="the store is stopping"):
            takes.take(b"ticket", ends.append)
        assert ends == []

    run(main())


def test_a_store_without_room_for_a_stream_refuses_it_before_it_writes_anything(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        takes = new.shelf.mover
        assert takes is not None
        ends: list[Refuse | None] = []
        take = takes.take
        takes.take = lambda sealed, done: take(sealed, lambda end: (ends.append(end), done(end))[0])  # type: ignore[method-assign]  # listens
        new.owner.full = Refuse("full", "this store has 500 streams")
        writer = new.shelf.writer
        assert writer is not None
        before = writer.written
        assert not await move(old, new)
        assert [str(end) for end in ends] == ["this store has 500 streams"]
        assert writer.written == before
        async with asyncio.timeout(2):  # it does not wait for a store that takes long
            await until(lambda: old.serves)
        await check(objects, tmp_path, [old, new], [1, 3, 4, 5])

    run(main())


def test_a_ticket_that_is_used_again_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        takes = new.shelf.mover
        assert takes is not None
        used: list[bytes] = []
        take = takes.take
        takes.take = lambda sealed, done: (used.append(sealed), take(sealed, done))[1]  # type: ignore[method-assign]  # listens
        assert await move(old, new)
        ends: list[object] = []
        take(used[0], ends.append)
        await until(lambda: ends)
        assert ends == [None]
        assert await move(new, old)
        take(used[0], ends.append)
        await until(lambda: len(ends) == 2)
        assert "was not moved" in str(ends[1])
        await check(objects, tmp_path, [old, new], [1, 3, 4, 5])

    run(main())


def test_a_journal_keeps_what_it_released_until_the_other_store_has_all_of_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        objects, old, new = await two(tmp_path)
        writer = old.shelf.writer
        assert writer is not None
        before = len(await registrations(objects, SEALER))
        assert await move(old, new)
        moves = old.keeper._moves
        await until(lambda: not moves.is_open(writer.journal))
        assert any(key.startswith("settled/") for key in objects.objects)
        assert len(await registrations(objects, SEALER)) == before
        await check(objects, tmp_path, [old, new], [1, 3, 4, 5])

    run(main())
