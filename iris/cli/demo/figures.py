"""The counters of the demo: updated by the story, read by the display and the verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from iris.cli.demo.data import Route, Tally


@dataclass(slots=True)
class MemberFigures:
    """Counts of one member process, from its answers to surveys."""

    pid: int
    rows: int = 0
    checksum: int = 0
    missed: int = 0
    answered: int = 0
    killed: bool = False


@dataclass(slots=True)
class Figures:
    """All figures of one run. Times in seconds."""

    quick: bool
    started: float = field(default_factory=time.monotonic)
    members: dict[int, MemberFigures] = field(default_factory=dict)
    finished: bool = False
    """True when the demo ran to its end."""

    to_publish: int = 0
    published: int = 0
    dashboard: Tally = field(default_factory=Tally)
    """Totals of the flights received by the subscriber in this process."""
    missed: int = 0
    """Publications that were reported to that subscriber as lost."""

    asked: int = 0
    answered: int = 0
    refused: int = 0
    timed_out: int = 0
    latencies: list[float] = field(default_factory=list)
    averages: dict[Route, tuple[int, int]] = field(default_factory=dict)
    """Answers after the last flight: route -> (departures with a known delay, sum of their delays in minutes)."""

    killed_at: float = 0.0
    reported_after: list[float] = field(default_factory=list)
    """For each request in flight at the killed member: time from the kill to the caller's ConnectionLost."""

    carrier: str = ""
    tunnel_pid: int = 0
    to_stream: int = 0
    streamed: int = 0
    held_back: float = 0.0
    """Time that the tunnel's sender waited for its reader."""
    read: tuple[int, int] = (0, 0)
    """(rows, checksum) that the reader reported at the end."""

    dropped: dict[str, int] = field(default_factory=dict)
    """Messages that the relay dropped: cause -> count."""

    @property
    def survivors(self) -> list[MemberFigures]:
        """The members that were not killed."""
        return [member for member in self.members.values() if not member.killed]

    @property
    def lost(self) -> int:
        """Publications missing at receivers that were not killed, and requests without an answer."""
        received = [self.dashboard.rows, *(member.rows for member in self.survivors)]
        return sum(self.published - rows for rows in received) + self.asked - self.answered


def percentile(latencies: list[float], share: float) -> float:
    """Return the latency that a `share` (0 to 1) of `latencies` does not exceed; 0.0 if the list is empty."""
    ordered = sorted(latencies)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
