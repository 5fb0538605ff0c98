"""A store as a process: a real `Store` and a real `Keeper`, with stand-ins for its relay, its sockets and its clocks.

It does what `relay.store.process.StoreProcess` does: commits soon after something came, ticks, and writes answers
when it flushes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from iris.core.conversation import UP
from iris.crypto.keys import GroupKey, StoreKey
from iris.wire import frames
from iris.wire.kinds import Kind
from iris.wire.streams import Answer, Call, decode_answer
from relay.store.bucket.keeper import Keeper
from relay.store.bucket.reading import SegmentReader
from relay.store.bucket.replica import Replica
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.shelf import DIRECTORY, Shelf
from relay.store.bucket.tiers import Tiers
from relay.store.bucket.writer import Writer
from relay.store.errors import RecordsAway
from relay.store.log import Log
from relay.store.records import Record
from relay.store.session import Flow, IncomingCall
from relay.store.store import Store
from relay.supervisor import STREAMS
from support.bucket_lives.bucket import Bucket, Port
from support.bucket_lives.loops import Loop

TICK_S: Final = 0.5
CACHE_BYTES: Final = 2000
"""Moved records that a store keeps in memory: few, so that it reads objects often."""
EPOCH_US: Final = 1_800_000_000_000_000
"""Wall clock at the beginning of a life."""
GROUP: Final = GroupKey(bytes(32))
_CHANNEL: Final[Any] = object()
"""Every call is authenticated; the session is a stand-in, which seals nothing."""


class Request:
    """A call on its way; `answered` is called with the answer, if one comes."""

    def __init__(
        self, name: str, key_id: bytes, call: Call, answered: Callable[[Answer], None], deadline_us: int = 0
    ) -> None:  # fmt: skip
        self.name = name
        self.key_id = key_id
        self.call = call
        self.answered = answered
        self.deadline_us = deadline_us


class Session:
    """A stand-in for the session with a relay that accepts everything."""

    state = UP
    message_limit = 1 << 20

    def __init__(self) -> None:
        self.served: dict[int, str] = {}
        """Member -> the name or uuid that it serves."""
        self.out: list[tuple[Request, bytes]] = []
        self.waiting: dict[int, Request] = {}
        self._members = 0
        self._hops = 0

    def grant(self, key: StoreKey, signed: Any, waiter: Any) -> None:
        self._accept(waiter)

    def join(self, name: str, key_ids: Any, kinds: Any, tag: str, waiter: Any) -> None:
        self.served[self._members + 1] = name
        self._accept(waiter)

    def ask(self, build: Callable[[int], Any], waiter: Any) -> None:
        asked = build(1)
        if isinstance(asked, frames.Leave):
            self.served.pop(asked.member, None)
        self._accept(waiter)

    def control(self, body: Any) -> None:
        """Members, which the life answers in `Process.stores`."""

    def _accept(self, waiter: Any) -> None:
        self._members += 1
        waiter.set_result(frames.Ack(0, "", self._members))

    def receive(self, request: Request) -> IncomingCall:
        """Return the call as the store receives it."""
        self._hops += 1
        self.waiting[self._hops] = request
        declared = frames.Declare(1, Kind.STREAM, request.name, request.key_id, bytes(16))
        incoming = IncomingCall(
            self, Flow(declared), self._hops, request.deadline_us, request.call  # type: ignore[arg-type]  # a stand-in
        )  # fmt: skip
        incoming.channel = _CHANNEL
        return incoming

    def answer(self, incoming: IncomingCall, body: bytes) -> None:
        request = self.waiting.pop(incoming.hop)  # a KeyError shows a call that is answered twice
        self.out.append((request, body))


class World:
    """What a process needs of the life around it."""

    bucket: Bucket
    rng: random.Random
    now_us: int

    def stores(self, process: Process) -> set[str] | None:
        """Return the addresses of the stores that its relay shows to this one."""
        raise NotImplementedError

    def adopted(self, process: Process, uuid: bytes) -> None:
        """A process serves a stream that it has taken over or opened again."""
        raise NotImplementedError

    def deliver(self, request: Request, answer: Answer) -> None:
        """Send an answer to a client."""
        raise NotImplementedError


class Process:
    """One start of a store. `directory` is its disk."""

    def __init__(
        self, world: World, loop: Loop, number: int, directory: Path, *, failover_s: float, checkpoint_bytes: int,
        disk_limit: int = 0, runs: bool = True,
    ) -> None:  # fmt: skip
        """`runs`: it serves; else it only restores."""
        self.loop = loop
        self.number = number
        self.directory = directory
        self.dead = False
        self.cut_off = False
        """Its relay is gone: no client reaches it, and it sees no other store."""
        self.wakes: list[Callable[[], None]] = []
        self._world = world
        self._committing = False
        key = StoreKey(number.to_bytes(1, "big") * 32)
        (directory / STREAMS).mkdir(parents=True, exist_ok=True)
        rng = world.rng
        objects = Port(world.bucket, self)
        shelf = Shelf(directory / DIRECTORY, GROUP, objects.url, self._now_us)
        self.reader = shelf.reader = SegmentReader(
            objects, Sealer(GROUP, rng.randbytes), cache_bytes=CACHE_BYTES, now_s=self._now_s
        )
        self.reader.on_read = self._flush
        self.store = Store(directory, key, "", self._dirty, self._flush, rng.randbytes, shelf)
        self.address = self.store.address
        self.store.load(EPOCH_US + world.now_us)
        self.session = Session()
        self.keeper = Keeper(
            shelf, objects, key.public_key, "", self, now_us=self._now_us, wall_us=self._wall_us,
            failover_s=failover_s, checkpoint_bytes=checkpoint_bytes, entropy=rng.randbytes,
        )  # fmt: skip
        self.shelf = shelf
        if not runs:
            return
        self.attach()
        tiers = Tiers(
            objects, Sealer(GROUP, rng.randbytes), disk_limit, self.store.in_bucket, left=shelf.left, now_s=self._now_s,
            entropy=rng.randbytes,
        )  # fmt: skip
        for work in (self.keeper.run, self._tick, tiers.run):
            loop.create_task(work())

    # -- what the process asks for -----------------------------------------------------------------------------

    def _now_us(self) -> int:
        return self._world.now_us

    def _now_s(self) -> float:
        return self._world.now_us / 1e6

    def _wall_us(self) -> int:
        return EPOCH_US + self._world.now_us

    def _dirty(self) -> None:
        if not self._committing:
            self._committing = True
            self.loop.call_soon(self._commit)

    def _commit(self) -> None:
        self._committing = False
        self._update_time()
        self.store.commit()
        self._flush()

    def _update_time(self) -> None:
        self.store.update_time(self._wall_us(), self._now_us())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._update_time()
            self.store.tend()
            self._flush()

    def _flush(self) -> None:
        if self.dead or self.cut_off:
            return
        out, self.session.out = self.session.out, []
        for request, body in out:
            self._world.deliver(request, decode_answer(body))

    # -- the owner of a keeper -----------------------------------------------------------------------------------

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False) -> None:
        self._update_time()
        self.store.adopt(found, moved=moved)
        for uuid in found:
            self._world.adopted(self, uuid)
        self._flush()

    def check_arrival(self, name: str, key_ids: list[bytes], count: int) -> None:
        self.store.catalogue.check_arrival(name, key_ids, count)

    def abandon(self, writer: Writer) -> None:
        self.store.abandon(writer)

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        return self.store.catalogue.release(uuid)

    def logs(self, writer: Writer) -> dict[bytes, Log]:
        return self.store.logs_of(writer)

    def stores(self) -> set[str] | None:
        return None if self.cut_off else self._world.stores(self)

    def flush(self) -> None:
        self._flush()

    # -- what happens to it --------------------------------------------------------------------------------------

    def attach(self) -> None:
        """It has a relay, for the first time or again."""
        self.session = Session()
        self.cut_off = False
        self.store.attached(self.session, first=True)  # type: ignore[arg-type]  # a stand-in
        self.keeper.check()

    def detach(self) -> None:
        """Its relay is gone."""
        self.cut_off = True
        self.store.detached()

    def receive(self, request: Request) -> None:
        """Receive a call of a client."""
        if not self.dead:
            self.loop.call_soon(self._receive, request)

    def _receive(self, request: Request) -> None:
        if not self.cut_off and not self.dead:
            self._update_time()
            self.store.call_received(self.session.receive(request))
            self._flush()

    def serves(self, name: str) -> bool:
        """Return whether clients who ask for a stream find this process."""
        return not self.dead and not self.cut_off and name in self.session.served.values()

    def holds(self, uuid: bytes) -> bool:
        """Return whether it serves a stream, and its journal has not ended as far as it knows."""
        stream = self.store.streams.get(uuid)
        return stream is not None and stream.replica is not None and not stream.replica.writer.ended

    def settled(self, uuid: bytes) -> bool:
        """Return whether everything that a stream has is known to be in the bucket."""
        replica = self.store.streams[uuid].replica
        return replica is not None and replica.settled

    def kill(self) -> dict[bytes, tuple[str, list[tuple[int, bytes]]]]:
        """End the process as SIGKILL does; return what its disk has: uuid -> (journal, records)."""
        self.dead = True
        self.loop.end()
        left = {}
        for stream in self.store.streams.values():
            if stream.log is not None:
                if stream.replica is not None:
                    left[stream.uuid] = (stream.replica.writer.journal, records(stream.log))
                stream.log.close()
        return left


def records(log: Log) -> list[tuple[int, bytes]]:
    """Return (offset, body) of every record that a log has on its disk."""
    found = log.read(max(log.oldest, log.offloading.end), 1 << 30, now_us=0).items
    return [(item.first, item.body) for item in found if isinstance(item, Record)]


async def all_records(log: Log) -> list[tuple[int, bytes]]:
    """Return (offset, body) of every record of a log, also of those in the bucket."""
    found: list[tuple[int, bytes]] = []
    at = log.oldest
    while at < log.next:
        try:
            chunk = log.read(at, 1 << 20, now_us=0)
        except RecordsAway:
            await asyncio.sleep(0.05)  # it is being fetched
            continue
        found += [(item.first, item.body) for item in chunk.items if isinstance(item, Record)]
        at = chunk.next
    return found
