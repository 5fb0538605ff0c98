"""Which log a log is, and how an empty one begins on disk."""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

from msgspec import Struct

from relay.store.database import Database
from relay.store.records import KEY

_IDENTITY: Final = struct.Struct("<B16sQq")
_FORMAT: Final = 1


class Identity(Struct, frozen=True):
    """Which log it is: row `i`."""

    uuid: bytes
    epoch: int
    created_us: int
    definition: bytes

    def pack(self) -> bytes:
        """Return the row."""
        rest = _IDENTITY.pack(_FORMAT, self.uuid, self.epoch, self.created_us) + self.definition
        return crc32(rest).to_bytes(4, "little") + rest

    @classmethod
    def unpack(cls, row: bytes) -> Identity:
        """Raises ValueError if the row is not one that this version wrote."""
        if len(row) < 4 + _IDENTITY.size or crc32(row[4:]) != int.from_bytes(row[:4], "little"):
            raise ValueError("its identity is damaged")
        version, uuid, epoch, created_us = _IDENTITY.unpack_from(row, 4)
        if version != _FORMAT:
            raise ValueError(f"its format is {version}, not {_FORMAT}")
        return cls(uuid, epoch, created_us, row[4 + _IDENTITY.size :])


def make(path: str, uuid: bytes, identity: bytes) -> None:
    """Write an empty log and close it. Raises LogWriteFailed, OSError.

    A function of its own, so that nothing of it is left when the directory gets its name: RocksDB's lock on the file is gone
    for all of this process as soon as any descriptor of it is closed.
    """
    database = Database.create(path)
    try:
        database.make_mark(uuid, 0)
        batch = database.batch()
        batch.put(b"i", identity)
        batch.put(b"o", KEY.pack(0))
        batch.put(b"n", KEY.pack(0))
        database.write(batch, 0, sync=True)
    finally:
        database.close()
