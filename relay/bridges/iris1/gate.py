"""Holds back what programs of the bridge send until the subscriptions that were said before it are in effect.

Each program has a session of its own, and the relay reads sessions in any order: without this an event of one program could
overtake the subscription of another, although the subscription was said first. Only what subscriptions wait for is waited for,
for a bounded time, and nothing is, while there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

SETTLING_S: Final = 1.0
"""Longest that others wait for a program's subscriptions. Its next ones are waited for once all of these are in effect."""


class Gate:
    """What all programs of one bridge wait for."""

    def __init__(self) -> None:
        self.subscribing: set[Settling] = set()
        """Whose subscriptions are not in effect yet."""

    def wait(self, own: Settling) -> Awaitable[None] | None:
        """Return what to await before something of `own` is routed: the subscriptions of others, said by now. None: nothing.

        Its own are in effect in time: its session is one, and in order.
        """
        others = [one for one in self.subscribing if one is not own]
        return self._settled(others) if others else None

    async def _settled(self, others: list[Settling]) -> None:
        try:
            async with asyncio.timeout(SETTLING_S):
                for one in others:
                    await one.settled()
        except TimeoutError:
            for one in others:
                one.overdue()


class Settling:
    """One program's subscriptions that are not in effect yet. `unread` says how many bytes it has said that were not acted on."""

    def __init__(self, gate: Gate, unread: Callable[[], int]) -> None:
        self.gate = gate
        self.said = 0
        """Bytes that have come from the program."""
        self._unread = unread
        self._registering: set[asyncio.Task[None]] = set()
        self.more = False
        """The latest frame was a subscription, and more has been said."""
        self._overdue = False
        self._step: asyncio.Future[None] | None = None

    def begin(self, registering: asyncio.Task[None]) -> None:
        """It subscribes; in effect when `registering` is done."""
        self._registering.add(registering)
        registering.add_done_callback(self._done)
        self.more = True
        if not self._overdue:
            self.gate.subscribing.add(self)

    def stepped(self, *, more: bool) -> None:
        """Frames were acted on; `more`: the latest was a subscription, and what was said before may hold others."""
        self.more = more
        if self._step is not None:
            step, self._step = self._step, None
            step.set_result(None)
        self._look()

    def end(self) -> None:
        """It is gone."""
        self._registering.clear()
        self.stepped(more=False)

    async def settled(self) -> None:
        """Return when the subscriptions that it has said by now are in effect, or never will be."""
        mark = self.said
        while self.more and self.said - self._unread() < mark:
            if self._step is None:
                self._step = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._step)
        if self._registering:
            await asyncio.wait(self._registering)

    def overdue(self) -> None:
        """Others have waited for long enough."""
        if self._registering or self.more:
            self._overdue = True
            self.gate.subscribing.discard(self)

    def _done(self, registering: asyncio.Task[None]) -> None:
        self._registering.discard(registering)
        self._look()

    def _look(self) -> None:
        if not self._registering and not self.more:
            self._overdue = False
            self.gate.subscribing.discard(self)
