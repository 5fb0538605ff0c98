"""Latency distributions, read from HDR histograms in nanoseconds.

A percentile is named by `one_in`, which is 1 / (1 - p): 2 is the median, 100 is p99, 1,000,000 is p99.9999. So
ranks are whole numbers, which are also the axis of the plots.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from hdrh.histogram import HdrHistogram

PERCENTILES = {
    "p50": 2,
    "p90": 10,
    "p99": 100,
    "p99.9": 1_000,
    "p99.99": 10_000,
    "p99.999": 100_000,
    "p99.9999": 1_000_000,
}
BEYOND = 10
"""Samples that must lie beyond a percentile for it to count."""
POINTS_PER_DECADE = 40
LOWEST_NS, HIGHEST_NS, DIGITS = 1, 120_000_000_000, 3


@dataclass(frozen=True)
class Distribution:
    """The non-empty buckets of a histogram, from the lowest."""

    values_ns: array[int]
    up_to: array[int]
    """Number of samples at or below each value."""

    @property
    def total(self) -> int:
        return self.up_to[-1] if self.up_to else 0

    @property
    def max_ns(self) -> int | None:
        return self.values_ns[-1] if self.values_ns else None

    def at(self, one_in: float) -> int | None:
        """Return the value at a percentile; None if fewer than ten samples lie beyond it."""
        if self.total < BEYOND * one_in:
            return None
        beyond = int(self.total / one_in)
        return self.values_ns[bisect_left(self.up_to, max(1, self.total - beyond))]

    def curve(self) -> tuple[list[float], list[int]]:
        """Return the lists of `one_in` and of nanoseconds, spaced evenly on a logarithmic axis, as far as
        percentiles count."""
        across: list[float] = []
        up: list[int] = []
        step = 0
        while (value := self.at(one_in := 10 ** (step / POINTS_PER_DECADE))) is not None:
            across.append(one_in)
            up.append(value)
            step += 1
        return across, up


def merge(encoded: Iterable[str | bytes]) -> HdrHistogram:
    """Return the sum of encoded histograms. Raises ValueError if one is invalid."""
    merged = HdrHistogram(LOWEST_NS, HIGHEST_NS, DIGITS)
    for text in encoded:
        try:
            merged.add(HdrHistogram.decode(text))
        except Exception as error:  # its errors have no common base class
            raise ValueError(f"an HDR histogram cannot be decoded: {error!r}") from error
    return merged


def distribution(histogram: HdrHistogram) -> Distribution:
    counts = histogram.counts[:]
    held = [index for index, count in enumerate(counts) if count]
    values = [
        histogram.get_highest_equivalent_value(histogram.get_value_from_index(index))
        for index in held
    ]
    return Distribution(array("q", values), array("q", accumulate(counts[i] for i in held)))


@functools.lru_cache(maxsize=2048)
def merged_distribution(encoded: tuple[str, ...]) -> Distribution:
    """Return the distribution of all rounds together; cached, because tables, plots and page need the same ones."""
    return distribution(merge(encoded))


def percentile_rows(histogram: HdrHistogram) -> list[tuple[str, int | None]]:
    """Return (label, nanoseconds) from p50 to p99.9999, and "max", which is there if there are samples."""
    samples = distribution(histogram)
    rows = [(label, samples.at(one_in)) for label, one_in in PERCENTILES.items()]
    return [*rows, ("max", samples.max_ns)]
