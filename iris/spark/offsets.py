"""Offsets as Spark checkpoints them: Kafka's JSON, with the stream's uuid added.

    {"orders": {"0": 23, "1": 7, "log": "5f0c…"}}

23 is the next offset of partition 0, and 7 that of partition 1. `log` is the uuid of partition 0, and so of the stream.
A stream that was deleted and created again has another one, and offsets that start at 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from msgspec import Struct

from iris.spark.errors import CONFIG, DATA_LOSS, SparkError
from iris.spark.options import partition_number
from iris.wire.orders import partition_name

LOG: Final = "log"
K = TypeVar("K", str, "Part")


class Part(NamedTuple):
    """A partition of a stream."""

    stream: str
    partition: int

    def __str__(self) -> str:
        return partition_name(self.stream, self.partition)


class Position(Struct, frozen=True):
    """A position in a partition: the uuid of its stream, and the next offset to read."""

    uuid: str
    offset: int


Offsets = dict[Part, Position]


def encode_offsets(offsets: Offsets) -> dict[str, Any]:
    """Return offsets in the form that Spark writes to its checkpoint."""
    encoded: dict[str, Any] = {}
    for (stream, partition), position in sorted(offsets.items()):
        encoded.setdefault(stream, {LOG: position.uuid})[str(partition)] = position.offset
    return encoded


def decode_offsets(found: Any) -> Offsets:
    """Return the offsets of a checkpoint. Raises SparkError if the iris source did not write it."""
    try:
        offsets = {
            Part(stream, partition_number(partition)): Position(positions[LOG], offset)
            for stream, positions in found.items()
            for partition, offset in {"0": positions["0"], **positions}.items()
            if partition != LOG
        }
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise SparkError(
            CONFIG,
            f"the checkpoint was not written by the iris source: {str(found)[:120]}; use another one",
        ) from err
    for part, position in offsets.items():
        if (
            type(position.offset) is not int
            or position.offset < 0
            or type(position.uuid) is not str
        ):
            raise SparkError(
                CONFIG, f"the checkpoint has no valid offset for '{part}'; use another one"
            )
    return offsets


def check_same_log(
    name: str, before: Position, uuid: str, replaces: str = "", replaced_at: int = 0
) -> None:
    """Raise SparkError if the stream is another log now: the old offsets would mean other rows. `replaces`: the uuid of
    the log whose place it has taken, if any, and up to where both have the same messages.
    """
    if before.uuid != uuid and before.uuid == replaces:
        raise SparkError(
            DATA_LOSS,
            f"stream {name!r}: log {before.uuid} was superseded by log {uuid}, which has its name now; both have the same "
            f"messages below offset {replaced_at}. Start the query with a new checkpoint, and as startingOffsets the "
            f"offsets of the old one, or {replaced_at} if they are higher",
        )
    if before.uuid != uuid:
        raise SparkError(
            DATA_LOSS,
            f"stream {name!r} was deleted and created again: it was log {before.uuid} and is log {uuid} now. "
            "Start the query with a new checkpoint",
        )


def split(start: int, end: int, parts: int, most: int) -> list[tuple[int, int]]:
    """Split [start, end) into at least `parts` ranges, none empty and none longer than `most` (0: no limit)."""
    total = end - start
    if total <= 0:
        return []
    parts = max(1, parts, -(-total // most) if most else 1)
    parts = min(parts, total)
    cuts = [start + total * i // parts for i in range(parts + 1)]
    return list(pairwise(cuts))


def spread(wanted: dict[K, int], most: int) -> dict[K, int]:
    """Return how many messages of each partition to read, in proportion to `wanted`, `most` in total (0: no limit)."""
    total = sum(wanted.values())
    if not most or total <= most:
        return dict(wanted)
    taken = {name: count * most // total for name, count in wanted.items()}
    left = most - sum(taken.values())
    # Partitions whose share was rounded to 0 come first.
    for name in sorted(
        wanted, key=lambda name: (taken[name] > 0, taken[name] - wanted[name], name)
    ):
        if left and taken[name] < wanted[name]:
            taken[name] += 1
            left -= 1
    return taken
