"""Says which partitions would have to move so that the stores of a site have equal shares. It moves nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec import Struct

from iris.core.placement import moves
from iris.crypto.keys import public_id
from iris.streams.listing import list_streams, stray
from iris.streams.partitions import site_stores
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.orders import split_partition
from iris.wire.streams import StoreInfo


class PartitionMove(Struct, frozen=True):
    """A move of one partition that would make the shares of two stores more equal."""

    name: str
    """The partition's name, such as "orders/3"."""
    uuid: str
    store: str
    """Id of the store that has it, in hex."""
    host: str
    to_store: str
    to_host: str
    size_bytes: int
    movable: bool
    """Whether `move` can do it: only a stream in a bucket can be moved."""


async def propose(stores: Stores, name: str, timeout: float) -> list[PartitionMove]:
    """Return the moves that would even out the partitions of a stream, or of all streams if `name` is empty.

    Raises StreamUnavailable.
    """
    until_s = time.monotonic() + timeout
    streams = await list_streams(stores, timeout)
    there = await site_stores(stores, name or "balance", until_s, bucket=False)
    of: dict[bytes, dict[int, VerifiedStream]] = {}
    for stream in streams:
        definition = stream.order.definition
        if (
            not stream.dead
            and (definition.partitions or definition.parent)
            and not stray(stream, streams)
        ):
            of.setdefault(definition.parent or stream.order.uuid, {})[definition.partition] = stream
    found: list[PartitionMove] = []
    for parts in of.values():
        whole = (
            split_partition(next(iter(parts.values())).name)[0] if 0 not in parts else parts[0].name
        )
        if name in ("", whole):
            found += _even(whole, parts, there)
    return sorted(found, key=lambda move: (split_partition(move.name), move.uuid))


def _even(
    name: str, parts: Mapping[int, VerifiedStream], there: Mapping[str, StoreInfo]
) -> list[PartitionMove]:
    """Return the moves that would even out the partitions of one stream."""
    group = next(iter(parts.values())).order.store
    in_bucket = any(stream.described.holder for stream in parts.values())
    able = {id_: info for id_, info in there.items() if not in_bucket or info.group == group}
    held = {number: _store(stream) for number, stream in parts.items()}
    return [
        PartitionMove(
            parts[number].name, parts[number].order.uuid.hex(), source, parts[number].described.label, target,
            there[target].label, parts[number].described.size_bytes, in_bucket,
        )
        for number, (source, target) in moves(name, held, able.keys()).items()
    ]  # fmt: skip


def _store(stream: VerifiedStream) -> str:
    return public_id(stream.described.holder or stream.described.store).hex()
