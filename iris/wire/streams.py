"""What clients and stores say to each other: the bodies of STREAM and STREAM_REPLY frames.

A body is one MessagePack map (`Call` or `Answer`, told apart by "op"), in clear: its fields direct the store. Records in it are
sealed as they were published. Offsets number the messages of a stream; times are µs since 1970, 0 = none.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from iris.errors import DecodeError
from iris.wire.frames import Id16, Name, Text
from iris.wire.orders import (
    MAX_ORDERS,
    U32,
    Definition,
    End,
    Hash,
    Key32,
    Offset,
    Orders,
    ShortText,
    Signature,
    SignedOrder,
    Time,
)

MAX_LISTED: Final = 64
"""Streams in one answer to "list"."""
DEAD_KIND: Final = 0
"""Kind of a record that is no sealed bundle but a `DeadLetter`."""
NO_PRODUCER: Final = bytes(16)
NO_LOG: Final = bytes(16)
"""Stands for the store itself where a log's uuid is expected."""
MAX_WRITER_BYTES: Final = 255
MAX_ATTEMPTS: Final = 65_536
"""In a Commit or Discard, which is bounded by the message limit besides."""
MAX_COPY_ITEMS: Final = 4096
# -- records -----------------------------------------------------------------------------------------------------


class Record(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A sealed bundle as it was published or appended; its messages have the offsets from `offset` on.

    `end` are the 24 bytes of end fields that were authenticated with it (see `codec`).
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


class Gap(Struct, frozen=True, array_like=True, tag=2):
    """One offset that stands for `count` messages (None: unknown) that the store could not take, and why."""

    offset: Offset
    count: Offset | None
    cause: Text
    stored_us: Time


class Hole(Struct, frozen=True, array_like=True, tag=3):
    """Offsets from `offset` until `next` hold nothing any more. `reason` is one of `HOLES`."""

    offset: Offset
    next: Offset
    reason: Annotated[int, Meta(ge=0, le=255)]


Item = Record | Gap | Hole
HOLES: Final = {1: "retention", 2: "compacted", 3: "expired", 4: "deferred", 5: "damaged"}


class DeadLetter(Struct, frozen=True):
    """The body of a record of kind `DEAD_KIND`: a message that a consumer could not deliver."""

    uuid: Id16
    """Of the log that holds it."""
    offset: Offset
    consumer: ShortText
    deliveries: U32
    reason: Text


class NewRecord(Struct, frozen=True, array_like=True, gc=False):
    """A record to append, sealed as kind STREAM under the stream's name and the key id of the call."""

    sequence: Offset
    """Of the call's producer: rises by one."""
    end: End
    body: bytes
    key_hash: Hash = b""
    tombstone: bool = False
    expires_us: Time = 0
    due_us: Time = 0
    expect: Offset | None = None
    """Append only if this is the next offset."""
    id_hash: Hash = b""
    """Of the message's id: stored only if the stream remembers no other of this id."""


class Outcome(Struct, frozen=True, array_like=True):
    """What became of a new record. `status` is one of the five below."""

    status: Annotated[int, Meta(ge=0, le=255)]
    value: Offset | None
    """STORED, DUPLICATE: its first offset (None: too long ago to know). OUT_OF_ORDER: the sequence that is due. FENCED: the
    producer's epoch. CONFLICT: the next offset."""


STORED: Final = 0
DUPLICATE: Final = 1
OUT_OF_ORDER: Final = 2
FENCED: Final = 3
CONFLICT: Final = 4


# -- calls -------------------------------------------------------------------------------------------------------


class FindStore(Struct, frozen=True, tag_field="op", tag="store"):
    """To the stores: which one is this? Answered with StoreInfo."""


class Knock(Struct, frozen=True, tag_field="op", tag="knock"):
    """Begin to open a channel (`iris.crypto.channel`) to a stream, or to a store itself. Answered with Door, then comes Open."""

    nonce: Key32


class Open(Struct, frozen=True, tag_field="op", tag="open"):
    """Open a channel, under the key of `public_key`. `door` is the nonce of the Door. Answered with Opened."""

    nonce: Key32
    door: Key32
    public_key: Key32
    share: Key32
    signature: Signature


class Create(Struct, frozen=True, tag_field="op", tag="create"):
    """To one store: keep a stream. Answered with Described once it can be written to."""

    orders: Orders


class ListStreams(Struct, frozen=True, tag_field="op", tag="list"):
    """Describe the streams of one store under the key of the channel. Answered with Listed."""

    after: Annotated[str, Meta(max_length=300)] = ""
    """Where the last answer ended."""


class Describe(Struct, frozen=True, tag_field="op", tag="describe"):
    """Answered with Described."""


class Change(Struct, frozen=True, tag_field="op", tag="change"):
    """Orders of the next revision: another definition, or one more key. Answered with Described."""

    orders: Orders


class Delete(Struct, frozen=True, tag_field="op", tag="delete"):
    """End the stream and remove its log. Answered with Settled."""

    orders: Orders


class Append(Struct, frozen=True, tag_field="op", tag="append"):
    """Answered with Appended once all of it is on disk. Records are sealed by `sender_id`."""

    sender_id: Id16
    records: Annotated[list[NewRecord], Meta(min_length=1, max_length=4096)]
    producer: Id16 = NO_PRODUCER
    """NO_PRODUCER: retries of these records cannot be told from new ones."""
    epoch: U32 = 0


class Stage(Struct, frozen=True, tag_field="op", tag="stage"):
    """Keep records of one attempt at a writer's batch, out of sight until a Commit. Answered with Staged once they are on disk.

    `sequence` of a record is its place in the attempt, from 0; what is staged already is not staged again.
    """

    writer: Name
    """Up to `MAX_WRITER_BYTES`."""
    batch: Offset
    attempt: Id16
    sender_id: Id16
    records: Annotated[list[NewRecord], Meta(min_length=1, max_length=4096)]


class Attempt(Struct, frozen=True, array_like=True):
    """One attempt at a batch, which staged so many records."""

    attempt: Id16
    records: U32


class Commit(Struct, frozen=True, tag_field="op", tag="commit"):
    """Append what these attempts staged, in this order, and nothing else of the writer's batch. Answered with Committed."""

    writer: Name
    batch: Offset
    attempts: Annotated[list[Attempt], Meta(max_length=MAX_ATTEMPTS)]


class Discard(Struct, frozen=True, tag_field="op", tag="discard"):
    """Forget what these attempts staged, or all attempts at the batch. Answered with Settled, which counts records."""

    writer: Name
    batch: Offset
    attempts: Annotated[list[Id16], Meta(max_length=MAX_ATTEMPTS)] = []


class Copy(Struct, frozen=True, tag_field="op", tag="copy"):
    """To a copy: what the log `uuid` holds from `start` until `next`, side by side. Answered with Copied once it is on disk.

    It is taken only if `start` is where the copy ends, so one that comes again or late changes nothing. Without items it says
    where the source ends, and no more.
    """

    uuid: Id16
    start: Offset
    next: Offset
    items: Annotated[list[Item], Meta(max_length=MAX_COPY_ITEMS)]
    high_water: Offset = 0
    """Where the source ended when it was read."""


class Fetch(Struct, frozen=True, tag_field="op", tag="fetch"):
    """Read from `start` on. Answered with Fetched: at once if there is something, else within `wait_ms`."""

    start: Offset
    max_bytes: Annotated[int, Meta(ge=1, le=64 << 20)]
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class Find(Struct, frozen=True, tag_field="op", tag="find"):
    """Answered with Found: the first offset stored at `time_us` or later."""

    time_us: Time


class Consume(Struct, frozen=True, tag_field="op", tag="consume"):
    """Take what is next for a worker of a consumer, which is made if it is new. Answered with Delivered.

    The settings count when the consumer is made; later ones have to be equal.
    """

    consumer: Name
    worker: Id16
    max_bytes: Annotated[int, Meta(ge=1, le=64 << 20)]
    max_messages: Annotated[int, Meta(ge=1, le=1 << 20)]
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    start: Offset = 0
    group: bool = False
    durable: bool = True
    ack_timeout_us: Annotated[int, Meta(ge=1000, le=86_400_000_000)] = 30_000_000
    max_deliver: Annotated[int, Meta(ge=0, le=65_535)] = 0
    again: bool = False
    """The last answer was lost: what this worker holds is handed out again."""


class Range(Struct, frozen=True, array_like=True):
    """Messages from `first` until `next`."""

    first: Offset
    next: Offset


class Settle(Struct, frozen=True, tag_field="op", tag="settle"):
    """What a worker says of what it was handed. Answered with Settled.

    `through`: everything that was handed out up to this offset is done. Of `failed` (with `delay_us` and `reason`) delivery is
    repeated, `held` get the acknowledgement time once more. `gone`: the worker ends, the rest of it goes to others.
    """

    consumer: Name
    worker: Id16
    done: Annotated[list[Range], Meta(max_length=4096)] = []
    failed: Annotated[list[Range], Meta(max_length=4096)] = []
    held: Annotated[list[Range], Meta(max_length=4096)] = []
    through: Offset | None = None
    delay_us: Time = 0
    reason: Text = ""
    gone: bool = False
    had: Annotated[list[Range], Meta(max_length=4096)] = []
    """These have come, and nothing is to be said of them yet: a worker that asks for more says as much of all that it was handed."""


class DescribeConsumers(Struct, frozen=True, tag_field="op", tag="consumers"):
    """Answered with Consumers, those behind the name `after`."""

    after: Annotated[str, Meta(max_length=255)] = ""


class DeleteConsumer(Struct, frozen=True, tag_field="op", tag="delete-consumer"):
    """Forget a consumer's cursor. Answered with Settled."""

    consumer: Name


# -- answers -----------------------------------------------------------------------------------------------------


class StoreInfo(Struct, frozen=True, tag_field="op", tag="store"):
    """The store's public key, by which orders name it, and the host's name."""

    key: Key32
    label: ShortText = ""


class Door(Struct, frozen=True, tag_field="op", tag="door"):
    """Names the store and log that was knocked at. `orders` show whose it is. Use `nonce` in Open, before it expires."""

    store: Key32
    uuid: Id16
    """Uuid of the log; `NO_LOG` for the store itself."""
    nonce: Key32
    orders: Annotated[list[SignedOrder], Meta(max_length=MAX_ORDERS)] = []


class Opened(Struct, frozen=True, tag_field="op", tag="opened"):
    """The channel is open. From now on its keys authenticate calls and answers."""

    channel: Offset
    share: Key32
    signature: Signature


class Described(Struct, frozen=True, tag_field="op", tag="described"):
    """A stream as its store knows it."""

    definition: Definition
    uuid: Id16
    epoch: Offset
    orders: Annotated[list[SignedOrder], Meta(max_length=MAX_ORDERS)]
    """What it is kept by: a reader believes those alone that its own keys signed."""
    store: Key32
    label: ShortText
    """The store's host."""
    created_us: Time
    oldest: Offset
    next: Offset
    messages: Offset
    size_bytes: Offset
    lost: Offset = 0
    """Messages told in gap records since the store started."""
    failed: Text = ""
    """Why it takes no writes, or cannot be read at all."""
    readable: bool = True
    source_next: Offset = 0
    """Of a copy: where its source ended when that was last heard of, 0 if not since the store started; its lag is to there."""
    heard_us: Time = 0
    """Of a copy: when that was."""


class Listed(Struct, frozen=True, tag_field="op", tag="listed"):
    """`more`: ask again, after the last."""

    streams: Annotated[list[Described], Meta(max_length=MAX_LISTED)]
    more: bool = False


class Appended(Struct, frozen=True, tag_field="op", tag="appended"):
    """One outcome for each record."""

    outcomes: list[Outcome]


class Staged(Struct, frozen=True, tag_field="op", tag="staged"):
    """On disk, or of a batch that is not above the writer's last one: then a Commit is a replay."""


class Committed(Struct, frozen=True, tag_field="op", tag="committed"):
    """The batch has the offsets from `first` until `next`, which are equal if it is empty; both None if a later one was committed.

    `replayed`: it was committed before, and nothing changed.
    """

    first: Offset | None
    next: Offset | None
    replayed: bool = False


class Copied(Struct, frozen=True, tag_field="op", tag="copied"):
    """The copy ends at `next`. `taken`: by this call; else it is to go on from there."""

    next: Offset
    taken: bool = False


class Fetched(Struct, frozen=True, tag_field="op", tag="fetched"):
    """Items side by side from where the read began until `next`; none if nothing came in time."""

    items: list[Item]
    next: Offset
    oldest: Offset
    high_water: Offset
    uuid: Id16


class Found(Struct, frozen=True, tag_field="op", tag="found"):
    """An offset."""

    offset: Offset


class Handed(Struct, frozen=True, array_like=True):
    """An item for a worker: of a record the messages in `wanted` (one bit each, little-endian bytes), for the nth time."""

    item: Item
    wanted: bytes = b""
    deliveries: U32 = 1


class Delivered(Struct, frozen=True, tag_field="op", tag="delivered"):
    """What a worker was handed; nothing if nothing came in time."""

    items: list[Handed]
    uuid: Id16
    lag: Offset = 0
    fenced: bool = False
    """Another worker has taken over: this one gets nothing any more."""


class Settled(Struct, frozen=True, tag_field="op", tag="settled"):
    """Done. `count`: how many messages of a Settle that was."""

    count: Offset = 0


class ConsumerInfo(Struct, frozen=True):
    """Where a consumer is. `lag` counts what is not settled, `pending` what workers hold."""

    name: Name
    group: bool
    durable: bool
    floor: Offset
    position: Offset
    lag: Offset
    pending: Offset
    redelivering: Offset
    workers: U32
    dead: Offset = 0
    missed: Offset = 0
    late: Offset = 0


class Consumers(Struct, frozen=True, tag_field="op", tag="consumers"):
    """Of one stream. `more`: ask again, after the last."""

    consumers: list[ConsumerInfo]
    more: bool = False


class Refused(Struct, frozen=True, tag_field="op", tag="refused"):
    """Not done. `code` is one of the `REFUSALS`."""

    code: Annotated[str, Meta(max_length=32)]
    detail: Text
    sure: bool = False
    """Of "disk": nothing of the call was written, so nothing of it will be found."""


REFUSALS: Final = frozenset(
    {"no-stream", "exists", "order", "revision", "paused", "damaged", "disk", "offset", "consumer", "invalid", "full", "leaving", "failed",
     "staged", "channel"}
)  # fmt: skip

Call = (
    FindStore
    | Knock
    | Open
    | Create
    | ListStreams
    | Describe
    | Change
    | Delete
    | Append
    | Stage
    | Commit
    | Discard
    | Copy
    | Fetch
    | Find
    | Consume
    | Settle
    | DescribeConsumers
    | DeleteConsumer
)
Answer = (
    StoreInfo
    | Door
    | Opened
    | Described
    | Listed
    | Appended
    | Staged
    | Committed
    | Copied
    | Fetched
    | Found
    | Delivered
    | Settled
    | Consumers
    | Refused
)

encode: Final = msgspec.msgpack.Encoder().encode
"""Return the bytes of a call, answer or order."""
_decode_call: Final = msgspec.msgpack.Decoder(Call).decode
_decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
_decode_dead: Final = msgspec.msgpack.Decoder(DeadLetter).decode
_BAD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def dead_uuid(uuid: bytes) -> bytes:
    """Return the uuid of the log of a stream's dead letters."""
    return hashlib.sha256(b"iris-dead-letters-1" + uuid).digest()[:16]


def decode_call(body: bytes | memoryview) -> Call:
    """Return what a client asks of a store; raises DecodeError."""
    try:
        return _decode_call(body)  # type: ignore[no-any-return]  # a decoder of a union
    except _BAD as err:
        raise DecodeError(f"a call to a store cannot be decoded: {err}") from err


def decode_answer(body: bytes | memoryview) -> Answer:
    """Return what a store answers; raises DecodeError."""
    try:
        return _decode_answer(body)  # type: ignore[no-any-return]  # a decoder of a union
    except _BAD as err:
        raise DecodeError(f"a store's answer cannot be decoded: {err}") from err


def decode_dead(body: bytes) -> DeadLetter:
    """Return the reference in a record of kind `DEAD_KIND`; raises DecodeError."""
    try:
        return _decode_dead(body)
    except _BAD as err:
        raise DecodeError(f"a dead letter cannot be decoded: {err}") from err
