"""Who hears a topic: what `Client.audience` returns."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from iris.core.backoff import Backoff
from iris.deadlines import deadline, seconds_left, within
from iris.errors import ConnectionLost, RelayError, RequestTimeout
from iris.runtime import Runtime
from iris.wire import frames
from iris.wire.kinds import AUDIENCE_MINOR

WAIT_MIN_S: Final = 0.005
WAIT_MAX_S: Final = 0.1
"""Between two looks of `wait_for_subscribers`."""


@dataclass(frozen=True, slots=True)
class SlowReceiver:
    """A process, or (`link`) another relay, for which a relay dropped messages of a topic: it did not read them in time."""

    label: str
    dropped: int
    """Messages of this topic."""
    since_s: float
    """How long ago the first was dropped, of whatever topic, ..."""
    last_s: float
    """... and the last."""
    relay: str
    """Host of the relay that dropped them."""
    pid: int
    """0 if it is not shown to this user."""
    address: str
    """host:port of a process on another host than its relay; may be empty."""
    link: bool


@dataclass(frozen=True, slots=True)
class Audience:
    """Who hears a topic now, as far as the relay of this host knows."""

    subscribers: int
    """Subscriptions, members of queue groups and stores that record it included; each session counts once for a filter and group."""
    dropped: int = 0
    """Messages of the topic that relays of this site dropped, because somebody was slow, and remember."""
    slow: Sequence[SlowReceiver] = ()

    @classmethod
    def of(cls, told: frames.Audience) -> Audience:
        """Return what a relay answered."""
        slow = [
            SlowReceiver(
                each.label, each.dropped, each.since_us / 1e6, each.last_us / 1e6, each.relay, each.pid, each.address, each.link
            )
            for each in told.slow
        ]  # fmt: skip
        return cls(told.subscribers, told.dropped, slow)


async def ask_audience(runtime: Runtime, topic: str, timeout: float, *, slow: bool) -> Audience:
    """Return who hears a topic; with `slow` also who was too slow for it. Raises RelayError or RequestTimeout."""
    until_s = deadline(timeout)
    key = runtime.registry.topic_key(topic)
    pump, session = await runtime.ready(topic, timeout)
    if session.minor < AUDIENCE_MINOR:
        text = "this relay does not say who subscribes to a topic; upgrade it"
        raise RelayError(topic, text, may_have_run=True)
    session.flush()
    session.out.prove(key)
    waiter: asyncio.Future[frames.Audience] = asyncio.get_running_loop().create_future()
    session.ask(lambda number: frames.Topic(number, topic, key.key_id, slow), waiter)
    pump.touch()
    text = "the relay did not say who subscribes to it"
    return Audience.of(await within(waiter, seconds_left(until_s), text))


async def wait_for_subscribers(runtime: Runtime, topic: str, count: int, timeout: float) -> int:
    """Return how many subscribe to a topic once they are at least `count`; raises RequestTimeout."""
    until_s = deadline(timeout)
    backoff = Backoff(WAIT_MIN_S, WAIT_MAX_S, random.random)
    there = 0
    while True:
        left_s = until_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(RequestTimeout, ConnectionLost):
                there = (await ask_audience(runtime, topic, left_s, slow=False)).subscribers
            if there >= count:
                return there
            left_s = until_s - time.monotonic()
        if left_s <= 0:
            text = f"{there} of {count} subscribers are there after {timeout:g} s"
            raise RequestTimeout(topic, text)
        await asyncio.sleep(min(backoff.failed(), left_s))
