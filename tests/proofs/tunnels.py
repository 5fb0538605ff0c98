"""N idle tunnels through one relay to one member: their memory, whether all still work, and whether all end well."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import harness
from harness import IrisRelay, Result

import iris
from proofs.common import (  # fmt: skip
    TIMEOUT_S,
    Cues,
    Proof,
    Run,
    cue,
    cue_and_wait,
    deadline_s,
    memory_mb,
    shares,
    show_mb,
    start,
    total,
)

CLUSTER = "proof-tunnels"
PER_OPENER = 50_000
"""Tunnels of one opener, below the limit of 65,536 calls and tunnels of one session."""
AT_ONCE = 64
SAMPLE = 200
SETTLE_S = 0.5
LIMIT_MB, LIMIT_TUNNELS = 400.0, 10_000
"""Memory limit of relay and members together, for this number of tunnels; in proportion for more."""


# -- roles ---------------------------------------------------------------------------------------------------


async def member(options: dict[str, Any]) -> Result:
    cues = Cues()
    well = broken = 0
    ended = asyncio.Event()
    service = iris.Service(CLUSTER, limits=iris.Limits(tunnels=options["tunnels"]))

    @service.on_tunnel
    async def echo(tunnel: iris.Tunnel) -> None:
        nonlocal well, broken
        try:
            async for message in tunnel:
                await tunnel.send(message)
        except iris.TunnelBroken:
            broken += 1
        else:
            well += 1
        if well + broken == options["tunnels"]:
            ended.set()

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await cues.stop.wait()
        with contextlib.suppress(TimeoutError):  # missing tunnels are counted below
            async with asyncio.timeout(TIMEOUT_S):
                await ended.wait()
        status = await client.status()
    left = sum(session["tunnels"] for session in status["sessions"])
    return {"well": well, "broken": broken, "left": left, "held": status["accounts"]["held"]}


async def opener(options: dict[str, Any]) -> Result:
    cues = Cues()
    chance = random.Random(options["seed"])
    async with iris.connect() as client:
        await client.wait_for_members(CLUSTER, 1, timeout=TIMEOUT_S)
        harness.say_ready()
        await cues.next()
        begin_s = time.monotonic()
        tunnels: list[iris.Tunnel] = []

        async def open_some(count: int) -> None:
            for _ in range(count):
                tunnels.append(await client.open_tunnel(CLUSTER, timeout=TIMEOUT_S))

        await asyncio.gather(*map(open_some, shares(options["tunnels"], AT_ONCE)))
        open_s = time.monotonic() - begin_s
        harness.say_ready()
        await cues.next()
        sample = chance.sample(tunnels, min(SAMPLE, len(tunnels)))
        wrong = 0
        for tunnel in sample:
            message = chance.randbytes(1024)
            await tunnel.send(message)
            async with asyncio.timeout(TIMEOUT_S):
                wrong += await tunnel.recv() != message
        ended = sum(tunnel.closed for tunnel in tunnels)
        # Finish every other tunnel, and break the others.
        for tunnel in tunnels[::2]:
            await tunnel.finish()
        async with asyncio.timeout(TIMEOUT_S):
            for tunnel in tunnels[::2]:
                async for _ in tunnel:
                    wrong += 1
        for tunnel in tunnels[1::2]:
            await tunnel.close()
    return {"open_s": open_s, "sampled": len(sample), "wrong": wrong, "ended": ended}


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Run it with `count` tunnels."""
    proof = Proof()
    with Run(deadline_s(count)) as roles:
        relay = IrisRelay(roles)
        served = start(roles, "tunnels.member", relay.env, {"tunnels": count})
        openers = [
            start(roles, "tunnels.opener", relay.env, {"tunnels": share, "seed": seed + number})
            for number, share in enumerate(shares(count, -(-count // PER_OPENER)))
        ]
        parts = {"relay": [relay.role], "member": [served], "opener": openers}
        time.sleep(SETTLE_S)
        before = {name: memory_mb(*some) for name, some in parts.items()}
        cue_and_wait(*openers)
        time.sleep(SETTLE_S)
        after = {name: memory_mb(*some) for name, some in parts.items()}
        both_before, both = [
            (m["relay"][0] + m["member"][0], m["relay"][1] + m["member"][1])
            for m in (before, after)
        ]
        cue(*openers)
        opened = [role.result() for role in openers]
        ended = served.result(stop=True)
        relay.stop()
    each = {
        name: f"{(after[name][0] - before[name][0]) * 1e6 / count:,.0f} bytes" for name in parts
    }
    limit_mb = LIMIT_MB * max(1.0, count / LIMIT_TUNNELS)
    proof.figures = {
        "tunnels open at once": f"{count:,}, opened in {max(o['open_s'] for o in opened):.2f} s",
        "relay and member before": show_mb(both_before),
        "relay and member with all open": f"{show_mb(both)} (limit {limit_mb:.0f} MB resident)",
        "a tunnel": ", ".join(f"{size} in the {name}" for name, size in each.items()),
        "relay alone": show_mb(after["relay"]),
        "member alone": show_mb(after["member"]),
        "opener alone": show_mb(after["opener"]),
        "sampled afterwards": f"{total(opened, 'sampled')}, {total(opened, 'wrong')} wrong",
        "ended": f"{ended['well']:,} well, {ended['broken']} broken, {ended['left']} left at the relay",
    }
    proof.promise(f"under {limit_mb:.0f} MB", both[0] < limit_mb)
    proof.promise("a message passes through each one sampled", not total(opened, "wrong"))
    proof.promise("none ended while idle", not total(opened, "ended"))
    proof.promise("all end well", ended["well"] == count and not ended["broken"])
    proof.promise("nothing is left at the relay", not ended["left"] and not ended["held"])
    return proof
