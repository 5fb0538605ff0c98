"""Who owns streams that begin on the disk of a store: they move them by force when the store is gone, as `iris stream
move --force` does, and let them join the bucket at last.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from iris.wire import streams
from iris.wire.kinds import NO_KEY
from iris.wire.orders import KEEP, MOVE, Definition, decode_order
from iris.wire.streams import NO_LOG
from relay.store.bucket.copies import State
from support.bucket_lives.admins import QUIET_S
from support.bucket_lives.clients import Committer, Once, Producer, body_of
from support.bucket_lives.history import GAP, Interval, Replaced
from support.bucket_lives.plan import StreamPlan
from support.bucket_lives.store import EPOCH_US, GROUP, Process
from support.founded import SALTS, founded
from support.keeper import OWNER, order

if TYPE_CHECKING:
    from support.bucket_lives.life import Life

LOOK_S: Final = 0.5


class Owner:
    """The owner of one stream that begins on a disk, and is in the bucket at the end unless its disk was lost."""

    def __init__(self, life: Life, plan: StreamPlan) -> None:
        self._life = life
        self._rng = life.rng
        self.plan = plan
        """The log that its clients use."""
        self.replaced: list[StreamPlan] = []
        """Logs whose places others have taken."""
        self._store = 0
        """Number of the store with the log."""
        self._writers: list[Producer | Once | Committer] = []
        self._floor = 0
        """Up to there the copy of the log has everything."""

    async def create(self) -> None:
        """Create the stream on the disk of some store, and begin its clients."""
        life = self._life
        process = self._rng.choice(list(life.processes.values()))
        while not await life.create(self.plan, process, store=process.store.key):
            pass
        self._store = process.number
        life.history.on_disk.add(self.plan.label)
        self._writers = life.begin_clients(self.plan)

    async def run(self) -> None:
        """Look after the stream until it is in the bucket, or is lost with its disk."""
        life, rng = self._life, self._rng
        joins_s = life.time.now_s + rng.uniform(1, 40)
        if rng.random() < 0.4:
            life.loop.call_later(rng.uniform(2, 20), self._lose)
        patience_s = rng.uniform(0, 6)
        served_s = life.time.now_s
        while True:
            await asyncio.sleep(LOOK_S)
            await life.awake.wait()
            self._look()
            serving = [one for one in life.processes.values() if one.serves(self.plan.address)]
            if serving and not self._is_displaced():
                served_s = life.time.now_s
                if served_s >= joins_s and await self._join(rng.choice(serving)):
                    return
            elif life.time.now_s >= served_s + patience_s and await self._is_lost():
                return

    def _lose(self) -> None:
        """Lose the disk that the stream is on now, if the faults go on."""
        life = self._life
        calm = life.time.now_s >= life.quiet_s or life.bucket.rolled_back
        if self._store in life.processes and not calm:
            life.kill(self._store, disk=False)

    # -- joining ---------------------------------------------------------------------------------------------

    async def _join(self, process: Process) -> bool:
        """Order a store to bring the stream into the bucket; return whether it is there."""
        life, rng, plan = self._life, self._rng, self.plan
        begun = life.history.tick()
        answer = await life.ask_process(process, plan.address, OWNER.key_id, streams.Describe())
        if not isinstance(answer, streams.Described):
            return False
        if answer.store != GROUP.public_key:
            life.counts["joins asked for"] += 1
            if rng.random() < 0.3:
                life.loop.call_later(rng.expovariate(1 / 0.4), life.strike, process)
            issued_us = EPOCH_US + life.now_us
            signed = order(
                OWNER, plan.definition, issued_us=issued_us, uuid=plan.uuid, store=GROUP, revision=1  # type: ignore[arg-type]  # the key of the group
            )  # fmt: skip
            answer = await life.ask_process(
                process, plan.address, OWNER.key_id, streams.Change([signed]), rng.choice((0.3, 2, 10))
            )  # fmt: skip
            if not isinstance(answer, streams.Described) or answer.store != GROUP.public_key:
                if isinstance(answer, streams.Refused):
                    life.counts[f"joins refused: {answer.code}"] += 1
                return False
        life.show(f"{plan.label} is in the bucket")
        life.counts["joins"] += 1
        plan.revision = 2
        life.history.joined[plan.label] = Interval(begun, life.history.tick())
        life.streams.append(plan)
        return True

    # -- moving by force -------------------------------------------------------------------------------------

    def _is_displaced(self) -> bool:
        """Return whether the store says that another log has taken the place of this one: an order without an answer
        was carried out.
        """
        return any(
            one.store.streams[self.plan.uuid].displaced
            for one in self._life.processes.values()
            if self.plan.uuid in one.store.streams
        )

    async def _is_lost(self) -> bool:
        """Move the stream to another store by force; return whether there is nothing left of it."""
        life, rng = self._life, self._rng
        process = rng.choice(list(life.processes.values()) or [None])
        if process is None:
            return False
        found = await self._find(process)
        if found is not None:
            await self._force(process, found)
            return False
        if life.time.now_s < life.quiet_s + QUIET_S:
            return False
        if self._store in life.down and self._store not in life.lost:
            life.start(self._store)  # the copy has ended, and the disk has the stream
            return False
        if self._store in life.processes and self._store not in life.lost:
            return False  # it finds out whether the stream has joined
        if self._floor:
            life.breaks(f"{self.plan.label}: nobody has it or a copy of it, and there was one")
        if self._store not in life.lost:
            life.breaks(f"{self.plan.label}: nobody has it, and the disk of store {self._store} was never lost")  # fmt: skip
        life.counts["streams lost with their disk"] += 1
        life.forget(self.plan)
        return True

    async def _find(self, process: Process) -> streams.LostStream | None:
        """Return the copy that a store finds; None if it finds none or does not answer."""
        name = self.plan.definition.name
        issued_us = EPOCH_US + self._life.now_us
        signed = order(OWNER, Definition(name), action=MOVE, issued_us=issued_us, uuid=NO_LOG, store=process.store.key)  # fmt: skip
        answer = await self._life.ask_process(process, process.address, NO_KEY, streams.FindLost([signed]), 20)  # fmt: skip
        if not isinstance(answer, streams.LostStreams) or not answer.streams:
            return None
        if len(answer.streams) > 1:
            self._life.breaks(f"{name}: the bucket has {len(answer.streams)} copies of it")
        return answer.streams[0]

    async def _force(self, process: Process, lost: streams.LostStream) -> None:
        life, key = self._life, process.store.key
        life.counts["moves by force asked for"] += 1
        if self._rng.random() < 0.2:
            life.loop.call_later(self._rng.expovariate(1 / 0.4), life.strike, process)
        before = decode_order(lost.orders[0].order)
        revision = max(decode_order(one.order).revision for one in lost.orders) + 1
        issued_us = EPOCH_US + life.now_us
        made = founded(OWNER, self._rng.randbytes(16))
        moving = order(
            OWNER, before.definition, action=MOVE, issued_us=issued_us, uuid=lost.uuid, store=key, revision=revision
        )  # fmt: skip
        definition = before.definition.made_again(lost.uuid)
        making = order(OWNER, definition, action=KEEP, issued_us=issued_us, uuid=made, store=key)
        call = streams.Force([moving], [making], SALTS[made])
        answer = await life.ask_process(process, process.address, NO_KEY, call, 20)
        if isinstance(answer, streams.Refused):
            life.counts[f"moves by force refused: {answer.code}"] += 1
        if isinstance(answer, streams.Described) and answer.uuid != self.plan.uuid:
            await self._go_on(process, answer.uuid)

    async def _go_on(self, process: Process, uuid: bytes) -> None:
        """Let the clients use the log that has taken the place of the lost one."""
        life, lost = self._life, self.plan
        gaps = await self._gaps(process, uuid)
        if gaps is None:
            return  # it was lost, too, or nobody can say yet
        life.counts["moves by force"] += 1
        plan = self.plan = life.plan.again(lost, uuid)
        life.show(f"{plan.label} on store {process.number} has taken the place of {lost.label}")
        self.replaced.append(lost)
        life.history.on_disk.add(plan.label)
        life.history.replaced[plan.label] = Replaced(lost.label, gaps, self._floor)
        self._store, self._floor = process.number, 0
        for one in self._writers:
            one.go_on(plan)
        life.replace(lost, plan)

    async def _gaps(self, process: Process, uuid: bytes) -> tuple[int, ...] | None:
        """Return where a new log has gaps; None if it cannot be read."""
        found: list[int] = []
        at = 0
        while True:
            call = streams.Fetch(at, 1 << 19)
            answer = await self._life.ask_process(process, uuid.hex(), OWNER.key_id, call)
            if not isinstance(answer, streams.Fetched):
                return None
            found += [one.offset for one in answer.items if body_of(one).startswith(GAP)]
            at = answer.next
            if at == answer.high_water:
                return tuple(found)

    # -- looking ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Note what the copy has, unless it was used already: a store may not know that yet."""
        if self.plan.uuid in self._life.bucket.forced:
            return
        process = self._life.processes.get(self._store)
        stream = None if process is None else process.store.streams.get(self.plan.uuid)
        if stream is None or stream.log is None or stream.bucket_copy is None:
            return
        lag = stream.bucket_copy.lag()
        if stream.bucket_copy.state is State.FOLLOWING and not lag.bytes:
            self._floor = max(self._floor, stream.log.next)
