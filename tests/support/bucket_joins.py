"""Whole stores over a bucket in memory, with clients, in virtual time: a stream of one of them joins the bucket.

Any of them can die or sleep at any request to the bucket. What the clients saw is judged at the end.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from iris.crypto.keys import ClusterKey, StoreKey
from iris.wire import stream_items, streams
from iris.wire.orders import KEEP, Definition
from iris.wire.streams import Answer, Call, decode_answer
from relay.store.bucket.copies import Lag
from relay.store.bucket.copy_reading import read_copies
from relay.store.bucket.copying import Copying
from relay.store.bucket.keeper import Keeper
from relay.store.bucket.replica import Replica
from relay.store.bucket.shelf import DIRECTORY, Shelf
from relay.store.bucket.writer import Writer
from relay.store.log import Log
from relay.store.store import Store
from relay.supervisor import STREAMS
from support.bucket_lives.clients import END_FIELDS, Committer, Once, Producer, Reader, Worker
from support.bucket_lives.history import End, History, judge
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import EPOCH_US, GROUP, Request, Session, records
from support.bucket_moves import View
from support.bucket_sim import Scripted
from support.founded import countersigned, creation, founded
from support.keeper import OWNER, order

NAME: Final = "orders"
UUID: Final = founded(OWNER, bytes(range(16)))
DEFINITION: Final = Definition(NAME, dedup_window_us=int(3600e6))
CALL_S: Final = 2.0
TICK_S: Final = 0.25


def now_us() -> int:
    return int(asyncio.get_running_loop().time() * 1e6)


def wall_us() -> int:
    return EPOCH_US + now_us()


class Host:
    """A store on a disk. It can be killed, and started again on the same disk or an empty one."""

    def __init__(self, objects: Scripted, directory: Path, number: int, hosts: list[Host]) -> None:
        self.directory = directory / str(number)
        self.key = StoreKey(bytes([number]) * 32)
        self.hosts = hosts
        """All that see each other; this one, too, once it has started."""
        self.alive = False
        self._objects = objects
        self._tasks: list[asyncio.Task[Any]] = []
        self._committing = False

    def start(self, *, bucket: bool = True) -> None:
        """Start it; not `bucket`: as an operator does who has forgotten the option."""
        (self.directory / STREAMS).mkdir(parents=True, exist_ok=True)
        self.view = View(self._objects)
        self.shelf = Shelf(self.directory / DIRECTORY, GROUP, self.view.url, now_us)
        self.store = Store(
            self.directory, self.key, "", self._dirty, self.flush, random.Random(1).randbytes, self.shelf if bucket else None
        )  # fmt: skip
        self.store.load(wall_us())
        self.session = Session()
        self.alive = True
        self.store.attached(self.session, first=True)  # type: ignore[arg-type]  # a stand-in
        work: list[Any] = [self._tick()]
        if bucket:
            self.keeper = Keeper(
                self.shelf, self.view, self.key.public_key, "", self, now_us=now_us, wall_us=wall_us, checkpoint_bytes=20_000
            )  # fmt: skip
            copying = Copying(
                self.shelf.copies, self.view, GROUP, self.key.public_key, "", self.shelf.directory, now_us=now_us,
                wall_us=wall_us, checkpoint_bytes=20_000, verify=self.keeper.verify,
            )  # fmt: skip
            work += [self.keeper.run(), copying.run()]
        self._tasks = [asyncio.create_task(each) for each in work]
        if self not in self.hosts:
            self.hosts.append(self)

    async def kill(self) -> None:
        """End it at once: nothing that waits leaves it any more."""
        self.alive = False
        if self in self.hosts:
            self.hosts.remove(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self.store.streams.values():
            if stream.log is not None:
                stream.log.close()

    def lose_disk(self) -> None:
        shutil.rmtree(self.directory)

    def receive(self, request: Request) -> None:
        if self.alive:
            self._update_time()
            self.store.call_received(self.session.receive(request))
            self.flush()

    @property
    def serves(self) -> bool:
        """Whether clients who ask for the stream find this store, and it holds the stream as far as it knows."""
        stream = self.store.streams.get(UUID)
        return (
            self.alive
            and NAME in self.session.served.values()
            and stream is not None
            and (stream.replica is None or not stream.replica.writer.ended)
        )

    # The owner of a keeper

    def adopt(self, found: Mapping[bytes, tuple[Path, Replica]], *, moved: bool = False) -> None:
        self._update_time()
        self.store.adopt(found, moved=moved)

    def check_arrival(self, name: str, key_ids: list[bytes], count: int) -> None:
        self.store.catalogue.check_arrival(name, key_ids, count)

    def abandon(self, writer: Writer) -> None:
        self.store.abandon(writer)

    def release(self, uuid: bytes) -> dict[bytes, Path]:
        return self.store.catalogue.release(uuid)

    def logs(self, writer: Writer) -> dict[bytes, Log]:
        return self.store.logs_of(writer)

    def stores(self) -> set[str] | None:
        return {host.store.address for host in self.hosts}

    def flush(self) -> None:
        if not self.alive:
            return
        out, self.session.out = self.session.out, []
        loop = asyncio.get_running_loop()
        for request, body in out:
            loop.call_later(0.001, request.answered, decode_answer(body))

    # What a process does

    def _dirty(self) -> None:
        if not self._committing:
            self._committing = True
            asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        self._committing = False
        if self.alive:
            self._update_time()
            self.store.commit()
            self.flush()

    def _update_time(self) -> None:
        self.store.update_time(wall_us(), now_us())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._update_time()
            self.store.tend()
            self.flush()


class World:
    """Two stores that run, of which the first has the stream on its disk, and clients of the stream."""

    def __init__(self, directory: Path) -> None:
        self.objects = Scripted()
        self.visible: list[Host] = []
        self.first, self.second = (Host(self.objects, directory, n, self.visible) for n in (1, 2))
        self.history = History()
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(7)
        self.joined = False
        """Whether the stream was in the bucket at the end."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._writing: list[asyncio.Task[Any]] = []

    @property
    def hosts(self) -> list[Host]:
        return [self.first, self.second]

    async def begin(
        self, *keys: ClusterKey, records: int = 3, clients: bool = True, definition: Definition = DEFINITION
    ) -> None:  # fmt: skip
        """Start the stores, and make the stream under these keys."""
        for host in self.hosts:
            host.start()
        await until(lambda: all(host.shelf.writer for host in self.hosts))
        signed = self.orders(*keys, revision=0, definition=definition, store=self.first.key)
        answer = await self.call(self.first, self.first.store.address, creation(*signed))
        assert isinstance(answer, streams.Described), answer

        plan = StreamPlan(NAME, UUID, definition, 0)

        def given(who: str) -> tuple[Any, ...]:
            return who, plan, self.ask, self.history, self._rng, self.counts

        before = Producer(*given("before"), count=records, ids=False, mean_s=0.01)
        await before.run()
        if clients:
            writers = [
                Producer(*given("numbers"), count=8, ids=False, mean_s=0.2),
                Producer(*given("ids"), count=4, ids=True, mean_s=0.3),
                Once(*given("once"), count=4, mean_s=0.3),
                Committer(*given("batches"), count=2, mean_s=0.3),
            ]
            self._writing = [asyncio.create_task(one.run()) for one in writers]  # type: ignore[attr-defined]  # both have it
            others = [Reader(*given("reader")), Worker(*given("worker"))]
            self._tasks = [asyncio.create_task(one.run()) for one in others]

    def orders(
        self, *keys: ClusterKey, revision: int = 1, definition: Definition = DEFINITION, store: StoreKey = GROUP,
        action: str = KEEP,
    ) -> list[Any]:  # fmt: skip
        """Return orders that change the stream; by default it joins the bucket."""
        first, *rest = (
            order(
                key,
                definition,
                action=action,
                issued_us=wall_us(),
                uuid=UUID,
                store=store,
                revision=revision,
            )
            for key in keys or (OWNER,)
        )
        return [first, *(rest if revision else (countersigned(keys[0], one) for one in rest))]

    async def join(self, seconds: float = CALL_S) -> Answer | None:
        """Let the stream join as a client does that gives up after so many seconds."""
        return await self.change(self.orders(), seconds)

    async def change(self, orders: list[Any], seconds: float = CALL_S) -> Answer | None:
        """Send orders to the first store."""
        return await self.call(self.first, NAME, streams.Change(orders), seconds)

    async def ask(self, name: str, call: Call) -> Answer | None:
        """Send a call to the store that serves the stream."""
        serving = [host for host in self.visible if host.serves]
        if not serving:
            await asyncio.sleep(0.2)
            return None
        return await self.call(self._rng.choice(serving), name, call)

    async def call(
        self, host: Host, name: str, call: Call, seconds: float = CALL_S
    ) -> Answer | None:
        """Send a call to a store; return its answer, if it comes in time."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def settle(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        ours = (NAME, UUID.hex(), stream_items.dead_uuid(UUID).hex())
        key_id = OWNER.key_id if name in ours else bytes(16)
        deadline_us = now_us() + int(seconds * 1e6)
        host.receive(Request(name, key_id, call, settle, deadline_us))
        done, _ = await asyncio.wait([answered], timeout=seconds)
        return answered.result() if done else None

    async def append(self, body: bytes) -> Answer | None:
        """Append a message, and try it once."""
        record = streams.NewRecord(0, END_FIELDS, body)
        return await self.call(self.first, NAME, streams.Append(bytes(16), [record]))

    async def stop(self) -> None:
        """End everything, whatever its state."""
        for task in (*self._tasks, *self._writing):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._writing, return_exceptions=True)
        for host in list(self.visible):
            await host.kill()

    async def end(self) -> list[bytes]:
        """Wait until the clients are done and one store has the stream; return what it has, once it was judged."""
        await until(lambda: all(task.done() for task in self._writing))
        for task in self._writing:
            task.result()
        await until(lambda: sum(host.serves for host in self.hosts) == 1)
        await asyncio.sleep(70)  # longer than any store that is gone is waited for
        assert sum(host.serves for host in self.hosts) == 1
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        found = await self.whole()
        self.history.ends[NAME] = End(0, len(found), found)
        assert judge(self.history) == []
        self.joined = any(
            stream.in_bucket for host in self.hosts if host.serves for stream in [host.store.streams[UUID]]
        )  # fmt: skip
        for host in self.hosts:
            if host.alive:
                await host.kill()
        return [body for _, body in found]

    async def check_again(self, directory: Path) -> None:
        """After `end`: see that the stream is the same after another start; or if it has joined, without any disk. It
        has a copy in the bucket, or it is there itself."""
        if self.joined:
            for host in self.hosts:
                host.lose_disk()
            last = self.second = Host(self.objects, directory, 9, self.visible)
            last.start()
            await until(lambda: last.shelf.writer)
            await last.keeper.restore()
        else:
            self.first.start()
        await until(lambda: any(host.serves for host in self.visible))
        end = self.history.ends[NAME].items
        assert await self.whole() == end
        if not self.joined:
            copy = self.first.store.streams[UUID].bucket_copy
            assert copy is not None
            await until(lambda: copy.lag() == Lag(0, 0))
        copies = await read_copies(self.objects, GROUP, directory / "copies")
        there = []
        for one in copies:
            with Log.open(str(one.path)) as log:
                there.append(records(log))
        assert there == ([] if self.joined else [end])
        for host in list(self.visible):
            await host.kill()

    async def whole(self) -> list[tuple[int, bytes]]:
        """Return (offset, body) of everything that the stream has."""
        found: list[tuple[int, bytes]] = []
        at = 0
        while True:
            answer = await self.ask(NAME, streams.Fetch(at, 1 << 19))
            if not isinstance(answer, streams.Fetched):
                await asyncio.sleep(0.1)
                continue
            for item in answer.items:
                assert isinstance(item, stream_items.Record), item
                found.append((item.offset, item.body))
            at = answer.next
            if at == answer.high_water:
                return found


async def until(holds: Callable[[], Any], seconds: float = 300.0) -> None:
    """Wait, in virtual time."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
