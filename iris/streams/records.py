"""What readers of a stream receive: messages with offsets, gaps that report missing ones, and pages of both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, Protocol

import msgspec

from iris.core.bundle import decode_keyed
from iris.core.message import Message
from iris.crypto.keys import ClusterKey
from iris.crypto.sframe import Opener
from iris.errors import DecodeError, OpenError
from iris.one_process import OneProcess
from iris.streams.verified import VerifiedStream
from iris.wire.codec import END, metadata_prefix
from iris.wire.kinds import Kind
from iris.wire.names import matches
from iris.wire.orders import Definition, Origin
from iris.wire.stream_items import (
    DEAD_KIND,
    HOLES,
    DeadLetter,
    Gap,
    Hole,
    Item,
    Record,
    decode_dead,
)
from iris.wire.streams import Fetched

MAX_OPENERS: Final = 16_384
_OpenerKey = tuple[int, str, bytes, bytes]
"""(kind, name, key id, sender id) of a record."""


class Settling(Protocol):
    """A worker of a consumer, as a message sees it: it may be of a client with or without an event loop."""

    def ack(self, *messages: StreamMessage) -> None: ...
    def nack(self, *messages: StreamMessage, delay: float = 0.0, reason: str = "") -> None: ...
    def touch(self, *messages: StreamMessage) -> None: ...


class Settler(msgspec.Struct, dict=True):
    """Leads from a message to the worker that received it. All messages of a worker share one.

    It is not part of the message's value: two are always equal, and one that was pickled leads nowhere.
    """

    def bind(self, worker: Settling) -> None:
        """Lead to `worker`. The reference is weak, because messages are not seen by the garbage collector."""
        self.__dict__["worker"] = weakref.ref(worker)

    def worker(self) -> Settling | None:
        """Return the worker; None for a copy, or if the worker is gone."""
        found = self.__dict__.get("worker")
        return None if found is None else found()


class StreamMessage(Message, gc=False):
    """A message of a stream. `name` is the topic, cluster or stream it was sent to; times are µs since 1970.

    `deliveries` counts its deliveries to workers of a consumer. `dead` is set for a dead letter and says why it is one.

    `ack`, `nack` and `touch` settle a message that a consumer delivered, as those of `Consumer` do. They raise
    ValueError for a message that was read without a consumer or was pickled, and what those of `Consumer` raise.
    """

    offset: int = 0
    stored_us: int = 0
    """When the store stored it, by the store's clock."""
    sent_us: int = 0
    tombstone: bool = False
    deliveries: int = 1
    dead: DeadLetter | None = None
    key: bytes | None = None
    """The key given to `append`, sealed like the payload."""
    partition: int = 0
    """The partition of the stream that `offset` counts in."""
    stream: str = ""
    """Name of the stream that it was read from, or of its partition, such as "orders/3"."""
    uuid: str = ""
    """Identity of the log that `offset` counts in, in hex; see `StreamInfo.uuid`."""
    consumer: str = ""
    """Name of the consumer that delivered it; empty for a reader."""
    settler: Settler | None = None
    """Leads to the worker that received it; None for a reader."""

    def ack(self) -> None:
        """Acknowledge it: it is done and is not delivered again."""
        self._worker().ack(self)

    def nack(self, delay: float = 0.0, reason: str = "") -> None:
        """Report that it failed: it is delivered again after `delay` seconds. A dead letter keeps `reason`."""
        self._worker().nack(self, delay=delay, reason=reason)

    def touch(self) -> None:
        """Restart its ack timeout, because work on it continues."""
        self._worker().touch(self)

    def _worker(self) -> Settling:
        worker = None if self.settler is None else self.settler.worker()
        if worker is None:
            self._raise_unbound()
        return worker

    def _raise_unbound(self) -> NoReturn:
        """Raise ValueError that says why the message leads to no worker, and what to do."""
        what = f"message {self.offset} of stream {self.stream or self.name!r}"
        if not self.consumer:
            raise ValueError(
                f"{what} was not delivered by a consumer, so it cannot be settled; settle messages of "
                "`client.streams.consumer(...)`"
            )
        raise ValueError(
            f"{what} does not lead to its worker of consumer {self.consumer!r}, because the message was pickled or copied, "
            "or the worker no longer exists; use the `ack`, `nack` and `touch` of a worker of that consumer"
        )


class StreamGap(msgspec.Struct, frozen=True):
    """Offsets without messages, from `first` up to but not including `end`.

    `count` messages were lost (None: unknown), for `cause`.

    `cause` is "retention", "compacted", "expired", "deferred" or "damaged" for messages that the store had and removed
    (`count` is then 0), or "unreadable: …" for messages that this keyring cannot open. Otherwise it is the reason that
    the recorder gave for a loss.
    """

    first: int
    end: int
    count: int | None
    cause: str
    partition: int = 0

    @property
    def unreadable(self) -> bool:
        """Whether the messages exist, but this keyring cannot open them."""
        return self.cause.startswith("unreadable: ")


class StreamRecord(msgspec.Struct, frozen=True, gc=False):
    """An opened record that is not split into messages: `count` messages sealed together, the first at `offset`."""

    offset: int
    count: int
    plain: bytes
    """The bundle in the layout of `iris.core.bundle`; for a dead letter, the reference, which is not sealed."""
    kind: int
    """How it was sent: a `Kind` of `iris.wire.kinds`, or DEAD_KIND."""
    name: str
    """The topic, cluster or stream that it was sent to."""
    sender: bytes
    sequence: int
    """The sequence number that the sender gave to the first message."""
    stored_us: int
    sent_us: int
    tombstone: bool

    @property
    def end(self) -> int:
        """The offset after its last message."""
        return self.offset + self.count

    @property
    def dead(self) -> bool:
        """Whether it is a dead letter, which only refers to a message."""
        return self.kind == DEAD_KIND


class RecordOpener:
    """Opens the records of streams with a keyring."""

    def __init__(self, find_key: Callable[[bytes], ClusterKey | None]) -> None:
        self._find_key = find_key
        self._openers: dict[_OpenerKey, tuple[Opener, bytes]] = {}
        self.stream: VerifiedStream | None = None
        """The stream that records must belong to. One that neither it nor a source of the copy records is refused."""

    def forget_keys(self) -> None:
        """Look up every key again."""
        self._openers.clear()

    def open(self, record: Record, deliveries: int = 1) -> list[StreamMessage] | StreamGap:
        """Return the messages of a record, or a gap that says why it cannot be read."""
        sent_us, _, count, _ = END.unpack(record.end)
        end = record.offset + count
        if record.kind == DEAD_KIND and self.stream is not None and self.stream.dead:
            return self._dead(record)
        plain = self.open_plain(record)
        if isinstance(plain, StreamGap):
            return plain
        try:
            payloads, keys, headers, packed = decode_keyed(plain)
            if len(payloads) != count:
                raise DecodeError(f"the record holds {len(payloads)} messages but declares {count}")
        except DecodeError as err:
            return StreamGap(record.offset, end, count, f"unreadable: {err}")
        name, source, offset, stored_us = (
            record.name,
            record.sender_id,
            record.offset,
            record.stored_us,
        )
        tombstone = record.tombstone
        stream, uuid = self._log()
        if headers is None and keys is None:
            return [
                StreamMessage(
                    p,
                    name,
                    None,
                    packed,
                    source,
                    offset + i,
                    stored_us,
                    sent_us,
                    tombstone,
                    deliveries,
                    stream=stream,
                    uuid=uuid,
                )
                for i, p in enumerate(payloads)
            ]
        return [
            StreamMessage(
                p, name, h, packed, source, offset + i, stored_us, sent_us, tombstone, deliveries, None, k or None,
                stream=stream, uuid=uuid,
            )
            for i, (p, h, k) in enumerate(
                zip(payloads, headers or [None] * count, keys or [b""] * count, strict=True)
            )
        ]  # fmt: skip

    def open_plain(self, record: Record) -> bytes | StreamGap:
        """Return the bundle of a record that is not a dead letter, or a gap that says why it cannot be opened."""
        _, _, count, _ = END.unpack(record.end)
        end = record.offset + count
        opener_key = (record.kind, record.name, record.key_id, record.sender_id)
        found = self._openers.get(opener_key)
        if found is None:
            if self.stream is None or not _belongs(record, self.stream):
                return StreamGap(
                    record.offset,
                    end,
                    count,
                    "unreadable: the record does not belong to this stream",
                )
            key = self._find_key(record.key_id)
            if key is None:
                cause = f"unreadable: sealed under key {record.key_id.hex()[:8]}, which is not in this keyring"
                return StreamGap(record.offset, end, count, cause)
            if len(self._openers) >= MAX_OPENERS:
                self._openers.clear()
            prefix = metadata_prefix(record.kind, record.name, record.key_id, record.sender_id)
            found = self._openers[opener_key] = Opener(key, record.sender_id), prefix
        opener, prefix = found
        try:
            return opener.open(record.body, prefix + record.end)[1]
        except OpenError as err:
            return StreamGap(record.offset, end, count, f"unreadable: {err}")

    def item(self, item: Item) -> StreamRecord | StreamGap:
        """Return an item as an opened record, or as a gap that says why there is none."""
        if not isinstance(item, Record):
            return to_gap(item)
        dead = item.kind == DEAD_KIND and self.stream is not None and self.stream.dead
        plain = item.body if dead else self.open_plain(item)
        if isinstance(plain, StreamGap):
            return plain
        sent_us, _, count, first = END.unpack(item.end)
        return StreamRecord(
            item.offset, count, plain, item.kind, item.name, item.sender_id, first, item.stored_us, sent_us, item.tombstone
        )  # fmt: skip

    def _dead(self, record: Record) -> list[StreamMessage] | StreamGap:
        try:
            dead = decode_dead(record.body)
        except DecodeError as err:
            return StreamGap(record.offset, record.offset + 1, 1, f"unreadable: {err}")
        message = StreamMessage(b"", record.name, offset=record.offset, stored_us=record.stored_us)
        message.dead = dead
        message.stream, message.uuid = self._log()
        return [message]

    def _log(self) -> tuple[str, str]:
        """Return the name and the uuid of the log that records are of."""
        found = self.stream
        return ("", "") if found is None else (found.name, found.described.uuid.hex())


class StreamPage(OneProcess):
    """Consecutive records and gaps of a stream, up to `end`. Iterate over them; each is opened when it is reached.

    The first record may begin before the offset asked for.
    """

    _why = "it holds the keys that open its records; iterate over it here, and send the records and gaps"

    def __init__(self, fetched: Fetched, opener: RecordOpener) -> None:
        self._items = fetched.items
        self._opener = opener
        self.end = fetched.next
        """The offset where the next page begins."""
        self.oldest = fetched.oldest
        self.high_water = fetched.high_water
        """The end of the stream."""
        self.uuid = fetched.uuid.hex()
        """Identity of the log, in hex."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[StreamRecord | StreamGap]:
        return map(self._opener.item, self._items)


def _belongs(record: Record, stream: VerifiedStream) -> bool:
    definition = stream.order.definition
    return _is_recorded_by(record, definition) or any(
        _is_recorded_by(record, one) for one in definition.origins
    )


def _is_recorded_by(record: Record, of: Definition | Origin) -> bool:
    if record.kind == Kind.STREAM:
        return record.name == of.name
    if record.kind == Kind.PUBLISH:
        return bool(of.topic) and matches(of.topic, record.name)
    return record.kind in (Kind.PUSH, Kind.BROADCAST) and record.name == of.cluster


def to_gap(item: Gap | Hole) -> StreamGap:
    """Return a store's gap or hole as the gap that readers receive."""
    if isinstance(item, Gap):
        return StreamGap(item.offset, item.offset + 1, item.count, item.cause)
    return StreamGap(item.offset, item.next, 0, HOLES.get(item.reason, "removed"))
