"""Members of a queue group and services come and go under load, and their relay is drained: nothing is lost in silence.

Two relays are linked. A publisher and a member that stays are at the first. A leaver at each of them joins and leaves
the group N times in all: subscriptions with a function or a coroutine function, services, and whole clients. Another
process serves `SERVICES` clusters at the second relay, and closes its client while they are called. The second relay
is drained now and then. Each message must reach the group once, except for those that a drain reports as lost; each
call has an outcome, and none ran that was said not to have.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
from harness import Result

import iris
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue_and_wait, start, total
from proofs.restartable import RestartableRelay

RATE = 5_000
TOPIC, GROUP = "leaves.all", "leavers"
TURN_S = 0.002
SERVICES = 1_000
DRAINS_PER_LEAVE = 0.02
STAYS_S = (0.0, 0.03)
"""Range of the time for which a leaver is a member."""
LOOPBACK = ["--no-mdns", "--port=0", "--bind=127.0.0.1"]


# -- roles ---------------------------------------------------------------------------------------------------


class Received:
    """The numbers that one process received, written to a file at the end."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.numbers = array.array("Q")
        self._path = Path(options["path"])

    def take(self, message: iris.Message) -> None:
        self.numbers.append(int(message.payload))

    async def take_later(self, message: iris.Message) -> None:
        await asyncio.sleep(0)
        self.take(message)

    def result(self, client: iris.Client) -> Result:
        self._path.write_bytes(self.numbers.tobytes())
        unknown = sum(lost.count is None for lost in client.losses)
        known = sum(lost.count or 0 for lost in client.losses)
        return {"received": len(self.numbers), "unknown": unknown, "known": known}


async def publisher(options: dict[str, Any]) -> Result:
    """Publish numbers at `RATE` from the first cue to the second."""
    cues = Cues()
    async with iris.connect() as client:
        harness.say_ready()
        await cues.next()
        stopping = asyncio.create_task(cues.next())
        began_s, sent = time.monotonic(), 0
        while not stopping.done():
            for _ in range(min(int((time.monotonic() - began_s) * RATE) - sent, RATE)):
                await client.publish(TOPIC, b"%d" % sent)
                sent += 1
            await asyncio.sleep(TURN_S)
        await client.flush(timeout=TIMEOUT_S)
    return {"sent": sent, "spent_s": time.monotonic() - began_s}


async def stayer(options: dict[str, Any]) -> Result:
    """Stay in the group until the cue."""
    cues, received = Cues(), Received(options)
    async with iris.connect() as client, client.subscribe(TOPIC, received.take, group=GROUP):
        harness.say_ready()
        await cues.next()
        await asyncio.sleep(1.0)
    return received.result(client)


async def leaver(options: dict[str, Any]) -> Result:
    """Join and leave the group `count` times from the first cue on, in turn in each of the ways."""
    cues, received = Cues(), Received(options)
    rng = random.Random(options["seed"])
    known = unknown = 0

    @contextlib.asynccontextmanager
    async def of_a_service(client: iris.Client) -> Any:
        service = iris.Service("leaves")
        service.on_publish(TOPIC, group=GROUP)(received.take)
        async with client.serve(service):
            yield

    async def leave(client: iris.Client, way: int) -> None:
        if way == 2:
            member = of_a_service(client)
        else:
            handler = received.take_later if way else received.take
            member = client.subscribe(TOPIC, handler, group=GROUP)
        async with member:
            await asyncio.sleep(rng.uniform(*STAYS_S))

    async with iris.connect() as client:
        harness.say_ready()
        await cues.next()
        for number in range(options["count"]):
            if number % 4 < 3:
                await leave(client, number % 4)
                continue
            async with iris.connect(wait=TIMEOUT_S) as other:
                await other.subscribe(TOPIC, received.take, group=GROUP).ready()
                await asyncio.sleep(rng.uniform(*STAYS_S))
            known += sum(lost.count or 0 for lost in other.losses)
            unknown += sum(lost.count is None for lost in other.losses)
        harness.say_ready()
        await cues.next()
    result = received.result(client)
    result["known"] += known
    result["unknown"] += unknown
    return result


async def server(options: dict[str, Any]) -> Result:
    """Serve many clusters until the first cue, then close the client at once; report which calls ran."""
    cues = Cues()
    ran: list[str] = []
    async with contextlib.AsyncExitStack() as stack, iris.connect() as client:
        for number in range(options["services"]):
            service = iris.Service(f"service{number}")
            service.on_request(lambda payload: ran.append(payload.decode()) or payload)
            await stack.enter_async_context(client.serve(service))
        harness.say_ready()
        await cues.next()
        await client.close()
        harness.say_ready()
        await cues.next()
    return {"ran": ran}


async def caller(options: dict[str, Any]) -> Result:
    """Call the services from the first cue to the second; report the outcome of each call."""
    cues = Cues()
    rng = random.Random(options["seed"])
    outcomes: dict[str, str] = {}
    async with iris.connect() as client:
        harness.say_ready()
        await cues.next()
        stopping = asyncio.create_task(cues.next())

        async def call(number: int) -> None:
            service = f"service{rng.randrange(options['services'])}"
            try:
                await client.request(service, str(number), timeout=TIMEOUT_S)
                outcomes[str(number)] = "answered"
            except iris.RequestError as err:
                outcomes[str(number)] = "may have run" if err.may_have_run else "did not run"

        calls: set[asyncio.Task[None]] = set()
        made = 0
        while not stopping.done():
            calls = {task for task in calls if not task.done()}
            while len(calls) < 32:
                calls.add(asyncio.create_task(call(made)))
                made += 1
            await asyncio.sleep(TURN_S)
        await asyncio.gather(*calls)
    return {"made": made, "outcomes": outcomes}


# -- the proof -----------------------------------------------------------------------------------------------


def _two_relays(roles: Run) -> tuple[RestartableRelay, RestartableRelay]:
    one = RestartableRelay(roles, LOOPBACK, name="one")
    one.start()
    one.logged("links.listening")
    lines = [line for line in one.role.written().splitlines() if '"links.listening"' in line]
    two = RestartableRelay(
        roles, [*LOOPBACK, "--join", json.loads(lines[-1])["addresses"][0]], name="two"
    )
    two.start()
    two.logged("link.up")
    return one, two


def leaves(count: int, seed: int, drains: int) -> tuple[dict[str, str], list[str]]:
    """Let members leave `count` times under load, and drain the second relay `drains` times.

    Returns the figures, and what did not hold.
    """
    rng = random.Random(seed)
    with Run(120.0 + count + 20 * drains) as roles:
        one, two = _two_relays(roles)
        paths = [roles.directory / f"received{number}" for number in range(3)]
        parts = [count - count // 2, count // 2]
        members = [start(roles, "leaves.stayer", one.env, {"path": str(paths[0])})]
        for relay, path, part in zip((one, two), paths[1:], parts, strict=True):
            options = {"path": str(path), "count": part, "seed": rng.getrandbits(32)}
            members.append(start(roles, "leaves.leaver", relay.env, options))
        sending = start(roles, "leaves.publisher", one.env, {})
        sending.cue()
        for member in members[1:]:
            member.cue()
        for _ in range(drains):
            time.sleep(rng.uniform(0.3, 1.0))
            two.end(signal.SIGTERM)
            two.start()
            two.logged("link.up")
        for member in members[1:]:
            member.wait_ready()
        sending.cue()
        sent = sending.result()
        for member in members:
            member.cue()
        results = [member.result() for member in members]
        got = Counter[int]()
        for path in paths:
            numbers = array.array("Q")
            numbers.frombytes(path.read_bytes())
            got.update(numbers)
    lost = [number for number in range(sent["sent"]) if not got[number]]
    twice = sum(times > 1 for times in got.values())
    told = total(results, "known")
    silent = max(0, len(lost) - told) if not total(results, "unknown") else 0
    where = f"{drains} drains" if drains else "no drain"
    figures = {
        f"group leaves, {where}": f"{count:,}: {sent['sent']:,} messages at {sent['sent'] / sent['spent_s']:,.0f}/s, "
        f"{len(lost):,} lost, {total(results, 'unknown'):,} reports of an unknown number, {twice:,} twice",
    }
    broken = [f"{silent} messages lost in silence"] if silent else []
    if lost and not drains:
        broken.append(f"{len(lost)} messages lost although no relay stopped, such as {lost[:5]}")
    if twice:
        broken.append(f"{twice} messages were received twice")
    return figures, broken


def services(count: int, seed: int) -> tuple[dict[str, str], list[str]]:
    """Close a client that serves `count` clusters while they are called; return as `leaves`."""
    with Run(240.0 + count / 10) as roles:
        one, two = _two_relays(roles)
        options = {"services": count, "seed": seed}
        serving = start(roles, "leaves.server", two.env, options)
        calling = start(roles, "leaves.caller", one.env, options)
        calling.cue()
        time.sleep(1.0)
        cue_and_wait(serving)
        time.sleep(0.5)
        calling.cue()
        called = calling.result()
        serving.cue()
        ran = Counter(serving.result()["ran"])
    outcomes: dict[str, str] = called["outcomes"]
    kinds = Counter(outcomes.values())
    wrong = [number for number, outcome in outcomes.items() if outcome == "did not run" and ran[number]]  # fmt: skip
    broken = [f"{len(wrong)} calls ran that were said not to have"] if wrong else []
    if any(times > 1 for times in ran.values()):
        broken.append("calls ran twice")
    if kinds["may have run"]:
        broken.append(f"{kinds['may have run']} calls were cut by a client that closed gracefully")
    if len(outcomes) != called["made"] or not kinds["answered"]:
        broken.append("calls have no outcome, or none was answered")
    return {f"{count:,} services left": ", ".join(f"{n:,} {kind}" for kind, n in sorted(kinds.items()))}, broken  # fmt: skip


def add(proof: Proof, count: int, seed: int) -> None:
    """Add all of it to a proof: `count` leaves without a drain and as many with some, and `SERVICES` services."""
    drains = max(1, int(count * DRAINS_PER_LEAVE))
    for figures, broken in (leaves(count, seed, 0), leaves(count, seed, drains), services(min(SERVICES, 10 * count), seed)):  # fmt: skip
        proof.figures |= figures
        proof.broken += broken
