"""Reads records that were moved to the bucket: chunks of segment objects, fetched ahead, in a cache with a size.

A read whose chunk is not in the cache is refused with RecordsAway, and repeated when the chunk is there. So nothing
waits for the bucket but the reads that need it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from iris.core.backoff import Backoff
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.sealing import ObjectDamaged, Sealer
from relay.store.errors import ObjectLost, RecordsAway, RecordsUnreachable
from relay.store.moved import Moved, Rows

log = logging.getLogger(__name__)

CACHE_BYTES: Final = 32 << 20
"""Records in the cache. The least recently read are removed first."""
FETCHES: Final = 8
"""Chunks that are requested at once."""
MAX_FETCHING: Final = 64
"""Chunks are fetched ahead only while fewer are on their way."""
PATIENCE_S: Final = 10.0
"""How long a read waits for a bucket that does not answer."""
AGAIN_S: Final = 1.0
"""A chunk that could not be read is not requested again before."""
MAX_FAILED: Final = 1024
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 2.0

Place = tuple[str, int]
"""(object, number of its chunk)."""
_decode: Final = msgspec.msgpack.Decoder(Rows).decode


class _Fetch:
    """A chunk on its way."""

    __slots__ = ("task", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[object, Callable[[], None]] = {}
        self.task: asyncio.Task[None] | None = None


class SegmentReader:
    """The segment objects of one bucket. It needs a running event loop."""

    def __init__(
        self, objects: Objects, sealer: Sealer, *, cache_bytes: int = CACHE_BYTES,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._objects = objects
        self._sealer = sealer
        self._cache_bytes = cache_bytes
        self._now_s = now_s
        self._cache: OrderedDict[Place, tuple[Rows, int]] = OrderedDict()
        self._fetching: dict[Place, _Fetch] = {}
        self._failed: OrderedDict[Place, tuple[bool, str, float]] = OrderedDict()
        """Chunk that could not be read -> (whether its object is lost, why, when)."""
        self._requests = asyncio.Semaphore(FETCHES)
        self.on_read: Callable[[], None] = lambda: None
        """Called after reads that waited were repeated."""
        self.cached_bytes = 0
        self.reads = 0
        """Requests to the bucket."""
        self.hits = 0
        """Chunks that were in the cache when they were asked for."""

    def rows(self, path: str, places: Sequence[tuple[Moved, int]]) -> Rows:
        """See `relay.store.moved.Reader`."""
        for moved, number in reversed(places[1:]):
            if len(self._fetching) < MAX_FETCHING:
                self._want(moved, number)
        moved, number = places[0]
        place = moved.key, number
        if (found := self._cache.get(place)) is not None:
            self._cache.move_to_end(place)
            self.hits += 1
            return found[0]
        if (failed := self._failed.get(place)) is not None:
            lost, why, at_s = failed
            if self._now_s() < at_s + AGAIN_S:
                raise (ObjectLost if lost else RecordsUnreachable)(path, why)
        fetch = self._want(moved, number)
        assert fetch is not None
        raise RecordsAway(path, moved.key, fetch.waiting.__setitem__)

    async def close(self) -> None:
        """Cancel what is on its way."""
        tasks = [fetch.task for fetch in self._fetching.values() if fetch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _want(self, moved: Moved, number: int) -> _Fetch | None:
        """Fetch a chunk; return its fetch, or None if it is in the cache."""
        place = moved.key, number
        if place in self._cache:
            return None
        fetch = self._fetching.get(place)
        if fetch is None:
            fetch = self._fetching[place] = _Fetch()
            task = asyncio.get_running_loop().create_task(
                self._fetch(moved, number), name="iris-segment"
            )
            fetch.task = task
        return fetch

    async def _fetch(self, moved: Moved, number: int) -> None:
        place = moved.key, number
        try:
            rows, size = await self._read(moved, number)
        except asyncio.CancelledError:
            del self._fetching[place]
            raise
        except ObjectDamaged as err:
            self._fail(place, True, str(err))
        except (BucketError, TimeoutError) as err:
            said = str(err) or f"bucket {self._objects.url}: no answer"
            self._fail(place, False, f"object {moved.key} could not be read within {PATIENCE_S:g} s: {said}")  # fmt: skip
        except Exception as err:
            log.exception("store.fault", extra={"fields": {"stream": moved.key}})
            self._fail(place, False, f"object {moved.key}: internal error: {type(err).__name__}")
        else:
            self._failed.pop(place, None)
            self._keep(place, rows, size)
        for again in self._fetching.pop(place).waiting.values():
            try:
                again()
            except Exception:  # the other reads go on
                log.exception("store.fault", extra={"fields": {"stream": moved.key}})
        self.on_read()

    async def _read(self, moved: Moved, number: int) -> tuple[Rows, int]:
        """Return a chunk and its size. Raises BucketError, ObjectDamaged, TimeoutError."""
        start, end = moved.range_of(number)
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, random.random)
        until_s = self._now_s() + PATIENCE_S
        while True:
            try:
                async with self._requests, asyncio.timeout(max(0.0, until_s - self._now_s())):
                    self.reads += 1
                    sealed = await self._objects.get_range(moved.key, start, end)
                break
            except BucketError:
                pause_s = backoff.failed()
                if self._now_s() + pause_s >= until_s:
                    raise
                await asyncio.sleep(pause_s)
        if sealed is None:
            raise ObjectDamaged(f"object {moved.key} of bucket {self._objects.url} is missing")
        try:
            plain = self._sealer.open_chunk(moved.key, number, sealed)
            return _decode(plain), len(plain)
        except msgspec.DecodeError as err:
            raise ObjectDamaged(f"object {moved.key}: chunk {number}: {err}") from err

    def _keep(self, place: Place, rows: Rows, size: int) -> None:
        self._cache[place] = rows, size
        self.cached_bytes += size
        while self.cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, (_, removed) = self._cache.popitem(last=False)
            self.cached_bytes -= removed

    def _fail(self, place: Place, lost: bool, why: str) -> None:
        self._failed[place] = lost, why, self._now_s()
        self._failed.move_to_end(place)
        while len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)
