"""Checks RocksDB's journals before RocksDB replays them: the write-ahead logs, and the manifest,
which has the same format.

RocksDB 9.8 loops forever on the record types of recycled logs. It never writes them with our
settings, but one flipped bit can turn an ordinary type into such a type. One stream must not block
a store with many others, so a journal with such a type is not passed to RocksDB. Only record
headers are checked (u32 crc | u16 length | u8 type, in blocks of 32 KiB); RocksDB checks the rest.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

_BLOCK: Final = 32 << 10
_HEADER: Final = struct.Struct("<IHB")
_RECYCLED: Final = frozenset({5, 6, 7, 8, 11})
"""The types of recycled logs.

Type 0 fills preallocated space; 1 to 4 are a whole record and the first, middle and last part of
one.
"""


def recycled_record(folder: str) -> str | None:
    """Return what is wrong with the journals in `folder`; None if RocksDB can check them. Raises OSError."""
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".log" or path.name.startswith("MANIFEST-"):
            at = _recycled_at(path)
            if at is not None:
                return f"{path.name} has a record at byte {at} of a type that occurs only in recycled logs"
    return None


def neutralize(folder: str) -> None:
    """Change the type of such records in `folder` to an ordinary one. Their checksum is then wrong,
    which RocksDB treats as damage.

    Raises OSError.
    """
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".log" or path.name.startswith("MANIFEST-"):
            while (at := _recycled_at(path)) is not None:
                with path.open("r+b") as file:
                    file.seek(at + _HEADER.size - 1)
                    file.write(b"\1")


def _recycled_at(path: Path) -> int | None:
    size = path.stat().st_size
    if size == 0:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for block in range(0, size, _BLOCK):
            end = min(block + _BLOCK, size)
            at = block
            while at + _HEADER.size <= end:
                _, length, kind = _HEADER.unpack_from(data, at)
                if kind in _RECYCLED:
                    return at
                if kind == 0 and length == 0:
                    break
                at += _HEADER.size + length
    return None
