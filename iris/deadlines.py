"""Timeouts and deadlines of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Final

from iris.errors import ConfigError, RequestTimeout, with_deadline

LONGEST_MS: Final = 0xFFFFFFFF
LONGEST_S: Final = LONGEST_MS / 1000


def deadline(timeout: float) -> float:
    """Return the monotonic time at which a call with this timeout (s) ends.

    Waiting for a relay counts. Raises ConfigError.
    """
    milliseconds(timeout)
    return time.monotonic() + timeout


def seconds_left(until_s: float) -> float:
    """Return the seconds until `until_s`, at least 0.001: a call that just met its deadline may go on."""
    return max(0.001, until_s - time.monotonic())


def milliseconds(timeout: float) -> int:
    """Return a timeout in whole milliseconds, as it is sent: 1 to 2^32 - 1.

    Raises ConfigError if it is not above 0.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout must be above 0 s, not {timeout}")
    return round(timeout * 1000) or 1 if timeout < LONGEST_S else LONGEST_MS


async def within(waiter: Awaitable[Any], timeout: float, text: str) -> Any:
    """Await an answer of the relay; raises RequestTimeout with `text` ("the relay did not ...") after `timeout` s."""
    try:
        async with asyncio.timeout(timeout):
            return await waiter
    except TimeoutError:
        late = RequestTimeout("relay", f"{text} within {timeout:g} s")
        raise with_deadline(late, text, timeout) from None
