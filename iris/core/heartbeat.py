"""Beats over a network connection: whether the other side lives, how far it is, and what its clock shows.

Deadlines are by the sender's CLOCK_MONOTONIC. The receiver adds (its own clock at receipt - the sender's clock in a beat), the
least of the last 16: the true difference plus the best one-way delay seen lately. So time in queues and in stopped processes
counts, and clocks of two hosts need not agree.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from iris.wire.frames import Beat

BEAT_US: Final = 1_000_000
DEAD_US: Final = 3_000_000
"""A connection over which nothing came for so long is dead."""
SAMPLES: Final = 16


class Heartbeat:
    """One side's view of the other. `mono_us` is what its clock showed in the greeting that came at `now_us` by ours."""

    __slots__ = ("beat_at_us", "beat_us", "clock_us", "last_us", "peer_us", "rtt_us", "samples")

    def __init__(self, mono_us: int, now_us: int) -> None:
        self.last_us = now_us
        """When anything came last; the owner sets it."""
        self.peer_us = mono_us
        self.beat_at_us = now_us
        self.beat_us = now_us
        """When our next beat is due."""
        self.rtt_us = 0
        self.samples = deque([now_us - mono_us], SAMPLES)
        self.clock_us = now_us - mono_us
        """Added to the other side's times."""

    def on_beat(self, beat: Beat, now_us: int) -> None:
        """A beat came."""
        self.peer_us, self.beat_at_us = beat.mono_us, now_us
        self.samples.append(now_us - beat.mono_us)
        self.clock_us = min(self.samples)
        if beat.heard_us:
            self.rtt_us = max(0, now_us - beat.heard_us - beat.held_us)

    def beat(self, now_us: int, version: int = 0) -> Beat:
        """Return the beat that is due now."""
        self.beat_us = now_us + BEAT_US
        return Beat(now_us, self.peer_us, max(0, now_us - self.beat_at_us), version)

    def dead(self, now_us: int) -> bool:
        """Whether nothing came for too long."""
        return now_us - self.last_us >= DEAD_US

    @property
    def deadline_us(self) -> int:
        """When something is due."""
        return min(self.beat_us, self.last_us + DEAD_US)
