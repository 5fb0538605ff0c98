"""Mirrors: copies a stream, usually of another site, into a stream of this site, in case the other site is lost.

    fetch ─► check ─► copy ─► on disk         the next fetch runs while the last one is written
      ▲                 │
      └──── its end ◄───┘                     the end of the copy is the only state, and says what to fetch next

Records stay sealed and keep their offsets, so a reader can move from the source to the copy and continue at the
same offset. A mirror that was killed goes on from the end of the copy. If two mirrors run at once, each range is
written once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from iris.core.backoff import Backoff
from iris.errors import (
    Closed,
    ConfigError,
    NoStream,
    StreamDamaged,
    StreamError,
    StreamExists,
    StreamUnavailable,
)
from iris.forks import FORKED, disable_in_child
from iris.one_process import OneProcess
from iris.streams.copying import copy_of_partitions, definition_of_copy
from iris.streams.definitions import make_stream
from iris.streams.partitions import layout_of
from iris.streams.reading import CLOSED
from iris.streams.stores import PAUSE_MAX_S, PAUSE_MIN_S, Stores
from iris.streams.verified import VerifiedStream
from iris.wire.codec import END
from iris.wire.orders import DEAD, partition_name
from iris.wire.stream_items import Hole, Item, Record
from iris.wire.streams import MAX_COPY_ITEMS, Copied, Copy, Described, Fetch, Fetched

FETCH_BYTES: Final = 1 << 20
WAIT_MS: Final = 10_000
"""Time that a fetch waits for more messages. After it, the copy's store is sent where the source ends."""
ROUND_S: Final = 0.5
"""Pause between two rounds of a mirror of several partitions."""
ATTEMPT_S: Final = 15.0
"""Seconds for the answer to one try of a call. Calls are retried."""
ATTEMPT_PATIENCE_S: Final = 1.0
"""Seconds after which a try without a relay or store fails, so that `waiting` says why nothing is copied."""
T = TypeVar("T")


class Mirror(OneProcess):
    """Copies a stream: `async with client.streams.mirror("eu:orders", "orders-eu") as mirror: await mirror.run()`.

    Entering it finds the source, and finds or creates the copy. `run` continues when a relay or a store that was
    away is back; `waiting` says what it waits for. `end`, `source_end` and `lag` are as of the last answer.
    """

    def __init__(
        self, stores: Stores, source: str, name: str, *, follow: bool, limits: Mapping[str, Any], uuid: str,
        patience: float, durability: str = "disk", part: bool = False,
    ) -> None:  # fmt: skip
        """With `part`, `source` is one log of a stream with several partitions, and the copy exists."""
        self.source = source
        self.name = name
        self.copied = 0
        """Messages that this mirror has written to the copy."""
        self.end = 0
        """Where the copy ends."""
        self.source_end = 0
        """Where the source ends."""
        self.waiting = ""
        """Why nothing is copied now; empty while copying goes on."""
        self._stores = stores
        self._follow = follow
        self._limits = limits
        self._uuid = uuid
        self._patience = patience
        self._bucket = durability == "bucket"
        self._part = part
        self._source_uuid = self._copy_uuid = b""
        """Uuids of the source's and the copy's logs; empty until they are found."""
        self._task: asyncio.Task[None] | None = None
        self._closed = ""
        """Why it copies no more; completes "the mirror of ..."."""
        self._parts: list[Mirror] = []
        """A mirror for each partition of the source, if it has several."""
        disable_in_child(self)

    @property
    def lag(self) -> int:
        """How many messages would be lost if the source were lost now. A gap counts as one."""
        return max(0, self.source_end - self.end)

    async def run(self) -> None:
        """Copy until cancelled or closed. Without `follow`, stop where the source ended when the mirror was entered.

        Raises:
            StreamError: NoStream or StreamDamaged; StreamUnavailable after the mirror's `patience`; the copy was
                promoted; the source is not the log that was copied before.
        """
        self._check()
        if self._task is not None:
            raise StreamError(
                self.name,
                "this mirror is already running; `run` can be called again when it has ended",
            )
        self._task = task = asyncio.create_task(self._work(), name="iris-mirror")
        try:
            await asyncio.wait([task])
            if not task.cancelled():  # else it was closed
                task.result()
        finally:
            await self._cancel()

    async def close(self) -> None:
        """Stop copying; `run` returns. Idempotent."""
        self._closed = self._closed or CLOSED
        await self._cancel()

    def _forked(self) -> None:
        """Copy nothing in the child of a fork; the parent does."""
        self._closed = FORKED
        self._task = None

    async def __aenter__(self) -> Self:
        self._check()
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"the mirror of {self.source!r} {self._closed}")

    async def _cancel(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- both ends -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Find the source, and find or create the copy."""
        try:
            copy: VerifiedStream | None = await self._stores.describe(
                self.name, "", timeout=ATTEMPT_S
            )
        except NoStream:
            if self._part:
                raise
            copy = None
        if copy is None:
            # A source that does not exist fails at once, without retries.
            source = await self._describe(self._uuid)
            if source.order.definition.partitions:
                logs = layout_of(self._stores, self.source, source)
                copy = await copy_of_partitions(
                    self._stores, self.name, logs, ATTEMPT_S, bucket=self._bucket, **self._limits
                )
            else:
                copy = await self._make(source)
        else:
            self._check_copy(copy)
            source = await self._retry(lambda: self._describe(self._uuid, ATTEMPT_PATIENCE_S))
        self._check_copy(copy)
        self._check_source(source, copy.order.definition.mirror)
        if source.order.definition.partitions and not self._part:
            self._open_parts(source, copy)
            return
        copy_end, source_end = copy.described.next, source.described.next
        if source_end < copy_end:  # another mirror may have written since: ask again
            source_end = (await self._describe(source.described.uuid.hex())).described.next
        if source_end < copy_end:
            detail = f"it ends at offset {source_end}, and its copy {self.name} ends later, at {copy_end}, so the source has lost messages; mirror it under another name"
            raise StreamError(self.source, detail)
        self._source_uuid, self._copy_uuid = source.described.uuid, copy.described.uuid
        self.end, self.source_end = copy_end, source_end

    async def _make(self, source: VerifiedStream) -> VerifiedStream:
        return await make_stream(
            self._stores, definition_of_copy(self.name, source, **self._limits), ATTEMPT_S, bucket=self._bucket,
            besides=source.described.holder or source.described.store,
        )  # fmt: skip

    def _open_parts(self, source: VerifiedStream, copy: VerifiedStream) -> None:
        """Make a mirror for each partition. Raises StreamError if the copy has fewer."""
        logs = layout_of(self._stores, self.source, source)
        copies = layout_of(self._stores, self.name, copy)
        if len(logs) != len(copies):
            raise StreamError(
                self.source,
                f"it has {len(logs)} partitions, and its copy {self.name} has {len(copies)}; mirror it under another name",
            )
        self._parts = []
        for number in range(len(logs)):
            name, uuid = logs.log(number)
            part = Mirror(
                self._stores, name, partition_name(self.name, number), follow=False, limits=self._limits, uuid=uuid,
                patience=self._patience, part=True,
            )  # fmt: skip
            self._parts.append(part)
        self._source_uuid, self._copy_uuid = source.described.uuid, copy.described.uuid

    async def _describe(self, uuid: str, patience: float = ATTEMPT_S) -> VerifiedStream:
        stream = await self._stores.describe(
            self.source, uuid, timeout=ATTEMPT_S, patience=patience
        )
        if stream.dead:
            raise ConfigError(
                f"source: {self.source!r} holds dead letters, which are not copied; mirror {self.source.removesuffix(DEAD)!r}"
            )
        return stream

    def _check_copy(self, copy: VerifiedStream) -> None:
        """Raise StreamExists unless the stream is a copy with the limits that were given."""
        definition = copy.order.definition
        if self._bucket and not copy.described.holder:
            raise StreamExists(
                self.name,
                f"it exists on the disk of the store on {copy.described.label}, not in a bucket; give the copy another name",
            )
        if not definition.mirror:
            raise StreamExists(
                self.name,
                "it was promoted, so nothing is copied into it; give the copy another name"
                if definition.origins
                else "it is not a copy; give the copy another name",
            )
        for field, value in self._limits.items():
            if getattr(definition, field) != value:
                raise StreamExists(
                    self.name,
                    f"it exists with {field} {getattr(definition, field)}, not {value}; change one of them",
                )

    def _check_source(self, source: VerifiedStream, mirror: str) -> None:
        found = source.described.uuid.hex()
        if found != mirror:
            detail = f"it is a copy of log {mirror}, but {self.source} is log {found} now; copy that under another name"
            raise StreamError(self.name, detail)

    # -- copying ---------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        if not self._copy_uuid:
            await self._open()
        try:
            await (self._copy_parts() if self._parts else self._copy())
        finally:
            self._source_uuid = self._copy_uuid = b""  # another run looks them up again

    # -- copying partitions ----------------------------------------------------------------------------------

    async def _copy_parts(self) -> None:
        """Copy all partitions up to a cut in which each batch over them is whole, show that, and go on to the next."""
        for part in self._parts:
            await part._open()
        await self._show_cut(
            (await self._stores.describe(self.name, "", timeout=ATTEMPT_S)).described.cut
        )
        while True:
            ends = await self._cut()
            for part, end in zip(self._parts, ends, strict=True):
                part.source_end = end
            self.source_end = sum(ends)
            await asyncio.gather(*(part._copy() for part in self._parts))
            await self._parts[0]._show(ends[0], ends)
            await self._show_cut(ends)
            self.end = sum(part.end for part in self._parts)
            self.copied = sum(part.copied for part in self._parts)
            if not self._follow:
                return
            await asyncio.sleep(ROUND_S)

    async def _cut(self) -> list[int]:
        """Return where each partition ends at a time when no batch over several is half committed.

        A batch is planned in partition 0, then committed in the others, and last in partition 0, which ends its
        plan. So if partition 0 has no plan, the others have all of the batches that it has; and if none was made
        until they were looked at, they have no more than that.
        """
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        first, *others = self._parts
        while True:
            found = await first._described()
            ends = [(await part._described()).next for part in others]
            if not found.plans and (await first._described()).planned == found.planned:
                self.waiting = ""
                return [found.next, *ends]
            self.waiting = f"{self.source} is committing batches over several partitions"
            await asyncio.sleep(backoff.failed())

    async def _described(self) -> Described:
        uuid = self._source_uuid.hex()
        return (await self._retry(lambda: self._describe(uuid, ATTEMPT_PATIENCE_S))).described

    async def _show_all(self) -> None:
        """Show all of the copy of a partition, because its source was stopped."""
        if not self._copy_uuid:
            await self._open()
        await self._write(self.end, self.end, [])
        await self._show(self.end, [])

    async def _show_cut(self, cut: Sequence[int]) -> None:
        """Show readers what was decided in partition 0, perhaps by an earlier mirror."""
        for part, end in list(zip(self._parts, cut, strict=False))[1:]:
            await part._show(end, [])

    async def _show(self, end: int, cut: Sequence[int]) -> None:
        """Show readers of the copy what it has up to this offset."""
        call = Copy(self._source_uuid, self.end, self.end, [], self.source_end, end, list(cut))
        await self._ask(self.name, self._copy_uuid, call, Copied, writes=True)

    async def _copy(self) -> None:
        end = None if self._follow else self.source_end
        await self._write(self.end, self.end, [])
        ahead: asyncio.Task[Fetched] | None = None
        try:
            while end is None or self.end < end:
                at = self.end
                ahead = ahead or self._fetch(at)
                fetched = await ahead
                ahead = None
                items, until = self._checked(fetched, at)
                self.source_end = max(fetched.high_water, until)
                if until > at and (end is None or until < end):
                    ahead = self._fetch(until)
                await self._write(at, until, items)
                if ahead is not None and self.end != until:  # another mirror was faster
                    await _drop(ahead)
                    ahead = None
        finally:
            await _drop(ahead)

    def _fetch(self, start: int) -> asyncio.Task[Fetched]:
        wait_ms = WAIT_MS if self._follow else 0
        limit = min(FETCH_BYTES, self._stores.runtime.message_limit)
        work = self._ask(
            self.source, self._source_uuid, Fetch(start, limit, wait_ms), Fetched, wait_ms / 1000
        )
        return asyncio.get_running_loop().create_task(work, name="iris-mirror-fetch")

    def _checked(self, fetched: Fetched, at: int) -> tuple[list[Item], int]:
        """Return (items from `at` on, their end offset). Raises StreamDamaged if the answer has unexplained gaps."""
        items = fetched.items[:MAX_COPY_ITEMS]
        if items and isinstance(hole := items[0], Hole) and hole.offset < at < hole.next:
            # The source has removed messages since, from before `at`: keep only the part that we lack.
            items[0] = Hole(at, hole.next, hole.reason)
        ends = at
        for item in items:
            if item.offset != ends:
                detail = f"the store left out offsets {ends} to {item.offset}"
                raise StreamDamaged(self.source, detail)
            ends = _end_offset(item)
        if fetched.uuid != self._source_uuid or (
            ends != fetched.next and len(items) == len(fetched.items)
        ):
            raise StreamDamaged(self.source, f"the store left out offsets {ends} to {fetched.next}")
        return items, ends

    async def _write(self, start: int, until: int, items: list[Item]) -> None:
        call = Copy(self._source_uuid, start, until, items, self.source_end)
        done = await self._ask(self.name, self._copy_uuid, call, Copied, writes=True)
        if items and not done.taken and done.next == start:
            raise StreamError(
                self.name,
                f"its store accepted the records from offset {start} on and wrote none; see the log of that store",
            )
        self.end = done.next
        if done.taken:
            self.copied += sum(_end_offset(i) - i.offset for i in items if isinstance(i, Record))

    # -- patience --------------------------------------------------------------------------------------------

    async def _ask(
        self, name: str, uuid: bytes, call: Fetch | Copy, answer: type[T], wait_s: float = 0.0, *, writes: bool = False
    ) -> T:  # fmt: skip
        async def once() -> T:
            return await self._stores.ask_stream(
                name,
                uuid.hex(),
                call,
                answer,
                timeout=ATTEMPT_S + wait_s,
                patience=ATTEMPT_PATIENCE_S,
                writes=writes,
            )

        return await self._retry(once)

    async def _retry(self, once: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `once()`; while a relay or a store is away, retry for `patience` seconds."""
        since_s: float | None = None
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, random.random)
        while True:
            try:
                got = await once()
            except (StreamUnavailable, NoStream) as err:
                now_s = time.monotonic()
                since_s = now_s if since_s is None else since_s
                self.waiting = str(err)
                if isinstance(err, NoStream):
                    await self._check_same()
                    if not err.passing:
                        raise
                if now_s - since_s >= self._patience:
                    raise
            else:
                if since_s is not None:
                    self.waiting = ""
                return got
            await asyncio.sleep(backoff.failed())

    async def _check_same(self) -> None:
        """Raise StreamError if the source's name now belongs to another log, because the one copied was deleted."""
        if self._uuid or not self._source_uuid:
            return
        with contextlib.suppress(StreamUnavailable, NoStream):
            self._check_source(
                await self._describe("", ATTEMPT_PATIENCE_S), self._source_uuid.hex()
            )


def _end_offset(item: Item) -> int:
    if isinstance(item, Record):
        return item.offset + int(END.unpack(item.end)[2])
    return item.next if isinstance(item, Hole) else item.offset + 1


async def _drop(task: asyncio.Task[Fetched] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
