"""Handlers that are cancelled when their caller leaves: which deliveries wait or run, and whose caller has left."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from iris.core.interfaces import Delivery
from iris.handlers import Handler


class Cancelling:
    """Deliveries of one kind that end when their caller leaves.

    A delivery is expected, begins with its handler, and ends once. If the caller leaves before it begins, the handler
    is not called; while the handler runs, its task is cancelled.
    """

    __slots__ = ("_cancelled", "_handler", "_left", "_loop", "_running")

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._running: dict[Delivery, asyncio.Task[Any]] = {}
        self._left: set[Delivery] = set()
        """Deliveries that have not ended and whose callers have left."""
        self._cancelled: set[Delivery] = set()
        """Those of them whose task was cancelled."""

    def expect(self, delivery: Delivery) -> None:
        """Note a delivery that was accepted: its session calls back if the caller leaves.

        A service with several methods may have asked for some of them only.
        """
        if not self._handler.chosen(delivery.message).cancels:
            return
        delivery.session.cancels[delivery.hop] = partial(self._caller_left, delivery)

    def begin(self, delivery: Delivery, task: asyncio.Task[Any]) -> bool:
        """Note that the handler is about to run in `task`. Returns False if the caller has left."""
        if delivery in self._left:
            return False
        self._running[delivery] = task
        return True

    def end(self, delivery: Delivery) -> bool:
        """Forget a delivery that ran or will not run. Returns True if its handler was cancelled."""
        delivery.session.cancels.pop(delivery.hop, None)
        task = self._running.pop(delivery, None)
        self._left.discard(delivery)
        if delivery not in self._cancelled:
            return False
        self._cancelled.discard(delivery)
        if task is not None:
            task.uncancel()  # the task itself goes on, with the next delivery
        return True

    def _caller_left(self, delivery: Delivery) -> None:
        self._left.add(delivery)
        if delivery in self._running:
            # Later, because this may be called from within that very task, by a relay in this process.
            self._loop.call_soon(self._cancel, delivery)

    def _cancel(self, delivery: Delivery) -> None:
        task = self._running.get(delivery)
        if task is not None:  # the handler has not ended meanwhile
            self._cancelled.add(delivery)
            task.cancel()
