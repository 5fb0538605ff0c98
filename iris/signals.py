"""Signals of a process whose event loop runs in its main thread."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


def on_signal(number: signal.Signals, call: Callable[[*Ts], object], *values: *Ts) -> None:
    """Call `call(*values)` in the running loop once for each signal of this number, until the loop is closed.

    `loop.add_signal_handler` of uvloop calls twice for a signal that comes while another is handled: it counts both
    the signal's byte in the loop's pipe and its Python handler. One SIGTERM would then be a second one, which ends a
    process at once.

    Once the loop is closed, SIGTERM and SIGINT have their usual effect again, and others have none.

    Raises:
        ValueError: this is not the main thread.
    """
    loop = asyncio.get_running_loop()

    def handle(_: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call, *values)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            signal.default_int_handler(number, frame)
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(number, handle)
    signal.siginterrupt(number, False)
