"""A damaged log's database, read as far as it can be: everything that RocksDB still gives, and nothing else.

It is read in a copy of its directory (tables as hard links: nobody writes to a table), so the files themselves stay as they are.
RocksDB opens the copy with as much of the write-ahead log as is whole. Where its directory of tables (MANIFEST, CURRENT) is damaged,
or does not name all tables that are there, RocksDB makes another from the tables themselves; it leaves out a damaged table then.

An iterator ends where a block is damaged. It is set behind it: place by place first, since a block holds few, then in growing steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from rocksdict import AccessType, Cache, DBRecoveryMode, Options, Rdict, RdictIter, ReadOptions

from relay.store.database import (
    CACHE_BYTES,
    CONFIG_NAME,
    MARK_NAME,
    READAHEAD_BYTES,
    RECORDS,
    Mark,
    read_mark,
    rocksdb_options,
)
from relay.store.errors import LogDamaged, LogWriteFailed
from relay.store.journal import disarm
from relay.store.records import KEY, Item, decode

STEPS: Final = 65_536
"""So many offsets are tried one by one behind a damaged place."""
_ROW_BYTES: Final = 40
"""Of a row's key these say where it is, when the way behind a damaged place is looked for."""
_COPY_BYTES: Final = 64 << 10
_SEED: Final = b"\xff" * 20
"""A key that no log has."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedLog:
    """What can be read of the log at `path`. `scratch` is a directory for the copy, on the same disk; `close` removes it.

    Raises:
        LogWriteFailed: there is no room for the copy.
        PermissionError: a file may not be read.
    """

    def __init__(self, path: str, scratch: str) -> None:
        self.path = path
        self._scratch = scratch
        self.mark: Mark | None = None
        with contextlib.suppress(LogDamaged):
            self.mark = read_mark(path)
        self.repaired = False
        """The tables were found without their directory."""
        self.unreadable_rows = False
        """Something besides the entries could not be read."""
        self._whole = False
        self._meta: Rdict | None = None
        self._records: Rdict | None = None
        try:
            self._choose()
        except OSError as err:
            self.close()
            if err.errno in _FULL:
                raise LogWriteFailed(path, str(err)) from err
            raise
        except BaseException:
            self.close()
            raise

    @property
    def current(self) -> bool:
        """Whether the rows besides the entries are surely the last that were written, as far as they were read."""
        return self._whole and not self.repaired and not self.unreadable_rows

    def close(self) -> None:
        """Give the copy up. Idempotent."""
        self._release()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> DamagedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    # -- reading ---------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[bytes, bytes, Item]]:
        """Yield key, value and meaning of every entry that is what was written there, in order of offsets.

        What lies within an entry before it is left out: a hole covers what was there before it was made.
        """
        at = 0
        if self._records is None:
            return
        for key, value in _scan(self._records, b"", KEY.size, STEPS):
            if len(key) != KEY.size:
                continue
            try:
                item = decode(key, value)
            except ValueError:
                continue
            if at <= item.first < item.next:
                yield key, value, item
                at = item.next

    def rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield what can be read of the rows with this prefix: the rest of the key, and the value."""
        if self._meta is None:
            return
        for key, value in _scan(self._meta, prefix, _ROW_BYTES, 0, self._missed):
            if key != _SEED:
                yield key[len(prefix) :], value

    def get(self, key: bytes) -> bytes | None:
        """Return what is at `key` outside the entries; None if there is nothing, or it cannot be read."""
        if self._meta is None:
            return None
        try:
            value: bytes | None = self._meta.get(key)
        except Exception:  # rocksdict raises nothing narrower
            self._missed()
            return None
        return value

    def _missed(self) -> None:
        self.unreadable_rows = True

    # -- opening ---------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Open the copy in the way that gives most."""
        found = self._open_as_it_is()
        if found is not None and not self._unnamed_tables():
            return
        as_it_is = -1 if found is None else self._count()
        self._release()
        repaired = self._count() if self._open_repaired() else -1
        if as_it_is >= repaired:
            self._release()
            self._open_as_it_is()

    def _open_as_it_is(self) -> bool | None:
        """Open with the directory of tables as it is; None if that fails."""
        self._copy()
        self.repaired = self._whole = False
        if self.mark is not None and self._attach(DBRecoveryMode.point_in_time()):
            assert self._meta is not None
            if self._meta.latest_sequence_number() >= self.mark.sequence:
                self._whole = True
                return True
        self._release()
        return self._attach(DBRecoveryMode.skip_any_corrupted_record()) or None

    def _open_repaired(self) -> bool:
        self._copy()
        self.repaired, self._whole = True, False
        try:
            self._plant()
            self._forget_config()
            Rdict.repair(self._scratch, _options(DBRecoveryMode.skip_any_corrupted_record()))
        except OSError:
            raise
        except Exception as err:
            _check_room(err)
            return False
        return self._attach(DBRecoveryMode.skip_any_corrupted_record())

    def _attach(self, mode: DBRecoveryMode) -> bool:
        self._forget_config()
        options = _options(mode)
        try:
            families = {"default": options, RECORDS: options}
            self._meta = Rdict(self._scratch, options, families, AccessType.read_only(False))
            self._records = self._meta.get_column_family(RECORDS)
        except Exception as err:
            _check_room(err)
            self._release()
            return False
        return True

    def _release(self) -> None:
        for database in (self._records, self._meta):
            if database is not None:
                with contextlib.suppress(Exception):
                    database.close()
        self._records = self._meta = None

    def _count(self) -> int:
        return sum(item.next - item.first for _, _, item in self.entries())

    def _unnamed_tables(self) -> bool:
        """Whether there are tables that the directory of tables does not name."""
        assert self._meta is not None
        named = {os.path.basename(str(file["name"])) for file in self._meta.live_files()}
        return any(table.name not in named for table in Path(self._scratch).glob("*.sst"))

    def _copy(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        os.mkdir(self._scratch, 0o700)
        for file in sorted(Path(self.path).iterdir()):
            if not file.is_file() or file.name.startswith("LOG") or file.name == MARK_NAME:
                continue
            copy = os.path.join(self._scratch, file.name)
            if file.suffix == ".sst":
                with contextlib.suppress(OSError):
                    os.link(file, copy)
                    continue
            _copy_readable(file, copy)
        disarm(self._scratch)

    def _forget_config(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._scratch, CONFIG_NAME))

    def _plant(self) -> None:
        """Put a table of each kind into the copy: RocksDB knows by tables alone which kinds there are in the write-ahead log."""
        seed = os.path.join(self._scratch, "seed")
        options = _options(DBRecoveryMode.point_in_time())
        options.create_if_missing(True)
        families = {"default": options, RECORDS: options}
        meta = Rdict(seed, options, families, AccessType.read_write())
        records = meta.get_column_family(RECORDS)
        for database in (meta, records):
            database.put(_SEED, b"")
            database.flush()
        records.close()
        meta.close()
        numbers = [int(f.stem) for f in Path(self._scratch).iterdir() if f.stem.isdigit()]
        for number, table in enumerate(sorted(Path(seed).glob("*.sst")), max(numbers, default=0)):
            os.rename(table, os.path.join(self._scratch, f"{number + 1:06}.sst"))
        shutil.rmtree(seed, ignore_errors=True)


def _options(mode: DBRecoveryMode) -> Options:
    options = rocksdb_options(4 << 20, mode, Cache(CACHE_BYTES))
    options.set_paranoid_checks(False)
    return options


def _check_room(err: Exception) -> None:
    """Raise OSError if that is what an error of RocksDB is for: a full disk is not damage."""
    if "No space left" in str(err) or "quota exceeded" in str(err):
        raise OSError(errno.ENOSPC, str(err))


def _copy_readable(source: Path, copy: str) -> None:
    """Copy a file; what the disk does not give becomes zeros. Raises OSError if the copy cannot be written, or nothing may be read."""
    with source.open("rb", buffering=0) as file, open(copy, "wb") as out:
        size = os.fstat(file.fileno()).st_size
        for at in range(0, size, _COPY_BYTES):
            length = min(_COPY_BYTES, size - at)
            try:
                data = os.pread(file.fileno(), length, at)
            except OSError:
                data = b""
            out.write(data.ljust(length, b"\0"))


def _scan(
    database: Rdict, prefix: bytes, width: int, steps: int, missed: object = None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys with this prefix, and their values, in order; go on behind what cannot be read, and call `missed`."""
    options = ReadOptions()
    options.set_readahead_size(READAHEAD_BYTES)
    rows = database.iter(options)
    key = prefix
    found = _seek(rows, key)
    while True:
        if found is None:
            if callable(missed):
                missed()
            place = int.from_bytes(key[len(prefix) :][:width].ljust(width, b"\0"), "big")
            found = _seek_behind(rows, prefix, place, width, steps)
        if not found:
            return
        while rows.valid():
            key = rows.key()
            if not key.startswith(prefix):
                return
            yield key, rows.value()
            rows.next()
        found = _state(rows)


def _seek_behind(rows: RdictIter, prefix: bytes, bad: int, width: int, steps: int) -> bool | None:
    """Set the iterator to what can be read behind place `bad`; return whether there is anything."""
    last = (1 << (8 * width)) - 1

    def readable(place: int) -> bool | None:
        return _seek(rows, prefix + place.to_bytes(width, "big"))

    for _ in range(steps):
        bad += 1
        if bad > last:
            return False
        if (found := readable(bad)) is not None:
            return found
    step = 1
    while (good := bad + step) <= last:
        if readable(good) is not None:
            break
        bad, step = good, 2 * step
    else:
        return False
    while good - bad > 1:
        middle = (bad + good) // 2
        if readable(middle) is None:
            bad = middle
        else:
            good = middle
    return readable(good)


def _seek(rows: RdictIter, key: bytes) -> bool | None:
    """Set the iterator to `key` or what follows it: True; False if nothing does, None if that cannot be read."""
    try:
        rows.seek(key)
    except Exception:  # rocksdict raises nothing narrower
        return None
    return True if rows.valid() else _state(rows)


def _state(rows: RdictIter) -> bool | None:
    """Return why an iterator ended: False at the end, None where it cannot read on."""
    try:
        rows.status()
    except Exception:
        return None
    return False
