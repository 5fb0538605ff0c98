"""A stream of a disk that joins the bucket is on the disk or in the bucket, whole, whichever store dies at whatever
point.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from msgspec import structs
from support.bucket_joins import DEFINITION, UUID, World, until
from support.bucket_lives.store import GROUP, records
from support.bucket_moves import View
from support.bucket_sim import run
from support.founded import founded
from support.keeper import OWNER, SECOND, STRANGER, order
from support.lost_streams import Maker
from support.points import points

from iris.crypto.keys import ClusterKey
from iris.wire import consumers, stream_items, streams
from iris.wire.orders import END, MOVE
from relay.store.bucket.copies import Lag
from relay.store.bucket.copy_reading import read_copies
from relay.store.bucket.dropping import Dropping
from relay.store.bucket.objects import BucketError
from relay.store.bucket.sealing import Sealer, decision_key
from relay.store.errors import Refuse

REQUESTS = 33
"""More than a store makes while a stream joins."""


async def join_until(world: World, at: int) -> asyncio.Task[object]:
    """Let the stream join, and return when the first store hangs in its `at`-th request to the bucket."""
    view = world.first.view
    view.stops = view.at + at
    joining = asyncio.create_task(world.join())
    await view.stopped.wait()
    return joining


def joined(answer: object) -> TypeGuard[streams.Described]:
    return isinstance(answer, streams.Described) and bool(answer.holder)


def refused(answer: object) -> tuple[str, str]:
    assert isinstance(answer, streams.Refused), answer
    return answer.code, answer.detail


@contextlib.asynccontextmanager
async def world_with(directory: Path, *keys: ClusterKey, **settings: Any) -> AsyncIterator[World]:
    """Two stores without clients; the first has the stream."""
    world = World(directory)
    await world.begin(*keys, clients=False, **settings)
    try:
        yield world
    finally:
        await world.stop()


def decides_join(key: str) -> bool:
    """Return whether an object decides a join, and not who may bring a log to the bucket."""
    return key.startswith("decision/") and key != decision_key(UUID.hex())


def hold_back(world: World, holds: Callable[[str], bool]) -> asyncio.Event:
    """Let creates of these objects wait until the event that is returned is set."""
    goes_on = asyncio.Event()

    async def fault(what: str, key: str) -> None:
        await asyncio.sleep(0.001)
        if what == "create" and holds(key):
            await goes_on.wait()

    world.objects.fault = fault
    return goes_on


def test_a_stream_joins_while_it_is_in_use(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.begin()
        answer = await world.join()
        assert joined(answer)
        assert world.first.serves
        await world.first.kill()
        world.first.lose_disk()
        await until(lambda: world.second.serves)
        assert len(await world.end()) >= 3 + 8 + 4

    run(main())


@pytest.mark.parametrize("at", points(range(4, REQUESTS), 4))
def test_a_store_that_dies_while_a_stream_joins_and_starts_again_has_it_whole(
    tmp_path: Path, at: int
) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.begin()
        joining = await join_until(world, at)
        await world.first.kill()
        world.first.start()
        answered = await joining
        assert len(await world.end()) >= 3 + 8 + 4
        assert world.joined or not joined(answered)
        await world.check_again(tmp_path)

    run(main())


@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize("at", points(range(4, REQUESTS), 4))
def test_a_store_that_dies_or_sleeps_while_a_stream_joins_is_succeeded_if_it_joined(
    tmp_path: Path, at: int, wakes: bool
) -> None:
    async def main() -> None:
        world = World(tmp_path)
        await world.begin()
        joining = await join_until(world, at)
        if wakes:
            world.visible.remove(world.first)
        else:
            await world.first.kill()
        await asyncio.sleep(30)
        if wakes:
            world.first.view.stops = None
            world.first.view.awake.set()
            world.visible.append(world.first)
        else:
            world.first.start()
        answered = await joining
        assert len(await world.end()) >= 3 + 8 + 4
        assert world.joined or not joined(answered)
        await world.check_again(tmp_path)

    run(main())


def test_nothing_is_decided_before_the_bucket_has_all_of_the_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            first = world.first
            writer = first.shelf.writer
            assert writer is not None
            note = first.directory / "streams" / f"{UUID.hex()}.join"
            mine = f"journal/{writer.journal}/"
            goes_on = hold_back(world, lambda key: key.startswith(mine) and note.exists())
            joining = asyncio.create_task(world.join(60))
            await until(note.exists)
            await asyncio.sleep(5)
            replica = first.store.streams[UUID].replica
            assert replica is not None
            # The disk has what the bucket may not get, and no checkpoint covers a part of the stream.
            assert not replica.durable
            assert first.keeper._checkpoints[writer.journal].paused()
            assert not any(map(decides_join, world.objects.objects))
            copies = first.shelf.copies
            assert copies.writer is not None
            assert {uuid: copy.log for uuid, copy in copies.all.items()} == {UUID: None}
            assert (copies.ended, copies.writer.idle) == ({}, True), "the copy stands still"
            for call in (
                streams.Delete([order(OWNER, DEFINITION, action=END, issued_us=0, uuid=UUID)]),
                streams.Change(world.orders(store=first.key)),
            ):
                code, detail = refused(await world.ask("orders", call))
                assert (code, detail) == (
                    "leaving",
                    "the stream is joining the bucket; try again when it has",
                )
            goes_on.set()
            assert joined(await joining)
            assert replica.durable
            assert not first.keeper._checkpoints[writer.journal].paused()
            assert copies.all == {}
            await until(lambda: copies.writer is not None and copies.writer.idle)
            assert await read_copies(world.objects, GROUP, tmp_path / "copies") == []

    run(main())


def test_a_stream_that_was_decided_to_stay_is_on_the_disk_and_joins_by_another_try(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            first = world.first
            writer, stream = first.shelf.writer, first.store.streams[UUID]
            assert writer is not None
            away = True

            async def fault(what: str, key: str) -> None:
                await asyncio.sleep(0.001)
                if away and what == "create" and decides_join(key):
                    raise BucketError("away")

            world.objects.fault = fault
            joining = asyncio.create_task(world.join(60))
            await until(lambda: stream.joining)
            appended = [asyncio.create_task(world.append(b"meanwhile"))]
            await asyncio.sleep(1)
            writer.end("a test ends it")
            appended.append(asyncio.create_task(world.append(b"later")))
            await asyncio.sleep(1)
            assert isinstance(
                await appended[0], streams.Appended
            )  # the disk and the bucket have it
            assert refused(await appended[1])[0] == "leaving"
            away = False
            assert joined(await joining)
            assert stream.bucket_copy is None
            decided = [key for key in world.objects.objects if decides_join(key)]
            assert len(decided) == 2  # the first one to stay
            assert [body for _, body in await world.whole()][3:] == [b"meanwhile"]

    run(main())


@pytest.mark.parametrize("when", ["while it is written to the bucket", "while it is decided"])
def test_the_first_dead_letter_joins_along(tmp_path: Path, when: str) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            first, dead = world.first, stream_items.dead_uuid(UUID)
            handed = await world.ask("orders", consumers.Consume("c", b"w" * 16, 4096, 1, 0, max_deliver=1))  # fmt: skip
            assert isinstance(handed, consumers.Delivered)
            assert len(handed.items) == 1
            writer = first.shelf.writer
            assert writer is not None
            note = first.directory / "streams" / f"{UUID.hex()}.join"
            late = when == "while it is decided"
            goes_on = hold_back(
                world, lambda key: key.startswith(f"journal/{writer.journal}/") and note.exists() is late
            )  # fmt: skip
            joining = asyncio.create_task(world.join(60))
            await (until(note.exists) if late else asyncio.sleep(1))
            failed = consumers.Settle("c", b"w" * 16, [], [consumers.Range(0, 1)])
            settling = asyncio.create_task(world.ask("orders", failed))
            await until(lambda: dead in first.store.streams)
            assert first.store.streams[dead].joining is late
            goes_on.set()
            assert joined(await joining)
            assert isinstance(await settling, streams.Settled)
            assert first.store.streams[dead].in_bucket
            await first.kill()
            first.lose_disk()
            await until(lambda: world.second.serves)
            letters = await world.ask(dead.hex(), streams.Fetch(0, 4096))
            assert isinstance(letters, streams.Fetched)
            assert len(letters.items) == 1

    run(main())


def test_a_stream_joins_by_orders_of_all_its_keys(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path, OWNER, SECOND) as world:
            code, detail = refused(await world.join())
            assert code == "order"
            assert f"{SECOND.key_id.hex()[:8]} did not" in detail
            code, detail = refused(await world.change(world.orders(OWNER, SECOND, STRANGER)))
            assert (code, "must countersign" in detail) == ("order", True)
            assert joined(await world.change(world.orders(OWNER, SECOND)))

    run(main())


def test_an_order_that_is_repeated_is_answered_again_and_another_one_has_to_read_first(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            goes_on = hold_back(world, lambda key: key.startswith("journal/"))
            orders = world.orders()
            same = [asyncio.create_task(world.change(orders, 60)) for _ in range(2)]
            await asyncio.sleep(1)
            same.append(asyncio.create_task(world.join(60)))  # of another client, at another time
            shown = await world.ask("orders", streams.Describe())
            assert isinstance(shown, streams.Described)
            assert (shown.holder, shown.joining is not None) == (b"", True)
            other = structs.replace(DEFINITION, max_messages=7)
            code, detail = refused(await world.change(world.orders(definition=other)))
            assert (code, detail) == (
                "leaving",
                "the stream is joining the bucket; try again when it has",
            )
            goes_on.set()
            assert [joined(answer) for answer in await asyncio.gather(*same)] == [True] * 3
            shown = await world.change(orders)
            assert joined(shown)
            assert shown.joining is None
            code, detail = refused(await world.change(world.orders(definition=other)))
            assert code == "revision"
            assert joined(await world.change(world.orders(definition=other, revision=2)))

    run(main())


def test_an_order_that_comes_first_wins_over_a_stream_that_is_still_joining(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            first = world.first
            goes_on = hold_back(world, lambda key: key.startswith("journal/"))
            joining = asyncio.create_task(world.join(60))
            await asyncio.sleep(1)
            smaller = structs.replace(DEFINITION, max_messages=1000)
            answer = await world.change(world.orders(store=first.key, definition=smaller))
            assert isinstance(answer, streams.Described)
            assert not answer.holder
            goes_on.set()
            assert refused(await joining)[0] == "revision"
            goes_on = hold_back(world, lambda key: key.startswith("journal/"))
            joining = asyncio.create_task(world.change(world.orders(revision=2, definition=smaller), 60))  # fmt: skip
            await asyncio.sleep(1)
            end = world.orders(revision=2, store=first.key, action=END)
            assert isinstance(await world.ask("orders", streams.Delete(end)), streams.Settled)
            goes_on.set()
            assert refused(await joining)[0] == "no-stream"

    run(main())


def test_an_order_waits_for_a_bucket_that_is_away_as_long_as_somebody_waits_for_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            away = True

            async def fault(what: str, key: str) -> None:
                await asyncio.sleep(0.001)
                if away:
                    raise BucketError("away")

            world.objects.fault = fault
            joining = asyncio.create_task(world.join(20))
            await asyncio.sleep(10)
            away = False
            assert joined(await joining)

    run(main())


def test_a_stream_cannot_go_back_to_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            assert joined(await world.join())
            back = world.orders(store=world.first.key, revision=2)
            code, detail = refused(await world.change(back))
            assert (code, "cannot go back to a disk" in detail) == ("order", True)

    run(main())


def test_a_stream_that_joined_moves_and_is_deleted_like_any_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            first, second = world.first, world.second
            assert joined(await world.join())
            end = await world.whole()
            orders = world.orders(store=second.key, revision=2, action=MOVE)
            moving = await world.ask("orders", streams.Move(orders))
            assert isinstance(moving, streams.Moving)
            taken = await world.call(second, second.store.address, streams.Take(moving.ticket))
            assert isinstance(taken, streams.Settled)
            await until(lambda: not (first.directory / "streams" / UUID.hex()).exists())
            assert await world.whole() == end
            await first.kill()
            first.start()
            await until(lambda: first.shelf.writer)
            await asyncio.sleep(5)
            assert second.serves
            left = [path.name for path in first.directory.rglob(f"{UUID.hex()}*")]
            assert left == [f"{UUID.hex()}.left"], "its first order is void"
            deleting = streams.Delete(world.orders(revision=2, action=END))
            assert isinstance(await world.ask("orders", deleting), streams.Settled)
            await second.kill()
            second.start()
            await asyncio.sleep(5)
            assert not any(host.serves for host in world.visible)
            assert [path.name for path in second.directory.rglob(f"{UUID.hex()}*")] in ([], [f"{UUID.hex()}.ended"])  # fmt: skip

    run(main())


def test_a_store_without_the_bucket_does_not_serve_a_stream_that_joined(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            assert joined(await world.join())
            await world.first.kill()
            world.first.start(bucket=False)
            await asyncio.sleep(1)
            assert not world.first.serves
            await world.first.kill()
            world.first.start()
            await until(lambda: any(host.serves for host in world.visible))
            assert len(await world.whole()) == 3

    run(main())


BEFORE = [b"orders/before/%d" % number for number in range(3)]


async def following(world: World) -> None:
    """Return when the copy of the stream has everything."""
    copy = world.first.store.streams[UUID].bucket_copy
    assert copy is not None
    await until(lambda: copy.lag() == Lag(0, 0))


async def force(world: World, directory: Path) -> bytes | Refuse | None:
    """Restore the stream from its copy, as a third store. Return the new log's uuid, the refusal, or None without a
    copy that counts.
    """
    maker = Maker(View(world.objects), directory, 3, group=GROUP)
    found = await maker.find(key=OWNER)
    if not found:
        return None
    try:
        made = await maker.force(maker.wish(found[0], founded(OWNER, bytes(16)), key=OWNER))
    except Refuse as err:
        return err
    with maker.open(made) as log:
        assert [body for _, body in records(log)][:3] == [
            b"orders/before/%d" % number for number in range(3)
        ]
    return made


@pytest.mark.parametrize("at", points(range(4, REQUESTS), 4))
def test_a_store_that_is_lost_with_its_disk_while_a_stream_joins_leaves_a_copy_or_the_stream(
    tmp_path: Path, at: int
) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            await following(world)
            await join_until(world, at)
            await world.first.kill()
            world.first.lose_disk()
            await asyncio.sleep(90)  # longer than a store that was never seen is waited for
            if world.second.serves:
                assert len(await world.whole()) == 3
                assert await force(world, tmp_path) is None
            else:
                assert isinstance(await force(world, tmp_path), bytes)

    run(main())


def test_the_copy_counts_until_it_is_decided_that_a_stream_joins(tmp_path: Path) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            await following(world)
            goes_on = hold_back(world, decides_join)
            joining = asyncio.create_task(world.join(60))
            await until(lambda: world.first.store.streams[UUID].joining)
            await asyncio.sleep(5)
            await world.first.kill()
            world.first.lose_disk()
            goes_on.set()
            assert isinstance(await force(world, tmp_path), bytes)
            await joining

    run(main())


@pytest.mark.parametrize("at", points(range(4, REQUESTS), 4))
def test_a_store_that_sleeps_while_a_stream_joins_and_one_that_makes_it_of_its_copy_do_not_both_succeed(
    tmp_path: Path, at: int
) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            await following(world)
            joining = await join_until(world, at)
            made = await force(world, tmp_path)
            world.first.view.stops = None
            world.first.view.awake.set()
            await joining
            answer = await world.join(60)
            stream = world.first.store.streams[UUID]
            assert stream.in_bucket is not isinstance(made, bytes)
            if isinstance(made, bytes):
                code, text = refused(answer)
                assert (code, "cannot join the bucket" in text) == ("leaving", True)
                assert world.first.serves, "as long as the store has not looked itself"
                assert [body for _, body in await world.whole()] == BEFORE

    run(main())


def test_a_copy_that_a_store_left_which_had_no_time_to_end_it_does_not_count(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with world_with(tmp_path) as world:
            await following(world)
            goes_on = hold_back(world, lambda key: key.startswith("copies/"))
            assert joined(await world.join())
            await world.first.kill()
            assert len(await read_copies(world.objects, GROUP, tmp_path / "copies")) == 1
            dropping = Dropping(View(world.objects), Sealer(GROUP, os.urandom))
            await dropping.read()
            assert [one.needed for its in dropping.found for one in its.streams] == [""]
            assert await force(world, tmp_path) is None
            goes_on.set()
            world.first.start()
            await until(lambda: any(host.serves for host in world.visible))
            await until(lambda: world.first.shelf.copies.writer is not None)
            assert await read_copies(world.objects, GROUP, tmp_path / "copies") == []

    run(main())
