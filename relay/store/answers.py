"""Converts items of a log and outcomes of appends to and from the structs that travel in answers."""

from __future__ import annotations

from typing import Final

from iris.errors import IrisError
from iris.wire import stream_items, streams
from iris.wire.codec import END
from relay.store.log import Chunk
from relay.store.outcomes import Conflict, Duplicate, Fenced, Outcome, OutOfOrder, Stored
from relay.store.records import Gap, Hole, Item, Reason, Record

RECORD_BYTES: Final = 640
"""Upper bound of what a record needs in an answer besides its body: names, ids, numbers."""
GAP_BYTES: Final = 1200
"""Upper bound of a gap in an answer."""


def item_to_wire(item: Item) -> stream_items.Item:
    """Return the wire form of an item of a log."""
    if isinstance(item, Record):
        return stream_items.Record(
            item.first, item.kind, item.name, item.key_id, item.sender_id, item.end, item.body, item.stored_us,
            item.key_hash or b"", item.tombstone, item.expires_us, item.due_us, item.deferred,
        )  # fmt: skip
    if isinstance(item, Gap):
        return stream_items.Gap(item.first, item.count, item.cause[:1024], item.stored_us)
    return stream_items.Hole(item.first, item.next, int(item.reason))


def item_from_wire(item: stream_items.Item) -> Item:
    """Return the log's form of a received item of another log. Raises ValueError."""
    if isinstance(item, stream_items.Record):
        return Record(
            item.offset, END.unpack(item.end)[2], item.kind, item.name, item.key_id, item.sender_id, item.end, item.body,
            item.stored_us, item.key_hash or None, item.tombstone, item.expires_us, item.due_us, item.deferred,
        )  # fmt: skip
    if isinstance(item, stream_items.Gap):
        return Gap(item.offset, item.count, item.cause, item.stored_us)
    reason = Reason(item.reason)
    if reason == Reason.DEFERRED:
        raise ValueError(
            "items: a hole cannot have the reason DEFERRED; a copy contains the deferred records of its source"
        )
    return Hole(item.offset, item.next, reason)


def items_to_wire(chunk: Chunk, limit: int, start: int) -> tuple[list[stream_items.Item], int]:
    """Return the first items of a chunk that fit into an answer of `limit` bytes, at least one, and
    the offset after them.
    """
    items: list[stream_items.Item] = []
    used = 0
    end = start
    for item in chunk.items:
        used += len(item.body) + RECORD_BYTES if isinstance(item, Record) else GAP_BYTES
        if items and used > limit:
            break
        items.append(item_to_wire(item))
        end = item.next
    return items, end


def outcome_to_wire(outcome: Outcome) -> streams.Outcome:
    """Return the wire form of an append's outcome."""
    if isinstance(outcome, Stored):
        return streams.Outcome(streams.STORED, outcome.first)
    if isinstance(outcome, Duplicate):
        return streams.Outcome(streams.DUPLICATE, outcome.first)
    if isinstance(outcome, OutOfOrder):
        return streams.Outcome(streams.OUT_OF_ORDER, outcome.expected)
    if isinstance(outcome, Fenced):
        return streams.Outcome(streams.FENCED, outcome.epoch)
    if isinstance(outcome, Conflict):
        return streams.Outcome(streams.CONFLICT, outcome.next)
    raise IrisError(f"unknown outcome of type {type(outcome).__name__}")
