"""Broadcasts to a service. They run in order; a coroutine handler has one queue, limited in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from iris.awaiting import finished, is_late
from iris.contexts import Contexts, Late
from iris.core.message import Message
from iris.handlers import Handler, stopping
from iris.logs import RAISED


class Broadcasts:
    """Runs the broadcasts that a service receives, and drops those that do not fit in its queue."""

    def __init__(
        self, service: str, handler: Handler | None, limit_bytes: int, contexts: Contexts, *, began: Callable[[], None], done: Callable[[], None],
        failed: Callable[[str, Handler, BaseException], None], dropped: Callable[[list[Message], str], None],
    ) -> None:  # fmt: skip
        """`began` and `done` are called for each bundle that is queued, `failed` with what the handler raised, and
        `dropped` with messages and why they are dropped.
        """
        self.handler = handler
        self.queued_bytes = 0
        """Size of the bundles that have not been finished."""
        self._service = service
        self._limit_bytes = limit_bytes
        self._began = began
        self._done = done
        self._failed = failed
        self._dropped = dropped
        self._contexts = contexts
        self._queue: deque[tuple[list[Message], int]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._stopped = False
        self._begun: Late | None = None
        """What a plain function returned for a message, until the worker awaits it."""

    def __len__(self) -> int:
        """Return how many bundles are queued."""
        return len(self._queue)

    def run(self, messages: list[Message], size: int) -> None:
        """Run the broadcasts of one bundle, or queue them. If the queue is full, they are dropped."""
        handler = self.handler
        if handler is None:
            return
        if self._stopped:
            self._dropped(messages, "member stopped")
        elif not handler.is_coroutine:
            rest = iter(messages)
            for message in rest:
                try:
                    context = self._contexts.fresh()
                    value = context.run(handler.function, handler.convert(message))
                except RAISED as err:
                    self._failed("broadcast handler", handler, err)
                else:
                    if value is not None and type(value) is not bytes and is_late(value):
                        self.handler = handler.awaiting()
                        self._begun = self._contexts.late(context, value)
                        self._put(self.handler, list(rest), size)
                        return
        elif self._queue and self.queued_bytes + size > self._limit_bytes:
            self._dropped(messages, "slow member")
        else:
            self._put(handler, messages, size)

    def _put(self, handler: Handler, messages: list[Message], size: int) -> None:
        """Queue a bundle for the worker."""
        self._queue.append((messages, size))
        self.queued_bytes += size
        self._began()
        if self._worker is None:
            self._worker = self._contexts.start(self._work(handler), f"iris-{self._service}-casts")

    def runs_in(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task runs the handler."""
        return task is self._worker

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel the handler, and drop what is queued and what comes. Return the tasks that end now."""
        self._stopped = True
        if self._worker is not None:
            self._worker.cancel()
        if self._begun is not None:  # its worker has not begun either
            self._begun.drop()
        while self._queue:
            messages, size = self._queue.popleft()
            self.queued_bytes -= size
            if messages:
                self._dropped(messages, "member stopped")
            self._done()
        return [] if self._worker is None else [self._worker]

    async def _work(self, handler: Handler) -> None:
        contexts = self._contexts
        try:
            while self._queue:
                messages, size = self._queue.popleft()
                for message in [None, *messages] if self._begun is not None else messages:
                    try:
                        if message is None:
                            begun, self._begun = self._begun, None
                            assert begun is not None
                            await begun.finished()
                        elif contexts.sets:
                            await contexts.inside(handler.function, handler.convert(message))
                        else:
                            value = await handler.function(handler.convert(message))
                            if value is not None and is_late(value):
                                await finished(value)
                    except RAISED as err:
                        if stopping():
                            raise
                        self._failed("broadcast handler", handler, err)
                    if stopping():
                        return
                    if not contexts.sets:
                        contexts.sets = contexts.changed()
                self.queued_bytes -= size
                self._done()
        finally:
            self._worker = None
