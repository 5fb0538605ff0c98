"""What connections held that have ended: taken apart in parts, between which the relay handles other frames.

    ended ──► `begin`: as much as fits in one step ── more ──► `expire`, step by step, in turn with others that ended

From the first moment, nothing is sent to a connection that has ended. Its parts give back quotas as they become free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from iris.wire.kinds import NEVER_US

STEP: Final = 256
"""Work of one step, about a millisecond: a call, a subscription or an alias is about 1."""
REST_US: Final = 2_000
"""Rest between two steps."""
TURN: Final = 32
"""Work at one connection before it is another's turn."""


class Endings:
    """The connections of one relay that have ended and still hold something."""

    def __init__(self) -> None:
        self._left: deque[Iterator[int]] = deque()
        """The work that is left; each part yields how much it was."""
        self.deadline_us = NEVER_US
        """When `expire` is due."""

    def __len__(self) -> int:
        return len(self._left)

    def begin(self, work: Iterator[int], now_us: int) -> None:
        """Do as much work as fits in one step, and the rest later."""
        left = STEP
        for done in work:
            left -= done
            if left <= 0:
                self._left.append(work)
                self.deadline_us = min(self.deadline_us, now_us + REST_US)
                return

    def expire(self, now_us: int) -> None:
        """Do more of what is left."""
        left = STEP
        while self._left and left > 0:
            work = self._left.popleft()
            turn = TURN
            for done in work:
                turn -= done
                left -= done
                if turn <= 0 or left <= 0:
                    self._left.append(work)
                    break
        self.deadline_us = now_us + REST_US if self._left else NEVER_US
