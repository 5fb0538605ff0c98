"""What staging promises: a batch appears whole and once, or nothing has changed, and what nobody commits goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disk import shrunk_to, table_bytes

from iris.wire.codec import END
from iris.wire.streams import Attempt, Planned, PlannedPart
from relay.store import batches, plans, segments, staged_rows
from relay.store.errors import LogDamaged, LogWriteFailed
from relay.store.log import Log
from relay.store.records import KEY, Entry, Hole, NewGap, Reason, Record
from relay.store.segments import Limits
from relay.store.staged_rows import Committed, StagingRefused

UUID = b"\x07" * 16
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
KEY_1, KEY_2 = b"1" * 32, b"2" * 32
DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000
MANY = 1 << 30


def entry(
    body: bytes, *, count: int = 1, key_hash: bytes | None = None, expires_us: int = 0, due_us: int = 0
) -> Entry:  # fmt: skip
    end = END.pack(1_000, 0, count, 77)
    return Entry(
        0x48, "orders", b"k" * 16, b"s" * 16, end, body, None, key_hash, False, expires_us, due_us
    )


def stage(
    log: Log, attempt: bytes, *bodies: bytes | Entry, batch: int = 1, first: int = 0, writer: str = "etl", now_us: int = 10
) -> None:  # fmt: skip
    """Stage entries of an attempt from record `first` on, and put them on disk."""
    entries = [body if isinstance(body, Entry) else entry(body) for body in bodies]
    log.staging.stage(writer, batch, attempt, list(enumerate(entries, first)), now_us)
    log.append((), now_us)


def bodies(log: Log, start: int = 0) -> list[bytes]:
    items = log.read(start, MANY, now_us=50).items
    return [item.body for item in items if isinstance(item, Record)]


def rows(log: Log) -> int:
    """How many rows there are of what is staged."""
    return sum(1 for prefix in (b"t", b"u") for _ in log._database.rows(prefix))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "orders")


@pytest.fixture
def log(path: str) -> Iterator[Log]:
    with Log.create(path, uuid=UUID, definition=b"", created_us=5) as log:
        yield log


def test_nothing_staged_is_seen_until_it_is_committed_in_the_order_that_is_named(log: Log) -> None:
    log.append([entry(b"before")], 10)
    stage(log, A, b"a0", entry(b"a1", count=3))
    stage(log, B, b"b0")
    assert bodies(log) == [b"before"]
    assert (log.next, log.messages) == (1, 1)
    assert log.staging.commit("etl", 1, [(B, 1), (A, 2)], 20) == Committed(1, 6, False)
    assert bodies(log) == [b"before", b"b0", b"a0", b"a1"]
    assert (log.next, log.messages, log.staging.rows.bytes, rows(log)) == (6, 6, 0, 0)
    (record,) = log.read(1, 1, now_us=20).items
    assert isinstance(record, Record)
    assert (record.stored_us, record.kind, record.name, record.sender_id) == (
        20,
        0x48,
        "orders",
        b"s" * 16,
    )
    assert log.append([entry(b"after")], 30)[0].first == 6  # type: ignore[union-attr]  # it is stored


def test_a_commit_again_changes_nothing_whatever_it_names(log: Log) -> None:
    stage(log, A, b"a0")
    done = log.staging.commit("etl", 1, [(A, 1)], 20)
    assert log.staging.commit("etl", 1, [(A, 1)], 21) == Committed(done.first, done.next, True)
    stage(log, B, b"b0")
    assert log.staging.commit("etl", 1, [(B, 1)], 22) == Committed(0, 1, True)
    assert bodies(log) == [b"a0"]
    assert log.staging.rows.bytes == 0, "what is staged for it later is not kept"


def test_a_batch_below_the_last_is_a_replay_that_nobody_remembers_the_place_of(log: Log) -> None:
    for batch in (3, 7):
        stage(log, A, b"%d" % batch, batch=batch)
        assert not log.staging.commit("etl", batch, [(A, 1)], 20).replayed
    assert log.staging.commit("etl", 3, [(A, 1)], 21) == Committed(None, None, True)
    assert log.staging.commit("etl", 6, [], 21) == Committed(None, None, True)
    assert bodies(log) == [b"3", b"7"]


def test_a_commit_of_nothing_is_a_batch_without_offsets(log: Log) -> None:
    log.append([entry(b"x")], 10)
    assert log.staging.commit("etl", 1, [], 20) == Committed(1, 1, False)
    assert log.staging.commit("etl", 1, [], 20) == Committed(1, 1, True)
    assert log.staging.commit("etl", 2, [(A, 0), (B, 0)], 20) == Committed(1, 1, False)


def test_writers_know_nothing_of_each_other(log: Log) -> None:
    stage(log, A, b"one", writer="one", batch=9)
    stage(log, A, b"two", writer="two", batch=2)
    assert log.staging.commit("one", 9, [(A, 1)], 20) == Committed(0, 1, False)
    assert log.staging.commit("two", 2, [(A, 1)], 20) == Committed(1, 2, False)
    assert bodies(log) == [b"one", b"two"]


@pytest.mark.parametrize(
    ("attempts", "missing"),
    [
        ([(A, 2), (C, 1)], f"attempt {C.hex()}: it is not staged"),
        ([(A, 3)], f"attempt {A.hex()}: record 2 of 3 is missing"),
        ([(A, 1)], f"attempt {A.hex()}: 2 records are staged, but the commit names 1"),
        ([(A, 0)], f"attempt {A.hex()}: 2 records are staged, but the commit names 0"),
        ([(B, 3)], f"attempt {B.hex()}: record 1 of 3 is missing"),
    ],
    ids=["never staged", "cut short", "longer", "not empty", "with a gap"],
)
def test_a_commit_of_what_is_not_staged_names_it_and_changes_nothing(
    attempts: list[tuple[bytes, int]], missing: str, log: Log
) -> None:
    stage(log, A, b"a0", b"a1")
    stage(log, B, b"b0")
    stage(log, B, b"b2", first=2)
    before = rows(log)
    with pytest.raises(StagingRefused, match=f"batch 1 of writer 'etl', {missing}") as refused:
        log.staging.commit("etl", 1, attempts, 20)
    assert refused.value.code == "staged"
    assert (log.next, rows(log)) == (0, before)
    stage(log, B, b"b1", first=1)
    assert log.staging.commit("etl", 1, [(A, 2), (B, 3)], 21) == Committed(0, 5, False)


def test_an_attempt_is_of_one_writer_and_batch_and_is_named_once(log: Log) -> None:
    stage(log, A, b"a0")
    for writer, batch in (("etl", 2), ("other", 1)):
        with pytest.raises(StagingRefused, match="it is not staged"):
            log.staging.commit(writer, batch, [(A, 1)], 20)
    with pytest.raises(StagingRefused, match="twice") as refused:
        log.staging.commit("etl", 1, [(A, 1), (A, 1)], 20)
    assert refused.value.code == "invalid"


def test_a_record_that_is_staged_again_changes_nothing(log: Log) -> None:
    stage(log, A, b"a0", b"a1")
    size = log.staging.rows.bytes
    assert log.staging.stage("etl", 1, A, [(1, entry(b"other"))], 20) == 0
    stage(log, A, b"other", b"other", b"a2")
    assert log.staging.rows.bytes > size
    log.staging.commit("etl", 1, [(A, 3)], 20)
    assert bodies(log) == [b"a0", b"a1", b"a2"]


def test_attempts_that_were_not_committed_are_deleted_with_the_batch_and_with_earlier_ones(
    log: Log,
) -> None:
    stage(log, A, b"won", batch=5)
    stage(log, B, b"lost", batch=5)
    stage(log, B, b"never", batch=4)
    stage(log, C, b"next", batch=6)
    stage(log, C, b"other", writer="et", batch=5)
    log.staging.commit("etl", 5, [(A, 1)], 20)
    assert rows(log) == 4, "those of the next batch and of the other writer stay"
    log.staging.commit("etl", 6, [(C, 1)], 20)
    log.staging.commit("et", 5, [(C, 1)], 20)
    assert bodies(log) == [b"won", b"next", b"other"]
    assert log.staging.rows.bytes == 0


def test_staging_and_writers_outlive_a_reopen(path: str, log: Log) -> None:
    stage(log, A, b"a0", b"a1", batch=2)
    stage(log, B, b"b1", batch=2, first=1)
    log.staging.commit("other", 4, [], 15)
    size = log.staging.rows.bytes
    log.close()
    with Log.open(path) as again:
        assert again.staging.rows.bytes == size
        stage(again, A, b"not this", batch=2)
        stage(again, B, b"b0", batch=2)
        assert again.staging.commit("other", 4, [], 20) == Committed(0, 0, True)
        assert again.staging.commit("etl", 2, [(A, 2), (B, 2)], 20) == Committed(0, 4, False)
    with Log.open(path) as again:
        assert again.staging.commit("etl", 2, [(A, 2), (B, 2)], 30) == Committed(0, 4, True)
        assert bodies(again) == [b"a0", b"a1", b"b0", b"b1"]
        assert (again.staging.rows.bytes, rows(again)) == (0, 0)


def test_discarding_drops_the_attempts_that_are_named_or_all_of_the_batch(
    path: str, log: Log
) -> None:
    for attempt in (A, B, C):
        stage(log, attempt, b"0", b"1")
    stage(log, A, b"0", batch=2)
    assert log.staging.discard("etl", 1, [A, b"d" * 16]) == 2
    with pytest.raises(StagingRefused, match="it is not staged"):
        log.staging.commit("etl", 1, [(A, 2)], 20)
    assert log.staging.discard("etl", 1, []) == 4
    assert log.staging.discard("etl", 1, []) == 0
    log.close()
    with Log.open(path) as again:
        assert rows(again) == 2
        assert again.staging.commit("etl", 2, [(A, 1)], 20) == Committed(0, 1, False)


def test_an_attempt_expires_a_day_after_it_was_staged_to_last(log: Log) -> None:
    stage(log, A, b"a0", now_us=10)
    stage(log, A, b"a1", first=1, now_us=DAY_US)
    stage(log, B, b"b0", b"b1", now_us=11)
    assert log.staging.tend(DAY_US + 10) == 0
    assert log.staging.tend(DAY_US + 11) == 0, "it looks once a minute"
    assert log.staging.tend(DAY_US + 11 + staged_rows.LOOK_US) == 2
    with pytest.raises(StagingRefused, match=B.hex()):
        log.staging.commit("etl", 1, [(A, 2), (B, 2)], DAY_US + 20)
    assert rows(log) == 4
    assert log.staging.tend(3 * DAY_US) == 2
    assert (rows(log), log.staging.rows.bytes) == (0, 0)


def test_what_expired_while_the_log_was_closed_goes_at_the_first_look(path: str, log: Log) -> None:
    stage(log, A, b"a0", now_us=10)
    log.close()
    with Log.open(path) as again:
        assert again.staging.tend(2 * DAY_US) == 1
    with Log.open(path) as again:
        assert (rows(again), again.staging.rows.bytes) == (0, 0)


def test_a_stream_stages_no_more_than_its_bound_and_accepts_more_when_some_is_deleted(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "STAGED_BYTES", 6000)
    stage(log, A, bytes(2000))
    stage(log, B, bytes(2000))
    with pytest.raises(StagingRefused, match="at most 6000 bytes") as refused:
        stage(log, C, bytes(2000))
    assert refused.value.code == "full"
    stage(log, A, bytes(2000))  # is there already
    log.staging.discard("etl", 1, [B])
    stage(log, C, bytes(2000))
    assert log.staging.commit("etl", 1, [(A, 1), (C, 1)], 20) == Committed(0, 2, False)


def test_a_batch_has_no_more_than_its_bound_nor_has_an_attempt(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "COMMIT_BYTES", 5000)
    stage(log, A, bytes(3000))
    with pytest.raises(StagingRefused, match="an attempt has at most 5000 bytes") as refused:
        stage(log, A, bytes(3000), first=1)
    assert refused.value.code == "full"
    stage(log, B, bytes(3000))
    with pytest.raises(StagingRefused, match="6000 bytes") as refused:
        log.staging.commit("etl", 1, [(A, 1), (B, 1)], 20)
    assert refused.value.code == "full"
    assert log.next == 0
    assert log.staging.commit("etl", 1, [(B, 1)], 20) == Committed(0, 1, False), (
        "losers do not count"
    )


def test_records_that_wait_for_an_earlier_one_are_bounded(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "MAX_AHEAD", 2)
    stage(log, A, b"1", b"2", first=1)
    with pytest.raises(StagingRefused, match="record 0 is missing") as refused:
        stage(log, A, b"3", first=3)
    assert refused.value.code == "full"


@pytest.mark.parametrize("writer", ["", "x" * 256, "é" * 128])
def test_a_writer_has_1_to_255_bytes(writer: str, log: Log) -> None:
    for call in (
        lambda: stage(log, A, b"x", writer=writer),
        lambda: log.staging.commit(writer, 1, [], 20),
    ):
        with pytest.raises(StagingRefused, match="255 bytes") as refused:
            call()
        assert refused.value.code == "invalid"


def writers(log: Log) -> set[str]:
    return {row.decode() for row, _ in log._database.rows(b"w")}


def test_the_writer_idle_longest_makes_room_if_it_was_idle_for_a_week(
    path: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "MAX_WRITERS", 2)
    log.staging.commit("first", 1, [], 10)
    log.staging.commit("first", 2, [], 10)
    log.staging.commit("second", 1, [], 20)
    log.staging.commit("second", 2, [], 20)
    stage(log, A, b"a0", writer="third", now_us=30)
    with pytest.raises(StagingRefused, match="2 writers") as refused:
        log.staging.commit("third", 1, [(A, 1)], 7 * DAY_US + 10)
    assert refused.value.code == "full"
    assert log.staging.commit("second", 3, [], 7 * DAY_US + 10) == Committed(0, 0, False)
    assert log.staging.commit("third", 1, [(A, 1)], 7 * DAY_US + 11) == Committed(0, 1, False)
    log.close()
    with Log.open(path) as again:
        assert again.staging.commit("second", 3, [], 7 * DAY_US + 12).replayed
        assert again.staging.commit("third", 1, [], 7 * DAY_US + 12) == Committed(0, 1, True)
        assert writers(again) == {"second", "third"}


def test_a_writer_of_a_single_batch_makes_room_after_an_hour_and_before_all_others(
    path: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "MAX_WRITERS", 3)
    log.staging.commit("query", 1, [], 10)
    log.staging.commit("query", 2, [], 11)
    log.staging.commit("job z", 1, [], 20)  # the older one, though its name is the later one
    log.staging.commit("job a", 1, [], 30)
    log.staging.commit("job a", 1, [], 40)  # a replay does not count as another batch
    with pytest.raises(StagingRefused, match="3 writers") as refused:
        log.staging.commit("job b", 1, [], HOUR_US + 20)
    assert refused.value.code == "full"
    assert writers(log) == {"query", "job a", "job z"}
    log.close()
    with Log.open(path) as again:
        assert not again.staging.commit("job b", 1, [], HOUR_US + 21).replayed
        assert writers(again) == {"query", "job a", "job b"}
        late = 8 * DAY_US
        for name in ("job c", "job d"):
            assert not again.staging.commit(name, 1, [], late).replayed
        assert writers(again) == {"query", "job c", "job d"}, "it is older than any, but no job"
        assert not again.staging.commit("job e", 1, [], late).replayed
        assert writers(again) == {"job c", "job d", "job e"}
        with pytest.raises(StagingRefused, match="3 writers"):
            again.staging.commit("query", 3, [], late)


def test_one_job_after_the_other_is_never_refused_and_costs_no_query_its_place(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "MAX_WRITERS", 8)
    log.staging.commit("query", 1, [], 10)
    log.staging.commit("query", 2, [], 10)
    for number in range(100):
        now_us = 20 + number * HOUR_US // 6
        assert not log.staging.commit(f"job {number}", 1, [], now_us).replayed
    assert log.staging.commit("query", 2, [], now_us).replayed
    assert len(writers(log)) == 8


def row_key(attempt: bytes, sequence: int) -> bytes:
    return b"t\x03etl" + KEY.pack(1) + attempt + KEY.pack(sequence)


def damage(log: Log, key: bytes, value: bytes | None) -> None:
    batch = log._database.batch()
    if value is None:
        batch.delete(key)
    else:
        batch.put(key, value)
    log._database.write(batch, log.next, sync=True)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone", "moved"])
def test_a_damaged_record_refuses_the_commit_and_is_named(how: str, path: str, log: Log) -> None:
    stage(log, A, b"a0", b"a1", b"a2")
    stage(log, B, b"b0")
    row = log._database.get(row_key(A, 1)) or b""
    other = log._database.get(row_key(A, 2))
    flipped = row[:-1] + bytes([row[-1] ^ 1])
    wrong = {"flipped": flipped, "cut": row[:30], "empty": b"", "gone": None, "moved": other}
    damage(log, row_key(A, 1), wrong[how])
    for _ in range(2):
        with pytest.raises(
            LogDamaged, match=f"staged record 1 of attempt {A.hex()}, batch 1 of writer 'etl'"
        ):
            log.staging.commit("etl", 1, [(B, 1), (A, 3)], 20)
        assert log.next == 0
        log.close()
        log = Log.open(path)  # what is staged is not read for it
    with log:
        assert log.staging.commit("etl", 1, [(B, 1)], 20) == Committed(0, 1, False)
        assert bodies(log) == [b"b0"]


@pytest.mark.parametrize("prefix", [b"u", b"w"])
def test_a_log_whose_rows_of_attempts_or_writers_are_damaged_is_not_opened(
    prefix: bytes, path: str, log: Log
) -> None:
    stage(log, A, b"a0", batch=2)
    log.staging.commit("etl", 1, [], 20)
    ((row, value),) = log._database.rows(prefix)
    damage(log, prefix + row, value[:-1] + bytes([value[-1] ^ 1]))
    log.close()
    with pytest.raises(LogDamaged, match="checksum"):
        Log.open(path)


@pytest.mark.parametrize("written", [False, True])
def test_a_commit_whose_write_failed_is_found_done_or_not_done_and_done_once(
    written: bool, path: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(log, A, b"a0", b"a1")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(log._database, "_write_mark" if written else "_synced", fail)
    for _ in range(2):
        with pytest.raises(LogWriteFailed):
            log.staging.commit("etl", 1, [(A, 2)], 20)
        assert (log.next, bodies(log)) == (0, [])
    log.close()
    with Log.open(path) as again:
        assert again.staging.commit("etl", 1, [(A, 2)], 30) == Committed(0, 2, written)
        assert bodies(again) == [b"a0", b"a1"]
        assert (again.staging.rows.bytes, rows(again)) == (0, 0)


def test_what_is_staged_waits_on_if_the_append_that_was_to_write_it_fails(
    path: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.staging.stage("etl", 1, A, [(0, entry(b"a0")), (1, entry(b"a1"))], 10)
    with pytest.raises(ValueError, match="count"):
        log.append([entry(b"x"), NewGap(-1, "no such count")], 10)
    with monkeypatch.context() as patch:
        patch.setattr(Log, "_judge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            log.append([entry(b"x")], 10)
    assert (rows(log), log.next) == (0, 0)
    assert log.staging.stage("etl", 1, A, [(0, entry(b"a0"))], 10) == 0, "it is known"
    log.append((), 11)
    assert rows(log) == 4
    log.append((), 12)
    log.close()
    with Log.open(path) as again:
        assert again.staging.commit("etl", 1, [(A, 2)], 20) == Committed(0, 2, False)
        assert bodies(again) == [b"a0", b"a1"]


def test_keys_due_times_and_expiry_of_committed_records_count_as_if_appended(log: Log) -> None:
    log.append([entry(b"old", key_hash=KEY_1)], 10)
    stage(
        log,
        A,
        entry(b"new", key_hash=KEY_1),
        entry(b"later", due_us=500, key_hash=KEY_2),
        entry(b"was due", due_us=15),
        entry(b"short", expires_us=100),
    )
    assert log.compact(12), "what is staged supersedes nothing"
    assert bodies(log) == [b"old"]
    assert log.due(1000) == []
    log.staging.commit("etl", 1, [(A, 4)], 20)
    assert log.due(1000) == [(500, 2)]
    assert log.compact(200)
    shown = [
        (item.reason, item.first) if isinstance(item, Hole) else item.body  # type: ignore[union-attr]  # no gaps here
        for item in log.read(0, MANY, now_us=200).items
    ]
    assert shown == [(Reason.COMPACTED, 0), b"new", b"later", b"was due", (Reason.EXPIRED, 4)]


def test_retention_segments_and_sums_come_out_as_if_appended(
    path: str, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ENTRIES", 4)
    entries = [entry(b"%d" % number, count=number % 3 + 1) for number in range(11)]
    stage(log, A, *entries[:6])
    stage(log, B, *entries[6:])
    log.staging.commit("etl", 1, [(A, 6), (B, 5)], 20)
    with Log.create(str(tmp_path / "plain"), uuid=UUID, definition=b"", created_us=5) as plain:
        plain.append(entries, 20)
        for limits in (Limits(), Limits(max_messages=9), Limits(max_messages=2)):
            log.enforce(limits, 30)
            plain.enforce(limits, 30)
            assert log.read(0, MANY, now_us=30) == plain.read(0, MANY, now_us=30)
            assert (log.size_bytes, log.messages) == (plain.size_bytes, plain.messages)
            assert dict(log._database.rows(b"s")) == dict(plain._database.rows(b"s"))
    log.close()
    with Log.open(path) as again:
        assert (again.next, again.messages) == (log.next, log.messages)


def test_disk_space_of_what_was_dropped_comes_back(
    path: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "FREE_BYTES", 1 << 20)
    for number in range(40):
        stage(log, A, bytes(1 << 20), first=number)
    stage(log, B, b"stays", batch=2)
    log.staging.discard("etl", 1, [])

    assert table_bytes(path) > 20 << 20
    assert log.staging.tend(30) == 0
    assert shrunk_to(path, 5 << 20)
    assert log.staging.commit("etl", 2, [(B, 1)], 40) == Committed(0, 1, False)


class Ranges:
    """Counts what is dropped by range, and how often its space comes back."""

    def __init__(self, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dropped = 0
        self.freed = 0
        delete_range, compact_rows = batches.Batch.delete_range, log._database.compact_rows

        def dropping(batch: batches.Batch, begin: bytes, end: bytes) -> None:
            self.dropped += 1
            delete_range(batch, begin, end)

        def freeing(begin: bytes, end: bytes) -> None:
            self.freed += 1
            compact_rows(begin, end)

        monkeypatch.setattr(batches.Batch, "delete_range", dropping)
        monkeypatch.setattr(log._database, "compact_rows", freeing)


def test_small_commits_drop_nothing_by_range(
    path: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = Ranges(log, monkeypatch)
    for batch in range(2000):
        stage(log, A, b"%d" % batch, batch=batch)
        if batch % 100 == 0:
            stage(log, B, b"loses", batch=batch)
            stage(log, C, b"is discarded", b"waits for 1", batch=batch + 1, first=2)
            assert log.staging.discard("etl", batch + 1, [C]) == 2
        assert log.staging.commit("etl", batch, [(A, 1)], 20) == Committed(batch, batch + 1, False)
    assert (ranges.dropped, rows(log), log.staging.rows.bytes) == (0, 0, 0)
    log.close()
    with Log.open(path) as again:
        assert (rows(again), len(bodies(again))) == (0, 2000)


def test_large_drops_are_by_range_and_go_from_disk_after_some_of_them(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "RANGE_RECORDS", 3)
    monkeypatch.setattr(staged_rows, "FREE_RANGES", 8)
    ranges = Ranges(log, monkeypatch)
    stage(log, C, b"stays", batch=100)
    for batch in range(3):
        stage(log, A, b"0", b"1", batch=batch)
        stage(log, B, b"0", b"1", batch=batch)
        log.staging.commit("etl", batch, [(A, 2)], 20)
    assert ranges.dropped == 6
    log.staging.tend(30)
    assert ranges.freed == 0
    stage(log, A, b"0", b"1", b"2", batch=3)
    stage(log, B, b"0", batch=3)
    stage(log, A, b"0", batch=4)
    assert log.staging.discard("etl", 3, []) == 4
    assert (ranges.dropped, rows(log)) == (8, 4), "all of a batch is one range"
    log.staging.tend(30)
    log.staging.tend(30)
    assert ranges.freed == 2
    assert log.staging.commit("etl", 4, [(A, 1)], 20) == Committed(6, 7, False)
    assert log.staging.commit("etl", 100, [(C, 1)], 20) == Committed(7, 8, False)
    assert rows(log) == 0


def test_many_old_attempts_are_dropped_some_at_a_time(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "EXPIRE_RECORDS", 4)
    for batch in range(5):
        stage(log, A, b"0", b"1", batch=batch)
    stage(log, A, b"0", batch=9, now_us=DAY_US)
    assert [log.staging.tend(DAY_US + 10) for _ in range(4)] == [4, 4, 2, 0]
    assert rows(log) == 2


# -- several partitions ----------------------------------------------------------------------------------------------


def parts(attempt: bytes, *counts: int) -> list[PlannedPart]:
    """Return what an attempt commits in partitions 0 and up."""
    return [
        PlannedPart(number, [Attempt(attempt, count)])
        for number, count in enumerate(counts)
        if count
    ]


def test_the_first_plan_of_a_batch_is_in_force_until_it_is_committed(log: Log, path: str) -> None:
    stage(log, A, b"a0")
    assert log.staging.plan("etl", 1, parts(A, 1, 2), 20) == Planned(1, parts(A, 1, 2))
    log.close()
    with Log.open(path) as again:
        stage(again, B, b"b0", b"b1")
        for batch in (0, 1, 2):  # whoever asks completes it first
            assert again.staging.plan("etl", batch, parts(B, 2), 21) == Planned(1, parts(A, 1, 2))
        for batch, attempts in ((1, [(B, 2)]), (1, []), (2, [(A, 1)])):
            with pytest.raises(StagingRefused, match="batch 1 of writer 'etl' was interrupted"):
                again.staging.commit("etl", batch, attempts, 22)
        assert again.staging.plan("other", 5, [], 22) == Planned(5, [])
        assert again.staging.commit("etl", 1, [(A, 1)], 23) == Committed(0, 1, False)
        assert bodies(again) == [b"a0"]
        assert again.staging.rows.plans.bytes == again.staging.rows.bytes == 0
        assert again.staging.plan("etl", 1, parts(B, 2), 24) == Planned(1, [])
        assert again.staging.plan("etl", 2, parts(B, 0, 2), 24) == Planned(2, parts(B, 0, 2))
        assert again.staging.discard("etl", 2, []) == 0
        assert again.staging.plan("etl", 3, [], 26) == Planned(3, [])
        again.verify()
    with Log.open(path) as last:
        assert last.staging.plan("etl", 2, [], 27) == Planned(2, [])


def test_plans_are_bounded_in_number_and_in_bytes(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 2)
    for writer in ("w1", "w2"):
        log.staging.plan(writer, 1, parts(A, 1), 10)
    with pytest.raises(StagingRefused, match="were interrupted, which is the limit"):
        log.staging.plan("w3", 1, parts(A, 1), 7 * DAY_US)
    late_us = 10 + 7 * DAY_US + 1
    log.staging.plan("w3", 1, parts(A, 1), late_us)
    assert [log.staging.plan(writer, 9, [], late_us).batch for writer in ("w1", "w2", "w3")] == [
        9,
        1,
        1,
    ]
    log.staging.discard("w2", 1, [])
    monkeypatch.setattr(staged_rows, "STAGED_BYTES", log.staging.rows.plans.bytes + 300)
    with pytest.raises(StagingRefused, match="stages at most"):
        log.staging.plan("w4", 1, parts(A, 1), late_us)
    with pytest.raises(StagingRefused, match="stages at most"):
        stage(log, A, b"a" * 100)
    with pytest.raises(StagingRefused, match="a partition twice"):
        log.staging.plan("w4", 1, [*parts(A, 1), *parts(B, 1)], late_us)
