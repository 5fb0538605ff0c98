"""Who administers streams in a bucket: moves them, deletes them and creates them again, and writes to one on a disk,
which is copied.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from iris.wire import streams
from iris.wire.kinds import NO_KEY
from iris.wire.orders import END, KEEP, MOVE, Definition, SignedOrder
from iris.wire.streams import NewRecord
from relay.store.bucket.copies import State
from support.bucket_lives.clients import END_FIELDS
from support.bucket_lives.history import Interval
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import EPOCH_US, GROUP, Process
from support.founded import creation, founded
from support.keeper import OWNER, order

if TYPE_CHECKING:
    from support.bucket_lives.life import Life

TRIES: Final = 8
QUIET_S: Final = 150.0
"""After this time without faults every stream is served."""
COPIED: Final = StreamPlan("disk", founded(OWNER, bytes(15) + b"\xdd"), Definition("disk"), 0)
COPIED_AT: Final = 1
"""Store with the stream that is copied."""


def signed(
    life: Life, plan: StreamPlan, action: str, store: object, *, revision: int | None = None
) -> SignedOrder:
    """Return an order of the streams' owner."""
    issued_us = EPOCH_US + life.now_us
    revision = plan.revision if revision is None else revision
    return order(
        OWNER, plan.definition, action=action, issued_us=issued_us, uuid=plan.uuid, store=store, revision=revision  # type: ignore[arg-type]  # a key of a store or a group
    )  # fmt: skip


class Mover:
    """Moves streams between stores, as `iris stream move` does; strikes one of the two at times. At times it creates a
    stream once more, also where it is not, and when it was deleted.
    """

    def __init__(self, life: Life, mean_s: float) -> None:
        self._life = life
        self._rng = life.rng
        self._mean_s = mean_s
        self._tickets: list[tuple[int, bytes]] = []
        """(store that it is for, ticket) of earlier moves."""

    async def run(self) -> None:
        life, rng = self._life, self._rng
        while True:
            await asyncio.sleep(rng.expovariate(1 / self._mean_s))
            await life.awake.wait()
            if self._tickets and rng.random() < 0.1:
                number, ticket = rng.choice(self._tickets)
                await self._take(number, ticket, 1)
                continue
            if rng.random() < 0.2:
                await self._create(rng.choice(life.plan.streams))
                continue
            plan = rng.choice([one for one in life.streams if not one.deleted] or [None])
            serving = [one for one in life.processes.values() if plan and one.serves(plan.address)]
            others = [one for one in life.processes.values() if one not in serving]
            if plan and serving and others:
                await self._move(plan, rng.choice(serving), rng.choice(others))

    async def _move(self, plan: StreamPlan, old: Process, new: Process) -> None:
        life, rng = self._life, self._rng
        life.counts["moves asked for"] += 1
        if rng.random() < 0.2:
            life.loop.call_later(rng.expovariate(1 / 0.4), life.strike, rng.choice((old, new)))
        call = streams.Move([signed(life, plan, MOVE, new.store.key)])
        answer = await life.ask_process(old, plan.address, OWNER.key_id, call)
        if not isinstance(answer, streams.Moving):
            return
        life.released.add(plan.uuid)
        life.show(f"{plan.label} is released by store {old.number} for store {new.number}")
        self._tickets.append((new.number, answer.ticket))
        dice = rng.random()
        if dice < 0.05:
            return  # the client is gone
        if dice < 0.12:
            await asyncio.sleep(rng.uniform(5, 20))
        await self._take(new.number, answer.ticket, TRIES)

    async def _create(self, plan: StreamPlan) -> None:
        life = self._life
        process = self._rng.choice(list(life.processes.values()) or [None])
        if process is None:
            return
        life.counts["creates repeated"] += 1
        call = creation(signed(life, plan, KEEP, GROUP, revision=0))
        answer = await life.ask_process(process, process.address, NO_KEY, call)
        if isinstance(answer, streams.Refused) and answer.code == "exists":
            life.counts["creates refused because of the uuid"] += 1

    async def _take(self, number: int, ticket: bytes, tries: int) -> None:
        for _ in range(tries):
            process = self._life.processes.get(number)
            if process is not None:
                call = streams.Take(ticket)
                answer = await self._life.ask_process(process, process.address, NO_KEY, call)
                if isinstance(answer, streams.Settled):
                    self._life.counts["moves confirmed"] += 1
                    return
                if isinstance(answer, streams.Refused) and answer.code not in ("leaving", "moved"):
                    self._life.counts["moves refused"] += 1
                    return
            await asyncio.sleep(self._rng.uniform(0.1, 1))


class Deleter:
    """Deletes a stream until it is sure, and creates another one under its name."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._asked = False
        """A store may have received the order."""

    async def run(self) -> None:
        life = self._life
        await asyncio.sleep(life.rng.uniform(4, 20))
        plan = life.rng.choice(life.streams)
        plan.deleted = True
        life.show(f"{plan.label} is about to be deleted")
        begun = life.history.tick()
        while not await self._delete(plan):  # noqa: ASYNC110 - it asks again
            await asyncio.sleep(0.5)
        life.history.deleted[plan.label] = Interval(begun, life.history.tick())
        life.counts["deleted streams"] += 1
        life.show(f"{plan.label} is deleted")
        if life.rng.random() < 0.7:
            await self._create_again(plan)
        await asyncio.sleep(2)
        life.forget(plan)

    async def _delete(self, plan: StreamPlan) -> bool:
        life = self._life
        await life.awake.wait()
        serving = [one for one in life.processes.values() if one.serves(plan.address)]
        if not serving:
            # Whether an earlier try succeeded can be seen when all is well for so long that somebody would serve it.
            return self._asked and life.time.now_s > life.quiet_s + QUIET_S
        self._asked = True
        call = streams.Delete([signed(life, plan, END, GROUP)])
        answer = await life.ask_process(life.rng.choice(serving), plan.address, OWNER.key_id, call)
        return isinstance(answer, streams.Settled)

    async def _create_again(self, before: StreamPlan) -> None:
        life = self._life
        tried: list[StreamPlan] = []
        while True:
            process = life.rng.choice(list(life.processes.values()) or [None])
            if process is not None:
                if not tried or life.rng.random() < 0.5:
                    tried.append(life.plan.stream(before.definition.name))
                plan = tried[-1]
                if await life.create(plan, process):
                    break
            # A store that was killed before it could answer may have created an earlier one.
            made = [
                one
                for one in tried
                if any(each.serves(one.address) for each in life.processes.values())
            ]
            if made:
                plan = made[0]
                break
            await asyncio.sleep(0.5)
        life.show(f"{plan.label} is created")
        life.counts["created again"] += 1
        life.begin_clients(plan, few=True)
        life.streams.append(plan)


class Copied:
    """A stream on the disk of one store, somebody who writes to it, and what the bucket must have of it at least."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.stored: list[bytes] = []
        """What was acknowledged, by offset. It is sent one after the other, each until it is acknowledged."""
        self.sent: list[bytes] = []
        self.floor = 0
        """Offset up to which the copy had everything when it followed and nothing was missing."""

    async def create(self) -> None:
        life = self._life
        process = life.processes[COPIED_AT]
        first = _order_of_creation(COPIED, process)
        while True:
            answer = await life.ask_process(process, process.address, NO_KEY, creation(first))  # fmt: skip
            if isinstance(answer, streams.Described):
                return

    async def run(self) -> None:
        """Write, until the disk is lost."""
        life, rng = self._life, life_rng(self._life)
        watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            for number in range(rng.randint(10, 40)):
                await asyncio.sleep(rng.expovariate(1.0))
                body = f"disk/{number}".encode()
                self.sent.append(body)
                record = NewRecord(number, END_FIELDS, body)
                call = streams.Append(b"d" * 16, [record], b"d" * 16)
                while not isinstance(answer := await life.ask(COPIED.address, call), streams.Appended):  # fmt: skip
                    if self._is_away:
                        return
                    await asyncio.sleep(0.5)
                if answer.outcomes[0].status in (streams.STORED, streams.DUPLICATE):
                    self.stored.append(body)
            life.counts["copied messages"] += len(self.stored)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    @property
    def _is_away(self) -> bool:
        """Whether nobody has the stream any more: its disk is lost, or its store stays away."""
        life = self._life
        stays = COPIED_AT not in life.processes and life.time.now_s > life.quiet_s
        return COPIED_AT in life.lost or stays

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.look()

    def look(self) -> bool:
        """Note what the copy has; return whether it has everything, or the disk is lost."""
        process = self._life.processes.get(COPIED_AT)
        stream = None if process is None else process.store.streams.get(COPIED.uuid)
        if stream is None or stream.log is None or stream.bucket_copy is None:
            return self._is_away
        lag = stream.bucket_copy.lag()
        if stream.bucket_copy.state is not State.FOLLOWING or lag.bytes:
            return False
        self.floor = max(self.floor, stream.log.next)
        return True


def life_rng(life: Life) -> random.Random:
    """Return a source of its own, so that whether there is a copy changes little else."""
    return random.Random(life.seed ^ 0xD15C)


def _order_of_creation(plan: StreamPlan, process: Process) -> SignedOrder:
    return order(
        OWNER, plan.definition, issued_us=EPOCH_US, uuid=plan.uuid, store=process.store.key
    )
