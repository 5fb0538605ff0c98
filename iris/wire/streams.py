"""Calls of clients to stores and the answers: the bodies of STREAM and STREAM_REPLY frames.

A body is one MessagePack map (`Call` or `Answer`, distinguished by "op"). It is in clear, because the store acts on its
fields. Records in it stay sealed as they were published (`iris.wire.stream_items`). Offsets number the messages of a
stream. Times are in µs since 1970, 0 = none. The calls about consumers are in `iris.wire.consumers`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from iris.errors import DecodeError
from iris.wire.consumers import (
    Attend,
    Attended,
    ChangeConsumer,
    Consume,
    Consumers,
    DeleteConsumer,
    Delivered,
    DescribeConsumers,
    HandOver,
    RedriveLetters,
    Redriven,
    Settle,
)
from iris.wire.frames import Id16, Name, Text
from iris.wire.orders import (
    MAX_ORDERS,
    MAX_PARTITIONS,
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
from iris.wire.stream_items import Item
from iris.wire.words import in_words

MAX_PAGE_BYTES: Final = 64 << 20
MAX_LISTED: Final = 64
"""Most streams in one answer to "list"."""
NO_PRODUCER: Final = bytes(16)
NO_LOG: Final = bytes(16)
"""Value for a log's uuid that means the store itself."""
MAX_WRITER_BYTES: Final = 255
MAX_ATTEMPTS: Final = 65_536
"""Most attempts in a Commit or Discard, and for a partition in a Plan; the message limit applies, too."""
COMMIT_BYTES: Final = 256 << 20
"""Limit of the bodies in a commit, and in an attempt. During a commit, which is one write, the store waits."""
MAX_COPY_ITEMS: Final = 4096
MAX_TICKET_BYTES: Final = 1024
MAX_STATE_KEY_BYTES: Final = 2048


# -- new records -------------------------------------------------------------------------------------------------


class NewRecord(Struct, frozen=True, array_like=True, gc=False):
    """A record to append, sealed as kind STREAM under the stream's name and the key id of the call."""

    sequence: Offset
    """Number of the record at the call's producer; each is one more than the one before."""
    end: End
    body: bytes
    key_hash: Hash = b""
    tombstone: bool = False
    expires_us: Time = 0
    due_us: Time = 0
    expect: Offset | None = None
    """If set, append only if this is the next offset."""
    id_hash: Hash = b""
    """Hash of the message's id. The record is stored only if the stream does not remember another
    message with this id."""


class Outcome(Struct, frozen=True, array_like=True):
    """Result for a new record. `status` is one of the five constants below."""

    status: Annotated[int, Meta(ge=0, le=255)]
    value: Offset | None
    """STORED and DUPLICATE: its first offset (None if too long ago to know). OUT_OF_ORDER: the expected sequence.
    FENCED: the producer's epoch. CONFLICT: the next offset."""


STORED: Final = 0
DUPLICATE: Final = 1
OUT_OF_ORDER: Final = 2
FENCED: Final = 3
CONFLICT: Final = 4


# -- calls -------------------------------------------------------------------------------------------------------


class FindStore(Struct, frozen=True, tag_field="op", tag="store"):
    """Request for the identity of the store that receives it. Answered with StoreInfo."""


class Knock(Struct, frozen=True, tag_field="op", tag="knock"):
    """First step to open a channel (`iris.crypto.channel`) to a stream or to a store itself. Answered with Door."""

    nonce: Key32


class Open(Struct, frozen=True, tag_field="op", tag="open"):
    """Second step: open the channel under the key of `public_key`.

    `door` is the nonce of the Door. Answered with Opened.
    """

    nonce: Key32
    door: Key32
    public_key: Key32
    share: Key32
    signature: Signature


class Create(Struct, frozen=True, tag_field="op", tag="create"):
    """Request to one store to keep a stream. Answered with Described once the stream can be written to.

    The key of the first order founds the stream: `log_uuid` of it and `salt` is the uuid of all orders, and it
    countersigns the others.
    """

    orders: Orders
    salt: Id16


class ListStreams(Struct, frozen=True, tag_field="op", tag="list"):
    """Request for the streams of one store under the key of the channel. Answered with Listed."""

    after: Annotated[str, Meta(max_length=300)] = ""
    """Position at which the last answer ended."""


class Describe(Struct, frozen=True, tag_field="op", tag="describe"):
    """Request for the state of the stream. Answered with Described."""


class Change(Struct, frozen=True, tag_field="op", tag="change"):
    """Orders of the next revision: another definition, or one more key. Answered with Described."""

    orders: Orders


class Delete(Struct, frozen=True, tag_field="op", tag="delete"):
    """Request to end the stream and remove its log. Answered with Settled."""

    orders: Orders


class Move(Struct, frozen=True, tag_field="op", tag="move"):
    """Request to the store that has a stream of a bucket to release it to another store of the bucket, which the
    orders name. Answered with Moving."""

    orders: Orders


class Take(Struct, frozen=True, tag_field="op", tag="take"):
    """Request to a store to take the stream of a ticket. Answered with Settled once the store serves the stream."""

    ticket: Annotated[bytes, Meta(max_length=MAX_TICKET_BYTES)]


class Append(Struct, frozen=True, tag_field="op", tag="append"):
    """Records to append, sealed by `sender_id`. Answered with Appended once all of them are on disk."""

    sender_id: Id16
    records: Annotated[list[NewRecord], Meta(min_length=1, max_length=4096)]
    producer: Id16 = NO_PRODUCER
    """Id of the producer. With NO_PRODUCER, the store cannot distinguish retries of these records from new ones."""
    epoch: U32 = 0


class Stage(Struct, frozen=True, tag_field="op", tag="stage"):
    """Records of one attempt at a writer's batch, which stay invisible until a Commit. Answered with Staged
    once on disk.

    `sequence` of a record is its index in the attempt, from 0. A record that is already staged is not staged again.
    """

    writer: Name
    """Name of the writer, up to `MAX_WRITER_BYTES`."""
    batch: Offset
    attempt: Id16
    sender_id: Id16
    records: Annotated[list[NewRecord], Meta(min_length=1, max_length=4096)]


class Attempt(Struct, frozen=True, array_like=True):
    """One attempt at a batch, and the number of records that it staged."""

    attempt: Id16
    records: U32


class Commit(Struct, frozen=True, tag_field="op", tag="commit"):
    """Request to append the records staged by these attempts, in this order, and no others of the batch.

    Answered with Committed.
    """

    writer: Name
    batch: Offset
    attempts: Annotated[list[Attempt], Meta(max_length=MAX_ATTEMPTS)]


class PlannedPart(Struct, frozen=True, array_like=True):
    """The attempts that a batch commits in one partition, in this order."""

    partition: Annotated[int, Meta(ge=0, lt=MAX_PARTITIONS)]
    attempts: Annotated[list[Attempt], Meta(min_length=1, max_length=MAX_ATTEMPTS)]


class Plan(Struct, frozen=True, tag_field="op", tag="plan"):
    """Request to partition 0 to store what a batch commits in all partitions, before any of them does.

    Answered with Planned, once on disk. A plan stays until its batch is committed in partition 0, which is the last.
    """

    writer: Name
    batch: Offset
    parts: Annotated[list[PlannedPart], Meta(max_length=MAX_PARTITIONS)]


class Discard(Struct, frozen=True, tag_field="op", tag="discard"):
    """Request to delete the records staged by these attempts, or by all, and the plan of the batch, if none is named.

    Answered with Settled, which counts them.
    """

    writer: Name
    batch: Offset
    attempts: Annotated[list[Id16], Meta(max_length=MAX_ATTEMPTS)] = []


class Copy(Struct, frozen=True, tag_field="op", tag="copy"):
    """Items for a copy: everything in the log `uuid` from `start` up to `next`, without gaps. Answered with
    Copied once on disk.

    The copy accepts it only if it ends at `start`, so a repeated or late one changes nothing. Without items it only
    reports where the source ends.
    """

    uuid: Id16
    start: Offset
    next: Offset
    items: Annotated[list[Item], Meta(max_length=MAX_COPY_ITEMS)]
    high_water: Offset = 0
    """Next offset of the source when it was read."""
    shown: Offset | None = None
    """For the copy of a partition: readers and consumers of it are shown what is below this offset from now on."""
    cut: Annotated[list[Offset], Meta(max_length=MAX_PARTITIONS)] = []
    """For the copy of partition 0: what `shown` is, or will be, in all partitions."""


class FetchState(Struct, frozen=True, tag_field="op", tag="state"):
    """Request for what a stream has besides its records, which is being handed over: rows behind the key `after`.
    Answered with StateRows."""

    after: Annotated[bytes, Meta(max_length=MAX_STATE_KEY_BYTES)] = b""


class StateRow(Struct, frozen=True, array_like=True, gc=False):
    """A row of a stream's state, in the store's own layout (`relay.store.state`)."""

    key: Annotated[bytes, Meta(min_length=1, max_length=MAX_STATE_KEY_BYTES)]
    value: bytes


class Carry(Struct, frozen=True, tag_field="op", tag="carry"):
    """State and dead letters of the log `uuid`, for the copy that is to replace it. Answered with Copied, once on disk:
    `next` is where the copy's dead letters end.

    `first` deletes what the copy had of this state; after `last` it is complete. `letters` are as the items of a Copy,
    from `start` up to `next`. They refer to the copy instead of the log once they are written.
    """

    uuid: Id16
    rows: Annotated[list[StateRow], Meta(max_length=MAX_COPY_ITEMS)] = []
    first: bool = False
    last: bool = False
    letters: Annotated[list[Item], Meta(max_length=MAX_COPY_ITEMS)] = []
    start: Offset = 0
    next: Offset = 0


class Supersede(Struct, frozen=True, tag_field="op", tag="supersede"):
    """Orders of the stream that has taken, or is about to take, the place of this one. Answered with Described: from
    then on this log is only read, by its uuid."""

    orders: Orders


class Fetch(Struct, frozen=True, tag_field="op", tag="fetch"):
    """Request to read from `start` on.

    Answered with Fetched: at once if there is an item, otherwise within `wait_ms`.
    """

    start: Offset
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_PAGE_BYTES)]
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class Find(Struct, frozen=True, tag_field="op", tag="find"):
    """Request for the first offset stored at `time_us` or later. Answered with Found."""

    time_us: Time


# -- answers -----------------------------------------------------------------------------------------------------


class BucketState(Struct, frozen=True, array_like=True):
    """How a store gets on with its bucket, for monitoring."""

    away: Text
    """Why the store cannot write to its bucket now; empty if it can."""
    waiting: Offset
    """Bytes that wait to be written there."""
    left: Text
    """Why the store cannot take over from stores that are gone, although the bucket answers; empty if it can."""
    taken: U32
    """Journals that other stores have taken over from this one since its start."""
    taken_s: U32
    """Seconds since the last of them was; 0 if none was."""


class StoreInfo(Struct, frozen=True, tag_field="op", tag="store"):
    """The store's public key, by which orders name it, and its host's name.

    `group` is the public key of the stores that share its bucket, by which orders for streams in the bucket name
    them; empty without a bucket.
    """

    key: Key32
    label: ShortText = ""
    group: Annotated[bytes, Meta(max_length=32)] = b""
    bucket: BucketState | None = None
    """None without a bucket."""
    superseded: U32 = 0
    """Streams that it only keeps, because other logs have taken their places."""
    only_there: Offset = 0
    """Offsets of these streams that the other logs do not have: messages that were lost to them."""


class Door(Struct, frozen=True, tag_field="op", tag="door"):
    """Answer to Knock: the store and the log.

    `orders` prove whose log it is. `nonce` is for Open, before it expires.
    """

    store: Key32
    uuid: Id16
    """Uuid of the log; `NO_LOG` for the store itself."""
    nonce: Key32
    orders: Annotated[list[SignedOrder], Meta(max_length=MAX_ORDERS)] = []


class Opened(Struct, frozen=True, tag_field="op", tag="opened"):
    """Answer to Open: the channel is open, and its keys authenticate calls and answers from now on."""

    channel: Offset
    share: Key32
    signature: Signature


class Superseded(Struct, frozen=True, array_like=True):
    """The log that has taken the place of another one."""

    uuid: Id16
    next: Offset
    """From this offset on, the two logs have different messages."""


class Described(Struct, frozen=True, tag_field="op", tag="described"):
    """State of a stream at its store."""

    definition: Definition
    uuid: Id16
    epoch: Offset
    orders: Annotated[list[SignedOrder], Meta(max_length=MAX_ORDERS)]
    """Orders under which it is kept. A reader believes only those signed by its own keys."""
    store: Key32
    label: ShortText
    """The store's host."""
    created_us: Time
    oldest: Offset
    next: Offset
    messages: Offset
    size_bytes: Offset
    lost: Offset = 0
    """Messages reported as lost, in gap records, since the store started."""
    failed: Text = ""
    """Why it accepts no writes, or cannot be read at all; empty if it works."""
    readable: bool = True
    source_next: Offset = 0
    """For a copy: next offset of its source when last reported, 0 if not since the store started. The
    lag is up to there."""
    heard_us: Time = 0
    """For a copy: time of that report."""
    holder: Annotated[bytes, Meta(max_length=32)] = b""
    """For a stream in a bucket, whose `store` is the key of all stores that share it: the public key of the store
    that holds it now. Else empty."""
    moved_bytes: Offset = 0
    """For a stream in a bucket: the part of `size_bytes` that is in segment objects alone, not on the store's disk."""
    plans: U32 = 0
    """For partition 0: the number of batches over several partitions whose commit has begun and not ended."""
    cut: Annotated[list[Offset], Meta(max_length=MAX_PARTITIONS)] = []
    """For a copy of partition 0: where the part ends that may be shown, for each partition; empty at first."""
    planned: Offset = 0
    """For partition 0: a number that changes whenever such a commit begins."""
    superseded: Superseded | None = None
    """The log that has taken the place of this one, which is only read by its uuid."""


class Moving(Struct, frozen=True, tag_field="op", tag="moving"):
    """The stream is released. The store that was named serves it after a Take with this ticket, which only stores of
    the bucket can read. Without one the stream goes on where it was."""

    ticket: Annotated[bytes, Meta(max_length=MAX_TICKET_BYTES)]


class Listed(Struct, frozen=True, tag_field="op", tag="listed"):
    """Streams of one store. With `more`, list again after the last."""

    streams: Annotated[list[Described], Meta(max_length=MAX_LISTED)]
    more: bool = False


class Appended(Struct, frozen=True, tag_field="op", tag="appended"):
    """One outcome for each record of an Append."""

    outcomes: list[Outcome]


class Staged(Struct, frozen=True, tag_field="op", tag="staged"):
    """The records are on disk, or their batch is not later than the writer's last committed one: then a
    Commit is a replay."""


class Committed(Struct, frozen=True, tag_field="op", tag="committed"):
    """The batch has the offsets from `first` up to, but not including, `next`; they are equal if it is empty.

    Both are None if a later batch was committed. `replayed`: it was committed before, and nothing changed.
    """

    first: Offset | None
    next: Offset | None
    replayed: bool = False


class Planned(Struct, frozen=True, tag_field="op", tag="planned"):
    """The plan of `writer` that is in force: the one of the call, or an earlier one, perhaps of another batch.

    Without `parts` there is nothing to commit, or the batch is not later than the last one committed in partition 0.
    """

    batch: Offset
    parts: Annotated[list[PlannedPart], Meta(max_length=MAX_PARTITIONS)]


class Copied(Struct, frozen=True, tag_field="op", tag="copied"):
    """The copy ends at `next`. If not `taken`, it did not accept the items, and the next Copy must start there."""

    next: Offset
    taken: bool = False


class StateRows(Struct, frozen=True, tag_field="op", tag="state"):
    """Rows of a stream's state, in the order of their keys. With `more`, ask again after the last."""

    rows: Annotated[list[StateRow], Meta(max_length=MAX_COPY_ITEMS)]
    more: bool = False
    letters: Offset = 0
    """Where the dead letters of the stream end; 0 if it has none."""


class Fetched(Struct, frozen=True, tag_field="op", tag="fetched"):
    """Items without gaps from the start of the read up to `next`; none if nothing came in time."""

    items: list[Item]
    next: Offset
    oldest: Offset
    high_water: Offset
    uuid: Id16


class Found(Struct, frozen=True, tag_field="op", tag="found"):
    """Answer to Find: the offset."""

    offset: Offset


class Settled(Struct, frozen=True, tag_field="op", tag="settled"):
    """The call was carried out. `count` is the number of messages or records that it settled or discarded."""

    count: Offset = 0


class Refused(Struct, frozen=True, tag_field="op", tag="refused"):
    """The call was not carried out. `code` is one of the `REFUSALS`."""

    code: Annotated[str, Meta(max_length=32)]
    detail: Text
    sure: bool = False
    """With code "disk": nothing of the call was written, so nothing of it will be found later."""


REFUSALS: Final = frozenset(
    {"no-stream", "exists", "order", "revision", "paused", "damaged", "disk", "offset", "consumer", "invalid", "full", "leaving", "failed",
     "staged", "channel", "moved", "superseded", "not-active", "workers"}
)  # fmt: skip

Call = (
    FindStore | Knock | Open | Create | ListStreams | Describe | Change | Delete | Append | Stage | Commit | Plan
    | Discard | Copy | Fetch | Find | Consume | Settle | DescribeConsumers | DeleteConsumer | ChangeConsumer
    | RedriveLetters | Move | Take | FetchState | Carry | Supersede | Attend | HandOver
)  # fmt: skip
Answer = (
    StoreInfo | Door | Opened | Described | Listed | Appended | Staged | Committed | Planned | Copied | Fetched
    | Found | Delivered | Settled | Consumers | Redriven | Moving | StateRows | Attended | Refused
)  # fmt: skip

encode: Final = msgspec.msgpack.Encoder().encode
"""Return the bytes of a call, answer or order."""
_decode_call: Final = msgspec.msgpack.Decoder(Call).decode
_decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
_BAD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_call(body: bytes | memoryview) -> Call:
    """Decode a client's call to a store. Raises DecodeError."""
    try:
        return _decode_call(body)  # type: ignore[no-any-return]  # a decoder of a union
    except _BAD as err:
        raise DecodeError(f"the store cannot read the call: {in_words(err)}") from err


def decode_answer(body: bytes | memoryview) -> Answer:
    """Decode a store's answer. Raises DecodeError."""
    try:
        return _decode_answer(body)  # type: ignore[no-any-return]  # a decoder of a union
    except _BAD as err:
        raise DecodeError(f"a store's answer cannot be decoded: {err}") from err
