"""A look at RocksDB's journals before it replays them: the write-ahead logs, and the manifest in the same format.

RocksDB 9.8 loops for ever on the record types of recycled logs, which it never writes with our settings, and one flipped bit
makes such a type of an ordinary one. A store with many streams cannot have one of them stand still, so a journal with such a type is not
given to RocksDB. Only record headers are looked at (u32 crc | u16 length | u8 type, in blocks of 32 KiB); the rest
RocksDB checks itself.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

_BLOCK: Final = 32 << 10
_HEADER: Final = struct.Struct("<IHB")
_RECYCLED: Final = frozenset({5, 6, 7, 8, 11})
"""0 fills preallocated space, 1 to 4 are a whole record and the first, middle and last piece of one."""


def foreign_record(folder: str) -> str | None:
    """Return what is wrong with the journals in `folder`, None if RocksDB can judge them. Raises OSError."""
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".log" or path.name.startswith("MANIFEST-"):
            at = _foreign_at(path)
            if at is not None:
                return f"{path.name} has a record at byte {at} of a type that occurs only in recycled logs"
    return None


def disarm(folder: str) -> None:
    """Make such records in the journals in `folder` ordinary ones with a wrong checksum, which RocksDB takes for the damage that they are.

    Raises OSError.
    """
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".log" or path.name.startswith("MANIFEST-"):
            while (at := _foreign_at(path)) is not None:
                with path.open("r+b") as file:
                    file.seek(at + _HEADER.size - 1)
                    file.write(b"\1")


def _foreign_at(path: Path) -> int | None:
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
