"""Restores a stream from its copy in a bucket, because the store that had the stream is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from iris.core.channels import is_named, trusted_orders
from iris.crypto.keys import ClusterKey, public_id
from iris.deadlines import seconds_left
from iris.errors import AmbiguousStream, ConfigError, NoStream, StreamError
from iris.streams.listing import StreamInfo, stream_info
from iris.streams.moving import LOOK_S, chosen, with_buckets
from iris.streams.signed_orders import (
    Founding,
    orders_to_create,
    orders_to_find_lost,
    orders_to_force,
)
from iris.streams.stores import Stores
from iris.wire.names import check_uuid, split_site
from iris.wire.orders import DEAD, Order, in_force
from iris.wire.streams import Described, FindLost, Force, LostStream, LostStreams


async def force_stream(stores: Stores, name: str, to: str, uuid: str, timeout: float) -> StreamInfo:
    """Restore a stream, whose store is gone, from its copy at the store `to`; return it as that store describes it.

    Raises ConfigError if `to` names no store that can do it; StreamError.
    """
    until_s = time.monotonic() + timeout
    uuid = check_uuid(uuid)
    site, base = split_site(name)
    if site:
        raise ConfigError(
            f"stream {name!r} is at site {site!r}; run this with a relay of that site"
        )
    if base.endswith(DEAD):
        raise StreamError(name, f"dead letters move with their stream; move {base.removesuffix(DEAD)!r}")  # fmt: skip
    target = chosen(to, await with_buckets(stores, name, until_s))
    if not target.forces:
        raise ConfigError(f"to: the store on {target.label} is of an earlier version; upgrade it, or name another store")  # fmt: skip
    address = public_id(target.key).hex()
    keys = stores.keys(name)

    async def find(left_s: float) -> LostStreams:
        call = FindLost(orders_to_find_lost(name, keys, target.key))
        return await stores.ask(address, None, call, LostStreams, timeout=left_s, shown=name)

    found = await stores.retry(name, uuid, find, timeout=seconds_left(until_s), asked=timeout)
    lost, order = _one(stores, name, uuid, found.streams)
    if order.definition.partitions or order.definition.parent:
        raise StreamError(name, "a stream with several partitions cannot be restored from copies, because it lists its partitions by their uuids; create such streams with durability 'bucket'")  # fmt: skip
    log = lost.uuid.hex()
    holders = await stores.holders.find(
        name, [key.key_id for key in keys], timeout=seconds_left(until_s)
    )
    if any(holder.uuid == log for holder in holders):
        if lost.store == target.key and order.definition.origins:  # it was made before
            return await _described(stores, name, log, until_s, timeout)
        raise StreamError(
            name, f"the store on {lost.label} has it and can be reached, so it is not moved by force; if its disk is lost, stop that store first"
        )  # fmt: skip
    definition = order.definition.made_again(lost.uuid)
    founding = Founding(_keys(stores, lost))

    async def force(left_s: float) -> Described:
        call = Force(
            orders_to_force(lost, order, stores.runtime.keyring, target.key),
            orders_to_create(definition, founding, target.key),
            founding.salt,
        )
        return await stores.ask(
            address, None, call, Described, timeout=left_s, shown=name, writes=True
        )

    described = await stores.retry(name, log, force, timeout=seconds_left(until_s), asked=timeout)
    stores.forget_deleted(name, log)
    return await _described(stores, name, described.uuid.hex(), until_s, timeout)


def _one(
    stores: Stores, name: str, uuid: str, found: Sequence[LostStream]
) -> tuple[LostStream, Order]:
    """Return the lost stream, and the order that defines it. Raises NoStream, AmbiguousStream."""
    signed: list[tuple[LostStream, Order]] = []
    for lost in found:
        ours = trusted_orders(
            lost.orders, stores.runtime.keyring.by_id, uuid=lost.uuid, store=lost.store
        )
        latest = in_force(order for order in ours if is_named(order, name))
        if latest is not None and latest.uuid == lost.uuid and uuid in ("", lost.uuid.hex()):
            signed.append((lost, latest))
    if not signed:
        detail = f"the bucket has no copy of it under your keys{f' as log {uuid}' if uuid else ''}"
        raise NoStream(name, f"{detail}; a stream with durability 'bucket' has no copy, because another store takes it over automatically")  # fmt: skip
    if len(signed) > 1:
        listed = " or ".join(f"uuid={lost.uuid.hex()} of {lost.label}" for lost, _ in signed)
        raise AmbiguousStream(name, f"the bucket has {len(signed)} copies of this name; choose {listed}")  # fmt: skip
    return signed[0]


def _keys(stores: Stores, lost: LostStream) -> list[ClusterKey]:
    """Return the keys of a stream that this keyring has."""
    ids = dict.fromkeys(public_id(signed.public_key) for signed in lost.orders)
    return [key for key_id in ids if (key := stores.runtime.keyring.by_id(key_id)) is not None]


async def _described(
    stores: Stores, name: str, uuid: str, until_s: float, asked: float
) -> StreamInfo:
    """Return a stream when the relay finds it by its name, and not only by its uuid."""
    while True:
        stores.forget(name)
        stores.forget(name, uuid)
        found = await stores.describe(name, uuid, timeout=seconds_left(until_s), asked=asked)
        holders = await stores.holders.find(
            name, [found.order.key_id], timeout=seconds_left(until_s)
        )
        if any(holder.uuid == uuid for holder in holders) or time.monotonic() >= until_s:
            return stream_info(found)
        await asyncio.sleep(LOOK_S)
