"""A stream on a disk whose store is gone is made again once, of its copy, for who may order it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.founded import founded
from support.lost_streams import (
    GROUP,
    KEY,
    LOST_NUMBER,
    LOST_STORE,
    ORDERS,
    OTHER_KEY,
    Maker,
    copy_to,
    new_log,
)
from support.points import points

from iris.crypto.keys import ClusterKey, StoreKey
from iris.wire.codec import END
from iris.wire.orders import Definition
from iris.wire.stream_items import DEAD_KIND, DeadLetter, dead_uuid, decode_dead
from iris.wire.streams import encode
from relay.store.authority import DefinitionFile
from relay.store.bucket.directory import Directory
from relay.store.bucket.forced import ForcedList
from relay.store.bucket.forcing import CAUSE
from relay.store.bucket.objects import BucketError
from relay.store.bucket.sealing import Forced, Sealer, forced_key
from relay.store.bucket.seen import RolledBack
from relay.store.errors import Refuse
from relay.store.log import Log
from relay.store.outcomes import Duplicate, OutOfOrder, Stored
from relay.store.records import Entry, Gap, Record, Stamp

UUID, MADE, OTHER = (founded(KEY, letter * 16) for letter in (b"u", b"m", b"v"))
PRODUCER = b"p" * 16


def entry(number: int, unanswered: int | None = None) -> Entry:
    end = END.pack(1_000, 0, 1, 7)
    stamp = Stamp(PRODUCER, 0, number, unanswered)
    return Entry(0x48, "orders", KEY.key_id, b"s" * 16, end, b"%d" % number, stamp)


def bodies(log: Log) -> list[Any]:
    items = log.read(0, 1 << 20, now_us=1).items
    return [item.body if isinstance(item, Record) else item for item in items]


@pytest.fixture
def objects(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "bucket")


async def lost(
    objects: Directory, directory: Path, definition: Definition = ORDERS, *, dead_letters: tuple[int, ...] = (3,)
) -> Log:  # fmt: skip
    """Return the log of a store that is about to be gone, of which the bucket has all but the last two entries."""
    log = new_log(directory / "log", UUID, definition)
    log.append([entry(number) for number in range(5)], 1)
    stored = encode(DefinitionFile(parent=UUID))
    with Log.create(str(directory / "dead"), uuid=dead_uuid(UUID), definition=stored, created_us=1) as dead:  # fmt: skip
        letters = [encode(DeadLetter(UUID, each, "billing", 1, "broken")) for each in dead_letters]
        dead.append([Entry(DEAD_KIND, "orders", KEY.key_id, UUID, END.pack(1, 0, 1, 0), one) for one in letters], 1)  # fmt: skip
        await copy_to(objects, directory / "copies", log, dead)
        log.copy_to(None)
    log.append([entry(5), entry(6)], 1)
    return log


async def test_the_new_log_has_what_the_copy_has_then_a_gap_and_goes_on(
    objects: Directory, tmp_path: Path
) -> None:
    (await lost(objects, tmp_path)).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    assert (found.uuid, found.store, found.label, found.next) == (UUID, LOST_STORE.public_key, "db-1", 5)  # fmt: skip
    assert await maker.find("others") == await maker.find(key=OTHER_KEY) == []
    assert await maker.force(maker.wish(found, MADE)) == MADE
    assert maker.served == [MADE]
    with maker.open(MADE) as log:
        assert log.uuid == MADE
        assert bodies(log)[:5] == [b"%d" % number for number in range(5)]
        (gap,) = bodies(log)[5:]
        assert isinstance(gap, Gap)
        assert (gap.first, gap.count, gap.cause) == (5, None, CAUSE)
        # The producer sends again what was not acknowledged: 4, which the copy has, and 7. It knows of 5 and 6.
        assert log.append([entry(4, 4)], 2) == [Duplicate(4, 5)]
        assert log.append([entry(8, 7)], 2) == [OutOfOrder(5)], "7 may be on its way"
        assert log.append([entry(7, 7), entry(8, 7)], 2) == [Stored(6, 7), Stored(7, 8)]
        assert log.append([entry(10, 10)], 2) == [OutOfOrder(9)], "nothing was lost since"
    with maker.open(MADE) as log:
        assert log.append([entry(8, 8), entry(9)], 3) == [Duplicate(7, 8), Stored(8, 9)]
    with maker.open(dead_uuid(MADE)) as dead:
        letter, gap = bodies(dead)
        assert decode_dead(letter) == DeadLetter(MADE, 3, "billing", 1, "broken")
        assert (gap.first, gap.count, gap.cause) == (1, None, CAUSE)


async def test_a_dead_letter_of_a_message_that_is_lost_does_not_name_one_that_comes_later(
    objects: Directory, tmp_path: Path
) -> None:
    (await lost(objects, tmp_path, dead_letters=(3, 6))).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    await maker.force(maker.wish(found, MADE))
    with maker.open(MADE) as log:
        assert log.append([entry(7, 7)], 2) == [Stored(6, 7)]
    with maker.open(dead_uuid(MADE)) as dead:
        letters = map(decode_dead, bodies(dead)[:-1])
        assert [(one.uuid, one.offset) for one in letters] == [(MADE, 3), (UUID, 6)]


@pytest.mark.parametrize("consumed", [True, False])
async def test_dead_letters_of_which_there_is_no_copy_are_reported_if_there_may_be_some(
    objects: Directory, tmp_path: Path, consumed: bool
) -> None:
    with new_log(tmp_path / "log", UUID, ORDERS) as log:
        log.append([entry(0)], 1)
        if consumed:
            log.cursors.put("billing", b"state")
        await copy_to(objects, tmp_path / "copies", log)
        log.copy_to(None)
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    await maker.force(maker.wish(found, MADE))
    assert (maker.streams / dead_uuid(MADE).hex()).exists() is consumed
    if consumed:
        with maker.open(dead_uuid(MADE)) as dead:
            (gap,) = bodies(dead)
            assert (gap.count, gap.cause) == (None, CAUSE)


async def test_a_copy_of_another_stream_has_no_gap_because_its_source_has_the_rest(
    objects: Directory, tmp_path: Path
) -> None:
    mirror = structs.replace(
        Definition("orders"), mirror=OTHER.hex(), origins=(ORDERS.made_again(OTHER).origins)
    )
    (await lost(objects, tmp_path, mirror, dead_letters=(6,))).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    await maker.force(maker.wish(found, MADE))
    with maker.open(MADE) as log:
        assert bodies(log) == [b"%d" % number for number in range(5)]
    with maker.open(dead_uuid(MADE)) as dead:
        assert [(one.uuid, one.offset) for one in map(decode_dead, bodies(dead))] == [(MADE, 6)]


async def test_two_orders_at_once_make_one_stream(objects: Directory, tmp_path: Path) -> None:
    (await lost(objects, tmp_path)).close()
    makers = [Maker(objects, tmp_path, number) for number in (1, 2)]
    (found,) = await makers[0].find()
    done = await asyncio.gather(
        *(
            each.force(each.wish(found, founded(KEY, bytes([n]) * 16)))
            for n, each in enumerate(makers, 1)
        ),
        *(makers[0].force(makers[0].wish(found, founded(KEY, bytes([n]) * 16))) for n in (3, 4)),
        return_exceptions=True,
    )
    refused = [each for each in done if isinstance(each, Refuse)]
    made = {each for each in done if isinstance(each, bytes)}
    assert len(made) == 1
    assert {each.code for each in refused} == {"exists"}
    assert [uuid for each in makers for uuid in each.served] == list(made)
    there = {path.name for each in makers for path in each.streams.iterdir() if path.is_dir()}
    assert there == {one.hex() for uuid in made for one in (uuid, dead_uuid(uuid))}
    # Its old store learns of it.
    await makers[0].forcing.first_check()
    assert makers[0].displaced[UUID].made in made


class Losing(Directory):
    """A bucket whose answer about a list entry is lost, or that dies right after."""

    lose = True

    async def create(self, key: str, data: bytes) -> bool:
        created = await super().create(key, data)
        if self.lose and key.startswith("forced/"):
            raise BucketError("no answer")
        return created


async def test_an_order_that_failed_half_way_is_repeated_and_completes_the_same_stream(
    tmp_path: Path,
) -> None:
    objects = Losing(tmp_path / "bucket")
    (await lost(objects, tmp_path)).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    with pytest.raises(Refuse, match="no answer"):
        await maker.force(maker.wish(found, MADE))
    assert not any(maker.streams.iterdir())
    objects.lose = False
    other = Maker(objects, tmp_path, 2)
    with pytest.raises(
        Refuse, match=f"on db-2 was ordered to restore this stream, as log {MADE.hex()}"
    ):
        await other.force(other.wish(found, OTHER))
    maker = Maker(objects, tmp_path)  # it was started again meanwhile
    maker.wait_s = lambda store: None  # and so was the old store, which serves the stream no more
    (found,) = await maker.find()
    assert found.uuid == UUID
    assert await maker.force(maker.wish(found, OTHER)) == MADE
    assert maker.served == [MADE]
    assert await maker.force(maker.wish(found, OTHER)) == MADE
    with maker.open(MADE) as log:
        assert len(bodies(log)) == 6


async def test_a_stream_that_is_lost_twice_before_it_was_copied_is_made_of_the_first_copy(
    objects: Directory, tmp_path: Path
) -> None:
    (await lost(objects, tmp_path)).close()
    first, second = (Maker(objects, tmp_path, number) for number in (1, 2))
    (found,) = await first.find()
    await first.force(first.wish(found, MADE))
    (found,) = await second.find()
    assert (found.uuid, found.store, found.label) == (MADE, first.key.public_key, "db-2")
    assert await second.force(second.wish(found, OTHER)) == OTHER
    with second.open(OTHER) as log:
        assert bodies(log)[:5] == [b"%d" % number for number in range(5)]
    await first.forcing.first_check()
    assert first.displaced.keys() == {UUID, MADE}
    # A copy of the newest is what counts.
    with second.open(OTHER) as log:
        await copy_to(objects, tmp_path / "more", log, store=second.key)
    (found,) = await Maker(objects, tmp_path, 3).find()
    assert (found.uuid, found.next) == (OTHER, 6)


async def test_a_store_that_has_its_key_and_lost_its_disk_makes_its_own_stream_again(
    objects: Directory, tmp_path: Path
) -> None:
    (await lost(objects, tmp_path)).close()
    itself = Maker(objects, tmp_path, LOST_NUMBER)
    itself.wait_s = lambda store: None
    (found,) = await itself.find()
    assert found.store == itself.key.public_key
    assert await itself.force(itself.wish(found, MADE)) == MADE
    (found,) = await itself.find()
    assert (found.uuid, found.store) == (MADE, itself.key.public_key)
    assert await itself.force(itself.wish(found, OTHER)) == MADE


async def test_an_order_that_is_not_valid_is_refused_and_leaves_nothing(
    objects: Directory, tmp_path: Path
) -> None:
    (await lost(objects, tmp_path)).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    unknown = structs.replace(found, uuid=OTHER)
    own, others = maker.wish(found, MADE), maker.wish(found, MADE, key=OTHER_KEY)
    elsewhere = StoreKey(b"x" * 32).public_key
    wrong = [
        ("not a key of the stream", structs.replace(own, orders=others.orders)),
        ("not a key of the lost stream", structs.replace(own, making=others.making)),
        ("names another store as the new one", structs.replace(own, orders=maker.wish(found, MADE, target=elsewhere).orders)),
        ("for another store", structs.replace(own, making=maker.wish(found, MADE, target=elsewhere).making)),
        ("must have the same definition as the lost one", maker.wish(found, MADE, change=lambda d: structs.replace(d, topic="x.>"))),
        ("must have the same definition as the lost one", maker.wish(found, MADE, change=lambda d: structs.replace(d, origins=()))),
        ("for another key, log or action", structs.replace(own, orders=own.making)),
        ("for another key, log or action", structs.replace(own, making=maker.wish(found, OTHER).making)),
    ]  # fmt: skip
    for text, wish in wrong:
        with pytest.raises(Refuse, match=text):
            await maker.force(wish)
    with pytest.raises(Refuse, match="no copy of log"):
        await maker.force(maker.wish(unknown, MADE))
    maker.wait_s = lambda store: None
    with pytest.raises(Refuse, match="on db-1 has the stream and is running; if its disk"):
        await maker.force(maker.wish(found, MADE))
    maker.wait_s = lambda store: 3.0
    with pytest.raises(Refuse, match="try again in 3 s") as refused:
        await maker.force(maker.wish(found, MADE))
    assert refused.value.code == "leaving"
    maker.wait_s = lambda store: 0.0
    maker.refuses = Refuse("exists", "this store already has a stream 'orders'")
    with pytest.raises(Refuse, match="already has a stream"):
        await maker.force(maker.wish(found, MADE))
    assert not any(maker.streams.iterdir())
    assert not (tmp_path / "bucket" / "forced").exists()


async def test_nothing_is_made_of_copies_of_a_bucket_that_was_rolled_back(
    objects: Directory, tmp_path: Path
) -> None:
    (await lost(objects, tmp_path)).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    maker.rolled_back = RolledBack("journal a had 27 objects and now has 17")
    with pytest.raises(Refuse, match="now has 17") as refused:
        await maker.force(maker.wish(found, MADE))
    assert refused.value.code == "damaged"
    assert not (tmp_path / "bucket" / "forced").exists()
    maker.rolled_back = None
    assert await maker.force(maker.wish(found, MADE)) == MADE


async def test_an_entry_that_would_close_a_circle_or_comes_second_does_not_count(
    objects: Directory,
) -> None:
    sealer = Sealer(GROUP, bytes)
    pairs = [(UUID, MADE), (UUID, OTHER), (MADE, UUID), (OTHER, OTHER), (MADE, OTHER)]
    for number, (old, new) in enumerate(pairs, 1):
        key = forced_key(number)
        one = Forced(old, new, LOST_STORE.public_key, "db-1", number, [], bytes(16))
        await objects.create(key, sealer.seal(key, one))
    found = ForcedList(objects, sealer)
    await found.read()
    assert [(one.lost, one.made) for one in found.entries] == [(UUID, MADE), (MADE, OTHER)]
    last = found.last_of(UUID)
    assert last is not None
    assert last.made == OTHER


DECIDED = 10
"""How many of an order's requests follow when its entry is in the list."""
REQUESTS = 35
"""Fewer than an order makes."""


class Dying(Directory):
    """A bucket for a store that is killed at one of its requests, before or after that was carried out."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests = 0
        self.dies_at = 0
        self.died = asyncio.Event()

    async def create(self, key: str, data: bytes) -> bool:
        await self._live()
        created = await super().create(key, data)
        await self._live()
        return created

    async def get(self, key: str) -> bytes | None:
        await self._live()
        return await super().get(key)

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        await self._live()
        return await super().get_range(key, start, end)

    async def _live(self) -> None:
        self.requests += 1
        if self.requests == self.dies_at:
            self.died.set()
            await asyncio.Event().wait()


async def killed(bucket: Path, directory: Path, at: int) -> int:
    """Have a store carry an order out that makes `MADE`, and kill it at a request; return how many there were."""
    objects = Dying(bucket)
    maker = Maker(objects, directory)
    (found,) = await maker.find()
    objects.requests, objects.dies_at = 0, at
    forcing = asyncio.create_task(maker.force(maker.wish(found, MADE)))
    dying = asyncio.create_task(objects.died.wait())
    await asyncio.wait([forcing, dying], return_when="FIRST_COMPLETED")
    dying.cancel()
    count = objects.requests
    await maker.forcing.cancel()
    await asyncio.gather(forcing, dying, return_exceptions=True)
    return count


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the directory of a bucket with the copy of a lost stream, and how many requests an order makes there."""
    directory = tmp_path_factory.mktemp("copied")

    async def main() -> int:
        (await lost(Directory(directory / "bucket"), directory)).close()
        shutil.copytree(directory / "bucket", directory / "tried")
        return await killed(directory / "tried", directory, 0)

    return directory / "bucket", asyncio.run(main())


@pytest.mark.parametrize("left", [*points(range(DECIDED - 1), 5), DECIDED - 1, DECIDED, *points(range(DECIDED + 1, REQUESTS), 20)])  # fmt: skip
async def test_a_store_that_is_killed_at_a_request_makes_one_stream_when_it_is_asked_again(
    copied: tuple[Path, int], tmp_path: Path, left: int
) -> None:
    before, requests = copied
    assert requests > REQUESTS
    bucket = tmp_path / "bucket"
    shutil.copytree(before, bucket)
    await killed(bucket, tmp_path, requests - left)
    assert (bucket / "forced").exists() == (left < DECIDED)
    again = Maker(Directory(bucket), tmp_path)
    (found,) = await again.find()
    made = MADE if left < DECIDED else OTHER
    assert await again.force(again.wish(found, OTHER)) == made
    assert len(list((bucket / "forced").iterdir())) == 1
    there = {one.name for one in again.streams.iterdir() if one.is_dir()}
    assert there == {made.hex(), dead_uuid(made).hex()}
    with again.open(made) as log:
        assert len(bodies(log)) == 6


async def test_a_store_looks_again_whether_its_streams_were_moved_and_serves_them_until_it_knows(
    objects: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    monkeypatch.setattr("relay.store.bucket.forcing.FIRST_CHECK_S", 0.01)
    away = Dying(tmp_path / "bucket")
    away.dies_at = 1  # it does not answer
    old = Maker(away, tmp_path)
    await old.forcing.first_check()
    assert not old.displaced
    assert [one.message for one in caplog.records] == ["store.forced_unknown"]
    (await lost(objects, tmp_path)).close()
    new = Maker(objects, tmp_path, 2)
    running = asyncio.create_task(old.forcing.run())
    (found,) = await new.find()
    await new.force(new.wish(found, MADE))
    async with asyncio.timeout(5):
        while not old.displaced:
            old.forcing.check()  # it attaches to its relay
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_stranger_cannot_make_a_store_read_the_copies_again_and_again(
    objects: Directory, tmp_path: Path
) -> None:
    with await lost(objects, tmp_path):
        counting = Dying(tmp_path / "bucket")
        maker = Maker(counting, tmp_path)

        async def asked(key: ClusterKey) -> tuple[int, int]:
            """Return how many streams are found, and with how many requests."""
            before = counting.requests
            return len(await maker.find(key=key)), counting.requests - before

        found, whole = await asked(KEY)
        assert found == 1
        assert (await asked(KEY))[1] < whole, "no journal has grown"
        with new_log(tmp_path / "another", OTHER, structs.replace(ORDERS, name="another")) as log:
            await copy_to(objects, tmp_path / "copies", log)
        strangers = [await asked(OTHER_KEY) for _ in range(3)]
        assert [found for found, _ in strangers] == [0, 0, 0]
        assert strangers[1][1] == strangers[2][1] < whole
        await maker.find("another")
        assert [one.uuid for one in await maker.find("another")] == [OTHER]


async def test_a_stream_with_partitions_and_an_order_for_a_full_list_are_refused(
    objects: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await lost(objects, tmp_path, Definition("orders", partitions=(OTHER,)))).close()
    maker = Maker(objects, tmp_path)
    (found,) = await maker.find()
    with pytest.raises(Refuse, match="has several partitions"):
        await maker.force(maker.wish(found, MADE))
    monkeypatch.setattr("relay.store.bucket.forced.MAX_FORCED", 0)
    one = Forced(UUID, MADE, maker.key.public_key, "db-2", 1, [], bytes(16))
    with pytest.raises(Refuse, match="the limit; use another bucket"):
        await ForcedList(objects, Sealer(GROUP, bytes)).decide(one)
