"""Whole stores over one bucket in virtual time: what becomes of streams that are deleted or moved when a store dies at
the wrong moment.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.scene import Scene
from support.bucket_lives.store import EPOCH_US, GROUP
from support.founded import creation, founded
from support.keeper import OWNER, order

from iris.wire import consumers, stream_items, streams
from iris.wire.kinds import NO_KEY
from iris.wire.orders import Definition
from relay.store.bucket.sealing import decision_key


def decisions(scene: Scene) -> set[str]:
    return {key for key in scene.bucket.objects if key.startswith("decision/")}


def segment_objects(scene: Scene) -> list[str]:
    return [key for key in scene.bucket.objects if key.startswith("segment/")]


def test_a_deletion_that_the_bucket_never_learned_of_is_carried_out_when_it_is_repeated(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        process = await scene.opened(1)
        plan = await scene.stream(process, 1)
        scene.bucket.away = True
        assert await scene.delete(process, plan) is None
        scene.kill(1, disk=True)
        scene.bucket.away = False
        process = await scene.opened(1)
        assert process.serves(plan.address)
        assert isinstance(await scene.delete(process, plan), streams.Settled)
        assert not process.serves(plan.address)
        scene.kill(1, disk=True)
        process = await scene.opened(1)
        assert not process.serves(plan.address)

    Scene(tmp_path).play(main)


def test_a_repeated_deletion_is_confirmed_when_the_bucket_knows_of_the_first(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        process = await scene.opened(1)
        plan = await scene.stream(process, 1)
        scene.bucket.away = True
        assert await scene.delete(process, plan) is None
        assert await scene.delete(process, plan) is None
        scene.bucket.away = False
        await asyncio.sleep(10)
        assert isinstance(await scene.delete(process, plan), streams.Settled)

    Scene(tmp_path).play(main)


def test_objects_of_a_deleted_stream_are_deleted_by_whoever_takes_over_from_its_store(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        first, second = await scene.opened(1), await scene.opened(2)
        plan = await scene.stream(first, 30)
        await scene.until(lambda: len(segment_objects(scene)) > 2)
        scene.bucket.refuses = "delete", "segment/"
        assert isinstance(await scene.delete(first, plan), streams.Settled)
        await asyncio.sleep(2)
        assert segment_objects(scene)
        scene.kill(1, disk=False)
        scene.bucket.refuses = None
        await scene.until(lambda: not segment_objects(scene))
        assert not second.holds(plan.uuid)

    Scene(tmp_path, disk_limit=1500).play(main)


def test_a_checkpoint_waits_until_the_objects_of_deleted_streams_are_deleted(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        process = await scene.opened(1)
        other, plan = await scene.stream(process), await scene.stream(process, 30)
        await scene.until(lambda: len(segment_objects(scene)) > 2)
        scene.bucket.refuses = "delete", "segment/"
        assert isinstance(await scene.delete(process, plan), streams.Settled)
        before = scene.counts["checkpoints"]
        for number in range(100):
            await scene.append(other, number)
        await asyncio.sleep(10)
        assert scene.counts["checkpoints"] == before
        scene.bucket.refuses = None
        await scene.until(lambda: scene.counts["checkpoints"] > before)
        assert not any(plan.address in key for key in segment_objects(scene))

    Scene(tmp_path, disk_limit=1500).play(main)


def test_a_store_that_takes_over_from_the_one_which_a_stream_came_from_leaves_the_stream_alone(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        old, new = await scene.opened(1), await scene.opened(2)
        plan, other = await scene.stream(old, 3), await scene.stream(old, 1)
        await scene.move(plan, old, new)
        scene.kill(1, disk=False)
        await scene.until(lambda: new.holds(other.uuid))
        assert await scene.numbers(plan) == [0, 1, 2]
        assert scene.counts["store.copy_damaged"] == 0
        log = new.store.streams[plan.uuid].log
        assert log is not None
        assert (Path(log.database.path) / "CURRENT").exists()

    Scene(tmp_path).play(main)


def test_a_stream_that_is_released_can_be_taken_when_the_bucket_knows_of_it(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        old, new = await scene.opened(1), await scene.opened(2)
        plan = await scene.stream(old, 3)
        assert old.shelf.writer is not None
        scene.bucket.refuses = "create", f"journal/{old.shelf.writer.journal}/"
        assert await scene.release(plan, old, new) is None
        scene.kill(1, disk=False)
        scene.bucket.refuses = None
        await scene.until(lambda: new.holds(plan.uuid), 100)
        assert await scene.numbers(plan) == [0, 1, 2]

    Scene(tmp_path).play(main)


def test_a_move_is_decided_when_the_bucket_knows_that_the_stream_is_taken(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        old, new = await scene.opened(1), await scene.opened(2)
        plan = await scene.stream(old, 3)
        before = decisions(scene)
        moving = await scene.release(plan, old, new)
        assert isinstance(moving, streams.Moving)
        assert new.shelf.writer is not None
        scene.bucket.refuses = "create", f"journal/{new.shelf.writer.journal}/"
        assert (
            await scene.ask_process(new, new.address, NO_KEY, streams.Take(moving.ticket)) is None
        )
        assert decisions(scene) == before
        scene.kill(2, disk=False)
        await scene.until(lambda: old.holds(plan.uuid), 20)
        assert await scene.numbers(plan) == [0, 1, 2]

    Scene(tmp_path).play(main)


def test_a_journal_that_released_a_stream_has_no_checkpoint_before_the_other_store_has_all_of_it(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        scene.checkpoint_bytes = 2000
        old, new = await scene.opened(1), await scene.opened(2)
        plan, other = await scene.stream(old, 3), await scene.stream(old)
        scene.bucket.refuses = "create", "settled/"
        await scene.move(plan, old, new)
        before = scene.counts["checkpoints"]
        for number in range(60):
            await scene.append(other, number)
        await asyncio.sleep(10)
        assert scene.counts["checkpoints"] == before
        scene.kill(2, disk=False)
        scene.bucket.refuses = None
        await scene.until(lambda: old.holds(plan.uuid), 100)
        assert await scene.numbers(plan) == [0, 1, 2]
        await scene.until(lambda: scene.counts["checkpoints"] > before)

    Scene(tmp_path).play(main)


def test_a_stream_that_left_a_journal_and_came_back_in_a_checkpoint_is_in_all_that_took_both(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        scene.checkpoint_bytes = 2000
        first, second = await scene.opened(1), await scene.opened(2)
        plan = await scene.stream(first, 3)
        await scene.move(plan, first, second)
        scene.kill(2, disk=False)
        await scene.until(lambda: first.holds(plan.uuid))
        checkpoints = scene.counts["checkpoints"]
        for number in range(3, 60):
            await scene.append(plan, number)
        await scene.until(lambda: scene.counts["checkpoints"] > checkpoints)
        await pass_on(scene, plan, 1, 3, 4)

    Scene(tmp_path).play(main)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1)])
def test_a_stream_is_where_it_moved_in_whatever_order_the_journals_are_read(
    tmp_path: Path, old: int, new: int
) -> None:
    async def main(scene: Scene) -> None:
        stores = {1: await scene.opened(1), 2: await scene.opened(2)}
        plan = await scene.stream(stores[old], 3)
        await scene.stream(stores[old])
        await scene.move(plan, stores[old], stores[new])
        await scene.append(plan, 3)
        await scene.opened(3)
        scene.kill(old, disk=False)
        scene.kill(new, disk=False)
        await scene.until(lambda: scene.processes[3].holds(plan.uuid))
        await pass_on(scene, plan, 3, 4, 5)
        # It moves from a journal that has all of these.
        sixth = await scene.opened(6)
        await scene.move(plan, scene.processes[5], sixth)
        assert await scene.numbers(plan) == [0, 1, 2, 3]

    Scene(tmp_path).play(main)


async def pass_on(scene: Scene, plan: StreamPlan, *numbers: int) -> None:
    """Kill each of these stores, with its disk, after the next one was started; see that the stream is at the last."""
    before = await scene.numbers(plan)
    for number, successor in itertools.pairwise(numbers):
        process = await scene.opened(successor)
        scene.kill(number, disk=False)
        await scene.until(lambda: process.holds(plan.uuid), 100)  # noqa: B023 - used at once
    assert await scene.numbers(plan) == before


@pytest.mark.parametrize("had_letters", [False, True])
def test_a_dead_letter_is_there_after_a_kill_before_the_bucket_knew_of_it(
    tmp_path: Path, had_letters: bool
) -> None:
    async def main(scene: Scene) -> None:
        process = await scene.opened(1)
        plan = await scene.stream(process, 2)
        consume = consumers.Consume("workers", b"w" * 16, 4096, 1, 0, max_deliver=1)

        async def fail(offset: int) -> None:
            got = await scene.ask(plan.address, consume)
            assert isinstance(got, consumers.Delivered)
            assert [one.item.offset for one in got.items] == [offset]
            ours = [consumers.Range(offset, offset + 1)]
            settle = consumers.Settle("workers", b"w" * 16, [], ours)
            assert isinstance(await scene.ask(plan.address, settle), streams.Settled)

        if had_letters:
            await fail(0)
        await asyncio.sleep(1)
        got = await scene.ask(plan.address, consume)
        assert isinstance(got, consumers.Delivered)
        last = got.items[0].item.offset
        await asyncio.sleep(1)
        scene.bucket.away = True
        settle = consumers.Settle("workers", b"w" * 16, [], [consumers.Range(last, last + 1)])
        assert isinstance(await scene.ask(plan.address, settle), streams.Settled)
        await asyncio.sleep(2)
        scene.kill(1, disk=True)
        scene.bucket.away = False
        process = await scene.opened(1)
        letters = process.store.streams[stream_items.dead_uuid(plan.uuid)].log
        assert letters is not None
        assert letters.messages == last + 1

    Scene(tmp_path).play(main)


def test_a_stream_that_is_created_again_at_another_store_has_one_holder(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        first, second = await scene.opened(1), await scene.opened(2)
        plan = await scene.stream(first, 1)
        assert not await scene.create(plan, second)
        assert [one.holds(plan.uuid) for one in (first, second)] == [True, False]
        # Nor when it has moved, or is gone.
        await scene.move(plan, first, second)
        assert not await scene.create(plan, first)
        assert isinstance(await scene.delete(second, plan), streams.Settled)
        assert not await scene.create(plan, first)
        assert [one.holds(plan.uuid) for one in (first, second)] == [False, False]

    Scene(tmp_path).play(main)


def test_a_stream_that_is_created_at_two_stores_at_once_has_one_holder(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        both = [await scene.opened(number) for number in (1, 2)]
        plan = StreamPlan("s1", founded(OWNER, bytes(16)), Definition("s1"), 0)
        made = await asyncio.gather(*(scene.create(plan, one) for one in both))
        assert sorted(made) == [False, True]
        other = scene.start(3)
        await scene.until(lambda: other.shelf.writer is not None)
        for number in (1, 2):
            scene.kill(number, disk=False)
        await scene.until(lambda: other.holds(plan.uuid))

    Scene(tmp_path).play(main)


def test_a_store_that_was_killed_while_it_created_a_stream_does_not_create_it_later(
    tmp_path: Path,
) -> None:
    async def main(scene: Scene) -> None:
        process = await scene.opened(1)
        plan = StreamPlan("s1", founded(OWNER, bytes(16)), Definition("s1"), 0)
        scene.bucket.refuses = "create", "journal/"
        creating = asyncio.ensure_future(scene.create(plan, process))
        await scene.until(lambda: decision_key(plan.uuid.hex()) in scene.bucket.objects)
        scene.kill(1, disk=True)
        scene.bucket.refuses = None
        assert not await creating
        process = await scene.opened(1)
        assert not process.serves(plan.address), "its first write is not in the bucket"
        assert not await scene.create(plan, process)
        assert await scene.create(
            StreamPlan("s1", founded(OWNER, b"2" * 16), Definition("s1"), 0), process
        )

    Scene(tmp_path).play(main)


def test_a_create_is_refused_while_the_bucket_is_away_and_succeeds_later(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        process = await scene.opened(1)
        scene.bucket.away = True
        plan = StreamPlan("s1", founded(OWNER, bytes(16)), Definition("s1"), 0)
        signed = order(OWNER, plan.definition, issued_us=EPOCH_US, uuid=plan.uuid, store=GROUP)  # type: ignore[arg-type]  # the key of the group
        call = creation(signed)
        both = [scene.ask_process(process, process.address, NO_KEY, call, 60) for _ in "ab"]
        for answer in await asyncio.gather(*both):
            assert isinstance(answer, streams.Refused)
            assert answer.code == "leaving"
        scene.bucket.away = False
        assert await scene.create(plan, process)
        assert process.holds(plan.uuid)

    Scene(tmp_path).play(main)
