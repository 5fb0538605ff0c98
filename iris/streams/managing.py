"""What `client.streams` does with streams and consumers as such: make, describe, change and delete them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from iris.checks import check_whole
from iris.deadlines import deadline, seconds_left
from iris.errors import ConfigError, NoStream
from iris.one_process import OneProcess
from iris.runtime import Runtime
from iris.streams.balancing import PartitionMove, propose
from iris.streams.consumers import (
    change_in_each,
    consumers_of,
    dead_letters_of,
    delete_in_each,
    redrive_in_each,
)
from iris.streams.consuming import check_consumer
from iris.streams.definitions import (
    MOST,
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
from iris.streams.handover import hand_over, take_place
from iris.streams.health import StoreHealth, health_of_stores
from iris.streams.listing import StreamInfo, list_streams, stray, stream_info
from iris.streams.moving import move_stream
from iris.streams.partitions import (
    add_partitions,
    check_partitioned,
    delete_stream,
    describe_partitions,
    make_partitioned,
    redefine_all,
)
from iris.streams.records import StreamMessage
from iris.streams.redriving import RedriveInfo
from iris.streams.stores import Stores
from iris.wire.consumers import ChangeConsumer, ConsumerInfo, HandOver
from iris.wire.names import check_address, check_cluster, check_filter, optional
from iris.wire.orders import Definition, split_partition

PATIENCE_S: Final = 30.0
"""Default seconds for which a reader or consumer waits for a relay or store that is away."""
_ConsumerInfos = list[ConsumerInfo]
_Infos = list[StreamInfo]
_Messages = list[StreamMessage]
_Moves = list[PartitionMove]
_Healths = list[StoreHealth]
"""These aliases exist because `list` is a method of the class."""


class Management(OneProcess):
    """The part of `client.streams` that manages streams and their consumers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stores = Stores(runtime)

    async def create(
        self, name: str, *, topic: str = "", cluster: str = "", max_bytes: int = 0, max_messages: int = 0, max_age: float = 0.0,
        compact: bool = False, dedup_window: float = 0.0, durability: str = "disk", partitions: int = 1, timeout: float = 10.0,
    ) -> StreamInfo:  # fmt: skip
        """Create a stream, a durable log. A stream that exists with the same definition is returned as it is.

        With `topic` it records what is published to that filter. With `cluster` it records all the cluster's
        broadcasts and a share of its pushes. With neither it holds only what is appended. The oldest messages are
        removed when the stream exceeds `max_bytes`, `max_messages` or `max_age` (seconds); 0 means no limit. With
        `compact` the last message of each key is kept. For `dedup_window` seconds the store remembers message ids
        and stores each id once.

        `durability` says when a message is acknowledged: "disk", when it is on the disk of one store, or "bucket",
        when it is in the object storage of a store started with `--bucket`, which then outlives the disk. See
        `handover` for a stream that exists, and `mirror` for a copy elsewhere.

        With `partitions` above 1, the stream consists of that many logs, spread over the stores of the site. It cannot
        have a `topic` or `cluster`, and the limits apply to each log. See `append` and `read`.

        Raises:
            ConfigError: a setting is out of range, or `durability` is another word.
            StreamExists: a stream of this name exists with a different definition, or it is on a disk and `durability`
                is "bucket".
            StreamUnavailable: no store is running, or it did not answer.
        """
        check_local_name(name)
        topic, cluster = optional(topic, check_filter), optional(cluster, check_cluster)
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
        )
        check_partitioned(definition, partitions)
        bucket, until_s = durability == "bucket", deadline(timeout)
        try:
            found = await self._stores.describe(name, "", timeout=timeout)
        except NoStream:
            check_unreserved(name)
        else:
            return check_same(found, definition, partitions, bucket=bucket)
        left_s = seconds_left(until_s)
        if partitions > 1:
            made = await make_partitioned(
                self._stores, definition, partitions, left_s, bucket=bucket, asked=timeout
            )
        else:
            made = await make_stream(self._stores, definition, left_s, bucket=bucket, asked=timeout)
        return check_same(made, definition, partitions, bucket=bucket)

    async def partitions(self, name: str, *, uuid: str = "", timeout: float = 5.0) -> _Infos:
        """Return the state of each partition of a stream, in order.

        If the store of a partition is away, `failed` says so and `store` is empty. Raises StreamError if partition 0 is
        away.
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

    async def stores(self, *, timeout: float = 5.0) -> _Healths:
        """Return the state of each store that the local relay knows, by id. No key is needed.

        A store that does not answer is in the list, with an `error`.

        Raises:
            ConnectionLost: the relay did not say which stores there are.
        """
        return await health_of_stores(self._stores, timeout)

    async def change(
        self, name: str, *, max_bytes: int | None = None, max_messages: int | None = None, max_age: float | None = None,
        compact: bool | None = None, paused: bool | None = None, consumers_paused: bool | None = None, dedup_window: float | None = None,
        partitions: int | None = None, uuid: str = "", timeout: float = 10.0,
    ) -> StreamInfo:  # fmt: skip
        """Change a stream's limits, or whether it records; None leaves a field as it is.

        The stream is also shared with every key that this keyring has for it. All its partitions are changed. With
        `partitions` it gets more of them, but never fewer. Some message keys then move to the new partitions.

        A stream stays on the disk of its store, or in its bucket; `handover` brings it elsewhere.

        Raises:
            ConfigError: a setting is out of range, or the stream has more partitions.
            StreamError: the stream does not exist, or a store refused. The text says which partitions are not changed.
        """
        check_address(name)
        until_s = deadline(timeout)
        changes = given_fields(
            max_bytes=max_bytes, max_messages=max_messages, max_age=max_age, compact=compact, paused=paused,
            consuming_paused=consumers_paused, dedup_window=dedup_window,
        )  # fmt: skip
        if partitions is not None:
            await add_partitions(self._stores, name, uuid, partitions, timeout)
            if not changes:
                return await self.describe(name, uuid=uuid, timeout=seconds_left(until_s))
            timeout = seconds_left(until_s)
        return await redefine_all(
            self._stores, name, uuid, lambda d: structs.replace(d, **changes), timeout
        )

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
        """Undo `pause`: record, accept appends and deliver to consumers again. Raises StreamError.

        This also gives up a `handover` that has ended early, if its new stream has not taken the old one's place yet.
        """
        return await redefine_all(
            self._stores, name, uuid,
            lambda d: structs.replace(d, paused=False, consuming_paused=False, successor=b""), timeout,
        )  # fmt: skip

    async def delete(self, name: str, *, uuid: str = "", timeout: float = 10.0) -> None:
        """Delete a stream with its log, its dead letters and its consumers, and with all its partitions.

        Raises StreamError, also if `name` is a partition. If some partitions could not be deleted, the text says how to
        delete them.
        """
        await delete_stream(self._stores, name, uuid, timeout)

    async def share_keys(self, *, timeout: float = 10.0) -> _Infos:
        """Share every stream with all keys this keyring has for it now; return the streams that lacked one, or that
        were changed since without it.

        Call it after `iris key add` and `iris key promote`: from then on streams record under the new key too.
        Raises StreamError.
        """
        until_s = time.monotonic() + timeout
        changed = []
        for stream in await list_streams(self._stores, timeout):
            info = stream_info(stream)
            wanted = {key.key_id for key in keys_of(self._stores, stream.order.definition)}
            if not stream.dead and not wanted <= stream.current_keys:
                left_s = seconds_left(until_s)
                changed.append(
                    await redefine(self._stores, info.name, info.uuid, lambda d: d, left_s)
                )
        return sorted(changed, key=lambda info: (info.name, info.uuid))

    async def move(
        self, name: str, *, to: str, uuid: str = "", timeout: float = 60.0
    ) -> StreamInfo:
        """Move a stream that is in a bucket to another store of the bucket; return it as that store describes it.

        `to` is the store's host, or its id (at least 4 hex digits of it). Readers, consumers and appends go on there
        by themselves; while the new store reads the stream from the bucket, they wait. If `timeout` seconds pass, the
        move may still take place: look at `StreamInfo.store`.

        Raises:
            ConfigError: `to` names no store that can take the stream; the text lists those that can.
            StreamError: the stream is not in a bucket, or a store refused.
        """
        check_address(name)
        return await move_stream(self._stores, name, to, uuid, timeout)

    async def balance(self, name: str = "", *, timeout: float = 10.0) -> _Moves:
        """Return the moves that would give the stores equal shares of a stream's partitions, or of all streams'.

        It moves nothing: call `move` for those that you want. Streams with one partition are left alone. Raises
        StreamUnavailable.
        """
        if optional(name, check_cluster):
            check_local_name(name)
        return await propose(self._stores, name, timeout)

    async def promote(
        self, name: str, *, record: bool = True, place: str = "", force: bool = False, uuid: str = "", timeout: float = 10.0
    ) -> StreamInfo:  # fmt: skip
        """Turn a copy into an independent stream that continues at its next offset; no more is copied into it.

        It accepts appends from then on and, with `record`, records in the local site the topic or cluster that its
        source recorded. Messages of the source that were not copied yet are not in it and cannot be added later.
        Calling it again changes nothing.

        With `place`, the name of its source ("orders", or "eu:orders" if that was at another site), the copy gets this
        name, too, and supersedes the source. This is for a source whose store is lost for good, and needs `force`;
        a gap says that messages may be missing. If the store comes back, it serves the old log under the same name
        until somebody looks the name up; from then on the old log can only be read, by its uuid.

        Raises StreamError; with `place` also if the source answers: then use `handover`.
        """
        if place:
            check_address(place)
            return await take_place(self._stores, name, place, record, force, uuid, timeout)
        if force:
            raise ConfigError("force: it is for a copy that takes the place of a lost stream; name that with place=")  # fmt: skip
        return await redefine(
            self._stores, name, uuid, lambda definition: promoted(name, definition, record), timeout
        )

    async def handover(
        self, name: str, to: str, *, durability: str = "bucket", uuid: str = "", patience: float = PATIENCE_S
    ) -> StreamInfo:  # fmt: skip
        """Let a copy called `to` take the place of a stream, such as to bring it from a disk into a bucket.

        The copy is created with this `durability`, unless a mirror has made it. While the last messages are copied,
        appends and workers wait. Then the copy gets what the stream has besides messages (consumers, dead letters,
        producers, message ids, batches), and its name. The stream is kept, and can be read by its uuid until it is
        deleted. Consumers that are not durable end.

        If the call fails or its process is killed, call it again to go on, or `resume` the stream to give up.
        `patience`: seconds for which a relay or a store may be away.

        Raises:
            ConfigError: `durability` is unknown, or `name` or `to` cannot be used.
            StreamError: the copy is in use, or of another stream; a store refused.
        """
        check_local_name(name)
        check_local_name(to)
        check_durability(durability)
        return await hand_over(self._stores, name, to, durability, uuid, patience)

    # -- consumers -------------------------------------------------------------------------------------------

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

        The ack timeout (seconds) of messages that workers hold starts again. Workers that ask for earlier settings (one
        of the last eight) continue, with the new settings. Raises StreamError.
        """
        check_consumer(ack_timeout, max_deliver)
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

    async def handover_consumer(
        self, name: str, consumer: str, *, uuid: str = "", timeout: float = 5.0
    ) -> ConsumerInfo:
        """Let the next worker that stands by be active, in all partitions where there is one. Raises StreamError.

        The worker that was active stands by as the last. What it holds is delivered to the next one, and what it
        settles is refused.
        """
        check_address(name)
        call = HandOver(check_cluster(consumer))
        return await change_in_each(self._stores, name, call, uuid, timeout)

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

        `message.dead` has the reason, and the offset of the message in the stream. `message.offset` is the offset of
        the letter in `NAME.dead`. The letters are not deleted. Raises StreamError.
        """
        check_address(name)
        consumer = optional(consumer, check_cluster)
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
        for each in offsets:
            check_whole("offset", each, 0, MOST)
        if offset is not None and not offsets:
            return RedriveInfo(0)
        return await redrive_in_each(
            self._stores, name, consumer, offsets, limit, uuid, partition, timeout
        )


def _in_list(info: StreamInfo) -> tuple[str, int, str]:
    name = split_partition(info.name)[0] if info.parent else info.name
    return name, info.partition, info.uuid
