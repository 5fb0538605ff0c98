"""Salvage keeps every entry that can be read, at its offset and as it was, and says which offsets are lost."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from iris.wire.codec import END
from relay.store import salvage as module
from relay.store.__main__ import _report_lines
from relay.store.clock import Clock
from relay.store.consumer import Consumer
from relay.store.cursor import Settings
from relay.store.errors import LogDamaged
from relay.store.log import Log
from relay.store.outcomes import Duplicate, OutOfOrder, Stored
from relay.store.records import Entry, Hole, Item, NewGap, Reason, Record, Stamp
from relay.store.salvage import Report, finish, salvage
from relay.store.segments import Limits

UUID = b"\x07" * 16
CREATE = {"uuid": UUID, "definition": b"\x80", "created_us": 5}
MANY = 1 << 30
PRODUCER = b"p" * 16
DUE_US = 10**15


def entry(rng: random.Random, number: int, size: int = 1500) -> Entry:
    count = rng.choice((1, 1, 1, 3, 40))
    key = bytes([number % 7]) * 32 if number % 3 == 0 else None
    due_us = DUE_US + number if number % 5 == 0 else 0
    return Entry(
        0x48, "orders", b"k" * 16, b"s" * 16, END.pack(0, 0, count, 0), rng.randbytes(size),
        Stamp(PRODUCER, 0, number), key, False, 0, due_us,
    )  # fmt: skip


def fill(log: Log, rng: random.Random, numbers: range) -> None:
    for first in range(numbers.start, numbers.stop, 10):
        log.append([entry(rng, n) for n in range(first, first + 10)], first + 100)
    log.append([NewGap(7, "the relay was away")], 200)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One history in three states: all of it in the write-ahead log, all of it in tables, and some in each."""
    folder = tmp_path_factory.mktemp("logs")
    made: dict[str, Path] = {}

    def keep(name: str) -> None:
        made[name] = folder / name
        shutil.copytree(folder / "log", folder / name)

    rng = random.Random(1)
    path = str(folder / "log")
    with Log.create(path, **CREATE) as log:
        fill(log, rng, range(150))
        log.enforce(Limits(max_messages=log.messages - 30), 300)
        log.compact(400)
        consumer = Consumer(log, "billing", Settings(shared=True), log.oldest, 500, Clock())
        consumer.take(b"w" * 16, 20_000, 100, 500)
        consumer.save()
        log.staging.stage("etl", 1, b"a" * 16, [(0, entry(rng, 0))], 500)
        log.staging.commit("etl", 1, [(b"a" * 16, 1)], 500)
        log.staging.stage("etl", 2, b"b" * 16, [(0, entry(rng, 0))], 500)
        log.append([], 500)
        keep("wal")
        log._database._records.flush()
        log._database._meta.flush()
        fill(log, rng, range(150, 300))
        keep("mixed")
    Log.open(path).close()
    Log.open(path).close()
    keep("tables")
    return made


def history(path: Path) -> tuple[dict[int, Item], int, int]:
    with Log.open(str(path)) as log:
        items = list(log._chain.walk(log.oldest))
        return {item.first: item for item, _ in items}, log.oldest, log.next


def directory(tmp_path: Path, source: Path) -> Path:
    streams = tmp_path / "streams"
    streams.mkdir()
    shutil.copytree(source, streams / UUID.hex())
    (streams / f"{UUID.hex()}.orders").write_bytes(b"\x80")
    return streams


def files_of(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.iterdir()
        if file.stat().st_size and not file.name.startswith(("LOG", "OPTIONS", "rocksdict"))
    )


def check(streams: Path, before: tuple[dict[int, Item], int, int], report: Report) -> int:
    """Return how many offsets are lost, after a look at every entry."""
    items, oldest, end = before
    path = streams / UUID.hex()
    with Log.open(str(path)) as log:
        log.verify()
        assert log.uuid == UUID
        assert (log.oldest, log.next) == (report.oldest, report.end)
        assert log.next == end
        assert log.epoch >= 1
        assert log.definition == b"\x80"
        kept: set[int] = set()
        lost: set[int] = set()
        for item, _ in log._chain.walk(log.oldest):
            offsets = range(item.first, item.next)
            if isinstance(item, Hole) and item.reason is Reason.DAMAGED:
                lost.update(offsets)
            elif item.first >= oldest:
                kept.update(offsets)
                there = items.get(item.first)
                # Compaction is undone where what it wrote is lost: then what it took out stands there again.
                assert there == item or (isinstance(there, Hole) or there is None), item.first
        found = {offset for first, after in report.lost for offset in range(first, after)}
        assert found == lost
        assert not kept & lost
        assert (kept | lost) >= set(range(max(oldest, log.oldest), end))
        # What is deferred stays so, and is listed.
        due = {offset for _, offset in log.due(DUE_US * 2, limit=10_000)}
        for item, _ in log._chain.walk(log.oldest):
            if isinstance(item, Record) and item.deferred:
                assert item.first in due
        log.append(
            [Entry(0x48, "orders", b"k" * 16, b"s" * 16, END.pack(0, 0, 1, 0), b"more")], 900
        )
    return len(lost)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_one_file_suffers_the_rest_is_a_log_again(
    seed: int, logs: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    source = logs[("wal", "tables", "mixed")[seed % 3]]
    before = history(source_copy(source, tmp_path))
    streams = directory(tmp_path, source)
    path = streams / UUID.hex()
    files = files_of(path)
    file = rng.choices(files, [file.stat().st_size ** 0.4 for file in files])[0]
    data = bytearray(file.read_bytes())
    what = rng.random()
    if what < 0.5:
        at = rng.randrange(len(data))
        end = min(len(data), at + rng.choice((1, 1, 500, 40_000)))
        data[at:end] = rng.randbytes(end - at)
        file.write_bytes(data)
    elif what < 0.8:
        file.write_bytes(data[: rng.randrange(len(data))])
    else:
        file.unlink()
    (report,) = salvage(streams)
    assert report.state in ("salvaged", "undamaged"), (report, file.name)
    lost = check_or_same(streams, before, report)
    assert lost == report.lost_offsets
    if report.state == "salvaged":
        assert Path(report.kept_at).is_dir()
    (again,) = salvage(streams)
    assert again.state == "undamaged", (seed, file.name, again.error)
    left = {entry.name for entry in streams.iterdir()}
    assert left <= {UUID.hex(), f"{UUID.hex()}.orders", f"{UUID.hex()}.damaged-1"}


def source_copy(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "before")
    return tmp_path / "before"


def check_or_same(streams: Path, before: tuple[dict[int, Item], int, int], report: Report) -> int:
    if report.state == "undamaged":
        with Log.open(str(streams / UUID.hex())) as log:
            # Retention is not synced: a log that forgot of it is not damaged.
            assert {item.first: item for item, _ in log._chain.walk(before[1])} == before[0]
        return 0
    return check(streams, before, report)


def damaged(tmp_path: Path, source: Path, pattern: str = "*.sst") -> Path:
    """Return a directory with the log, a block of whose largest file of this kind is damaged in the middle."""
    streams = directory(tmp_path, source)
    file = max((streams / UUID.hex()).glob(pattern), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return streams


def test_one_damaged_block_costs_what_is_in_it_and_nothing_else(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    streams = damaged(tmp_path, logs["tables"])
    items, oldest, end = history(source_copy(logs["tables"], tmp_path))
    old = {file.name: file.read_bytes() for file in (streams / UUID.hex()).glob("*.sst")}
    (report,) = salvage(streams)
    ((first, after),) = report.lost
    assert oldest < first < after < end
    size = sum(1500 for item in items.values() if first <= item.first < after)
    assert 20_000 < size < 60_000, "about a block"
    assert (report.state, report.oldest, report.end, report.epoch) == ("salvaged", oldest, end, 1)
    assert (report.end_from, report.also) == ("its mark", [])
    assert report.kept_at == str(streams / f"{UUID.hex()}.damaged-1")
    kept = {file.name: file.read_bytes() for file in Path(report.kept_at).glob("*.sst")}
    assert old.items() <= kept.items()
    with Log.open(str(streams / UUID.hex())) as log:
        found = {item.first: item for item, _ in log._chain.walk(oldest)}
        assert found.pop(first) == Hole(first, after, Reason.DAMAGED)
        assert found == {at: item for at, item in items.items() if not first <= at < after}
        # Whoever appended goes on where it was, and so does who consumed, wrote and staged.
        stamp = Stamp(PRODUCER, 0, 299)
        body = Entry(0x48, "orders", b"k" * 16, b"s" * 16, END.pack(0, 0, 1, 0), b"x", stamp)
        (again,) = log.append([body], 900)
        assert isinstance(again, Duplicate)
        assert Consumer.load(log, "billing", 900, Clock()).position > oldest
        assert log.staging.commit("etl", 1, [(b"a" * 16, 1)], 900).replayed
        assert log.staging.commit("etl", 2, [(b"b" * 16, 1)], 900).first == end


def test_damage_is_reported_to_a_consumer_which_goes_on(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    streams = damaged(tmp_path, logs["tables"])
    (report,) = salvage(streams)
    ((first, after),) = report.lost
    with Log.open(str(streams / UUID.hex())) as log:
        consumer = Consumer(log, "late", Settings(), log.oldest, DUE_US * 2, Clock())
        missing: list[Hole] = []
        while (taken := consumer.take(b"w" * 16, 1 << 20, MANY, DUE_US * 2)).items:
            missing += [item for item in taken.items if isinstance(item, Hole)]
        assert consumer.position == report.end
        assert Hole(first, after, Reason.DAMAGED) in missing
        assert consumer.counts.missed >= after - first


def test_the_loss_of_a_deferred_record_is_reported_to_a_consumer_that_has_passed_it(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "log")
    streams = tmp_path / "streams"
    streams.mkdir()
    rng = random.Random(2)
    with Log.create(path, **CREATE) as log:
        for _ in range(60):
            body = rng.randbytes(1500)
            end = END.pack(0, 0, 1, 0)
            log.append(
                [
                    Entry(
                        0x48,
                        "orders",
                        b"k" * 16,
                        b"s" * 16,
                        end,
                        body,
                        None,
                        None,
                        False,
                        0,
                        DUE_US,
                    )
                ],
                9,
            )
        consumer = Consumer(log, "billing", Settings(), 0, 10, Clock())
        assert not consumer.take(b"w" * 16, MANY, 1000, 10).messages
        assert consumer.position == 60
        consumer.save()
        log._database._records.flush()
    streams = damaged_at(streams, path)
    (report,) = salvage(streams)
    ((first, after),) = report.lost
    with Log.open(str(streams / UUID.hex())) as log:
        consumer = Consumer.load(log, "billing", 20, Clock())
        taken = consumer.take(b"w" * 16, MANY, 1000, DUE_US + 1)
        holes = [item.first for item in taken.items if isinstance(item, Hole)]
        assert holes == list(range(first, after))
        assert taken.messages == 60 - len(holes)


def damaged_at(streams: Path, path: str) -> Path:
    shutil.move(path, streams / UUID.hex())
    file = max((streams / UUID.hex()).glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return streams


def test_synced_writes_that_are_gone_are_lost_offsets_up_to_the_mark(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    streams = directory(tmp_path, logs["wal"])
    items, _, end = history(source_copy(logs["wal"], tmp_path))
    wal = max((streams / UUID.hex()).glob("*.log"), key=lambda file: file.stat().st_size)
    os.truncate(wal, wal.stat().st_size * 2 // 3)
    (report,) = salvage(streams)
    assert report.lost[-1][1] == report.end == end
    assert report.end_from == "its mark"
    assert any("producers" in one for one in report.also)
    assert report.records > 20
    with Log.open(str(streams / UUID.hex())) as log:
        # A producer is not taken for one that is next, since what it appended last is not known.
        stamp = Stamp(PRODUCER, 0, 150)
        body = Entry(0x48, "orders", b"k" * 16, b"s" * 16, END.pack(0, 0, 1, 0), b"x", stamp)
        assert log.append([body], 900) == [OutOfOrder(0)]
        body = Entry(*[getattr(body, f) for f in body.__struct_fields__[:6]], Stamp(PRODUCER, 1, 0))
        assert log.append([body], 900) == [Stored(end, end + 1)]
    assert items


@pytest.mark.parametrize("source", ["wal", "tables", "mixed"])
def test_without_its_mark_and_its_directory_of_tables_all_of_it_is_found(
    source: str, logs: dict[str, Path], tmp_path: Path
) -> None:
    streams = directory(tmp_path, logs[source])
    before = history(source_copy(logs[source], tmp_path))
    path = streams / UUID.hex()
    for file in (path / "MARK", path / "CURRENT", *path.glob("MANIFEST-*")):
        file.unlink()
    (report,) = salvage(streams)
    assert report.lost == []
    assert check(streams, before, report) == 0


def test_without_its_identity_a_log_has_that_of_its_orders_and_an_epoch_above_all_others(
    logs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = damaged(tmp_path, logs["tables"])
    get = module.DamagedLog.get
    monkeypatch.setattr(
        module.DamagedLog, "get", lambda self, key: None if key == b"i" else get(self, key)
    )
    (report,) = salvage(streams)
    assert report.epoch > 1_700_000_000
    assert "time of creation" in report.also[0]
    with Log.open(str(streams / UUID.hex())) as log:
        assert (log.uuid, log.definition) == (UUID, b"\x80")


def test_where_nothing_says_whose_a_log_is_or_where_it_ended_nothing_is_changed(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    streams = directory(tmp_path, logs["tables"])
    path = streams / UUID.hex()
    for file in list(path.iterdir()):
        file.unlink()
    (report,) = salvage(streams)
    assert report.state == "failed"
    assert "delete the stream" in report.error
    assert path.is_dir()
    (streams / f"{UUID.hex()}.orders").unlink()
    (report,) = salvage(streams)
    assert (report.state, report.kept_at) == ("failed", "")
    assert "orders" in report.error
    assert [entry.name for entry in streams.iterdir()] == [UUID.hex()]


def test_stopped_at_any_rename_it_is_finished_by_the_next_call_or_start(
    logs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(BaseException):
        pass

    rename = os.rename
    for nth in range(2):
        folder = tmp_path / str(nth)
        folder.mkdir()
        streams = damaged(folder, logs["tables"])
        done = 0

        def stop(source: str, target: str, nth: int = nth) -> None:
            nonlocal done
            if UUID.hex() in str(source) and "look" not in str(source):
                if done == nth:
                    raise Stopped
                done += 1
            rename(source, target)

        monkeypatch.setattr(module.os, "rename", stop)
        with pytest.raises(Stopped):
            salvage(streams)
        monkeypatch.undo()
        if nth == 0:
            with pytest.raises(LogDamaged), Log.open(str(streams / UUID.hex())) as log:
                log.verify()
        else:
            assert not (streams / UUID.hex()).exists()
            finish(streams)
        (report,) = salvage(streams)
        assert report.state == ("salvaged", "undamaged")[nth]
        with Log.open(str(streams / UUID.hex())) as log:
            log.verify()
            assert log.epoch == 1
        assert {entry.name for entry in streams.iterdir()} == {
            UUID.hex(), f"{UUID.hex()}.orders", f"{UUID.hex()}.damaged-1"
        }  # fmt: skip


def test_a_full_disk_leaves_the_damaged_log_as_it_was(
    logs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = damaged(tmp_path, logs["tables"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for what in ("copy", "write", "swap"):
        with monkeypatch.context() as patch:
            if what == "copy":
                patch.setattr("relay.store.damaged_log._copy_readable", full)
            elif what == "write":
                patch.setattr("relay.store.database.os.pwrite", full)
            else:
                patch.setattr(module, "sync_directory", full)
            (report,) = salvage(streams)
        assert report.state == "failed", what
        assert "No space left" in report.error
        assert {entry.name for entry in streams.iterdir()} == {UUID.hex(), f"{UUID.hex()}.orders"}
    (report,) = salvage(streams)
    assert report.state == "salvaged"


def test_the_report_writes_ranges_of_offsets_in_one_way() -> None:
    report = Report(
        "orders", "07" * 16, "salvaged", records=39, messages=39, end=40, end_from="its mark"
    )
    report.lost = [(20, 21), (30, 33)]
    text = "\n".join(_report_lines(report))
    assert "offsets  0-39 (known from its mark)" in text
    assert "lost     4 offsets: 20, 30-32" in text
