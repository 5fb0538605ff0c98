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

from msgspec import structs

from iris.checks import check_number, check_whole
from iris.core.bundle import Headers
from iris.core.producer import PLAIN
from iris.deadlines import deadline, seconds_left
from iris.errors import ConfigError, NoStream, StreamUnavailable
from iris.runtime import Runtime
from iris.streams.appending import Appender, append_expecting
from iris.streams.balancing import PartitionMove, propose
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
from iris.streams.consumers import (
    change_in_each,
    consumers_of,
    dead_letters_of,
    delete_in_each,
    redrive_in_each,
)
from iris.streams.consuming import BATCH_MESSAGES, Consumer
from iris.streams.definitions import (
    check_durability,
    check_limits,
    check_local_name,
    check_same,
    check_unreserved,
    given_fields,
    keys_of,
    make_stream,
    promoted,
    redefine,
)
from iris.streams.forcing import force_stream
from iris.streams.listing import StreamInfo, list_streams, stray, stream_info
from iris.streams.messages import OF_A_MESSAGE, make_extras
from iris.streams.mirroring import Mirror
from iris.streams.moving import move_stream
from iris.streams.partitions import (
    add_partitions,
    check_partitioned,
    check_whole_stream,
    delete_stream,
    describe_partitions,
    find_layout,
    make_partitioned,
    redefine_all,
)
from iris.streams.reading import FETCH_BYTES, Reader, Start, start_offset
from iris.streams.records import RecordOpener, StreamGap, StreamMessage, StreamPage, StreamRecord
from iris.streams.redriving import RedriveInfo
from iris.streams.spreading import (
    Offset,
    Spread,
    offset_in,
    offsets_of,
    partition_of,
)
from iris.streams.staging import Staging
from iris.streams.stores import Stores
from iris.streams.targets import Targets
from iris.wire.names import check_address, check_cluster, split_site
from iris.wire.orders import DEAD, Definition, check_definition, split_partition
from iris.wire.streams import (
    ChangeConsumer,
    ConsumerInfo,
    Fetch,
    Fetched,
    Settled,
)

MAX_OPENERS: Final = 256
"""Logs for which `fetch` caches a `RecordOpener`. When it is full the cache is cleared and logs are described again."""
_ConsumerInfos = list[ConsumerInfo]
_Infos = list[StreamInfo]
_Messages = list[StreamMessage]
_Offsets = list[int]
_Moves = list[PartitionMove]
_Pending = list[tuple[asyncio.Future[int], int]]
"""These aliases exist because `list` is a method of Streams. _Pending: (first offset of the record, index in it)."""
WHOLE_BATCH: Final = 1 << 62
"""Size of a batch of its own, so that several calls of `append_many` go to several partitions."""
PATIENCE_S: Final = 30.0
"""Default seconds for which a reader or consumer waits for a relay or store that is away."""
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
    "StreamGap",
    "StreamInfo",
    "StreamMessage",
    "StreamPage",
    "StreamRecord",
    "Streams",
    "partition_of",
]


class Streams:
    """The streams of a client's clusters and topics; get it as `client.streams`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stores = Stores(runtime)
        self.keys_changed = self._stores.keys_changed
        self._openers: dict[tuple[str, bytes], RecordOpener] = {}
        """Openers for `fetch`: (stream name, log uuid) -> opener."""
        self._logs: dict[tuple[str, str, int], tuple[str, str]] = {}
        """(name, uuid, partition) -> the (name, uuid) of its log."""
        self._targets = Targets(self._stores)
        self._make_consumer: Callable[..., Consumer] = Consumer
        runtime.parts.append(self)

    # -- managing --------------------------------------------------------------------------------------------

    async def create(
        self, name: str, *, topic: str = "", cluster: str = "", max_bytes: int = 0, max_messages: int = 0, max_age: float = 0.0,
        compact: bool = False, dedup_window: float = 0.0, durability: str = "disk", copy: bool = True, partitions: int = 1,
        timeout: float = 10.0,
    ) -> StreamInfo:  # fmt: skip
        """Create a stream, a durable log. A stream that exists with the same definition is returned as it is.

        With `topic` it records what is published to that filter. With `cluster` it records all the cluster's
        broadcasts and a share of its pushes. With neither it holds only what is appended. The oldest messages are
        removed when the stream exceeds `max_bytes`, `max_messages` or `max_age` (seconds); 0 means no limit. With
        `compact` the last message of each key is kept. For `dedup_window` seconds the store remembers message ids
        and stores each id once.

        `durability` says when a message is acknowledged: "disk", when it is on the disk of one store, or "bucket",
        when it is in the object storage of a store started with `--bucket`, which then outlives the disk.
        A "disk" stream of such a store is copied to its bucket, too, unless `copy` is False. Nothing waits for the
        copy; `describe` shows how far it is behind.

        With `partitions` above 1 the stream, which must have no `topic` or `cluster`, is as many logs, spread over
        the stores of the site. The limits apply to each of them. See `append` and `read`.

        Raises:
            ConfigError: a setting is out of range, or `durability` is another word.
            StreamExists: a stream of this name exists with a different definition.
            StreamUnavailable: there is no store, or it did not answer.
        """
        check_local_name(name)
        check_limits(max_bytes, max_messages, max_age, dedup_window)
        check_durability(durability)
        definition = Definition(
            name,
            topic,
            cluster,
            max_bytes,
            max_messages,
            round(max_age * 1e6),
            compact,
            dedup_window_us=round(dedup_window * 1e6),
            copy=copy,
        )
        check_partitioned(definition, partitions)
        until_s = deadline(timeout)
        try:
            found = await self._stores.describe(name, "", timeout=timeout)
        except NoStream:
            check_unreserved(name)
        else:
            return check_same(found, definition, partitions)
        bucket, left_s = durability == "bucket", seconds_left(until_s)
        if partitions > 1:
            made = await make_partitioned(
                self._stores, definition, partitions, left_s, bucket=bucket
            )
        else:
            made = await make_stream(self._stores, definition, left_s, bucket=bucket)
        return check_same(made, definition, partitions)

    async def partitions(self, name: str, *, uuid: str = "", timeout: float = 5.0) -> _Infos:
        """Return the state of each partition of a stream, in order.

        One whose store is away has that in `failed`, and no `store`. Raises StreamError if partition 0 is away.
        """
        check_address(name)
        return await describe_partitions(self._stores, name, uuid, timeout)

    async def describe(self, name: str, *, uuid: str = "", timeout: float = 5.0) -> StreamInfo:
        """Return a stream's definition and state; of a stream with partitions, those of partition 0.

        `name` may be that of a partition, such as "orders/3". If two stores hold this name, choose one by `uuid` (hex).
        Raises StreamError.
        """
        return stream_info(await self._stores.describe(name, uuid, timeout=timeout))

    async def list(self, *, timeout: float = 5.0) -> _Infos:
        """Return the streams of all stores that the local relay knows, for the keys in this keyring, sorted by name.

        Each partition is in the list by itself.

        Raises:
            StreamUnavailable: a store did not answer.
        """
        streams = await list_streams(self._stores, timeout)
        infos = []
        for stream in streams:
            info = stream_info(stream)
            if not info.failed and (why := stray(stream, streams)):
                info = structs.replace(info, failed=why)
            infos.append(info)
        return sorted(infos, key=_in_list)

    async def change(
        self, name: str, *, max_bytes: int | None = None, max_messages: int | None = None, max_age: float | None = None,
        compact: bool | None = None, paused: bool | None = None, consumers_paused: bool | None = None, dedup_window: float | None = None,
        copy: bool | None = None, partitions: int | None = None, durability: str | None = None, uuid: str = "", timeout: float = 10.0,
    ) -> StreamInfo:  # fmt: skip
        """Change a stream's limits, whether it records, or whether it is copied; None leaves a field as it is.

        The stream is also shared with every key that this keyring has for it. All its partitions are changed. With
        `partitions` it gets more of them; the keys of some messages move to the new ones then. It cannot get fewer.

        With `durability="bucket"` a stream on the disk of a store that has a bucket joins the bucket, while it is in
        use: its uuid, offsets, producers and consumers stay. The call returns when that is done, which takes as long
        as the bucket takes the whole stream. If `timeout` seconds pass, the stream may still join: look at
        `StreamInfo.durability`. The keyring needs all keys of the stream. There is no way back to the disk.

        Raises:
            ConfigError: a setting is out of range, `durability` is another word, or the stream has more partitions.
            StreamError: the stream does not exist, or a store refused. The text says which partitions are not changed.
        """
        until_s = deadline(timeout)
        if durability is not None:
            check_durability(durability)
            if durability == "bucket" and split_site(name)[0]:
                raise ConfigError(f"name: {name!r} names a site; change the durability with a client of that site")  # fmt: skip
        changes = given_fields(
            max_bytes=max_bytes, max_messages=max_messages, max_age=max_age, compact=compact, paused=paused,
            consuming_paused=consumers_paused, dedup_window=dedup_window, copy=copy,
        )  # fmt: skip
        if partitions is not None:
            await add_partitions(self._stores, name, uuid, partitions, timeout)
            if not changes and durability is None:
                return await self.describe(name, uuid=uuid, timeout=seconds_left(until_s))
            timeout = seconds_left(until_s)
        return await redefine_all(
            self._stores, name, uuid, lambda d: structs.replace(d, **changes), timeout, durability=durability or ""
        )  # fmt: skip

    async def pause(
        self, name: str, *, consumers: bool = False, uuid: str = "", timeout: float = 10.0
    ) -> StreamInfo:
        """Stop recording until `resume`. **What is published meanwhile is lost** (a gap reports it); appends fail.

        With `consumers` nothing is lost: recording, appends and readers go on, but consumers receive nothing until
        `resume`. Workers may still settle the messages they hold. Raises StreamError.
        """
        if consumers:
            return await self.change(name, consumers_paused=True, uuid=uuid, timeout=timeout)
        return await self.change(name, paused=True, uuid=uuid, timeout=timeout)

    async def resume(self, name: str, *, uuid: str = "", timeout: float = 10.0) -> StreamInfo:
        """Undo `pause`: record, accept appends and deliver to consumers again. Raises StreamError."""
        return await self.change(
            name, paused=False, consumers_paused=False, uuid=uuid, timeout=timeout
        )

    async def delete(self, name: str, *, uuid: str = "", timeout: float = 10.0) -> None:
        """Delete a stream with its log, its dead letters and its consumers, and with all its partitions.

        Raises StreamError, also for a partition alone; if a partition is left, the text says how to delete it.
        """
        await delete_stream(self._stores, name, uuid, timeout)

    async def share_keys(self, *, timeout: float = 10.0) -> _Infos:
        """Share every stream with all keys this keyring has for it now; return the streams that lacked one.

        Call it after `iris key add` and `iris key promote`: from then on streams record under the new key too.
        Raises StreamError.
        """
        until_s = time.monotonic() + timeout
        changed = []
        for stream in await list_streams(self._stores, timeout):
            info = stream_info(stream)
            wanted = {key.key_id.hex() for key in keys_of(self._stores, stream.order.definition)}
            if not stream.dead and not wanted <= set(info.key_ids):
                left_s = seconds_left(until_s)
                changed.append(
                    await redefine(self._stores, info.name, info.uuid, lambda d: d, left_s)
                )
        return sorted(changed, key=lambda info: (info.name, info.uuid))

    async def move(
        self, name: str, *, to: str, force: bool = False, uuid: str = "", timeout: float = 60.0
    ) -> StreamInfo:
        """Move a stream that is in a bucket to another store of the bucket; return it as that store describes it.

        `to` is the store's host, or its id (at least 4 hex digits of it). Readers, consumers and appends go on there
        by themselves; while the new store reads the stream from the bucket, they wait. If `timeout` seconds pass, the
        move may still take place: look at `StreamInfo.store`.

        With `force`, make a stream with durability "disk", whose store is gone, again of its copy in the bucket. It has
        another uuid, and a gap of unknown count where the copy ends: messages that the copy did not have yet are lost,
        and readers may have seen them. What was appended in between is stored again if it is repeated. If an order
        fails half way, repeat it.

        Raises:
            ConfigError: `to` names no store that can take the stream; the text lists those that can.
            StreamError: the stream is not in a bucket, or a store refused. With `force`: the stream's store can be
                reached, or the bucket has no copy under your keys (NoStream), or several (AmbiguousStream: name the
                uuid).
        """
        check_address(name)
        if force:
            return await force_stream(self._stores, name, to, uuid, timeout)
        return await move_stream(self._stores, name, to, uuid, timeout)

    async def balance(self, name: str = "", *, timeout: float = 10.0) -> _Moves:
        """Return the moves that would give the stores equal shares of a stream's partitions, or of all streams'.

        It moves nothing: call `move` for those that you want. Streams with one partition are left alone. Raises
        StreamUnavailable.
        """
        if name:
            check_local_name(name)
        return await propose(self._stores, name, timeout)

    # -- writing ---------------------------------------------------------------------------------------------

    async def append(
        self, name: str, message: object, *, headers: Headers | None = None, key: str | bytes | None = None, ttl: float | None = None,
        deliver_at: datetime | None = None, expect: int | None = None, tombstone: bool = False, message_id: str | bytes | None = None,
        partition: int | None = None, uuid: str = "", timeout: float = 10.0,
    ) -> int:  # fmt: skip
        """Store a message and return its offset once it is on disk.

        Messages appended in one turn of the event loop are stored together.

        In a stream with several partitions, the offset is an `Offset`: an int with the `partition` that it counts in.
        Messages with a key go to the partition of that key. Others go where there is room, together for each turn of
        the loop.

        Args:
            key: compaction keeps the last message of each key, and a consumer's workers get the messages of a key one
                after the other.
            tombstone: the message deletes its key.
            ttl: seconds after which the message is removed.
            deliver_at: the time before which consumers do not get it.
            expect: store the message only if its offset will be this one.
            message_id: within the stream's `dedup_window` a message with this id is stored once, even if another
                client appends it again. The offset returned is then that of the first.
            partition: append to this partition, whatever the key.

        Raises:
            OffsetConflict: the next offset is not `expect`; nothing was stored.
            StreamError: for StreamUnavailable, `may_have_run` says whether the message may be stored. After a timeout
                it may still be.
        """
        data, packed = self._runtime.encode(message, headers, OF_A_MESSAGE)
        asked, number = timeout, None
        target = self._targets.known.get((name, uuid))
        if type(target) is not Appender or partition:  # not known yet, or it has several partitions
            keyed = key is not None or message_id is not None or expect is not None
            target, timeout = await self._targets.find(name, uuid, partition, keyed, timeout)
            if isinstance(target, Spread):
                number = target.choose(partition, key, message_id, expect, len(data))
                target = target.appender(number)
                name, uuid = target.name, target.uuid
        extras = await make_extras(
            self._stores, name, uuid, key=key, ttl=ttl, deliver_at=deliver_at, tombstone=tombstone, timeout=timeout,
            message_id=message_id,
        )  # fmt: skip
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
            detail = f"not acknowledged within {asked:g} s{cause}; it may still be stored{self._stores.starting_hint}"
            raise StreamUnavailable(name, detail, may_have_run=True) from None
        return offset if number is None else offset_in(offset, number)

    async def append_many(
        self, name: str, messages: Sequence[object], *, headers: Headers | None = None, partition: int | None = None, uuid: str = "",
        timeout: float = 30.0,
    ) -> _Offsets:  # fmt: skip
        """Store messages in order, each with the same `headers`; return their offsets once all are on disk.

        In a stream with several partitions, all of them go to one partition. Raises as `append`; some may be stored
        then.
        """
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
            detail = f"not all acknowledged within {asked:g} s{cause}; the rest may still be stored{self._stores.starting_hint}"
            raise StreamUnavailable(target.name, detail, may_have_run=True) from None
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

        Returns the number of records dropped. Without a `partition` it is done in all of them. What a commit that did
        not reach all partitions still needs is kept, so that it can be completed, unless no attempt is given.
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
        one (`partition`), or all; `start` may map partitions to starts then, such as `reader.offsets`. See `Reader`.
        """
        check_address(name)
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

        Raises StreamError, also without a `partition` if the stream has several.
        """
        check_address(name)
        if partition:
            name, uuid = await self._log(name, uuid, partition, timeout)
        stream, offset = await start_offset(self._stores, name, uuid, at, patience=timeout)
        if partition is None:
            check_whole_stream(name, len(stream.order.definition.partitions) + 1, "an offset")
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
        check_whole("max_bytes", max_bytes, 1)
        check_number("wait", wait, 0)
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
            check_whole_stream(name, len(opener.stream.order.definition.partitions) + 1, "a page")
        return StreamPage(fetched, opener)

    def consumer(
        self, name: str, consumer: str, start: Start = "first", *, group: bool = False, durable: bool = True, ack_timeout: float = 30.0,
        max_deliver: int = 0, max_messages: int = BATCH_MESSAGES, partition: int | None = None, uuid: str = "",
        patience: float = PATIENCE_S, on_gap: Callable[[StreamGap], object] | None = None,
    ) -> Consumer:  # fmt: skip
        """Return a worker of a consumer, whose position in the stream the store keeps; see `Consumer`.

        The first batch creates the consumer, at `start`. With `group`, several workers share its messages, those of
        one key in order; without it, the latest worker receives everything. A consumer that is not `durable` is
        deleted after a minute without a worker. A message that was delivered `max_deliver` times (0: no limit)
        without an acknowledgement moves to the dead letters, the stream `NAME.dead`. With a `partition` it works on
        that one only, otherwise on all that the stream has.
        """
        check_address(name)
        check_cluster(consumer)
        if partition is not None:
            check_whole("partition", partition, 0)
        return self._make_consumer(
            self._stores, name, consumer, start, group=group, durable=durable, ack_timeout=ack_timeout, max_deliver=max_deliver,
            max_messages=max_messages, uuid=uuid, patience=patience, on_gap=on_gap, partition=partition,
        )  # fmt: skip

    async def consumers(
        self, name: str, *, partition: int | None = None, uuid: str = "", timeout: float = 5.0
    ) -> _ConsumerInfos:
        """Return the consumers of a stream and their positions, by name. Raises StreamError.

        The figures of several partitions are added up; with `partition` they are those of one.
        """
        check_address(name)
        return await consumers_of(self._stores, name, uuid, partition, timeout)

    async def delete_consumer(
        self, name: str, consumer: str, *, uuid: str = "", timeout: float = 5.0
    ) -> None:
        """Delete a consumer: its workers end, and a new one of the same name starts over. Raises StreamError."""
        check_address(name)
        await delete_in_each(self._stores, name, check_cluster(consumer), uuid, timeout)

    async def change_consumer(
        self, name: str, consumer: str, *, ack_timeout: float | None = None, max_deliver: int | None = None, uuid: str = "",
        timeout: float = 5.0,
    ) -> ConsumerInfo:  # fmt: skip
        """Change a consumer's settings; None leaves one as it is. Its position and its messages stay.

        The ack timeout (seconds) of messages that workers hold starts again. Workers that were written for earlier
        settings (the last eight) go on, with the new ones. Raises StreamError.
        """
        if ack_timeout is not None:
            check_number("ack_timeout", ack_timeout, 0.001)
        if max_deliver is not None:
            check_whole("max_deliver", max_deliver, 0, 65_535)
        ack_timeout_us = None if ack_timeout is None else round(ack_timeout * 1e6)
        return await self._change_consumer(
            name, ChangeConsumer(consumer, ack_timeout_us, max_deliver), uuid, timeout
        )

    async def pause_consumer(
        self, name: str, consumer: str, *, uuid: str = "", timeout: float = 5.0
    ) -> ConsumerInfo:
        """Deliver nothing to this consumer until `resume_consumer`; nothing is lost. Raises StreamError.

        Workers may stay and settle what they hold. The pause outlives restarts of the store and of the workers.
        """
        return await self._change_consumer(
            name, ChangeConsumer(consumer, paused=True), uuid, timeout
        )

    async def resume_consumer(
        self, name: str, consumer: str, *, uuid: str = "", timeout: float = 5.0
    ) -> ConsumerInfo:
        """Undo `pause_consumer`; workers that wait receive messages at once. Raises StreamError.

        If all consumers of the stream are paused (`pause(consumers=True)`), they stay paused.
        """
        return await self._change_consumer(
            name, ChangeConsumer(consumer, paused=False), uuid, timeout
        )

    async def _change_consumer(
        self, name: str, call: ChangeConsumer, uuid: str, timeout: float
    ) -> ConsumerInfo:
        check_address(name)
        check_cluster(call.consumer)
        return await change_in_each(self._stores, name, call, uuid, timeout)

    async def dead_letters(
        self, name: str, consumer: str = "", *, limit: int = 100, partition: int | None = None, uuid: str = "",
        timeout: float = PATIENCE_S,
    ) -> _Messages:  # fmt: skip
        """Return the oldest dead letters of a stream, or of one of its consumers, with the messages they refer to.

        `message.dead` says why each is one, and has the offset of the message in the stream; `message.offset` is that
        of the letter in `NAME.dead`. They stay. Raises StreamError.
        """
        check_address(name)
        check_whole("limit", limit, 1)
        return await dead_letters_of(self._stores, name, consumer, limit, uuid, partition, timeout)

    async def redrive(
        self, name: str, consumer: str, *, offset: int | Iterable[int] | None = None, limit: int | None = None,
        partition: int | None = None, uuid: str = "", timeout: float = PATIENCE_S,
    ) -> RedriveInfo:  # fmt: skip
        """Deliver the messages of a consumer's dead letters to its workers again, and delete the letters.

        Their deliveries are counted from 0 again, so a message that still fails becomes a dead letter once more.

        Args:
            offset: redrive only the letters of the messages at these offsets of the stream, or of its `partition`.
            limit: redrive at most this many letters, the oldest first. Without it, all that exist now.

        Raises:
            StreamError: the stream or the consumer does not exist, or its store did not answer. Some letters may have
                been redriven. Call again: no message is lost, and one that waits already is not delivered twice.
        """
        check_address(name)
        check_cluster(consumer)
        if limit is not None:
            check_whole("limit", limit, 1)
        offsets = {offset} if isinstance(offset, int) else set(() if offset is None else offset)
        if offset is not None and not offsets:
            return RedriveInfo(0)
        return await redrive_in_each(
            self._stores, name, consumer, offsets, limit, uuid, partition, timeout
        )

    # -- copies ----------------------------------------------------------------------------------------------

    def mirror(
        self, source: str, name: str, *, follow: bool = True, max_bytes: int | None = None, max_messages: int | None = None,
        max_age: float | None = None, compact: bool | None = None, uuid: str = "", patience: float = math.inf,
    ) -> Mirror:  # fmt: skip
        """Return a mirror that copies a remote site's stream, such as "eu:orders", into the local stream `name`.

        The copy is created if it does not exist, and keeps what its limits allow. It can be read and consumed like the
        source, at the same offsets, and accepts nothing but copies until `promote`. `uuid` chooses the log if two have
        the source's name. `patience` is how many seconds a relay or a store may be away. See `Mirror`.
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
        return Mirror(
            self._stores, source, name, follow=follow, limits=limits, uuid=uuid, patience=patience
        )  # fmt: skip

    async def promote(
        self, name: str, *, record: bool = True, uuid: str = "", timeout: float = 10.0
    ) -> StreamInfo:
        """Turn a copy into an independent stream that continues at its next offset; no more is copied into it.

        It accepts appends from then on and, with `record`, records in the local site the topic or cluster that its
        source recorded. Messages of the source that were not copied yet are not in it and cannot be added later.
        Calling it again changes nothing. Raises StreamError.
        """
        return await redefine(
            self._stores, name, uuid, lambda definition: promoted(name, definition, record), timeout
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Wait until every append has finished. The client calls it."""
        await self._targets.finish()

    def end(self) -> None:
        """Stop sending, and fail the pending appends. The client calls it."""
        self._targets.end("the client was closed")

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


def _in_list(info: StreamInfo) -> tuple[str, int, str]:
    name = split_partition(info.name)[0] if info.parent else info.name
    return name, info.partition, info.uuid
