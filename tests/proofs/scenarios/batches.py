"""Writes batches while the store is killed: every batch must be stored whole and once, and nothing of failed attempts
may be visible.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Sequence

from support.stores import PATIENCE_S, Audit, Outcome, Rig, make_message

import iris
from iris.errors import IrisError, StreamUnavailable
from iris.streams import CommitInfo, StagedAttempt
from proofs.scenarios.streams import ORDERS

WRITER = "etl"
WINNER = 3
LOSER = 4


class Batches:
    """A writer of batches: several clients stage the parts, some of them in vain, and one commits, sometimes
    twice.
    """

    def __init__(self, clients: Sequence[iris.Client], rng: random.Random, outcome: Outcome) -> None:  # fmt: skip
        self.committed = 0
        self.sent = 0
        """Number of messages in the batches so far."""
        self.ends = {0}
        """Numbers at which a batch begins or ends."""
        self.acked: dict[int, int] = {}
        """Acknowledged messages: number -> offset."""
        self.again: Counter[str] = Counter()
        self._clients = clients
        self._rng = rng
        self._outcome = outcome
        self._ending = False
        self._running = asyncio.create_task(self._run(), name="batches")

    async def _run(self) -> None:
        while not self._ending:
            await self._batch()

    async def _batch(self) -> None:
        rng = self._rng
        first = self.sent
        parts: list[range] = []
        for _ in range(rng.choice((0, 1, 2, 3, 3))):
            parts.append(range(self.sent, self.sent + rng.choice((0, 1, 20, 200, 1000))))
            self.sent = parts[-1].stop
        winners = [self._stage(WINNER, part) for part in parts]
        losers = [self._stage(LOSER, part) for part in parts if rng.random() < 0.3]
        attempts = (await asyncio.gather(*winners, *losers))[: len(parts)]
        self.ends.add(self.sent)
        info = await self._commit(attempts)
        if (info.first, info.end) == (None, None):
            self._outcome.break_(f"batch {self.committed} is below the last one")
            return
        assert info.first is not None
        self._outcome.expect(f"batch {self.committed} is {info}", info.end == info.first + self.sent - first)  # fmt: skip
        self.acked |= {n: info.first + n - first for n in range(first, self.sent)}
        if rng.random() < 0.3:
            self.again["commits replayed"] += 1
            other = [] if rng.random() < 0.5 else attempts
            again = await self._commit(other)
            same = (again.first, again.end, again.replayed) == (info.first, info.end, True)
            self._outcome.expect(f"batch {self.committed} is {again} when {info} is replayed", same)
        self.committed += 1

    async def _stage(self, writer: int, numbers: range) -> StagedAttempt:
        client = self._rng.choice(self._clients)
        while True:
            try:
                async with client.streams.stage(
                    ORDERS, writer=WRITER, batch=self.committed, timeout=2 * PATIENCE_S
                ) as staging:
                    for number in numbers:
                        size = random.Random(number).choice((8, 200, 900, 3000))
                        await staging.append(make_message(writer, number, size))
                    return await staging.finish()
            except StreamUnavailable:
                self.again["attempts that failed"] += 1

    async def _commit(self, attempts: Sequence[StagedAttempt]) -> CommitInfo:
        client = self._rng.choice(self._clients)
        while True:
            try:
                return await client.streams.commit(
                    ORDERS, writer=WRITER, batch=self.committed, attempts=attempts, timeout=2 * PATIENCE_S
                )  # fmt: skip
            except StreamUnavailable:
                self.again["commits that failed"] += 1

    async def progress(self) -> None:
        """Return when two more batches are committed. Raises TimeoutError, or the error that ended the writer."""
        until = self.committed + 2
        async with asyncio.timeout(PATIENCE_S):
            while self.committed < until:
                if self._running.done():
                    self._running.result()
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """End after the current batch. Raises the error that ended the writer before."""
        self._ending = True
        async with asyncio.timeout(3 * PATIENCE_S):
            await self._running

    async def stop(self) -> None:
        """End at once."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


async def batches(rig: Rig, count: int, seed: int) -> Outcome:
    """Kill the store `count` times while batches are staged and committed."""
    outcome, rng = Outcome(seed), random.Random(seed)
    rig.start_relay()
    await rig.serve()
    async with rig.client() as one, rig.client() as two, rig.client() as reader:
        await reader.streams.create(ORDERS, timeout=PATIENCE_S)
        for client in (one, two):
            await client.streams.describe(ORDERS, timeout=PATIENCE_S)
        audit = Audit(ORDERS, outcome.break_)
        work = Batches((one, two), random.Random(rng.getrandbits(32)), outcome)

        async def look(audit: Audit) -> None:
            acked = dict(work.acked)
            await audit.look(reader)
            audit.check(WINNER, acked)
            seen = max((number for _, number in audit.found), default=-1) + 1
            outcome.expect(f"part of a batch is seen, until {seen}", seen in work.ends)
            lost = [number for writer, number in audit.found if writer != WINNER]
            outcome.expect(f"{len(lost)} messages of attempts that lost are seen", not lost)

        try:
            for _ in range(count):
                await asyncio.sleep(rng.uniform(0, 0.4))
                rig.end_store(signal.SIGKILL)
                await rig.serve()
                await work.progress()
                await look(audit)
                if outcome.broken:
                    break
            await work.finish()
            await look(audit)
            again = Audit(ORDERS, outcome.break_)
            await look(again)
            outcome.expect("a second read shows the same", again.found == audit.found)
            numbers = [number for _, number in again.found]
            outcome.expect("every batch is there once, in order", numbers == [*range(work.sent)])
            outcome.expect("there is nothing else", not again.gaps and again.at == work.sent)
        except (TimeoutError, IrisError) as err:
            outcome.break_(f"batches ended: {type(err).__name__}: {err}")
        finally:
            await work.stop()
    outcome.figures = {
        "SIGKILL of the store": f"{count} while batches were staged and committed",
        "batches": f"{work.committed} of {work.sent:,} messages",
        "again": ", ".join(f"{times} {what}" for what, times in sorted(work.again.items())),
    }
    return outcome
