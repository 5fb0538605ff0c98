"""What time it is for a store: a wall clock that may be set, and time that only passes (sans-IO: it is told both).

`elapsed_us` passes as it does everywhere, also while the host sleeps: delays, waits and retries. `awake_us` passes only while
this process runs, so that a worker's lease does not end while nobody could hear the worker: the host slept, or we were stopped.
`wall_us` is what the clock of the host says: stored and due times, ages, `ttl`. It may be set back. What was deferred before is
not held up by that: it comes when as much time has passed as was left, which is what `high_us` and `grace` are for.
"""

from __future__ import annotations

from typing import Final

STEP_US: Final = 1_000_000
"""What a clock gains or loses against elapsed time from one look at it to the next, and is a step. Less is drift, and followed."""
STALL_US: Final = 1_000_000
"""A longer time between two looks at the clock is one in which we did not run; looks are 50 ms apart."""
MAX_STEPS: Final = 16


class Clock:
    """All times are µs. `elapsed_us` begins as `wall_us` does; until a step they stay near each other."""

    def __init__(self, now_us: int = 0) -> None:
        self.wall_us = self.elapsed_us = self.awake_us = self.high_us = now_us
        """`high_us` never falls: it is where the wall clock would be if it had never been set back."""
        self._running_us: int | None = None
        self._behind_us = 0

    def at(self, now_us: int) -> None:
        """It is `now_us` by every clock."""
        self.wall_us = self.elapsed_us = self.awake_us = self.high_us = now_us
        self._running_us, self._behind_us = None, 0

    def update(self, wall_us: int, running_us: int) -> int:
        """Take a look at the clocks: the wall's, and one that never stops and is never set. Return by how much the first was set."""
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
        """The first look: time that passes begins where the wall clock is, unless it was told before."""
        if not self.elapsed_us:
            self.elapsed_us = self.awake_us = wall_us
        self.wall_us = wall_us
        self.high_us = max(self.high_us, wall_us)

    @property
    def wall_ahead_us(self) -> int:
        """What the wall clock is ahead of elapsed time."""
        return self.wall_us - self.elapsed_us

    @property
    def high_ahead_us(self) -> int:
        """Likewise `high_us`."""
        return self.high_us - self.elapsed_us

    @property
    def awake_ahead_us(self) -> int:
        """Likewise `awake_us`: never above 0 once time is told."""
        return self.awake_us - self.elapsed_us


class Steps:
    """The steps back of the clock since a log was opened, and which of its records were stored before each."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []

    def back(self, step_us: int, end: int) -> None:
        """The clock was set back by `step_us` when the log ended at `end`."""
        self._steps.append((end, step_us))
        if len(self._steps) > MAX_STEPS:
            first, second, *rest = self._steps
            self._steps = [(second[0], first[1] + second[1]), *rest]

    def forward(self, step_us: int) -> None:
        """The clock was set forward: that takes back what it was set back by."""
        while step_us > 0 and self._steps:
            end, back_us = self._steps.pop()
            if back_us > step_us:
                self._steps.append((end, back_us - step_us))
            step_us -= back_us

    def grace_us(self, offset: int) -> int:
        """Return by how much the clock was set back since the record at `offset` was stored."""
        return sum(step_us for end, step_us in self._steps if offset < end)
