"""One life: stores, clients and a bucket; then the end, at which everything is healthy and must be in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from iris.wire import streams
from iris.wire.kinds import NO_KEY
from iris.wire.orders import Definition
from iris.wire.streams import Answer, Call
from relay.store import consumer_calls
from relay.store.bucket import objects, succession
from relay.store.bucket.objects import BucketError
from relay.store.bucket.sealing import Sealer
from support.bucket_lives.bucket import Bucket
from support.bucket_lives.clients import (
    CONSUMER,
    Committer,
    Once,
    Producer,
    Reader,
    Worker,
)
from support.bucket_lives.history import History, judge
from support.bucket_lives.loops import Loops, Stuck, Time
from support.bucket_lives.store import EPOCH_US, GROUP, Process, Request, World, records
from support.keeper import OWNER, order

CALL_S: Final = 2.0
SETTLED_S: Final = 600.0
"""Virtual time for everything to be in order after the last fault."""
HOUR_S: Final = 3600.0
SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(slots=True)
class Outcome:
    """What a life showed."""

    seed: int
    broken: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Log(logging.Handler):
    """Collects the faults of stores: errors that no code expects."""

    def __init__(self, world: Life) -> None:
        super().__init__(logging.INFO)
        self._world = world
        self.shown: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.shown is not None:
            self.shown(f"{record.getMessage()} {getattr(record, 'fields', '')}")
        if record.getMessage() == "store.fault" or record.name == "asyncio":
            why = record.exc_info[1] if record.exc_info else record.getMessage()
            self._world.breaks(f"a store has an internal error: {why!r}")
        elif record.getMessage() in ("store.took_over", "store.journal_lost", "store.copy_damaged"):
            self._world.counts[record.getMessage()] += 1


class Life(World):
    """Everything in one life."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.broken: list[str] = []
        self.history = History()
        self.time = Time()
        self.loops = Loops(self.time)
        self.loop = self.loops.add()
        self.bucket = Bucket(self.loop, rng, Sealer(GROUP, rng.randbytes), self.counts)
        self.streams = {
            f"s{number}": number.to_bytes(16, "big") for number in range(1, rng.randint(2, 3) + 1)
        }
        self.processes: dict[int, Process] = {}
        """Those that run or sleep, by number."""
        self.down: list[int] = []
        """Those that were killed, and have a disk."""
        self._directory = directory
        self._starts = 0
        self._failover_s = rng.choice((1.0, 2.0, 5.0))
        self._checkpoint_bytes = rng.choice((2_000, 10_000, 40_000))
        self._hidden: set[tuple[str, str]] = set()
        """(address of the store that looks, address that it does not see)."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._left: dict[bytes, tuple[int, str, list[tuple[int, bytes]]]] = {}
        """Stream -> (store that was killed, its journal, what its disk has)."""
        self.shown: Callable[[str], None] = lambda text: None

    @property
    def now_us(self) -> int:  # type: ignore[override]  # the world only reads it
        return self.time.now_us

    def breaks(self, text: str) -> None:
        """Note a broken promise."""
        self.broken.append(text)

    def show(self, text: str) -> None:
        self.shown(f"{self.time.now_s:8.2f} {text}")

    # -- what processes ask for ------------------------------------------------------------------------------

    def stores(self, process: Process) -> set[str] | None:
        return {
            other.address
            for other in self.processes.values()
            if not other.cut_off
            and not other.loop.frozen
            and (process.address, other.address) not in self._hidden
        }

    def deliver(self, request: Request, answer: Answer) -> None:
        self.loop.call_later(self.rng.uniform(0, 0.01), request.answered, answer)

    def adopted(self, process: Process, uuid: bytes) -> None:
        stream = process.store.streams[uuid]
        self.counts["adopted"] += 1
        left = self._left.pop(uuid, None)
        if left is None or stream.replica is None or stream.log is None:
            return
        number, journal, had = left
        if number != process.number or not self._only(journal, stream.replica.writer.journal, process):  # fmt: skip
            self.counts["redo not ours"] += 1
            return
        there = records(stream.log)
        self.counts["reopened after a kill"] += 1
        if there[: len(had)] != had:
            self.breaks(f"store {number} had {had[-3:]} on its disk and has {there[-3:]} after its restart")  # fmt: skip

    def _only(self, journal: str, last: str, process: Process) -> bool:
        """Return whether a journal and its successors up to `last` were fenced by this store alone."""
        key = process.store.key.public_key
        for _ in range(100):
            if journal == last:
                return True
            fences = self.bucket.fences.get(journal, [])
            if not fences or any(self.bucket.registered[one.by] != key for one in fences):
                return False
            journal = fences[-1].by
        return False

    # -- what happens to processes ---------------------------------------------------------------------------

    def start(self, number: int) -> None:
        self.show(f"store {number} starts")
        if number in self.down:
            self.down.remove(number)
        directory = self._directory / str(number)
        loop = self.loops.add()
        loop.set_exception_handler(self._failed)
        self.processes[number] = Process(
            self, loop, number, directory, failover_s=self._failover_s, checkpoint_bytes=self._checkpoint_bytes,
        )  # fmt: skip
        self.counts["starts"] += 1

    def _failed(self, loop: Any, context: dict[str, Any]) -> None:
        self.breaks(f"a task failed: {context.get('exception', context['message'])!r}")

    def kill(self, number: int, *, disk: bool) -> None:
        self.show(f"store {number} is killed{'' if disk else ', and its disk is lost'}")
        process = self.processes.pop(number)
        self.counts["kills"] += 1
        left = process.kill()
        self.loops.remove(process.loop)
        if disk:
            self._left |= {uuid: (number, *had) for uuid, had in left.items()}
            self.down.append(number)
        else:
            self.counts["disks lost"] += 1
            self._left = {uuid: had for uuid, had in self._left.items() if had[0] != number}
            shutil.rmtree(process.directory)
            if self.rng.random() < 0.3:  # its key was in a backup
                self.down.append(number)

    def pause(self, number: int) -> None:
        self.show(f"store {number} sleeps")
        self.processes[number].loop.frozen = True
        self.counts["pauses"] += 1

    def wake(self, number: int) -> None:
        process = self.processes[number]
        if process.loop.frozen:
            self.show(f"store {number} wakes up")
            process.loop.frozen = False
            wakes, process.wakes = process.wakes, []
            for each in wakes:
                each()

    # -- what clients do ---------------------------------------------------------------------------------------

    async def ask(self, name: str, call: Call) -> Answer | None:
        """Send a call to a store that serves a stream."""
        await self._awake.wait()
        serving = [one for one in self.processes.values() if one.serves(name)]
        if not serving:
            await asyncio.sleep(0.2)
            return None
        if len(serving) > 1:
            self.counts["calls with two holders"] += 1
        return await self._ask(self.rng.choice(serving), name, OWNER.key_id, call)

    async def _ask(self, process: Process, name: str, key_id: bytes, call: Call) -> Answer | None:
        answered: asyncio.Future[Answer] = self.loop.create_future()

        def settle(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        request = Request(name, key_id, call, settle)
        self.loop.call_later(self.rng.uniform(0, 0.01), process.receive, request)
        done, _ = await asyncio.wait([answered], timeout=CALL_S)
        return answered.result() if done else None

    async def create(self, name: str, uuid: bytes) -> None:
        """Create a stream at a store."""
        definition = Definition(name, dedup_window_us=int(86400e6))
        call = streams.Create(
            [order(OWNER, definition, issued_us=EPOCH_US, uuid=uuid, store=GROUP)]
        )
        process = self.rng.choice(list(self.processes.values()))
        while True:
            answer = await self._ask(process, process.address, NO_KEY, call)
            if isinstance(answer, streams.Described):
                return
            await asyncio.sleep(0.1)

    # -- the life ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        main = self.loop.create_task(self._main())
        self.loop.set_exception_handler(self._failed)
        try:
            self.loops.run(lambda: main.done() or bool(self.broken))
            if main.done():
                main.result()
        except Exception as err:  # whatever it is, this life has shown it
            self.breaks(str(err) or repr(err))
        finally:
            for number in list(self.processes):
                with contextlib.suppress(Stuck):
                    self.kill(number, disk=True)
            self.loop.end()
        if not self.broken:
            self.broken += judge(self.history)

    async def _main(self) -> None:
        rng = self.rng
        for number in range(1, rng.randint(2, 4) + 1):
            self.start(number)
        self._starts = len(self.processes)
        faults, self.bucket.faults = self.bucket.faults, 0.0
        for name, uuid in self.streams.items():
            await self.create(name, uuid)
        self.bucket.faults = faults
        writers, readers, workers = self._clients()
        finite = [self.loop.create_task(one.run()) for one in writers]
        endless = [self.loop.create_task(one.run()) for one in (*readers, *workers)]
        await self._chaos(rng.uniform(10, 40))
        self._heal()
        await self._until("the clients are not done", lambda: all(one.done() for one in finite))
        for one in finite:
            one.result()
        await self._until("not every stream has one holder", self._in_order)
        for name in self.streams:
            self.history.ends[name] = await self._whole(name)
        ends = {name: len(end) for name, end in self.history.ends.items()}
        await self._until(
            "a reader does not reach the end",
            lambda: all(one.at >= ends[one.stream] for one in readers),
        )
        await self._until(
            "a consumer does not reach the end",
            lambda: all(one.floor >= ends[one.stream] for one in workers),
        )
        for task in endless:
            task.cancel()
        for task in await asyncio.gather(*endless, return_exceptions=True):
            if not isinstance(task, asyncio.CancelledError):
                raise task  # type: ignore[misc]  # they never return
        for worker in workers:
            self.history.final_places[worker.stream, CONSUMER] = await self._place(worker.stream)
        for name in self.streams:
            if (now := await self._whole(name)) != self.history.ends[name]:
                self.breaks(f"{name} changed after everything was quiet: it had {len(self.history.ends[name])}, has {len(now)}")  # fmt: skip
        await self._restore()
        self.counts["virtual ms"] += self.time.now_us // 1000

    def _clients(self) -> tuple[list[Producer | Once | Committer], list[Reader], list[Worker]]:
        rng = self.rng
        writers: list[Producer | Once | Committer] = []
        readers, workers = [], []
        for name in self.streams:

            def given(who: str, name: str = name) -> tuple[Any, ...]:
                return who, name, self.ask, self.history, rng, self.counts

            for one in range(rng.randint(1, 2)):
                producer = Producer(
                    *given(f"p{one}"), count=rng.randint(8, 20), ids=False, mean_s=rng.uniform(0.3, 3)
                )  # fmt: skip
                writers.append(producer)
            writers.append(Producer(*given("ids"), count=6, ids=True, mean_s=3))
            writers.append(Once(*given("once"), count=5, mean_s=3))
            if rng.random() < 0.5:
                writers.append(Committer(*given("batches"), count=3, mean_s=5))
            readers.append(Reader(*given("reader")))
            workers.append(Worker(*given("worker")))
        return writers, readers, workers

    async def _chaos(self, seconds: float) -> None:
        """Do things to processes and the bucket."""
        rng = self.rng
        until_s = self.time.now_s + seconds
        while self.time.now_s < until_s:
            await asyncio.sleep(rng.expovariate(1 / 2.5))
            awake = [n for n, one in self.processes.items() if not one.loop.frozen]
            asleep = [n for n, one in self.processes.items() if one.loop.frozen]
            match rng.choice(("kill", "kill", "lose", "start", "start", "pause", "wake", "cut", "hide", "away", "night")):  # fmt: skip
                case "kill" | "lose" as what if self.processes:
                    self.kill(rng.choice(list(self.processes)), disk=what == "kill")
                case "start" if len(self.processes) < 4:
                    if self.down:
                        self.start(rng.choice(self.down))
                    elif self._starts < 9:
                        self._starts += 1
                        self.start(self._starts)
                case "pause" if awake:
                    self.pause(rng.choice(awake))
                case "wake" if asleep:
                    self.wake(rng.choice(asleep))
                case "cut" if awake:
                    self._cut(rng.choice(awake))
                case "hide":
                    self._hide()
                case "away":
                    self.bucket.away = True
                    self.loop.call_later(rng.uniform(0.5, 8), setattr, self.bucket, "away", False)
                case "night" if rng.random() < 0.3:
                    await self._night()

    def _cut(self, number: int) -> None:
        process = self.processes[number]
        if process.cut_off:
            return
        self.show(f"store {number} loses its relay")
        self.counts["cuts"] += 1
        process.detach()

        def attach() -> None:
            if not process.dead and process.cut_off:
                # In its own loop, because a process that sleeps attaches when it wakes up.
                process.loop.call_soon(self._attach, process)

        self.loop.call_later(self.rng.uniform(0.5, 15), attach)

    def _attach(self, process: Process) -> None:
        if process.cut_off and not process.dead:
            process.attach()

    def _hide(self) -> None:
        """Relays do not see each other: some stores believe that others are gone."""
        addresses = [one.address for one in self.processes.values()]
        if len(addresses) < 2:
            return
        split = {address for address in addresses if self.rng.random() < 0.5}
        hidden = {
            (one, other)
            for one in addresses
            for other in addresses
            if (one in split) != (other in split)
        }
        if self.rng.random() < 0.3:  # in one direction alone
            hidden = {pair for pair in hidden if pair[0] in split}
        self.show(f"{len(hidden)} pairs of stores do not see each other")
        self.counts["partitions"] += 1
        self._hidden |= hidden
        self.loop.call_later(self.rng.uniform(1, 15), self._hidden.difference_update, hidden)

    async def _night(self) -> None:
        """All sleep for hours, and wake up in any order."""
        self.show("all sleep")
        self.counts["nights"] += 1
        self._awake.clear()
        for number, process in self.processes.items():
            if not process.loop.frozen:
                self.pause(number)
        await asyncio.sleep(self.rng.uniform(1, 3) * HOUR_S)
        self._awake.set()
        numbers = list(self.processes)
        self.rng.shuffle(numbers)
        for number in numbers:
            self.wake(number)
            await asyncio.sleep(self.rng.choice((0, 0, 1, 10)))

    def _heal(self) -> None:
        """Nothing fails any more. Some of those that were killed stay away."""
        self.show("the faults end")
        self.bucket.faults, self.bucket.latency_s = 0.0, 0.01
        self.bucket.away = False
        self.loop.call_later(10, setattr, self.bucket, "away", False)
        self._hidden.clear()
        for number, process in self.processes.items():
            self.wake(number)
            if process.cut_off:
                process.loop.call_soon(self._attach, process)
        for number in list(self.down):
            if self.rng.random() < 0.5:
                self.start(number)
        if not self.processes:
            self._starts += 1
            self.start(self.down[0] if self.down else self._starts)

    # -- the end -------------------------------------------------------------------------------------------------

    async def _until(self, what: str, holds: Callable[[], bool]) -> None:
        until_s = self.time.now_s + SETTLED_S
        while not holds():
            await asyncio.sleep(0.25)
            if self.time.now_s > until_s:
                holders = {
                    name: [one.number for one in self.processes.values() if one.holds(uuid)]
                    for name, uuid in self.streams.items()
                }
                raise TimeoutError(f"{what} {SETTLED_S:.0f} s after the last fault; holders: {holders}")  # fmt: skip

    def _in_order(self) -> bool:
        """Return whether each stream is held and served by one store, and the same one."""
        for name, uuid in self.streams.items():
            holding = [one for one in self.processes.values() if one.holds(uuid)]
            serving = [one for one in self.processes.values() if one.serves(name)]
            if len(holding) != 1 or holding != serving or not holding[0].settled(uuid):
                return False
        return True

    async def _whole(self, name: str) -> list[tuple[int, bytes]]:
        """Return (offset, body) of everything that a stream has."""
        found: list[tuple[int, bytes]] = []
        at = 0
        while True:
            answer = await self._at_end(name, streams.Fetch(at, 1 << 19), streams.Fetched)
            for item in answer.items:
                body = item.body if isinstance(item, streams.Record) else repr(item).encode()
                found.append((item.offset, body))
            at = answer.next
            if at == answer.high_water:
                return found

    async def _restore(self) -> None:
        """All stores are lost. An empty machine gets everything from the bucket."""
        for number in list(self.processes):
            self.kill(number, disk=True)
        loop = self.loops.add()
        process = Process(
            self, loop, 99, self._directory / "restored", failover_s=self._failover_s,
            checkpoint_bytes=self._checkpoint_bytes, runs=False,
        )  # fmt: skip

        self.processes[process.number] = process

        async def restore() -> None:
            while True:
                try:
                    await process.keeper.restore()
                except BucketError:  # requests of killed stores, such as deletes, still arrive
                    await asyncio.sleep(1)
                else:
                    return

        restoring = loop.create_task(restore())
        await self._until("the bucket cannot be restored", restoring.done)
        restoring.result()
        for name, uuid in self.streams.items():
            stream = process.store.streams.get(uuid)
            there = records(stream.log) if stream is not None and stream.log is not None else []
            if there != self.history.ends[name]:
                self.breaks(f"{name}: the bucket has {len(there)} messages, its store had {len(self.history.ends[name])}")  # fmt: skip
        self.kill(process.number, disk=True)

    async def _place(self, name: str) -> int:
        """Return the position of a stream's consumer."""
        found = await self._at_end(name, streams.DescribeConsumers(), streams.Consumers)
        floor: int = found.consumers[0].floor
        return floor

    async def _at_end(self, name: str, call: Call, wanted: type[Answer]) -> Any:
        """Return the answer to a call when all is well; a takeover that began before may still be under way."""
        for _ in range(100):
            answer = await self.ask(name, call)
            if isinstance(answer, wanted):
                return answer
            await asyncio.sleep(0.5)
        raise TimeoutError(f"{name} is not served at the end: {answer}")


@contextlib.contextmanager
def _seeded(life: Life) -> Iterator[None]:
    """Take everything that is drawn at random, and every clock, from the life."""
    rng = random.Random(life.seed ^ 0x5EED)
    tokens: Any = SimpleNamespace(token_hex=lambda size: rng.randbytes(size).hex())
    clock: Any = SimpleNamespace(monotonic=lambda: life.time.now_s)
    kept = random.random, succession.secrets, objects.secrets, consumer_calls.time
    random.random = rng.random  # type: ignore[method-assign]  # for pauses before further tries
    succession.secrets = objects.secrets = tokens
    consumer_calls.time = clock
    try:
        yield
    finally:
        random.random, succession.secrets, objects.secrets, consumer_calls.time = kept  # type: ignore[method-assign]


@contextlib.contextmanager
def _logged(handler: logging.Handler) -> Iterator[None]:
    """Give what stores log to this handler alone."""
    loggers = [logging.getLogger(name) for name in ("relay.store", "asyncio")]
    kept = [(one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.setLevel(logging.INFO)
        one.propagate = False
        one.addHandler(handler)
    try:
        yield
    finally:
        for one, (level, propagate) in zip(loggers, kept, strict=True):
            one.setLevel(level)
            one.propagate = propagate
            one.removeHandler(handler)


def live(seed: int, shown: Callable[[str], None] | None = None) -> Outcome:
    """Live one life; `shown` is called with what happens in it."""
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="iris-lives-", dir=place) as directory:
        life = Life(seed, Path(directory))
        handler = Log(life)
        if shown is not None:
            life.shown = shown
            handler.shown = life.show
        with _seeded(life), _logged(handler):
            life.run()
    return Outcome(seed, life.broken, life.counts)
