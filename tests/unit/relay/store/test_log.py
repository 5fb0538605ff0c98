"""What a log promises: acknowledged is on disk, offsets are covered, and what is missing is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disk import shrunk_to

from iris.errors import Closed
from iris.wire.codec import END
from relay.store import cursors, retention, segments
from relay.store import producers as producers_module
from relay.store.database import MARK_NAME
from relay.store.errors import CursorsFull, LogBusy, LogDamaged, LogExists, LogMissing
from relay.store.log import Log
from relay.store.outcomes import Conflict, Duplicate, Fenced, Outcome, OutOfOrder, Stored
from relay.store.records import KEY, Entry, Gap, Hole, Item, NewGap, Reason, Record, Stamp
from relay.store.segments import Limits

UUID = b"\x07" * 16
A, B = b"a" * 16, b"b" * 16
KEY_1, KEY_2 = b"1" * 32, b"2" * 32
MANY = 1 << 30


def entry(
    body: bytes = b"sealed",
    *,
    count: int = 1,
    stamp: Stamp | None = None,
    key_hash: bytes | None = None,
    tombstone: bool = False,
    expires_us: int = 0,
    due_us: int = 0,
    expect: int | None = None,
) -> Entry:
    end = END.pack(1_000, 2_000, count, 77)
    return Entry(
        0x48,
        "orders.new",
        b"k" * 16,
        b"s" * 16,
        end,
        body,
        stamp,
        key_hash,
        tombstone,
        expires_us,
        due_us,
        expect,
    )


def contents(log: Log, start: int = 0, *, now_us: int = 0) -> list[tuple[str, int, int]]:
    """What a reader finds from `start` on, as (body, cause or reason, first, next)."""
    found = []
    for item in log.read(start, MANY, now_us=now_us).items:
        found.append((content(item), item.first, item.next))
    return found


def content(item: Item) -> str:
    match item:
        case Record():
            return item.body.decode()
        case Gap():
            return item.cause
    return item.reason.name


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "orders")


@pytest.fixture
def log(path: str) -> Iterator[Log]:
    with Log.create(path, uuid=UUID, definition=b"grant", created_us=5) as log:
        yield log


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ENTRIES", 4)


def test_a_new_log_is_empty_and_keeps_its_identity(path: str) -> None:
    with Log.create(path, uuid=UUID, definition=b"grant", created_us=5, epoch=3) as log:
        assert (log.oldest, log.next, log.messages, log.size_bytes) == (0, 0, 0, 0)
        log.define(b"another grant")
    with Log.open(path) as log:
        identity = (log.uuid, log.epoch, log.created_us, log.definition)
    assert identity == (UUID, 3, 5, b"another grant")


def test_a_log_is_created_once_and_missed_when_it_is_not_there(path: str, log: Log) -> None:
    with pytest.raises(LogExists):
        Log.create(path, uuid=UUID, definition=b"", created_us=0)
    log.close()
    Log.destroy(path)
    for call in (Log.open, Log.destroy):
        with pytest.raises(LogMissing):
            call(path)


def test_a_creation_that_was_cut_off_is_not_in_the_way_of_the_next(path: str) -> None:
    half = Path(f"{path}.new")
    half.mkdir()
    (half / "CURRENT").write_text("half")
    Log.create(path, uuid=UUID, definition=b"", created_us=0).close()
    assert not half.exists()


def test_an_open_log_is_busy_for_others(path: str, log: Log) -> None:
    for call in (Log.open, Log.destroy):
        with pytest.raises(LogBusy):
            call(path)
    log.append([entry()], 1)


def test_a_closed_log_says_so(log: Log) -> None:
    log.append([entry()], 1)
    log.close()
    log.close()
    with pytest.raises(Closed):
        log.append([entry()], 1)
    with pytest.raises(Closed):
        log.read(0, MANY, now_us=1)


def test_a_record_takes_an_offset_for_each_of_its_messages(log: Log) -> None:
    outcomes = log.append([entry(b"one", count=3), entry(b"two"), entry(b"three", count=2)], 1)
    assert outcomes == [Stored(0, 3), Stored(3, 4), Stored(4, 6)]
    assert contents(log) == [("one", 0, 3), ("two", 3, 4), ("three", 4, 6)]
    assert (log.next, log.messages) == (6, 6)


def test_a_record_comes_back_as_it_was_published(log: Log) -> None:
    sent = entry(bytes(range(256)), count=2, key_hash=KEY_1, expires_us=900, due_us=800)
    log.append([sent], 10)
    (record,) = log.read(0, MANY, now_us=10).items
    assert record == Record(
        first=0,
        count=2,
        kind=sent.kind,
        name=sent.name,
        key_id=sent.key_id,
        sender_id=sent.sender_id,
        end=sent.end,
        body=sent.body,
        stored_us=10,
        key_hash=KEY_1,
        tombstone=False,
        expires_us=900,
        due_us=800,
        deferred=True,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_id": b"short"},
        {"sender_id": b""},
        {"end": b"x" * 23},
        {"end": END.pack(0, 0, 0, 0)},
        {"key_hash": b"short"},
        {"stamp": Stamp(b"short", 0, 0)},
        {"stamp": Stamp(A, 1 << 32, 0)},
        {"tombstone": True},
        {"name": "n" * 1025},
        {"kind": 256},
        {"due_us": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_malformed_entry_is_refused_and_nothing_of_its_batch_is_written(
    log: Log, wrong: dict[str, object]
) -> None:
    good = entry()
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(ValueError, match=r"\w"):
        log.append([good, Entry(**(fields | wrong))], 1)
    assert log.next == 0
    assert log.append([good], 1) == [Stored(0, 1)]


def test_reading_starts_with_the_record_that_holds_the_offset(log: Log) -> None:
    log.append([entry(b"one", count=3), entry(b"two", count=3)], 1)
    assert [contents(log, start)[0] for start in (0, 2, 3, 5)] == [
        ("one", 0, 3),
        ("one", 0, 3),
        ("two", 3, 6),
        ("two", 3, 6),
    ]
    assert contents(log, 6) == []


def test_an_offset_that_is_not_there_yet_cannot_be_read(log: Log) -> None:
    for start in (-1, 1):
        with pytest.raises(ValueError, match="start"):
            log.read(start, MANY, now_us=1)


def test_a_chunk_ends_near_its_limit_and_says_where_to_go_on(log: Log) -> None:
    log.append([entry(b"x" * 1000) for _ in range(10)], 1)
    chunk = log.read(0, 2500, now_us=1)
    assert [item.first for item in chunk.items] == [0, 1, 2]
    assert (chunk.next, chunk.oldest, chunk.high_water) == (3, 0, 10)
    chunk = log.read(9, 1, now_us=1)
    assert [item.first for item in chunk.items] == [9]


def test_reopening_keeps_everything(path: str, small_segments: None) -> None:
    with Log.create(path, uuid=UUID, definition=b"", created_us=0) as log:
        for number in range(11):
            log.append([entry(b"%d" % number, count=2)], number)
        before = contents(log), log.size_bytes, log.messages
    for _ in range(3):
        with Log.open(path) as log:
            assert (contents(log), log.size_bytes, log.messages) == before
    with Log.open(path) as log:
        assert log.append([entry()], 20) == [Stored(22, 23)]


def test_gaps_are_read_in_their_order(log: Log) -> None:
    log.append([entry(b"one")], 1)
    assert log.append([NewGap(12, "slow")], 2) == [Stored(1, 2)]
    assert log.append([NewGap(None, "link lost")], 3) == [Stored(2, 3)]
    log.append([entry(b"two")], 4)
    items = log.read(0, MANY, now_us=4).items
    assert items[1:3] == [Gap(1, 12, "slow", 2), Gap(2, None, "link lost", 3)]
    assert contents(log) == [("one", 0, 1), ("slow", 1, 2), ("link lost", 2, 3), ("two", 3, 4)]


# Producers


def stamped(log: Log, *stamps: Stamp) -> list[Outcome]:
    return log.append([entry(stamp=stamp) for stamp in stamps], 1)


def test_a_retried_append_is_stored_once_and_gets_its_offsets(log: Log) -> None:
    first = log.append([entry(b"one", count=4, stamp=Stamp(A, 1, 0))], 1)
    assert first == [Stored(0, 4)]
    again = log.append([entry(b"one", count=4, stamp=Stamp(A, 1, 0))], 2)
    assert again == [Duplicate(0, 4)]
    assert log.next == 4


def test_pipelined_retries_find_their_offsets_and_old_ones_are_still_known_as_duplicates(
    log: Log,
) -> None:
    stamped(log, *(Stamp(A, 0, sequence) for sequence in range(70)))
    retried = stamped(log, *(Stamp(A, 0, sequence) for sequence in range(70)))
    assert retried[:6] == [Duplicate(None, None)] * 6
    assert retried[6:] == [Duplicate(offset, offset + 1) for offset in range(6, 70)]


def test_a_missing_sequence_an_old_epoch_and_a_retry_are_told_apart(log: Log) -> None:
    assert stamped(log, Stamp(A, 5, 1)) == [OutOfOrder(0)]
    assert stamped(log, Stamp(A, 5, 0), Stamp(A, 5, 2), Stamp(A, 5, 1)) == [
        Stored(0, 1),
        OutOfOrder(1),
        Stored(1, 2),
    ]
    assert stamped(log, Stamp(A, 4, 2), Stamp(A, 6, 1), Stamp(A, 6, 0), Stamp(A, 5, 2)) == [
        Fenced(5),
        OutOfOrder(0),
        Stored(2, 3),
        Fenced(6),
    ]


def test_two_of_one_sequence_in_one_batch_are_stored_once(log: Log) -> None:
    assert stamped(log, Stamp(A, 0, 0), Stamp(A, 0, 0), Stamp(B, 0, 0)) == [
        Stored(0, 1),
        Duplicate(0, 1),
        Stored(1, 2),
    ]


def test_producers_are_known_after_a_reopen(path: str, log: Log) -> None:
    stamped(log, Stamp(A, 3, 0), Stamp(A, 3, 1))
    log.close()
    with Log.open(path) as log:
        assert stamped(log, Stamp(A, 3, 1), Stamp(A, 2, 0), Stamp(A, 3, 3), Stamp(A, 3, 2)) == [
            Duplicate(1, 2),
            Fenced(3),
            OutOfOrder(2),
            Stored(2, 3),
        ]


def test_a_full_table_forgets_who_was_idle_longest_and_stores_nothing_twice(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers_module, "MAX_PRODUCERS", 3)
    ids = [bytes([n]) * 16 for n in range(4)]
    with Log.create(path, uuid=UUID, definition=b"", created_us=0) as log:
        for now_us, number in enumerate((0, 1, 2), start=1):
            log.append([entry(stamp=Stamp(ids[number], 0, 0))], now_us)
        log.append([entry(stamp=Stamp(ids[0], 0, 1))], 4)
        log.append([entry(stamp=Stamp(ids[3], 0, 0))], 5)
    with Log.open(path) as log:
        assert stamped(log, Stamp(ids[0], 0, 1), Stamp(ids[1], 0, 1), Stamp(ids[3], 0, 0)) == [
            Duplicate(3, 4),
            OutOfOrder(0),
            Duplicate(4, 5),
        ]


def test_an_append_that_expects_another_offset_is_refused(log: Log) -> None:
    assert log.append([entry(expect=0), entry(expect=0), entry(expect=1)], 1) == [
        Stored(0, 1),
        Conflict(1),
        Stored(1, 2),
    ]


def test_a_retry_is_a_duplicate_before_it_is_a_conflict(log: Log) -> None:
    once = entry(stamp=Stamp(A, 0, 0), expect=0)
    assert log.append([once], 1) == [Stored(0, 1)]
    assert log.append([once], 1) == [Duplicate(0, 1)]


# Retention


def test_retention_by_count_keeps_the_newest_messages(log: Log, small_segments: None) -> None:
    log.append([entry(b"%d" % number, count=2) for number in range(11)], 1)
    assert log.enforce(Limits(max_messages=5), 1) == 18
    assert (log.oldest, log.next, log.messages) == (18, 22, 4)
    assert contents(log) == [("RETENTION", 0, 18), ("9", 18, 20), ("10", 20, 22)]
    assert log.enforce(Limits(max_messages=5), 1) == 0


def test_retention_by_bytes_keeps_what_fits(log: Log, small_segments: None) -> None:
    log.append([entry(b"x" * 1000) for _ in range(11)], 1)
    each = log.size_bytes // 11
    assert log.enforce(Limits(max_bytes=3 * each), 1) == 8
    assert log.size_bytes == 3 * each
    assert log.enforce(Limits(max_bytes=3 * each - 1), 1) == 1


def test_retention_by_age_keeps_what_is_young(log: Log, small_segments: None) -> None:
    for now_us in range(11):
        log.append([entry()], now_us)
    assert log.enforce(Limits(max_age_us=3), 10) == 7
    assert (log.oldest, log.messages) == (7, 4)


def test_no_limits_keep_everything(log: Log) -> None:
    log.append([entry()], 1)
    assert log.enforce(Limits(), MANY) == 0


def test_offsets_go_on_after_everything_was_dropped(path: str, log: Log) -> None:
    log.append([entry(count=7)], 1)
    log.enforce(Limits(max_messages=0), 1)
    assert (log.oldest, log.next, log.messages, log.size_bytes) == (7, 7, 0, 0)
    assert contents(log) == [("RETENTION", 0, 7)]
    log.close()
    with Log.open(path) as log:
        assert (log.oldest, log.next) == (7, 7)
        assert log.append([entry()], 2) == [Stored(7, 8)]


def test_retention_and_appends_take_turns_over_reopens(
    path: str, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FREE_BYTES", 2000)
    Log.create(path, uuid=UUID, definition=b"", created_us=0).close()
    for turn in range(8):
        with Log.open(path) as log:
            for number in range(turn * 10, turn * 10 + 10):
                log.append([entry(b"%d" % number)], number)
                log.enforce(Limits(max_messages=6), number)
            kept = range(max(0, log.next - 6), log.next)
            assert [item[0] for item in contents(log)[-6:]] == [str(number) for number in kept]
            assert log.oldest == kept[0]


def test_what_retention_dropped_takes_no_disk_for_long(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FREE_BYTES", 1 << 20)
    with Log.create(path, uuid=UUID, definition=b"", created_us=0) as log:
        for _ in range(8):
            log.append([entry(b"x" * 65536) for _ in range(16)], 1)
            log.enforce(Limits(max_bytes=1 << 20), 1)
        assert shrunk_to(path, 4 << 20)
        assert len(contents(log)) == 16


# Keys, expiry, deferral


def test_compaction_keeps_the_last_of_each_key_and_everything_without(log: Log) -> None:
    log.append(
        [
            entry(b"a1", key_hash=KEY_1),
            entry(b"b1", key_hash=KEY_2),
            entry(b"none"),
            entry(b"a2", key_hash=KEY_1, count=2),
            entry(b"a3", key_hash=KEY_1),
        ],
        1,
    )
    log.append([NewGap(1, "slow")], 1)
    assert log.compact(2)
    assert contents(log) == [
        ("COMPACTED", 0, 1),
        ("b1", 1, 2),
        ("none", 2, 3),
        ("COMPACTED", 3, 5),
        ("a3", 5, 6),
        ("slow", 6, 7),
    ]
    assert log.messages == 4


def test_neighbouring_holes_become_one_and_survive_a_reopen(
    path: str, log: Log, small_segments: None
) -> None:
    for _ in range(3):
        log.append([entry(key_hash=KEY_1) for _ in range(10)], 1)
        while not log.compact(1):
            pass
    log.append([entry(b"end")], 1)
    expected = [("COMPACTED", 0, 29), ("sealed", 29, 30), ("end", 30, 31)]
    assert contents(log) == expected
    before = log.size_bytes, log.messages
    log.close()
    with Log.open(path) as log:
        assert contents(log) == expected
        assert (log.size_bytes, log.messages) == before
        assert log.read(5, MANY, now_us=1).items[0].next == 29


def test_a_tombstone_stays_as_the_last_record_of_its_key_until_it_expires(log: Log) -> None:
    log.append([entry(b"a1", key_hash=KEY_1)], 1)
    log.append([entry(b"gone", key_hash=KEY_1, tombstone=True, expires_us=50)], 2)
    log.compact(3)
    (hole, record) = log.read(0, MANY, now_us=3).items
    assert isinstance(hole, Hole)
    assert isinstance(record, Record)
    assert record.tombstone
    log.compact(60)
    assert contents(log, now_us=3) == [("COMPACTED", 0, 1), ("EXPIRED", 1, 2)]


def test_an_expired_record_is_never_shown_before_or_after_compaction(log: Log) -> None:
    log.append([entry(b"short", expires_us=10), entry(b"long")], 1)
    assert contents(log, now_us=9)[0] == ("short", 0, 1)
    assert contents(log, now_us=10)[0] == ("EXPIRED", 0, 1)
    size = log.size_bytes
    log.compact(10)
    assert log.size_bytes < size
    assert contents(log, now_us=1) == [("EXPIRED", 0, 1), ("long", 1, 2)]


def test_no_older_record_of_a_key_comes_back_when_its_last_one_expires(
    log: Log, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.store.compaction.COMPACT_BYTES", 1)
    log.append([entry(b"old", key_hash=KEY_1)] + [entry(key_hash=KEY_2) for _ in range(7)], 1)
    assert not log.compact(2)
    log.append([entry(b"new", key_hash=KEY_1, expires_us=10)], 3)
    while not log.compact(20):
        pass
    while not log.compact(20):
        pass
    assert "old" not in [item[0] for item in contents(log, now_us=20)]


def test_deferred_records_are_listed_when_they_are_due_and_left_out_on_request(log: Log) -> None:
    log.append([entry(b"late", due_us=100), entry(b"now"), entry(b"later", due_us=200)], 1)
    log.append([entry(b"overdue", due_us=100)], 150)
    assert [item[0] for item in contents(log)] == ["late", "now", "later", "overdue"]
    shown = log.read(0, MANY, now_us=150, deferred=False).items
    assert [content(item) for item in shown] == ["DEFERRED", "now", "DEFERRED", "overdue"]
    assert [log.due(now_us) for now_us in (99, 100, 200)] == [[], [(100, 0)], [(100, 0), (200, 2)]]
    assert log.due(200, after=(100, 0)) == [(200, 2)]
    assert log.due(200, limit=1) == [(100, 0)]


def test_what_is_removed_is_due_no_more(log: Log) -> None:
    log.append([entry(due_us=100), entry(due_us=101, expires_us=50), entry(due_us=102)], 1)
    log.compact(60)
    assert log.due(200) == [(100, 0), (102, 2)]
    log.enforce(Limits(max_messages=1), 60)
    assert log.due(200) == [(102, 2)]


def test_a_time_finds_the_first_record_stored_then_or_later(log: Log, small_segments: None) -> None:
    for now_us in range(0, 100, 10):
        log.append([entry(count=2)], now_us)
    assert [log.find(time_us) for time_us in (0, 1, 10, 55, 90, 91)] == [0, 2, 2, 12, 18, 20]


# Cursors


def test_cursors_are_kept_by_name(path: str, log: Log) -> None:
    log.cursors.put("invoices", b"1")
    log.cursors.put("audit", b"2", sync=False)
    log.cursors.put("invoices", b"3")
    assert log.cursors.get("nobody") is None
    log.close()
    with Log.open(path) as log:
        assert log.cursors.names() == ["audit", "invoices"]
        assert log.cursors.get("invoices") == b"3"
        assert log.cursors.delete("audit")
        assert not log.cursors.delete("audit")
        assert log.cursors.names() == ["invoices"]


def test_a_cursor_too_many_is_refused_and_the_others_go_on(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursors, "MAX_CURSORS", 2)
    log.cursors.put("one", b"")
    log.cursors.put("two", b"")
    with pytest.raises(CursorsFull):
        log.cursors.put("three", b"")
    log.cursors.put("one", b"more")
    with pytest.raises(ValueError, match="the limits are"):
        log.cursors.put("one", bytes((1 << 20) + 1))
    assert log.cursors.get("one") == b"more"


def test_a_record_that_is_missing_between_others_is_damage_and_never_skipped(log: Log) -> None:
    log.append([entry(b"one"), entry(b"two"), entry(b"three")], 1)
    log._database._records.delete(KEY.pack(1))
    with pytest.raises(LogDamaged, match="entries are missing"):
        log.read(1, MANY, now_us=9)
    assert log.read(0, MANY, now_us=9).next == 1


def test_every_append_is_marked_as_synced_before_it_is_acknowledged(path: str, log: Log) -> None:
    """The mark is written beside the database, after its sync, so that a disk that loses writes is detected."""
    mark = Path(path, MARK_NAME)
    marks = [mark.read_bytes()]
    for number in range(3):
        log.append([entry(b"%d" % number)], 1)
        marks.append(mark.read_bytes())
    assert len(set(marks)) == 4


def test_a_mark_of_another_log_is_damage(path: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    Log.create(path, uuid=UUID, definition=b"", created_us=0).close()
    Log.create(other, uuid=b"\x08" * 16, definition=b"", created_us=0).close()
    Path(path, "MARK").write_bytes(Path(other, "MARK").read_bytes())
    with pytest.raises(LogDamaged, match="another"):
        Log.open(path)


def test_reasons_have_numbers_that_stay() -> None:
    assert [(reason.name, reason.value) for reason in Reason] == [
        ("RETENTION", 1),
        ("COMPACTED", 2),
        ("EXPIRED", 3),
        ("DEFERRED", 4),
        ("DAMAGED", 5),
    ]
