"""How long a call may still take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Final

from iris.errors import ConfigError, RequestTimeout

LONGEST_MS: Final = 0xFFFFFFFF
LONGEST_S: Final = LONGEST_MS / 1000


def deadline(timeout: float) -> float:
    """Return when a call that may take `timeout` seconds is over: waiting for a relay counts."""
    milliseconds(timeout)
    return time.monotonic() + timeout


def seconds_left(until_s: float) -> float:
    """Return what is left of a timeout, and never nothing: who just made it may go on."""
    return max(0.001, until_s - time.monotonic())


def milliseconds(timeout: float) -> int:
    """Return a timeout as it travels; raises ConfigError if it is not above 0."""
    if not timeout > 0:
        raise ConfigError(f"timeout: {timeout} s is not above 0")
    return round(timeout * 1000) or 1 if timeout < LONGEST_S else LONGEST_MS


async def within(waiter: Awaitable[Any], timeout: float, text: str) -> Any:
    """Return what the relay answers; raises RequestTimeout with this text."""
    try:
        async with asyncio.timeout(timeout):
            return await waiter
    except TimeoutError:
        raise RequestTimeout("relay", f"{text} within {timeout:g} s") from None
