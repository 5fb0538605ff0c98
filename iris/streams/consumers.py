"""Looks at, changes and deletes consumers, in all partitions of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import structs

from iris.deadlines import seconds_left
from iris.errors import RequestError, StreamError, StreamUnavailable
from iris.streams.listing import list_consumers
from iris.streams.partitions import Layout, find_layout, numbered
from iris.streams.records import StreamMessage
from iris.streams.redriving import Letters, RedriveInfo
from iris.streams.stores import Stores
from iris.wire.consumers import (
    ChangeConsumer,
    ConsumerInfo,
    Consumers,
    DeleteConsumer,
    HandOver,
)
from iris.wire.names import listed
from iris.wire.streams import Settled

T = TypeVar("T")
_SUMMED = (
    "floor",
    "position",
    "lag",
    "pending",
    "redelivering",
    "dead",
    "missed",
    "late",
    "redriven",
)


async def consumers_of(
    stores: Stores, name: str, uuid: str, partition: int | None, timeout: float
) -> list[ConsumerInfo]:
    """Return the consumers of a stream by name, with the figures of its partitions added up. Raises StreamError."""
    until_s = time.monotonic() + timeout
    layout = await find_layout(stores, name, uuid, timeout=timeout)

    async def listed(log: tuple[str, str]) -> list[ConsumerInfo]:
        return await list_consumers(stores, *log, seconds_left(until_s))

    found = await _in_each(layout, partition, listed, "could not be asked")
    named: dict[str, list[ConsumerInfo]] = {}
    for infos in found:
        for info in infos:
            named.setdefault(info.name, []).append(info)
    return [summed(named[one]) for one in sorted(named)]


def summed(infos: Sequence[ConsumerInfo]) -> ConsumerInfo:
    """Return the state of a consumer in several partitions: numbers are added up, and each worker is in all of them."""
    first = infos[0]
    if len(infos) == 1:
        return first
    totals = {field: sum(getattr(info, field) for info in infos) for field in _SUMMED}
    workers, standing = (
        max(getattr(info, field) for info in infos) for field in ("workers", "standing")
    )
    active, standing_by = (
        list(dict.fromkeys(each for info in infos for each in getattr(info, field)))
        for field in ("active", "standing_by")
    )
    return structs.replace(
        first, **totals, workers=workers, paused=all(info.paused for info in infos), active=active, standing_by=standing_by,
        standing=standing,
    )  # fmt: skip


async def change_in_each(
    stores: Stores, name: str, call: ChangeConsumer | HandOver, uuid: str, timeout: float
) -> ConsumerInfo:
    """Change a consumer in every partition that has it, or has a worker to hand over to; return its state.

    Raises StreamError.
    """
    answers = await _where_it_is(
        stores, name, uuid, call, Consumers, timeout, "could not be changed"
    )
    return summed([answer.consumers[0] for answer in answers])


async def delete_in_each(
    stores: Stores, name: str, consumer: str, uuid: str, timeout: float
) -> None:
    """Delete a consumer from every partition that has it. Raises StreamError."""
    call = DeleteConsumer(consumer)
    await _where_it_is(
        stores, name, uuid, call, Settled, timeout, "could not be reached to delete it"
    )


async def dead_letters_of(
    stores: Stores, name: str, consumer: str, limit: int, uuid: str, partition: int | None, timeout: float
) -> list[StreamMessage]:  # fmt: skip
    """Return the oldest dead letters of a stream's partitions. Raises StreamError."""
    until_s = time.monotonic() + timeout
    layout = await find_layout(stores, name, uuid, timeout=timeout)

    async def letters(log: tuple[str, str]) -> list[StreamMessage]:
        return await Letters(stores, *log, seconds_left(until_s)).messages(consumer, limit)

    found: list[StreamMessage] = []
    numbers = range(len(layout)) if partition is None else (partition,)
    each = await _in_each(layout, partition, letters, "could not be read")
    for number, messages in zip(numbers, each, strict=True):
        for message in messages:
            message.partition = number
        found += messages
    if consumer and not found:
        await _check_exists(stores, name, consumer, uuid, partition, seconds_left(until_s))
    return sorted(found, key=lambda message: message.stored_us)[:limit]


async def redrive_in_each(
    stores: Stores, name: str, consumer: str, offsets: set[int], limit: int | None, uuid: str, partition: int | None, timeout: float
) -> RedriveInfo:  # fmt: skip
    """Redrive dead letters, one partition after the other. Raises StreamError."""
    until_s = time.monotonic() + timeout
    layout = await find_layout(stores, name, uuid, timeout=timeout)
    if offsets and partition is None and len(layout) > 1:
        raise StreamError(
            name, f"it has {len(layout)} partitions, each with its own offsets; pass partition="
        )  # fmt: skip
    logs = [layout.log(n) for n in (range(len(layout)) if partition is None else (partition,))]
    done = RedriveInfo(0)
    unknown: list[StreamError] = []
    for log in logs:
        left = None if limit is None else limit - done.redriven - done.gone
        if left is not None and left <= 0:
            break
        try:
            one = await Letters(stores, *log, seconds_left(until_s)).redrive(
                consumer, offsets, left
            )
        except StreamError as err:
            if len(logs) == 1 or not _is_unknown(err):
                raise
            unknown.append(err)
            continue
        done = RedriveInfo(done.redriven + one.redriven, done.gone + one.gone, done.left + one.left)
    if len(unknown) == len(logs):
        raise unknown[0]
    if done == RedriveInfo(0):
        await _check_exists(stores, name, consumer, uuid, partition, seconds_left(until_s))
    return done


async def _check_exists(
    stores: Stores, name: str, consumer: str, uuid: str, partition: int | None, timeout: float
) -> None:
    """Raise StreamError if a stream has no consumer of this name, which may be misspelt."""
    known = [info.name for info in await consumers_of(stores, name, uuid, partition, timeout)]
    if consumer not in known:
        has = f"it has {listed(known)}" if known else "it has none"
        raise StreamError(name, f"the stream has no consumer {consumer!r}; {has}")


async def _in_each(
    layout: Layout, partition: int | None, ask: Callable[[tuple[str, str]], Awaitable[T]], otherwise: str
) -> list[T]:  # fmt: skip
    """Ask each partition, or only one. Raises StreamError that names those that do not answer."""
    if partition is not None:
        return [await ask(layout.log(partition))]
    if len(layout) == 1:
        return [await ask((layout.name, layout.uuids[0]))]
    results = await asyncio.gather(
        *(ask(layout.log(number)) for number in range(len(layout))), return_exceptions=True
    )
    away: dict[int, Exception] = {}
    found: list[T] = []
    for number, result in enumerate(results):
        if isinstance(result, StreamError | RequestError):
            away[number] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            found.append(result)
    if away:
        first = next(iter(away.values()))
        raise StreamUnavailable(
            layout.name, f"{numbered(away)} {otherwise}; try again when their store is back ({first})", may_have_run=True
        ) from first  # fmt: skip
    return found


async def _where_it_is(
    stores: Stores, name: str, uuid: str, call: ChangeConsumer | DeleteConsumer | HandOver, answer: type[T], timeout: float, otherwise: str
) -> list[T]:  # fmt: skip
    """Make a call about a consumer to every partition; return the answers of those that have it.

    Raises StreamError, also if none has it.
    """
    until_s = time.monotonic() + timeout
    layout = await find_layout(stores, name, uuid, timeout=timeout)
    unknown: list[StreamError] = []

    async def ask(log: tuple[str, str]) -> T | None:
        try:
            return await stores.ask_stream(
                *log, call, answer, timeout=seconds_left(until_s), asked=timeout, writes=True
            )
        except StreamError as err:
            if not _is_unknown(err):
                raise
            unknown.append(err)
            return None

    found = [one for one in await _in_each(layout, None, ask, otherwise) if one is not None]
    if not found:
        raise unknown[0]
    return found


def _is_unknown(err: StreamError) -> bool:
    """Return whether a store said that a partition has no such consumer, or no worker to hand it over to."""
    return err.detail.startswith(("the stream has no consumer", "no worker of consumer"))
