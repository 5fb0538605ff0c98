"""A log that copies another: the same entries at the same offsets, all of a call or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from iris.wire.codec import END
from relay.store import segments
from relay.store.errors import LogWriteFailed
from relay.store.log import Log
from relay.store.records import Entry, Gap, Hole, Item, NewGap, Reason, Record, Stamp
from relay.store.segments import Limits

MANY = 1 << 30
KEY_1, KEY_2 = b"1" * 32, b"2" * 32


def entry(body: bytes, count: int = 1, **more: Any) -> Entry:
    end = END.pack(1_000, 0, count, 7)
    return Entry(0x48, "orders.new", b"k" * 16, b"s" * 16, end, body, **more)


def made(directory: Path, name: str) -> Log:
    return Log.create(str(directory / name), uuid=name.encode() * 16, definition=b"", created_us=1)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[tuple[Log, Log]]:
    """A log and an empty one."""
    with made(tmp_path, "a") as source, made(tmp_path, "b") as copy:
        yield source, copy


def items(log: Log, start: int = 0, now_us: int = 0) -> list[Item]:
    return log.read(start, MANY, now_us=now_us).items


def copied(source: Log, copy: Log, now_us: int = 0) -> None:
    chunk = source.read(copy.next, MANY, now_us=now_us)
    copy.copy(chunk.items, chunk.next, now_us)


def test_a_copy_has_the_entries_and_sums_of_its_source(logs: tuple[Log, Log]) -> None:
    source, copy = logs
    source.append([entry(b"one", 3), NewGap(5, "lost"), entry(b"two", key_hash=KEY_1)], 100)
    source.append([entry(b"", key_hash=KEY_1, tombstone=True), entry(b"x", expires_us=500)], 200)
    source.append([NewGap(None, "why"), entry(b"later", due_us=9_000, key_hash=KEY_2)], 300)
    copied(source, copy, 300)
    assert items(copy) == items(source)
    for figure in ("oldest", "next", "size_bytes", "messages"):
        assert getattr(copy, figure) == getattr(source, figure), figure
    assert copy.due(10_000) == source.due(10_000) != []
    assert [copy.find(t) for t in (0, 150, 250, 999)] == [
        source.find(t) for t in (0, 150, 250, 999)
    ]


def test_what_the_source_deferred_is_deferred_in_the_copy_although_it_is_due(
    logs: tuple[Log, Log],
) -> None:
    source, copy = logs
    source.append([entry(b"later", due_us=9_000), entry(b"late", due_us=50)], 100)
    copied(source, copy, 9_000)
    found, late = items(copy)
    assert isinstance(found, Record)
    assert isinstance(late, Record)
    assert (found.deferred, found.due_us, found.stored_us) == (True, 9_000, 100)
    assert not late.deferred
    assert copy.due(MANY) == source.due(MANY) == [(9_000, 0)]


def test_what_a_consumer_of_the_copy_would_have_passed_is_not_deferred(
    logs: tuple[Log, Log],
) -> None:
    source, copy = logs
    source.append([entry(b"later", due_us=9_000)], 100)
    copy.cursors.listed(9_000)
    copied(source, copy, 9_000)
    (found,) = items(copy)
    assert isinstance(found, Record)
    assert not found.deferred
    assert copy.due(MANY) == []


def test_a_copy_is_there_after_it_was_opened_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ENTRIES", 4)
    with made(tmp_path, "a") as source, made(tmp_path, "b") as copy:
        for number in range(30):
            source.append([entry(b"%d" % number, 2), NewGap(1, "lost")], number)
        source.enforce(Limits(max_messages=40), 100)
        copied(source, copy)
        there, size = items(copy), copy.size_bytes
        assert there[0] == Hole(0, source.oldest, Reason.RETENTION)
    with Log.open(str(tmp_path / "b")) as copy:
        assert (items(copy), copy.size_bytes, copy.oldest) == (there, size, 0)
        copy.append([entry(b"own")], 200)
        assert items(copy)[:-1] == there
        copy.enforce(Limits(max_messages=1), 200)
        assert [i.first for i in items(copy, copy.oldest)] == [copy.next - 1]


def test_compaction_of_a_copy_goes_by_the_hashes_of_the_source(logs: tuple[Log, Log]) -> None:
    source, copy = logs
    for number in range(5):
        source.append([entry(b"%d" % number, key_hash=KEY_1)], 100)
    copied(source, copy)
    assert copy.compact(200)
    copy.append([entry(b"own", key_hash=KEY_1)], 300)
    assert copy.compact(400)
    hole, last = items(copy)
    assert hole == Hole(0, 5, Reason.COMPACTED)
    assert isinstance(last, Record)
    assert last.body == b"own"


RECORD = Record(
    0, 2, 1, "n", b"k" * 16, b"s" * 16, END.pack(0, 0, 2, 0), b"body", 5, None, False, 0, 0, False
)


@pytest.mark.parametrize(
    ("wrong", "until"),
    [
        ([RECORD], 3),
        ([RECORD], 1),
        ([structs.replace(RECORD, first=1)], 3),
        ([structs.replace(RECORD, count=3)], 3),
        ([structs.replace(RECORD, count=0, end=END.pack(0, 0, 0, 0))], 0),
        ([RECORD, RECORD], 4),
        ([RECORD, structs.replace(RECORD, first=1)], 3),
        ([RECORD, structs.replace(RECORD, first=3)], 5),
        ([RECORD, Hole(2, 2, Reason.EXPIRED)], 2),
        ([RECORD, Hole(2, 1, Reason.EXPIRED)], 1),
        ([RECORD, Gap(2, 1 << 64, "why", 0)], 3),
        ([structs.replace(RECORD, key_hash=b"short")], 2),
        ([structs.replace(RECORD, tombstone=True)], 2),
        ([structs.replace(RECORD, key_id=b"short")], 2),
        ([Hole(0, 1 << 63, Reason.RETENTION)], 1 << 63),
    ],
)
def test_a_wrong_item_is_refused_and_nothing_of_the_call_is_written(
    logs: tuple[Log, Log], wrong: list[Item], until: int
) -> None:
    _, copy = logs
    with pytest.raises(ValueError, match=r"."):
        copy.copy(wrong, until, 0)
    assert (copy.next, copy.size_bytes, items(copy)) == (0, 0, [])
    copy.copy([RECORD], 2, 0)
    assert (copy.next, copy.messages) == (2, 2)


def test_a_copy_that_the_disk_does_not_take_is_not_there(
    logs: tuple[Log, Log], monkeypatch: Any
) -> None:
    source, copy = logs
    source.append([entry(b"one")], 100)

    def refuse(*_: object, **__: object) -> None:
        raise LogWriteFailed("", "no room")

    monkeypatch.setattr(copy._database, "write", refuse)
    with pytest.raises(LogWriteFailed):
        copied(source, copy)
    assert (copy.next, items(copy)) == (0, [])


def test_producers_of_the_source_are_not_producers_of_the_copy(logs: tuple[Log, Log]) -> None:
    source, copy = logs
    stamp = Stamp(b"p" * 16, 0, 0)
    source.append([entry(b"one", stamp=stamp)], 100)
    copied(source, copy)
    copy.append([entry(b"two", stamp=stamp)], 200)
    assert [i.first for i in items(copy)] == [0, 1]
