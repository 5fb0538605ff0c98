"""Tells the watchdog of systemd that this process's event loop still runs (sd_watchdog_enabled(3))."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
from collections.abc import Mapping
from typing import Final

from relay import notify

log = logging.getLogger(__name__)

INTERVAL_VARIABLE: Final = "WATCHDOG_USEC"
PID_VARIABLE: Final = "WATCHDOG_PID"


async def keep_alive(environ: Mapping[str, str]) -> None:
    """Send `WATCHDOG=1` twice in each watchdog interval, until cancelled. Returns at once if there is no watchdog.

    The pings come from the event loop, so a loop that hangs sends none. systemd then ends the process with SIGABRT
    and starts it again; on SIGABRT the process first writes to stderr where each of its threads is.
    """
    interval_s = watchdog_s(environ)
    if interval_s is None:
        return
    faulthandler.enable()
    while True:
        notify.notify(environ, "WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)


def watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Return the interval within which the service manager expects a ping of this process; None if it expects none."""
    text = environ.get(INTERVAL_VARIABLE, "")
    if not text or environ.get(PID_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return None
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text) / 1e6
    fields = {
        "address": environ.get(notify.VARIABLE, ""),
        "error": f"{INTERVAL_VARIABLE} is {text!r}, not a number of microseconds, so no pings are sent",
    }
    log.warning("notify.failed", extra={"fields": fields})
    return None
