"""Hold frames of the bridge's clients until the subscriptions received before them are in effect.

Each client has its own session, and the relay reads sessions in any order. Without this barrier an
event of one client could overtake the subscription of another, although the subscription came first.
Nothing waits while no subscription is pending, and nothing waits longer than `MAX_WAIT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

MAX_WAIT_S: Final = 1.0
"""Longest time that other clients wait for one client's subscriptions.

If it passes, nobody waits for this client again until all of its pending subscriptions are in effect.
"""


class SubscriptionBarrier:
    """The pending subscriptions of all clients of one bridge."""

    def __init__(self) -> None:
        self.subscribing: set[PendingSubscriptions] = set()
        """Clients with subscriptions that are not in effect yet."""

    def wait(self, own: PendingSubscriptions) -> Awaitable[None] | None:
        """Return an awaitable for other clients' pending subscriptions, or None if there are none.

        Call it before a frame of the client `own` is routed. Its own subscriptions need no wait: they
        use the same session, which keeps their order.
        """
        others = [one for one in self.subscribing if one is not own]
        return self._in_effect(others) if others else None

    async def _in_effect(self, others: list[PendingSubscriptions]) -> None:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                for one in others:
                    await one.in_effect()
        except TimeoutError:
            for one in others:
                one.overdue()


class PendingSubscriptions:
    """Subscriptions of one client that are not in effect yet.

    `unread` returns how many received bytes are not processed.
    """

    def __init__(self, barrier: SubscriptionBarrier, unread: Callable[[], int]) -> None:
        self.barrier = barrier
        self.received_bytes = 0
        """Bytes received from the client so far."""
        self._unread = unread
        self._registering: set[asyncio.Task[None]] = set()
        self.may_hold_more = False
        """Whether the last processed frame was a subscription and unprocessed bytes may hold more of them."""
        self._overdue = False
        self._progress: asyncio.Future[None] | None = None

    def begin(self, registering: asyncio.Task[None]) -> None:
        """Register a subscription that is in effect when the task `registering` is done."""
        self._registering.add(registering)
        registering.add_done_callback(self._done)
        self.may_hold_more = True
        if not self._overdue:
            self.barrier.subscribing.add(self)

    def progressed(self, *, may_hold_more: bool) -> None:
        """Note that frames were processed.

        `may_hold_more`: the last was a subscription, and more bytes may hold others.
        """
        self.may_hold_more = may_hold_more
        if self._progress is not None:
            progress, self._progress = self._progress, None
            progress.set_result(None)
        self._check_done()

    def end(self) -> None:
        """Forget all pending subscriptions, because the client has left."""
        self._registering.clear()
        self.progressed(may_hold_more=False)

    async def in_effect(self) -> None:
        """Return when every subscription received by now is in effect or has failed."""
        mark = self.received_bytes
        while self.may_hold_more and self.received_bytes - self._unread() < mark:
            if self._progress is None:
                self._progress = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._progress)
        if self._registering:
            await asyncio.wait(self._registering)

    def overdue(self) -> None:
        """Stop others from waiting for this client: they have waited for `MAX_WAIT_S`."""
        if self._registering or self.may_hold_more:
            self._overdue = True
            self.barrier.subscribing.discard(self)

    def _done(self, registering: asyncio.Task[None]) -> None:
        self._registering.discard(registering)
        self._check_done()

    def _check_done(self) -> None:
        if not self._registering and not self.may_hold_more:
            self._overdue = False
            self.barrier.subscribing.discard(self)
