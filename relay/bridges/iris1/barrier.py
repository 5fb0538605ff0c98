"""Holds back what programs of the bridge send until the subscriptions that were said before it are in effect.

Each program has a session of its own, and the relay reads sessions in any order: without this an event of one program could
overtake the subscription of another, although the subscription was said first. Only what subscriptions wait for is waited for,
for a bounded time, and nothing is, while there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

MAX_WAIT_S: Final = 1.0
"""Longest that others wait for a program's subscriptions. Its next ones are waited for once all of these are in effect."""


class SubscriptionBarrier:
    """What all programs of one bridge wait for."""

    def __init__(self) -> None:
        self.subscribing: set[PendingSubscriptions] = set()
        """Whose subscriptions are not in effect yet."""

    def wait(self, own: PendingSubscriptions) -> Awaitable[None] | None:
        """Return what to await before something of `own` is routed: the subscriptions of others, said by now. None: nothing.

        Its own are in effect in time: its session is one, and in order.
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
    """One program's subscriptions that are not in effect yet. `unread` says how many bytes it has said that were not acted on."""

    def __init__(self, barrier: SubscriptionBarrier, unread: Callable[[], int]) -> None:
        self.barrier = barrier
        self.received_bytes = 0
        """Bytes that have come from the program."""
        self._unread = unread
        self._registering: set[asyncio.Task[None]] = set()
        self.may_hold_more = False
        """The latest frame was a subscription, and more has been said."""
        self._overdue = False
        self._progress: asyncio.Future[None] | None = None

    def begin(self, registering: asyncio.Task[None]) -> None:
        """It subscribes; in effect when `registering` is done."""
        self._registering.add(registering)
        registering.add_done_callback(self._done)
        self.may_hold_more = True
        if not self._overdue:
            self.barrier.subscribing.add(self)

    def progressed(self, *, may_hold_more: bool) -> None:
        """Frames were acted on; `more`: the latest was a subscription, and what was said before may hold others."""
        self.may_hold_more = may_hold_more
        if self._progress is not None:
            progress, self._progress = self._progress, None
            progress.set_result(None)
        self._check_done()

    def end(self) -> None:
        """It is gone."""
        self._registering.clear()
        self.progressed(may_hold_more=False)

    async def in_effect(self) -> None:
        """Return when the subscriptions that it has said by now are in effect, or never will be."""
        mark = self.received_bytes
        while self.may_hold_more and self.received_bytes - self._unread() < mark:
            if self._progress is None:
                self._progress = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._progress)
        if self._registering:
            await asyncio.wait(self._registering)

    def overdue(self) -> None:
        """Others have waited for long enough."""
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
