"""N publications of 4 publishers to 3 subscribers by wildcards, one of them slow: order, no duplicate, every loss told.

Who publishes what is drawn from the seed, so every subscriber knows what it has to account for, topic by topic.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections import Counter
from typing import Any

import harness
from harness import IrisRelay, Result

import iris
from proofs.common import (
    TIMEOUT_S,
    Cues,
    Proof,
    Run,
    cue,
    deadline_s,
    settings,
    shares,
    start,
    total,
)

TOPICS = [f"proof.{place}.{what}.{n}" for place in ("eu", "us", "asia") for what in ("orders", "trades") for n in range(4)]  # fmt: skip
PUBLISHERS = 4
FILTERS = {"proof.>": "slow", "proof.*.orders.*": "async-for", "proof.eu.>": "callback"}
NUMBER = struct.Struct("<HHQ")
"""publisher, topic, number among this publisher's messages to this topic"""
FILLER = bytes(1024 - NUMBER.size)
TURN_MESSAGES = 64
STALL_MESSAGES, STALL_S = 500, 0.1
MIN_QUEUE_BYTES, MAX_QUEUE_BYTES = 1 << 20, 64 << 20
"""Between the least and the default of a relay: an eighth of all that is sent, so that at any count it has to drop
some.
"""
QUIET_S = 10.0
"""A subscriber that hears nothing for so long gives up on what is missing."""
STRAY_S = 0.2


def matches(pattern: str, topic: str) -> bool:
    """Return whether a filter matches: '*' is one token, a final '>' the rest. Independent of Iris, to check it."""
    tokens = topic.split(".")
    wanted = pattern.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )


def draw(seed: int, publisher: int, count: int) -> list[int]:
    """Return the topics that a publisher publishes to, one after the other."""
    return random.Random(seed * 1000 + publisher).choices(range(len(TOPICS)), k=count)


# -- roles ---------------------------------------------------------------------------------------------------


async def publisher(options: dict[str, Any]) -> Result:
    cues = Cues()
    me, drawn = options["publisher"], draw(options["seed"], options["publisher"], options["count"])
    numbers = [0] * len(TOPICS)
    async with iris.connect() as client:
        harness.say_ready()
        await cues.next()
        begin_s = time.monotonic()
        for at, topic in enumerate(drawn):
            payload = NUMBER.pack(me, topic, numbers[topic]) + FILLER
            numbers[topic] += 1
            if not client.offer(TOPICS[topic], payload):
                await client.publish(TOPICS[topic], payload)
            if at % TURN_MESSAGES == 0:
                await asyncio.sleep(0)
        await client.flush(timeout=TIMEOUT_S)
        spent_s = time.monotonic() - begin_s
    return {"sent": sum(numbers), "spent_s": spent_s}


class Audit:
    """What one subscriber got and was told, beside what was sent to it."""

    def __init__(self, pattern: str, seed: int, counts: list[int]) -> None:
        self.sent: Counter[str] = Counter()
        for number, count in enumerate(counts):
            self.sent.update(TOPICS[topic] for topic in draw(seed, number, count))
        self.sent = Counter({t: n for t, n in self.sent.items() if matches(pattern, t)})
        self.received: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.inversions = self.duplicates = self.wrong = self.unknown = 0
        self.heard_s = time.monotonic()
        self._latest: dict[tuple[int, int], int] = {}
        self._seen: set[tuple[int, int, int]] = set()

    def message(self, message: iris.Message) -> None:
        place = NUMBER.unpack_from(message.payload)
        publisher, topic, number = place
        if place in self._seen:
            self.duplicates += 1
            return
        self._seen.add(place)
        latest = self._latest.get((publisher, topic), -1)
        self.inversions += number < latest
        self._latest[publisher, topic] = max(number, latest)
        self.wrong += message.name != TOPICS[topic] or message.name not in self.sent
        self.received[message.name] += 1
        self.heard_s = time.monotonic()

    def slowly(self, message: iris.Message) -> None:
        """As `message`, by a callback that holds up its whole process now and then."""
        self.message(message)
        if self.received.total() % STALL_MESSAGES == 0:
            time.sleep(STALL_S)
            self.heard_s = time.monotonic()

    def gap(self, lost: iris.Lost) -> None:
        if lost.count is None:
            self.unknown += 1
        else:
            self.told[lost.name] += lost.count
        self.heard_s = time.monotonic()

    async def complete(self) -> None:
        """Return when all is accounted for, or nothing comes any more."""
        while self.received.total() + self.told.total() < self.sent.total():
            if time.monotonic() > self.heard_s + QUIET_S:
                return
            await asyncio.sleep(0.01)
        await asyncio.sleep(STRAY_S)  # what comes now is one too many

    def result(self) -> Result:
        off = {
            topic: self.sent[topic] - self.received[topic] - self.told[topic]
            for topic in {*self.sent, *self.received, *self.told}
        }
        return {
            "sent": self.sent.total(),
            "received": self.received.total(),
            "told": self.told.total(),
            "unknown": self.unknown,
            "unaccounted": sum(map(abs, off.values())),
            "inversions": self.inversions,
            "duplicates": self.duplicates,
            "wrong": self.wrong,
        }


async def subscriber(options: dict[str, Any]) -> Result:
    cues = Cues()
    pattern, mode = options["filter"], options["mode"]
    audit = Audit(pattern, options["seed"], options["counts"])
    async with iris.connect() as client:
        if mode == "async-for":
            async with client.subscribe(pattern, on_gap=audit.gap) as messages:

                async def take() -> None:
                    async for message in messages:
                        audit.message(message)

                task = asyncio.create_task(take())
                harness.say_ready()
                await cues.stop.wait()
                await audit.complete()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        else:
            handler = audit.slowly if mode == "slow" else audit.message
            async with client.subscribe(pattern, handler, on_gap=audit.gap):
                harness.say_ready()
                await cues.stop.wait()
                await audit.complete()
    return audit.result()


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Prove it with `count` publications."""
    proof = Proof()
    counts = shares(count, PUBLISHERS)
    queue_bytes = min(max(count * 1024 // 8, MIN_QUEUE_BYTES), MAX_QUEUE_BYTES)
    with Run(deadline_s(count)) as roles:
        relay = IrisRelay(roles, settings(roles, port_queue_bytes=queue_bytes))
        subscribers = [
            start(
                roles,
                "order.subscriber",
                relay.env,
                {"filter": pattern, "mode": mode, "seed": seed, "counts": counts},
            )
            for pattern, mode in FILTERS.items()
        ]
        publishers = [
            start(
                roles,
                "order.publisher",
                relay.env,
                {"publisher": number, "count": share, "seed": seed},
            )
            for number, share in enumerate(counts)
        ]
        cue(*publishers)
        sent = [role.result() for role in publishers]
        for role in subscribers:
            role.process.terminate()
        heard = [role.result() for role in subscribers]
        relay.stop()
    proof.figures = {
        "publications": f"{total(sent, 'sent'):,} of 1 KiB by {len(counts)} publishers to {len(TOPICS)} topics, "
        f"in {max(result['spent_s'] for result in sent):.2f} s",
    }
    for (pattern, mode), result in zip(FILTERS.items(), heard, strict=True):
        proof.figures[f"`{pattern}`, {mode}"] = (
            f"{result['sent']:,} sent = {result['received']:,} received + {result['told']:,} told as lost"
        )
    proof.figures["relay's queue for each"] = f"{queue_bytes / 1e6:.1f} MB"
    wrongs = ("inversions", "duplicates", "unaccounted", "unknown", "wrong")
    proof.figures |= {name: f"{total(heard, name)}" for name in wrongs}
    proof.promise("all is sent", total(sent, "sent") == count)
    proof.promise("no inversion", not total(heard, "inversions"))
    proof.promise("no duplicate", not total(heard, "duplicates"))
    proof.promise("nothing but what was subscribed to", not total(heard, "wrong"))
    proof.promise("received + told = sent, topic by topic", not total(heard, "unaccounted"))
    proof.promise("every gap has its count", not total(heard, "unknown"))
    return proof
