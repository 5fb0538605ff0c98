"""The outcomes of appending an entry to a log."""

from __future__ import annotations

from msgspec import Struct


class Stored(Struct, frozen=True):
    """The entry is on disk, at these offsets."""

    first: int
    next: int


class Conflict(Struct, frozen=True):
    """Not stored: the entry expected another offset than `next`, the next one."""

    next: int


class Duplicate(Struct, frozen=True):
    """Stored earlier, at these offsets; None if that was too many sequences ago to know."""

    first: int | None
    next: int | None


class OutOfOrder(Struct, frozen=True):
    """Not stored: sequence `expected` must come first. It is 0 for an unknown producer or a new epoch."""

    expected: int


class Fenced(Struct, frozen=True):
    """Not stored: a newer instance of the producer uses this later epoch."""

    epoch: int


Outcome = Stored | Duplicate | OutOfOrder | Fenced | Conflict
