"""Wake at an exact time. Event loops round to a millisecond, which would count as latency."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Final, Self

_TFD_TIMER_ABSTIME: Final = 1
COARSEST_NS: Final = 100_000
"""Above 10,000 messages/s, messages due within this time are sent together, late by at most this much."""
BATCH: Final = 256
"""When sending is late: messages sent in a row before answers are handled."""
GRACE_NS: Final = 1_000_000_000
"""Time after the end in which messages that were due before it may still be sent."""


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2))  # type: ignore[mutable-override]  # as ctypes asks


class Timer:
    """Sleep until a time of CLOCK_MONOTONIC, to some 50 µs with timerfd(2); elsewhere as exactly as the event loop
    can."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self._libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._descriptor = -1

    def __enter__(self) -> Self:
        if self._libc is not None:
            flags = os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    async def until(self, at_ns: int) -> None:
        """Return at `at_ns`; if that is past, after one turn of the event loop."""
        left_ns = at_ns - time.monotonic_ns()
        if left_ns <= 0:
            await asyncio.sleep(0)
        elif self._descriptor < 0:
            await asyncio.sleep(left_ns / 1e9)
        else:
            self._rung.clear()
            first = (ctypes.c_long * 2)(*divmod(at_ns, 10**9))
            spec = ctypes.byref(_TimerSpec((ctypes.c_long * 2)(), first))
            if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, spec, None):
                raise OSError(ctypes.get_errno(), "timerfd_settime")
            await self._rung.wait()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
            self._rung.set()


def due_ns(number: int, rate: float) -> int:
    """Return when message `number` is due, in nanoseconds from the start."""
    return int(number * 1e9 / rate)


async def batches(rate: float, count: int, begin_ns: int) -> AsyncGenerator[range, None]:
    """Iterate over ranges of message numbers as they become due, never before; several numbers at once if sending
    is late.

    Stops with messages left over if it is still behind GRACE_NS after the last was due.
    """
    end_ns = begin_ns + due_ns(count, rate) + GRACE_NS
    sent = 0
    with Timer() as timer:
        while sent < count:
            now_ns = time.monotonic_ns()
            if now_ns > end_ns:
                return
            due = min(count, int((now_ns - begin_ns) * rate / 1e9) + 1) if now_ns >= begin_ns else 0
            while sent < due and begin_ns + due_ns(due - 1, rate) > now_ns:
                due -= 1  # the two divisions may round apart
            if due > sent:
                stop = min(due, sent + BATCH)
                yield range(sent, stop)
                sent = stop
            if sent < count:
                next_ns = begin_ns + due_ns(sent, rate)
                if due == sent:
                    next_ns = max(next_ns, now_ns + COARSEST_NS)
                await timer.until(next_ns)
