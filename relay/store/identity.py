"""The identity of a log (row `i`), and the creation of an empty log on disk."""

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
    """Row `i` of a log: which log it is, and its definition."""

    uuid: bytes
    epoch: int
    created_us: int
    definition: bytes

    def pack(self) -> bytes:
        """Return the row's value."""
        rest = _IDENTITY.pack(_FORMAT, self.uuid, self.epoch, self.created_us) + self.definition
        return crc32(rest).to_bytes(4, "little") + rest

    @classmethod
    def unpack(cls, row: bytes) -> Identity:
        """Return the identity of a row. Raises ValueError if the row is damaged or of another format."""
        if len(row) < 4 + _IDENTITY.size or crc32(row[4:]) != int.from_bytes(row[:4], "little"):
            raise ValueError("row 'i', its identity, is damaged")
        version, uuid, epoch, created_us = _IDENTITY.unpack_from(row, 4)
        if version != _FORMAT:
            raise ValueError(
                f"its format is version {version}, but this store reads version {_FORMAT}, so upgrade it"
            )
        return cls(uuid, epoch, created_us, row[4 + _IDENTITY.size :])


def make(path: str, identity: Identity, oldest: int = 0) -> Database:
    """Create an empty log that begins at `oldest`, and return its open database.

    Raises LogWriteFailed, OSError.
    """
    database = Database.create(path)
    try:
        database.make_mark(identity.uuid, oldest)
        batch = database.batch()
        batch.put(b"i", identity.pack())
        batch.put(b"o", KEY.pack(oldest))
        batch.put(b"n", KEY.pack(oldest))
        database.write(batch, oldest, sync=True)
    except BaseException:
        database.close()
        raise
    return database
