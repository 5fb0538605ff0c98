"""How losses reach a program's handler, and the log: at once, then once in a while with their sum, for each subscription and service apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from iris.core.interfaces import Lost
from iris.runtime import Runtime

log = logging.getLogger(__name__)

LOG_S: Final = 10.0
"""Between two lines of one subscription or service."""


class LossLog:
    """The log lines of one subscription or service. Nothing is set up before its first loss."""

    __slots__ = ("_cause", "_handler", "_heard", "_losses", "_messages", "_name", "_runtime", "_timer", "_topic", "_unknown", "_what")  # fmt: skip

    def __init__(self, runtime: Runtime, what: str, name: str, handler: str) -> None:
        """`what` is "subscription" or "service", `name` its filter or cluster, `handler` what its handler of losses is called in the log."""
        self._runtime = runtime
        self._handler = handler
        self._what = what
        self._name = name
        self._timer: asyncio.TimerHandle | None = None
        self._topic = self._cause = ""
        """Of the latest loss."""
        self._losses = self._messages = self._unknown = 0
        """Not in the log yet: losses, their messages as far as they are known, and losses of unknown count."""
        self._heard = True

    def tell(self, lost: Lost, on_gap: Callable[[Lost], object] | None) -> None:
        """Log a loss, now or with those that follow, and tell its handler; at the level INFO if the program hears of it there or from the client."""
        self._losses += 1
        self._messages += lost.count or 0
        self._unknown += lost.count is None
        self._topic, self._cause = lost.name, lost.cause
        if on_gap is None and self._runtime.on_loss is None:
            self._heard = False
        if self._timer is None:
            self._say()
        if on_gap is not None:
            try:
                on_gap(lost)
            except (Exception, asyncio.CancelledError):
                self._runtime.handler_failed(self._handler)

    def end(self) -> None:
        """Log what is not in the log yet, and wait for nothing more. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._write()

    def _say(self) -> None:
        self._timer = None
        if self._losses:
            self._write()
            self._timer = asyncio.get_running_loop().call_later(LOG_S, self._say)

    def _write(self) -> None:
        if not self._losses:
            return
        fields: dict[str, object] = {
            self._what: self._name,
            "messages": self._messages,
            "losses": self._losses,
            "topic": self._topic,
            "cause": self._cause,
        }
        if self._unknown:
            fields["unknown"] = self._unknown
        level = logging.INFO if self._heard else logging.WARNING
        self._losses = self._messages = self._unknown = 0
        self._heard = True
        log.log(level, "client.lost", extra={"fields": fields})
