"""Who administers streams in a bucket: moves them, deletes them and creates them again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from iris.wire import streams
from iris.wire.kinds import NO_KEY
from iris.wire.orders import END, KEEP, MOVE, SignedOrder
from support.bucket_lives.history import Interval
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import EPOCH_US, GROUP, Process
from support.founded import creation
from support.keeper import OWNER, order

if TYPE_CHECKING:
    from support.bucket_lives.life import Life

TRIES: Final = 8
QUIET_S: Final = 150.0
"""After this time without faults every stream is served."""


def signed(
    life: Life, plan: StreamPlan, action: str, store: object, *, revision: int = 1
) -> SignedOrder:
    """Return an order of the streams' owner."""
    issued_us = EPOCH_US + life.now_us
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
