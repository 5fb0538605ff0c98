"""The entries of a log and their layout on disk. No other module knows this layout.

Entries cover all offsets: every entry says where the next one begins, and a removed record leaves a
hole, so a reader can prove that it missed nothing. Integers are little-endian; keys are big-endian,
because RocksDB sorts by bytes. Key: u64 first offset. Value:

    u32 crc | u8 form | rest           crc = CRC-32 of key, form and rest
    record: u8 flags | u8 kind | u16 name length | i64 stored | i64 expires | i64 due | key id | sender id
            | 24 end fields | 32 key hash, if flagged | name | body
    gap:    i64 stored | u64 count + 1, 0 = unknown | cause
    hole:   u8 reason | u64 next

A staged entry has the layout of a record, under a longer key.
The CRC detects software and bit errors. Forgery is detected by the seal of the body, which a log never opens.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final
from zlib import crc32

from msgspec import Struct

from iris.wire.codec import END

KEY: Final = struct.Struct(">Q")
MAX_OFFSET: Final = 1 << 63
"""Where the offsets of a log end."""
CRC: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<BBBHqqq16s16s24s")
_GAP: Final = struct.Struct("<BqQ")
_HOLE: Final = struct.Struct("<BBQ")
_HASHED, _TOMBSTONE, _DEFERRED = 1, 2, 4
_FORM_RECORD, _FORM_GAP, _FORM_HOLE = 1, 2, 3

ID_BYTES: Final = 16
HASH_BYTES: Final = 32
MAX_NAME_BYTES: Final = 1024
MAX_CAUSE_BYTES: Final = 1024


class Reason(IntEnum):
    """Why there is no message at these offsets."""

    RETENTION = 1
    """Removed by retention."""
    COMPACTED = 2
    """A later record has the same key, or it is a dead letter that was redriven."""
    EXPIRED = 3
    DEFERRED = 4
    """Deferred, and left out of this read. `Log.due` lists it when it is due."""
    DAMAGED = 5
    """It could not be read, and `salvage` wrote this hole instead."""


class Stamp(Struct, frozen=True):
    """Identifies an append of a producer, so that a retry is recognized."""

    producer: bytes
    """16 bytes."""
    epoch: int
    """u32. A higher epoch fences older instances of the producer, and starts again at sequence 0."""
    sequence: int
    """u64. Grows by one with every entry."""


class Entry(Struct, frozen=True, gc=False):
    """A sealed bundle to append. Times are µs since 1970; 0 is none."""

    kind: int
    name: str
    key_id: bytes
    sender_id: bytes
    end: bytes
    """The 24 bytes of the frame's end fields.

    Their message count is the number of offsets that the entry occupies.
    """
    body: bytes
    stamp: Stamp | None = None
    key_hash: bytes | None = None
    """32 bytes. Compaction keeps the last record of each key hash."""
    tombstone: bool = False
    """The key was deleted. This needs a flag, because a sealed body is never empty."""
    expires_us: int = 0
    due_us: int = 0
    expect: int | None = None
    """Append only if this is the next offset."""
    id_hash: bytes | None = None
    """32 bytes. The entry is a duplicate if the log remembers a message with the same id."""


class NewGap(Struct, frozen=True):
    """A gap to append: `count` messages (None: unknown) were lost because of `cause`, which is cut
    at 1024 bytes.
    """

    count: int | None
    cause: str


class Record(Struct, frozen=True, gc=False):
    """A stored bundle, sealed as it was published, with the offsets `first` until `first + count`.

    Times are µs; 0 is none.
    """

    first: int
    count: int
    kind: int
    name: str
    key_id: bytes
    sender_id: bytes
    end: bytes
    body: bytes
    stored_us: int
    key_hash: bytes | None
    tombstone: bool
    expires_us: int
    due_us: int
    deferred: bool
    """It was not due yet when it was appended."""

    @property
    def next(self) -> int:
        return self.first + self.count


class Gap(Struct, frozen=True, gc=False):
    """One offset that stands for `count` lost messages (None: unknown), and the cause of the loss."""

    first: int
    count: int | None
    cause: str
    stored_us: int

    @property
    def next(self) -> int:
        return self.first + 1


class Hole(Struct, frozen=True, gc=False):
    """The offsets from `first` until `next` contain no messages any more."""

    first: int
    next: int
    reason: Reason


Item = Record | Gap | Hole


def check_entry(entry: Entry) -> int:
    """Return how many messages `entry` holds.

    Raises:
        ValueError: a field has the wrong length or is out of range; the text names the field.
    """
    for what, value, size in (
        ("key_id", entry.key_id, ID_BYTES),
        ("sender_id", entry.sender_id, ID_BYTES),
        ("end", entry.end, END.size),
        ("key_hash", entry.key_hash or bytes(HASH_BYTES), HASH_BYTES),
        ("id_hash", entry.id_hash or bytes(HASH_BYTES), HASH_BYTES),
        ("producer", entry.stamp.producer if entry.stamp else bytes(ID_BYTES), ID_BYTES),
    ):
        if len(value) != size:
            raise ValueError(f"{what}: {len(value)} bytes; it must have {size}")
    if len(entry.name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"name: {len(entry.name.encode())} bytes; at most {MAX_NAME_BYTES} are allowed"
        )
    if not 0 <= entry.kind < 256:
        raise ValueError(f"kind: {entry.kind} is not between 0 and 255")
    if min(entry.expires_us, entry.due_us) < 0 or max(entry.expires_us, entry.due_us) >= 1 << 63:
        raise ValueError(
            f"expires_us ({entry.expires_us}) and due_us ({entry.due_us}) must be from 0 to 2^63 - 1"
        )
    if entry.tombstone and entry.key_hash is None:
        raise ValueError("tombstone: a tombstone requires a key_hash")
    if entry.stamp and not (
        0 <= entry.stamp.epoch < 1 << 32 and 0 <= entry.stamp.sequence < 1 << 64
    ):
        raise ValueError(
            f"stamp: epoch {entry.stamp.epoch} must be below 2^32, sequence {entry.stamp.sequence} below 2^64"
        )
    count: int = END.unpack(entry.end)[2]
    if count < 1:
        raise ValueError(f"end: {count} messages; a record has at least one")
    return count


def check_count(count: int | None) -> None:
    """Raise ValueError if `count` is not a valid count of a gap."""
    if count is not None and not 0 <= count < 1 << 63:
        raise ValueError(f"count: {count} is not from 0 to 2^63 - 1")


def encode_record(key: bytes, entry: Entry, stored_us: int, *, deferred: bool) -> bytes:
    """Return the value of a checked `entry` under `key`."""
    name = entry.name.encode()
    flags = (
        (_HASHED if entry.key_hash else 0)
        | (_TOMBSTONE if entry.tombstone else 0)
        | (_DEFERRED if deferred else 0)
    )
    head = _RECORD.pack(
        _FORM_RECORD,
        flags,
        entry.kind,
        len(name),
        stored_us,
        entry.expires_us,
        entry.due_us,
        entry.key_id,
        entry.sender_id,
        entry.end,
    )
    head += (entry.key_hash or b"") + name
    return b"".join((CRC.pack(crc32(entry.body, crc32(head, crc32(key)))), head, entry.body))


def encode_gap(key: bytes, count: int | None, cause: str, stored_us: int) -> bytes:
    """Return the value of a gap. `cause` is cut at `MAX_CAUSE_BYTES`."""
    text = cause.encode()[:MAX_CAUSE_BYTES]
    return encode_row(
        key, _GAP.pack(_FORM_GAP, stored_us, 0 if count is None else count + 1) + text
    )


def encode_hole(key: bytes, reason: Reason, end: int) -> bytes:
    """Return the value of a hole that begins at `key` and ends at `end`."""
    return encode_row(key, _HOLE.pack(_FORM_HOLE, reason, end))


def decode(key: bytes, value: bytes) -> Item:
    """Return the entry that `value` stores under `key`.

    Raises:
        ValueError: the value is damaged.
    """
    try:
        check_row(key, value)
        (first,) = KEY.unpack(key)
        form = value[4]
        if form == _FORM_RECORD:
            return _decode_record(first, value)
        if form == _FORM_GAP:
            _, stored_us, count = _GAP.unpack_from(value, 4)
            cause = value[4 + _GAP.size :].decode(errors="replace")
            return Gap(first, count - 1 if count else None, cause, stored_us)
        if form == _FORM_HOLE:
            _, reason, end = _HOLE.unpack_from(value, 4)
            return Hole(first, end, Reason(reason))
    except (struct.error, IndexError) as err:
        raise ValueError(f"truncated: {err}") from err
    raise ValueError(f"unknown entry form {form}")


def decode_staged(key: bytes, value: bytes) -> tuple[Entry, int]:
    """Return the entry that `encode_record` wrote under a `key` of any length, and its message count.

    Raises:
        ValueError: the value is damaged.
    """
    try:
        check_row(key, value)
        if value[4] != _FORM_RECORD:
            raise ValueError(f"unknown entry form {value[4]}")
        record = _decode_record(0, value)
    except (struct.error, IndexError) as err:
        raise ValueError(f"truncated: {err}") from err
    entry = Entry(
        record.kind, record.name, record.key_id, record.sender_id, record.end, record.body, None,
        record.key_hash, record.tombstone, record.expires_us, record.due_us,
    )  # fmt: skip
    return entry, record.count


def encode_row(key: bytes, rest: bytes) -> bytes:
    """Return `rest` with a checksum of `key` and `rest` in front."""
    return CRC.pack(crc32(rest, crc32(key))) + rest


def check_row(key: bytes, value: bytes) -> None:
    """Return if `value` is what was written under `key`.

    Raises:
        ValueError: the checksum does not match.
        struct.error: it is truncated.
    """
    (crc,) = CRC.unpack_from(value)
    if crc != crc32(memoryview(value)[4:], crc32(key)):
        raise ValueError("checksum mismatch")


def _decode_record(first: int, value: bytes) -> Record:
    fields = _RECORD.unpack_from(value, 4)
    _, flags, kind, name_bytes, stored_us, expires_us, due_us, key_id, sender_id, end = fields
    at = 4 + _RECORD.size
    key_hash = None
    if flags & _HASHED:
        key_hash = value[at : at + HASH_BYTES]
        at += HASH_BYTES
    return Record(
        first,
        END.unpack(end)[2],
        kind,
        value[at : at + name_bytes].decode(),
        key_id,
        sender_id,
        end,
        value[at + name_bytes :],
        stored_us,
        key_hash,
        bool(flags & _TOMBSTONE),
        expires_us,
        due_us,
        bool(flags & _DEFERRED),
    )
