"""RocksDB for logs: settings, the meaning of its errors, and a mark that proves that no synced
write is lost.

RocksDB cannot distinguish a write-ahead log that a power cut truncated from one that lost synced
writes to damage: depending on the recovery mode it refuses both, or silently drops both. So after
every sync the sequence number of the last synced write is written to the log's *mark*, a file of 44
bytes beside RocksDB's files, in place and without a sync of its own. After a crash of the process
the mark is exact; after a power cut it may be a few seconds behind, but it is never ahead of the
disk. A recovered log must reach its mark: less is damage, and a truncated end after the mark is
normal.

docs/decisions/0015 gives the reasons for the settings.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from zlib import crc32

from msgspec import Struct
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteOptions,
)

from iris.errors import Closed
from iris.keyfiles import sync_directory
from relay.store.batches import PUT, PUT_RECORD, Batch, CopiedBatch, Copier, Op
from relay.store.errors import LogBusy, LogDamaged, LogMissing, LogWriteFailed
from relay.store.files import read_small
from relay.store.journal import recycled_record

MARK_NAME: Final = "MARK"
CONFIG_NAME: Final = "rocksdict-config.json"
RECORDS: Final = "records"
_MARK: Final = struct.Struct("<16sQQ")
"""uuid, RocksDB sequence number, next offset; followed by a CRC-32."""
WRITE_BUFFER_BYTES: Final = 32 << 20
BLOCK_BYTES: Final = 32 << 10
CACHE_BYTES: Final = 8 << 20
READAHEAD_BYTES: Final = 1 << 20
OPEN_FILES: Final = 256


def check_room_to_open(path: str) -> None:
    """Return if the disk has room to open the database at `path`, which rewrites its journals as tables.

    Raises:
        LogWriteFailed: the disk is full.
    """
    probe = os.path.join(path, "PROBE")
    try:
        size = sum(file.stat().st_size for file in Path(path).glob("*.log"))
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size + (4 << 20))
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as err:
        raise LogWriteFailed(path, str(err)) from err


class Mark(Struct, frozen=True):
    """What a log must contain after recovery; with less it is damaged."""

    uuid: bytes
    sequence: int
    """RocksDB's sequence number of the last synced write."""
    next_offset: int


def read_mark(path: str) -> Mark:
    """Return the mark of the log at `path`. Raises LogDamaged."""
    try:
        packed = read_small(os.path.join(path, MARK_NAME))
    except OSError as err:
        raise LogDamaged(path, f"its file {MARK_NAME} cannot be read: {err}") from err
    if len(packed) != _MARK.size + 4 or crc32(packed[:-4]) != int.from_bytes(packed[-4:], "little"):
        raise LogDamaged(path, f"its file {MARK_NAME} is damaged")
    return Mark(*_MARK.unpack_from(packed))


def rocksdb_options(write_buffer: int, recovery: DBRecoveryMode, cache: Cache) -> Options:
    """Return the RocksDB settings of a log."""
    table = BlockBasedOptions()
    table.set_block_size(BLOCK_BYTES)
    table.set_block_cache(cache)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.create_missing_column_families(True)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(recovery)
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(write_buffer)
    options.set_max_total_wal_size(4 * WRITE_BUFFER_BYTES)
    options.set_max_open_files(OPEN_FILES)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_manifest_preallocation_size(64 << 10)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _rocksdb(path: str, recovery: DBRecoveryMode, access: AccessType) -> Rdict:
    # rocksdict writes this file at every open and never syncs it. It only says that keys are raw
    # bytes, which the options say too. A power cut can leave it empty, which must not make the log
    # unusable.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, CONFIG_NAME))
    cache = Cache(CACHE_BYTES)
    meta = rocksdb_options(WRITE_BUFFER_BYTES // 8, recovery, cache)
    records = rocksdb_options(WRITE_BUFFER_BYTES, recovery, cache)
    return Rdict(path, meta, {"default": meta, RECORDS: records}, access)


class Database:
    """One RocksDB database: `records` by offset in a column family of their own, all other rows by
    prefixed key.
    """

    def __init__(self, path: str, rocksdb: Rdict) -> None:
        self.path = path
        self._open = True
        self._meta = rocksdb
        self._records = rocksdb.get_column_family(RECORDS)
        self.records_handle = rocksdb.get_column_family_handle(RECORDS)
        self._synced = WriteOptions()
        self._synced.sync = True
        self._unsynced = WriteOptions()
        self._mark_fd = -1
        self._uuid = bytes(16)
        self.copier: Copier | None = None
        """Takes every write, and makes it durable."""
        self.failed: str | None = None
        """Why a write failed; None if none did.

        All later writes fail too, because RocksDB may hold half of the failed one.
        """

    @classmethod
    def create(cls, path: str) -> Database:
        """Create a database in the new directory `path` and return it; `make_mark` completes it.

        Raises:
            LogWriteFailed: the files could not be created.
        """
        try:
            os.mkdir(path)
            read_write = AccessType.read_write()
            return cls(path, _rocksdb(path, DBRecoveryMode.point_in_time(), read_write))
        except Exception as err:  # rocksdict raises nothing narrower
            raise LogWriteFailed(path, str(err)) from err

    @classmethod
    def open(cls, path: str) -> Database:
        """Open the database at `path`, with everything that its mark covers.

        Raises:
            LogMissing: the directory does not exist.
            LogBusy: another process or object has it open.
            LogDamaged: any other error. Files with data that the mark covers were not changed.
        """
        if not os.path.isdir(path):
            raise LogMissing(path, "the directory does not exist")
        mark = read_mark(path)
        if not os.path.exists(os.path.join(path, "CURRENT")):
            raise LogDamaged(path, "its file CURRENT is missing")
        try:
            if (foreign := recycled_record(path)) is not None:
                raise LogDamaged(path, foreign)
            database = cls(path, _recovered(path, mark.sequence))
            found = database._meta.latest_sequence_number()
        except (LogBusy, LogDamaged):
            raise
        except Exception as err:
            raise LogDamaged(path, str(err)) from err
        if found < mark.sequence:
            database.close()
            missing = f"{mark.sequence - found} synced writes are missing, up to offset {mark.next_offset}"
            raise LogDamaged(path, missing)
        database._uuid = mark.uuid
        try:
            database._mark_fd = os.open(os.path.join(path, MARK_NAME), os.O_RDWR | os.O_CLOEXEC)
        except OSError as err:
            database.close()
            raise LogDamaged(path, f"its file {MARK_NAME} cannot be written: {err}") from err
        return database

    @property
    def uuid(self) -> bytes:
        """The log's uuid, from its mark."""
        return self._uuid

    def batch(self) -> Batch:
        """Return an empty batch. Raises Closed."""
        self.check_open()
        if self.copier is not None:
            return CopiedBatch(self.records_handle)
        return Batch(self.records_handle)

    def check_open(self) -> None:
        """Raise Closed after `close`."""
        if not self._open:
            raise Closed(f"log {self.path} is closed")

    def make_mark(self, uuid: bytes, next_offset: int) -> None:
        """Create the mark and sync it.

        Raises:
            OSError: it could not be written.
        """
        self._uuid = uuid
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._mark_fd = os.open(os.path.join(self.path, MARK_NAME), flags, 0o600)
        self._write_mark(next_offset)
        os.fsync(self._mark_fd)
        sync_directory(self.path)

    def write(self, batch: Batch, next_offset: int, *, sync: bool) -> None:
        """Write `batch`. With `sync`, return when this and all earlier writes are on disk and the mark is
        updated.

        Raises:
            LogWriteFailed: the batch may or may not be there after a reopen; later writes raise too.
        """
        if self.failed is not None:
            raise LogWriteFailed(self.path, self.failed)
        copied = batch if isinstance(batch, CopiedBatch) and self.copier is not None else None
        if copied is not None and self.copier is not None:
            self.copier.writing(copied)
            sync = False
        try:
            self._meta.write(batch.raw, self._synced if sync else self._unsynced)
            if sync:
                self._write_mark(next_offset)
        except Exception as err:
            self.failed = str(err)
            raise LogWriteFailed(self.path, self.failed) from err
        if copied is not None and self.copier is not None:
            self.copier.wrote(copied, next_offset)

    def get(self, key: bytes) -> bytes | None:
        """Return the row at `key` outside the records; None if there is none.

        Raises LogDamaged if it cannot be read.
        """
        self.check_open()
        try:
            value: bytes | None = self._meta.get(key)
        except Exception as err:
            raise LogDamaged(self.path, str(err)) from err
        return value

    def record(self, key: bytes) -> bytes | None:
        """Return the record at `key`; None if there is none. Raises LogDamaged if it cannot be read."""
        self.check_open()
        try:
            value: bytes | None = self._records.get(key)
        except Exception as err:
            raise LogDamaged(self.path, str(err)) from err
        return value

    def rows(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rest of each key with this `prefix`, from `start` on, and its value.

        Raises:
            LogDamaged: RocksDB stopped early. Its iterator simply ends at a damaged block; only its
                status shows the error.
        """
        self.check_open()
        try:
            rows = self._meta.iter()
            rows.seek(prefix + start)
            while rows.valid():
                key = rows.key()
                if not key.startswith(prefix):
                    break
                yield key[len(prefix) :], rows.value()
                rows.next()
            rows.status()
        except Exception as err:
            raise LogDamaged(self.path, str(err)) from err

    def copy_rows(self, after: bytes, skip: tuple[bytes, ...], max_bytes: int) -> list[Op]:
        """Return about `max_bytes` of the rows behind the key `after`, outside the records, as writes; none at
        their end. Keys that begin with one of `skip` are left out.

        Raises LogDamaged.
        """
        ops: list[Op] = []
        size = 0
        for key, value in self.rows(b"", after):
            if key != after and not key.startswith(skip):
                ops.append(Op(PUT, key, value))
                size += len(key) + len(value)
                if size >= max_bytes:
                    break
        return ops

    def copy_records(self, start: bytes, max_bytes: int) -> list[Op]:
        """Return about `max_bytes` of the records from the key `start` on, as writes; none at their end.

        Raises LogDamaged.
        """
        ops: list[Op] = []
        size = 0
        try:
            rows = self.records()
            rows.seek(start)
            while rows.valid() and size < max_bytes:
                ops.append(Op(PUT_RECORD, rows.key(), rows.value()))
                size += len(ops[-1].key) + len(ops[-1].value)
                rows.next()
            rows.status()
        except Exception as err:  # rocksdict raises nothing narrower
            raise LogDamaged(self.path, str(err)) from err
        return ops

    def records(self) -> RdictIter:
        """Return an iterator over the records. The caller must check that the entries are contiguous."""
        self.check_open()
        options = ReadOptions()
        options.set_readahead_size(READAHEAD_BYTES)
        return self._records.iter(options)

    def first_record(self, default: int) -> int:
        """Return the lowest offset on disk, including removed entries whose space is not freed yet;
        `default` if none.
        """
        try:
            rows = self._records.iter()
            rows.seek_to_first()
            rows.status()
            return int.from_bytes(rows.key(), "big") if rows.valid() else default
        except Exception as err:
            raise LogDamaged(self.path, str(err)) from err

    def free(self, begin: bytes, end: bytes) -> None:
        """Free the disk space of the records from `begin` until `end`. The caller has already moved
        `oldest` past them.

        The range tombstone is flushed into a file of its own and compacted at once. In one file
        with new records it would pull the whole log into the next compaction.

        Raises:
            LogWriteFailed: as `write`.
        """
        self.check_open()
        try:
            self._records.flush()
            self._records.delete_range(begin, end)
            self._records.flush()
            self._records.compact_range(begin, end)
        except Exception as err:
            self.failed = str(err)
            raise LogWriteFailed(self.path, self.failed) from err

    def compact_rows(self, begin: bytes, end: bytes) -> None:
        """Free the disk space of the deleted rows from `begin` until `end`, outside the records.

        Raises LogWriteFailed, as `write`.
        """
        self.check_open()
        try:
            self._meta.flush()
            self._meta.compact_range(begin, end)
        except Exception as err:
            self.failed = str(err)
            raise LogWriteFailed(self.path, self.failed) from err

    def close(self) -> None:
        """Close the files. Idempotent. Errors here do not affect what was synced."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(Exception):
            self._records.close()
        with contextlib.suppress(Exception):
            self._meta.close()
        # RocksDB releases its lock with the last reference.
        del self._records, self._meta, self.records_handle
        if self._mark_fd >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._mark_fd)
            os.close(self._mark_fd)
            self._mark_fd = -1

    def _write_mark(self, next_offset: int) -> None:
        packed = _MARK.pack(self._uuid, self._meta.latest_sequence_number(), next_offset)
        os.pwrite(self._mark_fd, packed + crc32(packed).to_bytes(4, "little"), 0)


def _recovered(path: str, sequence: int) -> Rdict:
    """Open `path`. If the write-ahead log is damaged, open it only if nothing up to `sequence` is lost.

    RocksDB deletes a write-ahead log after recovering what it could. So the strict mode is tried
    first, which accepts a log that merely ends early. A log that it refuses is inspected read-only
    before anything is changed.
    """
    try:
        mode = DBRecoveryMode.tolerate_corrupted_tail_records()
        return _rocksdb(path, mode, AccessType.read_write())
    except Exception as err:
        if "/LOCK:" in str(err):
            raise LogBusy(path, "it is open in another process, or twice in this one") from err
        refusal = err
    mode = DBRecoveryMode.point_in_time()
    look = _rocksdb(path, mode, AccessType.read_only(False))
    found = look.latest_sequence_number()
    look.close()
    del look
    if found < sequence:
        raise LogDamaged(path, str(refusal)) from refusal
    return _rocksdb(path, mode, AccessType.read_write())
