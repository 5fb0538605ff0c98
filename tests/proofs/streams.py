"""Durable streams under N kills of their store, and under power cuts, damaged files, a full disk and restarts.

The scenarios are in `proofs/scenarios`, which `make test` runs at small counts. With N kills under load, and N more
while batches are committed, there are N/4 power cuts (and one on a disk that loses synced data, which must be
noticed), 3N/2 damaged logs, N/10 ends of relay or store while the other runs, one full disk, a read of 50,000 N
messages, N/4 kills of workers that share 50 N messages, and N/5 steps of the store's clock. A broken promise is
reported with the seed of its scenario.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import uvloop
from harness import BenchError
from support.stores import Outcome, Rig, build_lossy_disk, build_shim

from proofs.common import Proof
from proofs.scenarios import batches, consuming, disks
from proofs.scenarios import streams as scenarios

Scenario = Callable[[Rig], Coroutine[None, None, Outcome]]
LONG = 50_000
"""Messages of the long read, for each of N."""
START_S = 300.0
CYCLE_S = 30.0
"""Limit of the average time of a cycle, after which a run is aborted."""


def run(count: int, seed: int) -> Proof:
    """Run it with `count` kills."""
    proof = Proof()
    with tempfile.TemporaryDirectory(prefix="iris-proof-") as made:
        try:
            shim = build_lossy_disk(Path(made))
        except RuntimeError as err:
            raise BenchError(str(err)) from err
        cuts, logs, ends = max(2, count // 4), max(10, count * 3 // 2), max(4, count // 10)
        # First, because it measures the memory of this process: room that other scenarios leave would hide a leak.
        long = count * LONG
        _play(proof, "long read", count, lambda rig: consuming.long_read(rig, long, seed))
        _play(proof, "kills", count, lambda rig: scenarios.kills(rig, count, seed))
        _play(proof, "batches", count, lambda rig: batches.batches(rig, count, seed))
        _play(proof, "power", cuts, lambda rig: scenarios.power(rig, cuts, seed, shim))
        _play(proof, "new directory", 1, lambda rig: scenarios.first_power(rig, seed, shim))
        _play(proof, "damage", logs, lambda rig: disks.damage(rig, logs, seed))
        _play(proof, "restarts", ends, lambda rig: scenarios.restarts(rig, ends, seed))
        killed = max(4, count // 4)
        _play(
            proof, "workers", killed, lambda rig: consuming.workers(rig, 50 * count, killed, seed)
        )
        steps, clock = max(2, count // 10), build_shim("set_clock", Path(made))
        _play(proof, "clock", steps, lambda rig: consuming.clock_steps(rig, steps, seed, clock))
        _control(proof, lambda rig: scenarios.power(rig, 2, seed, shim, lie=True))
        try:
            _play(proof, "full disk", 10, lambda rig: disks.full_disk(rig.directory, seed))
        except PermissionError as err:
            proof.figures["full disk"] = f"not run: {err}"
            proof.promise("a small disk could be mounted (be root)", False)
    return proof


def _play(proof: Proof, name: str, count: int, scenario: Scenario) -> None:
    """Run one scenario in its own directory, and add its outcome to the proof."""
    begin_s = time.monotonic()
    outcome = play(START_S + CYCLE_S * count, scenario)
    print(f"{name}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
    proof.figures |= {f"{name}: {figure}": value for figure, value in outcome.figures.items()}
    proof.figures[f"{name}: took"] = f"{time.monotonic() - begin_s:.0f} s"
    for text in outcome.broken:
        proof.promise(f"{name}: {text}", False)


def _control(proof: Proof, scenario: Scenario) -> None:
    """Check that the audit notices the loss of synced data; otherwise it would prove nothing."""
    outcome = play(START_S + CYCLE_S * 2, scenario)
    proof.figures["control: a disk that forgets what was synced"] = (
        f"noticed: {outcome.broken[0]}" if outcome.broken else "not noticed"
    )
    proof.promise("lost acknowledged appends are noticed", bool(outcome.broken))


def play(within_s: float, scenario: Scenario) -> Outcome:
    """Run a scenario with a relay and a store in their own directory. It is aborted after `within_s`."""

    async def bounded() -> Outcome:
        async with asyncio.timeout(within_s):
            return await scenario(rig)

    with tempfile.TemporaryDirectory(prefix="iris-proof-") as made, Rig(Path(made)) as rig:
        try:
            return uvloop.run(bounded())
        except (TimeoutError, RuntimeError) as err:
            raise BenchError(f"{type(err).__name__}: {err}") from err
