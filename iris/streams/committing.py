"""Commits: what the attempts at a batch staged becomes visible, in one log or in all partitions of a stream.

    partition 0    Plan ──────────────────────────────► Commit
    the others            Commit, each in its own time ─┘

A log commits its part in one write, but several logs do not commit at once. So partition 0 stores first which attempts
count in which partition. Whoever commits the batch again completes that list, whatever its own attempts are: a job that
runs again may have sent messages to other partitions. Partition 0 commits last, which ends the plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from msgspec import Struct

from iris.errors import ConfigError, MessageTooLarge, RequestError, StreamError
from iris.streams.partitions import Layout, find_layout
from iris.streams.stores import Stores
from iris.wire.names import check_cluster
from iris.wire.streams import (
    COMMIT_BYTES,
    MAX_ATTEMPTS,
    MAX_WRITER_BYTES,
    Attempt,
    Commit,
    Committed,
    Discard,
    Plan,
    Planned,
    PlannedPart,
    Settled,
    encode,
)

MAX_BATCH: Final = 1 << 63
MAX_PLANS: Final = 3
"""Plans that a commit completes, its own included, before it gives up: another program commits other batches."""
T = TypeVar("T", Commit, Discard, Plan)


class StagedPart(Struct, frozen=True):
    """What an attempt staged in one partition."""

    partition: int
    records: int
    bytes: int
    """Size of the sealed bodies."""


class StagedAttempt(Struct, frozen=True):
    """The result of a `Staging`, for `client.streams.commit` in any process. It can be pickled."""

    attempt: str
    """32 hex digits."""
    records: int
    """Number of sealed records, each with one message or more."""
    parts: tuple[StagedPart, ...] | None = None
    """Where they are, if the stream has several partitions; None for an attempt at a batch of one log."""


class CommitInfo(Struct, frozen=True):
    """A committed batch: its offsets are from `first` up to but not including `end`, which are equal if it is empty.

    Both are None if the writer has committed a later batch since, so that the store no longer knows. They are those of
    partition 0 if the batch is in several partitions.
    """

    first: int | None
    end: int | None
    replayed: bool
    """The batch was committed before, perhaps from other attempts, and nothing changed."""


async def commit_log(
    stores: Stores, name: str, uuid: str, writer: str, batch: int, attempts: Sequence[StagedAttempt], timeout: float
) -> CommitInfo:  # fmt: skip
    """Commit a batch of one log. Raises as `Streams.commit`."""
    call = commit_call(name, writer, batch, attempts, stores.runtime.message_limit)
    done = await stores.ask_stream(name, uuid, call, Committed, timeout=timeout, writes=True)
    return CommitInfo(done.first, done.next, done.replayed)


async def commit_partitions(
    stores: Stores, name: str, uuid: str, writer: str, batch: int, attempts: Sequence[StagedAttempt], timeout: float
) -> CommitInfo:  # fmt: skip
    """Commit a batch in all partitions of a stream, after a batch of the writer that was not completed, if there is
    one.

    Raises as `Streams.commit`. Partitions may show the batch then; commit it again.
    """
    parts = _parts(name, attempts)
    limit = stores.runtime.message_limit
    plan = _checked(Plan(writer, batch, parts), len(attempts), limit)
    layout = await find_layout(stores, name, uuid, timeout=timeout)
    first_name, first_uuid = layout.log(0)
    for _ in range(MAX_PLANS):
        planned = await stores.ask_stream(
            first_name, first_uuid, plan, Planned, timeout=timeout, writes=True
        )
        if any(part.partition >= len(layout) for part in planned.parts):
            layout = await find_layout(stores, name, uuid, timeout=timeout)
        await _commit_others(stores, layout, writer, planned, timeout)
        own = [part.attempts for part in planned.parts if part.partition == 0]
        call = Commit(writer, planned.batch, own[0] if own else [])
        done = await stores.ask_stream(
            first_name, first_uuid, call, Committed, timeout=timeout, writes=True
        )
        if planned.batch == batch:
            await _discard_unused(stores, layout, plan, planned, timeout)
            return CommitInfo(
                done.first, done.next, done.replayed or planned != Planned(batch, parts)
            )
    raise StreamError(
        name, f"another process commits other batches of writer {writer!r} at the same time, so batch {batch} was not committed; let one process commit"
    )  # fmt: skip


async def _commit_others(
    stores: Stores, layout: Layout, writer: str, planned: Planned, timeout: float
) -> None:
    """Commit a planned batch in the partitions above 0; if some fail, do the rest and raise the first error."""

    async def commit(part: PlannedPart) -> None:
        call = Commit(writer, planned.batch, part.attempts)
        await stores.ask_stream(
            *layout.log(part.partition), call, Committed, timeout=timeout, writes=True
        )

    results = await asyncio.gather(
        *(commit(part) for part in planned.parts if part.partition), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _discard_unused(
    stores: Stores, layout: Layout, plan: Plan, planned: Planned, timeout: float
) -> None:
    """Discard attempts in partitions in which the batch has none. In the others the commit did it."""
    used = {part.partition for part in planned.parts} | {0}
    calls = [
        stores.ask_stream(
            *layout.log(part.partition),
            Discard(plan.writer, plan.batch, [one.attempt for one in part.attempts]),
            Settled,
            timeout=timeout,
            writes=True,
        )
        for part in plan.parts
        if part.partition not in used
    ]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        # The batch is committed, and what is left expires after a day.
        if isinstance(result, BaseException) and not isinstance(result, StreamError | RequestError):
            raise result


async def discard_everywhere(
    stores: Stores, name: str, uuid: str, call: Discard, timeout: float
) -> int:
    """Discard in all partitions of a stream; return the number of records.

    If a commit was interrupted, the attempts that it planned stay, unless the call names no attempts.
    Raises StreamError.
    """
    layout = await find_layout(stores, name, uuid, timeout=timeout)
    if call.attempts and len(layout) > 1:
        # A plan without parts is not stored, and shows the one that is.
        asked = Plan(call.writer, call.batch, [])
        planned = await stores.ask_stream(
            *layout.log(0), asked, Planned, timeout=timeout, writes=True
        )
        kept = {one.attempt for part in planned.parts for one in part.attempts}
        left = [attempt for attempt in call.attempts if attempt not in kept]
        if not left:
            return 0
        call = Discard(call.writer, call.batch, left)

    async def discard(partition: int) -> int:
        log = layout.log(partition)
        done = await stores.ask_stream(*log, call, Settled, timeout=timeout, writes=True)
        return done.count

    dropped = await discard(0)  # first, because it has the plan
    results = await asyncio.gather(
        *(discard(partition) for partition in range(1, len(layout))), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
        dropped += result
    return dropped


def _parts(name: str, attempts: Sequence[StagedAttempt]) -> list[PlannedPart]:
    """Return the attempts by partition, in order. Raises StreamError if they cannot be committed."""
    found: dict[int, list[Attempt]] = {}
    sizes: dict[int, int] = {}
    for one, attempt in zip(_attempt_ids(name, attempts), attempts, strict=True):
        parts = attempt.parts
        for part in parts if parts is not None else (StagedPart(0, attempt.records, 0),):
            if part.records:
                found.setdefault(part.partition, []).append(Attempt(one, part.records))
                sizes[part.partition] = sizes.get(part.partition, 0) + part.bytes
    for partition, size in sizes.items():
        # A plan whose part a store refuses could never be completed.
        if size > COMMIT_BYTES:
            raise StreamError(
                name, f"the batch has {size} bytes in partition {partition}; at most {COMMIT_BYTES} are allowed. Split the batch"
            )  # fmt: skip
    return [PlannedPart(partition, found[partition]) for partition in sorted(found)]


def check_batch(name: str, writer: str, batch: int) -> None:
    """Raise InvalidName or ConfigError unless the stream's name, the writer and the batch are valid."""
    check_cluster(name)
    if not isinstance(writer, str):
        raise ConfigError(f"writer must be a str, not {type(writer).__name__}")
    if not 0 < len(writer.encode()) <= MAX_WRITER_BYTES:
        raise ConfigError(
            f"writer: {len(writer.encode())} bytes; it must have 1 to {MAX_WRITER_BYTES}"
        )
    if not 0 <= batch < MAX_BATCH:
        raise ConfigError(f"batch: {batch} is out of range; use 0 to 2^63 - 1")


def commit_call(
    name: str, writer: str, batch: int, attempts: Sequence[StagedAttempt], limit: int
) -> Commit:
    """Return the call that commits. Raises StreamError, or MessageTooLarge if it has over `limit` bytes."""
    ids = _attempt_ids(name, attempts)
    named = [Attempt(one, attempt.records) for one, attempt in zip(ids, attempts, strict=True)]
    return _checked(Commit(writer, batch, named), len(named), limit)


def discard_call(
    name: str, writer: str, batch: int, attempts: Iterable[StagedAttempt], limit: int
) -> Discard:
    """Return the call that discards. Raises as `commit_call`."""
    check_batch(name, writer, batch)
    ids = _attempt_ids(name, [*attempts])
    return _checked(Discard(writer, batch, ids), len(ids), limit)


def _checked(call: T, count: int, limit: int) -> T:
    size = len(encode(call))
    if count > MAX_ATTEMPTS or size > limit:
        raise MessageTooLarge(
            f"{count} attempts ({size} bytes) are over the limit of a call, {MAX_ATTEMPTS} attempts and {limit} bytes; stage fewer attempts"
        )
    return call


def _attempt_ids(name: str, attempts: Sequence[StagedAttempt]) -> list[bytes]:
    try:
        ids = [bytes.fromhex(attempt.attempt) for attempt in attempts]
    except ValueError as err:
        raise StreamError(name, f"each attempt must be 32 hex digits: {err}") from err
    if any(len(one) != 16 for one in ids) or len(set(ids)) < len(ids):
        raise StreamError(name, "each attempt must be 32 hex digits, and must not be listed twice")
    return ids
