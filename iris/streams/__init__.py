"""Durable streams: logs of published, pushed, broadcast or appended messages, kept sealed by a store.

`client.streams` creates, describes, changes and deletes streams, appends to them and reads them. The store has no
cluster key, so it cannot open what it keeps. It acts on orders that a holder of the key has signed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final

from iris.checks import check_many, check_number, check_whole
from iris.core.bundle import Headers
from iris.core.producer import PLAIN
from iris.deadlines import seconds_left
from iris.errors import ConfigError, StreamUnavailable
from iris.runtime import Runtime
from iris.streams.appending import Appender, append_expecting
from iris.streams.balancing import PartitionMove
from iris.streams.committing import (
    CommitInfo,
    StagedAttempt,
    StagedPart,
    check_batch,
    commit_log,
    commit_partitions,
    discard_call,
    discard_everywhere,
)
from iris.streams.consuming import BATCH_MESSAGES, Consumer
from iris.streams.definitions import MOST, check_durability, check_local_name, given_fields
from iris.streams.health import StoreHealth
from iris.streams.listing import StreamInfo
from iris.streams.managing import PATIENCE_S, Management
from iris.streams.messages import OF_A_MESSAGE, make_extras
from iris.streams.mirroring import Mirror
from iris.streams.partitions import check_whole_stream, find_layout
from iris.streams.reading import FETCH_BYTES, Reader, Start, start_offset
from iris.streams.records import RecordOpener, StreamGap, StreamMessage, StreamPage, StreamRecord
from iris.streams.redriving import RedriveInfo
from iris.streams.spreading import Offset, Spread, offset_in, offsets_of, partition_of
from iris.streams.staging import Staging
from iris.streams.targets import Targets
from iris.wire.consumers import ConsumerInfo
from iris.wire.names import check_address, check_cluster, split_site
from iris.wire.orders import DEAD, Definition, check_definition
from iris.wire.streams import MAX_PAGE_BYTES, Fetch, Fetched, Settled

MAX_OPENERS: Final = 256
"""Logs for which `fetch` caches a `RecordOpener`. When it is full the cache is cleared and logs are described again."""
_Offsets = list[int]
_Pending = list[tuple[asyncio.Future[int], int]]
"""These aliases exist because `list` is a method of Streams. _Pending: (first offset of the record, index in it)."""
WHOLE_BATCH: Final = 1 << 62
"""Size of a batch of its own, so that several calls of `append_many` go to several partitions."""
__all__ = [
    "CommitInfo",
    "Consumer",
    "ConsumerInfo",
    "Mirror",
    "Offset",
    "PartitionMove",
    "Reader",
    "RedriveInfo",
    "StagedAttempt",
    "StagedPart",
    "Staging",
    "StoreHealth",
    "StreamGap",
    "StreamInfo",
    "StreamMessage",
    "StreamPage",
    "StreamRecord",
    "Streams",
    "partition_of",
]


class Streams(Management):
    """The streams of a client's clusters and topics; get it as `client.streams`."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.keys_changed = self._stores.keys_changed
        self._openers: dict[tuple[str, bytes], RecordOpener] = {}
        """Openers for `fetch`: (stream name, log uuid) -> opener."""
        self._logs: dict[tuple[str, str, int], tuple[str, str]] = {}
        """(name, uuid, partition) -> the (name, uuid) of its log."""
        self._targets = Targets(self._stores)
        self._make_consumer: Callable[..., Consumer] = Consumer
        runtime.parts.append(self)

    # -- writing ---------------------------------------------------------------------------------------------

    async def append(
        self, name: str, message: object, *, headers: Headers | None = None, key: str | bytes | None = None, ttl: float | None = None,
        deliver_at: datetime | None = None, expect: int | None = None, tombstone: bool = False, message_id: str | bytes | None = None,
        partition: int | None = None, uuid: str = "", timeout: float = 10.0,
    ) -> int:  # fmt: skip
        """Store a message and return its offset once it is on disk.

        Messages appended in one turn of the event loop are stored together.

        In a stream with several partitions, the offset is an `Offset`: an int with the `partition` that it counts in.
        Messages with a key go to the partition of that key. The partitions take turns with the others: those of one
        turn of the event loop go to one partition.

        Args:
            key: compaction keeps the last message of each key, and a consumer's workers get the messages of a key one
                after the other.
            tombstone: the message marks its key as deleted.
            ttl: seconds after which the message is removed.
            deliver_at: the time before which consumers do not get it.
            expect: store the message only if its offset will be this one.
            message_id: within the stream's `dedup_window` a message with this id is stored once, even if another
                client appends it again. The offset returned is then that of the first.
            partition: append to this partition, whatever the key.

        Raises:
            OffsetConflict: the stream does not end at the offset `expect`; nothing was stored.
            StreamError: if `may_have_run` is True, the message may be stored, or may be stored later.
        """
        data, packed = self._runtime.encode(message, headers, OF_A_MESSAGE)
        if expect is not None:
            check_whole("expect", expect, 0, MOST)
        asked, number = timeout, None
        target = self._targets.known.get((name, uuid))
        if type(target) is not Appender or partition:  # not known yet, or it has several partitions
            keyed = key is not None or message_id is not None or expect is not None
            target, timeout = await self._targets.find(name, uuid, partition, keyed, timeout)
            if isinstance(target, Spread):
                number = target.choose(partition, key, message_id, expect, len(data))
                target = target.appender(number)
                name, uuid = target.name, target.uuid
        try:
            extras = await make_extras(
                self._stores, name, uuid, key=key, ttl=ttl, deliver_at=deliver_at, tombstone=tombstone, timeout=timeout,
                message_id=message_id,
            )  # fmt: skip
        except StreamUnavailable as err:
            if not err.may_have_run:
                raise
            raise self._targets.not_found(name, asked) from err  # only the stream was looked up
        if expect is not None:
            offset = await append_expecting(
                self._stores, name, uuid, data, headers, packed, extras, expect, timeout
            )
            return offset if number is None else offset_in(offset, number)
        producer = target.producer
        try:
            async with asyncio.timeout(timeout):
                if producer.full:
                    await target.wait_for_room()
                future, index = producer.add(data, headers, packed, extras)
                offset = await asyncio.shield(future)
                if index:
                    offset += index
        except TimeoutError:
            cause = self._runtime.away_text(asked, time.monotonic())
            detail = f"not acknowledged within {asked:g} s{cause}; it may still be stored{self._stores.holders.starting_hint}"
            raise StreamUnavailable(name, detail, may_have_run=True) from None
        except TypeError:
            check_number("timeout", timeout)
            raise
        return offset if number is None else offset_in(offset, number)

    async def append_many(
        self, name: str, messages: Sequence[object], *, headers: Headers | None = None, partition: int | None = None, uuid: str = "",
        timeout: float = 30.0,
    ) -> _Offsets:  # fmt: skip
        """Store messages in order, each with the same `headers`; return their offsets once all are on disk.

        In a stream with several partitions, all of them go to one partition. Raises as `append`; some messages may
        be stored nevertheless.
        """
        check_many("messages", messages, "append")
        asked, number = timeout, None
        target = self._targets.known.get((name, uuid))
        if type(target) is not Appender or partition:
            target, timeout = await self._targets.find(name, uuid, partition, False, timeout)
            if isinstance(target, Spread):
                number = target.choose(partition, None, None, None, WHOLE_BATCH)
                target = target.appender(number)
        producer = target.producer
        pending: _Pending = []
        try:
            async with asyncio.timeout(timeout):
                for message in messages:
                    data, packed = self._runtime.encode(message, headers, OF_A_MESSAGE)
                    if producer.full:
                        await target.wait_for_room()
                    pending.append(producer.add(data, headers, packed, PLAIN))
                if pending:  # waiting cancels none of them
                    await asyncio.wait({future for future, _ in pending})
        except TimeoutError:
            cause = self._runtime.away_text(asked, time.monotonic())
            detail = f"not all acknowledged within {asked:g} s{cause}; the rest may still be stored{self._stores.holders.starting_hint}"
            raise StreamUnavailable(target.name, detail, may_have_run=True) from None
        except TypeError:
            check_number("timeout", timeout)
            raise
        offsets = [
            future.result() + index if index else future.result() for future, index in pending
        ]
        return offsets if number is None else [*map(offsets_of(number), offsets)]

    # -- staging ---------------------------------------------------------------------------------------------

    def stage(
        self, name: str, *, writer: str, batch: int, partition: int | None = None, uuid: str = "", timeout: float = 60.0
    ) -> Staging:  # fmt: skip
        """Return a new attempt at a batch. Its messages are invisible until the batch is committed; see `Staging`.

        With `partition` the batch is of this partition alone, and `commit` must name it, too.

        `writer` identifies the job that numbers the batches, and is the same in all its processes. `timeout` is in
        seconds, for each call to the store with its retries.
        """
        check_batch(name, writer, batch)
        return Staging(
            self._stores, name, writer=writer, batch=batch, uuid=uuid, timeout=timeout, partition=partition
        )  # fmt: skip

    async def commit(
        self, name: str, *, writer: str, batch: int, attempts: Iterable[StagedAttempt], partition: int | None = None, uuid: str = "",
        timeout: float = 60.0,
    ) -> CommitInfo:  # fmt: skip
        """Append everything the attempts staged, in order and all at once.

        In a stream with several partitions, each shows its part of the batch at once. Partition 0 stores first what
        all of them will show, so if this call fails in between, the next commit of the writer completes that, and
        drops other attempts at the batch.

        Anything else staged for this batch or earlier batches is dropped. Each batch of a writer is stored once: to
        commit it again, or to commit one below the writer's last batch, changes nothing. Batch numbers rise and may
        skip. If you do not know whether a commit succeeded, call it again with the same attempts.

        Raises:
            StagedMissing: an attempt is not staged or not complete (it may have expired). Nothing was committed in
                this log.
            StreamError: nothing was committed in this log, unless `may_have_run` is set.
            MessageTooLarge: the attempts do not fit one call, which holds about 40,000.
        """
        check_batch(name, writer, batch)
        named = [*attempts]
        commit = commit_log
        if partition:
            name, uuid = await self._log(name, uuid, partition, timeout)
        elif partition is None and any(attempt.parts is not None for attempt in named):
            commit = commit_partitions
        return await commit(self._stores, name, uuid, writer, batch, named, timeout)

    async def discard(
        self, name: str, *, writer: str, batch: int, attempts: Iterable[StagedAttempt] = (), partition: int | None = None, uuid: str = "",
        timeout: float = 10.0,
    ) -> int:  # fmt: skip
        """Drop what the attempts staged, or, if none is given, everything staged for the batch. Raises StreamError.

        Returns the number of records dropped. Without a `partition`, it does so in all of them. If a commit did not
        reach all partitions, the attempts that it still needs are kept, so that it can be completed. They are dropped
        only if no attempt is given.
        """
        call = discard_call(name, writer, batch, attempts, self._runtime.message_limit)
        if partition is None:
            return await discard_everywhere(self._stores, name, uuid, call, timeout)
        if partition:
            name, uuid = await self._log(name, uuid, partition, timeout)
        done = await self._stores.ask_stream(
            name, uuid, call, Settled, timeout=timeout, writes=True
        )
        return done.count

    # -- reading ---------------------------------------------------------------------------------------------

    def read(
        self, name: str, start: Start = "first", *, follow: bool = True, partition: int | None = None, uuid: str = "",
        batch_bytes: int = FETCH_BYTES, patience: float = PATIENCE_S, on_gap: Callable[[StreamGap], object] | None = None,
    ) -> Reader:  # fmt: skip
        """Return a reader of the messages from `start` on: "first", "last", "new", an offset, or a time.

        A name like "eu:orders" reads a stream of another site. The reader follows the stream as it grows; with
        `follow=False` it ends where the stream ended when reading began. Of a stream with several partitions it reads
        one (`partition`), or all. To read all, `start` may also map partitions to starts, as `reader.offsets` does. See
        `Reader`.
        """
        check_address(name)
        check_whole("batch_bytes", batch_bytes, 1, MAX_PAGE_BYTES)
        check_number("patience", patience, 0.001, unit=" s")
        if partition is not None:
            check_whole("partition", partition, 0)
        return Reader(
            self._stores,
            name,
            start,
            follow=follow,
            uuid=uuid,
            batch_bytes=batch_bytes,
            patience=patience,
            on_gap=on_gap,
            partition=partition,
        )

    async def find(
        self, name: str, at: Start, *, partition: int | None = None, uuid: str = "", timeout: float = PATIENCE_S
    ) -> int:  # fmt: skip
        """Return the offset that `at` means in a stream: "first", "last", "new", an offset, or a time.

        Raises StreamError, for example if the stream has several partitions and none is named.
        """
        check_address(name)
        if partition:
            name, uuid = await self._log(name, uuid, partition, timeout)
        stream, offset = await start_offset(self._stores, name, uuid, at, patience=timeout)
        if partition is None:
            check_whole_stream(name, len(stream.order.definition.partitions) + 1, "find")
        return offset

    async def fetch(
        self, name: str, start: int, *, partition: int | None = None, uuid: str = "", max_bytes: int = FETCH_BYTES, wait: float = 0.0,
        timeout: float = PATIENCE_S,
    ) -> StreamPage:  # fmt: skip
        """Return one page of the stream from offset `start` on, for programs that track offsets themselves.

        Records come whole; they are opened but not split into messages. A page has at most `max_bytes`, or one
        larger record. At the end of the stream, `fetch` waits up to `wait` seconds (at most 60) and then returns an
        empty page. `timeout` is the time beyond `wait`, in seconds, for which the relay or the store may be away.

        Raises:
            StreamError: NoStream, StreamDamaged, StreamUnavailable; also without a `partition` if the stream has
                several.
        """
        check_address(name)
        check_whole("start", start, 0, MOST)
        check_whole("max_bytes", max_bytes, 1, MAX_PAGE_BYTES)
        check_number("wait", wait, 0, 60, unit=" s")
        check_number("timeout", timeout)
        until_s = time.monotonic() + timeout + wait
        if partition:
            name, uuid = await self._log(name, uuid, partition, timeout)
        call = Fetch(start, max_bytes, round(wait * 1000))
        fetched = await self._stores.ask_stream(
            name, uuid, call, Fetched, timeout=timeout + wait, patience=timeout
        )
        opener = self._openers.get((name, fetched.uuid))
        if opener is None:
            opener = RecordOpener(self._runtime.find_key)
            # A log never changes what it records, so one description is enough.
            opener.stream = await self._stores.describe(
                name, fetched.uuid.hex(), timeout=seconds_left(until_s)
            )
            if len(self._openers) >= MAX_OPENERS:
                self._openers.clear()
            self._openers[name, fetched.uuid] = opener
            self._stores.openers.add(opener)
        if partition is None and opener.stream is not None:
            check_whole_stream(name, len(opener.stream.order.definition.partitions) + 1, "fetch")
        return StreamPage(fetched, opener)

    def consumer(
        self, name: str, consumer: str, start: Start = "first", *, shared: bool = False, durable: bool = True, ack_timeout: float = 30.0,
        max_deliver: int = 0, prefetch: int = BATCH_MESSAGES, create: bool = True, partition: int | None = None, uuid: str = "",
        patience: float = PATIENCE_S, on_gap: Callable[[StreamGap], object] | None = None,
        on_active: Callable[[bool], object] | None = None,
    ) -> Consumer:  # fmt: skip
        """Return a worker of a consumer, whose position in the stream the store keeps; see `Consumer`.

        The first batch creates the consumer, at `start`; without `create`, it raises StreamError if there is none. With
        `shared`, several workers share its messages, those of one key in order. Without it, one worker is active, and
        the others stand by in the order in which they came; `on_active` is called with True when this worker becomes
        active, and with False when another one has replaced it. A consumer that is not `durable` is
        deleted after a minute without a worker. A message that was delivered `max_deliver` times (0: no limit)
        without an acknowledgement moves to the dead letters, the stream `NAME.dead`. With a `partition` it works on
        that one only, otherwise on all that the stream has.
        """
        check_address(name)
        check_cluster(consumer)
        check_number("patience", patience, 0.001, unit=" s")
        if partition is not None:
            check_whole("partition", partition, 0)
        return self._make_consumer(
            self._stores, name, consumer, start, shared=shared, durable=durable, ack_timeout=ack_timeout, max_deliver=max_deliver,
            prefetch=prefetch, create=create, uuid=uuid, patience=patience, on_gap=on_gap, on_active=on_active,
            partition=partition,
        )  # fmt: skip

    # -- copies ----------------------------------------------------------------------------------------------

    def mirror(
        self, source: str, name: str, *, follow: bool = True, max_bytes: int | None = None, max_messages: int | None = None,
        max_age: float | None = None, compact: bool | None = None, uuid: str = "", patience: float = math.inf,
        durability: str = "disk",
    ) -> Mirror:  # fmt: skip
        """Return a mirror that copies a stream, usually of another site ("eu:orders"), into the local stream `name`.

        The copy is created if it does not exist, and keeps what its limits allow. It can be read and consumed like the
        source, at the same offsets, and accepts nothing but copies until `promote`. `uuid` chooses the log if two have
        the source's name. `patience` is how many seconds a relay or a store may be away. See `Mirror`.
        With `durability="bucket"` the copy is created in the bucket of a store that has one.
        """
        check_address(source)
        check_local_name(name)
        if split_site(source)[0] in ("", ".") and split_site(source)[1] == name:
            raise ConfigError(f"name: {name!r} is the source itself; give the copy another name")
        if source.endswith(DEAD):
            raise ConfigError(
                f"source: {source!r} holds dead letters, which are not copied; mirror {source.removesuffix(DEAD)!r}"
            )
        limits = given_fields(
            max_bytes=max_bytes, max_messages=max_messages, max_age=max_age, compact=compact
        )
        check_definition(Definition(name, **limits))
        check_durability(durability)
        return Mirror(
            self._stores, source, name, follow=follow, limits=limits, uuid=uuid, patience=patience, durability=durability
        )  # fmt: skip

    # -- life ------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Wait until every append has finished. The client calls it."""
        await self._targets.finish()

    def end(self) -> None:
        """Stop sending, and fail the pending appends. The client calls it."""
        self._targets.end("the client was closed")
        self._stores.attendance.end()

    # -- internals -------------------------------------------------------------------------------------------

    async def _log(self, name: str, uuid: str, partition: int, timeout: float) -> tuple[str, str]:
        """Return the (name, uuid) of a partition's log, which never change. Raises ConfigError if there is none."""
        known = self._logs.get((name, uuid, partition))
        if known is None:
            layout = await find_layout(self._stores, name, uuid, timeout=timeout)
            known = layout.log(partition)
            if uuid:  # a name can get another log
                if len(self._logs) >= MAX_OPENERS:
                    self._logs.clear()
                self._logs[name, uuid, partition] = known
        return known
