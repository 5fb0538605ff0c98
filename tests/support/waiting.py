"""How tests wait for what has no event of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 20.0
"""How long anything is waited for before the test fails; nothing is measured by it."""


def wait_until(true: Callable[[], T | None]) -> T:
    """Return what `true()` is once it is true; fails after `PATIENCE_S`."""
    until_s = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.01)
    return found


async def eventually(true: Callable[[], object]) -> None:
    """As `wait_until`, on the event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.005)


async def until(condition: Callable[[], object]) -> None:
    """Return at the first turn of the loop in which `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event of its own
            await asyncio.sleep(0)
