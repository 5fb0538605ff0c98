"""Retry delays: exponential backoff with jitter."""

from __future__ import annotations

from collections.abc import Callable

MOST_DOUBLINGS = 30


def backoff_s(failures: int, first_s: float, longest_s: float, rng: Callable[[], float]) -> float:
    """Return the seconds to wait after `failures` earlier failures: doubled at each, then shortened at random
    by up to half.

    The random part keeps clients that failed together from retrying together ("equal jitter": Brooker, Exponential
    Backoff And Jitter, 2015). `rng` returns a number in [0, 1).
    """
    return min(longest_s, first_s * 2.0 ** min(failures, MOST_DOUBLINGS)) * (0.5 + 0.5 * rng())


class Backoff:
    """Retry delays of one loop. Sans-IO: it computes the delay and does not wait."""

    __slots__ = ("_first_s", "_longest_s", "_rng", "failures")

    def __init__(self, first_s: float, longest_s: float, rng: Callable[[], float]) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self.failures = 0
        """Failures since the last success."""

    def failed(self) -> float:
        """Count a failure; return the seconds to wait before the next attempt."""
        self.failures += 1
        return backoff_s(self.failures - 1, self._first_s, self._longest_s, self._rng)

    def succeeded(self) -> None:
        """Start again with the first delay."""
        self.failures = 0
