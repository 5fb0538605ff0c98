"""Keeps the places of a client's workers at stores: consumers that are not shared have one active worker each.

One Attend call at a time for each store, which the store holds until a place changes or a second is over. Which logs
are at the same store is found out: each worker begins with a loop of its own, and ends it when the loop of another one
is at the same store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import weakref
from typing import Final, Protocol, TypeVar

from iris.crypto.keys import ClusterKey
from iris.errors import IrisError, RequestError, StreamError
from iris.forks import disable_in_child, keep_in_child
from iris.wire.consumers import Attend, Attended, Settle
from iris.wire.streams import Settled

RENEW_MS: Final = 1000
"""How long the store holds a call; then the client makes the next one."""
ANSWER_S: Final = 4.0
"""Seconds for an answer. A lease that was not renewed for so long has ended."""
PAUSE_S: Final = 0.25
"""Shortest time between two calls."""


T = TypeVar("T")


class Location(Protocol):
    """Where a log is."""

    @property
    def address(self) -> str: ...
    @property
    def key(self) -> ClusterKey: ...


class Asking(Protocol):
    """What is asked of stores; see `iris.streams.stores.Stores`."""

    async def find(self, name: str, uuid: str, *, timeout: float) -> Location: ...
    async def ask(
        self, address: str, key: ClusterKey, call: Attend, answer: type[T], *, timeout: float, shown: str
    ) -> T: ...  # fmt: skip
    async def ask_stream(
        self, name: str, uuid: str, call: Settle, answer: type[T], *, timeout: float, writes: bool
    ) -> T: ...  # fmt: skip


class Attending(Protocol):
    """A worker of one log whose place is kept."""

    id: bytes
    stream: str
    consumer: str

    @property
    def uuid(self) -> str: ...
    def placed(self, place: int | None) -> None:
        """Its place is now `place`: 0 if it is active. None: it has none, until it asks for messages again."""


class Attendance:
    """Renews the lease of one client's workers."""

    def __init__(self, stores: Asking) -> None:
        self.lease = os.urandom(16)
        self._stores = weakref.ref(stores)
        self._workers: weakref.WeakValueDictionary[bytes, Attending] = weakref.WeakValueDictionary()
        self._loops: dict[bytes, asyncio.Task[None]] = {}
        """Worker -> the loop that renews by way of its log."""
        self._via: dict[bytes, bytes] = {}
        """Store -> the worker whose loop renews the lease there."""
        self._kept: dict[bytes, bytes] = {}
        """Worker -> the store at which its place is known to be."""
        self._known: dict[bytes, tuple[str, str, str]] = {}
        """Worker -> its (stream, uuid, consumer), to give its place back if the program has dropped the worker."""
        self._leaving: set[asyncio.Task[None]] = set()
        disable_in_child(self)

    def keep(self, worker: Attending) -> None:
        """Keep the place of a worker that asks for messages now."""
        self._workers[worker.id] = worker
        self._known[worker.id] = worker.stream, worker.uuid, worker.consumer
        if worker.id not in self._kept and worker.id not in self._loops:
            self._start(worker.id)

    def look_again(self, worker: Attending) -> None:
        """Find out again at which store a worker's place is, because its log may have moved."""
        self._kept.pop(worker.id, None)

    def leave(self, worker: Attending) -> None:
        """Keep the place of a worker no longer, because it is closed."""
        self._workers.pop(worker.id, None)
        self._kept.pop(worker.id, None)
        self._known.pop(worker.id, None)
        loop = self._loops.get(worker.id)
        if loop is not None:
            loop.cancel()

    def end(self) -> None:
        """Stop, because the client is closed."""
        self._workers.clear()
        for task in [*self._loops.values(), *self._leaving]:
            task.cancel()

    def _forked(self) -> None:
        """Do nothing in the child of a fork: the loops are the parent's."""
        keep_in_child([*self._loops.values(), *self._leaving])
        self._workers.clear()
        self._loops, self._leaving = {}, set()

    def _start(self, id: bytes) -> None:
        loop = asyncio.get_running_loop().create_task(self._run(id), name="iris-attend")
        self._loops[id] = loop
        loop.add_done_callback(lambda done: self._ended(id, done))

    def _ended(self, id: bytes, loop: asyncio.Task[None]) -> None:
        """The loop of a worker has ended: others that it kept begin loops of their own."""
        if self._loops.get(id) is not loop:
            return
        del self._loops[id]
        self._give_up(id)

    def _give_up(self, id: bytes, *, but: bytes = b"") -> None:
        """The loop of a worker does not renew at stores, `but` one: others that it kept begin loops of their own."""
        for store in [store for store, via in self._via.items() if via == id and store != but]:
            del self._via[store]
            for other in [other for other, at in self._kept.items() if at == store]:
                del self._kept[other]
                if other in self._workers and other not in self._loops:
                    self._start(other)

    async def _run(self, id: bytes) -> None:
        while (worker := self._workers.get(id)) is not None:
            began_s = time.monotonic()
            call = Attend(worker.consumer, self.lease, RENEW_MS)
            stream, uuid = worker.stream, worker.uuid
            del worker  # one that nobody uses any more must not be kept here
            try:
                answer = await self._ask(stream, uuid, call)
            except (RequestError, StreamError):
                self._give_up(id)
                await asyncio.sleep(random.uniform(PAUSE_S, 2 * PAUSE_S))
                continue  # the worker's own calls raise what is wrong
            except IrisError:
                return
            if answer is None or not self._answered(id, answer):
                return
            await asyncio.sleep(max(0.0, began_s + PAUSE_S - time.monotonic()))

    async def _ask(self, stream: str, uuid: str, call: Attend) -> Attended | None:
        stores = self._stores()
        if stores is None:
            return None
        location = await stores.find(stream, uuid, timeout=ANSWER_S)
        return await stores.ask(
            location.address, location.key, call, Attended, timeout=ANSWER_S, shown=stream
        )

    def _answered(self, id: bytes, answer: Attended) -> bool:
        """Note the places at a store; return whether the loop of worker `id` goes on."""
        self._give_up(id, but=answer.store)  # its log has moved
        places = {placed.worker: placed.place for placed in answer.places}
        before = [worker for worker, at in self._kept.items() if at == answer.store]
        for each in {*before, *places, id}:
            worker = self._workers.get(each)
            if worker is not None and each in places:
                self._kept[each] = answer.store
            else:  # it has no place yet, has lost it, or is at another store now
                self._kept.pop(each, None)
            if worker is not None:
                if each not in self._kept and each not in self._loops:
                    self._start(each)
                worker.placed(places.get(each))
            elif each in places and (known := self._known.pop(each, None)) is not None:
                leaving = asyncio.get_running_loop().create_task(self._leave(each, *known))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
        via = self._via.setdefault(answer.store, id)
        return via == id or via not in self._loops

    async def _leave(self, id: bytes, stream: str, uuid: str, consumer: str) -> None:
        """Give the place of a worker back that was never closed, and that nobody uses any more."""
        stores = self._stores()
        if stores is not None:
            with contextlib.suppress(
                IrisError
            ):  # then it keeps its place, as one that does nothing
                call = Settle(consumer, id, gone=True)
                await stores.ask_stream(stream, uuid, call, Settled, timeout=ANSWER_S, writes=True)
