"""What is written to a log's database at once, and lists of such writes, from which copies of it are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar, Final, Protocol

from msgspec import Meta, Struct
from rocksdict import ColumnFamily, WriteBatch

PUT: Final = 1
DELETE: Final = 2
DELETE_RANGE: Final = 3
PUT_RECORD: Final = 4
DELETE_RECORD: Final = 5
PLACE_ROW: Final = b"j"
REDO_ROWS: Final = b"r"
OWN_ROWS: Final = (PLACE_ROW, REDO_ROWS)
"""Rows of a database that its copies do not have."""
OP_BYTES: Final = 8
"""What a write counts besides its key and value."""


class Op(Struct, frozen=True, array_like=True, gc=False):
    """One write of a batch: PUT and so on; for DELETE_RANGE, `value` is the end of the range."""

    what: Annotated[int, Meta(ge=PUT, le=DELETE_RECORD)]
    key: bytes
    value: bytes = b""


class Batch:
    """A batch of writes: all of them reach the disk, or none."""

    __slots__ = ("_records", "raw")

    def __init__(self, records: ColumnFamily) -> None:
        self.raw = WriteBatch(raw_mode=True)
        self._records = records

    def put(self, key: bytes, value: bytes) -> None:
        self.raw.put(key, value)

    def delete(self, key: bytes) -> None:
        self.raw.delete(key)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self.raw.delete_range(begin, end)

    def put_record(self, key: bytes, value: bytes) -> None:
        self.raw.put(key, value, self._records)

    def delete_record(self, key: bytes) -> None:
        self.raw.delete(key, self._records)

    def apply(self, ops: Iterable[Op]) -> None:
        """Add writes that were made to another copy of the database."""
        for op in ops:
            self._APPLY[op.what](self, op)

    _APPLY: ClassVar[dict[int, Callable[[Batch, Op], None]]] = {
        PUT: lambda batch, op: batch.put(op.key, op.value),
        DELETE: lambda batch, op: batch.delete(op.key),
        DELETE_RANGE: lambda batch, op: batch.delete_range(op.key, op.value),
        PUT_RECORD: lambda batch, op: batch.put_record(op.key, op.value),
        DELETE_RECORD: lambda batch, op: batch.delete_record(op.key),
    }


class CopiedBatch(Batch):
    """A batch that also lists its writes, for another copy of the database."""

    __slots__ = ("ops", "size")

    def __init__(self, records: ColumnFamily) -> None:
        super().__init__(records)
        self.ops: list[Op] = []
        self.size = 0

    def put(self, key: bytes, value: bytes) -> None:
        super().put(key, value)
        self._list(PUT, key, value)

    def delete(self, key: bytes) -> None:
        super().delete(key)
        self._list(DELETE, key)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        super().delete_range(begin, end)
        self._list(DELETE_RANGE, begin, end)

    def put_record(self, key: bytes, value: bytes) -> None:
        super().put_record(key, value)
        self._list(PUT_RECORD, key, value)

    def delete_record(self, key: bytes) -> None:
        super().delete_record(key)
        self._list(DELETE_RECORD, key)

    def _list(self, what: int, key: bytes, value: bytes = b"") -> None:
        self.ops.append(Op(what, key, value))
        self.size += len(key) + len(value) + OP_BYTES


class Copier(Protocol):
    """Takes what is written to a database and makes it durable elsewhere, so writes here need no sync."""

    def writing(self, batch: CopiedBatch) -> None:
        """Called before a batch is written here; may add rows of its own to `batch.raw`."""

    def wrote(self, batch: CopiedBatch, next_offset: int) -> None:
        """Called after a batch was written here. `next_offset` is as for `Database.write`."""
