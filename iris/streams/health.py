"""Asks every store of the site for its state. No key is needed, and the answer names no streams."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from iris.deadlines import deadline, seconds_left
from iris.errors import NoStream, RequestError, StreamError
from iris.streams.stores import Stores
from iris.wire.streams import FindStore, StoreInfo


class StoreHealth(Struct, frozen=True):
    """A store and the state of its bucket."""

    store: str
    """The store's id, in hex."""
    host: str
    """Empty if the store did not answer."""
    error: str = ""
    """Why the store did not answer; empty if it did."""
    has_bucket: bool = False
    away: str = ""
    """Why the store cannot write to its bucket now; empty if it can."""
    waiting_bytes: int = 0
    """Bytes that wait to be written to the bucket."""
    not_taken: str = ""
    """Why the store cannot take over from stores that are gone, although the bucket answers; empty if it can."""
    taken: int = 0
    """How many times another store has taken over streams of this one since its start."""
    taken_s: float = 0.0
    """Seconds since the last time."""
    superseded: int = 0
    """How many streams the store only keeps, because others have taken their places."""
    only_there: int = 0
    """Messages of these streams that the others do not have; a gap counts as one."""


async def health_of_stores(stores: Stores, timeout: float) -> list[StoreHealth]:
    """Return the state of each store that the local relay knows, also of those that do not answer."""
    until_s = deadline(timeout)
    holders = await stores.holders.every(timeout=timeout)

    async def ask(address: str) -> StoreHealth | None:
        try:
            found = await stores.ask(
                address, None, FindStore(), StoreInfo, timeout=seconds_left(until_s), shown=address[:8]
            )  # fmt: skip
        except NoStream:
            return None  # it has just left
        except (StreamError, RequestError) as err:
            return StoreHealth(address, "", err.detail)
        return _health(address, found)

    found = await asyncio.gather(*map(ask, sorted({holder.uuid for holder in holders})))
    return [one for one in found if one is not None]


def _health(address: str, found: StoreInfo) -> StoreHealth:
    state = found.bucket
    if state is None:
        return StoreHealth(
            address, found.label, has_bucket=bool(found.group), superseded=found.superseded, only_there=found.only_there
        )  # fmt: skip
    return StoreHealth(
        address, found.label, "", True, state.away, state.waiting, state.left, state.taken, float(state.taken_s),
        found.superseded, found.only_there,
    )  # fmt: skip
