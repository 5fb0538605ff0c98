"""What happens to the processes of a life, and to its bucket."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Final

from relay.store.bucket.sealing import journal_key
from relay.store.bucket.seen import SEEN_FILE
from relay.store.bucket.shelf import DIRECTORY
from support.bucket_lives.store import Process

if TYPE_CHECKING:
    from support.bucket_lives.life import Life

HOUR_S: Final = 3600.0
MOST: Final = 4
"""Processes at once."""
MOST_STARTS: Final = 9
"""Stores that are started for the first time."""
WHAT: Final = ("kill", "kill", "lose", "start", "start", "pause", "wake", "cut", "hide", "away", "night")  # fmt: skip


class Faults:
    """The faults of one life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._rng: random.Random = life.rng
        self._rolls_back_s = self._rng.uniform(6, 25) if life.plan.rolls_back else float("inf")

    async def run(self, seconds: float) -> None:
        """Do things to processes and the bucket."""
        life, rng = self._life, self._rng
        until_s = life.time.now_s + seconds
        while life.time.now_s < until_s:
            await asyncio.sleep(rng.expovariate(1 / 2.5))
            if life.time.now_s >= self._rolls_back_s:
                self._rolls_back_s = float("inf")
                await self._roll_back()
            awake = [n for n, one in life.processes.items() if not one.loop.frozen]
            asleep = [n for n, one in life.processes.items() if one.loop.frozen]
            match rng.choice(WHAT):
                case "kill" | "lose" as what if life.processes:
                    life.kill(rng.choice(list(life.processes)), disk=what == "kill")
                case "start" if len(life.processes) < MOST:
                    if life.down:
                        life.start(rng.choice(life.down))
                    elif life.starts < MOST_STARTS:
                        life.start_new()
                case "pause" if awake:
                    life.pause(rng.choice(awake))
                case "wake" if asleep:
                    life.wake(rng.choice(asleep))
                case "cut" if awake:
                    self._cut(rng.choice(awake))
                case "hide":
                    self._hide()
                case "away":
                    life.bucket.away = True
                    life.loop.call_later(rng.uniform(0.5, 8), setattr, life.bucket, "away", False)
                case "night" if rng.random() < 0.3:
                    await self._night()

    def _cut(self, number: int) -> None:
        life = self._life
        process = life.processes[number]
        if process.cut_off:
            return
        life.show(f"store {number} loses its relay")
        life.counts["cuts"] += 1
        process.detach()

        def attach() -> None:
            if not process.dead and process.cut_off:
                # In its own loop, because a process that sleeps attaches when it wakes up.
                process.loop.call_soon(attach_again, process)

        life.loop.call_later(self._rng.uniform(0.5, 15), attach)

    def _hide(self) -> None:
        """Relays do not see each other: some stores believe that others are gone."""
        life, rng = self._life, self._rng
        addresses = [one.address for one in life.processes.values()]
        if len(addresses) < 2:
            return
        split = {address for address in addresses if rng.random() < 0.5}
        hidden = {
            (one, other)
            for one in addresses
            for other in addresses
            if (one in split) != (other in split)
        }
        if rng.random() < 0.3:  # in one direction alone
            hidden = {pair for pair in hidden if pair[0] in split}
        life.show(f"{len(hidden)} pairs of stores do not see each other")
        life.counts["partitions"] += 1
        life.hidden |= hidden
        life.loop.call_later(rng.uniform(1, 15), life.hidden.difference_update, hidden)

    async def _night(self) -> None:
        """All sleep for hours, and wake up in any order."""
        life, rng = self._life, self._rng
        life.show("all sleep")
        life.counts["nights"] += 1
        life.awake.clear()
        for number, process in life.processes.items():
            if not process.loop.frozen:
                life.pause(number)
        await asyncio.sleep(rng.uniform(1, 3) * HOUR_S)
        life.awake.set()
        numbers = list(life.processes)
        rng.shuffle(numbers)
        for number in numbers:
            life.wake(number)
            await asyncio.sleep(rng.choice((0, 0, 1, 10)))

    async def _roll_back(self) -> None:
        """All stores are killed, and the bucket is as it was some time ago. One that saw more must notice, and do
        nothing until the newer objects are back.
        """
        life, rng, bucket = self._life, self._rng, self._life.bucket
        older = dict(bucket.objects)
        await asyncio.sleep(rng.uniform(3, 6))
        for number in list(life.processes):
            life.kill(number, disk=True)
        newer = dict(bucket.objects)
        gone = newer.keys() - older.keys() - bucket.deleted
        saw_more = [n for n in life.down if self._saw(n, gone)]
        if not saw_more:
            return
        life.show("the bucket is rolled back")
        life.counts["rollbacks"] += 1
        bucket.generation += 1  # nothing of those that were killed arrives meanwhile
        bucket.objects, bucket.rolled_back = older, True
        before = set(older)
        faults, bucket.faults = bucket.faults, 0.0
        noticed = life.counts["store.bucket_rolled_back"]
        number = rng.choice(saw_more)
        life.start(number)
        process = life.processes[number]
        await asyncio.sleep(rng.uniform(4, 8))
        for _ in range(120):  # the bucket may be slow
            if life.counts["store.bucket_rolled_back"] > noticed:
                break
            await asyncio.sleep(0.5)
        else:
            life.breaks(f"store {number} does not say that the bucket was rolled back")
        if process.shelf.writer is not None:
            life.breaks(f"store {number} goes on in a bucket that was rolled back")
        if any(one.startswith(("journal", "decision/")) for one in bucket.objects.keys() - before):
            life.breaks(f"store {number} writes to a bucket that was rolled back")
        life.show("the newer objects are back")
        bucket.generation += 1
        bucket.objects, bucket.faults = newer, faults
        bucket.rolled_back = False

    def _saw(self, number: int, gone: set[str]) -> bool:
        """Return whether a store has written down an object that is gone now."""
        path = self._life.directory_of(number) / DIRECTORY / SEEN_FILE
        if not path.exists():
            return False
        seen: dict[str, tuple[int, int, str]] = json.loads(path.read_bytes())["journals"]
        return any(journal_key(name, last) in gone for name, (_, last, _) in seen.items())


def attach_again(process: Process) -> None:
    """Give a process its relay back."""
    if process.cut_off and not process.dead:
        process.attach()
