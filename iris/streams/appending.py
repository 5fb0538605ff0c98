"""Appends in order, each stored once: a window of sealed records on the way, sent again until the store has said what became of them.

    append ─► open record ── turn ends, 64 KiB ──► queue ── window ──► on the way ── Appended ──► offsets
                                                      ▲                    │ lost, out of order
                                                      └──── all over ◄─────┘

A producer is a random id; its records are numbered from 0 in every epoch, and the store takes number n after n - 1 alone. So what
was lost on the way goes out again as it was, in order, when nothing else is on the way; what was stored before is known by its number.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from iris.core.bundle import CUT_BYTES, MESSAGE_BYTES, Headers, headers_bytes
from iris.deadlines import seconds_left
from iris.errors import IrisError, OffsetConflict, RequestError, StreamError, StreamUnavailable
from iris.streams.calls import PAUSE_MAX_S, PAUSE_MIN_S, Place, Stores
from iris.wire.streams import (
    CONFLICT,
    DUPLICATE,
    FENCED,
    OUT_OF_ORDER,
    STORED,
    Append,
    Appended,
    NewRecord,
    Outcome,
)

if TYPE_CHECKING:
    from iris.core.session import Session

WINDOW: Final = 64
"""Records on the way at once: of so many the store knows the offsets when they come again."""
CALL_BYTES: Final = 256 << 10
QUEUE_BYTES: Final = 32 << 20
"""Appends wait while more than this is on the way or waits for it."""
CALL_S: Final = 10.0
GIVE_UP_S: Final = 60.0
RECORD_BYTES: Final = 256


class Extras:
    """What a message that is sealed alone, or with its equals, is stored with."""

    __slots__ = ("due_us", "expires_us", "id_hash", "key", "key_hash", "tombstone")

    def __init__(
        self, key: bytes = b"", key_hash: bytes = b"", tombstone: bool = False, expires_us: int = 0, due_us: int = 0, id_hash: bytes = b""
    ) -> None:  # fmt: skip
        self.key = key
        """Sealed with the messages."""
        self.key_hash = key_hash
        self.tombstone = tombstone
        self.expires_us = expires_us
        self.due_us = due_us
        self.id_hash = id_hash
        """Who has an id is stored alone: it may have been stored before, and its neighbors not."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extras) and self._all == other._all and not self.id_hash

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up

    @property
    def _all(self) -> tuple[bytes, bytes, bool, int, int]:
        return self.key, self.key_hash, self.tombstone, self.expires_us, self.due_us


PLAIN: Final = Extras()


class Pending:
    """A record: messages that are stored together, and who waits for their offsets."""

    __slots__ = (
        "extras",
        "future",
        "headers",
        "lost",
        "packed",
        "payloads",
        "place",
        "record",
        "sender_id",
        "sequence",
        "size",
    )

    def __init__(self, extras: Extras, packed: bool, future: asyncio.Future[int]) -> None:
        self.payloads: list[bytes] = []
        self.headers: list[Headers | None] | None = None
        self.packed = packed
        self.extras = extras
        self.size = 0
        self.future = future
        """Resolved with the first offset."""
        self.sequence = -1
        self.lost = False
        """On the way, once: nobody knows whether it is stored."""
        self.sender_id = b""
        self.place: Place | None = None
        """The stream's place and key when it was sealed. It opens only under that key, so it is sent only under that key."""
        self.record: NewRecord | None = None
        """Once it is sealed: sent again as it is."""


class Producer:
    """One client's appends to one stream."""

    def __init__(self, stores: Stores, name: str, uuid: str, producer_id: bytes) -> None:
        self.name = name
        self.bytes = 0
        """Queued and on the way."""
        self._stores = stores
        self._uuid = uuid
        self._id = producer_id
        self._epoch = 0
        self._next = 0
        self._open: Pending | None = None
        self._queue: deque[Pending] = deque()
        self._unacked: deque[Pending] = deque()
        self._calls = 0
        self._records = 0
        """Calls and records on the way."""
        self._again = False
        """Something was lost: nothing new goes out until all on the way is over."""
        self._pause_s = PAUSE_MIN_S
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._feeder: asyncio.Task[None] | None = None
        self._ended = ""

    # -- taking ----------------------------------------------------------------------------------------------

    def add(
        self, payload: bytes, headers: Headers | None, packed: bool, extras: Extras
    ) -> tuple[asyncio.Future[int], int]:
        """Take a message; return the future of its record's first offset, and its place in that record."""
        if self._ended:
            raise StreamUnavailable(self.name, self._ended)
        size = len(payload) + MESSAGE_BYTES + (headers_bytes(headers) if headers else 0)
        size += len(extras.key)
        record = self._open
        if (
            record is None
            or record.size + size > CUT_BYTES
            or packed is not record.packed
            or (extras is not record.extras and extras != record.extras)
            or extras.id_hash
        ):
            self._cut()
            record = self._open = Pending(extras, packed, self._loop.create_future())
            # Whoever appended may be gone: then nobody is told, and that is no error.
            record.future.add_done_callback(_seen)
        if headers and record.headers is None:
            record.headers = [None] * len(record.payloads)
        record.payloads.append(payload)
        if record.headers is not None:
            record.headers.append(headers or None)
        record.size += size
        self.bytes += size
        self._idle.clear()
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn_ended)
        return record.future, len(record.payloads) - 1

    @property
    def full(self) -> bool:
        """Whether an append has to wait for room."""
        return self.bytes > QUEUE_BYTES

    async def room(self) -> None:
        """Return when there is room."""
        while self.full and not self._ended:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)

    async def finish(self) -> None:
        """Return when everything that was taken has ended."""
        await self._idle.wait()

    def end(self, reason: str) -> None:
        """Nothing more is sent; whoever waits hears so. Idempotent."""
        self._ended = self._ended or reason
        if self._feeder is not None:
            self._feeder.cancel()
        for task in self._tasks:
            task.cancel()
        if self._open is not None:
            self._queue.append(self._open)
            self._open = None
        for record in self._unacked:
            self._over(record, StreamUnavailable(self.name, reason, may_have_run=True))
        for record in self._queue:
            self._over(record, StreamUnavailable(self.name, reason))
        self._unacked.clear()
        self._queue.clear()
        self._check_idle()

    def _turn_ended(self) -> None:
        self._scheduled = False
        self._cut()
        if self._feeder is None and self._queue and not self._ended:
            self._feeder = self._loop.create_task(self._feed(), name="iris-append")
        self._work.set()

    def _cut(self) -> None:
        if self._open is not None:
            self._queue.append(self._open)
            self._open = None
            self._work.set()

    # -- sending ---------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Keep the window full while there is something to send."""
        try:
            while self._queue or self._unacked:
                if self._again:
                    if not self._calls and not await self._send_again():
                        continue
                elif self._queue and self._records < WINDOW:
                    place = await self._place()
                    if place is not None:
                        _, session = await self._stores.runtime.ready(self.name, GIVE_UP_S)
                        if not self._again:  # nothing was lost while we waited
                            self._send_new(session, place)
                            self._stores.runtime.touch()
                    continue
                self._work.clear()
                if self._calls or self._again or not self._queue:
                    await self._work.wait()
        except Exception as err:  # whoever waits hears of it, whatever it is
            self._fail_all(err)
        finally:
            self._feeder = None
            if (self._queue or self._unacked) and not self._ended:
                self._turn_ended()
            self._check_idle()

    async def _place(self) -> Place | None:
        """Return where the stream is; what waits fails if it is nowhere."""
        try:
            return await self._stores.place(self.name, self._uuid, timeout=GIVE_UP_S)
        except StreamError as err:
            self._fail_all(err)
            return None

    def _send_new(self, session: Session, place: Place) -> None:
        """Seal and send what fits the window, several records a call."""
        while self._queue and self._records < WINDOW:
            batch: list[Pending] = []
            size = 0
            while self._queue and self._records + len(batch) < WINDOW:
                record = self._queue[0]
                if batch and (
                    size + record.size > self._call_bytes
                    or not self._seal(session, place, record, batch[0].sender_id)
                ):
                    break
                if not batch:
                    self._seal(session, place, record, b"")
                self._queue.popleft()
                record.sequence = self._next
                self._next += 1
                batch.append(record)
                size += record.size + RECORD_BYTES
            self._unacked.extend(batch)
            self._send(place, batch)

    @property
    def _call_bytes(self) -> int:
        return min(CALL_BYTES, self._stores.runtime.message_limit)

    def _seal(self, session: Session, place: Place, record: Pending, sender_id: bytes) -> bool:
        """Seal a record once, or again if its key is gone. Returns whether `sender_id` sealed it."""
        if record.record is None or not self._still_for(record, place):
            record.place = place
            out = session.out
            record.sender_id, end, body = out.record(
                self.name,
                place.key,
                record.payloads,
                record.headers,
                record.packed,
                record.extras.key,
            )
            extras = record.extras
            record.record = NewRecord(
                0, end, body, extras.key_hash, extras.tombstone, extras.expires_us, extras.due_us,
                id_hash=extras.id_hash,
            )  # fmt: skip
        return record.sender_id == sender_id

    def _still_for(self, record: Pending, place: Place) -> bool:
        """Whether a sealed record can go to this place: we still have its key, and it is the same stream."""
        sealed = record.place
        if sealed is None or self._stores.runtime.keyring.by_id(sealed.key.key_id) is None:
            return False
        return sealed.uuid == place.uuid or sealed.key.key_id == place.key.key_id

    def _send(self, place: Place, batch: list[Pending]) -> None:
        self._calls += 1
        self._records += len(batch)
        records = []
        for pending in batch:
            sealed = pending.record
            assert sealed is not None
            records.append(
                NewRecord(
                    pending.sequence,
                    sealed.end,
                    sealed.body,
                    sealed.key_hash,
                    sealed.tombstone,
                    sealed.expires_us,
                    sealed.due_us,
                    id_hash=sealed.id_hash,
                )
            )
        call = Append(batch[0].sender_id, records, self._id, self._epoch)
        task = self._loop.create_task(self._await(place, batch, call), name="iris-append-call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, place: Place, batch: list[Pending], call: Append) -> None:
        sealed = batch[0].place
        assert sealed is not None
        try:
            answer = await self._stores.ask(
                place.address,
                sealed.key,
                call,
                Appended,
                timeout=CALL_S,
                shown=self.name,
                writes=True,
            )
        except StreamError as err:
            if err.passing:  # reported by the store, or by a relay that knows of no store
                self._away(batch, lost=isinstance(err.__cause__, RequestError))
            else:
                self._refused(batch, err)
        except RequestError:  # whatever `may_have_run` says, because no key holder said it
            self._away(batch, lost=True)
        except asyncio.CancelledError:
            raise
        except Exception as err:  # what cannot be sent ends here, and holds up nothing behind it
            self._refused(batch, StreamError(self.name, f"{type(err).__name__}: {err}"))
        else:
            if len(answer.outcomes) == len(batch):
                self._answered(batch, answer.outcomes)
            else:
                self._away(batch, lost=True)
        finally:
            self._calls -= 1
            self._records -= len(batch)
            while self._unacked and self._unacked[0].future.done():
                self._unacked.popleft()
            self._work.set()

    def _away(self, batch: list[Pending], *, lost: bool) -> None:
        """The store, or the way to it, is away: these go out again."""
        self._stores.forget(self.name, self._uuid)
        self._again = True
        for record in batch:
            record.lost = record.lost or lost

    # -- what became of it -----------------------------------------------------------------------------------

    def _answered(self, batch: list[Pending], outcomes: Sequence[Outcome]) -> None:
        for record, outcome in zip(batch, outcomes, strict=True):
            if outcome.status in (STORED, DUPLICATE):
                if outcome.value is None:
                    detail = "it was stored, too long ago to say where"
                    self._over(record, StreamUnavailable(self.name, detail, may_have_run=True))
                else:
                    self._stored(record, outcome.value)
            elif outcome.status == OUT_OF_ORDER:
                # Below what we have unanswered is what the store once had: it forgot us.
                first = next((r.sequence for r in self._unacked if not r.future.done()), 0)
                if outcome.value is not None and outcome.value < first:
                    self._forgotten()
                self._again = True
            elif outcome.status == FENCED:
                self._over(record, StreamError(self.name, "another producer goes on under our id"))
                self._forgotten()
            else:
                detail = f"the store answered with status {outcome.status}"
                self._over(record, StreamUnavailable(self.name, detail, may_have_run=True))
                self._forgotten()

    def _stored(self, record: Pending, offset: int) -> None:
        self._pause_s = PAUSE_MIN_S
        self.bytes -= record.size
        record.size = 0
        if not record.future.done():
            record.future.set_result(offset)
        self._wake()

    def _over(self, record: Pending, error: IrisError) -> None:
        self.bytes -= record.size
        record.size = 0
        if not record.future.done():
            record.future.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self.full:
            room, self._room = self._room, None
            if not room.done():
                room.set_result(None)

    def _refused(self, batch: list[Pending], error: StreamError) -> None:
        """The store did not take these: those after them are out of order there, and are numbered anew."""
        for record in batch:
            unsure = StreamUnavailable(
                self.name, f"{error.detail}; it may be stored all the same", may_have_run=True
            )
            self._over(record, unsure if record.lost else error)
        self._forgotten()

    def _forgotten(self) -> None:
        """The next number can never come: go on in another epoch, once nothing is on the way."""
        self._again = True
        self._next = -1

    async def _send_again(self) -> bool:
        """Send what was not acknowledged once more, in order; False if there is nowhere to send it yet."""
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        place = await self._place()
        if place is None:
            return False
        stale = [
            record
            for record in self._unacked
            if not record.future.done() and not self._still_for(record, place)
        ]
        if any(record.lost for record in stale):
            self._next = -1  # it cannot be sent again, and later ones would be out of order
        if stale:
            _, session = await self._stores.runtime.ready(self.name, GIVE_UP_S)
            for record in stale:
                if not record.lost:  # it is not stored, so sealing it again duplicates nothing
                    self._seal(session, place, record, b"")
        records = [record for record in self._unacked if not record.future.done()]
        self._unacked.clear()
        if self._next < 0:
            # In another epoch the store cannot tell what it has of these from new ones.
            unsure = StreamUnavailable(
                self.name, "nobody can say whether it was stored", may_have_run=True
            )
            for record in records:
                if record.lost:
                    self._over(record, unsure)
            records = [record for record in records if not record.lost]
            self._epoch += 1
            for number, record in enumerate(records):
                record.sequence = number
            self._next = len(records)
        self._again = False
        self._unacked.extend(records)
        while records:
            sender_id = records[0].sender_id
            batch: list[Pending] = []
            size = 0
            while (
                records
                and records[0].sender_id == sender_id
                and (not batch or size + records[0].size < self._call_bytes)
            ):
                record = records.pop(0)
                size += record.size
                batch.append(record)
            self._send(place, batch)
        return True

    def _fail_all(self, error: Exception) -> None:
        unknown = StreamUnavailable(self.name, str(error), may_have_run=True)
        unsent = StreamUnavailable(self.name, str(error))
        for record in self._unacked:
            self._over(record, unknown)
        self._unacked.clear()
        for record in self._queue:
            self._over(record, error if isinstance(error, StreamError) else unsent)
        self._queue.clear()
        self._forgotten()
        self._epoch += 1
        self._next = 0
        self._again = False

    def _check_idle(self) -> None:
        if not (self._queue or self._unacked or self._open):
            self._idle.set()


def _seen(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()


async def append_expecting(
    stores: Stores, name: str, uuid: str, data: bytes, headers: Headers | None, packed: bool, extras: Extras, expect: int, timeout: float
) -> int:  # fmt: skip
    """Append one record under a condition, as a producer of its own: a retry is known for one."""
    until_s = time.monotonic() + timeout
    place = await stores.place(name, uuid, timeout=timeout)
    _, session = await stores.runtime.ready(name, seconds_left(until_s))
    sender_id, end, body = session.out.record(
        name, place.key, (data,), (headers,) if headers else None, packed, extras.key
    )
    record = NewRecord(
        0,
        end,
        body,
        extras.key_hash,
        extras.tombstone,
        extras.expires_us,
        extras.due_us,
        expect,
        extras.id_hash,
    )
    call = Append(sender_id, [record], os.urandom(16))
    answer = await stores.ask_stream(
        name, uuid, call, Appended, timeout=seconds_left(until_s), writes=True
    )
    outcome = answer.outcomes[0]
    if outcome.status in (STORED, DUPLICATE) and outcome.value is not None:
        return outcome.value
    if outcome.status == CONFLICT and outcome.value is not None:
        raise OffsetConflict(
            name, f"the next offset is {outcome.value}, not {expect}", outcome.value
        )
    raise StreamError(name, f"the store answered with status {outcome.status}")
