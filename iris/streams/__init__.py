"""Durable streams: logs of what was published, pushed, broadcast or appended, kept sealed by a store.

`client.streams` creates, describes, changes and deletes them, appends to them and reads them. The store holds no cluster key: it
keeps what it cannot open, by an order that a holder of the key signed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final

from msgspec import structs

from iris.core.bundle import Headers
from iris.core.producer import PLAIN
from iris.deadlines import seconds_left
from iris.errors import ConfigError, NoStream, StreamError, StreamUnavailable
from iris.runtime import Runtime
from iris.streams.appending import Appender, append_expecting
from iris.streams.calls import Stores
from iris.streams.consuming import TAKE_MESSAGES, Consumer
from iris.streams.defining import (
    check_local_name,
    check_same,
    end_stream,
    given_fields,
    keys_of,
    make_stream,
    promoted,
    redefine,
)
from iris.streams.listing import StreamInfo, list_consumers, list_streams, stream_info
from iris.streams.messages import OF_A_MESSAGE, make_extras
from iris.streams.mirroring import Mirror
from iris.streams.reading import FETCH_BYTES, Reader, Start, start_offset
from iris.streams.records import RecordOpener, StreamGap, StreamMessage, StreamPage, StreamRecord
from iris.streams.staging import (
    CommitInfo,
    StagedAttempt,
    Staging,
    check_batch,
    commit_call,
    discard_call,
)
from iris.wire.names import check_address, check_cluster, split_site
from iris.wire.orders import DEAD, Definition, check_definition
from iris.wire.streams import Committed, ConsumerInfo, DeleteConsumer, Fetch, Fetched, Settled

MAX_PRODUCERS: Final = 1024
MAX_OPENERS: Final = 256
"""Logs that are fetched from and known; past it they are asked for again."""
_ConsumerInfos = list[ConsumerInfo]
_Infos = list[StreamInfo]
_Offsets = list[int]
_Pending = list[tuple[asyncio.Future[int], int]]
"""`list` is a method of Streams."""
PATIENCE_S: Final = 30.0
__all__ = [
    "CommitInfo",
    "Consumer",
    "ConsumerInfo",
    "Mirror",
    "Reader",
    "StagedAttempt",
    "Staging",
    "StreamGap",
    "StreamInfo",
    "StreamMessage",
    "StreamPage",
    "StreamRecord",
    "Streams",
]


class Streams:
    """The streams of a client's clusters and topics. Made by `client.streams`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stores = Stores(runtime)
        self.keys_changed = self._stores.keys_changed
        self._openers: dict[tuple[str, bytes], RecordOpener] = {}
        """For `fetch`, by name and log."""
        self._appenders: dict[tuple[str, str], Appender] = {}
        runtime.parts.append(self)

    # -- which there are -------------------------------------------------------------------------------------

    async def create(
        self, name: str, *, topic: str = "", cluster: str = "", max_bytes: int = 0, max_messages: int = 0, max_age: float = 0.0,
        compact: bool = False, dedup_window: float = 0.0, timeout: float = 10.0,
    ) -> StreamInfo:  # fmt: skip
        """Keep a log: of what is published to a `topic` filter, of a share of a `cluster`'s pushes and all its broadcasts, or of
        what is appended alone. The oldest goes when there is more than `max_bytes`, `max_messages` or `max_age` seconds.

        For `dedup_window` seconds it remembers the ids of messages that are appended with one, and stores each once.
        Again with the same definition it returns the stream that is there.

        Raises:
            StreamExists: one of this name is there and defined otherwise.
            StreamUnavailable: there is no store, or it did not answer.
        """
        check_local_name(name)
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
        check_definition(definition)
        until_s = time.monotonic() + timeout
        try:
            found = await self._stores.describe(name, "", timeout=timeout)
        except NoStream:
            pass
        else:
            return check_same(found, definition)
        return check_same(
            await make_stream(self._stores, definition, seconds_left(until_s)), definition
        )

    async def describe(self, name: str, *, uuid: str = "", timeout: float = 5.0) -> StreamInfo:
        """Return what a stream is and holds; `uuid` in hex, where two stores hold one of the name. Raises StreamError."""
        return stream_info(await self._stores.describe(name, uuid, timeout=timeout))

    async def list(self, *, timeout: float = 5.0) -> _Infos:
        """Return all streams under our keys, of every store that our relay knows, by name.

        Raises:
            StreamUnavailable: one of the stores did not answer.
        """
        infos = [stream_info(known) for known in await list_streams(self._stores, timeout)]
        return sorted(infos, key=lambda info: (info.name, info.uuid))

    async def change(
        self, name: str, *, max_bytes: int | None = None, max_messages: int | None = None, max_age: float | None = None,
        compact: bool | None = None, paused: bool | None = None, consumers_paused: bool | None = None, dedup_window: float | None = None,
        uuid: str = "", timeout: float = 10.0,
    ) -> StreamInfo:  # fmt: skip
        """Change what a stream keeps, or whether it records; and let every key of ours for it be one of its keys.

        Raises:
            StreamError: there is no such stream, or its store refused.
        """
        changes = given_fields(
            max_bytes=max_bytes, max_messages=max_messages, max_age=max_age, compact=compact, paused=paused,
            consuming_paused=consumers_paused, dedup_window=dedup_window,
        )  # fmt: skip
        return await redefine(
            self._stores, name, uuid, lambda d: structs.replace(d, **changes), timeout
        )

    async def pause(
        self, name: str, *, consumers: bool = False, uuid: str = "", timeout: float = 10.0
    ) -> StreamInfo:
        """Stop recording until `resume`: **what is published meanwhile is lost** (a gap says so), and appends are refused.

        With `consumers` nothing is lost: recording, appends and readers go on, and consumers are handed nothing until `resume`. What
        workers hold they may settle. Raises StreamError.
        """
        if consumers:
            return await self.change(name, consumers_paused=True, uuid=uuid, timeout=timeout)
        return await self.change(name, paused=True, uuid=uuid, timeout=timeout)

    async def resume(self, name: str, *, uuid: str = "", timeout: float = 10.0) -> StreamInfo:
        """Record, append and hand out to consumers again. Raises StreamError."""
        return await self.change(
            name, paused=False, consumers_paused=False, uuid=uuid, timeout=timeout
        )

    async def delete(self, name: str, *, uuid: str = "", timeout: float = 10.0) -> None:
        """End a stream: its log, its dead letters and its consumers are removed. Raises StreamError."""
        await end_stream(self._stores, name, uuid, timeout)

    async def share_keys(self, *, timeout: float = 10.0) -> _Infos:
        """Give every stream of ours the keys that our keyring has for it now, and return those that lacked one.

        After `iris key add` and `promote` a stream records under the new key from then on. Raises StreamError.
        """
        until_s = time.monotonic() + timeout
        changed = []
        for known in await list_streams(self._stores, timeout):
            info = stream_info(known)
            wanted = {key.key_id.hex() for key in keys_of(self._stores, known.order.definition)}
            if not known.dead and not wanted <= set(info.key_ids):
                changed.append(
                    await self.change(info.name, uuid=info.uuid, timeout=seconds_left(until_s))
                )
        return sorted(changed, key=lambda info: (info.name, info.uuid))

    # -- writing ---------------------------------------------------------------------------------------------

    async def append(
        self, name: str, message: object, *, headers: Headers | None = None, key: str | bytes | None = None, ttl: float | None = None,
        deliver_at: datetime | None = None, expect: int | None = None, tombstone: bool = False, message_id: str | bytes | None = None,
        uuid: str = "", timeout: float = 10.0,
    ) -> int:  # fmt: skip
        """Store a message and return its offset once it is on disk.

        What is appended in one turn of the event loop is stored together. `key`: compaction keeps the last message of each, and
        workers of a consumer get those of one key one after the other; a `tombstone` says that the key is deleted. `ttl`: seconds
        after which it is gone. `deliver_at`: consumers get it then. `expect`: only if this is its offset. `message_id`: within the
        stream's `dedup_window` a message of this id is stored once, whoever appends it again; the offset is that of the first.

        Raises:
            OffsetConflict: the next offset is another; nothing was stored.
            StreamError: StreamUnavailable says in `may_have_run` whether it may be stored. After a timeout it may still be.
        """
        data, packed = self._runtime.encode(message, headers, OF_A_MESSAGE)
        extras = await make_extras(
            self._stores, name, uuid, key=key, ttl=ttl, deliver_at=deliver_at, tombstone=tombstone, timeout=timeout,
            message_id=message_id,
        )  # fmt: skip
        if expect is not None:
            return await append_expecting(
                self._stores, name, uuid, data, headers, packed, extras, expect, timeout
            )
        appender = self._appender(name, uuid)
        producer = appender.producer
        try:
            async with asyncio.timeout(timeout):
                if producer.full:
                    await appender.wait_for_room()
                future, index = producer.add(data, headers, packed, extras)
                return await asyncio.shield(future) + index
        except TimeoutError:
            detail = (
                f"not acknowledged within {timeout:g} s; it may still be stored{self._stores.why}"
            )
            raise StreamUnavailable(name, detail, may_have_run=True) from None

    async def append_many(
        self, name: str, messages: Sequence[object], *, uuid: str = "", timeout: float = 30.0
    ) -> _Offsets:
        """Store messages in order and return their offsets once all are on disk; raises as `append`, and then some may be stored."""
        appender = self._appender(name, uuid)
        producer = appender.producer
        pending: _Pending = []
        try:
            async with asyncio.timeout(timeout):
                for message in messages:
                    data, packed = self._runtime.encode(message, None, OF_A_MESSAGE)
                    if producer.full:
                        await appender.wait_for_room()
                    pending.append(producer.add(data, None, packed, PLAIN))
                if pending:  # waiting cancels none of them
                    await asyncio.wait({future for future, _ in pending})
        except TimeoutError:
            detail = f"not all acknowledged within {timeout:g} s; the rest may still be stored{self._stores.why}"
            raise StreamUnavailable(name, detail, may_have_run=True) from None
        return [future.result() + index for future, index in pending]

    # -- staging ---------------------------------------------------------------------------------------------

    def stage(
        self, name: str, *, writer: str, batch: int, uuid: str = "", timeout: float = 60.0
    ) -> Staging:
        """Return a new attempt at a batch, which nobody sees until it is committed; see `Staging`.

        `writer` names who numbers the batches, the same in every process. `timeout`: seconds for each call to the store, retries
        included.
        """
        check_batch(name, writer, batch)
        return Staging(self._stores, name, writer=writer, batch=batch, uuid=uuid, timeout=timeout)

    async def commit(
        self, name: str, *, writer: str, batch: int, attempts: Iterable[StagedAttempt], uuid: str = "", timeout: float = 60.0
    ) -> CommitInfo:  # fmt: skip
        """Append what the attempts staged, in order, all of it at once, and drop what else was staged for this batch or earlier ones.

        Each batch of a writer is stored once: again, or below the writer's last one, it changes nothing. Batches rise and may skip
        numbers. After an error call it again with the same attempts, if in doubt.

        Raises:
            StagedMissing: an attempt is not staged, or not whole: it expired, say.
            StreamError: likewise nothing was committed, unless `may_have_run`.
            MessageTooLarge: the attempts do not fit one call: 40,000 or so do.
        """
        call = commit_call(name, writer, batch, attempts, self._runtime.message_limit)
        done = await self._stores.ask_stream(
            name, uuid, call, Committed, timeout=timeout, writes=True
        )
        return CommitInfo(done.first, done.next, done.replayed)

    async def discard(
        self, name: str, *, writer: str, batch: int, attempts: Iterable[StagedAttempt] = (), uuid: str = "", timeout: float = 10.0
    ) -> int:  # fmt: skip
        """Drop what the attempts staged, without any what all of the batch did; return how many records that was. Raises StreamError."""
        call = discard_call(name, writer, batch, attempts, self._runtime.message_limit)
        done = await self._stores.ask_stream(
            name, uuid, call, Settled, timeout=timeout, writes=True
        )
        return done.count

    # -- reading ---------------------------------------------------------------------------------------------

    def read(
        self, name: str, start: Start = "first", *, follow: bool = True, uuid: str = "", batch_bytes: int = FETCH_BYTES,
        patience: float = PATIENCE_S, on_gap: Callable[[StreamGap], object] | None = None,
    ) -> Reader:  # fmt: skip
        """Return a reader of the messages from `start` on: "first", "last", "new", an offset, or a time.

        `name` as "eu:orders" is another site's. It follows the stream as it grows; with `follow=False` it ends where the stream ended when it began. See `Reader`.
        """
        check_address(name)
        return Reader(
            self._stores,
            name,
            start,
            follow=follow,
            uuid=uuid,
            batch_bytes=batch_bytes,
            patience=patience,
            on_gap=on_gap,
        )

    async def find(
        self, name: str, at: Start, *, uuid: str = "", timeout: float = PATIENCE_S
    ) -> int:
        """Return the offset that `at` means there: "first", "last", "new", an offset, or a time. Raises StreamError."""
        check_address(name)
        return (await start_offset(self._stores, name, uuid, at, patience=timeout))[1]

    async def fetch(
        self, name: str, start: int, *, uuid: str = "", max_bytes: int = FETCH_BYTES, wait: float = 0.0, timeout: float = PATIENCE_S
    ) -> StreamPage:  # fmt: skip
        """Return what the stream holds from offset `start` on, one answer of the store: for programs that keep count of offsets themselves.

        Records come whole, and are opened but not taken apart. An answer has `max_bytes` at most, or one record. At the end of the
        stream it is empty, after `wait` seconds (up to 60) in which nothing came. `timeout`: seconds beyond that for which the
        relay or the store may be away.

        Raises:
            StreamError: NoStream, StreamDamaged, StreamUnavailable.
        """
        check_address(name)
        until_s = time.monotonic() + timeout + wait
        call = Fetch(start, max_bytes, round(wait * 1000))
        fetched = await self._stores.ask_stream(
            name, uuid, call, Fetched, timeout=timeout + wait, patience=timeout
        )
        opener = self._openers.get((name, fetched.uuid))
        if opener is None:
            opener = RecordOpener(self._runtime.find_key)
            # What a log records never changes, so it is asked once.
            opener.stream = await self._stores.describe(
                name, fetched.uuid.hex(), timeout=seconds_left(until_s)
            )
            if len(self._openers) >= MAX_OPENERS:
                self._openers.clear()
            self._openers[name, fetched.uuid] = opener
            self._stores.openers.add(opener)
        return StreamPage(fetched, opener)

    def consumer(
        self, name: str, consumer: str, start: Start = "first", *, group: bool = False, durable: bool = True, ack_timeout: float = 30.0,
        max_deliver: int = 0, max_messages: int = TAKE_MESSAGES, uuid: str = "", patience: float = PATIENCE_S,
        on_gap: Callable[[StreamGap], object] | None = None,
    ) -> Consumer:  # fmt: skip
        """Return a worker of a consumer, whose place in the stream the store keeps; see `Consumer`.

        It is made at the first take, from `start` on. With `group` several workers share its messages, those of one key in order;
        else the latest worker has them all. One that is not `durable` is forgotten after a minute without a worker. What was
        delivered `max_deliver` times (0: no limit) and not acknowledged goes to the dead letters, the stream `NAME.dead`.
        """
        check_address(name)
        check_cluster(consumer)
        return Consumer(
            self._stores, name, consumer, start, group=group, durable=durable, ack_timeout=ack_timeout, max_deliver=max_deliver,
            max_messages=max_messages, uuid=uuid, patience=patience, on_gap=on_gap,
        )  # fmt: skip

    async def consumers(self, name: str, *, uuid: str = "", timeout: float = 5.0) -> _ConsumerInfos:
        """Return where the consumers of a stream are, by name. Raises StreamError."""
        check_address(name)
        return await list_consumers(self._stores, name, uuid, timeout)

    async def delete_consumer(
        self, name: str, consumer: str, *, uuid: str = "", timeout: float = 5.0
    ) -> None:
        """Forget a consumer: its workers end, and one of the same name starts anew. Raises StreamError."""
        check_address(name)
        call = DeleteConsumer(check_cluster(consumer))
        await self._stores.ask_stream(name, uuid, call, Settled, timeout=timeout, writes=True)

    # -- copies ----------------------------------------------------------------------------------------------

    def mirror(
        self, source: str, name: str, *, follow: bool = True, max_bytes: int | None = None, max_messages: int | None = None,
        max_age: float | None = None, compact: bool | None = None, uuid: str = "", patience: float = math.inf,
    ) -> Mirror:  # fmt: skip
        """Return what copies another site's stream, "eu:orders", into the stream `name` of our site; see `Mirror`.

        The copy is made if it is not there, and keeps all that its limits let it. It is read and consumed as the source is, at the
        same offsets, and takes nothing else until `promote`. `uuid`: which log, where two of the source's name are there.
        `patience`: seconds for which a relay or a store may be away.
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
        """Make a copy a stream of its own, which goes on at its next offset and takes no more copies. Again it changes nothing.

        It takes appends from then on, and records what its source recorded, a topic or a cluster, here in our site; without
        `record` appends alone. What the source had beyond is not in it, and cannot come later. Raises StreamError.
        """
        return await redefine(
            self._stores, name, uuid, lambda there: promoted(name, there, record), timeout
        )

    # -- life ------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Return when all that was appended has ended (for the client)."""
        await asyncio.gather(*(appender.finish() for appender in self._appenders.values()))

    def end(self) -> None:
        """Send nothing more (for the client)."""
        for appender in self._appenders.values():
            appender.end("the client was closed")

    # -- inside ----------------------------------------------------------------------------------------------

    def _appender(self, name: str, uuid: str) -> Appender:
        appender = self._appenders.get((name, uuid))
        if appender is None:
            self._stores.keys(name)
            if len(self._appenders) >= MAX_PRODUCERS:
                raise StreamError(
                    name,
                    f"this client already appends to {MAX_PRODUCERS} streams, its limit; use another client",
                )
            appender = self._appenders[name, uuid] = Appender(self._stores, name, uuid)
        return appender
