"""What a stream holds: records, gaps and holes, and the dead letters of its consumers."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from iris.errors import DecodeError
from iris.wire.frames import Id16, Text
from iris.wire.orders import U32, End, Hash, Offset, ShortText, Time

DEAD_KIND: Final = 0
"""Kind of a record that holds a `DeadLetter` instead of a sealed bundle."""


class Record(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A sealed bundle as it was published or appended. Its messages have the offsets from `offset` on.

    `end` holds the 24 bytes of end fields that were authenticated with it (see `iris.wire.codec`).
    """

    offset: Offset
    kind: Annotated[int, Meta(ge=0, le=255)]
    name: ShortText
    key_id: Id16
    sender_id: Id16
    end: End
    body: bytes
    stored_us: Time
    key_hash: Hash = b""
    tombstone: bool = False
    expires_us: Time = 0
    due_us: Time = 0
    deferred: bool = False
    """Whether consumers get it at its due time, and not in the order of offsets: it was not due when it was stored."""


class Gap(Struct, frozen=True, array_like=True, tag=2):
    """One offset that represents `count` messages (None if unknown) that the store could not record, and the cause."""

    offset: Offset
    count: Offset | None
    cause: Text
    stored_us: Time


class Hole(Struct, frozen=True, array_like=True, tag=3):
    """Offsets from `offset` up to, but not including, `next`, whose messages were removed.

    `reason` is a key of `HOLES`.
    """

    offset: Offset
    next: Offset
    reason: Annotated[int, Meta(ge=0, le=255)]


Item = Record | Gap | Hole
HOLES: Final = {1: "retention", 2: "compacted", 3: "expired", 4: "deferred", 5: "damaged"}


class DeadLetter(Struct, frozen=True):
    """The body of a record of kind `DEAD_KIND`: a message that a consumer could not deliver."""

    uuid: Id16
    """Uuid of the log that holds the message."""
    offset: Offset
    consumer: ShortText
    deliveries: U32
    reason: Text


_decode_dead: Final = msgspec.msgpack.Decoder(DeadLetter).decode


def dead_uuid(uuid: bytes) -> bytes:
    """Return the uuid of the dead-letter log of the stream `uuid`."""
    return hashlib.sha256(b"iris-dead-letters-1" + uuid).digest()[:16]


def decode_dead(body: bytes) -> DeadLetter:
    """Decode the reference in a record of kind `DEAD_KIND`. Raises DecodeError."""
    try:
        return _decode_dead(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise DecodeError(f"a dead letter cannot be decoded: {err}") from err
