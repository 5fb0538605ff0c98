"""A log never gives wrong data: whatever happens to its files, its writer or its disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from iris.wire.codec import END
from relay.store.errors import LogDamaged
from relay.store.log import Log
from relay.store.records import Entry, Item, Record

CREATE = {"uuid": b"\x07" * 16, "definition": b"grant", "created_us": 5}
MANY = 1 << 30
END_OF_ONE = END.pack(0, 0, 1, 0)
BODIES = [random.Random(number).randbytes(2000) for number in range(80)]


def entry(body: bytes) -> Entry:
    return Entry(0x48, "orders", b"k" * 16, b"s" * 16, END_OF_ONE, body)


def bodies(items: list[Item]) -> list[bytes]:
    return [item.body for item in items if isinstance(item, Record)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same log with its records in the write-ahead log, and in tables."""
    folder = tmp_path_factory.mktemp("logs")
    with Log.create(str(folder / "tables"), **CREATE) as log:
        for first in range(0, 80, 8):
            log.append([entry(body) for body in BODIES[first : first + 8]], first)
        log.cursors.put("invoices", b"here")
        shutil.copytree(folder / "tables", folder / "wal")
    return {"tables": folder / "tables", "wal": folder / "wal"}


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_or_a_cut_file_is_noticed_or_harmless(
    seed: int, logs: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "log"
    shutil.copytree(logs["wal" if seed % 2 else "tables"], path)
    files = sorted(
        file
        for file in path.iterdir()
        if file.stat().st_size and not file.name.startswith(("LOG", "OPTIONS", "rocksdict"))
    )
    # Most of the bytes are in one file, and so is most of the damage.
    file = rng.choices(files, [file.stat().st_size ** 0.5 for file in files])[0]
    data = bytearray(file.read_bytes())
    if rng.random() < 0.6:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    file.write_bytes(data)
    try:
        with Log.open(str(path)) as log:
            found = bodies(log.read(0, MANY, now_us=99).items)
            assert log.next == 80
    except LogDamaged:
        return
    assert found == BODIES, f"seed {seed}, {file.name}"


def test_a_log_that_lost_its_last_synced_write_is_damaged_and_stays_so(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    shutil.copytree(logs["wal"], path)
    wal = max(path.glob("*.log"), key=lambda file: file.stat().st_size)
    os.truncate(wal, wal.stat().st_size - 1)
    for _ in range(2):
        with pytest.raises(LogDamaged, match="synced writes are missing"):
            Log.open(str(path))


@pytest.mark.parametrize(
    "tail", [bytes(5000), b"\x01" * 5000, b"torn"], ids=["zeros", "noise", "short"]
)
def test_a_torn_end_of_what_was_never_synced_is_normal(
    tail: bytes, logs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    shutil.copytree(logs["wal"], path)
    wal = max(path.glob("*.log"), key=lambda file: file.stat().st_size)
    with wal.open("ab") as file:
        file.write(tail)
    with Log.open(str(path)) as log:
        assert log.next == 80
        assert len(bodies(log.read(0, MANY, now_us=99).items)) == 80


@pytest.mark.parametrize("name", ["*.log", "MANIFEST-*"])
def test_a_journal_that_rocksdb_would_never_finish_reading_is_damage(
    name: str, logs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    shutil.copytree(logs["wal"], path)
    journal = max(path.glob(name), key=lambda file: file.stat().st_size)
    with journal.open("ab") as file:
        file.write(bytes(range(256)) * 40)
    with pytest.raises(LogDamaged, match="recycled"):
        Log.open(str(path))


def test_refusing_a_damaged_write_ahead_log_leaves_it_as_it_was(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    shutil.copytree(logs["wal"], path)
    wal = max(path.glob("*.log"), key=lambda file: file.stat().st_size)
    data = bytearray(wal.read_bytes())
    data[len(data) // 2] ^= 1
    wal.write_bytes(data)
    with pytest.raises(LogDamaged):
        Log.open(str(path))
    assert wal.read_bytes() == data


def test_a_damaged_log_can_be_destroyed(logs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "log"
    shutil.copytree(logs["tables"], path)
    (path / "CURRENT").write_text("MANIFEST-none\n")
    with pytest.raises(LogDamaged):
        Log.open(str(path))
    Log.destroy(str(path))
    assert not path.exists()


PRELUDE = """
import resource, signal, sys
from iris.wire.codec import END
from relay.store.errors import *
from relay.store.log import Log
from relay.store.records import Entry, NewGap
from relay.store.segments import Limits

def entry(body):
    return Entry(0x48, "orders", b"k" * 16, b"s" * 16, END.pack(0, 0, 1, 0), body)

path = sys.argv[1]
"""

WRITER = (
    PRELUDE
    + """
log = Log.open(path)
while True:
    first = log.next
    log.append([entry(b"%d" % offset * 200) for offset in range(first, first + 3)], 1)
    print(log.next, flush=True)
"""
)


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    Log.create(path, **CREATE).close()
    for seed in range(5):
        rng = random.Random(seed)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 120)):
                acknowledged = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            for line in writer.stdout:
                if line.endswith("\n"):
                    acknowledged = int(line)
        with Log.open(path) as log:
            items = log.read(0, MANY, now_us=2).items
            assert log.next >= acknowledged, f"seed {seed}"
            assert log.next % 3 == 0, "a batch is there whole or not at all"
        assert bodies(items) == [b"%d" % offset * 200 for offset in range(len(items))]


def test_another_process_finds_the_log_busy(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    other = PRELUDE + "\ntry: Log.open(path)\nexcept LogBusy: print('busy')"
    with Log.create(path, **CREATE):
        done = subprocess.run(
            [sys.executable, "-c", other, path], capture_output=True, text=True, check=True
        )
    assert done.stdout == "busy\n"


FULL = (
    PRELUDE
    + """
log = Log.open(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
try:
    while True:
        log.append([entry(b"%d" % log.next * 2000)], 1)
except LogWriteFailed as err:
    print(log.next, bool(err.reason), err.path == path)
print(len(log.read(0, 1 << 30, now_us=1).items))
for write in (
    lambda: log.append([entry(b"more")], 2),
    lambda: log.append([NewGap(1, "more")], 2),
    lambda: log.cursors.put("c", b""),
    lambda: log.enforce(Limits(max_messages=1), 2),
):
    try:
        write()
    except LogWriteFailed:
        print("refused")
log.close()
"""
)


def test_a_failed_write_ends_writing_but_not_reading_until_a_reopen(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    Log.create(path, **CREATE).close()
    done = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=15, check=True
    )
    lines = done.stdout.splitlines()
    stored = int(lines[0].split()[0])
    assert lines == [f"{stored} True True", str(stored)] + ["refused"] * 4
    with Log.open(path) as log:
        items = log.read(0, MANY, now_us=2).items
        assert len(items) >= stored > 10
        assert bodies(items) == [b"%d" % offset * 2000 for offset in range(len(items))]
        log.append([entry(b"more")], 3)
