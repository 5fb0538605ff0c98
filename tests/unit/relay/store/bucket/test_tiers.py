"""Old records move to segment objects of the bucket, are read from there, and are deleted there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from support.bucket_sim import KEY, STREAM, Scripted, run, until

from iris.wire import consumers, stream_items, streams
from iris.wire.codec import END
from relay.store.bucket.directory import Directory
from relay.store.bucket.objects import BucketError
from relay.store.bucket.reading import AGAIN_S, PATIENCE_S, SegmentReader
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import NO_HASH, Numbered, Rows, Sealer
from relay.store.bucket.shelf import Left
from relay.store.bucket.tiers import LATE_S, Tiers
from relay.store.bucket.writer import Writer
from relay.store.clock import Clock
from relay.store.consumer import Consumer
from relay.store.consumer_calls import ConsumerCalls
from relay.store.cursor import Settings
from relay.store.database import Database
from relay.store.dispatch import Delivery
from relay.store.errors import LogDamaged, RecordsAway, RecordsUnreachable
from relay.store.log import Log
from relay.store.records import KEY as KEY_ROW
from relay.store.records import Entry, Gap, Hole, NewGap, Reason, Record
from relay.store.segments import Limits

T = TypeVar("T")
_NONCE = itertools.count()
BODY = 1000
LIMIT = 512 << 10


def sealer() -> Sealer:
    return Sealer(KEY, lambda size: next(_NONCE).to_bytes(size, "big"))


def entry(number: int, **more: object) -> Entry:
    body = number.to_bytes(8, "big") * (BODY // 8)
    return Entry(1, "orders", bytes(16), bytes(16), END.pack(0, 0, 1, 0), body, **more)  # type: ignore[arg-type]  # as the test gave them


class Store:
    """A stream in a bucket, as the store that serves it has it. Its journal lands when the test says so."""

    movable = True

    def __init__(self, directory: Path, objects: Scripted, limit_bytes: int = LIMIT) -> None:
        self.objects = objects
        self.writer = Writer("f" * 32, sealer(), NO_HASH)
        self.ops: list[Rows] = []
        self.landing = True
        self.replica: Replica | None = None
        self.log: Log | None = None
        self.reader = SegmentReader(objects, sealer(), now_s=now_s)
        self.left: list[Left] = []
        self.tiers = Tiers(
            objects, sealer(), limit_bytes, lambda: [self], left=self.left, now_s=now_s,
            entropy=lambda size: next(_NONCE).to_bytes(size, "big"),
        )  # fmt: skip
        self.path = str(directory / STREAM.hex())

    def create(self) -> Log:
        self.serve(Log.create(self.path, uuid=STREAM, definition=b"", created_us=1))
        assert self.log is not None
        self.log.copy_all()
        return self.log

    def serve(self, log: Log) -> None:
        self.replica = Replica(STREAM, self.writer, lambda: 0, self.reader)
        log.copy_to(self.replica, self.replica.tail)
        log.offloading.read_by(self.reader)
        self.log = log

    def land(self) -> None:
        """Bring the journal to the bucket."""
        self.writer.close_object()
        while flying := self.writer.take_off(0):
            for one in flying:
                content = sealer().open(one.key, one.sealed)
                assert isinstance(content, Numbered)
                self.ops += [each for each in content.entries if isinstance(each, Rows)]
                self.writer.landed(one)

    async def move(self) -> bool:
        """Move once. The journal lands once, when it says that an object is about to be made."""
        assert self.log is not None
        ours = self.log.offloading
        moving = asyncio.create_task(self.tiers.move())
        landed = False
        while not moving.done():  # also keeps virtual time going while a thread works
            if ours.left and not landed:
                landed = True
                self.land()
            await asyncio.sleep(0.001)
        return moving.result()

    def successor(self, directory: Path) -> Store:
        """Return a store that has what the bucket has, and has ended this one's journal."""
        directory.mkdir()
        other = Store(directory, self.objects)
        database = Database.create(other.path)
        database.make_mark(STREAM, 0)
        for rows in self.ops:
            batch = database.batch()
            batch.apply(rows.ops)
            database.write(batch, 0, sync=False)
            del batch  # it holds the database open
        database.close()
        other.serve(Log.open(other.path))
        return other

    async def settle(self) -> None:
        """Move and delete until nothing is left to do."""

        async def landing() -> None:
            while True:
                self.land()
                await asyncio.sleep(0.01)

        task = asyncio.create_task(landing())
        try:
            while await self.tiers.move():
                pass
            await asyncio.sleep(0.05)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def read(self, start: int, **how: object) -> list[object]:
        """Return all entries from `start` on."""
        assert self.log is not None
        found: list[object] = []
        while start < self.log.next:
            chunk = await patiently(partial(self.log.read, start, 1 << 20, now_us=10))
            found += chunk.items
            start = chunk.next
        return found

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def patiently(read: Callable[[], T]) -> T:
    """Repeat a read whenever records that it needs have arrived."""
    while True:
        here = asyncio.Event()
        try:
            return read()
        except RecordsAway as away:
            away.when(here, here.set)
        await here.wait()


def numbers(items: list[object]) -> list[int]:
    return [int.from_bytes(one.body[:8], "big") for one in items if isinstance(one, Record)]


def virtually(work: Callable[[], Awaitable[None]]) -> None:
    run(work())  # type: ignore[arg-type]  # a coroutine function


def filled(directory: Path, count: int = 3000, objects: Scripted | None = None) -> Store:
    """Return a store with a stream of `count` messages of 1000 bytes, all of it on its disk."""
    store = Store(directory, objects or Scripted())
    log = store.create()
    log.offloading.size_segments(64 << 10, 64 << 10)
    for first in range(0, count, 50):
        log.append([entry(number) for number in range(first, min(count, first + 50))], 1 + first)
    return store


def segments_of(objects: Scripted) -> list[str]:
    return sorted(key for key in objects.objects if key.startswith("segment/"))


def test_a_stream_larger_than_the_disk_is_read_as_before(tmp_path: Path) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        log = store.log
        assert log is not None
        size = log.size_bytes
        await store.settle()
        assert log.local_bytes <= LIMIT < size / 5
        assert (log.size_bytes, log.messages, log.next, log.oldest) == (size, 3000, 3000, 0)
        assert numbers(await store.read(0)) == list(range(3000))
        assert numbers(await store.read(1234)) == list(range(1234, 3000))
        assert await patiently(lambda: log.find(1 + 1000)) == 1000
        assert store.reader.reads <= len(log.offloading.keys())  # none twice
        store.close()

    virtually(main)


def test_a_successor_reads_old_records_from_the_objects(tmp_path: Path) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        store.land()
        other = store.successor(tmp_path / "other")
        assert numbers(await other.read(0)) == list(range(3000))
        store.close()
        other.close()
        again = Log.open(other.path)  # freed on disk, and opened once more
        other.serve(again)
        assert numbers(await other.read(0)) == list(range(3000))
        other.close()

    virtually(main)


def test_a_copy_for_a_checkpoint_has_only_what_is_on_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        assert store.log is not None
        parts = list(store.log.copied())
        assert sum(len(op.value) for ops in parts for op in ops) < 2 * LIMIT
        store.ops = [Rows(STREAM, ops) for ops in parts]
        other = store.successor(tmp_path / "other")
        assert numbers(await other.read(0)) == list(range(3000))
        store.close()
        other.close()

    virtually(main)


def test_retention_deletes_objects_once_the_bucket_knows_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        log, objects = store.log, store.objects
        assert log is not None
        before = segments_of(objects)
        log.enforce(Limits(max_messages=1000), 0)
        assert 1000 <= log.messages < 1000 + 8 * 70
        await store.tiers.delete()
        assert segments_of(objects) == before
        store.land()
        await store.tiers.delete()
        left = segments_of(objects)
        assert len(left) < len(before)
        assert left == sorted(log.offloading.keys())
        found = await store.read(0)
        assert found[0] == Hole(0, log.oldest, Reason.RETENTION)
        assert numbers(found) == list(range(log.oldest, 3000))
        log.enforce(Limits(max_age_us=1), 1 << 40)
        store.land()
        await store.tiers.delete()
        assert segments_of(objects) == []
        assert log.messages == 0
        store.close()

    virtually(main)


def test_a_bucket_that_refuses_deletes_is_not_in_the_way_of_records_that_move(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        log, objects = store.log, store.objects
        assert log is not None
        log.enforce(Limits(max_messages=1000), 0)
        store.land()

        async def refuses(what: str, key: str) -> None:
            await asyncio.sleep(0.001)
            if what == "delete":
                raise BucketError("bucket memory: the object must be kept for a month")

        objects.fault = refuses
        for first in range(3000, 5000, 50):
            log.append([entry(number) for number in range(first, first + 50)], 1 + first)
        assert log.local_bytes > LIMIT
        running = asyncio.create_task(store.tiers.run())

        async def landing() -> None:
            while True:
                store.land()
                await asyncio.sleep(0.01)

        lands = asyncio.create_task(landing())
        await until(lambda: log.local_bytes <= LIMIT)
        before = segments_of(objects)
        objects.fault = quiet
        await until(lambda: not log.offloading.left)
        assert len(segments_of(objects)) < len(before)
        for task in (running, lands):
            task.cancel()
        await asyncio.gather(running, lands, return_exceptions=True)
        store.close()

    virtually(main)


def test_a_store_whose_journal_has_ended_deletes_nothing_that_its_successor_serves(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        store.land()
        assert store.log is not None
        store.log.enforce(Limits(max_messages=1000), 0)  # the bucket does not learn of this
        other = store.successor(tmp_path / "other")
        await store.tiers.delete()  # it has not noticed yet
        store.writer.end("another store has taken over")
        for _ in range(3):
            await store.tiers.delete()
            await asyncio.sleep(LATE_S)
        assert numbers(await other.read(0)) == list(range(3000))
        store.close()
        other.close()

    virtually(main)


def test_what_was_removed_is_deleted_by_the_successor_of_a_store_that_died_before(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        assert store.log is not None
        store.log.enforce(Limits(max_messages=1000), 0)
        store.land()
        other = store.successor(tmp_path / "other")
        assert other.log is not None
        await other.tiers.delete()
        assert segments_of(store.objects) == sorted(other.log.offloading.keys())
        assert not other.log.offloading.left
        store.close()
        other.close()

    virtually(main)


@pytest.mark.parametrize("dies", ["before", "after"])
def test_an_object_of_a_store_that_died_while_it_made_it_is_deleted_later(
    tmp_path: Path, dies: str
) -> None:
    async def main() -> None:
        store = filled(tmp_path)

        async def fault(what: str, key: str) -> None:
            if what == ("create" if dies == "before" else "created"):
                raise BucketError("no answer")

        store.objects.fault = fault
        with pytest.raises(BucketError):
            await store.settle()
        store.objects.fault = quiet
        store.land()
        other = store.successor(tmp_path / "other")
        assert other.log is not None
        assert len(segments_of(store.objects)) == (dies == "after")
        await other.tiers.delete()
        await asyncio.sleep(LATE_S + 1)
        await other.tiers.delete()
        other.land()
        await other.tiers.delete()
        assert segments_of(store.objects) == []
        assert not other.log.offloading.left
        assert numbers(await other.read(0)) == list(range(3000))
        store.close()
        other.close()

    virtually(main)


def test_an_object_that_a_dead_store_may_name_on_its_disk_is_kept_until_the_bucket_says_it_is_dropped(
    tmp_path: Path,
) -> None:
    """Else that store, started again before anybody wrote to the stream, would serve records that are gone."""

    async def main() -> None:
        store = filled(tmp_path)
        store.land()
        assert await store.move()
        other = store.successor(tmp_path / "other")  # it does not know that the object is used
        assert store.log is not None
        assert store.log.offloading.objects == 1
        assert other.log is not None
        assert other.log.offloading.objects == 0
        await other.tiers.delete()
        await asyncio.sleep(LATE_S + 1)
        before = len(other.ops)
        await other.tiers.delete()
        await other.tiers.delete()
        assert len(segments_of(store.objects)) == 1
        other.land()
        assert (
            len(other.ops) > before
        )  # a database without this write is made again from the bucket
        await other.tiers.delete()
        assert segments_of(store.objects) == []
        assert numbers(await other.read(0)) == list(range(3000))
        store.close()
        other.close()

    virtually(main)


def test_a_stream_whose_records_cannot_be_read_does_not_keep_others_on_the_disk(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        damaged, whole = filled(tmp_path / "a", 4000), filled(tmp_path / "b")
        assert damaged.log is not None
        batch = damaged.log.database.batch()
        batch.put_record(KEY_ROW.pack(10), b"not an entry")
        damaged.log.database.write(batch, damaged.log.next, sync=False)
        tiers = Tiers(
            whole.objects, sealer(), LIMIT, lambda: [damaged, whole], left=[], now_s=now_s,
            entropy=lambda size: next(_NONCE).to_bytes(size, "big"),
        )  # fmt: skip

        async def landing() -> None:
            while True:
                damaged.land()
                whole.land()
                await asyncio.sleep(0.01)

        task = asyncio.create_task(landing())
        while await tiers.move():
            pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert whole.log is not None
        assert whole.log.local_bytes < LIMIT
        assert numbers(await whole.read(0)) == list(range(3000))
        damaged.close()
        whole.close()

    virtually(main)


def test_a_stream_that_leaves_while_its_records_are_moved_keeps_them_and_no_object(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        log = store.log
        assert log is not None

        async def fault(what: str, key: str) -> None:
            if what == "created" and store.log is not None:
                store.log = None
                log.close()

        store.objects.fault = fault
        assert not await store.move()
        assert segments_of(store.objects) == []
        store.land()
        other = store.successor(tmp_path / "other")
        assert numbers(await other.read(0)) == list(range(3000))
        other.close()

        store.serve(Log.open(store.path))
        moving = asyncio.create_task(store.tiers.move())
        await asyncio.sleep(0)  # it waits until the bucket knows that an object will be made
        assert store.log is not None
        again, store.log = store.log, None
        again.close()
        store.land()
        assert not await moving
        assert segments_of(store.objects) == []

    virtually(main)


def test_what_retention_removes_while_an_object_is_made_is_not_in_the_stream_again(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        for limit in (2980, 2000):  # inside the first segment, and all of what is moved
            directory = tmp_path / str(limit)
            directory.mkdir()
            store = filled(directory)
            log = store.log
            assert log is not None
            done = False

            async def fault(what: str, key: str, log: Log = log, limit: int = limit) -> None:
                nonlocal done
                if what == "created" and not done:
                    done = True
                    log.enforce(Limits(max_messages=limit), 0)

            store.objects.fault = fault
            await store.settle()
            assert (log.oldest, log.messages) == (3000 - limit, limit)
            assert numbers(await store.read(0)) == list(range(3000 - limit, 3000))
            assert log.size_bytes == sum(segment.size for segment in log._chain.every)
            store.land()
            other = store.successor(directory / "other")
            assert other.log is not None
            assert (other.log.oldest, other.log.messages) == (3000 - limit, limit)
            assert numbers(await other.read(0)) == list(range(3000 - limit, 3000))
            await asyncio.sleep(LATE_S + 1)
            for _ in range(3):
                await other.tiers.delete()
                other.land()
                await asyncio.sleep(LATE_S + 1)
            assert segments_of(store.objects) == sorted(other.log.offloading.keys())
            store.close()
            other.close()

    virtually(main)


def test_a_reader_whose_chunk_is_deleted_learns_that_retention_removed_it(tmp_path: Path) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        log = store.log
        assert log is not None
        with pytest.raises(RecordsAway):
            log.read(0, 1 << 20, now_us=10)
        log.enforce(Limits(max_age_us=1), 1 << 40)
        store.land()
        await store.tiers.delete()
        assert segments_of(store.objects) == []
        found = await store.read(0)
        assert found == [Hole(0, 3000, Reason.RETENTION)]
        await asyncio.sleep(1)
        assert log.read(0, 1 << 20, now_us=10).items == found
        store.close()

    virtually(main)


def test_dead_letters_of_old_messages_are_redriven_all_at_once_when_all_are_here(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        log = store.log
        assert log is not None
        store.land()
        consumer = Consumer(log, "c", Settings(shared=True, max_deliver=1), 0, 1)
        buried = [5, 600, 1200, 1800]
        while taken := consumer.take(b"w" * 16, 1 << 20, 1000, 1).items:
            for item in taken:
                assert isinstance(item, Delivery)
                if item.record.first in buried:
                    consumer.nack(b"w" * 16, item.record.first, item.record.next, 0, "no", 1)
                else:
                    consumer.ack(b"w" * 16, item.record.first, item.record.next, 1)
        consumer.forget_dead(len(consumer.dead_letters()))
        consumer.save()
        dead = Log.create(str(tmp_path / "dead"), uuid=bytes(16), definition=b"", created_us=1)
        for offset in buried:
            letter = streams.encode(stream_items.DeadLetter(STREAM, offset, "c", 1, "no"))
            dead.append([Entry(stream_items.DEAD_KIND, "", bytes(16), bytes(16), END.pack(0, 0, 1, 0), letter)], 1)  # fmt: skip
        await store.settle()
        assert log.offloading.objects
        small = SegmentReader(store.objects, sealer(), cache_bytes=1, now_s=now_s)  # one chunk
        log.offloading.read_by(small)
        calls = ConsumerCalls(log, lambda consumer, dead: None, Clock())
        call = consumers.RedriveLetters("c", [0, 1, 2, 3])
        redriven = None
        while redriven is None:
            here = asyncio.Event()
            try:
                redriven = calls.redrive(call, dead, 1)
            except RecordsAway as away:
                assert calls.described("")[0][0].redriven == 0
                away.when(here, here.set)
                await here.wait()
                await asyncio.sleep(0.1)  # what was fetched ahead takes its place
        assert redriven == consumers.Redriven(4, [])
        assert calls.described("")[0][0].redriven == 4
        await small.close()
        dead.close()
        store.close()

    virtually(main)


def test_what_a_worker_settles_of_old_deferred_messages_waits_for_no_object(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path, Scripted())
        log = store.create()
        log.offloading.size_segments(64 << 10, 64 << 10)
        for number in range(1500):
            log.append([entry(number, due_us=5 if number == 700 else 0)], 1)
        store.land()
        consumer = Consumer(log, "c", Settings(shared=True), 0, 1)
        consumer.expire(1)
        taken = consumer.take(b"w" * 16, 4000, 2, 10).items
        assert 0 < len(taken) < 700
        await store.settle()
        assert log.offloading.objects
        held = [item.record.first for item in taken if isinstance(item, Delivery)]
        for first in held:
            assert consumer.ack(b"w" * 16, first, first + 1, 11) == 1
        consumer.ack(b"w" * 16, 700, 701, 11)  # again, or never: it changes nothing
        assert consumer.info().pending == 0
        with pytest.raises(ValueError, match="never dispatched"):
            consumer.ack(b"w" * 16, log.next, log.next + 1, 11)
        store.close()

    virtually(main)


async def quiet(what: str, key: str) -> None:
    await asyncio.sleep(0.001)


def test_a_record_that_a_consumer_waits_for_keeps_its_due_time(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path, Scripted())
        log = store.create()
        log.offloading.size_segments(64 << 10, 64 << 10)
        for number in range(1000):
            log.append([entry(number, due_us=500 if number == 7 else 0, key_hash=bytes([number % 9]) * 32)], 1)  # fmt: skip
            if number == 20:
                log.append([NewGap(3, "a test")], 1)
        await store.settle()
        assert log.offloading.objects
        assert log.due(1000) == [(500, 7)]
        found = await store.read(0)
        assert numbers(found) == list(range(1000))
        assert [one for one in found if isinstance(one, Gap)] == [Gap(21, 3, "a test", 1)]
        log.enforce(Limits(max_bytes=1), 0)
        assert log.due(1000) == []
        assert not log.compact(10) or log.messages == 0
        store.close()

    virtually(main)


def change_one(objects: Scripted, at: int) -> str:
    key = segments_of(objects)[0]
    data = bytearray(objects.objects[key])
    data[at] ^= 1
    objects.objects[key] = bytes(data)
    return key


@pytest.mark.parametrize("harm", ["changed", "swapped", "cut", "missing"])
def test_an_object_that_was_harmed_is_an_error_that_names_it(tmp_path: Path, harm: str) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        log, objects = store.log, store.objects
        assert log is not None
        first, second = segments_of(objects)[:2]
        match harm:
            case "changed":
                change_one(objects, 30_000)
            case "swapped":
                objects.objects[first] = objects.objects[second]
            case "cut":
                objects.objects[first] = objects.objects[first][:1000]
            case "missing":
                del objects.objects[first]
        with pytest.raises(LogDamaged, match=first):
            await store.read(0)
        end = log.offloading.keys()
        assert len(end) > 1
        assert numbers(await store.read(2900)) == list(range(2900, 3000))  # the tail is served
        store.close()

    virtually(main)


def test_a_bucket_that_does_not_answer_fails_a_read_after_a_while_and_then_serves_again(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()

        async def fault(what: str, key: str) -> None:
            raise BucketError("bucket memory: no answer")

        store.objects.fault = fault
        began_s = now_s()
        with pytest.raises(RecordsUnreachable, match=r"could not be read within 10 s.*no answer"):
            await store.read(0)
        assert now_s() - began_s <= PATIENCE_S + 1
        assert numbers(await store.read(2950)) == list(range(2950, 3000))
        store.objects.fault = quiet
        await asyncio.sleep(AGAIN_S)
        assert numbers(await store.read(0)) == list(range(3000))
        store.close()

    virtually(main)


def test_the_cache_keeps_to_its_size(tmp_path: Path) -> None:
    async def main() -> None:
        store = filled(tmp_path)
        await store.settle()
        small = SegmentReader(store.objects, sealer(), cache_bytes=600_000, now_s=now_s)
        assert store.log is not None
        store.log.offloading.read_by(small)
        assert numbers(await store.read(0)) == list(range(3000))
        await asyncio.sleep(1)
        assert small.cached_bytes <= 600_000
        await small.close()
        store.close()

    virtually(main)


def test_a_directory_returns_ranges_of_its_objects(tmp_path: Path) -> None:
    async def main() -> None:
        objects = Directory(tmp_path)
        assert await objects.create("segment/a", b"0123456789")
        assert await objects.get_range("segment/a", 2, 5) == b"234"
        assert await objects.get_range("segment/a", 8, 12) == b"89"
        assert await objects.get_range("segment/b", 0, 1) is None
        (tmp_path / "file").touch()
        with pytest.raises(BucketError, match="Not a directory"):
            await objects.get_range("file/a", 0, 1)

    asyncio.run(main())
