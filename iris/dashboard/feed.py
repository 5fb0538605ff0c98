"""The events that pages get: one encoding of each state of the network, however many pages are open.

The format is that of server-sent events (`text/event-stream`): "hello" with what a page needs once, then "network" with
each state, and a comment when nothing has happened for a while, so that a page can tell silence from a broken server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Final

from iris.watch import Network, Watch
from iris.web.sending import event

BEAT_S: Final = 2.0
"""Longest silence of a stream of events."""
POINTS: Final = 180
"""States whose figures are kept for the lines of the page."""


class Feed:
    """What pages are told. `run` follows the watch; any number of `events` follow the feed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._serial = 0
        self._newest = b""
        self._points: deque[list[float | None]] = deque(maxlen=POINTS)
        self._changed = asyncio.Event()
        """Set when there is something new, and replaced by another one then."""
        self._closed = False

    async def run(self) -> None:
        """Follow the watch until cancelled."""
        async for network in self._watch.updates():
            self._serial += 1
            self._newest = event(network, "network")
            self._points.append(figures(network))
            self._wake()

    def close(self) -> None:
        """End all streams of events."""
        self._closed = True
        self._wake()

    async def events(self, hello: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the events of one page. One that is slow misses states, and gets the newest next."""
        yield event({**hello, "history": list(self._points)[:-1]}, "hello")
        seen = 0
        while not self._closed:
            changed = self._changed
            if self._serial != seen:
                seen = self._serial
                yield self._newest
                continue
            try:
                async with asyncio.timeout(BEAT_S):
                    await changed.wait()
            except TimeoutError:
                yield b": nothing new\n\n"

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def figures(network: Network) -> list[float | None]:
    """Return the figures of which a page draws lines, each a second.

    They are messages in and out, calls handled, messages refused, dropped, and unwanted. They are None before there are
    rates.
    """
    totals = network.totals
    return [
        totals.in_rate, totals.out_rate, totals.handled_rate, totals.refused_rate, totals.dropped_rate,
        totals.unwanted_rate,
    ]  # fmt: skip
