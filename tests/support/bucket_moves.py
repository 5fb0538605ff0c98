"""Two stores between which a stream moves, over a bucket in memory. Either can die or sleep at any request."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from iris.crypto.keys import public_id
from relay.store.batches import Op
from relay.store.bucket.replica import Replica
from relay.store.bucket.shelf import Leaving
from relay.store.bucket.writer import Writer
from relay.store.database import Database
from relay.store.errors import Refuse
from relay.store.log import OWN_ROWS
from support.bucket_sim import STREAM, Owner, Scripted, keeper


class MovingOwner(Owner):
    """A store whose databases can be copied, so that a move can be settled."""

    def logs(self, writer: Writer) -> dict[bytes, Any]:
        return {
            uuid: SimpleNamespace(
                copied=lambda database=database: _copied(database), local_bytes=1000
            )
            for uuid, (database, replica) in self.served.items()
            if replica.writer is writer
        }


def _copied(database: Database) -> Iterator[list[Op]]:
    after = b""
    while ops := database.copy_rows(after, OWN_ROWS, 20):
        after = ops[-1].key
        yield ops


class View:
    """A bucket as one store sees it. `at` counts its requests, before and after each; at `stops` they hang."""

    url = "memory:"

    def __init__(self, objects: Scripted) -> None:
        self.objects = objects
        self.at = 0
        self.stops: int | None = None
        self.stopped = asyncio.Event()
        self.awake = asyncio.Event()

    async def _step(self) -> None:
        self.at += 1
        if self.stops is not None and self.at >= self.stops:
            self.stopped.set()
            await self.awake.wait()

    async def create(self, key: str, data: bytes) -> bool:
        await self._step()
        made = await self.objects.create(key, data)
        await self._step()
        return made

    async def get(self, key: str) -> bytes | None:
        await self._step()
        return await self.objects.get(key)

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        await self._step()
        return await self.objects.get_range(key, start, end)

    async def exists(self, key: str) -> bool:
        await self._step()
        return await self.objects.exists(key)

    async def delete(self, key: str) -> None:
        await self._step()
        await self.objects.delete(key)


class Host:
    """A store that can be started, stopped as by a power cut, and started again on the same directory."""

    def __init__(self, objects: Scripted, directory: Path, number: int) -> None:
        self.number = number
        self.owner = MovingOwner()
        self._objects = objects
        self._directory = directory
        self._running: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return public_id(self.key).hex()

    @property
    def key(self) -> bytes:
        return bytes([self.number]) * 32

    def start(self) -> None:
        self.view = View(self._objects)
        self.keeper, self.shelf = keeper(
            self.view, self._directory / str(self.number), self.number, self.owner
        )
        self._running = asyncio.create_task(self.keeper.run())

    async def kill(self) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self.owner.close()

    def lose_disk(self) -> None:
        shutil.rmtree(self._directory / str(self.number))

    @property
    def serves(self) -> bool:
        return STREAM in self.owner.served and not self.owner.served[STREAM][1].writer.ended


class Ticket:
    """What the old store answers."""

    def __init__(self, ticket: bytes, got: asyncio.Future[bytes]) -> None:
        self._ticket = ticket
        self._got = got

    def release(self) -> None:
        if not self._got.done():
            self._got.set_result(self._ticket)

    def withdraw(self, reason: str) -> None:
        if not self._got.done():
            self._got.set_exception(Refuse("moved", reason))


async def move(old: Host, new: Host, seconds: float = 5.0) -> bool:
    """Move the stream as a client does; return whether the new store said that it has it."""
    loop = asyncio.get_running_loop()
    mover, takes = old.shelf.mover, new.shelf.mover
    assert mover is not None
    assert takes is not None
    with contextlib.suppress(TimeoutError, Refuse):
        async with asyncio.timeout(seconds):
            while True:
                got: asyncio.Future[bytes] = loop.create_future()
                try:
                    mover.release(
                        old.owner.served[STREAM][1],
                        new.key,
                        Leaving("orders", [b"key"], 1000),
                        lambda ticket, got=got: Ticket(ticket, got),
                    )
                    break
                except Refuse:
                    await asyncio.sleep(0.05)
            ticket = await got
            end: asyncio.Future[Refuse | None] = loop.create_future()
            takes.take(ticket, end.set_result)
            return await end is None
    return False


def put(database: Database, *numbers: int) -> None:
    batch = database.batch()
    for number in numbers:
        batch.put(b"x%d" % number, b"")
    database.write(batch, 0, sync=False)


def remove(database: Database, number: int) -> None:
    batch = database.batch()
    batch.delete(b"x%d" % number)
    database.write(batch, 0, sync=False)


def numbers_in(database: Database) -> list[int]:
    return sorted(int(row) for row, _ in database.rows(b"x"))


def make(host: Host) -> tuple[Database, Replica]:
    """Create the stream in a store."""
    replica = host.shelf.replica(STREAM)
    database = Database.create(str(host.shelf.directory / STREAM.hex()))
    database.make_mark(STREAM, 0)
    database.copier = replica
    host.owner.served[STREAM] = database, replica
    return database, replica
