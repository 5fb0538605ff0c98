"""The state of a store's bucket, for monitoring."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from iris.wire.streams import BucketState
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.writer import Writer
from relay.store.stream import Stream

MAX_TEXT = 1024
MAX_U32 = 0xFFFFFFFF


class Backlog(Struct, frozen=True):
    """What waits to be written to the bucket."""

    away: str
    """Why nothing can be written now; empty if the bucket answers."""
    bytes: int
    limit: int
    """Bytes beyond which the store accepts nothing more; 0 if nothing can be written."""


def backlog(shelf: Shelf, streams: Iterable[Stream]) -> Backlog:
    """Return what waits for the bucket in the journals of these streams, and in that for new ones."""
    writers: dict[int, Writer] = {
        id(each.replica.writer): each.replica.writer for each in streams if each.replica is not None
    }
    if shelf.writer is not None:
        writers[id(shelf.writer)] = shelf.writer
    going = [writer for writer in writers.values() if not writer.ended]
    failing = next((writer.failing for writer in going if writer.failing), "")
    return Backlog(
        shelf.away or failing,
        sum(writer.backlog for writer in going),
        max((writer.backlog_limit for writer in going), default=0),
    )


def bucket_state(shelf: Shelf, streams: Iterable[Stream]) -> BucketState:
    """Return what a store answers when it is asked about its bucket."""
    waits = backlog(shelf, streams)
    return BucketState(
        waits.away[:MAX_TEXT], waits.bytes, shelf.not_taken[:MAX_TEXT], min(shelf.taken, MAX_U32), min(shelf.taken_s, MAX_U32),
    )  # fmt: skip
