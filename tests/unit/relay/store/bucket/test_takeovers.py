"""A store writes while another takes over, in virtual time, over a bucket that is late, silent and deaf, by seeds.

What the first has acknowledged is at the second, whatever became of the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from iris.crypto.keys import GroupKey
from relay.store.bucket.keeper import Keeper
from relay.store.bucket.objects import BucketError
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Rows
from relay.store.bucket.shelf import Shelf
from relay.store.bucket.writer import Writer
from relay.store.database import PUT, Database, Op
from relay.store.log import Log

SEEDS = 25
STREAM = bytes(range(16))
KEY = GroupKey(bytes(32))
WRITES = 60
PATIENCE_S = 600.0
"""In virtual time."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when there is nothing to do."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # of asyncio's own base class
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]  # the same
        super()._run_once()  # type: ignore[misc]  # the same


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

    async def exists(self, key: str) -> bool:
        return await self.get(key) is not None

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)


class Owner:
    """A store that has nothing but its keeper."""

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]]) -> None:
        """Nothing is served."""

    def abandon(self, writer: Writer) -> None:
        """Nothing was served."""

    def logs(self, writer: Writer) -> dict[bytes, Log]:
        return {}

    def stores(self) -> set[str] | None:
        return None

    def flush(self) -> None:
        """Nothing is sent."""


class Ack:
    """An acknowledgement that waits to leave the store."""

    def __init__(self, acked: list[bytes], row: bytes) -> None:
        self._acked = acked
        self._row = row

    def release(self) -> None:
        self._acked.append(self._row)

    def withdraw(self, reason: str) -> None:
        """It is not acknowledged."""


def keeper(objects: Memory, directory: Path, store: int) -> tuple[Keeper, Shelf]:
    def now_us() -> int:
        return int(asyncio.get_running_loop().time() * 1e6)

    shelf = Shelf(directory, KEY, objects.url, now_us)
    return Keeper(shelf, objects, bytes([store]) * 32, "", Owner(), now_us=now_us, wall_us=now_us), shelf  # fmt: skip


async def write(shelf: Shelf, rng: random.Random, acked: list[bytes]) -> None:
    """Write rows as a store does until its journal ends."""
    while shelf.writer is None:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)
    writer = shelf.writer
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
    theirs, their_shelf = keeper(objects, directory / "theirs", 2)
    acked: list[bytes] = []
    running = asyncio.create_task(ours.run())
    writing = asyncio.create_task(write(shelf, rng, acked))
    while not acked:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.01)
    await asyncio.sleep(rng.uniform(0, 3))
    await take_over(theirs)
    await writing
    await asyncio.sleep(20)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    database = Database.open(str(their_shelf.directory / STREAM.hex()))
    try:
        return acked, [row for row, _ in database.rows(b"x")]
    finally:
        database.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(work, PATIENCE_S))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_was_acknowledged_is_at_the_store_that_took_over(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(random, "random", random.Random(seed).random)
    acked, there = run(life(tmp_path, seed))
    assert acked == sorted(set(acked)), "acknowledged in order, each once"
    assert acked == there[: len(acked)], "nothing is lost, and nothing stands between"
