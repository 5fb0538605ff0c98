"""Checks order, duplicates and reports of losses: N publications of 4 publishers to 3 subscribers, one of them slow.

The topics are drawn from the seed, so each subscriber knows how many messages it must account for, topic by topic.
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

TOPICS = [f"proof.{region}.{what}.{n}" for region in ("eu", "us", "asia") for what in ("orders", "trades") for n in range(4)]  # fmt: skip
PUBLISHERS = 4
FILTERS = {"proof.>": "slow", "proof.*.orders.*": "async-for", "proof.eu.>": "callback"}
NUMBER = struct.Struct("<HHQ")
"""Payload: publisher, topic, and number among this publisher's messages to that topic."""
FILLER = bytes(1024 - NUMBER.size)
TURN_MESSAGES = 64
STALL_MESSAGES, STALL_S = 500, 0.1
MIN_QUEUE_BYTES, MAX_QUEUE_BYTES = 1 << 20, 64 << 20
"""Bounds of the relay's queue, which holds an eighth of all messages: so it must drop some at any N."""
QUIET_S = 10.0
"""A subscriber that receives nothing for so long stops waiting for what is missing."""
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
    """Return the indexes of the topics that a publisher publishes to, in order."""
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
    """The messages and gaps of one subscriber, compared with what was sent to it."""

    def __init__(self, pattern: str, seed: int, counts: list[int]) -> None:
        self.sent: Counter[str] = Counter()
        for number, count in enumerate(counts):
            self.sent.update(TOPICS[topic] for topic in draw(seed, number, count))
        self.sent = Counter({t: n for t, n in self.sent.items() if matches(pattern, t)})
        self.received: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        self.inversions = self.duplicates = self.wrong = self.unknown = 0
        self.latest_s = time.monotonic()
        self._latest: dict[tuple[int, int], int] = {}
        self._seen: set[tuple[int, int, int]] = set()

    def message(self, message: iris.Message) -> None:
        parts = NUMBER.unpack_from(message.payload)
        publisher, topic, number = parts
        if parts in self._seen:
            self.duplicates += 1
            return
        self._seen.add(parts)
        latest = self._latest.get((publisher, topic), -1)
        self.inversions += number < latest
        self._latest[publisher, topic] = max(number, latest)
        self.wrong += message.name != TOPICS[topic] or message.name not in self.sent
        self.received[message.name] += 1
        self.latest_s = time.monotonic()

    def slowly(self, message: iris.Message) -> None:
        """As `message`, but block the process now and then."""
        self.message(message)
        if self.received.total() % STALL_MESSAGES == 0:
            time.sleep(STALL_S)
            self.latest_s = time.monotonic()

    def gap(self, lost: iris.Loss) -> None:
        if lost.count is None:
            self.unknown += 1
        else:
            self.reported[lost.name] += lost.count
        self.latest_s = time.monotonic()

    async def complete(self) -> None:
        """Return when all messages are accounted for, or nothing was received for `QUIET_S`."""
        while self.received.total() + self.reported.total() < self.sent.total():
            if time.monotonic() > self.latest_s + QUIET_S:
                return
            await asyncio.sleep(0.01)
        await asyncio.sleep(STRAY_S)  # a message that comes now is a duplicate

    def result(self) -> Result:
        off = {
            topic: self.sent[topic] - self.received[topic] - self.reported[topic]
            for topic in {*self.sent, *self.received, *self.reported}
        }
        return {
            "sent": self.sent.total(),
            "received": self.received.total(),
            "reported": self.reported.total(),
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
            async with client.subscribe(pattern, on_loss=audit.gap) as messages:

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
            async with client.subscribe(pattern, handler, on_loss=audit.gap):
                harness.say_ready()
                await cues.stop.wait()
                await audit.complete()
    return audit.result()


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Run it with `count` publications."""
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
        results = [role.result() for role in subscribers]
        relay.stop()
    proof.figures = {
        "publications": f"{total(sent, 'sent'):,} of 1 KiB by {len(counts)} publishers to {len(TOPICS)} topics, "
        f"in {max(result['spent_s'] for result in sent):.2f} s",
    }
    for (pattern, mode), result in zip(FILTERS.items(), results, strict=True):
        proof.figures[f"`{pattern}`, {mode}"] = (
            f"{result['sent']:,} sent = {result['received']:,} received + {result['reported']:,} reported as lost"
        )
    proof.figures["relay's queue for each"] = f"{queue_bytes / 1e6:.1f} MB"
    wrongs = ("inversions", "duplicates", "unaccounted", "unknown", "wrong")
    proof.figures |= {name: f"{total(results, name)}" for name in wrongs}
    proof.promise("all is sent", total(sent, "sent") == count)
    proof.promise("no inversion", not total(results, "inversions"))
    proof.promise("no duplicate", not total(results, "duplicates"))
    proof.promise("nothing but what was subscribed to", not total(results, "wrong"))
    proof.promise("received + reported = sent, topic by topic", not total(results, "unaccounted"))
    proof.promise("every gap has its count", not total(results, "unknown"))
    return proof
