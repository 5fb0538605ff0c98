"""Partitions of a stream: which logs they are, which one a key belongs to, and how they are made and found.

Partition 0 is the log that has the stream's name. Its definition names the logs of the others; see docs/protocol.md,
§19.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct, structs

from iris.checks import check_whole
from iris.core.placement import jump, place
from iris.crypto.keys import ClusterKey, public_id
from iris.deadlines import seconds_left
from iris.errors import (
    ConfigError,
    ConnectionLost,
    DecodeError,
    KeyringError,
    NoStream,
    RequestError,
    StreamError,
    StreamExists,
    StreamUnavailable,
)
from iris.streams.answers import RevisionTaken
from iris.streams.definitions import (
    CHANGE_TRIES,
    end_stream,
    keys_of,
    make_log,
    redefine,
)
from iris.streams.listing import StreamInfo, stream_info
from iris.streams.signed_orders import Founding, orders_to_change
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.names import listed, split_site
from iris.wire.orders import (
    MAX_PARTITIONS,
    Definition,
    check_definition,
    decode_order,
    partition_name,
    split_partition,
)
from iris.wire.streams import Change, Described, FindStore, StoreInfo

NO_PARTITIONS: Final = (
    "partition: stream {name!r} has no partition {partition}; it has one, number 0"
)
_LABEL: Final = b"iris-partition-1"
_ID_LABEL: Final = b"iris-partition-2"


class Layout(Struct, frozen=True):
    """The logs of a stream: `uuids` are in hex, that of partition 0 first."""

    name: str
    """As the caller wrote it, with the site if it named one."""
    uuids: tuple[str, ...]
    key: ClusterKey | None
    """The key by which message keys choose partitions; None if there is nothing to choose."""
    placing: str = ""
    """The uuid, in hex, with which message keys choose partitions: that of the first origin of partition 0, if any."""

    def __len__(self) -> int:
        return len(self.uuids)

    def log(self, partition: int) -> tuple[str, str]:
        """Return the (name, uuid) of a partition's log.

        Raises ConfigError if the stream has no such partition.
        """
        if not 0 <= partition < len(self.uuids):
            last = len(self.uuids) - 1
            if not last:
                raise ConfigError(NO_PARTITIONS.format(name=self.name, partition=partition))
            raise ConfigError(
                f"partition: stream {self.name!r} has no partition {partition}; its partitions are 0 to {last}"
            )
        return partition_name(self.name, partition), self.uuids[partition]

    def of_key(self, key: bytes) -> int:
        """Return the partition of a message key. The stores cannot compute it."""
        return self._chosen(_LABEL, key)

    def of_id(self, message_id: bytes) -> int:
        """Return the partition of a message that has no key, from its id."""
        return self._chosen(_ID_LABEL, message_id)

    def _chosen(self, label: bytes, text: bytes) -> int:
        if self.key is None:
            return 0
        said = label + bytes.fromhex(self.placing or self.uuids[0]) + text
        digest = hmac.digest(self.key.key_hash_key, said, "sha256")
        return jump(int.from_bytes(digest[:8], "little"), len(self.uuids))


def layout_of(stores: Stores, name: str, stream: VerifiedStream) -> Layout:
    """Return the partitions that a stream's definition names. Dead letters are one log.

    Raises StreamError if partitions were added under a key that is not in this keyring, so that some are unknown.
    """
    order, keyring = stream.order, stores.runtime.keyring
    if stream.dead:
        return Layout(name, (stream.described.uuid.hex(),), None)
    key = None
    for signed in stream.described.orders:
        found = keyring.by_id(public_id(signed.public_key))
        key = found if key is None else key
        if found is not None:
            continue
        with contextlib.suppress(DecodeError):
            other = decode_order(signed.order)
            if other.revision > order.revision and len(other.definition.partitions) > len(
                order.definition.partitions
            ):
                raise StreamError(
                    name,
                    f"partitions were added to it under key {other.key_id.hex()[:8]}, which is not in this keyring; add that key to the keyring",
                )
    uuids = (order.uuid, *order.definition.partitions)
    if key is None and len(uuids) > 1:  # an order was verified, so the keyring has changed since
        raise KeyringError(f"the keyring has no key for stream {name!r}")
    placing = order.definition.key_uuid(order.uuid).hex()
    layout = Layout(name, tuple(uuid.hex() for uuid in uuids), key, placing)
    for partition in range(len(layout)):
        stores.expect(*layout.log(partition))
    return layout


async def find_layout(stores: Stores, name: str, uuid: str, *, timeout: float) -> Layout:
    """Look up the partitions of a stream. Raises StreamError."""
    return layout_of(stores, name, await stores.describe(name, uuid, timeout=timeout))


def check_whole_stream(name: str, partitions: int, what: str) -> None:
    """Raise StreamError if a stream has several partitions. `what` says which call works on one of them."""
    if partitions > 1:
        raise StreamError(
            name,
            f"it has {partitions} partitions, and `{what}` works on one; name it, such as partition=0",
        )


# -- making --------------------------------------------------------------------------------------------------------


async def make_partitioned(
    stores: Stores,
    definition: Definition,
    count: int,
    timeout: float,
    *,
    bucket: bool,
    asked: float,
) -> VerifiedStream:
    """Create a stream with `count` partitions. If another client creates it first, return that one.

    Raises StreamError. Then no logs are left, or the error names those that are.
    """
    check_count(count)
    name, until_s = definition.name, time.monotonic() + timeout
    there = await site_stores(stores, name, until_s, bucket=bucket)
    founding = Founding(keys_of(stores, definition))
    placed = place(name, range(count), there)
    made = await _make_logs(
        stores,
        definition,
        founding.uuid,
        {n: there[placed[n]] for n in range(1, count)},
        until_s,
        bucket,
    )
    whole = structs.replace(definition, partitions=tuple(made.values()))
    try:
        await make_log(
            stores, whole, founding, there[placed[0]], seconds_left(until_s), bucket=bucket, asked=asked
        )  # fmt: skip
    except (StreamError, RequestError) as err:
        if isinstance(err, StreamError) and not err.may_have_run:
            await unmake(stores, name, made, until_s)
        if isinstance(err, StreamExists):
            return await stores.describe(name, "", timeout=seconds_left(until_s), asked=asked)
        raise
    stores.note_created(name)
    found = await stores.describe(name, "", timeout=seconds_left(until_s), asked=asked)
    layout_of(stores, name, found)
    return found


async def add_partitions(
    stores: Stores, name: str, uuid: str, count: int, timeout: float
) -> VerifiedStream:
    """Give a stream more partitions, up to `count`. Raises ConfigError if it has more already; StreamError."""
    check_count(count)
    until_s = time.monotonic() + timeout
    for _ in range(CHANGE_TRIES):
        found = await stores.describe(name, uuid, timeout=seconds_left(until_s), asked=timeout)
        definition = found.order.definition
        log = found.order.uuid.hex()
        has = len(layout_of(stores, name, found))
        if has > count:
            raise ConfigError(
                f"partitions: stream {name!r} has {has}, and partitions cannot be removed; create another stream"
            )
        if has == count:
            return found
        if definition.parent or found.dead:
            raise StreamError(
                name,
                "it is a partition or a stream of dead letters, and these have no partitions; name the whole stream",
            )
        check_partitioned(structs.replace(definition, partitions=()), count)
        bucket = bool(found.described.holder)
        there = await site_stores(stores, name, until_s, bucket=bucket)
        infos = await describe_partitions(stores, name, log, seconds_left(until_s))
        held = {info.partition: info.store for info in infos if info.store}
        new = place(definition.name, range(has, count), there, held)
        plain = structs.replace(definition, partitions=())
        chosen = {number: there[store] for number, store in new.items()}
        made = await _make_logs(stores, plain, found.order.uuid, chosen, until_s, bucket)
        whole = structs.replace(definition, partitions=(*definition.partitions, *made.values()))
        try:
            orders = orders_to_change(whole, keys_of(stores, whole), found, stores.runtime.keyring)
            changed = await stores.ask_stream(
                name, log, Change(orders), Described, timeout=seconds_left(until_s), asked=timeout, writes=True
            )  # fmt: skip
        except RevisionTaken:
            await unmake(stores, name, made, until_s)
            continue
        except StreamError as err:
            if not err.may_have_run:
                await unmake(stores, name, made, until_s)
            raise
        stores.forget(name)
        stores.forget(name, uuid)
        verified = stores.verified(name, changed)
        layout_of(stores, name, verified)
        return verified
    raise StreamError(name, f"others changed it during each of {CHANGE_TRIES} attempts; try again")


def check_partitioned(definition: Definition, count: int) -> None:
    """Check the definition of a stream that gets `count` partitions.

    Raises:
        InvalidName: the name is outside the grammar.
        ConfigError: a setting is impossible.
    """
    check_definition(definition)
    check_count(count)
    if count > 1:
        last = partition_name(definition.name, count - 1)
        check_definition(
            structs.replace(definition, name=last, parent=bytes(16), partition=count - 1)
        )


def check_count(count: int) -> None:
    """Raise ConfigError unless a stream can have so many partitions."""
    check_whole("partitions", count, 1, MAX_PARTITIONS)


async def site_stores(
    stores: Stores, name: str, until_s: float, *, bucket: bool
) -> dict[str, StoreInfo]:
    """Return the stores of the site that answer now, by id; with `bucket`, the stores of the largest group.

    Raises StreamUnavailable without any.
    """
    holders = await stores.holders.every(timeout=seconds_left(until_s))

    async def ask(address: str) -> StoreInfo | None:
        with contextlib.suppress(StreamError, RequestError):  # it has just left
            return await stores.ask(
                address, None, FindStore(), StoreInfo, timeout=seconds_left(until_s), shown=name
            )
        return None

    answers = await asyncio.gather(*map(ask, sorted({holder.uuid for holder in holders})))
    able = [one for one in answers if one is not None]
    if bucket:
        groups = Counter(one.group for one in able if one.group)
        largest = max(groups, key=lambda group: (groups[group], group), default=b"-")
        able = [one for one in able if one.group == largest]
    if not able:
        detail = "no store can write to a bucket now" if bucket else "no store answered"
        raise StreamUnavailable(name, f"{detail}; `iris status` shows the stores")
    return {public_id(one.key).hex(): one for one in able}


async def _make_logs(
    stores: Stores, definition: Definition, parent: bytes, where: dict[int, StoreInfo], until_s: float, bucket: bool
) -> dict[int, bytes]:  # fmt: skip
    """Create the logs of partitions, each at its store; return number -> uuid. If one fails, delete the others."""
    made: dict[int, bytes] = {}

    async def make(number: int, store: StoreInfo) -> None:
        name = partition_name(definition.name, number)
        own = structs.replace(definition, name=name, parent=parent, partition=number)
        founding = Founding(keys_of(stores, own))
        left_s = seconds_left(until_s)
        try:
            await make_log(stores, own, founding, store, left_s, bucket=bucket, asked=left_s)
        except StreamError as err:
            if err.may_have_run:
                made[number] = founding.uuid
            raise
        made[number] = founding.uuid
        stores.expect(name, founding.uuid.hex())

    results = await asyncio.gather(
        *(make(number, store) for number, store in where.items()), return_exceptions=True
    )
    failed = next((one for one in results if isinstance(one, BaseException)), None)
    if failed is not None:
        await unmake(stores, definition.name, made, until_s)
        raise failed
    return {number: made[number] for number in sorted(made)}


async def unmake(stores: Stores, name: str, made: dict[int, bytes], until_s: float) -> None:
    """Delete logs that did not become partitions. Those that cannot be deleted now stay; `list` shows them."""

    async def delete(number: int, uuid: bytes) -> None:
        with contextlib.suppress(StreamError, ConnectionLost):
            await end_stream(
                stores, partition_name(name, number), uuid.hex(), max(1.0, seconds_left(until_s))
            )

    await asyncio.gather(*(delete(number, uuid) for number, uuid in made.items()))


# -- all of them ---------------------------------------------------------------------------------------------------


async def describe_partitions(
    stores: Stores, name: str, uuid: str, timeout: float
) -> list[StreamInfo]:
    """Return the partitions of a stream, in order. If the store of one is away, its `failed` says so.

    Raises StreamError if partition 0 cannot be described.
    """
    until_s = time.monotonic() + timeout
    first = await stores.describe(name, uuid, timeout=timeout)
    layout = layout_of(stores, name, first)

    async def describe(partition: int) -> StreamInfo:
        log = layout.log(partition)
        try:
            # Half of the time, so that one that is away does not use up the caller's.
            found = await stores.describe(*log, timeout=seconds_left(until_s) / 2)
        except NoStream:
            return _away(stream_info(first), partition, *log, "its store is away")
        except (StreamError, RequestError) as err:
            return _away(stream_info(first), partition, *log, f"its store is away: {err.detail}")
        return stream_info(found)

    rest = await asyncio.gather(*map(describe, range(1, len(layout))))
    return [stream_info(first), *rest]


def _away(first: StreamInfo, partition: int, name: str, uuid: str, why: str) -> StreamInfo:
    return structs.replace(
        first, name=split_site(name)[1], uuid=uuid, oldest=0, end=0, messages=0, size_bytes=0, epoch=0, created_us=0, store="",
        host="", lost_messages=0, failed=why, moved_bytes=0, partitions=1, partition=partition, parent=first.uuid,
    )  # fmt: skip


async def redefine_all(
    stores: Stores, name: str, uuid: str, redefined: Callable[[Definition], Definition | None], timeout: float
) -> StreamInfo:  # fmt: skip
    """Change the definition of a stream, and of each of its partitions; see `redefine`.

    Raises StreamError that names the partitions that are not changed.
    """
    until_s = time.monotonic() + timeout
    info = await redefine(stores, name, uuid, redefined, timeout)
    if info.partitions == 1:
        return info
    layout = await find_layout(stores, name, uuid, timeout=seconds_left(until_s))
    numbers = range(1, len(layout))
    left = _failed(
        numbers,
        await asyncio.gather(
            *(redefine(stores, *layout.log(n), redefined, seconds_left(until_s)) for n in numbers),
            return_exceptions=True,
        ),
    )
    if left:
        first = next(iter(left.values()))
        raise StreamError(
            name, f"the change did not reach {numbered(left)}; repeat it when their store is back ({first})"
        ) from first  # fmt: skip
    return info


async def delete_stream(stores: Stores, name: str, uuid: str, timeout: float) -> None:
    """Delete a stream with all its partitions, partition 0 first; a stream that no longer exists counts as deleted.

    Raises StreamError, also if `name` is a partition. If partitions are left, the error says how to delete them.
    """
    until_s = time.monotonic() + timeout
    found = await stores.describe(name, uuid, timeout=timeout)
    definition = found.order.definition
    if definition.parent and not found.dead:
        await _check_unused(stores, name, found, seconds_left(until_s))
    layout = layout_of(stores, name, found)
    await end_stream(stores, name, layout.uuids[0] if uuid else "", seconds_left(until_s))
    numbers = range(1, len(layout))
    left = _failed(
        numbers,
        await asyncio.gather(
            *(end_stream(stores, *layout.log(n), seconds_left(until_s)) for n in numbers),
            return_exceptions=True,
        ),
    )
    if left:
        first = next(iter(left.values()))
        commands = "; ".join(
            "iris stream delete {} --uuid {} --yes".format(*layout.log(number)) for number in left
        )
        raise StreamError(
            name, f"the deletion did not reach {numbered(left)}; when their store is back, run: {commands} ({first})"
        ) from first  # fmt: skip


async def _check_unused(stores: Stores, name: str, found: VerifiedStream, timeout: float) -> None:
    """Raise StreamError if the stream that a partition was made for has it."""
    of = split_partition(name)[0]
    with contextlib.suppress(NoStream):
        stream = await stores.describe(of, "", timeout=timeout)
        if found.order.uuid in stream.order.definition.partitions:
            raise StreamError(
                name, f"a partition cannot be deleted alone; delete the stream {of!r}"
            )


def _failed(
    numbers: Sequence[int], results: Sequence[object | BaseException]
) -> dict[int, Exception]:
    """Return the errors of expected kinds by partition; raise any other."""
    found: dict[int, Exception] = {}
    for number, result in zip(numbers, results, strict=True):
        if isinstance(result, StreamError | RequestError):
            found[number] = result
        elif isinstance(result, BaseException):
            raise result
    return found


def numbered(numbers: Iterable[int]) -> str:
    """Return partitions as people name them: "partitions 1 and 3"."""
    words = [str(number) for number in numbers]
    return f"partition{'s' if len(words) > 1 else ''} {listed(words)}"
