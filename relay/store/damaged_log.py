"""Reads everything from a damaged log's database that RocksDB can still read.

The log is read in a copy of its directory, with hard links for the tables because nobody writes to
a table, so its own files do not change. RocksDB opens the copy with the undamaged part of the
write-ahead log. If the list of tables (MANIFEST, CURRENT) is damaged or does not name all existing
tables, RocksDB rebuilds it from the tables, and leaves out a damaged table.

An iterator ends at a damaged block. It is then set to a key after the block: first key by key,
since a block contains few keys, then in growing steps.
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
from relay.store.journal import neutralize
from relay.store.records import KEY, Item, decode

STEPS: Final = 65_536
"""Offsets that are tried one by one after damage, before the steps grow."""
_ROW_BYTES: Final = 40
"""Bytes of a row's key that are used as a number when searching for the first readable key after damage."""
_COPY_BYTES: Final = 64 << 10
_SEED: Final = b"\xff" * 20
"""A key that does not occur in any log."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedLog:
    """The readable part of the log at `path`.

    `scratch` is the directory for the copy, on the same disk; `close` removes it.

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
        """The list of tables was rebuilt."""
        self.unreadable_rows = False
        """A row outside the entries could not be read."""
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
        """Whether the rows outside the entries, as far as they were read, are certainly the latest
        that were written.
        """
        return self._whole and not self.repaired and not self.unreadable_rows

    def close(self) -> None:
        """Remove the copy. Idempotent."""
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
        """Yield key, value and decoded item of every undamaged entry, in order of offsets.

        Entries inside the range of an earlier entry are left out: a hole covers records that were
        removed when it was written.
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
        """Yield the rest of the key and the value of every readable row with this prefix."""
        if self._meta is None:
            return
        for key, value in _scan(self._meta, prefix, _ROW_BYTES, 0, self._missed):
            if key != _SEED:
                yield key[len(prefix) :], value

    def get(self, key: bytes) -> bytes | None:
        """Return the row at `key` outside the entries; None if there is none, or it cannot be read."""
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
        """Open the copy with the method that makes most messages readable."""
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
        """Open with the existing list of tables. Returns None if that fails."""
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
            self._add_seed_tables()
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
        """Return whether there are tables that the list of tables does not name."""
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
        neutralize(self._scratch)

    def _forget_config(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._scratch, CONFIG_NAME))

    def _add_seed_tables(self) -> None:
        """Add a table of each column family to the copy.

        When RocksDB rebuilds the list, it knows only from tables which column families the
        write-ahead log may contain.
        """
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
    """Raise OSError if RocksDB failed because the disk is full, which is not damage."""
    if "No space left" in str(err) or "quota exceeded" in str(err):
        raise OSError(errno.ENOSPC, str(err))


def _copy_readable(source: Path, copy: str) -> None:
    """Copy a file, with zeros for what cannot be read.

    Raises OSError if the source cannot be opened or the copy not written.
    """
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
    """Yield the keys with this prefix and their values, in order.

    At damage, call `missed` and continue after it.
    """
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
        found = _end_state(rows)


def _seek_behind(rows: RdictIter, prefix: bytes, bad: int, width: int, steps: int) -> bool | None:
    """Set the iterator to the first readable key after `bad`; return whether there is one."""
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
    """Set the iterator to `key` or the next one. Returns False if there is none, None if it cannot be read."""
    try:
        rows.seek(key)
    except Exception:  # rocksdict raises nothing narrower
        return None
    return True if rows.valid() else _end_state(rows)


def _end_state(rows: RdictIter) -> bool | None:
    """Return why an iterator ended: False at the last key, None at damage."""
    try:
        rows.status()
    except Exception:
        return None
    return False
