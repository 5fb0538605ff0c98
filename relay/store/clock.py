"""The clocks of a store: a wall clock that may be set, and elapsed time, which cannot (sans-IO: the
caller passes both in).

`elapsed_us` also runs while the host sleeps; delays, waits and retries use it. `awake_us` runs only
while this process runs, so that a worker's lease does not end while we could not receive anything
from the worker, because the host slept or we were stopped. `wall_us` is the host's clock; stored
times, due times, ages and `ttl` use it. It may be set back. That does not delay records that were
deferred before: they are delivered after the time that was left, for which `high_us` and
`Steps.grace_us` exist.
"""

from __future__ import annotations

from typing import Final

STEP_US: Final = 1_000_000
"""A change of the wall clock against elapsed time between two updates that counts as a step.

Less is drift, and is followed.
"""
STALL_US: Final = 1_000_000
"""A longer time between two updates means that this process did not run. Updates are 50 ms apart."""
MAX_STEPS: Final = 16


class Clock:
    """All times are in µs.

    `elapsed_us` starts at the value of `wall_us`, and stays close to it until the wall clock is
    set.
    """

    def __init__(self, now_us: int = 0) -> None:
        self.wall_us = self.elapsed_us = self.awake_us = self.high_us = now_us
        """`high_us` never goes back: it is the time of the wall clock if it had never been set back."""
        self._running_us: int | None = None
        self._behind_us = 0

    def at(self, now_us: int) -> None:
        """Set all clocks to `now_us`."""
        self.wall_us = self.elapsed_us = self.awake_us = self.high_us = now_us
        self._running_us, self._behind_us = None, 0

    def update(self, wall_us: int, running_us: int) -> int:
        """Update from the wall clock and from a clock that never stops and is never set; return by
        how much the first was set.
        """
        if self._running_us is None:
            self._running_us = running_us
            self.at_start(wall_us)
            return 0
        passed_us = max(0, running_us - self._running_us)
        step_us = wall_us - self.wall_us - passed_us
        self._running_us += passed_us
        self.elapsed_us += passed_us
        self.awake_us += min(passed_us, STALL_US)
        self.wall_us = wall_us
        if -STEP_US < step_us < STEP_US:
            step_us = 0
        self._behind_us = max(0, self._behind_us - step_us)
        self.high_us = max(self.high_us, wall_us + self._behind_us)
        return step_us

    def at_start(self, wall_us: int) -> None:
        """Handle the first update: elapsed time starts at the wall clock's time, unless `at` has set it."""
        if not self.elapsed_us:
            self.elapsed_us = self.awake_us = wall_us
        self.wall_us = wall_us
        self.high_us = max(self.high_us, wall_us)

    @property
    def wall_ahead_us(self) -> int:
        """How much the wall clock is ahead of elapsed time."""
        return self.wall_us - self.elapsed_us

    @property
    def high_ahead_us(self) -> int:
        """How much `high_us` is ahead of elapsed time."""
        return self.high_us - self.elapsed_us

    @property
    def awake_ahead_us(self) -> int:
        """How much `awake_us` is ahead of elapsed time: never more than 0 after the first update."""
        return self.awake_us - self.elapsed_us


class Steps:
    """The steps by which the wall clock was set back since a log was opened, each with the end of
    the log at that time.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []

    def back(self, step_us: int, end: int) -> None:
        """Add a step: the clock was set back by `step_us` when the log ended at `end`."""
        self._steps.append((end, step_us))
        if len(self._steps) > MAX_STEPS:
            first, second, *rest = self._steps
            self._steps = [(second[0], first[1] + second[1]), *rest]

    def forward(self, step_us: int) -> None:
        """Subtract `step_us` from the latest steps, because the clock was set forward by it."""
        while step_us > 0 and self._steps:
            end, back_us = self._steps.pop()
            if back_us > step_us:
                self._steps.append((end, back_us - step_us))
            step_us -= back_us

    def grace_us(self, offset: int) -> int:
        """Return by how much the clock was set back since the record at `offset` was stored."""
        return sum(step_us for end, step_us in self._steps if offset < end)
