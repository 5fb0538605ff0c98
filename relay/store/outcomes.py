"""What becomes of an entry that is appended to a log."""

from __future__ import annotations

from msgspec import Struct


class Stored(Struct, frozen=True):
    """On disk, at these offsets."""

    first: int
    next: int


class Conflict(Struct, frozen=True):
    """Not stored: `expect` is not the next offset."""

    next: int


class Duplicate(Struct, frozen=True):
    """Stored before, at these offsets; None when it is too many sequences ago."""

    first: int | None
    next: int | None


class OutOfOrder(Struct, frozen=True):
    """Not stored: an earlier sequence is missing. 0 is expected of an unknown producer or a new epoch."""

    expected: int


class Fenced(Struct, frozen=True):
    """Not stored: the producer has gone on in this later epoch."""

    epoch: int


Outcome = Stored | Duplicate | OutOfOrder | Fenced | Conflict
