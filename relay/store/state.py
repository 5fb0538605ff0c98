"""What a log has besides its records, in rows that can be carried to a copy of it, which is to take its place.

    c consumers   h, q message ids   l due time that was listed   p producers
    t, u staged records   v plans   w writers

The records are copied as by a mirror. What the copy derives from them by itself (key hashes, due times, summaries) is
not carried. Times in these rows are those of the store's clock, as if another store of a bucket had taken over.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from iris.errors import IrisError
from iris.wire.streams import MAX_COPY_ITEMS, MAX_STATE_KEY_BYTES, StateRow, StateRows
from relay.store import cursor
from relay.store.cursors import MAX_CURSOR_BYTES, MAX_CURSOR_NAME_BYTES, MAX_CURSORS
from relay.store.database import Database
from relay.store.ids import MAX_IDS, check_id
from relay.store.plans import MAX_PLANS, check_plan
from relay.store.producers import MAX_PRODUCERS, check_producer
from relay.store.staged_rows import MAX_WRITERS, ROW_BYTES, STAGED_BYTES, check_staged

STATE_BYTES: Final = 512 << 10
"""Bytes of rows in an answer, which has at least one row."""
MOST: Final = {
    b"c": MAX_CURSORS, b"h": MAX_IDS, b"l": 1, b"p": MAX_PRODUCERS, b"q": MAX_IDS, b"t": STAGED_BYTES // ROW_BYTES,
    b"u": STAGED_BYTES // ROW_BYTES, b"v": MAX_PLANS, b"w": MAX_WRITERS,
}  # fmt: skip
"""Prefix -> how many rows of it a log has at most."""


def rows_behind(database: Database, after: bytes) -> StateRows:
    """Return the next rows of a log's state behind the key `after`. Raises LogDamaged."""
    found: list[StateRow] = []
    size = 0
    for prefix in MOST:
        if prefix < after[:1]:
            continue
        start = after[1:] if after[:1] == prefix else b""
        for rest, value in database.rows(prefix, start):
            key = prefix + rest
            if key == after:
                continue
            if found and (
                size + len(key) + len(value) > STATE_BYTES or len(found) >= MAX_COPY_ITEMS
            ):
                return StateRows(found, True)
            found.append(StateRow(key, value))
            size += len(key) + len(value)
    return StateRows(found)


class Carried:
    """What was carried to a copy so far. Rows come in the order of their keys; a row that comes again is skipped."""

    def __init__(self) -> None:
        self._last = b""
        self._counts = dict.fromkeys(MOST, 0)
        self._staged = 0

    def new(self, rows: Sequence[StateRow], end: int) -> list[StateRow]:
        """Return the rows that have not come yet, for a log that ends at `end`.

        Raises ValueError if one of them is malformed, or if there are too many.
        """
        found = [row for row in rows if row.key > self._last]
        for row in found:
            prefix = row.key[:1]
            if row.key <= self._last or prefix not in MOST:
                raise ValueError(
                    "rows: they must be rows of a stream's state, in the order of their keys"
                )
            self._last = row.key
            try:
                _check(row.key, row.value, end)
            except (
                IrisError,
                msgspec.DecodeError,
                struct.error,
                IndexError,
                UnicodeDecodeError,
            ) as err:
                raise ValueError(f"rows: a row {prefix.decode()!r} is malformed: {err}") from err
            self._counts[prefix] += 1
            self._staged += len(row.value) + ROW_BYTES if prefix == b"t" else 0
            if self._counts[prefix] > MOST[prefix] or self._staged > STAGED_BYTES:
                raise ValueError(f"rows: more rows {prefix.decode()!r} than a stream can have")
        return found


def _check(key: bytes, value: bytes, end: int) -> None:
    """Raise an exception unless this is a row of the state of a log that ends at `end`."""
    match key[:1]:
        case b"c":
            state = cursor.decode(name := key[1:].decode(), value)
            if not name or len(key) - 1 > MAX_CURSOR_NAME_BYTES or len(value) > MAX_CURSOR_BYTES:
                raise ValueError("a cursor is too long")
            if not 0 <= state.start <= state.position <= end:
                raise ValueError(
                    f"consumer {name!r} is at {state.position}, beyond the end of the log, {end}"
                )
        case b"h" | b"q":
            check_id(key, value)
        case b"p":
            check_producer(key[1:], value)
        case b"v":
            check_plan(key[1:], value)
        case b"t" | b"u" | b"w":
            check_staged(key, value)
        case _:  # one row each, of 8 bytes
            if len(key) != 1 or len(value) != 8:
                raise ValueError("it has 8 bytes")


assert max(1 + MAX_CURSOR_NAME_BYTES, 1 + 1 + 255 + 8 + 16 + 8) <= MAX_STATE_KEY_BYTES
