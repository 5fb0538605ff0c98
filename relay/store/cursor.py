"""The cursor of a consumer, which is stored in its log's database, and its layout. No other module
knows this layout.

    u32 crc | u8 version | MessagePack of `State`           crc = CRC-32 of version and MessagePack, little-endian

A state lists the unsettled records, each with bitmaps of the messages that have the same delivery
count and due time. Everything else below the read position is settled. `weight` is the upper bound
of what a record can take here, however its messages are divided. If the sum of weights stays under
`MAX_RECORDS_BYTES`, and that of `dead_weight` under `MAX_DEAD_BYTES` plus one letter, the cursor
fits into `relay.store.cursors.MAX_CURSOR_BYTES`.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

import msgspec
from msgspec import Struct

from iris.errors import IrisError

MAX_RECORDS_BYTES: Final = 900_000
MAX_DEAD_BYTES: Final = 128 << 10
MAX_REASON_BYTES: Final = 1024
MAX_COUNT: Final = 65_536
"""Largest message count of a record that can be delivered.

The publisher claims the count, and a bitmap has a bit for each message.
"""
MAX_DELIVERIES: Final = 65_535
"""Larger delivery counts are stored as this."""
KEY_BYTES: Final = 8
"""Stored bytes of a key's hash.

If two keys have the same bytes, they wait for each other; nothing else happens.
"""
_PARTS: Final = 8
_VERSION: Final = 1


class CursorDamaged(IrisError):
    """The stored state of consumer `name` is not what was saved.

    Delete the consumer and create it again at the right offset.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"cursor {name}: {detail}")
        self.name = name


class Settings(Struct, frozen=True):
    """The settings of a consumer. Raises ValueError for a value out of range."""

    shared: bool = False
    """Several workers share the messages.

    Otherwise one worker receives all, and the others stand by.
    """
    ack_timeout_us: int = 30_000_000
    """A message that is not settled or touched for this long is delivered again."""
    max_deliver: int = 0
    """A message becomes a dead letter after this many deliveries without an ack; 0: never."""
    max_pending: int = 65_536
    """Limit of dispatched, unsettled messages, including dead letters. At the limit new messages wait."""
    max_pending_per_worker: int = 65_536
    """Limit of messages held by one worker."""
    durable: bool = True
    """The consumer has a cursor in the log. Otherwise it ends with the process."""

    def __post_init__(self) -> None:
        for what, value, least, most in (
            ("ack_timeout_us", self.ack_timeout_us, 1_000, 86_400_000_000),
            ("max_deliver", self.max_deliver, 0, MAX_DELIVERIES),
            ("max_pending", self.max_pending, 1, 65_536),
            ("max_pending_per_worker", self.max_pending_per_worker, 1, 65_536),
        ):
            if not least <= value <= most:
                raise ValueError(f"{what}: {value} is not between {least} and {most}")


class Counts(Struct, array_like=True):
    """Counters of a consumer since its creation, in messages."""

    late: int = 0
    """Acks of messages that were already settled or dead, or never existed."""
    skipped: int = 0
    """Messages that expired, were compacted, or cannot be delivered."""
    missed: int = 0
    """Messages removed by retention or lost to damage before they were settled."""
    redelivered: int = 0
    redriven: int = 0
    """Dead letters that were made deliverable again."""


class Dead(Struct, frozen=True, array_like=True):
    """A dead letter: its offset in the log, how often it was delivered, and why the last delivery failed."""

    offset: int
    deliveries: int
    reason: str


class StoredRecord(Struct, frozen=True, array_like=True):
    """An unsettled record."""

    gap: int
    """Difference of its first offset to that of the previous record."""
    count: int
    deferred: bool
    key: bytes | None
    parts: list[tuple[bytes, int, int]]
    """(bitmap, little-endian, empty means all; deliveries; due time in µs, 0 means now)."""


class State(Struct, frozen=True, array_like=True):
    """The stored state of a consumer."""

    settings: Settings
    start: int
    position: int
    due: tuple[int, int]
    """The last pair of `Log.due` that was processed."""
    records: list[StoredRecord]
    dead: list[Dead]
    counts: Counts
    saved_us: int = 0
    """When the state was saved, on the clock of the due times."""
    paused: bool = False
    former: list[Settings] = []
    """Settings that were replaced, oldest first. Workers that state them are still served."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """Return `state` in its layout on disk."""
    rest = bytes([_VERSION]) + _ENCODER.encode(state)
    return crc32(rest).to_bytes(4, "little") + rest


def decode(name: str, data: bytes) -> State:
    """Return the state encoded in `data`. Raises CursorDamaged."""
    rest = data[4:]
    if len(data) < 5 or int.from_bytes(data[:4], "little") != crc32(rest):
        raise CursorDamaged(name, "checksum mismatch")
    if rest[0] != _VERSION:
        raise CursorDamaged(name, f"its version is {rest[0]}, not {_VERSION}")
    try:
        return _DECODER.decode(rest[1:])
    except msgspec.DecodeError as err:
        raise CursorDamaged(name, str(err)) from err


def weight(count: int, key: bytes | None) -> int:
    """Return the upper bound of the bytes of a record of `count` messages."""
    return 11 + (9 if key else 0) + min(count, _PARTS) * (17 + count // 8)


def dead_weight(dead: Dead) -> int:
    """Return the upper bound of the bytes of `dead`."""
    return 24 + len(dead.reason.encode())


def pack_parts(count: int, parts: dict[tuple[int, int], int]) -> list[tuple[bytes, int, int]]:
    """Return the stored parts of a record of `count` messages. `parts` is (deliveries, due time) -> bitmap.

    At most eight parts fit. The rest is merged into one with the lowest delivery count, due now.
    """
    kinds = sorted(parts.items(), reverse=True)
    if len(kinds) > _PARTS:
        rest = 0
        for _, bits in kinds[_PARTS - 1 :]:
            rest |= bits
        kinds = [*kinds[: _PARTS - 1], ((kinds[-1][0][0], 0), rest)]
    full = (1 << count) - 1
    return [
        (
            b"" if bits == full else bits.to_bytes((count + 7) // 8, "little"),
            min(deliveries, MAX_DELIVERIES),
            due_us,
        )
        for (deliveries, due_us), bits in kinds
    ]


def unpack_bits(count: int, bitmap: bytes) -> int:
    """Return the bitmap of a stored part. Raises ValueError if it has bits beyond `count` messages."""
    full = (1 << count) - 1
    bits = int.from_bytes(bitmap, "little") or full
    if bits & ~full:
        raise ValueError(f"a bitmap has more bits than its record has messages ({count})")
    return bits
