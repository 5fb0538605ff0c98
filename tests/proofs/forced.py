"""Loses the store of a stream on a disk N times under load, and has another store make the stream again of its copy.

Two stores share a bucket, a directory. One client appends numbered messages all the time, through each loss. Each time
the store that serves the stream is killed and its disk deleted, a new store takes its place in the bucket, and the
stream is moved by force to the other one.

At the end no message may be there twice or out of order. One that was acknowledged may be missing only if it was
acknowledged before a loss, and is part of a gap; all those of one loss are the last ones before it. No append may have
failed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from support.buckets import Group, followed
from support.stores import PATIENCE_S

import iris
from iris.errors import StreamError
from iris.streams.records import StreamGap
from proofs.common import Proof

LOSSES_OF_A_RUN = 5
FAST = ("--failover-s", "1")
AT_ONCE = 100
"""Appends that wait at once."""
LOAD_S = (0.3, 2.5)
"""Range of the time between two losses."""
ANSWER_S = 0.5
"""Within this time the client reads answers that a store sent before it was killed; the next one answers later."""
LAG_S = 5.0
"""Longest that a copy may be behind, on a machine that does much else."""


class Load:
    """One client's appends, in order."""

    def __init__(self, client: iris.Client, rng: random.Random) -> None:
        self.acked: dict[int, float] = {}
        """Message -> when it was acknowledged."""
        self.errors: list[str] = []
        self.stopping = False
        self._client = client
        self._rng = rng
        self._waiting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Append until `stopping`, then wait for what is on its way."""
        number = 0
        while not self.stopping:
            task = asyncio.create_task(self._append(number))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            number += 1
            await asyncio.sleep(self._rng.choice((0, 0, 0.001, 0.01)))
            while len(self._waiting) >= AT_ONCE:  # noqa: ASYNC110 - the store answers some
                await asyncio.sleep(0.005)
        await asyncio.gather(*self._waiting)

    async def _append(self, number: int) -> None:
        try:
            await self._client.streams.append("orders", b"%d" % number, timeout=PATIENCE_S)
        except StreamError as err:
            self.errors.append(f"{number}: {err}")
        else:
            self.acked[number] = time.monotonic()

    async def more(self, count: int) -> None:
        """Return when so many more were acknowledged."""
        wanted = len(self.acked) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(self.acked) < wanted:  # noqa: ASYNC110 - others append
                await asyncio.sleep(0.01)


class Outcome:
    """What one run found."""

    def __init__(self, load: Load, losses: list[float]) -> None:
        self.load = load
        self.losses = losses
        """When each store was killed."""
        self.stored: list[int] = []
        self.gaps: list[StreamGap] = []

    @property
    def missing(self) -> list[int]:
        """Acknowledged messages that are not there."""
        return sorted(self.load.acked.keys() - set(self.stored))

    def wrong(self) -> list[str]:
        """Return which promises do not hold."""
        found = [f"an append failed: {error}" for error in self.load.errors]
        if self.stored != sorted(set(self.stored)):
            found.append("messages are there twice or out of order")
        if len(self.gaps) != len(self.losses):
            found.append(f"{len(self.gaps)} gaps after {len(self.losses)} losses")
        for number in self.missing:
            at_s = self.load.acked[number]
            if not any(lost_s - LAG_S <= at_s <= lost_s + ANSWER_S for lost_s in self.losses):
                found.append(f"message {number} is missing, and was not acknowledged just before a loss")  # fmt: skip
        return found


async def _run(directory: Path, rng: random.Random) -> Outcome:
    with Group(directory) as group:
        for number in (1, 2):
            await _start(group, number)
        await group.logged(1, "store.peer_seen")
        async with group.rig.client() as client:
            await client.streams.create("orders")
            await followed(client, "orders")
            load = Load(client, rng)
            loading = asyncio.create_task(load.run())
            losses: list[float] = []
            there = [1, 2]
            for turn in range(LOSSES_OF_A_RUN):
                await load.more(20)
                await asyncio.sleep(rng.uniform(*LOAD_S))
                at = await group.holder(client, "orders")
                (other,) = (number for number in there if number != at)
                group.kill(at)
                losses.append(time.monotonic())
                group.lose_disk(at)
                there = [other, 3 + turn]
                starting = asyncio.create_task(_start(group, 3 + turn))
                await asyncio.sleep(rng.uniform(0, 0.5))
                await client.streams.move("orders", to=group.id_of(other), force=True)
                await load.more(20)
                await starting
                await group.logged(3 + turn, "store.peer_seen")
                await followed(client, "orders")  # its first copy is written now
            load.stopping = True
            await loading
            outcome = Outcome(load, losses)
            async with client.streams.read("orders", "first", follow=False) as reader:
                outcome.stored = [int(bytes(message.payload)) async for message in reader]
                outcome.gaps = list(reader.gaps)
            return outcome


async def _start(group: Group, number: int) -> None:
    group.start(number, None, *FAST)
    await group.logged(number, "store.copies_opened")


def run(count: int, seed: int) -> Proof:
    """Lose `count` stores, in runs of `LOSSES_OF_A_RUN`."""
    proof = Proof()
    acked = stored = missing = 0
    runs = max(1, count // LOSSES_OF_A_RUN)
    begin_s = time.monotonic()
    for turn in range(runs):
        with tempfile.TemporaryDirectory(prefix="iris-forced-") as directory:
            outcome = asyncio.run(_run(Path(directory), random.Random(seed + turn)))
        acked += len(outcome.load.acked)
        stored += len(outcome.stored)
        missing += len(outcome.missing)
        print(f"run {turn + 1}: {len(outcome.stored)} stored", file=sys.stderr, flush=True)
        for text in outcome.wrong():
            proof.promise(f"seed {seed + turn}: {text}", False)
    proof.figures["stores lost with their disks"] = f"{runs * LOSSES_OF_A_RUN}"
    proof.figures["acknowledged"] = f"{acked}"
    proof.figures["there, once and in order"] = f"{stored}"
    proof.figures["not in the copies yet, in gaps"] = f"{missing}"
    proof.figures["took"] = f"{time.monotonic() - begin_s:.0f} s"
    return proof
