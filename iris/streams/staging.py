"""Staging: records of a batch are stored invisibly, until a commit makes those of the chosen attempts visible at once.

    append ─► open record ── 64 KiB ──► sealed ── 256 KiB ──► calls in flight ── Staged ──► finish
                                                    at most 4 MiB

An attempt has a random id, and its records are numbered from 0. So a call without an answer can be repeated
unchanged after a lost relay or store, and nothing is staged twice. No reader sees staged records until a Commit
names the attempt.
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
from iris.streams.messages import OF_A_MESSAGE, make_extras
from iris.streams.partitions import check_whole_stream, find_layout
from iris.streams.stores import Stores
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
"""Unacknowledged bytes of an attempt; above this, appends wait."""
CALL_RECORDS: Final = 4096
"""Records in one Stage call at most."""
MAX_BATCH: Final = 1 << 63
FINISHED: Final = "finished"
T = TypeVar("T", Commit, Discard)


class StagedAttempt(Struct, frozen=True):
    """The result of a `Staging`, for `client.streams.commit` in any process. It can be pickled."""

    attempt: str
    """32 hex digits."""
    records: int
    """Number of sealed records, each with one message or more."""


class CommitInfo(Struct, frozen=True):
    """A committed batch: its offsets are from `first` up to `next`, which are equal if it is empty.

    Both are None if the writer has committed a later batch since, so that the store no longer knows.
    """

    first: int | None
    next: int | None
    replayed: bool
    """The batch was committed before, perhaps from other attempts, and nothing changed."""


class Staging:
    """One attempt at a writer's batch: `async with client.streams.stage("orders", writer="etl", batch=7) as staging`.

    Append to it in order, from one task, then pass the result of `finish` to `client.streams.commit`. After an
    error or a cancelled call, begin another attempt. If you leave the context without `finish`, what was staged
    stays in the store until you `discard` it, or until it expires after a day.
    """

    def __init__(
        self, stores: Stores, name: str, *, writer: str, batch: int, uuid: str, timeout: float, partition: int | None = None
    ) -> None:  # fmt: skip
        self.name = name
        self._partition = partition
        self._found = False
        """Whether the log is known that the messages go to."""
        self.writer = writer
        self.batch = batch
        self._stores = stores
        self._uuid = uuid
        self._timeout = timeout
        self._attempt = os.urandom(16)
        self._records = 0
        self._open = BundleBuilder()
        """Messages of the record that is not sealed yet."""
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
        """The attempt's id, 32 hex digits; pass it to `discard` if the attempt failed."""
        return self._attempt.hex()

    # -- adding ----------------------------------------------------------------------------------------------

    async def append(
        self, message: object, *, headers: Headers | None = None, key: str | bytes | None = None, ttl: float | None = None,
        deliver_at: datetime | None = None, tombstone: bool = False,
    ) -> None:  # fmt: skip
        """Stage a message; the arguments are those of `Streams.append`. Waits while more than 4 MiB are unacknowledged.

        Raises:
            StreamError: the store refused this or an earlier message, or did not answer in time.
            Closed: after `finish` or `close`.
        """
        self._check()
        data, packed = self._stores.runtime.encode(message, headers, OF_A_MESSAGE)
        await self._find_log()
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
        """Stage messages in order, several per record. Raises as `append`."""
        for message in messages:
            self._check()
            data, packed = self._stores.runtime.encode(message, None, OF_A_MESSAGE)
            await self._add(data, None, packed)

    async def add_bundle(self, plain: bytes, count: int) -> None:
        """Stage `plain`, a bundle of `count` messages as `iris.core.bundle.encode_bundle` makes it, as one record.

        Raises as `append`, and LocalProtocolError if it is not a bundle of `count` messages.
        """
        self._check()
        if count < 1 or plain[:4] != count.to_bytes(4, "little"):
            raise LocalProtocolError(f"the bytes are not a bundle of {count} messages")
        self._stores.runtime.check_size(plain, OF_A_MESSAGE)
        out, sealing = await self._seal_open_record()
        self._add_record(out.record_bundle(self.name, sealing, plain, count), sealing, PLAIN)

    async def finish(self) -> StagedAttempt:
        """Wait until everything is on the store's disk and return the attempt; nothing can be appended after.

        Raises the first error of the attempt.
        """
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
        """Stop sending. Idempotent."""
        self._ended = self._ended or "closed"
        if self._tasks:
            self._error = self._error or Closed(
                f"staging for {self.name!r} was closed; stage another attempt"
            )
        for task in self._tasks:
            task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # -- internals -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise Closed(f"staging for {self.name!r} was {self._ended}; stage another attempt")

    async def _add(self, data: bytes, headers: Headers | None, packed: bool) -> None:
        """Add a message to the open record; seal that first if it is full or encoded differently."""
        size = message_bytes(data, headers)
        while not self._open.fits(size, packed):
            await self._seal_open_record()
        self._open.append(data, headers, packed, size)

    async def _find_log(self) -> None:
        """Find the log of the partition that the messages go to. Raises StreamError if it must be named."""
        if not self._found:
            layout = await find_layout(self._stores, self.name, self._uuid, timeout=self._timeout)
            if self._partition is None:
                check_whole_stream(self.name, len(layout), "a batch")
            else:
                self.name, log = layout.log(self._partition)
                self._uuid = log if self._partition else self._uuid
            self._found = True

    async def _seal_open_record(self) -> tuple[Outbound, ClusterKey]:
        """Wait for room, seal the open record, and return what to seal with.

        If it is cancelled, nothing was changed.
        """
        while self._unacknowledged_bytes > WINDOW_BYTES and self._error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        await self._find_log()
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
        """Add a sealed record to the next call; send that first if it is full or from another sender."""
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
        """Send a call until it is answered, under the key that its records are sealed with: no other key opens them."""

        async def once(left_s: float) -> Staged:
            location = await self._stores.find(self.name, self._uuid, timeout=left_s)
            return await self._stores.ask(
                location.address, key, call, Staged, timeout=left_s, shown=self.name, writes=True
            )

        try:
            await self._stores.retry(self.name, self._uuid, once, timeout=self._timeout)
        except Exception as err:  # the next `append` or `finish` raises it, whatever it is
            self._error = self._error or err
        finally:
            self._unacknowledged_bytes -= size


def check_batch(name: str, writer: str, batch: int) -> None:
    """Raise InvalidName or ConfigError unless the stream's name, the writer and the batch are valid."""
    check_cluster(name)
    if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES:
        raise ConfigError(
            f"writer: {len(writer.encode())} bytes; it must have 1 to {MAX_WRITER_BYTES}"
        )
    if not 0 <= batch < MAX_BATCH:
        raise ConfigError(f"batch: {batch} is out of range; use 0 to 2^63 - 1")


def commit_call(
    name: str, writer: str, batch: int, attempts: Iterable[StagedAttempt], limit: int
) -> Commit:
    """Return the call that commits. Raises StreamError, or MessageTooLarge if it has over `limit` bytes."""
    check_batch(name, writer, batch)
    attempts = [*attempts]
    ids = _attempt_ids(name, attempts)
    named = [Attempt(one, attempt.records) for one, attempt in zip(ids, attempts, strict=True)]
    return _checked(Commit(writer, batch, named), limit)


def discard_call(
    name: str, writer: str, batch: int, attempts: Iterable[StagedAttempt], limit: int
) -> Discard:
    """Return the call that discards. Raises as `commit_call`."""
    check_batch(name, writer, batch)
    return _checked(Discard(writer, batch, _attempt_ids(name, attempts)), limit)


def _checked(call: T, limit: int) -> T:
    count, size = len(call.attempts), len(encode(call))
    if count > MAX_ATTEMPTS or size > limit:
        raise MessageTooLarge(
            f"{count} attempts in {size} bytes are over the limit of {MAX_ATTEMPTS} attempts and {limit} bytes a call"
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
