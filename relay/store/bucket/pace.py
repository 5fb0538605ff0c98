"""Waits for what a journal needs next, so that an object leaves when it is due and not at the next tick."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from relay.store.bucket.writer import Writer

LEAST_S: Final = 0.001
"""Shortest wait: timers of uvloop have steps of a millisecond, and one that fires early would be set again at once."""


class Pace:
    """When the objects of one journal leave."""

    def __init__(self, writer: Writer, now_us: Callable[[], int]) -> None:
        self._writer = writer
        self._now_us = now_us
        self._changed = asyncio.Event()
        writer.on_change = self._changed.set

    async def wait(self, until_us: int) -> None:
        """Return when an object may leave, when the journal has ended, and at `until_us` at the latest.

        Call it right after everything that could leave has left.
        """
        self._changed.clear()
        left_us = min(until_us, self._writer.next_us) - self._now_us()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(LEAST_S, left_us / 1e6)):
                await self._changed.wait()
