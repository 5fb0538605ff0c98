"""Definitions of streams, and the signed orders by which key holders create, change and end them.

Times are in µs since 1970, 0 = none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from iris.errors import ConfigError, DecodeError, InvalidName
from iris.wire.frames import Id16
from iris.wire.names import check_cluster, check_filter

KEEP: Final = "keep"
END: Final = "end"
MOVE: Final = "move"
MAX_ORDER_BYTES: Final = 8192
MAX_ORDERS: Final = 64
ORDER_FRESH_US: Final = 600_000_000
"""Largest difference between an order's `issued_us` and the store's clock when the order first arrives."""
DEAD: Final = ".dead"
"""Suffix of dead-letter streams: the dead letters of the stream `orders` are the stream `orders.dead`."""
MAX_STREAM_NAME_BYTES: Final = 255 - len(DEAD)
MAX_ORIGINS: Final = 8
MAX_PARTITIONS: Final = 256
"""Most partitions of a stream. A definition names all of them, and an order has at most `MAX_ORDER_BYTES`."""
_UUID: Final = re.compile("[0-9a-f]{32}")
_PARTITION: Final = re.compile("(.+)/([1-9][0-9]{0,2})")

Offset = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
Time = Offset
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Key32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
End = Annotated[bytes, Meta(min_length=24, max_length=24)]
Hash = Annotated[bytes, Meta(max_length=32)]
ShortText = Annotated[str, Meta(max_length=255)]


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """A log whose records a copy holds, with the name, topic and cluster that the records were sent to."""

    uuid: Id16
    name: Annotated[str, Meta(min_length=1, max_length=MAX_STREAM_NAME_BYTES)]
    topic: ShortText = ""
    cluster: ShortText = ""


class Replaced(Struct, frozen=True, forbid_unknown_fields=True):
    """The log whose place a copy of it takes, or has taken."""

    uuid: Id16
    revision: Offset = 0
    """The old log is superseded if its orders have a lower revision; 0 until the copy is promoted."""
    next: Offset = 0
    """Where the copy ended when it was promoted: below it, both logs have the same messages at the same offsets."""
    copy: ShortText = ""
    """The name that the copy had before it took that of the old log."""


ANY_REVISION: Final = 0x7FFFFFFFFFFFFFFF
"""`Replaced.revision` of a copy that takes the place of a lost log, whatever revision that has."""


class Definition(Struct, frozen=True, forbid_unknown_fields=True):
    """Definition of a stream: what it records, and its limits. 0 means no limit.

    Over a limit the oldest messages are removed. A definition with other fields is refused: who does not know a field
    would keep, or read, another stream than the one that was defined.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_STREAM_NAME_BYTES)]
    topic: ShortText = ""
    """Topic filter: publications to matching topics are recorded."""
    cluster: ShortText = ""
    """Cluster: the stream records its broadcasts, and gets its share of its pushes as a member does."""
    max_bytes: Offset = 0
    max_messages: Offset = 0
    max_age_us: Time = 0
    compact: bool = False
    """Whether only the last record of each key is kept."""
    paused: bool = False
    """Whether recording and appending are stopped."""
    mirror: Annotated[str, Meta(max_length=32)] = ""
    """Uuid (hex) of the log of which this stream is a copy; it then accepts nothing else. Empty for a promoted copy."""
    origins: Annotated[tuple[Origin, ...], Meta(max_length=MAX_ORIGINS)] = ()
    """For a copy, promoted or not: the logs that its records may come from, oldest first. The last is
    the copied one."""

    consuming_paused: bool = False
    """Whether delivery to consumers is stopped. Recording, appending and reading continue."""
    dedup_window_us: Time = 0
    """Time for which ids of appended messages are remembered; 0 if messages have no ids."""

    partitions: Annotated[tuple[Id16, ...], Meta(max_length=MAX_PARTITIONS - 1)] = ()
    """Uuids of the logs that are partitions 1 and up of this stream, whose partition 0 is its own log."""
    parent: Annotated[bytes, Meta(max_length=16)] = b""
    """For partition 1 and up: uuid of the log that is partition 0. Otherwise empty."""
    partition: Annotated[int, Meta(ge=0, lt=MAX_PARTITIONS)] = 0
    """Number of this partition."""
    replaces: Replaced | None = None
    """For a copy: the source, whose state it is given. For a promoted copy with the source's name: the source, which is
    superseded."""
    successor: Annotated[bytes, Meta(max_length=16)] = b""
    """Uuid of the copy to which the stream is being handed over. Meanwhile nothing is recorded, appended, delivered or
    settled."""

    @property
    def stopped(self) -> bool:
        """Whether nothing is recorded or appended."""
        return self.paused or bool(self.successor)

    def key_uuid(self, uuid: bytes) -> bytes:
        """Return the uuid with which key hashes of the log `uuid` are made: for a copy, that of its first origin."""
        return self.origins[0].uuid if self.origins else uuid


def partition_name(stream: str, partition: int) -> str:
    """Return the name of a partition: "orders" for number 0, and "orders/3" for number 3."""
    return f"{stream}/{partition}" if partition else stream


def split_partition(name: str) -> tuple[str, int]:
    """Return ("orders", 3) for "orders/3". The number is 0, and the name whole, if it is not that of a partition."""
    found = _PARTITION.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def check_definition(definition: Definition) -> None:
    """Check a definition.

    Raises:
        InvalidName: a name is outside the grammar, or reserved for dead letters.
        ConfigError: a setting is impossible.
    """
    check_cluster(definition.name + DEAD)
    if definition.name.endswith(DEAD):
        raise InvalidName(
            f"stream name {definition.name!r} is reserved, because names that end in {DEAD!r} belong to dead letters; "
            "choose another name"
        )
    if definition.topic and definition.cluster:
        raise ConfigError("a stream can record a topic or a cluster, not both; set one of the two")
    if definition.topic:
        check_filter(definition.topic)
    if definition.cluster:
        check_cluster(definition.cluster)
    for origin in definition.origins:
        check_cluster(origin.name)
        if origin.topic:
            check_filter(origin.topic)
        if origin.cluster:
            check_cluster(origin.cluster)
    if len(definition.origins) > MAX_ORIGINS:
        raise ConfigError(
            f"origins: a copy of level {len(definition.origins)} is over the limit of {MAX_ORIGINS}; mirror a stream closer to the original"
        )
    if definition.mirror:
        if not _UUID.fullmatch(definition.mirror):
            raise ConfigError(f"mirror: {definition.mirror!r} is not a uuid of 32 hex digits")
        if not definition.origins or definition.origins[-1].uuid.hex() != definition.mirror:
            raise ConfigError(
                f"mirror: {definition.mirror} is not the uuid of the stream's last origin"
            )
        if definition.topic or definition.cluster:
            raise ConfigError(
                "mirror: a copy cannot record a topic or a cluster as well; leave both empty"
            )
    replaced = definition.replaces
    if replaced is not None and (
        not definition.origins or definition.origins[-1].uuid != replaced.uuid
    ):
        raise ConfigError(
            f"replaces: {replaced.uuid.hex()} is not the uuid of the stream's last origin"
        )
    if len(definition.successor) not in (0, 16):
        raise ConfigError("successor: a uuid has 16 bytes")
    _check_partitions(definition)
    for field in ("max_bytes", "max_messages", "max_age_us", "dedup_window_us"):
        if not 0 <= getattr(definition, field) < 1 << 63:
            raise ConfigError(
                f"{field}: {getattr(definition, field)} is out of range; use 0 to 2^63 - 1"
            )


def _check_partitions(definition: Definition) -> None:
    """Raise ConfigError if what a definition says of partitions is impossible."""
    uuids, parent, number = definition.partitions, definition.parent, definition.partition
    if not uuids and not parent and not number:
        return
    if definition.topic or definition.cluster:
        raise ConfigError(
            "partitions: only a stream that holds what is appended can have partitions; it cannot record a topic or "
            "a cluster"
        )
    if bool(parent) != bool(number) or (parent and (len(parent) != 16 or uuids)):
        raise ConfigError(
            "partition: a partition has a number above 0 and a parent of 16 bytes, and no partitions of its own"
        )
    if parent and not (
        definition.name.endswith(f"/{number}") and len(definition.name) > len(f"/{number}")
    ):
        raise ConfigError(f"partition: the name of partition {number} must end in '/{number}'")
    if len(set(uuids)) < len(uuids):
        raise ConfigError("partitions: each partition must be another log")
    if len(uuids) >= MAX_PARTITIONS:
        raise ConfigError(f"partitions: {len(uuids) + 1} are over the limit of {MAX_PARTITIONS}")


class Order(Struct, frozen=True, forbid_unknown_fields=True):
    """Order of a cluster key's holder to one store, to keep a stream as defined, to end it, or to move it.

    A stream has one order for each of its key ids. `in_force` selects the one that defines it.
    """

    action: Annotated[str, Meta(max_length=16)]
    uuid: Id16
    """Which log; see `log_uuid`."""
    key_id: Id16
    store: Key32
    """The store's public key; for "move", that of the store that is to hold the stream."""
    issued_us: Time
    definition: Definition
    revision: Offset = 0
    """Revision of the order in force, which it replaces, plus 1; 0 in "create"."""


class SignedOrder(Struct, frozen=True, array_like=True):
    """An encoded order, and the cluster key's signature over these bytes."""

    order: Annotated[bytes, Meta(max_length=MAX_ORDER_BYTES)]
    public_key: Key32
    signature: Signature
    by: Annotated[bytes, Meta(max_length=32)] = b""
    """If the order's key is new to the stream: the public key of a key that the stream already has. In "create": that
    of the first order."""
    countersignature: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of the key `by` over the same bytes."""


def superseded_text(uuid: bytes, by: bytes, at: int) -> str:
    """Return what the users of the log `uuid` are told when the log `by` has taken its place at the offset `at`."""
    return (
        f"log {uuid.hex()} was superseded by log {by.hex()}, which has its name now; both have the same messages below offset "
        f"{at}. Start again without the old uuid, from offset {at} or from yours, whichever is lower. If its store runs, "
        "the old log can be read by its uuid"
    )


def log_uuid(founder: bytes, salt: bytes) -> bytes:
    """Return the uuid of the log that a holder of the key `founder`, an id, creates. It names that key for good: nobody
    finds another key with which a `salt` makes the same uuid.
    """
    return hashlib.sha256(b"iris-stream-uuid-1" + founder + salt).digest()[:16]


def in_force(orders: Iterable[Order]) -> Order | None:
    """Return the order with the highest revision, which defines the stream; None without orders.

    Ties are decided by `issued_us`.
    """
    return max(orders, key=lambda order: (order.revision, order.issued_us), default=None)


Orders = Annotated[list[SignedOrder], Meta(min_length=1, max_length=MAX_ORDERS)]


_decode_order: Final = msgspec.msgpack.Decoder(Order).decode


def decode_order(order: bytes) -> Order:
    """Decode an order whose signature was already verified. Raises DecodeError."""
    try:
        return _decode_order(order)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise DecodeError(f"the signed order of a stream cannot be decoded: {err}") from err
