"""Calls that somebody has not finished: how many they are, and how long one more would take."""

from __future__ import annotations

from typing import Final

PACE_WEIGHT: Final = 0.125
"""Weight of the latest interval in the average (as TCP smooths its round trips: RFC 6298)."""
UNKNOWN_PACE_US: Final = 1000
"""Assumed time per call of one handler until the pace is known."""


class Outstanding:
    """Calls in flight at handlers of which `concurrency` run at a time, and the pace at which they end."""

    __slots__ = ("_since_us", "bytes", "concurrency", "messages", "others", "pace_us")

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.messages = 0
        """Calls in flight from this relay."""
        self.others = 0
        """Calls in flight from other relays, as last reported."""
        self.bytes = 0
        self.pace_us = 0.0
        """Moving average of the time between two ends of our calls while all handlers are busy; 0 until it is known."""
        self._since_us = 0
        """When all handlers became busy, or the latest end since."""

    def taken(self, size: int, now_us: int, count: int = 1) -> None:
        """Count calls of `size` bytes each that were dispatched."""
        self.bytes += size * count
        self.messages += count
        beyond = self.messages + self.others - self.concurrency
        if 0 <= beyond < count:
            # Time in which its handlers waited for calls does not make it slow.
            self._since_us = now_us

    def ended(self, size: int, now_us: int, count: int = 1) -> None:
        """Subtract calls of `size` bytes each that ended."""
        self.bytes -= size * count
        if self.messages + self.others >= self.concurrency:
            if self._since_us:
                each_us = (now_us - self._since_us) / count
                weight = PACE_WEIGHT if count == 1 else 1 - (1 - PACE_WEIGHT) ** count
                self.pace_us += (each_us - self.pace_us) * weight
            self._since_us = now_us
        else:
            self._since_us = 0
        self.messages -= count

    def wait_us(self) -> float:
        """Return how long one more call would take, judged by the pace.

        This is Little's law for our own calls only: the pace at which these end includes what others' share
        of the handlers costs.
        """
        if self.pace_us:
            return (self.messages + 1) * self.pace_us
        return (self.messages + self.others + 1) * UNKNOWN_PACE_US / self.concurrency
