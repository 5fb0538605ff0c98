"""Records that are in the bucket and not in a log's database any more, and where they are.

    g first    u32 crc | MessagePack of `Moved`: an object of the bucket with the entries from `first` on
    y key      "i" or "d": an object that no row `g` names. An object that is about to be made, or one that was
               removed. Whoever holds the stream deletes it.

Rows `g` are written in the batch that takes the records out of the log, so a log has each record in one place. The
moved entries are the oldest ones, without a hole between them: everything below `end`. An object is made of chunks,
which are read and authenticated each by itself.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from relay.store.batches import Batch
from relay.store.database import Database
from relay.store.errors import LogDamaged, ObjectLost
from relay.store.records import KEY, Item, check_row, decode, encode_row

SEGMENT_ROWS: Final = b"g"
LEFT_ROWS: Final = b"y"
INTENDED: Final = b"i"
DROPPED: Final = b"d"
AHEAD: Final = 2
"""Chunks that are fetched before they are asked for."""

Rows = list[tuple[bytes, bytes]]
"""(key, value) of entries, as `records` encodes them."""


class Chunk(Struct, frozen=True, array_like=True):
    """A part of an object that is read by itself."""

    first: int
    """Offset of its first entry."""
    size: int
    """Its bytes in the object."""
    newest_us: int
    """When the newest of its entries was stored."""


class Moved(Struct, frozen=True, array_like=True):
    """An object of the bucket that has the entries from `first` until `next`."""

    first: int
    next: int
    key: str
    digest: bytes
    """SHA-256 of the object."""
    chunks: list[Chunk]
    due: list[tuple[int, int]]
    """(due time, offset) of its deferred records, whose rows `d` stay in the log."""

    def range_of(self, number: int) -> tuple[int, int]:
        """Return where a chunk begins and ends in the object, in bytes."""
        start = sum(chunk.size for chunk in self.chunks[:number])
        return start, start + self.chunks[number].size


class Reader(Protocol):
    """Reads chunks of objects."""

    reads: int
    """Requests to the bucket."""
    hits: int
    """Chunks that were there when they were asked for."""

    def rows(self, path: str, places: Sequence[tuple[Moved, int]]) -> Rows:
        """Return the entries of the first of these chunks; the others are likely to be asked for next.

        Raises:
            RecordsAway: it is being fetched. Try again when it is there.
            RecordsUnreachable: the bucket did not answer in time.
            LogDamaged: the object is missing, or is not what was written.
        """


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Moved).decode


class MovedRecords:
    """The objects of one log."""

    def __init__(self, database: Database) -> None:
        """Raises LogDamaged if the rows are inconsistent."""
        self._database = database
        self._path = database.path
        self.reader: Reader | None = None
        """None if the store has no bucket: moved records cannot be read then."""
        self.every: list[Moved] = []
        self.left: dict[str, bytes] = {}
        """Object that no row names -> INTENDED or DROPPED."""
        self._firsts: list[int] = []
        for row, value in database.rows(SEGMENT_ROWS):
            self._add(self._unpack(row, value))
        for row, value in database.rows(LEFT_ROWS):
            self.left[row.decode()] = value

    @property
    def end(self) -> int:
        """Offset up to which everything is in objects; 0 if there are none."""
        return self.every[-1].next if self.every else 0

    def walk(self, start: int, end: int) -> Iterator[tuple[Item, int]]:
        """Yield each entry and its size, from the entry that contains `start` until `end`.

        Raises as `Reader.rows`, also after some entries.
        """
        at = start
        while at < end:
            places = self._places(at)
            moved = places[0][0]
            if self.reader is None:
                raise ObjectLost(
                    self._path, f"object {moved.key} has the records, and this store has no bucket"
                )
            before = at
            for key, value in self.reader.rows(self._path, places):
                try:
                    item = decode(key, value)
                except ValueError as err:
                    raise ObjectLost(self._path, f"object {moved.key}: {err}") from err
                if at >= end:
                    return
                if item.next > at:
                    if item.first > at and at > start:
                        break
                    yield item, len(key) + len(value)
                    at = item.next
            if at == before:
                raise ObjectLost(self._path, f"object {moved.key} does not have offset {at}")

    def start_at(self, first: int, time_us: int) -> int:
        """Return where to look in the object that begins at `first` for what was stored at `time_us` or later."""
        moved = self.every[bisect_right(self._firsts, first) - 1]
        for chunk in moved.chunks:
            if chunk.newest_us >= time_us:
                return max(first, chunk.first)
        return first

    def intend(self, batch: Batch, key: str) -> None:
        """Note that an object is about to be made."""
        batch.put(LEFT_ROWS + key.encode(), INTENDED)
        self.left[key] = INTENDED

    def put(self, batch: Batch, moved: Moved) -> None:
        """Add an object that was made."""
        row = KEY.pack(moved.first)
        batch.put(SEGMENT_ROWS + row, encode_row(row, _encode(moved)))
        batch.delete(LEFT_ROWS + moved.key.encode())

    def added(self, moved: Moved) -> None:
        """The batch of `put` was written."""
        self.left.pop(moved.key, None)
        self._add(moved)

    def drop(self, batch: Batch) -> None:
        """Remove the first object from the log. It is deleted when this is known to be in the bucket."""
        moved = self.every[0]
        batch.delete(SEGMENT_ROWS + KEY.pack(moved.first))
        batch.put(LEFT_ROWS + moved.key.encode(), DROPPED)
        for due in moved.due:
            batch.delete(b"d" + _DUE.pack(*due))

    def dropped(self) -> None:
        """The batch of `drop` was written."""
        moved = self.every.pop(0)
        del self._firsts[0]
        self.left[moved.key] = DROPPED

    def give_up(self, batch: Batch, key: str) -> None:
        """Note that an object which was intended will not be used."""
        batch.put(LEFT_ROWS + key.encode(), DROPPED)
        self.left[key] = DROPPED

    def forget(self, batch: Batch, key: str) -> None:
        """Forget an object that was deleted."""
        batch.delete(LEFT_ROWS + key.encode())
        self.left.pop(key, None)

    def keys(self) -> list[str]:
        """Return the keys of all objects that there may be."""
        return [*(moved.key for moved in self.every), *self.left]

    @property
    def intended(self) -> list[str]:
        """The keys of objects of which nobody knows whether they were made."""
        return [key for key, why in self.left.items() if why == INTENDED]

    def _places(self, start: int) -> list[tuple[Moved, int]]:
        """Return the chunk that contains `start`, and the `AHEAD` next ones."""
        at = max(0, bisect_right(self._firsts, start) - 1)
        begin = bisect_right(self.every[at].chunks, start, key=lambda chunk: chunk.first) - 1
        places: list[tuple[Moved, int]] = []
        for moved in self.every[at : at + 1 + AHEAD]:
            places += [(moved, number) for number in range(max(0, begin), len(moved.chunks))]
            begin = 0
        return places[: 1 + AHEAD]

    def _add(self, moved: Moved) -> None:
        if self.every and moved.first != self.end:
            raise LogDamaged(self._path, "a row of moved records is missing", self.end)
        self.every.append(moved)
        self._firsts.append(moved.first)

    def _unpack(self, row: bytes, value: bytes) -> Moved:
        try:
            check_row(row, value)
            return _decode(value[4:])
        except (ValueError, struct.error, msgspec.DecodeError) as err:
            raise LogDamaged(self._path, f"a row of moved records is malformed: {err}") from err


_DUE: Final = struct.Struct(">QQ")
