"""Signals, descriptor limit and event loop of Iris's processes: the relay, the store, the bridges."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable

from iris.signals import on_signal


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; callers may set it, too.

    A second signal ends the process at once.
    """
    stop = asyncio.Event()
    told = False

    def signalled() -> None:
        nonlocal told
        if told:
            os._exit(1)
        told = True
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        on_signal(number, signalled)
    return stop


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(
        ValueError, OSError
    ):  # containers may forbid it; the soft limit then stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of uvloop's event loop; None on Windows."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
