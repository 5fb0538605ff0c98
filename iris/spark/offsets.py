"""Offsets as Spark checkpoints them: Kafka's JSON, with the log's uuid added.

    {"orders": {"0": 23, "log": "5f0c…"}}

A stream has one partition, 0; 23 is the next offset. `log` is the uuid of the log. A stream that was deleted and
created again is another log, whose offsets start at 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from msgspec import Struct

from iris.spark.errors import CONFIG, DATA_LOSS, SparkError


class Position(Struct, frozen=True):
    """A position in a log: its uuid, and the next offset to read."""

    uuid: str
    next: int


Offsets = dict[str, Position]
"""Stream -> position."""


def encode_offsets(offsets: Offsets) -> dict[str, Any]:
    """Return offsets in the form that Spark writes to its checkpoint."""
    return {
        name: {"0": position.next, "log": position.uuid}
        for name, position in sorted(offsets.items())
    }


def decode_offsets(found: Any) -> Offsets:
    """Return the offsets of a checkpoint. Raises SparkError if the iris source did not write it."""
    try:
        offsets = {
            name: Position(position["log"], position["0"]) for name, position in found.items()
        }
    except (AttributeError, KeyError, TypeError) as err:
        raise SparkError(
            CONFIG,
            f"the checkpoint was not written by the iris source: {str(found)[:120]}; use another one",
        ) from err
    for name, position in offsets.items():
        if type(position.next) is not int or position.next < 0 or type(position.uuid) is not str:
            raise SparkError(
                CONFIG, f"the checkpoint has no valid offset for {name!r}; use another one"
            )
    return offsets


def check_same_log(name: str, before: Position, uuid: str) -> None:
    """Raise SparkError if the stream is another log now: the old offsets would mean other rows."""
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


def spread(wanted: dict[str, int], most: int) -> dict[str, int]:
    """Return how many messages of each stream to read, in proportion to `wanted`, `most` in total (0: no limit)."""
    total = sum(wanted.values())
    if not most or total <= most:
        return dict(wanted)
    taken = {name: count * most // total for name, count in wanted.items()}
    left = most - sum(taken.values())
    # Streams whose share was rounded to 0 come first.
    for name in sorted(
        wanted, key=lambda name: (taken[name] > 0, taken[name] - wanted[name], name)
    ):
        if left and taken[name] < wanted[name]:
            taken[name] += 1
            left -= 1
    return taken
