"""Lists the streams and consumers of all stores, and describes them to users."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Final

from msgspec import Struct, structs

from iris.crypto.keys import ClusterKey, public_id
from iris.deadlines import seconds_left
from iris.errors import NoStream, RequestError, StreamError, StreamUnavailable
from iris.streams.stores import Stores
from iris.streams.verified import VerifiedStream
from iris.wire.consumers import ConsumerInfo, Consumers, DescribeConsumers
from iris.wire.orders import DEAD
from iris.wire.streams import Described, Listed, ListStreams, Supersede

MAX_FOUND: Final = 16_384
"""Streams or consumers accepted from one store, three times what a store keeps. More cannot be genuine."""


class StreamInfo(Struct, frozen=True):
    """A stream as its store reports it. A limit of 0 means unlimited; `_us` times are µs since 1970."""

    name: str
    uuid: str
    """Identity of the log, in hex; a stream that is deleted and created again has another."""
    topic: str
    cluster: str
    max_bytes: int
    max_messages: int
    max_age: float
    """In seconds."""
    compact: bool
    paused: bool
    oldest: int
    end: int
    """The offset that the next message gets."""
    messages: int
    size_bytes: int
    epoch: int
    created_us: int
    store: str
    """The store's id, in hex."""
    host: str
    lost_messages: int
    """Messages that the store could not record since it started; gaps report them."""
    failed: str
    """Why the stream cannot be written or read; empty if it can."""
    key_ids: list[str]
    mirror: str = ""
    """For a copy, the uuid of the log that it copies, in hex; empty once it is promoted."""
    source: str = ""
    """Name of that log at its own site."""
    lag: int | None = None
    """How many messages a copy is behind its source; None until a mirror has reported since the store started."""
    heard_us: int = 0
    """When a mirror last reported; 0 if not since the store started."""
    consumers_paused: bool = False
    """Consumers receive nothing while recording goes on."""
    dedup_window: float = 0.0
    """Seconds for which message ids are remembered."""
    durability: str = "disk"
    """Where acknowledged messages are: on the store's "disk", or in a "bucket"."""
    moved_bytes: int = 0
    """The part of `size_bytes` that is in the bucket alone, because it is over the limit of the store's disk."""
    partitions: int = 1
    """How many partitions the stream has. The figures are those of partition 0: see `Streams.partitions`."""
    partition: int = 0
    """Which partition of its stream this is."""
    parent: str = ""
    """For partition 1 and up: the uuid of the stream, which is that of partition 0."""
    successor: str = ""
    """The uuid of the copy to which the stream is being handed over, in hex; else empty."""
    superseded_by: str = ""
    """The uuid of the log that has taken the place of this one, which is only read; else empty."""
    superseded_at: int = 0
    """The offset from which on that log has other messages than this one."""
    replaces: str = ""
    """The uuid of the log whose place this one has taken, or is to take; else empty."""
    replaced_at: int = 0
    """The offset from which on that log has other messages than this one."""


async def list_streams(stores: Stores, timeout: float) -> list[VerifiedStream]:
    """Return the streams under this keyring's keys, of every store the local relay knows. Raises StreamUnavailable."""
    until_s = time.monotonic() + timeout
    keys = {key.key_id: key for keys in stores.runtime.keyring.entries().values() for key in keys}
    holders = await stores.holders.every(timeout=timeout)
    found: dict[tuple[str, bytes], Described] = {}
    # A store lists the streams of a key only to holders of that key.
    for address in sorted({holder.uuid for holder in holders}):
        for key in keys.values():
            for described in await _list_store(stores, address, key, until_s):
                found[address, described.uuid] = described
    streams = []
    for described in found.values():
        with contextlib.suppress(StreamError):  # no key of ours signed it, whatever the store says
            streams.append(stores.verified(described.definition.name, described))
    await _show_superseded(stores, streams, until_s)
    return streams


async def _show_superseded(
    stores: Stores, streams: Iterable[VerifiedStream], until_s: float
) -> None:
    """Show stores that have come back which of their streams others have taken the place of."""
    there = {stream.order.uuid: stream for stream in streams if not stream.dead}
    for stream in there.values():
        definition = stream.order.definition
        old = None if definition.replaces is None else there.get(definition.replaces.uuid)
        if old is None or definition.mirror or old.described.superseded is not None:
            continue
        key = stores.runtime.keyring.by_id(old.order.key_id)
        call = Supersede(stream.described.orders)
        with contextlib.suppress(StreamError, RequestError):  # who uses them meets the same
            await stores.ask(
                old.order.uuid.hex(), key, call, Described, timeout=seconds_left(until_s), shown=old.name, writes=True
            )  # fmt: skip


def stray(stream: VerifiedStream, streams: Iterable[VerifiedStream]) -> str:
    """Return why a partition does not belong to any of `streams`; "" if it does, or if it is a whole stream."""
    definition = stream.order.definition
    if not definition.parent:
        return ""
    for other in streams:
        if other.order.uuid == definition.parent and not other.dead:
            if stream.order.uuid in other.order.definition.partitions:
                return ""
            return "it is not used: it was created as a partition, and its stream does not list it; it can be deleted"
    return "partition 0 of its stream was not found: its store is away, or the stream was deleted"


async def _list_store(
    stores: Stores, address: str, key: ClusterKey, until_s: float
) -> list[Described]:
    """Return the streams that one store has under one key."""
    found: list[Described] = []
    after, more = "", True
    while more and len(found) < MAX_FOUND:
        call = ListStreams(after)
        try:
            listed = await stores.ask(
                address, key, call, Listed, timeout=seconds_left(until_s), shown="list", own=True
            )
        except NoStream:
            break  # the store has nothing under the key, or has just left
        except RequestError as err:
            detail = f"store {address[:8]} did not answer: {err.detail}"
            raise StreamUnavailable("list", detail) from err
        found += [
            one for one in listed.streams if public_id(one.holder or one.store).hex() == address
        ]
        more = listed.more and bool(listed.streams)
        if more:
            last = listed.streams[-1]
            after = f"{last.definition.name} {last.uuid.hex()}"
    return found


async def list_consumers(
    stores: Stores, name: str, uuid: str, timeout: float
) -> list[ConsumerInfo]:
    """Return the consumers of a stream and their positions, by name. Raises StreamError."""
    found: list[ConsumerInfo] = []
    more, until_s = True, time.monotonic() + timeout
    _, session = await stores.runtime.ready(name, timeout)
    workers = not session.has_ticket
    while more and len(found) < MAX_FOUND:
        call = DescribeConsumers(found[-1].name if found else "", workers)
        answer = await stores.ask_stream(
            name, uuid, call, Consumers, timeout=seconds_left(until_s), asked=timeout
        )
        found += answer.consumers
        more = answer.more and bool(answer.consumers)
    return found


def stream_info(stream: VerifiedStream) -> StreamInfo:
    """Return the description of a stream for users."""
    found, definition = stream.described, stream.order.definition
    if stream.dead:
        definition = structs.replace(
            definition, name=definition.name + DEAD, topic="", cluster="", mirror="", origins=(),
            consuming_paused=False, dedup_window_us=0, replaces=None, successor=b"",
        )  # fmt: skip
    source = definition.origins[-1].name if definition.mirror else ""
    over, before = found.superseded, definition.replaces
    heard = bool(source) and found.heard_us > 0
    return StreamInfo(
        definition.name, found.uuid.hex(), definition.topic, definition.cluster, definition.max_bytes, definition.max_messages,
        definition.max_age_us / 1e6, definition.compact, definition.paused, found.oldest, found.next, found.messages, found.size_bytes,
        found.epoch, found.created_us, public_id(found.holder or found.store).hex(), found.label, found.lost, found.failed,
        [public_id(signed.public_key).hex() for signed in found.orders], definition.mirror, source,
        max(0, found.source_next - found.next) if heard else None, found.heard_us if heard else 0,
        definition.consuming_paused, definition.dedup_window_us / 1e6, "bucket" if found.holder else "disk",
        found.moved_bytes,
        len(definition.partitions) + 1, definition.partition, definition.parent.hex(),
        definition.successor.hex(), "" if over is None else over.uuid.hex(), 0 if over is None else over.next,
        "" if before is None else before.uuid.hex(), 0 if before is None else before.next,
    )  # fmt: skip
