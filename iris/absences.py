"""The times in which a client has no relay: how long they were, and how soon a relay that arrives is noticed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

REMEMBERED: Final = 64
"""Absences that a client remembers, for the errors of calls."""
POLL_MIN_S: Final = 0.01
POLL_MAX_S: Final = 0.25
POLL_SHARE: Final = 0.05
"""During an absence, the socket's path is polled: the interval is this share of the absence so far, within
`POLL_MIN_S` and `POLL_MAX_S`."""


def unwatched() -> Callable[[], bool]:
    """Return a watch that never reports the arrival of a relay, so that each pause takes its full time."""
    return lambda: False


class Absences:
    """The times without a session, from when one was lost until the next is in use."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since_s: float | None = None
        """Loop time at which the last session ended; None while there is a session."""
        self._past: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """The latest absences: (from, until), in monotonic seconds."""

    def begin(self) -> None:
        """Begin an absence, because the session in use has ended."""
        self._since_s = self._loop.time()

    def end(self) -> float | None:
        """End the absence and return its seconds; None if there was none."""
        if self._since_s is None:
            return None
        away_s = round(self._loop.time() - self._since_s, 3)
        now_s = time.monotonic()
        self._past.append((now_s - away_s, now_s))
        self._since_s = None
        return away_s

    def seconds(self, since_s: float) -> float:
        """Return the seconds of absence since the monotonic time `since_s`, in the latest `REMEMBERED` absences."""
        now_s = time.monotonic()
        absences = [*self._past]
        if self._since_s is not None:
            absences.append((now_s - (self._loop.time() - self._since_s), now_s))
        return sum(max(0.0, until_s - max(from_s, since_s)) for from_s, until_s in absences)

    async def pause(self, pause_s: float, arrived: Callable[[], bool]) -> None:
        """Sleep for `pause_s`, or until a relay has created its socket."""
        until_s = self._loop.time() + pause_s
        while not arrived():
            now_s = self._loop.time()
            if now_s >= until_s:
                return
            away_s = now_s - self._since_s if self._since_s is not None else 0.0
            poll_s = min(max(POLL_MIN_S, away_s * POLL_SHARE), POLL_MAX_S)
            await asyncio.sleep(min(poll_s, until_s - now_s))
