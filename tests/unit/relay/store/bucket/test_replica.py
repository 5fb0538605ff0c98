"""What a killed store wrote and did not bring to the bucket is found again on its disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from iris.crypto.keys import GroupKey
from relay.store.batches import OWN_ROWS, REDO_ROWS, Op
from relay.store.bucket.replica import Replica, redo
from relay.store.bucket.sealing import NO_HASH, Rows, Sealer
from relay.store.bucket.writer import Writer
from relay.store.database import Database

STREAM = bytes(range(16))
SEALER = Sealer(GroupKey(bytes(32)), lambda size: bytes(size))


def content(database: Database) -> list[tuple[bytes, bytes]]:
    """Return everything that a copy of a database has."""
    ops: list[Op] = []
    while more := database.copy_rows(ops[-1].key if ops else b"", OWN_ROWS, 1 << 20):
        ops += more
    return [(op.key, op.value) for op in (*ops, *database.copy_records(b"", 1 << 30))]


def write(database: Database, rng: random.Random) -> None:
    """Write a batch: rows and records that are new, written again or removed."""
    batch = database.batch()
    for _ in range(rng.randrange(1, 5)):
        key = b"x%d" % rng.randrange(6)
        what = rng.randrange(5)
        if what == 0:
            batch.put(key, rng.randbytes(3))
        elif what == 1:
            batch.delete(key)
        elif what == 2:
            batch.delete_record(key)
        else:
            batch.put_record(key, rng.randbytes(1 + rng.randrange(5)))
    database.write(batch, 0, sync=False)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_killed_store_make_the_bucket_s_copy_whole(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    writer = Writer("f" * 32, SEALER, NO_HASH)
    database = Database.create(str(tmp_path / "ours"))
    database.make_mark(STREAM, 0)
    database.copier = Replica(STREAM, writer, lambda: 0)
    copy = Database.create(str(tmp_path / "copy"))
    copy.make_mark(STREAM, 0)
    landed = rng.randrange(10)
    for number in range(12):
        write(database, rng)
        writer.close_object()
        for flying in writer.take_off(0):
            if number < landed:
                writer.landed(flying)
                opened = SEALER.open(flying.key, flying.sealed)
                for entry in opened.entries:  # type: ignore[union-attr]  # of a journal
                    assert isinstance(entry, Rows)
                    batch = copy.batch()
                    batch.apply(entry.ops)
                    copy.write(batch, 0, sync=False)
    whole = content(database)
    database.close()
    database = Database.open(str(tmp_path / "ours"))
    for ops in redo(database, writer.known):
        batch = copy.batch()
        batch.apply(ops)
        copy.write(batch, 0, sync=False)
    assert content(copy) == whole
    database.close()
    copy.close()


def test_the_disk_has_the_value_of_a_record_once(tmp_path: Path) -> None:
    database = Database.create(str(tmp_path / "ours"))
    database.make_mark(STREAM, 0)
    database.copier = Replica(STREAM, Writer("f" * 32, SEALER, NO_HASH), lambda: 0)
    batch = database.batch()
    batch.put_record(b"x1", bytes(1 << 20))
    database.write(batch, 0, sync=False)
    assert sum(len(value) for _, value in database.rows(REDO_ROWS)) < 100
    ((op,),) = redo(database, 0)
    assert op.value == bytes(1 << 20)
    database.close()
