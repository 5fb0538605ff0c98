"""Calls about the consumers of a stream, and the answers. `iris.wire.streams` has all other calls to stores."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from iris.wire.frames import Id16, Name, Text
from iris.wire.orders import U32, Offset, Time
from iris.wire.stream_items import Item

ACK_TIMEOUT_US: Final = (1000, 86_400_000_000)
"""Shortest and longest ack timeout, in µs."""
MAX_DELIVER: Final = 65_535
MAX_CONSUMED: Final = 1 << 20
"""Most messages in one delivery."""
MAX_LABEL: Final = 160
"""Most characters of what people are shown of a worker."""
MAX_SHOWN: Final = 8
"""Most workers that stand by which are shown of a consumer."""
MAX_PLACES: Final = 4096
"""Most places in one "attended"."""
MAX_REDRIVEN: Final = 1024
"""Most dead letters in one "redrive"."""


# -- calls -------------------------------------------------------------------------------------------------------


class Range(Struct, frozen=True, array_like=True):
    """Messages from offset `first` up to, but not including, `next`."""

    first: Offset
    next: Offset


class Consume(Struct, frozen=True, tag_field="op", tag="consume"):
    """Request for the next items for a worker of a consumer. Answered with Delivered.

    With `create`, a new consumer is created with these settings; later calls must have equal settings.

    Unless the consumer is `shared`, one worker is active, and the others stand by in the order in which they first
    asked.
    """

    consumer: Name
    worker: Id16
    max_bytes: Annotated[int, Meta(ge=1, le=64 << 20)]
    prefetch: Annotated[int, Meta(ge=1, le=MAX_CONSUMED)]
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    start: Offset = 0
    shared: bool = False
    durable: bool = True
    ack_timeout_us: Annotated[int, Meta(ge=ACK_TIMEOUT_US[0], le=ACK_TIMEOUT_US[1])] = 30_000_000
    max_deliver: Annotated[int, Meta(ge=0, le=MAX_DELIVER)] = 0
    again: bool = False
    """Whether the last answer was lost, so that everything this worker holds must be delivered again."""
    create: bool = True
    """Whether the consumer is created if it does not exist. A relay allows that to no session with a ticket."""
    lease: Id16 | None = None
    """The lease of this client's workers, which Attend renews; None: the calls of this worker alone renew it."""
    label: Annotated[str, Meta(max_length=MAX_LABEL)] = ""
    """What people are shown of the worker."""
    was_active: bool = False
    """Whether the worker was active when it last heard of it, so that it is again after a restart of the store."""


class Settle(Struct, frozen=True, tag_field="op", tag="settle"):
    """A worker's report on messages delivered to it. Answered with Settled.

    `done` messages are finished, and so are all delivered up to the offset `through`. `failed` messages are delivered
    again, after `delay_us`, for `reason`. `held` messages get the acknowledgement timeout again. `gone` means that the
    worker ends, so its other messages go to other workers.
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
    """Messages that arrived and are still unfinished. A worker that requests more lists all that it holds here."""
    unseen: Annotated[list[Range], Meta(max_length=4096)] = []
    """Messages that the worker returns without having begun with them; this does not count as a delivery."""


class Attend(Struct, frozen=True, tag_field="op", tag="attend"):
    """Renews the lease of a client's workers at a store, of all streams there. Answered with Attended.

    The answer comes when the place of one of them changes, or after `wait_ms`. The call may go to any stream in which
    the client has a worker of the `consumer`.
    """

    consumer: Name
    lease: Id16
    wait_ms: Annotated[int, Meta(ge=0, le=10_000)] = 0


class HandOver(Struct, frozen=True, tag_field="op", tag="hand-over"):
    """Request to let the next worker that stands by be active. Answered with Consumers, which lists this one."""

    consumer: Name


class DescribeConsumers(Struct, frozen=True, tag_field="op", tag="consumers"):
    """Request for the consumers after the name `after`. Answered with Consumers."""

    after: Annotated[str, Meta(max_length=255)] = ""
    workers: bool = False
    """Whether to say which workers are active and stand by. A relay allows that to no session with a ticket."""


class DeleteConsumer(Struct, frozen=True, tag_field="op", tag="delete-consumer"):
    """Request to delete a consumer and its position. Answered with Settled."""

    consumer: Name


class ChangeConsumer(Struct, frozen=True, tag_field="op", tag="change-consumer"):
    """Request to change a consumer's settings, or to pause or resume it; None leaves a field as it is.

    Its position and what its workers hold stay. Answered with Consumers, which lists this one.
    """

    consumer: Name
    ack_timeout_us: Annotated[int, Meta(ge=ACK_TIMEOUT_US[0], le=ACK_TIMEOUT_US[1])] | None = None
    max_deliver: Annotated[int, Meta(ge=0, le=MAX_DELIVER)] | None = None
    paused: bool | None = None


class RedriveLetters(Struct, frozen=True, tag_field="op", tag="redrive"):
    """Request to deliver the messages of these dead letters to their consumer again, and to delete the letters.

    `letters` are offsets in the stream of dead letters, ascending. Answered with Redriven. A repeated request
    changes nothing.
    """

    consumer: Name
    letters: Annotated[list[Offset], Meta(min_length=1, max_length=MAX_REDRIVEN)]


# -- answers -----------------------------------------------------------------------------------------------------


class Handed(Struct, frozen=True, array_like=True):
    """An item for a worker, delivered for the `deliveries`-th time.

    `wanted` selects messages of a record: one bit each, in little-endian bytes.
    """

    item: Item
    wanted: bytes = b""
    deliveries: U32 = 1


class Delivered(Struct, frozen=True, tag_field="op", tag="delivered"):
    """Items delivered to a worker; none if nothing came in time."""

    items: list[Handed]
    uuid: Id16
    lag: Offset = 0
    ack_timeout_us: Offset = 0
    """The ack timeout in force, if it is not the one in the call; else 0."""


class Placed(Struct, frozen=True, array_like=True):
    """A worker and its place: 0 if it is active, else the number of workers before it."""

    worker: Id16
    place: U32


class Attended(Struct, frozen=True, tag_field="op", tag="attended"):
    """The places of a client's workers at the store `store`. A worker that is not listed has none."""

    store: Id16
    places: Annotated[list[Placed], Meta(max_length=MAX_PLACES)] = []


class ConsumerInfo(Struct, frozen=True):
    """State of a consumer. All numbers are messages, except `workers` and the offsets `floor` and `position`.

    `workers` hold messages or wait for some. `lag` counts messages that are not settled, and `pending` those that
    workers hold. `redelivering` wait to be delivered again. `dead` are dead letters that are not stored in the stream
    of dead letters yet, so it is 0 as soon as they are. `missed` and `late` count since the consumer was created:
    messages that were removed or damaged before they were settled, and acks of messages that were settled already.
    """

    name: Name
    shared: bool
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
    paused: bool = False
    """Nothing is delivered until it is resumed."""
    ack_timeout_us: Offset = 0
    max_deliver: U32 = 0
    redriven: Offset = 0
    """Dead letters that were delivered again on request, since the consumer was created."""
    active: list[str] = []
    """The active worker, unless the consumer is shared. In several partitions, all of them."""
    standing_by: list[str] = []
    """Workers that stand by, the next one first; at most `MAX_SHOWN` of a partition."""
    standing: U32 = 0
    """How many workers stand by."""


class Consumers(Struct, frozen=True, tag_field="op", tag="consumers"):
    """Consumers of one stream. With `more`, request again after the last."""

    consumers: list[ConsumerInfo]
    more: bool = False


class Redriven(Struct, frozen=True, tag_field="op", tag="redriven"):
    """The first `count` letters were dealt with: their messages will be delivered, except for the offsets `gone`.

    Those were removed from the stream, and their letters stay. If `count` is lower than the number of letters, the
    others must wait until workers settle some messages.
    """

    count: Offset
    gone: Annotated[list[Offset], Meta(max_length=MAX_REDRIVEN)] = []
