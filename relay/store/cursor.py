"""What a consumer keeps in its log's database, and the bytes: the only home of a cursor's layout.

    u32 crc | u8 version | MessagePack of `State`           crc = CRC-32 of version and MessagePack, little-endian

A state lists the records that are not settled, each with the bitmaps of the messages that share a delivery count and a
due time. Whatever else lies below the read position is settled. `weight` is the most that a record can ever take
here, however its messages part ways: whoever keeps the sum of weights under `MAX_RECORDS_BYTES` and that of
`dead_weight` under `MAX_DEAD_BYTES` plus one letter has a cursor that fits into `relay.store.cursors.MAX_CURSOR_BYTES`.
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
"""Messages in a record that can be delivered: the count is the publisher's, and a bitmap has a bit for each."""
MAX_DELIVERIES: Final = 65_535
"""Counts stop there on disk."""
KEY_BYTES: Final = 8
"""Of a key's hash: two keys that share them wait for each other, and nothing else comes of it."""
_PARTS: Final = 8
_VERSION: Final = 1


class CursorDamaged(IrisError):
    """The stored state of consumer `name` is not what was saved. Delete it and start the consumer where it should."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"cursor {name}: {detail}")
        self.name = name


class Settings(Struct, frozen=True):
    """How a consumer delivers. Raises ValueError for what is out of range."""

    group: bool = False
    """Several workers share the messages; else one has them all, and a newer one takes over."""
    ack_timeout_us: int = 30_000_000
    """A message that is not settled or touched for so long is delivered again."""
    max_deliver: int = 0
    """So many deliveries without an ack make a dead letter; 0 = never."""
    max_pending: int = 65_536
    """Messages that were handed out and are not settled, dead letters included; at this new ones wait."""
    max_pending_per_worker: int = 65_536
    """Likewise of what one worker holds."""
    durable: bool = True
    """It has a cursor in the log; else it is gone with the process."""

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
    """What a consumer counts from its start on, in messages."""

    late: int = 0
    """Acks of what was settled or dead already, or never there."""
    skipped: int = 0
    """Expired, compacted or not deliverable."""
    missed: int = 0
    """Removed by retention before they were settled."""
    redelivered: int = 0


class Dead(Struct, frozen=True, array_like=True):
    """A message that was given up: where it is in the log, how often it was delivered, and why it failed."""

    offset: int
    deliveries: int
    reason: str


class Kept(Struct, frozen=True, array_like=True):
    """A record that is not settled."""

    gap: int
    """From the first offset of the one before."""
    count: int
    deferred: bool
    key: bytes | None
    parts: list[tuple[bytes, int, int]]
    """(bitmap, little-endian, empty = all; deliveries; due time in µs, 0 = at once)."""


class State(Struct, frozen=True, array_like=True):
    """All that outlives a consumer."""

    settings: Settings
    start: int
    position: int
    due: tuple[int, int]
    """The last of `Log.due` that was taken."""
    records: list[Kept]
    dead: list[Dead]
    counts: Counts
    saved_us: int = 0
    """When that was, by the clock of the due times; 0 in cursors of older stores."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """Return the bytes of `state`."""
    rest = bytes([_VERSION]) + _ENCODER.encode(state)
    return crc32(rest).to_bytes(4, "little") + rest


def decode(name: str, data: bytes) -> State:
    """Return the state that is in `data`. Raises CursorDamaged."""
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
    """Return the most bytes that a record of `count` messages takes."""
    return 11 + (9 if key else 0) + min(count, _PARTS) * (17 + count // 8)


def dead_weight(dead: Dead) -> int:
    """Return the most bytes that `dead` takes."""
    return 24 + len(dead.reason.encode())


def pack_parts(count: int, parts: dict[tuple[int, int], int]) -> list[tuple[bytes, int, int]]:
    """Return the parts of a record of `count` messages from bitmaps by (deliveries, due time).

    More than eight kinds do not fit: the rest becomes one that was delivered least often and is due at once.
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
    """Return the bitmap of a stored part. Raises ValueError if it is none of `count` messages."""
    full = (1 << count) - 1
    bits = int.from_bytes(bitmap, "little") or full
    if bits & ~full:
        raise ValueError(f"a bitmap has more bits than its record has messages ({count})")
    return bits
