"""Moves a stream of a bucket to another store of the bucket."""

from __future__ import annotations

import asyncio
import time

from iris.crypto.keys import public_id
from iris.deadlines import seconds_left
from iris.errors import ConfigError, NoStream, RequestError, StreamError, StreamUnavailable
from iris.streams.answers import RevisionTaken
from iris.streams.definitions import CHANGE_TRIES, check_not_dead_letters
from iris.streams.listing import StreamInfo, stream_info
from iris.streams.signed_orders import orders_to_move
from iris.streams.stores import Stores
from iris.wire.orders import split_partition
from iris.wire.streams import FindStore, Move, Moving, Settled, StoreInfo, Take

LOOK_S = 0.05
"""Pause until a new holder is looked for again."""


async def move_stream(stores: Stores, name: str, to: str, uuid: str, timeout: float) -> StreamInfo:
    """Move a stream to the store `to`; return it as that store describes it.

    Raises ConfigError if `to` names no store that can take it; StreamError.
    """
    until_s = time.monotonic() + timeout
    found = await stores.describe(name, uuid, timeout=timeout)
    check_not_dead_letters(name, found)
    if not found.described.holder:
        raise StreamError(
            name,
            f"it is on the disk of the store on {found.described.label} and cannot be moved; only a stream in a bucket "
            f"can, and `iris stream handover {split_partition(name)[0]} NEW` brings a stream into a bucket",
        )
    there = await _stores_of_bucket(stores, name, found.order.store, until_s)
    target = _chosen(to, there, found.described.holder)
    log, address = found.order.uuid.hex(), public_id(target.key).hex()
    for _ in range(CHANGE_TRIES):
        call = Move(orders_to_move(found, stores.runtime.keyring, target.key))
        try:
            moving = await stores.ask_stream(
                name, log, call, Moving, timeout=seconds_left(until_s), asked=timeout, writes=True
            )
            break
        except RevisionTaken:
            found = await stores.describe(name, log, timeout=seconds_left(until_s), asked=timeout)
    else:
        raise StreamError(name, f"others changed it during each of {CHANGE_TRIES} attempts; try again")  # fmt: skip

    async def take(left_s: float) -> Settled:
        return await stores.ask(
            address, None, Take(moving.ticket), Settled, timeout=left_s, shown=name, writes=True
        )

    try:
        await stores.retry(name, log, take, timeout=seconds_left(until_s), asked=timeout)
    except NoStream as err:
        raise StreamUnavailable(
            name,
            f"the store on {target.label} has just gone away, so the stream stays where it was; try again",
        ) from err
    # Our relay learns of the new holder within milliseconds.
    while True:
        stores.forget(name, uuid)
        stores.forget(name, log)
        found = await stores.describe(name, log, timeout=seconds_left(until_s), asked=timeout)
        if found.described.holder == target.key:
            stores.forget(name)
            return stream_info(found)
        if time.monotonic() >= until_s:
            raise StreamUnavailable(
                name,
                f"the stream was moved to the store on {target.label}, but the relay does not know that yet; try again",
            )
        await asyncio.sleep(LOOK_S)


async def _stores_of_bucket(
    stores: Stores, name: str, group: bytes, until_s: float
) -> list[StoreInfo]:
    """Return the stores that share the bucket with the public key `group` and answer now."""
    there: list[StoreInfo] = []
    holders = await stores.holders.every(timeout=seconds_left(until_s))
    for address in sorted({holder.uuid for holder in holders}):
        try:
            info = await stores.ask(
                address, None, FindStore(), StoreInfo, timeout=seconds_left(until_s), shown=name
            )
        except (StreamError, RequestError):
            continue  # it has just left
        if info.group == group:
            there.append(info)
    return there


def _chosen(to: str, there: list[StoreInfo], holder: bytes) -> StoreInfo:
    """Return the store that `to` names, by its host or by the beginning of its id; not the one with the key `holder`.

    Raises ConfigError.
    """
    others = [one for one in there if one.key != holder]
    listed = ", ".join(f"{public_id(one.key).hex()[:8]} on {one.label}" for one in others)
    advice = (
        f"name one of {listed}" if others else "no other store of the stream's bucket is there now"
    )
    named = [one for one in there if one.label == to]
    if not named and len(to) >= 4:
        named = [one for one in there if public_id(one.key).hex().startswith(to.lower())]
    if len(named) > 1:
        ids = " or ".join(public_id(one.key).hex()[:8] for one in named if one.key != holder)
        raise ConfigError(f"to: {to!r} means {len(named)} stores of the bucket; name the one that you mean by its id: {ids}")  # fmt: skip
    if not named:
        raise ConfigError(f"to: no store of the stream's bucket is called {to!r}; {advice}")
    if named[0].key == holder:
        raise ConfigError(f"to: the stream is at the store {to!r} already; {advice}")
    return named[0]
