"""Sums over stretches of a log, so that retention and opening need not read bodies.

A segment sums up neighbouring entries. When it is full its summary is written in the same batch as its last
entry. A log opens by reading the summaries and the one unfinished stretch behind them; retention drops segments whole, and
where the limit falls within one it reads that one's *outline*: where its entries end and what they count, beside the summary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from msgspec import Struct

from relay.store.records import Gap, Hole, Item

SEGMENT_BYTES: Final = 8 << 20
SEGMENT_ENTRIES: Final = 8192
"""A segment is full at either. A TiB in large records is then 131,072 segments, about 25 MB in memory."""
_SUMMARY: Final = struct.Struct("<QQQQqQq")
_LINE: Final = struct.Struct("<QIIq")
"""Of an outline: offsets, bytes, messages, when stored."""


class Limits(Struct, frozen=True):
    """What a log keeps; None is no limit. What is over any of them goes, oldest first."""

    max_bytes: int | None = None
    """Sum of the stored keys and values. The disk holds more: see docs/decisions/0015."""
    max_age_us: int | None = None
    """Since the log stored it."""
    max_messages: int | None = None
    """Live messages; a gap counts one, holes none."""


class Segment:
    """Sums over the entries from `first` until `next`."""

    __slots__ = (
        "entries",
        "expires_us",
        "first",
        "indexed",
        "messages",
        "newest_us",
        "next",
        "size",
    )

    def __init__(self, first: int) -> None:
        self.first = first
        self.next = first
        self.size = 0
        """Bytes of keys and values."""
        self.entries = 0
        self.messages = 0
        self.newest_us = 0
        self.indexed = 0
        """Records with a key or a due time: they have rows elsewhere that go with them."""
        self.expires_us = 0
        """The earliest expiry, 0 = none."""

    @property
    def full(self) -> bool:
        return self.size >= SEGMENT_BYTES or self.entries >= SEGMENT_ENTRIES

    def add(self, slot: Slot) -> None:
        """Count the entry that follows the last one."""
        self.next = slot.next
        self.size += slot.size
        self.entries += 1
        self.messages += slot.messages
        self.newest_us = max(self.newest_us, slot.stored_us)
        self.indexed += slot.indexed
        if slot.expires_us:
            self.expires_us = min(self.expires_us or slot.expires_us, slot.expires_us)

    def drop(self, slot: Slot) -> None:
        """Take the first entry out. `first` and the times stay: they may be too early, never too late."""
        self.size -= slot.size
        self.entries -= 1
        self.messages -= slot.messages
        self.indexed -= slot.indexed

    def pack(self) -> bytes:
        """Return the summary; the key is `KEY.pack(first)`."""
        return _SUMMARY.pack(
            self.next,
            self.size,
            self.entries,
            self.messages,
            self.newest_us,
            self.indexed,
            self.expires_us,
        )

    @classmethod
    def unpack(cls, first: int, value: bytes) -> Segment:
        """Raises struct.error if `value` is no summary."""
        segment = cls(first)
        (
            segment.next,
            segment.size,
            segment.entries,
            segment.messages,
            segment.newest_us,
            segment.indexed,
            segment.expires_us,
        ) = _SUMMARY.unpack(value)
        return segment


class Slot(Struct, frozen=True, gc=False):
    """What the sums have to know of one entry."""

    first: int
    next: int
    size: int
    """Bytes of key and value."""
    messages: int
    """Live ones: a gap counts one, a hole none."""
    stored_us: int
    """0 in a hole: it is as old as can be."""
    key_hash: bytes | None = None
    due_us: int = 0
    """Of a deferred record, else 0."""
    expires_us: int = 0

    @property
    def indexed(self) -> bool:
        """It has rows of its own outside the records."""
        return self.key_hash is not None or self.due_us > 0

    @classmethod
    def of(cls, item: Item, size: int) -> Slot:
        match item:
            case Hole():
                return cls(item.first, item.next, size, 0, 0)
            case Gap():
                return cls(item.first, item.next, size, 1, item.stored_us)
        due_us = item.due_us if item.deferred else 0
        return cls(
            item.first,
            item.next,
            size,
            item.count,
            item.stored_us,
            item.key_hash,
            due_us,
            item.expires_us,
        )


def pack_outline(slots: Sequence[Slot]) -> bytes:
    """Return the outline of neighbouring entries without rows of their own elsewhere."""
    lines = b"".join(
        [
            _LINE.pack(slot.next - slot.first, slot.size, slot.messages, slot.stored_us)
            for slot in slots
        ]
    )
    return crc32(lines).to_bytes(4, "little") + lines


def unpack_outline(segment: Segment, row: bytes) -> list[Slot] | None:
    """Return the entries of a segment by its outline; None if it is not what was written: then they have to be read themselves."""
    if len(row) % _LINE.size != 4 or crc32(row[4:]) != int.from_bytes(row[:4], "little"):
        return None
    slots = []
    at = segment.first
    for length, size, messages, stored_us in _LINE.iter_unpack(row[4:]):
        slots.append(Slot(at, at + length, size, messages, stored_us))
        at += length
    return slots if at == segment.next else None
