"""Sightings on their way to their reader: the latest of each key, in order, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from typing import Final

from relay.discovery import Sighting

FEED_LIMIT: Final = 8192
"""Sightings that wait for the reader; more are refused. About 300 bytes each."""


class Feed:
    """A queue in which a newer sighting takes the place of the waiting one with the same key."""

    __slots__ = ("_ended", "_error", "_limit", "_reading", "_waiting", "_wake")

    def __init__(self, *, limit: int = FEED_LIMIT) -> None:
        self._limit = limit
        self._waiting: dict[Hashable, Sighting] = {}
        self._wake = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._reading = False

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def put(self, key: Hashable, sighting: Sighting) -> bool:
        """Queue `sighting` behind all others; False if the feed is full or has ended."""
        self._waiting.pop(key, None)
        if self._ended or len(self._waiting) >= self._limit:
            return False
        self._waiting[key] = sighting
        self._wake.set()
        return True

    def end(self, error: BaseException | None = None) -> None:
        """End the reader: at once, with `error` if there is one. The first call counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._waiting.clear()
            self._wake.set()

    async def read(self) -> AsyncIterator[Sighting]:
        """Yield what is put, until `end`. A cancelled reader loses nothing that it was not yet given.

        Raises:
            RuntimeError: somebody else reads.
        """
        if self._reading:
            raise RuntimeError("these sightings have a reader already")
        self._reading = True
        try:
            while not self._ended:
                if not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                yield self._waiting.pop(next(iter(self._waiting)))
            if self._error is not None:
                raise self._error
        finally:
            self._reading = False
