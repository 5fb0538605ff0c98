"""N sessions connect to one relay at once, stay, and send one request each, with a proven key."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
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
    settings,
    shares,
    show_mb,
    start,
)

CLUSTER = "proof-connections"
PROCESSES = 4
SPARE = 16


def allow_descriptors(count: int) -> None:
    """Let this process and its children open `count` descriptors. Raises ValueError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


# -- roles ---------------------------------------------------------------------------------------------------


async def member(options: dict[str, Any]) -> Result:
    cues = Cues()
    service = iris.Service(CLUSTER)

    @service.on_request
    def echo(payload: bytes) -> bytes:
        return payload

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await cues.stop.wait()
    return {}


async def sessions(options: dict[str, Any]) -> Result:
    allow_descriptors(options["sessions"] + 256)
    cues = Cues()
    config = iris.ClientConfig(connect_timeout_s=TIMEOUT_S)
    clients = [iris.connect(config=config) for _ in range(options["sessions"])]
    failures: list[str] = []

    async def timed(step: Callable[[iris.Client], Awaitable[None]]) -> list[int]:
        async def one(client: iris.Client) -> int:
            begin_ns = time.perf_counter_ns()
            try:
                await step(client)
            except (iris.IrisError, OSError) as err:
                failures.append(f"{type(err).__name__}: {err}")
            return time.perf_counter_ns() - begin_ns

        return await asyncio.gather(*map(one, clients))

    async def ask(client: iris.Client) -> None:
        # Both `members` and `request` need the cluster's key, proven in this session.
        there = await client.members(CLUSTER)
        if len(there) != 1 or there.others:
            failures.append(f"the relay did not take our key: {there!r} {there.others}")
        if await client.request(CLUSTER, b"ask", timeout=TIMEOUT_S) != b"ask":
            failures.append("a wrong reply")

    harness.say_ready()
    await cues.next()
    connect_ns = await timed(iris.Client.open)
    harness.say_ready()
    await cues.next()
    ask_ns = await timed(ask) if not failures else []
    harness.say_ready()
    await cues.next()
    await asyncio.gather(*(client.close() for client in clients))
    return {"connect_ns": connect_ns, "ask_ns": ask_ns, "failures": failures}


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Run it with `count` sessions."""
    proof = Proof()
    allow_descriptors(count + 256)
    with Run(deadline_s(count)) as roles:
        # A relay keeps a quarter of its sessions for other users.
        relay = IrisRelay(roles, settings(roles, max_sessions=-(-4 * (count + SPARE) // 3)))
        served = start(roles, "connections.member", relay.env, {})
        clients = [
            start(roles, "connections.sessions", relay.env, {"sessions": share})
            for share in shares(count, PROCESSES)
        ]
        before = memory_mb(relay.role)
        begin_s = time.monotonic()
        cue_and_wait(*clients)
        connected_s = time.monotonic() - begin_s
        begin_s = time.monotonic()
        cue_and_wait(*clients)
        asked_s = time.monotonic() - begin_s
        after = memory_mb(relay.role)
        cue(*clients)
        results = [role.result() for role in clients]
        served.result(stop=True)
        cpu_s = relay.stop()
    failures = [text for result in results for text in result["failures"]]
    proof.figures = {
        "sessions at once": f"{count:,} from {len(clients)} processes",
        "all connected in": f"{connected_s:.2f} s; {percentiles(results, 'connect_ns')}",
        "all proved and asked in": f"{asked_s:.2f} s; {percentiles(results, 'ask_ns')}",
        "failed": f"{len(failures)}" + (f", the first by {failures[0]}" if failures else ""),
        "relay before": show_mb(before),
        "relay with all": show_mb(after),
        "a session": f"{(after[0] - before[0]) * 1e6 / count:,.0f} bytes in the relay",
        "relay's processor time": f"{cpu_s:.2f} s, its start included",
    }
    proof.promise("none fails", not failures)
    return proof


def percentiles(results: list[Result], key: str) -> str:
    """Return percentiles over all sessions, in ms, as text."""
    points = harness.percentiles_us(ns for result in results for ns in result[key])
    shown = {name: points[f"{name}_us"] / 1000 for name in ("p50", "p99", "max")}
    return ", ".join(f"{name} {ms:.1f} ms" for name, ms in shown.items())
