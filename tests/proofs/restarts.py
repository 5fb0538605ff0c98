"""Kills and drains a relay under load, N times alone and N times while it looks for others: no call may be refused
because a member is missing.

Every cluster has one member, so a call fails if that member has not returned yet. A relay is away for up to
`AWAY_S`, after which clients used to pause for up to 2 s. Half of the ends are SIGKILL, half SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from typing import Any

import harness
from harness import Result

import iris
from proofs.common import TIMEOUT_S, Cues, Proof, Run, cue_and_wait, start
from proofs.restartable import RestartableRelay

CLUSTERS = 6
PROCESSES = 3
WORKERS = 8
AWAY_S = 2.0
CALL_S = 10.0
NOBODY = "127.0.0.1:1"
"""An address without a relay. Dialling it makes the relay settle for the whole time."""


# -- roles ---------------------------------------------------------------------------------------------------


async def member(options: dict[str, Any]) -> Result:
    """Serve several clusters, each with its own client."""
    cues = Cues()
    async with contextlib.AsyncExitStack() as open_until_the_end:
        for name in options["clusters"]:
            service = iris.Service(name)
            service.on_request(lambda payload: payload)
            client = await open_until_the_end.enter_async_context(iris.connect())
            await open_until_the_end.enter_async_context(client.serve(service))
        harness.say_ready()
        await cues.stop.wait()
    return {}


async def caller(options: dict[str, Any]) -> Result:
    """Send requests to all clusters; after each cue, report when all have answered again."""
    cues = Cues()
    names = options["clusters"]
    answered: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    longest_s = 0.0
    changed = asyncio.Event()
    clients = [iris.connect() for _ in range(2)]
    for client in clients:
        await client.open()
    for name in names:
        await clients[0].wait_for_members(name, 1, timeout=TIMEOUT_S)

    async def work(worker: int) -> None:
        nonlocal longest_s
        turn = worker
        while not cues.stop.is_set():
            name = names[turn % len(names)]
            turn += 1
            began_s = time.monotonic()
            try:
                await clients[worker % 2].request(name, b"x" * 200, timeout=CALL_S)
                answered[name] += 1
                changed.set()
            except iris.IrisError as err:
                failures[type(err).__name__] += 1
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.002)

    async def follow() -> None:
        while True:
            await cues.next()
            before = answered.copy()
            while any(answered[name] == before[name] for name in names):
                changed.clear()
                await changed.wait()
            harness.say_ready()

    workers = [asyncio.create_task(work(number)) for number in range(WORKERS)]
    following = asyncio.create_task(follow())
    harness.say_ready()
    await asyncio.gather(*workers)
    following.cancel()
    await asyncio.gather(*(client.close() for client in clients))
    return {"answered": answered.total(), "failures": failures, "longest_s": longest_s}


# -- the proof -----------------------------------------------------------------------------------------------


def restart(arguments: list[str], count: int, rng: random.Random) -> Result:
    """Restart one relay `count` times; return the results of its callers."""
    with Run(60.0 + 15 * count) as roles:
        relay = RestartableRelay(roles, arguments)
        relay.start()
        names = [f"restarts-{number}" for number in range(CLUSTERS)]
        members = [
            start(roles, "restarts.member", relay.env, {"clusters": names[number::PROCESSES]})
            for number in range(PROCESSES)
        ]
        asking = start(roles, "restarts.caller", relay.env, {"clusters": names})
        cue_and_wait(asking)
        back_s = []
        for number in range(count):
            relay.end(signal.SIGTERM if number % 2 else signal.SIGKILL)
            time.sleep(rng.uniform(0.0, AWAY_S))
            relay.start()
            began_s = time.monotonic()
            cue_and_wait(asking)
            back_s.append(time.monotonic() - began_s)
        result = asking.result(stop=True)
        for one in members:
            one.result(stop=True)
        return {**result, "back_s": max(back_s)}


def run(count: int, seed: int) -> Proof:
    """Run it with `count` restarts of a relay alone, and as many of one that looks for others."""
    proof = Proof()
    rng = random.Random(seed)
    ways = {
        "alone": ["--dev"],
        "looking for others": ["--no-mdns", "--port=0", "--bind=127.0.0.1", "--join", NOBODY],
    }
    for way, arguments in ways.items():
        found = restart(arguments, count, rng)
        failures = found["failures"]
        proof.figures |= {
            f"{way}: restarts": str(count),
            f"{way}: calls answered": f"{found['answered']:,}",
            f"{way}: false refusals": str(failures.get("NoMembers", 0)),
            f"{way}: calls lost with the relay": str(failures.get("ConnectionLost", 0)),
            f"{way}: all clusters answer again, longest": f"{found['back_s']:.2f} s after the socket is there",
            f"{way}: longest call": f"{found['longest_s']:.2f} s",
        }
        proof.promise(
            f"{way}: no call is refused for want of a member", not failures.get("NoMembers")
        )
        others = {
            name: n for name, n in failures.items() if name not in ("NoMembers", "ConnectionLost")
        }
        proof.promise(f"{way}: no call fails in another way ({others})", not others)
    return proof
