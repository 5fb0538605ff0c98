"""Ids of messages: what is appended again under an id that a stream remembers is stored once, whoever appends it.

A row for each id, and one for each by time, are written with the record; both go when the window has passed. The time is such that
nobody sets it (`Clock.elapsed_us`). Nothing is forgotten early: where there is no room for more ids, appends with one are refused.
"""

from __future__ import annotations

import struct
from typing import Final

from relay.store.database import Batch, Database
from relay.store.outcomes import Duplicate

MAX_IDS: Final = 1 << 20
"""Per stream; some 100 bytes on disk each, and nothing in memory."""
ID_BYTES: Final = 32
FORGET: Final = 1024
"""Rows that are looked at in one write."""
_ROW: Final = struct.Struct(">QIQ")
_TIME: Final = struct.Struct(">Q")


class Ids:
    """The ids of a log. `find` and `take` see what this batch took; `commit` or `forget` ends the batch."""

    def __init__(self, database: Database) -> None:
        """Raises LogDamaged."""
        self._database = database
        self._batch: dict[bytes, tuple[int, int]] = {}
        self._forgotten = 0
        self.count = sum(1 for _ in database.rows(b"q"))
        self.window_us = 0
        self.now_us = 0

    def find(self, id_hash: bytes) -> Duplicate | None:
        """Return where the message of this id is, if it is remembered. Raises LogDamaged, struct.error."""
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
        """Remember an id that was not found, in the write that stores its message."""
        old = self._database.get(b"h" + id_hash)
        if old is not None:  # its window has passed
            batch.delete(b"q" + _TIME.pack(_ROW.unpack(old)[2]) + id_hash)
            self._forgotten += 1
        self._batch[id_hash] = (first, count)
        batch.put(b"h" + id_hash, _ROW.pack(first, count, self.now_us))
        batch.put(b"q" + _TIME.pack(self.now_us) + id_hash, b"")

    def expire(self, batch: Batch) -> int:
        """Forget ids whose window has passed, some of them; return how many."""
        gone = 0
        for row, _ in self._database.rows(b"q"):
            (taken_us,) = _TIME.unpack_from(row)
            if taken_us + self.window_us > self.now_us or gone >= FORGET:
                break
            batch.delete(b"q" + row)
            batch.delete(b"h" + row[_TIME.size :])
            gone += 1
        self._forgotten += gone
        return gone

    def commit(self) -> None:
        """The batch is on disk."""
        self.count += len(self._batch) - self._forgotten
        self._batch, self._forgotten = {}, 0

    def forget(self) -> None:
        """The batch is not to be."""
        self._batch, self._forgotten = {}, 0
