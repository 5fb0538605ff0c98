"""A bucket that is slow, refuses, loses answers, answers twice and carries out late, also for processes that have
ended or sleep.

Nothing in it is ever listed, so there are no old listings: stores find everything by its number.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

from relay.store.bucket.objects import BucketError
from relay.store.bucket.sealing import (
    Checkpoint,
    Decision,
    Ended,
    Fence,
    Numbered,
    Registered,
    Released,
    Sealer,
    Settled,
    Taken,
)
from relay.store.bucket.tiers import LATE_S as FORGOTTEN_S
from support.bucket_lives.loops import Loop

SLOW_S: Final = 8.0
LATE_S: Final = 40.0
"""A request whose answer did not come is carried out this much later at most, unless its sender sleeps."""


class Caller(Protocol):
    """The process that makes a request."""

    loop: Loop
    dead: bool
    wakes: list[Callable[[], None]]
    """Called when the process, which sleeps now, is continued."""


class Bucket:
    """The objects, and the faults with which requests end."""

    def __init__(
        self, loop: Loop, rng: random.Random, sealer: Sealer, counts: Counter[str]
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.loop = loop
        self.faults = rng.choice((0.0, 0.05, 0.15, 0.3))
        """Share of the requests that do not end well."""
        self.latency_s = rng.choice((0.01, 0.05, 0.15))
        self.away = False
        """Every request is refused."""
        self.rolled_back = False
        """Its newest objects are hidden."""
        self.refuses: tuple[str, str] | None = None
        """(kind of request, beginning of a key): such requests are refused."""
        self.fences: dict[str, list[Fence]] = {}
        """Journal -> the fences that were created in it; void ones, too."""
        self.registered: dict[str, bytes] = {}
        """Journal -> the public key of its store."""
        self.excused: set[str] = set()
        """Segment objects that were made so late that their store had given them up: nobody deletes them."""
        self.deleted: set[str] = set()
        """Keys of objects that were there and were deleted. A request that is late may create one again."""
        self.generation = 0
        """Requests of an earlier generation are not carried out any more."""
        self._begins: dict[str, int] = {}
        """Journal -> where its last checkpoint begins."""
        self._moves: dict[str, set[str]] = {}
        """Move that is not over -> journals that take part in it."""
        self._rng = rng
        self._sealer = sealer
        self._counts = counts

    def request(
        self, caller: Caller, what: str, key: str, data: bytes, answer: Callable[[Any], None]
    ) -> None:  # fmt: skip
        """Carry out a request, now or later or never, and call `answer` with its result or error, or both."""
        rng, later = self._rng, self.loop.call_later
        there_s, back_s = (rng.expovariate(1 / self.latency_s) for _ in "ab")
        fate = "well"
        refuses = self.refuses
        if self.away or (refuses and what == refuses[0] and key.startswith(refuses[1])):
            fate = "refused"
        elif rng.random() < self.faults:
            fates = ("slow", "refused", "lost", "late", "unanswered", "twice")
            fate = rng.choice(fates if what == "create" else fates[:5])
        if key.startswith("probe/") and fate == "twice":
            fate = "slow"  # the probe takes such an answer for a service that cannot be used, and stops
        if fate != "well":
            self._counts[f"{what} {fate}"] += 1

        generation, asked_s = self.generation, self.loop.time()

        def carry_out() -> Any:
            if generation != self.generation:
                return None
            if key.startswith("segment/") and self.loop.time() - asked_s > FORGOTTEN_S / 2:
                self.excused.add(key)
            return self._do(what, key, data)

        def fails() -> None:
            answer(BucketError(f"bucket memory: {what} {key}: {fate}"))

        def arrives() -> None:
            if caller.loop.frozen and not caller.dead and rng.random() < 0.5:
                caller.wakes.append(lambda: later(rng.uniform(0, 1), arrives) and None)
                return
            result = carry_out()
            if fate == "twice":
                result = carry_out()
            if fate in ("well", "twice", "slow"):
                later(back_s, answer, result)

        match fate:
            case "refused":
                later(there_s, fails)
                return
            case "lost":
                later(there_s + rng.uniform(0, SLOW_S), fails)
                return
            case "slow":
                there_s, back_s = rng.uniform(0, SLOW_S), rng.uniform(0, SLOW_S)
            case "late":
                later(there_s + rng.uniform(0, 1), fails)
                there_s += rng.expovariate(1 / 4) if rng.random() < 0.8 else rng.uniform(0, LATE_S)
            case "unanswered":
                later(there_s + rng.uniform(0, 2), fails)
        later(there_s, arrives)

    def _do(self, what: str, key: str, data: bytes) -> Any:
        match what:
            case "create":
                if key in self.objects:
                    return False
                self.objects[key] = data
                self._note(key, data)
                return True
            case "get":
                return self.objects.get(key)
            case "range":
                name, _, part = key.partition("#")
                start, _, end = part.partition("-")
                found = self.objects.get(name)
                self._counts["reads of moved records"] += 1
                return None if found is None else found[int(start) : int(end)]
            case "exists":
                return key in self.objects
        if self.objects.pop(key, None) is not None:
            what = "segment objects deleted" if key.startswith("segment/") else "deleted"
            self._counts[what] += 1
            self.deleted.add(key)
        return None

    def _note(self, key: str, data: bytes) -> None:
        kind, _, rest = key.partition("/")
        if kind == "probe":
            return
        if kind == "segment":
            self._counts["segment objects"] += 1
            return
        match self._sealer.open(key, data):
            case Fence() as fence:
                journal, _, number = rest.partition("/")
                self._counts["fences"] += 1
                self._counts["void fences"] += int(number) < self._begins.get(journal, 0)
                self._counts["fences during a move"] += any(
                    journal in each for each in self._moves.values()
                )
                self.fences.setdefault(journal, []).append(fence)
            case Registered(journal, store):
                self._counts["journals"] += 1
                self.registered[journal] = store
            case Checkpoint(first):
                self._begins[rest.partition("/")[0]] = first
                self._counts["checkpoints"] += 1
            case Numbered(_, entries):
                self._counts["objects"] += 1
                for entry in entries:
                    if isinstance(entry, Released | Taken):
                        self._moves.setdefault(entry.token, set()).add(rest.partition("/")[0])
                    self._counts["entries of deletion"] += isinstance(entry, Ended)
            case Decision(journal) if rest in self._moves:  # else a log was created
                self._counts["moves that took place" if journal else "moves that did not"] += 1
                if not journal:
                    self._moves.pop(rest, None)
            case Settled():
                self._counts["moves settled"] += 1
                self._moves.pop(rest, None)


class Port:
    """The bucket as one process sees it."""

    url = "memory:"

    def __init__(self, bucket: Bucket, caller: Caller) -> None:
        self._bucket = bucket
        self._caller = caller

    async def create(self, key: str, data: bytes) -> bool:
        return bool(await self._ask("create", key, data))

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._ask("get", key)
        return found

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        found: bytes | None = await self._ask("range", f"{key}#{start}-{end}")
        return found

    async def exists(self, key: str) -> bool:
        return bool(await self._ask("exists", key))

    async def delete(self, key: str) -> None:
        await self._ask("delete", key)

    async def _ask(self, what: str, key: str, data: bytes = b"") -> Any:
        if self._caller.dead:
            raise BucketError("this process was killed")
        loop = self._caller.loop
        answered: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any) -> None:
            if answered.done():
                return
            if isinstance(result, BucketError):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        def answer(result: Any) -> None:
            if not self._caller.dead:
                loop.call_soon(settle, result)

        self._bucket.request(self._caller, what, key, data, answer)
        return await answered
