"""Ordered appends to a stream, each stored once. Sealed records are sent again until the store reports their outcome.

    add ─► open record ── cut, 64 KiB ──► queue ── due, window ──► in flight ── answered ──► offsets
                                            ▲                          │ lost, out of order
                                            └── nothing in flight ◄────┘

A producer has a random id, and numbers its records from 0 in each epoch. The store accepts number n only after
n - 1. So lost records are sent again unchanged, in order, when nothing else is in flight, and the store
recognises those that it has already stored by their numbers.

In a new epoch the store cannot recognise records of the old one. Records that may be stored are not sent again then;
their callers get StreamUnavailable with `may_have_run`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from iris.core.backoff import Backoff
from iris.core.bundle import BundleBuilder, Headers, message_bytes
from iris.core.interfaces import Waiter
from iris.core.outbound import Outbound
from iris.crypto.keys import ClusterKey
from iris.errors import IrisError, RelayError, RequestError, StreamError, StreamUnavailable
from iris.wire.kinds import NEVER_US
from iris.wire.streams import (
    DUPLICATE,
    FENCED,
    OUT_OF_ORDER,
    STORED,
    Append,
    NewRecord,
    Outcome,
)

WINDOW: Final = 64
"""Most records in flight. The store remembers the offsets of so many, in case they are sent again."""
CALL_BYTES: Final = 256 << 10
QUEUE_BYTES: Final = 32 << 20
"""Appends wait while more bytes than this are queued or in flight."""
RECORD_BYTES: Final = 256
PAUSE_MIN_S: Final = 0.02
PAUSE_MAX_S: Final = 1.0
W = TypeVar("W", bound=Waiter)


class Extras(Struct, frozen=True, gc=False):
    """Fields stored with a record. Only messages with equal extras share a record."""

    key: bytes = b""
    """Key of the messages, sealed with them."""
    key_hash: bytes = b""
    tombstone: bool = False
    expires_us: int = 0
    due_us: int = 0
    id_hash: bytes = b""
    """Hash of the message's id. A message with an id gets its own record, because it alone may be a duplicate."""

    def record(
        self, sequence: int, end: bytes, body: bytes, expect: int | None = None
    ) -> NewRecord:
        """Return a sealed record in the form that an Append carries."""
        return NewRecord(
            sequence, end, body, self.key_hash, self.tombstone, self.expires_us, self.due_us, expect, self.id_hash
        )  # fmt: skip


PLAIN: Final = Extras()


class Pending(BundleBuilder, Generic[W]):
    """A record that has not ended: messages stored together, and the waiter for their first offset."""

    __slots__ = (
        "body",
        "end",
        "extras",
        "key",
        "lost",
        "sender_id",
        "sequence",
        "uuid",
        "waiter",
    )

    def __init__(self, extras: Extras, waiter: W) -> None:
        super().__init__()
        self.extras = extras
        self.waiter = waiter
        """Resolved with the first offset."""
        self.sequence = -1
        self.lost = False
        """Whether an answer to it was lost, so that it is unknown whether it is stored."""
        self.uuid = b""
        self.key: ClusterKey | None = None
        """Key it was sealed with, for the stream `uuid`. It opens only under that key, so it is sent
        only under that key."""
        self.sender_id = self.end = self.body = b""
        """Set when it is sealed. It is sent again unchanged."""


class Sent(Struct, Generic[W], eq=False):
    """A call in flight, until `Producer.answered` or `lost`.

    It is sent under `key`, with which its records were sealed.
    """

    records: list[Pending[W]]
    key: ClusterKey
    call: Append


class Producer(Generic[W]):
    """One client's ordered appends to one stream (sans-IO)."""

    def __init__(
        self, name: str, producer_id: bytes, *, waiter: Callable[[], W], on_open: Callable[[], object],
        find_key: Callable[[bytes], ClusterKey | None], rng: Callable[[], float],
    ) -> None:  # fmt: skip
        """`waiter` creates the waiter of a record.

        `on_open` is called when a record was opened, which `cut` must close.
        """
        self.name = name
        self.bytes = 0
        """Bytes queued and in flight."""
        self._id = producer_id
        self._waiter = waiter
        self._on_open = on_open
        self._find_key = find_key
        self._epoch = 0
        self._next = 0
        """Number of the next record; below 0 if this epoch has ended."""
        self._open: Pending[W] | None = None
        self._queue: deque[Pending[W]] = deque()
        self._unacked: deque[Pending[W]] = deque()
        self._calls = 0
        self._records = 0
        """Numbers of calls and of records in flight."""
        self._resend = False
        """Whether records must be sent again. Nothing is sent until nothing is in flight."""
        self._resend_us = 0
        """Time to send them again, once nothing is in flight."""
        self._backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, rng)
        self._ended = ""

    # -- adding ----------------------------------------------------------------------------------------------

    def add(
        self, payload: bytes, headers: Headers | None, packed: bool, extras: Extras
    ) -> tuple[W, int]:
        """Add a message. Return the waiter for its record's first offset, and its position in that record.

        Raises:
            StreamUnavailable: the producer has ended.
        """
        if self._ended:
            raise StreamUnavailable(self.name, self._ended)
        size = message_bytes(payload, headers) + len(extras.key)
        record = self._open
        if (
            record is None
            or not record.fits(size, packed)
            or (extras is not record.extras and extras != record.extras)
            or extras.id_hash
        ):
            self.cut()
            record = self._open = Pending(extras, self._waiter())
            self._on_open()
        record.append(payload, headers, packed, size)
        self.bytes += size
        return record.waiter, len(record.payloads) - 1

    def cut(self) -> None:
        """Close the open record at the end of a turn and queue it."""
        if self._open is not None:
            self._queue.append(self._open)
            self._open = None

    @property
    def full(self) -> bool:
        """Whether an append must wait for room."""
        return self.bytes > QUEUE_BYTES and not self._ended

    @property
    def busy(self) -> bool:
        """Whether a record is queued or in flight."""
        return bool(self._queue or self._unacked)

    @property
    def idle(self) -> bool:
        """Whether every record that was added has ended."""
        return not (self._queue or self._unacked or self._open)

    # -- sending ---------------------------------------------------------------------------------------------

    @property
    def due_us(self) -> int:
        """Time to call `due`; NEVER_US while it depends on messages or answers to come."""
        if self._resend:
            return NEVER_US if self._calls else self._resend_us
        return 0 if self._queue and self._records < WINDOW else NEVER_US

    def due(
        self, now_us: int, uuid: bytes, key: ClusterKey, out: Outbound, call_bytes: int
    ) -> list[Sent[W]]:
        """Return the calls to send now, each of at most `call_bytes`.

        `out` seals records with `key` for the stream `uuid`.
        """
        if now_us < self.due_us:
            return []
        if self._resend:
            records = self._to_resend(uuid, key, out)
        else:
            records = []
            while self._queue and self._records + len(records) < WINDOW:
                record = self._queue[0]
                self._seal(record, uuid, key, out)
                self._queue.popleft()
                record.sequence = self._next
                self._next += 1
                self._unacked.append(record)
                records.append(record)
        return self._grouped(records, min(CALL_BYTES, call_bytes))

    def _seal(self, record: Pending[W], uuid: bytes, key: ClusterKey, out: Outbound) -> None:
        """Seal a record that is not sealed yet, or whose key was retired."""
        if not self._sealed_for(record, uuid, key):
            record.uuid, record.key = uuid, key
            record.sender_id, record.end, record.body = out.record(
                self.name, key, record.payloads, record.headers, record.packed, record.extras.key
            )

    def _sealed_for(self, record: Pending[W], uuid: bytes, key: ClusterKey) -> bool:
        """Return whether a record is sealed for this stream, under a key that the client still has."""
        sealed = record.key
        if sealed is None or self._find_key(sealed.key_id) is None:
            return False
        return record.uuid == uuid or sealed.key_id == key.key_id

    def _to_resend(self, uuid: bytes, key: ClusterKey, out: Outbound) -> list[Pending[W]]:
        """Return the unacknowledged records to send again, in order. Fail those that cannot be sent again safely."""
        records = [record for record in self._unacked if not record.waiter.done()]
        for record in records:
            if not self._sealed_for(record, uuid, key):
                if record.lost:
                    # It cannot be sent again, and later ones would be out of order.
                    self._next = -1
                else:  # it is not stored, so sealing it again makes no duplicate
                    self._seal(record, uuid, key, out)
        if self._next < 0:
            # In a new epoch the store cannot recognise those of these records that it has stored.
            unknown = StreamUnavailable(
                self.name,
                "its answer was lost and cannot be asked for again, so it may or may not be stored",
                may_have_run=True,
            )
            for record in records:
                if record.lost:
                    self._fail(record, unknown)
            records = [record for record in records if not record.lost]
            self._epoch += 1
            for number, record in enumerate(records):
                record.sequence = number
            self._next = len(records)
        self._resend = False
        self._unacked = deque(records)
        return records

    def _grouped(self, records: Iterable[Pending[W]], call_bytes: int) -> list[Sent[W]]:
        """Return calls with these records. All records of a call have one sender id."""
        batches: list[list[Pending[W]]] = []
        size = 0
        for record in records:
            size += record.size + RECORD_BYTES
            if batches and size <= call_bytes and record.sender_id == batches[-1][0].sender_id:
                batches[-1].append(record)
            else:
                batches.append([record])
                size = record.size + RECORD_BYTES
        return [self._call(batch) for batch in batches]

    def _call(self, batch: list[Pending[W]]) -> Sent[W]:
        self._calls += 1
        self._records += len(batch)
        records = [r.extras.record(r.sequence, r.end, r.body) for r in batch]
        sealed = batch[0].key
        assert sealed is not None
        call = Append(batch[0].sender_id, records, self._id, self._epoch)
        return Sent(batch, sealed, call)

    # -- outcomes -----------------------------------------------------------------------------------

    def answered(self, sent: Sent[W], outcomes: Sequence[Outcome], now_us: int) -> None:
        """Apply the store's outcomes for the records of a call."""
        for record, outcome in zip(sent.records, outcomes, strict=True):
            if outcome.status in (STORED, DUPLICATE):
                if outcome.value is None:
                    detail = (
                        "it is stored, but so long ago that the store no longer knows its offset"
                    )
                    self._fail(record, StreamUnavailable(self.name, detail, may_have_run=True))
                else:
                    self._stored(record, outcome.value)
            elif outcome.status == OUT_OF_ORDER:
                # The store expects a number below our unanswered ones, so it has forgotten this producer.
                first = next((r.sequence for r in self._unacked if not r.waiter.done()), 0)
                if outcome.value is not None and outcome.value < first:
                    self._next_epoch()
                self._resend = True
            elif outcome.status == FENCED:
                self._fail(
                    record,
                    StreamError(self.name, "another producer has taken over this producer's id"),
                )
                self._next_epoch()
            else:
                detail = f"the store answered with status {outcome.status}, which this version of Iris does not know"
                self._fail(record, StreamUnavailable(self.name, detail, may_have_run=True))
                self._next_epoch()
        self._call_ended(sent, now_us)

    def lost(self, sent: Sent[W], error: Exception, now_us: int) -> bool:
        """Handle a call that ended with an error.

        Return whether it is sent again, because the store cannot be reached.
        """
        refused = error.__cause__ if isinstance(error, StreamError) else error
        if isinstance(refused, RelayError) and not refused.may_have_run:
            # Such as for a ticket that does not allow it: waiting does not help. But no key holder said that it has not
            # been stored.
            for record in sent.records:
                self._fail(record, StreamUnavailable(self.name, refused.detail, may_have_run=True))
            self._next_epoch()
            self._call_ended(sent, now_us)
            return False
        if isinstance(error, StreamError):
            # Reported by the store, or by a relay that knows of no store.
            away, lost = error.passing, isinstance(error.__cause__, RequestError)
        else:
            # Whatever `may_have_run` says, because no key holder said it.
            away = lost = isinstance(error, RequestError)
        if away:
            self._resend = True
            for record in sent.records:
                record.lost = record.lost or lost
        elif isinstance(error, StreamError):
            self._refused(sent.records, error)
        else:  # fail records that cannot be sent, so that they do not block later ones
            self._refused(sent.records, StreamError(self.name, f"{type(error).__name__}: {error}"))
        self._call_ended(sent, now_us)
        return away

    def failed(self, error: Exception) -> None:
        """Fail every queued and unacknowledged record, because the stream cannot be reached."""
        unknown = StreamUnavailable(self.name, str(error), may_have_run=True)
        unsent = StreamUnavailable(self.name, str(error))
        self._fail_all(unknown, error if isinstance(error, StreamError) else unsent)
        self._epoch += 1
        self._next = 0
        self._resend = False

    def end(self, reason: str) -> None:
        """Fail every record and refuse new ones. Idempotent."""
        self._ended = self._ended or reason
        self.cut()
        unknown = StreamUnavailable(self.name, reason, may_have_run=True)
        self._fail_all(unknown, StreamUnavailable(self.name, reason))

    def _call_ended(self, sent: Sent[W], now_us: int) -> None:
        self._calls -= 1
        self._records -= len(sent.records)
        while self._unacked and self._unacked[0].waiter.done():
            self._unacked.popleft()
        if self._resend and not self._calls:
            self._resend_us = now_us + round(self._backoff.failed() * 1e6)

    def _stored(self, record: Pending[W], offset: int) -> None:
        self._backoff.failures = 0
        self.bytes -= record.size
        record.size = 0
        if not record.waiter.done():
            record.waiter.set_result(offset)

    def _fail(self, record: Pending[W], error: IrisError) -> None:
        self.bytes -= record.size
        record.size = 0
        if not record.waiter.done():
            record.waiter.set_exception(error)

    def _fail_all(self, unknown: IrisError, unsent: IrisError) -> None:
        for record in self._unacked:
            self._fail(record, unknown)
        for record in self._queue:
            self._fail(record, unsent)
        self._unacked.clear()
        self._queue.clear()

    def _refused(self, records: list[Pending[W]], error: StreamError) -> None:
        """Fail records that the store refused. Later ones are out of order at the store, so they are numbered again."""
        for record in records:
            unknown = StreamUnavailable(
                self.name,
                f"{error.detail}; an earlier attempt may have stored it",
                may_have_run=True,
            )
            self._fail(record, unknown if record.lost else error)
        self._next_epoch()

    def _next_epoch(self) -> None:
        """Start another epoch once nothing is in flight, because the store will not accept the next number."""
        self._resend = True
        self._next = -1
