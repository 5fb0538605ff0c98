"""What earlier samples say of counters: rates, trends, percentiles of the last seconds, and since when something holds.

Each entry is kept for `KEEP_S` after it was last asked for, so members that leave do not stay in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

WINDOW_S: Final = 10.0
"""Seconds that percentiles and trends are about."""
KEEP_S: Final = 60.0
MINUTE_S: Final = 60.0
MAX_TIMES: Final = 512
"""Buckets of times that are taken from one handler of one sample."""

Times = Mapping[int, int]
"""Upper bound in ns -> calls that took up to so long."""


class History:
    """The counters of one watch. Keys are tuples of names."""

    def __init__(self) -> None:
        self._latest: dict[Hashable, tuple[float, float, float]] = {}
        """Key of a counter -> (time of its latest reading, value, when it was asked for last)."""
        self._levels: dict[Hashable, deque[tuple[float, float]]] = {}
        """Key of a level -> its readings, at least one, of the last `WINDOW_S` or `MINUTE_S`: (time, value)."""
        self._since: dict[Hashable, tuple[float, float]] = {}
        """Key -> (since when it holds, when that was asked last)."""
        self._times: dict[Hashable, tuple[deque[tuple[float, dict[int, int]]], list[float]]] = {}
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        """Begin a sample that is taken at `now_s`, and forget what was not asked for lately."""
        self._now_s = now_s
        for key in [k for k, (_, _, used_s) in self._latest.items() if now_s - used_s > KEEP_S]:
            del self._latest[key]
        for key in [k for k, points in self._levels.items() if now_s - points[-1][0] > KEEP_S]:
            del self._levels[key]
        for key in [k for k, (_, used_s) in self._since.items() if now_s - used_s > KEEP_S]:
            del self._since[key]
        for key in [k for k, (_, used) in self._times.items() if now_s - used[0] > KEEP_S]:
            del self._times[key]

    def rate(self, key: Hashable, value: float, at_s: float | None = None) -> float | None:
        """Record a counter; return its growth per second since the sample before.

        `at_s` is the time of the reading by the clock of what is counted, such as its uptime. Returns None if it is
        the first reading, or the counter or that clock went back because the process began again.
        """
        at_s = self._now_s if at_s is None else at_s
        before = self._latest.get(key)
        self._latest[key] = at_s, value, self._now_s
        if before is None or value < before[1] or at_s <= before[0]:
            return None
        return (value - before[1]) / (at_s - before[0])

    def trend(self, key: Hashable, value: float) -> float | None:
        """Record a level; return its change per second over the last `WINDOW_S`, or None for the first reading."""
        points = self._levels.setdefault(key, deque())
        points.append((self._now_s, value))
        while len(points) > 2 and self._now_s - points[0][0] > WINDOW_S:
            points.popleft()
        first_s, first = points[0]
        return (value - first) / (self._now_s - first_s) if self._now_s > first_s else None

    def grown(self, key: Hashable, value: float) -> float:
        """Record a counter; return by how much it grew in the last minute, as far as that was seen."""
        points = self._levels.setdefault(key, deque())
        if points and value < points[-1][1]:
            points.clear()
        points.append((self._now_s, value))
        while len(points) > 1 and self._now_s - points[0][0] > MINUTE_S:
            points.popleft()
        return value - points[0][1]

    def since(self, key: Hashable, holds: bool) -> float:
        """Record whether something holds now; return for how many seconds it has in every sample."""
        if not holds:
            self._since.pop(key, None)
            return 0.0
        since_s, _ = self._since.get(key, (self._now_s, 0.0))
        self._since[key] = since_s, self._now_s
        return self._now_s - since_s

    def lately(self, key: Hashable, times: Times) -> dict[int, int]:
        """Record the counts of timed calls; return those of the last `WINDOW_S`.

        They are none in the first sample, and all if the process began again.
        """
        if len(times) > MAX_TIMES:
            times = dict(sorted(times.items())[-MAX_TIMES:])
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = deque(maxlen=64), [self._now_s]
        readings, used = found
        used[0] = self._now_s
        if readings and any(times.get(end, 0) < count for end, count in readings[-1][1].items()):
            readings.clear()
            readings.append((self._now_s, {}))
        readings.append((self._now_s, dict(times)))
        while len(readings) > 2 and self._now_s - readings[1][0] >= WINDOW_S:
            readings.popleft()
        before = readings[0][1]
        return {
            end: grown for end, count in times.items() if (grown := count - before.get(end, 0)) > 0
        }


def percentile(times: Times, share: float) -> float | None:
    """Return the time in ms that a share of the calls did not exceed, to within an eighth; None without calls."""
    total = sum(times.values())
    if total <= 0:
        return None
    passed = 0
    for end, count in sorted(times.items()):
        passed += count
        if passed >= share * total:
            return (
                0.9 * end / 1e6
            )  # the middle of the bucket, which begins at 4/5 to 7/8 of its end
    return None


def summed(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the rates that are known; None if none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def merged(parts: list[dict[int, int]]) -> dict[int, int]:
    """Return the sums of several counts of timed calls."""
    found: dict[int, int] = {}
    for part in parts:
        for end, count in part.items():
            found[end] = found.get(end, 0) + count
    return found
