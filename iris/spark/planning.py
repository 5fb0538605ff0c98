"""Plans a query on the driver: which streams it reads, where it starts, and where each trigger ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from iris.client import Client
from iris.errors import NoStream, StreamUnavailable
from iris.logs import logger
from iris.spark.connections import connection, wait_for_stream
from iris.spark.errors import CONFIG, DATA_LOSS, NO_STREAM, TIMEOUT, SparkError
from iris.spark.offsets import Offsets, Part, Position, check_same_log, split, spread
from iris.spark.options import (
    CLUSTER,
    EARLIEST,
    LATEST,
    STREAM,
    TOPIC,
    SourceOptions,
    parse_offsets,
)
from iris.spark.reading import Range
from iris.streams import StreamInfo

Infos = dict[Part, StreamInfo]
log = logger(__name__)
RETRY_S: Final = 0.5
"""Seconds between tries of a failed call."""
WAIT_S: Final = 0.1
"""Seconds that a trigger without messages waits for some."""
T = TypeVar("T")
_Work = Callable[[Client], Coroutine[Any, Any, T]]


class Planner:
    """Plans the triggers of one query, or one batch read."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._group = options.group
        self._streams: dict[str, str] = {}
        """Name in the options (a stream, topic or cluster) -> the stream that is read for it."""
        self._created: set[str] = set()
        """Streams created for this query, which it reads from their beginning."""
        self._initial: Offsets | None = None
        """Where a new query starts; None until asked."""
        self._pinned = False
        """Whether the first batch of a new query is in the checkpoint."""
        self._target: Offsets | None = None
        """Where the query ends, with Trigger.AvailableNow."""
        self._capture_target = False
        self._planned_s = time.monotonic()
        """Monotonic time when a trigger last had messages."""

    # -- streams ---------------------------------------------------------------------------------------------

    def infos(self, known: Offsets | None = None) -> Infos:
        """Return the partitions to read, in order.

        Streams that record an address are created if missing. Raises SparkError.
        """
        known = known or {}
        if known and not self.options.group and self.options.kind != STREAM:
            self._group = _group_of(known)
        self._streams = {
            name: self.options.stream_of(name, self._group) for name in self.options.names
        }
        for stream, _ in known:
            if stream not in self._streams.values():
                raise SparkError(
                    CONFIG,
                    f"the checkpoint holds an offset of stream {stream!r}, which this query does not read; add the stream, or use another checkpoint",
                )
        infos = {}
        for name, stream in self._streams.items():
            there = Part(stream, 0) in known
            for info in self._ask(self._describe(name, stream, there)):
                infos[Part(stream, info.partition)] = info
        for part, position in known.items():
            first = infos[Part(part.stream, 0)]
            at = infos[part].replaced_at if part in infos else first.replaced_at
            check_same_log(part.stream, position, first.uuid, first.replaces, at)
            if part not in infos:
                raise SparkError(
                    DATA_LOSS,
                    f"stream {part.stream!r} has no partition {part.partition}, of which the checkpoint holds an offset",
                )
        return infos

    def _describe(self, name: str, stream: str, there: bool) -> _Work[list[StreamInfo]]:
        options = self.options
        timeout_s = options.access.timeout_s

        async def describe(client: Client) -> list[StreamInfo]:
            async def once() -> list[StreamInfo]:
                found = await client.streams.partitions(stream, timeout=timeout_s)
                for info in found:
                    if not info.store:
                        raise StreamUnavailable(info.name, info.failed)
                return found

            if there:
                # The stream existed before, so wait for a store that restarts.
                return await wait_for_stream(once, timeout_s)
            try:
                return await once()
            except NoStream:
                if options.kind == STREAM:
                    raise
            self._created.add(stream)
            made = await client.streams.create(
                stream,
                topic=name if options.kind == TOPIC else "",
                cluster=name if options.kind == CLUSTER else "",
                max_bytes=options.stream_max_bytes,
                max_age=options.stream_max_age_s,
                timeout=timeout_s,
            )
            return [made]

        return describe

    def _ask(self, work: _Work[T]) -> T:
        """Run a call; retry `fetchOffset.numRetries` times after errors that pass, each time over a new connection."""
        tries = self.options.retries
        while True:
            try:
                return connection(self.options.access).call(work)
            except SparkError as err:
                if not tries or err.code not in (TIMEOUT, NO_STREAM):
                    raise
                log.warning("spark.retry", extra={"fields": {"error": str(err), "left": tries}})
            tries -= 1
            time.sleep(RETRY_S)

    # -- offsets ---------------------------------------------------------------------------------------------

    def initial(self) -> Offsets:
        """Return where a new query starts. Without a group it gets a random one, which its checkpoint remembers.

        Spark asks more than once, also when it repeats its first batch after a crash, and stores an offset only as
        the end of a batch. So the first batch is always empty and ends here; the start of the second is then in the
        checkpoint.
        """
        if self._initial is None:
            self._group = self._group or f"{self.options.group_prefix}-{os.urandom(8).hex()}"
            options = self.options
            self._initial = self._resolve("startingOffsets", options.starting, options.starting_ms)
        return self._initial

    def final(self) -> Offsets:
        """Return where a batch query ends."""
        return self._resolve("endingOffsets", self.options.ending, self.options.ending_ms)

    def latest(self) -> Offsets | None:
        """Return the current ends of the streams; None while the group, and so the streams, are not known."""
        if not self._group and self.options.kind != STREAM:
            return None
        return _ends(self.infos())

    def end_at_target(self) -> None:
        """End the query where the streams end now (Trigger.AvailableNow)."""
        self._capture_target = True
        self._target = self.latest()

    def next_end(self, start: Offsets) -> Offsets:
        """Return the end of the trigger that starts at `start`; `start` itself if it is not due. Raises SparkError."""
        if self._initial is not None and not self._pinned:
            return start
        infos = self.infos(start)
        offsets = self._plan(start, infos)
        if offsets is None and self._target is None and self._ask(self._wait(infos)):
            # Read the new messages in this trigger: Spark asks again only after a pause and two calls.
            infos = self.infos(start)
            offsets = self._plan(start, infos)
        if offsets is None:
            offsets = {
                part: start.get(part, Position(_uuid(info), _beginning(part, info, start)))
                for part, info in infos.items()
            }
        return offsets

    def _plan(self, start: Offsets, infos: Infos) -> Offsets | None:
        """Return the end of the trigger that starts at `start`; None if it is not due."""
        options = self.options
        if self._capture_target and self._target is None:
            self._target = _ends(infos)
        begins: dict[Part, int] = {}
        wanted: dict[Part, int] = {}
        for part, info in infos.items():
            if part not in start:
                # This batch records where a new stream or partition starts; the next one reads.
                begins[part], wanted[part] = _beginning(part, info, start), 0
                continue
            begin, end = start[part].offset, info.end
            if begin > end:
                raise _beyond(part, begin, end)
            if begin < info.oldest and options.fail_on_data_loss:
                raise _trimmed(part, begin, info.oldest)
            if self._target is not None:
                # A partition that was added since is read by the next run.
                last = self._target[part].offset if part in self._target else begin
                end = max(begin, min(end, last))
            begins[part], wanted[part] = begin, end - begin
        total = sum(wanted.values())
        now_s = time.monotonic()
        few = total < options.min_offsets and now_s - self._planned_s < options.max_delay_s
        if total == 0 or (few and self._target is None):
            return None
        self._planned_s = now_s
        taken = spread(wanted, options.max_offsets)
        if options.max_bytes:
            sizes = {part: info.size_bytes / max(1, info.messages) for part, info in infos.items()}
            size = sum(taken[part] * sizes[part] for part in infos)
            if size > options.max_bytes:
                most = max(1, int(sum(taken.values()) * options.max_bytes / size))
                taken = spread(taken, most)
        return {
            part: Position(_uuid(info), begins[part] + taken[part]) for part, info in infos.items()
        }

    def _wait(self, infos: Infos) -> _Work[bool]:
        """Return a call that waits up to WAIT_S for new messages, and returns whether there are some."""
        timeout_s = self.options.access.timeout_s

        async def wait(client: Client) -> bool:
            # Spark asks 100 times per second; one call that waits is cheaper and as fast.
            fetches = [
                asyncio.ensure_future(
                    client.streams.fetch(
                        part.stream,
                        info.end,
                        partition=part.partition,
                        uuid=_uuid(info),
                        max_bytes=1,
                        wait=WAIT_S,
                        timeout=timeout_s,
                    )
                )
                for part, info in infos.items()
            ]
            try:
                done, _pending = await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
                return any(len(fetch.result()) for fetch in done)
            finally:
                for fetch in fetches:
                    fetch.cancel()
                await asyncio.gather(*fetches, return_exceptions=True)

        return wait

    def ranges(self, start: Offsets, end: Offsets) -> list[Range]:
        """Return the ranges for tasks to read. Raises SparkError if a part was removed or lost."""
        options = self.options
        self._pinned = True
        infos = self.infos(end)
        parts = []
        total = sum(
            position.offset - start[part].offset for part, position in end.items() if part in start
        )
        for part, position in end.items():
            info = infos[part]
            if part not in start:
                continue  # a new stream or partition, read from the next batch on
            begin = start[part].offset
            check_same_log(part.stream, start[part], position.uuid)
            if position.offset > info.end:
                raise _beyond(part, position.offset, info.end)
            if begin < info.oldest:
                if options.fail_on_data_loss:
                    raise _trimmed(part, begin, info.oldest)
                log.warning("spark.data_loss", extra={"fields": {"stream": str(part), "from": begin, "until": info.oldest}})  # fmt: skip
                begin = min(info.oldest, position.offset)
            share = (
                -(-options.min_partitions * (position.offset - begin) // total) if total > 0 else 1
            )
            for first, last in split(begin, position.offset, share, options.max_records):
                parts.append(
                    Range(
                        part.stream,
                        part.partition,
                        position.uuid,
                        info.uuid,
                        first,
                        last,
                        tuple(info.key_ids),
                    )
                )
        return parts

    def _resolve(self, option: str, text: str, time_ms: int | None) -> Offsets:
        """Return the offsets that an option means."""
        infos = self.infos()
        named = {} if text in (EARLIEST, LATEST) else parse_offsets(option, text)
        unknown = named.keys() - self._streams.keys() - set(self._streams.values())
        if unknown:
            raise SparkError(
                CONFIG, f"{option}: this query does not read {min(unknown)!r}; remove it"
            )
        offsets = {}
        names = {stream: name for name, stream in self._streams.items()}
        for part, info in infos.items():
            stream, name = part.stream, names[part.stream]
            # Everything in a stream created for this query is new to it.
            latest = text == LATEST and stream not in self._created
            positions = named.get(name, named.get(stream, {}))
            at = positions.get(part.partition, -1 if latest else -2)
            if named and part.partition not in positions:
                which = f"partition {part.partition} of {name!r}" if positions else repr(name)
                raise SparkError(CONFIG, f"{option}: no offset is given for {which}; add one")
            if time_ms is not None:
                at = self._ask(self._at_time(part, _uuid(info), time_ms))
            elif at == -2:
                at = info.oldest
            elif at == -1:
                at = info.end
            elif at > info.end:
                raise _beyond(part, at, info.end)
            offsets[part] = Position(_uuid(info), at)
        for name, positions in named.items():
            stream = self._streams.get(name, name)
            for partition in positions:
                if Part(stream, partition) not in infos:
                    raise SparkError(
                        CONFIG, f"{option}: {name!r} has no partition {partition}; remove it"
                    )
        return offsets

    def _at_time(self, part: Part, uuid: str, time_ms: int) -> _Work[int]:
        timeout_s = self.options.access.timeout_s

        async def find(client: Client) -> int:
            when = datetime.fromtimestamp(time_ms / 1000, UTC)
            return await client.streams.find(
                part.stream, when, partition=part.partition, uuid=uuid, timeout=timeout_s
            )

        return find


def _group_of(known: Offsets) -> str:
    """Return the group that a checkpoint's streams were created for."""
    for stream, _ in known:
        parts = stream.split(".")
        if len(parts) >= 3 and parts[0] == "spark":
            return ".".join(parts[1:-1])
    raise SparkError(
        CONFIG,
        "the checkpoint belongs to a query that read streams, not topics or clusters; use another one",
    )


def _uuid(info: StreamInfo) -> str:
    """Return the uuid of the stream that a partition belongs to."""
    return info.parent or info.uuid


def _ends(infos: Infos) -> Offsets:
    return {part: Position(_uuid(info), info.end) for part, info in infos.items()}


def _beginning(part: Part, info: StreamInfo, start: Offsets) -> int:
    """Return where a stream or partition starts that the checkpoint does not have: the query has seen nothing of it.

    A stream starts at its oldest message, and a partition that was added to a known stream at its first, so that a
    message which retention has removed since counts as lost.
    """
    return 0 if Part(part.stream, 0) in start else info.oldest


def _beyond(part: Part, at: int, end: int) -> SparkError:
    return SparkError(
        DATA_LOSS,
        f"stream '{part}' ends at offset {end}, before offset {at} of this query: its store may have lost records",
    )


def _trimmed(part: Part, begin: int, oldest: int) -> SparkError:
    return SparkError(
        DATA_LOSS,
        f"stream '{part}': retention removed offsets {begin} to {oldest}; failOnDataLoss=false goes on without them",
    )
