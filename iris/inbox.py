"""Deliveries to a service: what is queued for a handler, who runs it, and what is counted about it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from iris.cancelling import Cancelling
from iris.contexts import Late
from iris.core.interfaces import Delivery
from iris.core.message import Message
from iris.handlers import Handler
from iris.methods import Methods
from iris.tally import Tally


class Inbox:
    """Queued deliveries of one kind with a coroutine handler, and the workers (tasks) that run them."""

    __slots__ = (
        "answered", "assigned", "begun", "cancelling", "handler", "idle", "queue", "queued_bytes", "tallies", "tally", "timed",
        "workers",
    )  # fmt: skip

    def __init__(self, handler: Handler, *, answered: bool, cancelling: Cancelling | None) -> None:
        self.handler = handler
        self.cancelling = cancelling
        """Deliveries whose handlers are cancelled when their callers leave; None if all run to their end."""
        self.answered = answered
        """Whether callers wait for an answer, so that their deadlines limit what the handler calls."""
        self.queue: deque[Delivery] = deque()
        self.queued_bytes = 0
        """Size of all deliveries that have not been finished."""
        self.assigned: set[Delivery] = set()
        """Deliveries assigned to a worker that has not started on them."""
        self.idle: list[asyncio.Future[Delivery]] = []
        """Workers without a delivery: each waits for the next one on its future."""
        self.begun: dict[Delivery, tuple[Any, Late]] = {}
        """Deliveries whose function returned an awaitable that no worker awaits yet -> (answer, awaitable)."""
        self.workers: set[asyncio.Task[None]] = set()
        self.tallies = handler.tallies if isinstance(handler, Methods) else {"": Tally()}
        """Method -> counts and times of its handler."""
        self.tally = Tally() if isinstance(handler, Methods) else self.tallies[""]
        """Counts and times of the handler; of all methods together if it has several."""
        self.timed = self.tally.timing(handler.function)

    def begin(self, delivery: Delivery, answer: Any, late: Late) -> None:
        """Keep the awaitable that a plain function returned for a worker. From now on workers run all deliveries."""
        self.handler = self.handler.awaiting()
        self.begun[delivery] = answer, late

    def tally_of(self, message: Message) -> Tally:
        """Return the counts of the handler of a message."""
        return self.tallies.get(message.method, self.tally)
