"""Counts and times of one handler of a member."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

TIMED_EVERY: Final = 16
"""Calls of a plain function of which one is timed, the first. Calls of other handlers are all timed."""


class Tally:
    """What one handler has done so far."""

    __slots__ = ("expired", "failed", "handled", "max_ns", "refused", "timed", "total_ns")

    def __init__(self) -> None:
        self.handled = 0
        self.failed = 0
        self.refused = 0
        self.expired = 0
        self.timed = 0
        self.total_ns = 0
        self.max_ns = 0

    def returned(self, started_ns: int) -> None:
        """Count a call whose function returned, with its time."""
        self.handled += 1
        self.took(started_ns)

    def took(self, started_ns: int) -> None:
        """Record the time of a call that began at `started_ns` of the monotonic clock."""
        spent_ns = time.monotonic_ns() - started_ns
        self.timed += 1
        self.total_ns += spent_ns
        if spent_ns > self.max_ns:
            self.max_ns = spent_ns

    def timing(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a plain function with its time recorded."""

        def timed(argument: Any) -> Any:
            started_ns = time.monotonic_ns()
            value = function(argument)
            self.took(started_ns)
            return value

        return timed
