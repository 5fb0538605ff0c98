"""Heartbeats over a network connection: liveness of the peer, round-trip time, and offsets of its clocks.

Deadlines are in the sender's CLOCK_MONOTONIC. The receiver converts them by adding (its own clock at receipt - the
sender's clock in the beat), the minimum over the last 16 beats: the true difference plus the best recent one-way delay.
So time spent in queues and in stopped processes counts, and the clocks of two hosts need not agree.

Beats between relays also carry wall clocks. Their offset is shown to people and decides nothing. It is computed by the
rule of NTP (RFC 5905, section 8) from the beat with the shortest round trip among the last 16, so it is off by at most
half of that round trip. The four times in the rule are of monotonic clocks. Each beat says by how much the peer's wall
clock is ahead of its monotonic clock, so a wall clock that was set shows at the next beat.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import UNSET

from iris.wire.frames import Beat

BEAT_US: Final = 1_000_000
DEAD_US: Final = 3_000_000
"""A connection is dead when nothing came over it for so long."""
SAMPLES: Final = 16


class ClockSamples:
    """The offset of the clock of a peer that sends no heartbeats, by its greeting and its PINGs and PONGs.

    The greeting came at `now_us` and carried `mono_us`.
    """

    __slots__ = ("_samples", "clock_us")

    def __init__(self, mono_us: int, now_us: int) -> None:
        self._samples = deque([now_us - mono_us], SAMPLES)
        self.clock_us = now_us - mono_us
        """Add this to the peer's times to get local times."""

    def add(self, mono_us: int, now_us: int) -> None:
        """Record what the peer's clock showed in a frame that came at `now_us`."""
        self._samples.append(now_us - mono_us)
        self.clock_us = min(self._samples)


class Heartbeat:
    """State of one connection's heartbeats.

    The greeting that came at `now_us` (local clock) carried the peer's `mono_us`.
    """

    __slots__ = (
        "beat_at_us", "beat_us", "clock_us", "last_us", "offsets", "peer_us", "peer_wall_us", "rtt_us", "samples",
    )  # fmt: skip

    def __init__(self, mono_us: int, now_us: int) -> None:
        self.last_us = now_us
        """Time at which anything last came. The owner sets it."""
        self.peer_us = mono_us
        """The peer's clock in its latest beat."""
        self.beat_at_us = now_us
        """Time at which that beat came."""
        self.beat_us = now_us
        """Time at which the next beat must be sent."""
        self.rtt_us = 0
        self.samples = deque([now_us - mono_us], SAMPLES)
        self.clock_us = now_us - mono_us
        """Add this to the peer's times to get local times."""
        self.offsets: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        """(round trip, peer's monotonic clock - ours) of each of the last beats."""
        self.peer_wall_us: int | None = None
        """The peer's wall clock - its monotonic clock, by its latest beat; None if it did not say."""

    def on_beat(self, beat: Beat, now_us: int) -> None:
        """Record a beat of the peer."""
        self.peer_us, self.beat_at_us = beat.mono_us, now_us
        self.samples.append(now_us - beat.mono_us)
        self.clock_us = min(self.samples)
        if beat.heard_us:
            self.rtt_us = max(0, now_us - beat.heard_us - beat.held_us)
            came_us = beat.mono_us - beat.held_us
            offset_us = (came_us - beat.heard_us + beat.mono_us - now_us) // 2
            self.offsets.append((self.rtt_us, offset_us))
        if beat.wall_us is not UNSET:
            self.peer_wall_us = beat.wall_us - beat.mono_us

    def beat(self, now_us: int, version: int = 0, wall_us: int | None = None) -> Beat:
        """Return a beat to send now, and schedule the next. `wall_us` is our wall clock, if the peer reads it."""
        self.beat_us = now_us + BEAT_US
        return Beat(
            now_us,
            self.peer_us,
            max(0, now_us - self.beat_at_us),
            version,
            UNSET if wall_us is None else wall_us,
        )

    def wall_offset(self, now_us: int, wall_us: int) -> tuple[int, int] | None:
        """Return how far the peer's wall clock is ahead of ours, which shows `wall_us`, and the error of that, in µs.

        None until it is known.
        """
        if self.peer_wall_us is None or not self.offsets:
            return None
        rtt_us, offset_us = min(self.offsets)
        return self.peer_wall_us + offset_us - (wall_us - now_us), (rtt_us + 1) // 2

    def dead(self, now_us: int) -> bool:
        """Return whether nothing came for `DEAD_US`."""
        return now_us - self.last_us >= DEAD_US

    @property
    def deadline_us(self) -> int:
        """Time at which to send the next beat, or to count the connection as dead if that is earlier."""
        return min(self.beat_us, self.last_us + DEAD_US)
