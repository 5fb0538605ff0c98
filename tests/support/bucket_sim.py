"""Stores over a bucket in memory that is late, silent and deaf, in virtual time: one life by its seed.

`life` is what `make test` runs with some seeds and `make proof AREA=bucket` with many.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from iris.crypto.keys import GroupKey
from relay.store.batches import PUT, Op
from relay.store.bucket.keeper import Keeper
from relay.store.bucket.objects import BucketError, Objects
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Rows
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.writer import Writer
from relay.store.database import Database
from relay.store.errors import Refuse
from relay.store.log import Log

STREAM = bytes(range(16))
KEY = GroupKey(bytes(32))
WRITES = 60
PATIENCE_S = 600.0
"""In virtual time."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when there is nothing to do. While a thread works, it stands."""

    now_s = 0.0
    _threads = 0

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[asyncio.Future[None], Callable[[], object]] = {}

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> asyncio.Future[Any]:
        made = super().run_in_executor(executor, function, *args)
        self._threads += 1
        made.add_done_callback(self._thread_ended)
        return made

    def _thread_ended(self, _: object) -> None:
        self._threads -= 1

    def _run_once(self) -> None:
        if not self._ready and self._scheduled and not self._threads:  # type: ignore[attr-defined]  # of asyncio's own base class
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]  # the same
        super()._run_once()  # type: ignore[misc]  # the same
        for waiter, holds in self.watched.items():
            if not waiter.done() and holds():
                waiter.set_result(None)


async def until(holds: Callable[[], object], seconds: float = 300.0) -> None:
    """Return when `holds()` is true, which is looked at after each turn of the loop: something must happen by then."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    if holds():
        return
    waiter = loop.create_future()
    loop.watched[waiter] = holds
    try:
        async with asyncio.timeout(seconds):
            await waiter
    finally:
        del loop.watched[waiter]


class Memory:
    """A bucket in memory. Creates are late, carried out without an answer, refused or lost."""

    url = "memory:"

    def __init__(self, rng: random.Random) -> None:
        self.objects: dict[str, bytes] = {}
        self._rng = rng

    async def create(self, key: str, data: bytes) -> bool:
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        fate = self._rng.random()
        if key.startswith("probe/"):
            fate = 1.0
        if fate < 0.1:
            raise BucketError("lost")
        if fate < 0.25:
            loop = asyncio.get_running_loop()
            loop.call_later(self._rng.uniform(0, 2), self.objects.setdefault, key, data)
            raise BucketError("late")
        made = self.objects.setdefault(key, data) is data
        if fate < 0.4:
            raise BucketError("no answer")
        return made

    async def get(self, key: str) -> bytes | None:
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        return self.objects.get(key)

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        found = await self.get(key)
        return None if found is None else found[start:end]

    async def exists(self, key: str) -> bool:
        return await self.get(key) is not None

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)


class Scripted:
    """A bucket in memory that does what it is told, except where `fault` raises or waits."""

    url = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[str, str], Awaitable[None]] = _no_fault
        """Called with "create", "get", "exists" or "delete" and the key, before it is done; for "created" after."""

    async def create(self, key: str, data: bytes) -> bool:
        await self.fault("create", key)
        made = self.objects.setdefault(key, data) is data
        await self.fault("created", key)
        return made

    async def get(self, key: str) -> bytes | None:
        await self.fault("get", key)
        return self.objects.get(key)

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        await self.fault("get", key)
        found = self.objects.get(key)
        return None if found is None else found[start:end]

    async def exists(self, key: str) -> bool:
        await self.fault("exists", key)
        return key in self.objects

    async def delete(self, key: str) -> None:
        await self.fault("delete", key)
        self.objects.pop(key, None)


async def _no_fault(what: str, key: str) -> None:
    await asyncio.sleep(0.001)


class Owner:
    """A store that has nothing but its keeper: it opens what it is to serve, and lists it."""

    def __init__(self, visible: set[str] | None = None) -> None:
        self.visible = visible
        """Addresses of the stores that it sees."""
        self.served: dict[bytes, tuple[Database, Replica]] = {}
        self.full: Refuse | None = None
        """Why no stream may move here."""

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False) -> None:
        for uuid, (path, replica) in found.items():
            database = Database.open(str(path))
            database.copier = replica
            self.served[uuid] = database, replica

    def abandon(self, writer: Writer) -> None:
        for uuid, (database, replica) in list(self.served.items()):
            if replica.writer is writer:
                del self.served[uuid]
                database.close()

    def check_arrival(self, name: str, key_ids: list[bytes], count: int) -> None:
        if self.full is not None:
            raise self.full

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        database, _ = self.served.pop(uuid)
        database.close()
        return {uuid: Path(database.path)}

    def logs(self, writer: Writer) -> dict[bytes, Log]:
        return {}

    def stores(self) -> set[str] | None:
        return self.visible

    def flush(self) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        """Close what is open, as a killed store does."""
        for database, _ in self.served.values():
            database.close()
        self.served.clear()


class Ack:
    """An acknowledgement that waits to leave the store."""

    def __init__(self, acked: list[bytes], row: bytes) -> None:
        self._acked = acked
        self._row = row

    def release(self) -> None:
        self._acked.append(self._row)

    def withdraw(self, reason: str) -> None:
        """It is not acknowledged."""


def keeper(
    objects: Objects, directory: Path, store: int, owner: Owner | None = None, **settings: Any
) -> tuple[Keeper, Shelf]:
    """Return the keeper of a store, and what it keeps."""

    def now_us() -> int:
        return int(asyncio.get_running_loop().time() * 1e6)

    shelf = Shelf(directory, KEY, objects.url, now_us)
    made = Keeper(
        shelf, objects, bytes([store]) * 32, "", owner or Owner(), now_us=now_us, wall_us=now_us, **settings
    )  # fmt: skip
    return made, shelf


async def write(shelf: Shelf, rng: random.Random, acked: list[bytes]) -> None:
    """Write rows as a store does until its journal ends."""
    await until(lambda: shelf.writer)
    writer = shelf.writer
    assert writer is not None
    for number in range(WRITES):
        row = number.to_bytes(4, "big")
        now_us = int(asyncio.get_running_loop().time() * 1e6)
        place = writer.add(Rows(STREAM, [Op(PUT, b"x" + row, b"")]), 10, now_us)
        writer.hold(place, Ack(acked, row))
        await asyncio.sleep(rng.uniform(0, 0.15))


async def take_over(taker: Keeper) -> None:
    while True:
        try:
            await taker.restore()
        except BucketError:
            await asyncio.sleep(0.1)
        else:
            return


async def life(directory: Path, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Return what the first store acknowledged, and what the second has."""
    rng = random.Random(seed)
    objects = Memory(rng)
    ours, shelf = keeper(objects, directory / "ours", 1)
    owner = Owner()
    theirs, their_shelf = keeper(objects, directory / "theirs", 2, owner)
    acked: list[bytes] = []
    running = asyncio.create_task(ours.run())
    writing = asyncio.create_task(write(shelf, rng, acked))
    await until(lambda: acked)
    await asyncio.sleep(rng.uniform(0, 3))
    await take_over(theirs)
    await writing
    await asyncio.sleep(20)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    owner.close()
    database = Database.open(str(their_shelf.directory / STREAM.hex()))
    try:
        return acked, [row for row, _ in database.rows(b"x")]
    finally:
        database.close()


def run(work: Coroutine[Any, Any, Any], patience_s: float = PATIENCE_S) -> Any:
    with asyncio.Runner(debug=False, loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(work, patience_s))
