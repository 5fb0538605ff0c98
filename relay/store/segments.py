"""Sums over sections of a log, so that retention and opening do not have to read bodies.

A segment sums up adjacent entries. When it is full, its summary is written in the same batch as its
last entry. To open a log, the summaries and the unfinished section after them are read. Retention
drops whole segments; where a limit falls inside a segment, it reads that segment's *outline*, a row
beside the summary with the end, size and message count of each entry.
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
"""A segment is full when it reaches either limit. 1 TiB of large records is 131,072 segments, about
25 MB in memory.
"""
_SUMMARY: Final = struct.Struct("<QQQQqQq")
_LINE: Final = struct.Struct("<QIIq")
"""One entry of an outline: offsets, bytes, messages, time stored."""


class Limits(Struct, frozen=True):
    """The limits of a log; None means without limit. The oldest entries are removed until all limits hold."""

    max_bytes: int | None = None
    """Sum of the stored keys and values. Use of the disk is higher: see docs/decisions/0015."""
    max_age_us: int | None = None
    """Longest time since the log stored an entry."""
    max_messages: int | None = None
    """Live messages; a gap counts as one, a hole as none."""


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
        """Number of records with a key or a due time, which have rows elsewhere that must be
        deleted with them.
        """
        self.expires_us = 0
        """The earliest expiry; 0 is none."""

    def is_full(self, max_bytes: int) -> bool:
        """Return whether a segment that may have this size is full."""
        return self.size >= max_bytes or self.entries >= SEGMENT_ENTRIES

    def add(self, slot: Slot) -> None:
        """Add the next entry to the sums."""
        self.next = slot.next
        self.size += slot.size
        self.entries += 1
        self.messages += slot.messages
        self.newest_us = max(self.newest_us, slot.stored_us)
        self.indexed += slot.indexed
        if slot.expires_us:
            self.expires_us = min(self.expires_us or slot.expires_us, slot.expires_us)

    def drop(self, slot: Slot) -> None:
        """Subtract the first entry. `first` and the times stay: they may be too early, but never too late."""
        self.size -= slot.size
        self.entries -= 1
        self.messages -= slot.messages
        self.indexed -= slot.indexed

    def merge(self, following: Segment) -> None:
        """Add the next segment to the sums. Its rows outside the records are not counted any more."""
        self.next = following.next
        self.size += following.size
        self.entries += following.entries
        self.messages += following.messages
        self.newest_us = max(self.newest_us, following.newest_us)
        if following.expires_us:
            self.expires_us = min(self.expires_us or following.expires_us, following.expires_us)

    def pack(self) -> bytes:
        """Return the summary, which is stored under the key `KEY.pack(first)`."""
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
        """Return the segment of a summary. Raises struct.error if `value` is not one."""
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
    """What a segment needs to know about one entry."""

    first: int
    next: int
    size: int
    """Bytes of key and value."""
    messages: int
    """Live messages: a gap counts as one, a hole as none."""
    stored_us: int
    """0 for a hole, which counts as infinitely old."""
    key_hash: bytes | None = None
    due_us: int = 0
    """Due time of a deferred record, else 0."""
    expires_us: int = 0

    @property
    def indexed(self) -> bool:
        """Whether the entry has rows outside the records."""
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
    """Return the outline of adjacent entries that have no rows outside the records."""
    lines = b"".join(
        [
            _LINE.pack(slot.next - slot.first, slot.size, slot.messages, slot.stored_us)
            for slot in slots
        ]
    )
    return crc32(lines).to_bytes(4, "little") + lines


def unpack_outline(segment: Segment, row: bytes) -> list[Slot] | None:
    """Return the entries of a segment from its outline; None if the outline is damaged and the
    entries must be read instead.
    """
    if len(row) % _LINE.size != 4 or crc32(row[4:]) != int.from_bytes(row[:4], "little"):
        return None
    slots = []
    at = segment.first
    for length, size, messages, stored_us in _LINE.iter_unpack(row[4:]):
        slots.append(Slot(at, at + length, size, messages, stored_us))
        at += length
    return slots if at == segment.next else None
