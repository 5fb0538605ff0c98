"""Latency samples, collected in bounded memory and merged as HDR histograms. Only this module needs hdrhistogram."""

from __future__ import annotations

import base64
import zlib
from typing import Any, Final

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]  # it ships no types

LONGEST_NS: Final = 2 * 3600 * 10**9
_DIGITS: Final = 3
_BITS: Final = 11
"""A histogram of three digits distinguishes values by their first 11 bits."""
_HEADER: Final = 8
_MAX_DECODED: Final = 1 << 20


class Samples:
    """Sample counts by value, rounded as the histogram rounds: 0.3 µs a sample, a tenth of `record_value`."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, value_ns: int) -> None:
        """Count one sample."""
        shift = value_ns.bit_length() - _BITS
        if shift > 0:
            value_ns = value_ns >> shift << shift
        counts = self._counts
        counts[value_ns] = counts.get(value_ns, 0) + 1

    def encode(self) -> str:
        """Return the histogram, in base64."""
        histogram = new()
        for value_ns, count in self._counts.items():
            histogram.record_value(min(max(1, value_ns), LONGEST_NS), count)
        text: bytes = histogram.encode()
        return text.decode()


def new() -> Any:
    """Return an empty histogram: 1 ns to 2 hours, three digits."""
    return HdrHistogram(1, LONGEST_NS, _DIGITS)


def merge(encoded: list[str]) -> Any:
    """Return the sum of encoded histograms; raises ValueError for one, perhaps of another host, that `new` did not
    make."""
    total = new()
    for text in encoded:
        try:
            unpacker = zlib.decompressobj()
            packed = base64.b64decode(text, validate=True)[_HEADER:]
            unpacker.decompress(packed, _MAX_DECODED)
            if not unpacker.eof:
                raise ValueError(f"it is larger than {_MAX_DECODED} bytes")
            other = HdrHistogram.decode(text.encode())
            if (other.lowest_trackable_value, other.highest_trackable_value) != (1, LONGEST_NS):
                raise ValueError(f"its range is not 1 to {LONGEST_NS} ns")
            total.add(other)
        except Exception as error:  # hdrh and zlib raise classes of their own
            raise ValueError(f"a latency histogram is invalid: {error}") from error
    return total
