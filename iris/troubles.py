"""Reports a client's losses and failed handlers to its relay, which shows them to operators.

    something was lost ── REPORT_S ──► one TROUBLE frame ── REPORT_S ──► the next one, if there was more

Nothing is sent, and no timer runs, while all is well. Without a relay, or while it does not read, the counts wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from iris.core.troubles import Unreported
from iris.wire import frames
from iris.wire.kinds import TroubleCause

REPORT_S: Final = 1.0
"""Seconds between two reports at least."""


class TroubleReports:
    """The reports of one client."""

    __slots__ = ("_ended", "_send", "_timer", "_unreported")

    def __init__(self, send: Callable[[Callable[[], frames.Control]], None]) -> None:
        """`send` sends the frame that its argument makes. It does not call it while nothing can be sent."""
        self._send = send
        self._unreported = Unreported()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def count(self, cause: TroubleCause, name: str, count: int = 1) -> None:
        """Count something for the next report; `name` is the cluster, topic or filter, or ""."""
        if self._ended:
            return
        self._unreported.add(cause, name, count)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._due)

    def flush(self) -> None:
        """Report now what was counted since the last report."""
        if self._unreported:
            self._send(self._unreported.take)

    def end(self) -> None:
        """Count and report nothing more. Idempotent."""
        self._ended = True
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _due(self) -> None:
        self._timer = None
        if self._unreported:
            self._send(self._unreported.take)
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._due)
