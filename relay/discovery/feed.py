"""The bounded queue of sightings between a discovery and its reader, with the latest sighting of each key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from typing import Final

from relay.discovery import Sighting

FEED_LIMIT: Final = 8192
"""Most sightings queued for the reader, about 300 bytes each; further ones are refused."""


class Feed:
    """A queue in which a newer sighting replaces the queued one with the same key."""

    __slots__ = ("_ended", "_error", "_limit", "_reading", "_waiting", "_wake")

    def __init__(self, *, limit: int = FEED_LIMIT) -> None:
        self._limit = limit
        self._waiting: dict[Hashable, Sighting] = {}
        self._wake = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._reading = False

    def __len__(self) -> int:
        """Return the number of queued sightings."""
        return len(self._waiting)

    def put(self, key: Hashable, sighting: Sighting) -> bool:
        """Queue `sighting` behind all others; return False if the feed is full or has ended."""
        self._waiting.pop(key, None)
        if self._ended or len(self._waiting) >= self._limit:
            return False
        self._waiting[key] = sighting
        self._wake.set()
        return True

    def end(self, error: BaseException | None = None) -> None:
        """End the reader at once, with `error` if given. Later calls do nothing."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._waiting.clear()
            self._wake.set()

    async def read(self) -> AsyncIterator[Sighting]:
        """Yield sightings until `end`. If the reader is cancelled, queued sightings stay for the next one.

        Raises:
            RuntimeError: another reader is active.
        """
        if self._reading:
            raise RuntimeError("another reader of these sightings is active; use a single one")
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
