"""What the demo counts while it runs: written by the story, read by the display and the verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from iris.cli.demo.data import Route, Tally


@dataclass(slots=True)
class MemberFigures:
    """One member process, as its answers to surveys have it."""

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
    """The story came to its end."""

    to_publish: int = 0
    published: int = 0
    dashboard: Tally = field(default_factory=Tally)
    """What the subscriber in this process received."""
    missed: int = 0
    """What it was told it had lost."""

    asked: int = 0
    answered: int = 0
    refused: int = 0
    timed_out: int = 0
    latencies: list[float] = field(default_factory=list)
    averages: dict[Route, tuple[int, int]] = field(default_factory=dict)
    """Answers after the last flight: departures with a known delay, and its sum in minutes."""

    killed_at: float = 0.0
    told_after: list[float] = field(default_factory=list)
    """Per request that the killed member held: from the kill to the caller's ConnectionLost."""

    carrier: str = ""
    tunnel_pid: int = 0
    to_stream: int = 0
    streamed: int = 0
    held_back: float = 0.0
    """How long the sender waited for the reader."""
    read: tuple[int, int] = (0, 0)
    """What the reader said at the end: rows and checksum."""

    dropped: dict[str, int] = field(default_factory=dict)
    """The relay's account of what went nowhere, by cause."""

    @property
    def survivors(self) -> list[MemberFigures]:
        """The members that were not killed."""
        return [member for member in self.members.values() if not member.killed]

    @property
    def lost(self) -> int:
        """Publications that a receiver which was there all along did not get, and requests without an answer."""
        heard = [self.dashboard.rows, *(member.rows for member in self.survivors)]
        return sum(self.published - rows for rows in heard) + self.asked - self.answered


def percentile(latencies: list[float], share: float) -> float:
    """Return the latency that `share` (0 to 1) of them do not exceed; 0.0 if there are none."""
    ordered = sorted(latencies)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
