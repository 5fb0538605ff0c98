"""One life: stores, clients and a bucket, what they do, and the end of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from iris.wire import streams
from iris.wire.kinds import NO_KEY
from iris.wire.streams import Answer, Call
from relay.store import consumer_calls
from relay.store.bucket import creating, moves, objects, succession, tiers
from relay.store.bucket.sealing import Sealer
from support.bucket_lives.admins import Deleter, Mover
from support.bucket_lives.bucket import Bucket
from support.bucket_lives.clients import (
    Committer,
    Once,
    Producer,
    Reader,
    Redriver,
    Worker,
)
from support.bucket_lives.ending import Ending
from support.bucket_lives.faults import Faults, attach_again
from support.bucket_lives.history import History, Limits, judge
from support.bucket_lives.loops import Loops, Stuck, Time
from support.bucket_lives.plan import Plan, StreamPlan
from support.bucket_lives.store import EPOCH_US, GROUP, TICK_S, Process, Request, World, records
from support.founded import creation
from support.keeper import OWNER, order

CALL_S: Final = 2.0
SHARED_MEMORY: Final = Path("/dev/shm")
SEGMENT_BYTES: Final = 700
"""Size of the segments of a log that moves old records to the bucket: some records."""
CHUNK_BYTES: Final = 300
COUNTED: Final = ("store.took_over", "store.journal_lost", "store.copy_damaged", "store.bucket_rolled_back", "store.stream_arrived", "store.stream_kept")  # fmt: skip


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
        elif record.getMessage() in COUNTED:
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
        self.plan = Plan(rng)
        self.streams = list(self.plan.streams)
        """Those that were created, also those that are about to be deleted."""
        self.processes: dict[int, Process] = {}
        """Those that run or sleep, by number."""
        self.down: list[int] = []
        """Those that were killed, and have a disk."""
        self.starts = 0
        """How many stores were started for the first time."""
        self.hidden: set[tuple[str, str]] = set()
        """(address of the store that looks, address that it does not see)."""
        self.awake = asyncio.Event()
        self.awake.set()
        self.quiet_s = float("inf")
        """When the faults ended."""
        self.writers: dict[asyncio.Task[None], StreamPlan] = {}
        """Clients that are done at some time."""
        self.endless: dict[asyncio.Task[None], StreamPlan] = {}
        self.readers: list[Reader] = []
        self.workers: list[Worker] = []
        self.redrivers: list[Redriver] = []
        self.shown: Callable[[str], None] = lambda text: None
        self._directory = directory
        self._failover_s = rng.choice((1.0, 2.0, 5.0))
        self.checkpoint_bytes = rng.choice((2_000, 10_000, 40_000))
        self.released: set[bytes] = set()
        """Streams that were to move. Appends that nobody acknowledged may be lost with their stores."""
        self._left: dict[bytes, tuple[int, str, list[tuple[int, bytes]]]] = {}
        """Stream -> (store that was killed, its journal, what its disk has)."""

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
            and (process.address, other.address) not in self.hidden
        }

    def deliver(self, request: Request, answer: Answer) -> None:
        self.loop.call_later(self.rng.uniform(0, 0.01), request.answered, answer)

    def adopted(self, process: Process, uuid: bytes) -> None:
        stream = process.store.streams[uuid]
        self.counts["adopted"] += 1
        if stream.log is None:
            self.breaks(f"store {process.number} cannot open what it has taken: {stream.failed}")
            return
        left = self._left.pop(uuid, None)
        if left is None or stream.replica is None:
            return
        number, journal, had = left
        if number != process.number or not self._only(journal, stream.replica.writer.journal, process):  # fmt: skip
            self.counts["redo not ours"] += 1
            return
        first = max(stream.log.oldest, stream.log.offloading.end)
        there = records(stream.log)
        self.counts["reopened after a kill"] += 1
        had = [one for one in had if one[0] >= first]
        kept = [one for one in there if not had or one[0] >= had[0][0]]
        if uuid in self.released and kept == had[: len(kept)]:
            # Made again, because the journals that it moved through were read in another order. The bucket has neither
            # the last records nor the last removals of the disk.
            self.counts["redo given up"] += 1
        elif there[: len(had)] != had:
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

    def directory_of(self, number: int) -> Path:
        """Return where the disk of a store is."""
        return self._directory / str(number)

    def start_new(self) -> None:
        """Start a store for the first time."""
        self.starts += 1
        self.start(self.starts)

    def start(self, number: int, *, runs: bool = True) -> Process:
        """Start a process of a store; return it. It only restores the bucket if it does not run."""
        self.show(f"store {number} starts")
        if number in self.down:
            self.down.remove(number)
        loop = self.loops.add()
        loop.set_exception_handler(self._failed)
        process = self.processes[number] = Process(
            self, loop, number, self.directory_of(number), failover_s=self._failover_s, runs=runs,
            checkpoint_bytes=self.checkpoint_bytes, disk_limit=self.plan.disk_limit,
        )  # fmt: skip
        self.counts["starts"] += 1
        return process

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

    def strike(self, process: Process) -> None:
        """Kill a process, or stop it, if it still runs and the faults go on."""
        calm = self.time.now_s >= self.quiet_s or self.bucket.rolled_back
        if calm or self.processes.get(process.number) is not process:
            return
        self.counts["strikes"] += 1
        match self.rng.choice(("kill", "lose", "pause")):
            case "pause" if not process.loop.frozen:
                self.pause(process.number)
            case "lose":
                self.kill(process.number, disk=False)
            case _:
                self.kill(process.number, disk=True)

    def pause(self, number: int) -> None:
        self.show(f"store {number} sleeps")
        self.processes[number].loop.frozen = True
        self.counts["pauses"] += 1

    def wake(self, number: int) -> None:
        process = self.processes.get(number)
        if process is not None and process.loop.frozen:
            self.show(f"store {number} wakes up")
            process.loop.frozen = False
            wakes, process.wakes = process.wakes, []
            for each in wakes:
                each()

    async def until(self, holds: Callable[[], bool], seconds: float = 600.0) -> None:
        """Return when something holds. Raises TimeoutError."""
        until_s = self.time.now_s + seconds
        while not holds():
            await asyncio.sleep(0.25)
            if self.time.now_s > until_s:
                raise TimeoutError(f"after {seconds:.0f} s")

    # -- what clients do ---------------------------------------------------------------------------------------

    async def ask(self, address: str, call: Call) -> Answer | None:
        """Send a call to a store that serves a stream."""
        await self.awake.wait()
        serving = [one for one in self.processes.values() if one.serves(address)]
        if not serving:
            await asyncio.sleep(0.2)
            return None
        if len(serving) > 1:
            self.counts["calls with two holders"] += 1
        return await self.ask_process(self.rng.choice(serving), address, OWNER.key_id, call)

    async def ask_process(
        self, process: Process, name: str, key_id: bytes, call: Call, seconds: float = CALL_S
    ) -> Answer | None:  # fmt: skip
        """Send a call to a process; return the answer, or None if none came in time."""
        answered: asyncio.Future[Answer | None] = self.loop.create_future()

        def settle(answer: Answer | None) -> None:
            if not answered.done():
                answered.set_result(answer)

        request = Request(name, key_id, call, settle, self.now_us + int(seconds * 1e6))
        self.loop.call_later(self.rng.uniform(0, 0.01), process.receive, request)
        timer = self.loop.call_later(seconds, settle, None)
        try:
            return await answered
        finally:
            timer.cancel()

    async def create(self, plan: StreamPlan, process: Process) -> bool:
        """Create a stream at a store; return False if the store is gone before it is sure."""
        one = plan.definition
        self.history.limits[plan.label] = Limits(one.max_messages, one.max_bytes, one.max_age_us / 1e6)  # fmt: skip
        issued_us = EPOCH_US + self.now_us
        call = creation(
            order(OWNER, plan.definition, issued_us=issued_us, uuid=plan.uuid, store=GROUP)  # type: ignore[arg-type]  # the key of the group
        )  # fmt: skip
        while self.processes.get(process.number) is process:
            answer = await self.ask_process(process, process.address, NO_KEY, call)
            if isinstance(answer, streams.Described):
                return True
            if isinstance(answer, streams.Refused) and answer.code in ("exists", "order"):
                return False
            await asyncio.sleep(0.1)
        return False

    def begin_clients(self, plan: StreamPlan, *, few: bool = False) -> None:
        """Start who writes to a stream, reads it and consumes it."""
        rng = self.rng
        given: tuple[Any, ...] = plan, self.ask, self.history, rng, self.counts
        writers: list[Producer | Once | Committer] = [
            Producer(f"p{one}", *given, count=rng.randint(8, 20), ids=False, mean_s=rng.uniform(0.3, 3))
            for one in range(1 if few else rng.randint(1, 2))
        ]  # fmt: skip
        if not few:
            writers.append(Producer("ids", *given, count=6, ids=True, mean_s=3))
            writers.append(Once("once", *given, count=5, mean_s=3))
            if rng.random() < 0.5:
                writers.append(Committer("batches", *given, count=3, mean_s=5))
        self.writers |= {self.loop.create_task(one.run()): plan for one in writers}
        reader, worker = Reader("reader", *given), Worker("worker", *given)
        self.readers.append(reader)
        self.workers.append(worker)
        self.endless |= {self.loop.create_task(one.run()): plan for one in (reader, worker)}
        if plan.max_deliver:
            redriver = Redriver("redriver", *given)
            self.redrivers.append(redriver)
            self.endless[self.loop.create_task(redriver.run())] = plan

    def forget(self, plan: StreamPlan) -> None:
        """A stream was deleted: its clients end."""
        if plan in self.streams:
            self.streams.remove(plan)
        _cancel(plan, self.writers)
        _cancel(plan, self.endless)
        self.readers = [one for one in self.readers if one.plan is not plan]
        self.workers = [one for one in self.workers if one.plan is not plan]
        self.redrivers = [one for one in self.redrivers if one.plan is not plan]

    # -- the life ------------------------------------------------------------------------------------------------

    def run(self, script: Coroutine[Any, Any, None] | None = None) -> None:
        """Live until the end, or until something is broken. A test may give another `script`."""
        main = self.loop.create_task(script or self._main())
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
        for _ in range(rng.randint(2, 4)):
            self.start_new()
        faults, self.bucket.faults = self.bucket.faults, 0.0
        for plan in self.streams:
            while not await self.create(plan, rng.choice(list(self.processes.values()))):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.1)
        self.bucket.faults = faults
        for plan in self.streams:
            self.begin_clients(plan)
        ending = Ending(self)
        moving = Mover(self, self.plan.moves_s).run() if self.plan.moves_s else None
        admins = [self.loop.create_task(moving)] if moving is not None else []
        if self.plan.keeps_older:
            admins.append(self.loop.create_task(ending.copy_bucket(rng.uniform(5, 40))))
        finite = [self.loop.create_task(Deleter(self).run())] if self.plan.deletes else []
        await Faults(self).run(rng.uniform(10, 40))
        for task in admins:
            task.cancel()
        self._heal()
        await ending.run(finite)
        await asyncio.gather(*admins, return_exceptions=True)
        self.counts["virtual ms"] += self.time.now_us // 1000

    def _heal(self) -> None:
        """Nothing fails any more. Some of those that were killed stay away."""
        self.show("the faults end")
        self.bucket.faults, self.bucket.latency_s = 0.0, 0.01
        self.bucket.away = False
        self.loop.call_later(10, setattr, self.bucket, "away", False)
        self.hidden.clear()
        for number, process in list(self.processes.items()):
            self.wake(number)
            if process.cut_off:
                process.loop.call_soon(attach_again, process)
        for number in list(self.down):
            if self.rng.random() < 0.5:
                self.start(number)
        if not self.processes:
            if self.down:
                self.start(self.down[0])
            else:
                self.start_new()
        self.quiet_s = self.time.now_s


def _cancel(plan: StreamPlan, tasks: dict[asyncio.Task[None], StreamPlan]) -> None:
    for task in [one for one, its in tasks.items() if its is plan]:
        task.cancel()
        del tasks[task]


class _Tokens:
    """In the place of the module `secrets`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def token_hex(self, size: int) -> str:
        return self._rng.randbytes(size).hex()


@contextlib.contextmanager
def _put(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Put values into (module, name) for a while."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def seeded(life: Life) -> contextlib.AbstractContextManager[None]:
    """Take everything that is drawn at random, and every clock, from the life; and make segments small."""
    rng = random.Random(life.seed ^ 0x5EED)
    tokens = _Tokens(rng)
    return _put(
        (random, "random", rng.random),  # for pauses before further tries
        (succession, "secrets", tokens), (objects, "secrets", tokens), (moves, "secrets", tokens),
        (consumer_calls, "time", SimpleNamespace(monotonic=lambda: life.time.now_s)),
        (tiers, "LEAST_SEGMENT_BYTES", SEGMENT_BYTES), (tiers, "CHUNK_BYTES", CHUNK_BYTES), (tiers, "LOOK_S", TICK_S),
        (creating, "secrets", tokens),
    )  # fmt: skip


@contextlib.contextmanager
def logged(handler: logging.Handler) -> Iterator[None]:
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
        with seeded(life), logged(handler):
            life.run()
    return Outcome(seed, life.broken, life.counts)
