"""The subscribers of a topic, and its slow receivers: the result of `Client.audience`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from iris.checks import check_whole
from iris.core.backoff import Backoff
from iris.deadlines import deadline
from iris.errors import ConnectionLost, RequestTimeout
from iris.runtime import Runtime
from iris.wire import frames
from iris.wire.names import plural, printable

WAIT_MIN_S: Final = 0.005
WAIT_MAX_S: Final = 0.1
"""Shortest and longest pause between two queries of `wait_for_subscribers`."""


@dataclass(frozen=True, slots=True)
class SlowReceiver:
    """A receiver that did not read in time, so that a relay dropped messages of a topic for it."""

    label: str
    """Label of the process (`ClientConfig.label`), or name of the relay."""
    dropped: int
    """Number of messages of this topic that were dropped for it."""
    since_s: float
    """Seconds since the first drop for this receiver, of any topic."""
    last_s: float
    """Seconds since the last drop for this receiver, of any topic."""
    relay: str
    """Host of the relay that dropped the messages."""
    pid: int
    """Process id; 0 if this user may not see it."""
    address: str
    """host:port of a process that is connected over TLS from another host, else ""."""
    link: bool
    """Whether the receiver is another relay, and not a process."""


@dataclass(frozen=True, slots=True)
class Audience:
    """The subscribers and slow receivers of a topic now, as far as the local relay knows."""

    subscribers: int
    """Number of subscriptions, including members of queue groups and stores that record the topic.

    A session counts once for each filter and group.
    """
    dropped: int = 0
    """Messages of the topic that relays of this site dropped for slow receivers, as far as they still remember."""
    slow: Sequence[SlowReceiver] = ()
    """Receivers for which relays of this site dropped messages of the topic."""
    key: str = ""
    """First 8 hex digits of the key id under which you publish to the topic."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Subscriptions that match the topic under other keys, so that they do not receive what you publish: first 8
    hex digits of the key id -> number."""

    @property
    def elsewhere(self) -> str:
        """ " under your key 1f2e3d4c; 1 under 9a0b1c2d; compare `iris key show`"; empty without `others`."""
        if not self.others:
            return ""
        there = ", ".join(
            f"{count} under {printable(key)}" for key, count in sorted(self.others.items())
        )
        return f" under your key {self.key}; {there}; compare `iris key show`"

    @classmethod
    def of(cls, answer: frames.Audience, key_id: bytes) -> Audience:
        """Convert the answer of a relay."""
        slow = [
            SlowReceiver(
                each.label, each.dropped, each.since_us / 1e6, each.last_us / 1e6, each.relay, each.pid,
                each.address, each.link
            )
            for each in answer.slow
        ]  # fmt: skip
        others = answer.others if isinstance(answer.others, dict) else {}
        return cls(answer.subscribers, answer.dropped, slow, key_id[:4].hex(), others)


async def ask_audience(runtime: Runtime, topic: str, timeout: float, *, slow: bool) -> Audience:
    """Ask the relay for the subscribers of a topic, and with `slow` for its slow receivers.

    Raises RelayError, RequestTimeout or ConnectionLost.
    """
    until_s = deadline(timeout)
    key = runtime.registry.topic_key(topic)
    pump, session = await runtime.in_use(topic, timeout)
    session.flush()
    session.out.prove(key)
    waiter: asyncio.Future[frames.Audience] = asyncio.get_running_loop().create_future()
    session.ask(lambda number: frames.Topic(number, topic, key.key_id, slow), waiter)
    pump.touch()
    text = f"the relay did not report the subscribers of {topic!r}"
    return Audience.of(await runtime.answered(waiter, text, timeout, until_s), key.key_id)


async def wait_for_subscribers(runtime: Runtime, topic: str, count: int, timeout: float) -> int:
    """Wait until a topic has at least `count` subscribers and return their number. Raises RequestTimeout."""
    check_whole("count", count, 0)
    until_s = deadline(timeout)
    backoff = Backoff(WAIT_MIN_S, WAIT_MAX_S, random.random)
    found, elsewhere = 0, ""
    while True:
        left_s = until_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(RequestTimeout, ConnectionLost):
                audience = await ask_audience(runtime, topic, left_s, slow=False)
                found, elsewhere = audience.subscribers, audience.elsewhere
            if found >= count:
                return found
            left_s = until_s - time.monotonic()
        if left_s <= 0:
            text = f"the topic has {found} of {plural(count, 'subscriber')} after {timeout:g} s"
            raise RequestTimeout(topic, text + elsewhere + runtime.away_text(timeout, until_s))
        await asyncio.sleep(min(backoff.failed(), left_s))
