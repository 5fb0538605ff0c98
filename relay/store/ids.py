"""Message ids: a message that is appended again with an id that the stream remembers is stored
once, whoever appends it.

Two rows per id, one by id and one by time, are written with the record and deleted when the dedup
window has passed. The window uses `Clock.elapsed_us`, which nobody can set. No id is forgotten
early: when a stream is full of ids, appends with an id are refused.
"""

from __future__ import annotations

import struct
from typing import Final

from relay.store.batches import Batch
from relay.store.database import Database
from relay.store.outcomes import Duplicate

MAX_IDS: Final = 1 << 20
"""Limit per stream. Each id takes about 100 bytes on disk, and nothing in memory."""
ID_BYTES: Final = 32
FORGET: Final = 1024
"""Ids that one write deletes at most."""
_ROW: Final = struct.Struct(">QIQ")
_TIME: Final = struct.Struct(">Q")


def check_id(key: bytes, value: bytes) -> None:
    """Raise ValueError unless this is one of the two rows of an id, with its prefix."""
    sizes = {b"h": (ID_BYTES, _ROW.size), b"q": (_TIME.size + ID_BYTES, 0)}[key[:1]]
    if (len(key) - 1, len(value)) != sizes:
        raise ValueError("the row of a message id is malformed")


class Ids:
    """The message ids of a log.

    `find` and `take` include the ids of the current batch, which `commit` or `forget` ends.
    """

    def __init__(self, database: Database) -> None:
        """Count the ids of the log. Raises LogDamaged."""
        self._database = database
        self._batch: dict[bytes, tuple[int, int]] = {}
        self._forgotten = 0
        self.count = sum(1 for _ in database.rows(b"q"))
        self.window_us = 0
        self.now_us = 0

    def find(self, id_hash: bytes) -> Duplicate | None:
        """Return the offsets of the message with this id; None if it is not remembered.

        Raises LogDamaged, struct.error.
        """
        found = self._batch.get(id_hash)
        if found is None:
            row = self._database.get(b"h" + id_hash)
            if row is None:
                return None
            first, count, taken_us = _ROW.unpack(row)
            if taken_us + self.window_us <= self.now_us:
                return None
            found = (first, count)
        return Duplicate(found[0], found[0] + found[1])

    def take(self, batch: Batch, id_hash: bytes, first: int, count: int) -> None:
        """Add an id that `find` did not find to the write that stores its message."""
        old = self._database.get(b"h" + id_hash)
        if old is not None:  # its window has passed
            batch.delete(b"q" + _TIME.pack(_ROW.unpack(old)[2]) + id_hash)
            self._forgotten += 1
        self._batch[id_hash] = (first, count)
        batch.put(b"h" + id_hash, _ROW.pack(first, count, self.now_us))
        batch.put(b"q" + _TIME.pack(self.now_us) + id_hash, b"")

    def expire(self, batch: Batch) -> int:
        """Add the deletion of some ids whose window has passed to a write; return how many."""
        expired = 0
        for row, _ in self._database.rows(b"q"):
            (taken_us,) = _TIME.unpack_from(row)
            if taken_us + self.window_us > self.now_us or expired >= FORGET:
                break
            batch.delete(b"q" + row)
            batch.delete(b"h" + row[_TIME.size :])
            expired += 1
        self._forgotten += expired
        return expired

    def commit(self) -> None:
        """End the batch, which is on disk."""
        self.count += len(self._batch) - self._forgotten
        self._batch, self._forgotten = {}, 0

    def forget(self) -> None:
        """Discard the batch, which was not written."""
        self._batch, self._forgotten = {}, 0
