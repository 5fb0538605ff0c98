"""Checks that no drain of a relay loses a message without a report.

The relay is drained (SIGTERM) under load and started again, N times linked to another and N times alone with a store.
Two publishers send 20,000 messages a second to a topic, every tenth as a broadcast, and number those that `publish`
and `broadcast` accepted. Three kinds of receivers check the numbers: at the other relay, at the drained relay, and a
reader of the recorded stream. Each must receive every number in order, or a report of the loss between the numbers
before and after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import struct
import time
from pathlib import Path
from typing import Any

import harness
from harness import Result

import iris
from proofs.common import TIMEOUT_S, Cues, Proof, Run, start, total
from proofs.restartable import RestartableRelay

PUBLISHERS = 2
RATE = 20_000
BROADCAST_EACH = 10
TOPIC, CLUSTER, STREAM = "drains.all", "drains", "drains"
NUMBER = struct.Struct("<BBQ")
"""Payload: publisher, kind, and number among this publisher's messages of that kind."""
TURN_S = 0.002
BETWEEN_S = (0.1, 0.5)
"""Range of the time between a start and the next SIGTERM."""
QUIET_S = 2.0
OTHERS = ["--no-mdns", "--port=0", "--bind=127.0.0.1"]


# -- roles ---------------------------------------------------------------------------------------------------


async def publisher(options: dict[str, Any]) -> Result:
    """Publish at a rate until the cue. Then publish one more message of each kind, when the relay is back."""
    cues = Cues()
    me, accepted, refused = options["publisher"], [0, 0], 0
    reported = 0

    def lost(loss: iris.Loss) -> None:
        nonlocal reported
        reported += 1

    async with iris.connect() as client:
        client.on_loss = lost

        async def send(turn: int) -> None:
            nonlocal refused
            kind = int(turn % BROADCAST_EACH == 0)
            payload = NUMBER.pack(me, kind, accepted[kind])
            try:
                if kind:
                    await client.broadcast(CLUSTER, payload)
                else:
                    await client.publish(TOPIC, payload)
            except iris.ConnectionLost:  # the queue for a relay that is away is full
                refused += 1
                await asyncio.sleep(0.01)
            else:
                accepted[kind] += 1

        harness.say_ready()
        await cues.next()
        stopping = asyncio.create_task(cues.next())
        began_s, turns = time.monotonic(), 0
        while not stopping.done():
            due = int((time.monotonic() - began_s) * RATE / PUBLISHERS)
            for _ in range(min(due - turns, 2000)):
                await send(turns)
                turns += 1
            turns = max(
                turns, due - 2000
            )  # skip what is too late, so that refusals do not make the load grow
            await asyncio.sleep(TURN_S)
        await client.flush(timeout=TIMEOUT_S)
        for turn in range(2):
            await send(turn)
        await client.flush(timeout=TIMEOUT_S)
        spent_s = time.monotonic() - began_s
    return {"accepted": accepted, "refused": refused, "reported": reported, "spent_s": spent_s}


class Audit:
    """The messages and gaps of one listener, with the sequence of each publisher and kind checked."""

    def __init__(self) -> None:
        self.received = self.missing = self.silent = self.wrong = self.gaps = 0
        self.latest_s = time.monotonic()
        self._next: dict[tuple[int, int], int] = {}
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}
        """Flow -> (gaps of unknown count, messages in the other gaps) at the time of its latest message."""
        self._unknown = self._known = 0

    def payload(self, payload: bytes) -> None:
        publisher, kind, number = NUMBER.unpack(payload)
        flow = (publisher, kind)
        due = self._next.get(flow, 0)
        self.latest_s = time.monotonic()
        self.received += 1
        if number < due:
            self.wrong += 1  # twice, or out of order
            return
        self._account(flow, number - due)
        self._next[flow] = number + 1

    def _account(self, flow: tuple[int, int], missing: int) -> None:
        unknown, known = self._seen.get(flow, (0, 0))
        self._seen[flow] = (self._unknown, self._known)
        self.missing += missing
        if self._unknown == unknown and self._known - known < missing:
            self.silent += missing

    def gap(self, count: int | None) -> None:
        self.gaps += 1
        if count is None:
            self._unknown += 1
        else:
            self._known += count

    def result(self, accepted: list[list[int]]) -> Result:
        """Return the counts for all accepted messages, given as accepted[publisher][kind]."""
        for publisher, counts in enumerate(accepted):
            for kind, count in enumerate(counts):
                flow = (publisher, kind)
                self._account(flow, max(0, count - self._next.get(flow, 0)))
        return {
            "received": self.received, "missing": self.missing, "silent": self.silent, "wrong": self.wrong, "gaps": self.gaps,
        }  # fmt: skip


async def listener(options: dict[str, Any]) -> Result:
    """Subscribe to the topic, and receive the broadcasts as a member; return the sums of both audits."""
    cues = Cues()
    casts, broadcasts = Audit(), Audit()
    service = iris.Service(CLUSTER)

    @service.on_broadcast
    def receive(payload: bytes) -> None:
        broadcasts.payload(payload)

    service.on_loss(lambda lost: broadcasts.gap(lost.count))
    async with (
        iris.connect() as client,
        client.serve(service),
        client.subscribe(
            TOPIC,
            lambda message: casts.payload(message.payload),
            on_loss=lambda lost: casts.gap(lost.count),
            limit_bytes=1 << 30,
        ),
    ):
        harness.say_ready()
        await cues.next()
        await _quiet(casts, broadcasts)
    accepted = _accepted(options["path"])
    both = (
        casts.result([[n, 0] for n, _ in accepted]),
        broadcasts.result([[0, n] for _, n in accepted]),
    )
    return {name: both[0][name] + both[1][name] for name in both[0]}


async def _quiet(*audits: Audit) -> None:
    """Return when nothing has been received for `QUIET_S`."""
    while time.monotonic() - max(audit.latest_s for audit in audits) < QUIET_S:  # noqa: ASYNC110 - silence has no event
        await asyncio.sleep(0.05)


def _accepted(path: str) -> list[list[int]]:
    found: list[list[int]] = json.loads(Path(path).read_text())
    return found


async def reader(options: dict[str, Any]) -> Result:
    """Record the topic in a stream, and read it at the end."""
    cues = Cues()
    async with iris.connect() as client:
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                await client.streams.create(STREAM, topic=TOPIC)
                break
            except iris.errors.StreamError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(0.05)
        harness.say_ready()
        await cues.next()
        accepted = _accepted(options["path"])
        while True:
            audit, gaps, done = Audit(), list[Any](), 0
            with contextlib.suppress(iris.errors.StreamError):  # its store may not be attached yet
                async with client.streams.read(
                    STREAM, "first", follow=False, on_gap=gaps.append
                ) as messages:
                    async for message in messages:
                        while done < len(gaps) and gaps[done].first < message.offset:
                            audit.gap(gaps[done].count)
                            done += 1
                        audit.payload(message.payload)
                break
            await asyncio.sleep(0.1)
    for gap in gaps[done:]:
        audit.gap(gap.count)
    return audit.result([[n, 0] for n, _ in accepted])


# -- the proof -----------------------------------------------------------------------------------------------


def drain(count: int, rng: random.Random, *, linked: bool) -> Result:
    """Drain one relay `count` times under load; return the results of all publishers and receivers."""
    with Run(120.0 + 10 * count) as roles:
        arguments = ["--data", str(roles.directory / "data")]
        other = None
        if linked:
            other = RestartableRelay(roles, OTHERS, name="other")
            other.start()
            other.logged("links.listening")
            (listening,) = [
                json.loads(line)
                for line in other.role.written().splitlines()
                if '"links.listening"' in line
            ]
            arguments += [*OTHERS, "--join", listening["addresses"][0]]
        else:
            arguments += ["--no-mdns", "--port=0", "--bind=127.0.0.1"]
        relay = RestartableRelay(roles, arguments)
        relay.start()
        if linked:
            relay.logged("link.up")
        path = roles.directory / "accepted.json"
        options = {"path": str(path)}
        reading = start(roles, "drains.reader", relay.env, options)
        listeners = {"moved with the relay": start(roles, "drains.listener", relay.env, options)}
        if other is not None:
            listeners["at the other relay"] = start(roles, "drains.listener", other.env, options)
        time.sleep(0.5 if linked else 0.0)  # until the links know of the listeners
        sending = [
            start(roles, "drains.publisher", relay.env, {"publisher": number})
            for number in range(PUBLISHERS)
        ]
        for one in sending:
            one.cue()
        took_s, cut, late = 0.0, 0, 0
        for _ in range(count):
            time.sleep(rng.uniform(*BETWEEN_S))
            took_s = max(took_s, relay.end(signal.SIGTERM))
            cut += relay.said("relay.unread")
            late += relay.said("door.late") + relay.said("store.killed")
            relay.start()
            relay.logged("store.attached")
            if linked:
                relay.logged("link.up")
        time.sleep(1.0)
        for one in sending:
            one.cue()
        sent = [one.result() for one in sending]
        path.write_text(json.dumps([one["accepted"] for one in sent]))
        results = {}
        for name, one in listeners.items():
            one.cue()
            results[name] = one.result()
        reading.cue()
        results["recorded"] = reading.result()
        relay.end(signal.SIGTERM)
    return {"sent": sent, "results": results, "took_s": took_s, "cut": cut, "late": late}


def run(count: int, seed: int) -> Proof:
    """Run `count` drains of a relay that is linked, and as many of one that is alone."""
    proof = Proof()
    rng = random.Random(seed)
    for way, linked in (("linked", True), ("alone", False)):
        found = drain(count, rng, linked=linked)
        sent = found["sent"]
        accepted = [sum(one["accepted"][kind] for one in sent) for kind in range(2)]
        rate = sum(accepted) / max(one["spent_s"] for one in sent)
        reported = total(sent, "reported")
        proof.figures |= {
            f"{way}: drains": f"{count}; longest {found['took_s']:.2f} s, {found['cut']} with a session that was not read to its end, {found['late']} with a store that took too long to start or end",
            f"{way}: accepted": f"{accepted[0]:,} publications and {accepted[1]:,} broadcasts, {rate:,.0f}/s; {total(sent, 'refused'):,} refused, {reported} losses reported to publishers",
        }
        for name, result in found["results"].items():
            proof.figures[f"{way}: {name}"] = (
                f"{result['received']:,} received, {result['missing']:,} missing in {result['gaps']:,} gaps, {result['silent']} in silence"
            )
            proof.promise(f"{way}, {name}: nothing is lost in silence", not result["silent"])
            proof.promise(
                f"{way}, {name}: nothing comes twice or out of order", not result["wrong"]
            )
        proof.promise(f"{way}: no loss is reported to publishers", not reported)
        if not linked:
            recorded = found["results"]["recorded"]
            late = found["late"]
            proof.promise("alone: the stream has no gap but where its store took too long", recorded["gaps"] <= late)  # fmt: skip
            proof.promise("alone: the stream has all", late or recorded["received"] == accepted[0])
    return proof
