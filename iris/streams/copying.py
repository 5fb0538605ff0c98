"""Definitions of copies, and how the copies of a stream with several partitions are created."""

from __future__ import annotations

import time
from typing import Any

from msgspec import structs

from iris.core.placement import place
from iris.deadlines import seconds_left
from iris.errors import RequestError, StreamError
from iris.streams.definitions import check_unreserved, keys_of, make_log
from iris.streams.partitions import Layout, site_stores, unmake
from iris.streams.signed_orders import Founding
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.orders import Definition, Origin, check_definition, partition_name


def definition_of_copy(name: str, source: VerifiedStream, **settings: Any) -> Definition:
    """Return the definition of a copy. Raises ConfigError."""
    of = source.order.definition
    origin = Origin(source.order.uuid, of.name, of.topic, of.cluster)
    definition = Definition(
        name, mirror=origin.uuid.hex(), origins=(*of.origins, origin), **settings
    )
    check_definition(definition)
    return definition


async def copy_of_partitions(
    stores: Stores, to: str, logs: Layout, patience: float, *, bucket: bool, **settings: Any
) -> VerifiedStream:
    """Create the copies of all partitions, that of partition 0 last, which names the others. Raises StreamError."""
    until_s = time.monotonic() + patience
    check_unreserved(to)
    sources = [
        await stores.describe(*logs.log(number), timeout=patience) for number in range(len(logs))
    ]
    there = await site_stores(stores, to, until_s, bucket=bucket)
    placed = place(to, range(len(logs)), there)
    whole = definition_of_copy(to, sources[0], **settings)
    founding = Founding(keys_of(stores, whole))
    made: dict[int, bytes] = {}
    try:
        for number in range(1, len(logs)):
            name = partition_name(to, number)
            part = definition_of_copy(name, sources[number], parent=founding.uuid, partition=number)
            own = Founding(keys_of(stores, part))
            made[number] = own.uuid
            await make_log(
                stores, part, own, there[placed[number]], seconds_left(until_s), bucket=bucket, asked=patience
            )  # fmt: skip
            stores.expect(name, own.uuid.hex())
        whole = structs.replace(whole, partitions=tuple(made.values()))
        await make_log(
            stores, whole, founding, there[placed[0]], seconds_left(until_s), bucket=bucket, asked=patience
        )  # fmt: skip
    except (StreamError, RequestError) as err:
        if isinstance(err, StreamError) and not err.may_have_run:
            await unmake(stores, to, made, until_s)
        raise
    stores.note_created(to)
    return await stores.describe(to, "", timeout=seconds_left(until_s), asked=patience)
