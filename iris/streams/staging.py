"""Staging: records of a batch go to the store out of sight, until a commit makes those of some attempts visible at once.

    append ─► open record ── 64 KiB ──► sealed ── 256 KiB ──► calls on the way ── Staged ──► finish
                                                    4 MiB at most

An attempt is a random id, and its records are numbered from 0: a call that got no answer goes out again as it was, over a lost relay or
store, and what is staged is not staged again. Nobody sees any of it until a Commit names the attempt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from datetime import datetime
from typing import Final, Self, TypeVar

from msgspec import Struct

from iris.core.bundle import BundleBuilder, Headers, message_bytes
from iris.core.outbound import Outbound
from iris.core.producer import CALL_BYTES, PLAIN, RECORD_BYTES, Extras
from iris.crypto.keys import ClusterKey
from iris.errors import Closed, ConfigError, LocalProtocolError, MessageTooLarge, StreamError
from iris.streams.calls import Stores
from iris.streams.messages import OF_A_MESSAGE, make_extras
from iris.wire.names import check_cluster
from iris.wire.streams import (
    MAX_ATTEMPTS,
    MAX_WRITER_BYTES,
    Attempt,
    Commit,
    Discard,
    NewRecord,
    Stage,
    Staged,
    encode,
)

WINDOW_BYTES: Final = 4 << 20
"""Staged and not acknowledged: more waits."""
CALL_RECORDS: Final = 4096
MAX_BATCH: Final = 1 << 63
FINISHED: Final = "finished"
T = TypeVar("T", Commit, Discard)


class StagedAttempt(Struct, frozen=True):
    """What a `Staging` came to, for `client.streams.commit` in any process: it can be pickled."""

    attempt: str
    """32 hex digits."""
    records: int
    """Sealed records, each of one message or more."""


class CommitInfo(Struct, frozen=True):
    """A committed batch has the offsets from `first` until `next`, which are equal if it is empty.

    Both are None if the writer has committed a later batch since.
    """

    first: int | None
    next: int | None
    replayed: bool
    """It was committed before, perhaps from other attempts, and nothing changed."""


class Staging:
    """One attempt at a writer's batch: `async with client.streams.stage("orders", writer="etl", batch=7) as staging`.

    Append to it in order, from one task, and `finish`; what that returns goes to `client.streams.commit`. After an error or a
    cancelled call an attempt is of no use: begin another. Leaving the context without `finish` leaves what was staged to
    `discard`, or to its expiry after a day.
    """

    def __init__(
        self, stores: Stores, name: str, *, writer: str, batch: int, uuid: str, timeout: float
    ) -> None:
        self.name = name
        self.writer = writer
        self.batch = batch
        self._stores = stores
        self._uuid = uuid
        self._timeout = timeout
        self._attempt = os.urandom(16)
        self._records = 0
        self._open = BundleBuilder()
        """The record that is not sealed yet."""
        self._call: list[NewRecord] = []
        self._call_bytes = 0
        self._sealed_by: tuple[bytes, ClusterKey] | None = None
        """Sender id and key of the records in the call."""
        self._unacknowledged_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._ended = ""

    @property
    def attempt(self) -> str:
        """Its id, 32 hex digits: for `discard`, if it came to nothing."""
        return self._attempt.hex()

    # -- taking ----------------------------------------------------------------------------------------------

    async def append(
        self, message: object, *, headers: Headers | None = None, key: str | bytes | None = None, ttl: float | None = None,
        deliver_at: datetime | None = None, tombstone: bool = False,
    ) -> None:  # fmt: skip
        """Stage a message; what it is stored with is as in `Streams.append`. Waits while 4 MiB are on the way.

        Raises:
            StreamError: the store refused something, or did not answer in time.
            Closed: after `finish` or `close`.
        """
        self._check()
        data, packed = self._stores.runtime.encode(message, headers, OF_A_MESSAGE)
        extras = await make_extras(
            self._stores, self.name, self._uuid, key=key, ttl=ttl, deliver_at=deliver_at, tombstone=tombstone, timeout=self._timeout
        )  # fmt: skip
        if extras is PLAIN:
            await self._add(data, headers, packed)
            return
        out, sealing = await self._seal_open_record()
        one = (headers,) if headers else None
        sealed = out.record(self.name, sealing, (data,), one, packed, extras.key)
        self._add_record(sealed, sealing, extras)

    async def append_many(self, messages: Iterable[object]) -> None:
        """Stage messages in order, several to a record; raises as `append`."""
        for message in messages:
            self._check()
            data, packed = self._stores.runtime.encode(message, None, OF_A_MESSAGE)
            await self._add(data, None, packed)

    async def add_bundle(self, plain: bytes, count: int) -> None:
        """Stage a record of `count` messages that are laid out as `iris.core.bundle.encode_bundle` does, as it stands.

        Raises as `append`; LocalProtocolError if it is no bundle of so many messages.
        """
        self._check()
        if count < 1 or plain[:4] != count.to_bytes(4, "little"):
            raise LocalProtocolError(f"the bytes are not a bundle of {count} messages")
        self._stores.runtime.check_size(plain, OF_A_MESSAGE)
        out, sealing = await self._seal_open_record()
        self._add_record(out.record_bundle(self.name, sealing, plain, count), sealing, PLAIN)

    async def finish(self) -> StagedAttempt:
        """Return the attempt once all of it is on the store's disk; nothing more can be appended. Raises the first error there was."""
        if self._ended != FINISHED:
            self._check()
            await self._seal_open_record()
            self._send()
            self._ended = FINISHED
        while self._tasks and self._error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error
        return StagedAttempt(self._attempt.hex(), self._records)

    def close(self) -> None:
        """Send nothing more. Idempotent."""
        self._ended = self._ended or "closed"
        if self._tasks:
            self._error = self._error or Closed(f"staging for {self.name!r} was closed")
        for task in self._tasks:
            task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise Closed(f"staging for {self.name!r} was {self._ended}; stage another attempt")

    async def _add(self, data: bytes, headers: Headers | None, packed: bool) -> None:
        """Put a message into the open record, which is sealed first if it is full or of another kind."""
        size = message_bytes(data, headers)
        while not self._open.fits(size, packed):
            await self._seal_open_record()
        self._open.append(data, headers, packed, size)

    async def _seal_open_record(self) -> tuple[Outbound, ClusterKey]:
        """Seal the open record, once there is room for it; return what to seal with. Cancelled while it waits, it has done nothing."""
        while self._unacknowledged_bytes > WINDOW_BYTES and self._error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        location = await self._stores.locate(self.name, self._uuid, timeout=self._timeout)
        _, session = await self._stores.runtime.ready(self.name, self._timeout)
        self._check()
        if self._open.payloads:
            payloads, headers = self._open.cut()
            sealed = session.out.record(
                self.name, location.key, payloads, headers, self._open.packed
            )
            self._add_record(sealed, location.key, PLAIN)
        return session.out, location.key

    def _add_record(
        self, sealed: tuple[bytes, bytes, bytes], key: ClusterKey, extras: Extras
    ) -> None:
        """Put a sealed record into the call, which is sent first if it is full or of another sender."""
        sender_id, end, body = sealed
        size = len(body) + RECORD_BYTES
        limit = min(CALL_BYTES, self._stores.runtime.message_limit)
        if self._call and (
            self._call_bytes + size > limit
            or len(self._call) == CALL_RECORDS
            or self._sealed_by != (sender_id, key)
        ):
            self._send()
        self._sealed_by = sender_id, key
        self._call.append(extras.record(self._records, end, body))
        self._call_bytes += size
        self._records += 1

    def _send(self) -> None:
        if not self._call or self._sealed_by is None:
            return
        records, size = self._call, self._call_bytes
        self._call, self._call_bytes = [], 0
        sender_id, key = self._sealed_by
        call = Stage(self.writer, self.batch, self._attempt, sender_id, records)
        self._unacknowledged_bytes += size
        task = asyncio.create_task(self._send_call(call, key, size), name="iris-stage")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_call(self, call: Stage, key: ClusterKey, size: int) -> None:
        """Send a call until it is answered. Its records open under the key they were sealed with, so it goes under no other."""

        async def once(left_s: float) -> Staged:
            location = await self._stores.find(self.name, self._uuid, timeout=left_s)
            return await self._stores.ask(
                location.address, key, call, Staged, timeout=left_s, shown=self.name, writes=True
            )

        try:
            await self._stores.until(self.name, self._uuid, once, timeout=self._timeout)
        except Exception as err:  # whoever appends or finishes hears of it, whatever it is
            self._error = self._error or err
        finally:
            self._unacknowledged_bytes -= size


def check_batch(name: str, writer: str, batch: int) -> None:
    """Raise InvalidName or ConfigError unless a stream, writer and batch may be called so."""
    check_cluster(name)
    if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES:
        raise ConfigError(
            f"writer: {len(writer.encode())} bytes; it must have 1 to {MAX_WRITER_BYTES}"
        )
    if not 0 <= batch < MAX_BATCH:
        raise ConfigError(f"batch: {batch} is not from 0 to 2^63 - 1")


def commit_call(
    name: str, writer: str, batch: int, attempts: Iterable[StagedAttempt], limit: int
) -> Commit:
    """Return the call that commits; raises StreamError, or MessageTooLarge if it has over `limit` bytes."""
    check_batch(name, writer, batch)
    attempts = [*attempts]
    ids = _attempt_ids(name, attempts)
    named = [Attempt(one, attempt.records) for one, attempt in zip(ids, attempts, strict=True)]
    return _checked(Commit(writer, batch, named), limit)


def discard_call(
    name: str, writer: str, batch: int, attempts: Iterable[StagedAttempt], limit: int
) -> Discard:
    """Return the call that discards; raises likewise."""
    check_batch(name, writer, batch)
    return _checked(Discard(writer, batch, _attempt_ids(name, attempts)), limit)


def _checked(call: T, limit: int) -> T:
    count, size = len(call.attempts), len(encode(call))
    if count > MAX_ATTEMPTS or size > limit:
        raise MessageTooLarge(
            f"{count} attempts in {size} bytes are over the limit of {MAX_ATTEMPTS} attempts or {limit} bytes"
        )
    return call


def _attempt_ids(name: str, attempts: Iterable[StagedAttempt]) -> list[bytes]:
    try:
        ids = [bytes.fromhex(attempt.attempt) for attempt in attempts]
    except ValueError as err:
        raise StreamError(name, f"each attempt must be 32 hex digits: {err}") from err
    if any(len(one) != 16 for one in ids) or len(set(ids)) < len(ids):
        raise StreamError(name, "each attempt must be 32 hex digits and be named once")
    return ids
