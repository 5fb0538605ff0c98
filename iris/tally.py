"""Counts and times of one handler of a member.

Times are counted in buckets, four for each power of two, so that percentiles can be computed from them to within a
tenth, and those of several members can be added up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from iris.awaiting import is_late

TIMED_EVERY: Final = 16
"""Calls of a plain function of which one is timed, the first. Calls of other handlers are all timed."""
BUCKETS: Final = 62 * 4
"""Buckets for all times that 64 bits can hold."""


def bucket_of(spent_ns: int) -> int:
    """Return the number of the bucket that counts a time in ns."""
    spent_ns += 4  # so that even 0 has the three bits that choose a bucket
    size = spent_ns.bit_length() - 3
    return size << 2 | spent_ns >> size & 3


def bucket_end(bucket: int) -> int:
    """Return the time in ns at which a bucket ends, and the next one begins."""
    return (bucket & 3) + 5 << (bucket >> 2)


class Tally:
    """What one handler has done so far."""

    __slots__ = ("expired", "failed", "handled", "max_ns", "refused", "timed", "times", "total_ns")

    def __init__(self) -> None:
        self.handled = 0
        self.failed = 0
        self.refused = 0
        self.expired = 0
        self.timed = 0
        self.total_ns = 0
        self.max_ns = 0
        self.times = [0] * BUCKETS
        """Timed calls by bucket."""

    def returned(self, started_ns: int) -> None:
        """Count a call whose function returned, with its time."""
        self.handled += 1
        self.timed += 1
        spent_ns = time.monotonic_ns() - started_ns
        self.total_ns += spent_ns
        if spent_ns > self.max_ns:
            self.max_ns = spent_ns
        spent_ns += 4  # `bucket_of`, without the call
        size = spent_ns.bit_length() - 3
        self.times[size << 2 | spent_ns >> size & 3] += 1

    def took(self, started_ns: int) -> None:
        """Record the time of a call that began at `started_ns` of the monotonic clock."""
        spent_ns = time.monotonic_ns() - started_ns
        self.timed += 1
        self.total_ns += spent_ns
        if spent_ns > self.max_ns:
            self.max_ns = spent_ns
        self.times[bucket_of(spent_ns)] += 1

    def shown_times(self) -> dict[int, int]:
        """Return the buckets that have calls: the time in ns at which each ends -> timed calls."""
        return {bucket_end(bucket): count for bucket, count in enumerate(self.times) if count}

    def timing(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a plain function with its time recorded."""

        def timed(argument: Any) -> Any:
            started_ns = time.monotonic_ns()
            value = function(argument)
            if value is None or not is_late(value):  # else its work has only begun
                self.took(started_ns)
            return value

        return timed
