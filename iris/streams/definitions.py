"""Creates, changes and ends streams, by orders that holders of their keys sign."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from msgspec import structs

from iris.checks import check_number, check_whole
from iris.crypto.keys import ClusterKey, public_id
from iris.deadlines import seconds_left
from iris.errors import ConfigError, NoStream, StreamError, StreamExists
from iris.streams.answers import RevisionTaken
from iris.streams.listing import StreamInfo, stream_info
from iris.streams.signed_orders import (
    Founding,
    orders_to_change,
    orders_to_create,
    orders_to_end,
)
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.names import check_cluster, listed, split_site
from iris.wire.orders import Definition, split_partition
from iris.wire.streams import Change, Create, Delete, Described, Settled, StoreInfo

MOST: Final = (1 << 63) - 1
"""Largest limit of a stream, in its unit: messages, bytes or µs."""
MOST_S: Final = MOST // 1_000_000
DURABILITIES: Final = ("disk", "bucket")
CHANGE_TRIES: Final = 8
"""Attempts to apply a change on top of changes by others, before the caller gets an error."""
_CHANGEABLE: Final = frozenset(
    {"max_bytes", "max_messages", "max_age_us", "compact", "dedup_window_us", "partitions"}
)
"""Fields of a definition that `change` can change."""


def given_fields(
    *, max_age: float | None = None, dedup_window: float | None = None, **given: Any
) -> dict[str, Any]:
    """Return the fields of a definition that are not None; times in seconds become µs."""
    check_limits(given.get("max_bytes"), given.get("max_messages"), max_age, dedup_window)
    for field, seconds in (("max_age_us", max_age), ("dedup_window_us", dedup_window)):
        given[field] = None if seconds is None else round(seconds * 1e6)
    return {field: value for field, value in given.items() if value is not None}


def check_limits(
    max_bytes: int | None, max_messages: int | None, max_age: float | None, dedup_window: float | None
) -> None:  # fmt: skip
    """Raise ConfigError unless the limits of a stream are numbers of at least 0, or None."""
    for name, whole in (("max_bytes", max_bytes), ("max_messages", max_messages)):
        if whole is not None:
            check_whole(name, whole, 0, MOST)
    for name, seconds in (("max_age", max_age), ("dedup_window", dedup_window)):
        if seconds is not None:
            check_number(name, seconds, 0, MOST_S, unit=" s")


def check_durability(durability: str) -> None:
    """Raise ConfigError unless this is where a stream can be."""
    if durability not in DURABILITIES:
        raise ConfigError(f"durability: {durability!r} is unknown; use {' or '.join(DURABILITIES)}")


async def make_stream(
    stores: Stores,
    definition: Definition,
    timeout: float,
    *,
    bucket: bool = False,
    besides: bytes = b"",
    asked: float | None = None,
) -> VerifiedStream:
    """Create a stream, with `bucket` in the bucket of a store that has one; not at the store with the public key
    `besides`, if there is another. If another client created it first, return that one, whatever its definition.
    `asked` is the timeout that errors name, if the caller's was longer.
    """
    name, asked = definition.name, timeout if asked is None else asked
    until_s = time.monotonic() + timeout
    store = await stores.find_store(
        name, timeout=seconds_left(until_s), bucket=bucket, besides=besides
    )
    for last in (False, True):
        try:
            await make_log(
                stores, definition, Founding(keys_of(stores, definition)), store, seconds_left(until_s), bucket=bucket, asked=asked
            )  # fmt: skip
            break
        except StreamExists:
            try:
                return await stores.describe(name, "", timeout=seconds_left(until_s), asked=asked)
            except NoStream:
                if last:
                    raise
                # The store was killed between our first try and the log's first write. The uuid cannot be used again.
    stores.note_created(name)
    # The local relay learns of the new stream within milliseconds, so its creator can use it at once.
    # The answer to a create came without a channel, so describe the stream again through one.
    return await stores.describe(name, "", timeout=seconds_left(until_s), asked=asked)


async def make_log(
    stores: Stores, definition: Definition, founding: Founding, store: StoreInfo, timeout: float, *, bucket: bool, asked: float
) -> None:  # fmt: skip
    """Create a log at a store. Raises StreamExists if the store has another stream of this name."""
    name, address = definition.name, public_id(store.key).hex()
    owner = store.group if bucket else store.key
    call = Create(orders_to_create(definition, founding, owner), founding.salt)

    async def once(left_s: float) -> Described:
        return await stores.ask(
            address, None, call, Described, timeout=left_s, shown=name, writes=True
        )

    await stores.retry(name, "", once, timeout=timeout, asked=asked)


async def redefine(
    stores: Stores, name: str, uuid: str, redefined: Callable[[Definition], Definition | None], timeout: float
) -> StreamInfo:  # fmt: skip
    """Change a stream's definition to what `redefined` returns for it; None means that no change is needed.

    If another client's change comes first, apply this one on top of it.
    """
    until_s = time.monotonic() + timeout
    found = await stores.describe(name, uuid, timeout=timeout)
    check_not_dead_letters(name, found)
    for _ in range(CHANGE_TRIES):
        definition = redefined(found.order.definition)
        if definition is None:
            return stream_info(found)
        log = found.order.uuid.hex()
        keys = keys_of(stores, definition)
        orders = orders_to_change(definition, keys, found, stores.runtime.keyring)
        try:
            changed = await stores.ask_stream(
                name, log, Change(orders), Described, timeout=seconds_left(until_s), asked=timeout, writes=True
            )  # fmt: skip
        except RevisionTaken:
            found = await stores.describe(name, log, timeout=seconds_left(until_s), asked=timeout)
            continue
        stores.forget(name)
        stores.forget(name, uuid)
        return stream_info(stores.verified(name, changed))
    raise StreamError(name, f"others changed it during each of {CHANGE_TRIES} attempts; try again")


async def end_stream(stores: Stores, name: str, uuid: str, timeout: float) -> None:
    """Delete a stream; one that no longer exists counts as deleted."""
    until_s = time.monotonic() + timeout
    found = await stores.describe(name, uuid, timeout=timeout)
    check_not_dead_letters(name, found)
    log = found.order.uuid.hex()
    with contextlib.suppress(NoStream):  # an answer was lost, and the stream is deleted
        for _ in range(CHANGE_TRIES):
            orders = orders_to_end(found, stores.runtime.keyring)
            try:
                await stores.ask_stream(
                    name, log, Delete(orders), Settled, timeout=seconds_left(until_s), writes=True
                )
                break
            except RevisionTaken:
                found = await stores.describe(
                    name, log, timeout=seconds_left(until_s), asked=timeout
                )
        else:
            raise StreamError(
                name, f"others changed it during each of {CHANGE_TRIES} attempts; try again"
            )
    stores.forget_deleted(name, log)


def promoted(name: str, definition: Definition, record: bool) -> Definition | None:
    """Return the definition of a copy after its promotion, None if it was promoted before. Raises StreamError."""
    if not definition.mirror:
        if definition.origins:
            return None
        raise StreamError(name, "it is not a copy of another stream, so it cannot be promoted")
    if definition.partitions or definition.parent:
        raise StreamError(name, "it is a copy with several partitions, which takes the place of its source or stays a copy: use `iris stream handover`, or `promote --as` if the source is lost")  # fmt: skip
    source = definition.origins[-1]
    topic, cluster = (source.topic, source.cluster) if record else ("", "")
    return structs.replace(definition, mirror="", topic=topic, cluster=cluster)


def keys_of(stores: Stores, definition: Definition) -> list[ClusterKey]:
    """Return every key of this keyring for a stream, for what it records, and for the sources of a copy."""
    keyring = stores.runtime.keyring
    of = split_partition(definition.name)[0] if definition.parent else definition.name
    keys = [*(keyring.for_cluster(of) or stores.keys(of))]
    keys += keyring.for_filter(definition.topic) if definition.topic else ()
    keys += keyring.for_cluster(definition.cluster) if definition.cluster else ()
    for origin in definition.origins:
        name = split_partition(origin.name)[0] if definition.parent else origin.name
        keys += keyring.for_cluster(name)
        keys += keyring.for_filter(origin.topic) if origin.topic else ()
        keys += keyring.for_cluster(origin.cluster) if origin.cluster else ()
    return list({key.key_id: key for key in keys}.values())


def check_same(
    found: VerifiedStream, definition: Definition, partitions: int = 1, *, bucket: bool = False
) -> StreamInfo:
    """Return the stream's info.

    Raises StreamExists if its definition or its number of partitions differs, or if it must be in a `bucket` and is on
    a disk.
    """
    existing = structs.replace(found.order.definition, partitions=())
    if not existing.mirror:  # a copy that was promoted is the stream now
        existing = structs.replace(existing, origins=(), replaces=None, successor=b"")
    has = len(found.order.definition.partitions) + 1
    plain = structs.replace(existing, paused=False, consuming_paused=False)
    held = f"it exists in the store on {found.described.label} as log {found.order.uuid.hex()}"
    if plain == definition and has == partitions:
        if bucket and not found.described.holder:
            advice = f"bring it into a bucket with `iris stream handover {definition.name} NEW`"
            raise StreamExists(definition.name, f"{held}, with durability 'disk'; {advice}")
        return stream_info(found)
    differ = [
        field
        for field in definition.__struct_fields__
        if getattr(existing, field) != getattr(definition, field)
    ]
    if has != partitions:
        differ.append("partitions")
    named = listed([field.removesuffix("_us") for field in differ])
    if has != partitions:
        named += f" ({has}, not {partitions})"
    advice = (
        "change it with `iris stream change`"
        if _CHANGEABLE.issuperset(differ) and has <= partitions
        else "use another name, or the same definition"
    )
    raise StreamExists(definition.name, f"{held}, and differs in {named}; {advice}")


def check_not_dead_letters(name: str, found: VerifiedStream) -> None:
    """Raise StreamError for a dead-letter stream, which has no orders of its own."""
    if found.dead:
        of = found.order.definition.name
        raise StreamError(
            name, f"dead letters cannot be changed or deleted on their own; change or delete {of!r}"
        )


def check_local_name(name: str) -> None:
    """Raise ConfigError unless the name is that of a stream of the local site."""
    check_cluster(name)
    if split_site(name)[0]:
        raise ConfigError(
            f"name: {name!r} names a site; create the stream without it, with a client of that site"
        )


def check_unreserved(name: str) -> None:
    """Raise ConfigError if a new stream of this name would look like a partition of another stream."""
    of, number = split_partition(name)
    if number:
        raise ConfigError(
            f"name: {name!r} is the name of partition {number} of a stream {of!r}; choose a name that does not end in "
            "'/' and a number"
        )
