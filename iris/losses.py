"""Reports the losses of one subscription or service to the program's handler, and logs them.

The first loss is logged at once. Later ones are added up and logged at most once in 10 s, separately for each
subscription and service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Final

from iris.awaiting import check_returned
from iris.core.interfaces import Loss
from iris.logs import RAISED, logger
from iris.runtime import Runtime
from iris.wire.kinds import TroubleCause

log = logger(__name__)

CAUSES: Final[Mapping[str, TroubleCause]] = {
    "slow subscriber": "queue full",
    "slow member": "queue full",
    "subscription closed": "unread",
    "member stopped": "unread",
}
"""Cause of a loss in this process -> what operators see of it. Every other message did not arrive."""
LOG_S: Final = 10.0
"""Seconds between two log lines of one subscription or service."""


class LossLog:
    """Loss reports of one subscription or service. Sets no timer before the first loss."""

    __slots__ = ("_cause", "_context", "_handler", "_losses", "_messages", "_name", "_reported", "_runtime", "_timer", "_topic", "_unknown", "_what")  # fmt: skip

    def __init__(self, runtime: Runtime, what: str, name: str, handler: str) -> None:
        """Create the reports of a subscription or service.

        `what` is "subscription" or "service", `name` its filter or cluster, and `handler` the name in the log of its
        function for losses.
        """
        self._context = copy_context()
        """That of the program, of which each call of its function has a copy."""
        self._runtime = runtime
        self._handler = handler
        self._what = what
        self._name = name
        self._timer: asyncio.TimerHandle | None = None
        self._topic = self._cause = ""
        """Topic and cause of the latest loss."""
        self._losses = self._messages = self._unknown = 0
        """Not logged yet: number of losses, of lost messages as far as known, and of losses with unknown count."""
        self._reported = True
        """Whether a handler of the program received each loss that is not logged yet."""

    def report(self, loss: Loss, on_loss: Callable[[Loss], object] | None) -> None:
        """Log a loss, now or together with later ones, and call `on_loss` with it.

        The level is INFO if the program has a handler for losses (its own `on_loss` or the client's), else WARNING.
        """
        self._losses += 1
        self._messages += loss.count or 0
        self._unknown += loss.count is None
        self._topic, self._cause = loss.name, loss.cause
        if loss.count is None:
            self._runtime.troubles.count("uncounted", self._name)
        else:
            cause = CAUSES.get(loss.cause, "missing")
            self._runtime.troubles.count(cause, self._name, loss.count)
        if on_loss is None and self._runtime.on_loss is None:
            self._reported = False
        if self._timer is None:
            self._log_sum()
        if on_loss is not None:
            try:
                check_returned(self._context.copy().run(on_loss, loss))
            except RAISED as err:
                self._runtime.handler_failed(self._handler, self._name, on_loss, err)

    def end(self) -> None:
        """Log the losses that are not logged yet, and stop the timer. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._write()

    def _log_sum(self) -> None:
        """Log the losses that are not logged yet, if any, and start the timer for the next line."""
        self._timer = None
        if self._losses:
            self._write()
            self._timer = asyncio.get_running_loop().call_later(LOG_S, self._log_sum)

    def _write(self) -> None:
        if not self._losses:
            return
        fields: dict[str, object] = {
            self._what: self._name,
            "losses": self._losses,
            "topic": self._topic,
            "cause": self._cause,
        }
        if self._messages:  # 0 would say that nothing was missed
            fields["messages"] = self._messages
        if self._unknown:
            fields["unknown"] = self._unknown
        level = logging.INFO if self._reported else logging.WARNING
        self._losses = self._messages = self._unknown = 0
        self._reported = True
        log.log(level, "client.loss", extra={"fields": fields})
