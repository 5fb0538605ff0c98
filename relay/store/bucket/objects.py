"""A bucket: objects by key, of which each is created once.

The only agreement that streams in a bucket need is that the second of two creates of a key is
refused. `probe` checks that a service does this before anything is stored there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from typing import Any, Final, Protocol, TypeVar

from iris.core.backoff import Backoff
from iris.errors import ConfigError, IrisError

S = TypeVar("S")
T = TypeVar("T")

TIMEOUT_S: Final = 30.0
"""How long a service may take to answer, and no time at all to send."""
LEAST_RATE: Final = 128 << 10
"""Bytes per second that a service is expected to take or to send at least: a large object gets more time."""
FIRST_BYTES: Final = 256 << 10
"""What is read of an object before any of it is authenticated. Most objects are smaller."""
AT_ONCE: Final = 32
"""Things that `each_of` asks about at once."""
TRIES: Final = 8
AGAIN_MIN_S: Final = 0.1
AGAIN_MAX_S: Final = 5.0
"""`Patient` gives up after about 10 seconds."""


class BucketError(IrisError):
    """The bucket did not do what was asked. A create that failed may have been carried out, now or later."""


class Objects(Protocol):
    """The objects of one bucket, below one prefix."""

    url: str

    async def create(self, key: str, data: bytes) -> bool:
        """Create an object; return False if the key exists. Raises BucketError."""

    async def get(self, key: str) -> bytes | None:
        """Return the first `FIRST_BYTES` of an object, fewer if it ends before; None if it does not exist.

        To read a whole object, use `relay.store.bucket.whole`. Raises BucketError, and ObjectDamaged if it is not a
        file.
        """

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Return the bytes of an object from `start` until `end`, fewer if it ends before; None if it does not exist.

        Raises BucketError, and ObjectDamaged if it is not a file.
        """

    async def exists(self, key: str) -> bool:
        """Return whether an object exists. Raises BucketError."""

    async def delete(self, key: str) -> None:
        """Delete an object if it exists. Raises BucketError."""


class Patient:
    """A bucket whose requests are repeated for a while if they fail: for work that needs so many requests that some do,
    and that would have to begin again. Creates are not repeated, because one that failed may have been carried out.
    """

    def __init__(self, objects: Objects) -> None:
        self.url = objects.url
        self._objects = objects

    async def create(self, key: str, data: bytes) -> bool:
        return await self._objects.create(key, data)

    async def get(self, key: str) -> bytes | None:
        return await _often(lambda: self._objects.get(key))

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return await _often(lambda: self._objects.get_range(key, start, end))

    async def exists(self, key: str) -> bool:
        return await _often(lambda: self._objects.exists(key))

    async def delete(self, key: str) -> None:
        await _often(lambda: self._objects.delete(key))


def patient(objects: Objects) -> Objects:
    """Return this bucket, whose requests are repeated."""
    return objects if isinstance(objects, Patient) else Patient(objects)


async def _often(request: Callable[[], Awaitable[T]]) -> T:
    """Return what a request returns, which is made up to `TRIES` times. Raises BucketError."""
    backoff = Backoff(AGAIN_MIN_S, AGAIN_MAX_S, random.random)
    while True:
        try:
            return await request()
        except BucketError:
            pause_s = backoff.failed()
            if backoff.failures == TRIES:
                raise
        await asyncio.sleep(pause_s)


@contextlib.asynccontextmanager
async def time_for(size: int) -> AsyncIterator[None]:
    """Bound a request that sends or gets `size` bytes. Raises TimeoutError."""
    seconds = TIMEOUT_S + size / LEAST_RATE
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as err:
        if limit.expired():
            raise TimeoutError(f"no answer within {seconds:.0f} s") from err
        raise


async def at_once(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of requests that run at the same time. The first error cancels the others and is raised."""
    # Not a TaskGroup: in Python 3.11 one whose task fails leaves a request to cancel in the task that waits for it.
    # `asyncio.timeout` then cancels that task for good instead of raising TimeoutError.
    tasks = [asyncio.ensure_future(each) for each in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def each_of(things: Sequence[S], ask: Callable[[S], Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of `ask` for many things. Up to `AT_ONCE` are asked about at the same time.

    Errors as in `at_once`.
    """
    found: list[T] = []
    for at in range(0, len(things), AT_ONCE):
        found += await at_once(ask(each) for each in things[at : at + AT_ONCE])
    return found


async def probe(objects: Objects) -> None:
    """Return if the service refuses to create an object twice.

    Raises:
        ConfigError: it does not.
        BucketError: it did not answer.
    """
    key = f"probe/{secrets.token_hex(8)}"
    try:
        if not await objects.create(key, b"1"):
            raise ConfigError(
                f"bucket {objects.url}: the service says that an object exists which was never created, so streams would not be safe there; use another service"
            )
        if await objects.create(key, b"2") or await objects.get(key) != b"1":
            raise ConfigError(
                f"bucket {objects.url}: the service overwrites an object that exists, although the request forbids it "
                "(If-None-Match: *), so two stores could write the same stream; use a service that refuses such requests, "
                "such as Amazon S3, Google Cloud Storage, Azure, MinIO or Ceph, or a file:// directory"
            )
    finally:
        with contextlib.suppress(BucketError):
            await objects.delete(key)
