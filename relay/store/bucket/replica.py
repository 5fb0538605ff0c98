"""The copy of one stream in its store's journal: every write to its database becomes an entry there.

Rows of the database that belong to the copy and are not part of it:

    j           journal | u64 number of the object that has, or will have, the last write
    r number    u64 number | u32 index -> the writes of one batch, until their object is in the bucket

A row `r` does not repeat the values of records. A record may have changed since, but then a later
row `r` changes it in the same way. A killed store has written more here than there. What is in rows
`r` is then added to its next journal, if nobody else has taken the old one meanwhile.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from iris.wire.stream_items import dead_uuid
from relay.store.batches import PLACE_ROW, PUT_RECORD, REDO_ROWS, CopiedBatch, Op
from relay.store.bucket.sealing import Ended, Rows
from relay.store.bucket.tail import Tail
from relay.store.bucket.writer import Output, Writer
from relay.store.database import Database
from relay.store.errors import LogDamaged
from relay.store.moved import Reader

REDO_END: Final = b"s"
ENDED_BYTES: Final = 32
_PLACE: Final = struct.Struct(">16sQ")
_REDO: Final = struct.Struct(">QI")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Op]).decode


class Place(Struct, frozen=True):
    """The last object of a journal that a database may have writes of."""

    journal: str
    number: int

    def pack(self) -> bytes:
        """Return the value of row `j`."""
        return _PLACE.pack(bytes.fromhex(self.journal), self.number)

    @classmethod
    def of(cls, database: Database) -> Place | None:
        """Return the place of a database; None if it has none."""
        row = database.get(PLACE_ROW)
        if row is None or len(row) != _PLACE.size:
            return None
        journal, number = _PLACE.unpack(row)
        return cls(journal.hex(), number)


class Replica:
    """Copies one stream's database to a journal. It is the database's `Copier`."""

    def __init__(
        self, uuid: bytes, writer: Writer, now_us: Callable[[], int], reader: Reader | None = None
    ) -> None:
        """`now_us` is a clock that is never set. `reader` reads what was moved to the bucket."""
        self.uuid = uuid
        self.reader = reader
        self.writer = writer
        self.last = 0
        """Number of the object that holds the stream's last write."""
        self.tail = Tail(writer)
        """The part of the stream that readers may see."""
        self._now_us = now_us
        self._redo: deque[tuple[int, bytes]] = deque()
        self._index = 0

    @property
    def settled(self) -> bool:
        """Whether everything that was written is known to be in the bucket."""
        return self.last <= self.writer.known

    def hold(self, output: Output, number: int | None = None) -> None:
        """Release `output` when the bucket has everything that was written so far, or only up to object `number`."""
        self.writer.hold(self.last if number is None else number, output)

    def ended(self) -> None:
        """The stream was deleted, with its dead letters."""
        for uuid in (dead_uuid(self.uuid), self.uuid):
            self.last = self.writer.add(Ended(uuid), ENDED_BYTES, self._now_us())

    def resume(self, database: Database, unsent: list[list[Op]]) -> None:
        """Add writes that an earlier journal of this store did not bring to the bucket. Raises LogWriteFailed."""
        batch = CopiedBatch(database.records_handle)
        batch.raw.delete_range(REDO_ROWS, REDO_END)
        for ops in unsent:
            batch.apply(ops)
        database.write(batch, 0, sync=False)

    # The database's copier

    def writing(self, batch: CopiedBatch) -> None:
        number = self.writer.number
        raw = batch.raw
        while self._redo and self._redo[0][0] <= self.writer.known:
            raw.delete(self._redo.popleft()[1])
        key, value = pack_redo(number, self._index, batch.ops)
        self._index += 1
        self._redo.append((number, key))
        raw.put(key, value)
        raw.put(PLACE_ROW, Place(self.writer.journal, number).pack())

    def wrote(self, batch: CopiedBatch, next_offset: int) -> None:
        self.last = self.writer.add(Rows(self.uuid, batch.ops), batch.size, self._now_us())
        self.tail.wrote(self.last, batch.ops, next_offset)


def pack_redo(number: int, index: int, ops: list[Op]) -> tuple[bytes, bytes]:
    """Return the row `r` of the `index`-th batch, whose object is `number`."""
    return REDO_ROWS + _REDO.pack(number, index), _encode([_by_key(op) for op in ops])


def redo(database: Database, after: int) -> list[list[Op]]:
    """Return the batches in rows `r` whose objects are numbered above `after`, in order.

    Raises LogDamaged.
    """
    try:
        return [
            [one for op in _decode(value) if (one := _whole(op, database)) is not None]
            for row, value in database.rows(REDO_ROWS)
            if _REDO.unpack(row)[0] > after
        ]
    except (struct.error, msgspec.DecodeError) as err:
        raise LogDamaged(database.path, f"a row 'r' is malformed: {err}") from err


def _by_key(op: Op) -> Op:
    """Return a write without the value of a record. No record is empty."""
    return Op(PUT_RECORD, op.key) if op.what == PUT_RECORD else op


def _whole(op: Op, database: Database) -> Op | None:
    """Return a write of a row `r` with the value that its record has now; None if it was removed since.

    Raises LogDamaged.
    """
    if op.what != PUT_RECORD or op.value:
        return op
    value = database.record(op.key)
    return None if value is None else Op(PUT_RECORD, op.key, value)


def move(database: Database, place: Place) -> None:
    """Set the place of a database, and forget its rows `r`. Raises LogWriteFailed."""
    batch = database.batch()
    batch.delete_range(REDO_ROWS, REDO_END)
    batch.put(PLACE_ROW, place.pack())
    database.write(batch, 0, sync=False)
