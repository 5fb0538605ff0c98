"""Staging: records of a batch are stored invisibly, until a commit makes those of the chosen attempts visible at once.

    append ─► open record ── 64 KiB ──► sealed ── 256 KiB ──► calls in flight ── Staged ──► finish
                                                    at most 4 MiB

An attempt has a random id, the same in all partitions of the stream, and in each of them its records are numbered
from 0. So a call without an answer can be repeated unchanged after a relay or store was lost, and nothing is staged
twice. No reader sees staged records until a Commit names the attempt.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from datetime import datetime
from typing import Final, Self

from iris.checks import check_many
from iris.core.bundle import BundleBuilder, Headers, message_bytes
from iris.core.outbound import Outbound
from iris.core.producer import CALL_BYTES, PLAIN, RECORD_BYTES, Extras
from iris.crypto.keys import ClusterKey
from iris.errors import Closed, LocalProtocolError
from iris.misuse import AsyncOnly
from iris.one_process import OneProcess
from iris.streams.committing import StagedAttempt, StagedPart
from iris.streams.messages import OF_A_MESSAGE, make_extras
from iris.streams.partitions import Layout, find_layout
from iris.streams.stores import Stores
from iris.wire.streams import (
    NewRecord,
    Stage,
    Staged,
)

WINDOW_BYTES: Final = 4 << 20
"""Unacknowledged bytes of an attempt; above this, appends wait."""
CALL_RECORDS: Final = 4096
"""Records in one Stage call at most."""
FINISHED: Final = "finished"


class Staging(OneProcess, AsyncOnly):
    """One attempt at a writer's batch: `async with client.streams.stage("orders", writer="etl", batch=7) as staging`.

    Append to it in order, from one task, then pass the result of `finish` to `client.streams.commit`. In a stream with
    several partitions, messages with a key go to the partition of that key, and others to one after the other, about
    64 KiB to each. After an error or a cancelled call, begin another attempt. If you leave the context without
    `finish`, what was staged stays in the store until you `discard` it, or until it expires after a day.
    """

    _right_use = "async with client.streams.stage(...) as staging:"

    def __init__(
        self, stores: Stores, name: str, *, writer: str, batch: int, uuid: str, timeout: float, partition: int | None = None
    ) -> None:  # fmt: skip
        self.name = name
        self.writer = writer
        self.batch = batch
        self._stores = stores
        self._uuid = uuid
        self._timeout = timeout
        self._partition = partition
        self._attempt = os.urandom(16)
        self._layout: Layout | None = None
        self._logs: dict[int, _LogStaging] = {}
        self._turn = int.from_bytes(self._attempt[:4], "little")
        """Which partition gets messages without a key. Attempts begin at different ones."""
        self._error: BaseException | None = None
        self._ended = ""

    @property
    def attempt(self) -> str:
        """The attempt's id, 32 hex digits; pass it to `discard` if the attempt failed."""
        return self._attempt.hex()

    async def layout(self) -> Layout:
        """Return the partitions of the stream, as this attempt found them first. Raises StreamError."""
        if self._layout is None:
            layout = await find_layout(self._stores, self.name, self._uuid, timeout=self._timeout)
            if self._partition is not None:
                layout.log(self._partition)
            self._layout = layout
        return self._layout

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
        layout = await self.layout()
        if key is not None and self._partition is None:
            log = self._log(layout, layout.of_key(key.encode() if isinstance(key, str) else key))
        else:
            log = self._any(layout, message_bytes(data, headers), packed)
        extras = await make_extras(
            self._stores, log.name, log.uuid, key=key, ttl=ttl, deliver_at=deliver_at, tombstone=tombstone, timeout=self._timeout
        )  # fmt: skip
        await log.append(data, headers, packed, extras)

    async def append_many(self, messages: Iterable[object]) -> None:
        """Stage messages in order, several per record. Raises as `append`."""
        check_many("messages", messages, "append")
        layout = await self.layout()
        for message in messages:
            self._check()
            data, packed = self._stores.runtime.encode(message, None, OF_A_MESSAGE)
            log = self._any(layout, message_bytes(data, None), packed)
            await log.append(data, None, packed, PLAIN)

    async def add_bundle(self, plain: bytes, count: int, *, partition: int | None = None) -> None:
        """Stage `plain`, a bundle of `count` messages as `iris.core.bundle.encode_bundle` makes it, as one record.

        `partition` is the one to which its keys belong (see `layout`); without it the bundle goes to any.

        Raises as `append`, and LocalProtocolError if it is not a bundle of `count` messages.
        """
        self._check()
        if count < 1 or plain[:4] != count.to_bytes(4, "little"):
            raise LocalProtocolError(f"the bytes are not a bundle of {count} messages")
        self._stores.runtime.check_size(plain, OF_A_MESSAGE)
        layout = await self.layout()
        if partition is not None and self._partition is None:
            layout.log(partition)
            log = self._log(layout, partition)
        else:
            log = self._next(layout)
        await log.add_bundle(plain, count)

    async def finish(self) -> StagedAttempt:
        """Wait until everything is on the stores' disks and return the attempt; nothing can be appended after.

        Raises the first error of the attempt.
        """
        if self._ended != FINISHED:
            self._check()
            layout = await self.layout()
            for log in self._logs.values():
                await log.send_open_record()
            self._check()
            self._ended = FINISHED
        else:
            layout = await self.layout()
        for log in self._logs.values():
            await log.finish()
        parts = [
            StagedPart(number, log.records, log.bytes) for number, log in sorted(self._logs.items())
        ]
        several = self._partition is None and len(layout) > 1
        return StagedAttempt(
            self._attempt.hex(), sum(part.records for part in parts), tuple(parts) if several else None
        )  # fmt: skip

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._ended = self._ended or "closed"
        for log in self._logs.values():
            log.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # -- internals -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for log in self._logs.values():
            if log.error is not None:
                raise log.error
        if self._ended:
            raise Closed(f"staging for {self.name!r} was {self._ended}; stage another attempt")

    def _any(self, layout: Layout, size: int, packed: bool) -> _LogStaging:
        """Return the partition for a message without a key: the one of the last, until its record is full."""
        if self._partition is None:
            log = self._logs.get(self._turn % len(layout))
            if log is not None and log.continues(size, packed):
                return log
        return self._next(layout)

    def _next(self, layout: Layout) -> _LogStaging:
        if self._partition is not None:
            return self._log(layout, self._partition)
        self._turn += 1
        return self._log(layout, self._turn % len(layout))

    def _log(self, layout: Layout, partition: int) -> _LogStaging:
        log = self._logs.get(partition)
        if log is None:
            name, uuid = layout.log(partition)
            # Without a uuid, partition 0 is found by its name, so another log of this name is refused by the store.
            uuid = uuid if partition else self._uuid
            log = self._logs[partition] = _LogStaging(
                self._stores, name, uuid, self.writer, self.batch, self._attempt, self._timeout
            )
        return log


class _LogStaging:
    """The part of an attempt that goes to one log."""

    def __init__(
        self, stores: Stores, name: str, uuid: str, writer: str, batch: int, attempt: bytes, timeout: float
    ) -> None:  # fmt: skip
        self.name = name
        self.uuid = uuid
        self.records = 0
        self.bytes = 0
        """Bytes of the bodies of the records."""
        self.error: BaseException | None = None
        self._writer = writer
        self._batch = batch
        self._stores = stores
        self._timeout = timeout
        self._attempt = attempt
        self._open = BundleBuilder()
        """Messages of the record that is not sealed yet."""
        self._call: list[NewRecord] = []
        self._call_bytes = 0
        self._sealed_by: tuple[bytes, ClusterKey] | None = None
        """Sender id and key of the records in the call."""
        self._unacknowledged_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def continues(self, size: int, packed: bool) -> bool:
        """Return whether a message of `size` bytes fits the record that is not sealed yet."""
        return bool(self._open.payloads) and self._open.fits(size, packed)

    async def append(
        self, data: bytes, headers: Headers | None, packed: bool, extras: Extras
    ) -> None:
        """Add an encoded message."""
        if extras is PLAIN:
            await self._add(data, headers, packed)
            return
        out, sealing = await self._seal_open_record()
        one = (headers,) if headers else None
        sealed = out.record(self.name, sealing, (data,), one, packed, extras.key)
        self._add_record(sealed, sealing, extras)

    async def add_bundle(self, plain: bytes, count: int) -> None:
        """Add a bundle of `count` messages, as one record."""
        out, sealing = await self._seal_open_record()
        self._add_record(out.record_bundle(self.name, sealing, plain, count), sealing, PLAIN)

    async def send_open_record(self) -> None:
        """Seal and send what waits."""
        await self._seal_open_record()
        self._send()

    async def finish(self) -> None:
        """Wait until everything that was sent is on the store's disk. Raises the first error."""
        while self._tasks and self.error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop sending. Idempotent."""
        if self._tasks:
            self.error = self.error or Closed(
                f"staging for {self.name!r} was closed; stage another attempt"
            )
        for task in self._tasks:
            task.cancel()

    async def _add(self, data: bytes, headers: Headers | None, packed: bool) -> None:
        """Add a message to the open record; seal that first if it is full or encoded differently."""
        size = message_bytes(data, headers)
        while not self._open.fits(size, packed):
            await self._seal_open_record()
        self._open.append(data, headers, packed, size)

    async def _seal_open_record(self) -> tuple[Outbound, ClusterKey]:
        """Wait for room, seal the open record, and return what to seal with.

        If it is cancelled, nothing was changed.
        """
        while self._unacknowledged_bytes > WINDOW_BYTES and self.error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        location = await self._stores.locate(self.name, self.uuid, timeout=self._timeout)
        _, session = await self._stores.runtime.ready(self.name, self._timeout)
        if self.error is not None:
            raise self.error
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
        self._call.append(extras.record(self.records, end, body))
        self._call_bytes += size
        self.records += 1
        self.bytes += len(body)

    def _send(self) -> None:
        if not self._call or self._sealed_by is None:
            return
        records, size = self._call, self._call_bytes
        self._call, self._call_bytes = [], 0
        sender_id, key = self._sealed_by
        call = Stage(self._writer, self._batch, self._attempt, sender_id, records)
        self._unacknowledged_bytes += size
        task = asyncio.create_task(self._send_call(call, key, size), name="iris-stage")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_call(self, call: Stage, key: ClusterKey, size: int) -> None:
        """Send a call until it is answered, under the key that its records are sealed with: no other key opens them."""

        async def once(left_s: float) -> Staged:
            location = await self._stores.find(self.name, self.uuid, timeout=left_s)
            return await self._stores.ask(
                location.address, key, call, Staged, timeout=left_s, shown=self.name, writes=True
            )

        try:
            await self._stores.retry(self.name, self.uuid, once, timeout=self._timeout)
        except Exception as err:  # the next `append` or `finish` raises it, whatever it is
            self.error = self.error or err
        finally:
            self._unacknowledged_bytes -= size
