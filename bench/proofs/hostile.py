"""N steps of a relay with the network key and of a pinned site that send whatever is well framed, among honest relays and sessions.

The adversaries are those of `tests/support/hostile`, which `make test` plays for some seconds. What a seed breaks is named with its
seed and step. That is in memory and in virtual time. What a flood of theirs costs the others in time is measured in real processes
(`proofs/flood.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from harness import BENCH

from proofs import flood
from proofs.common import Proof, shares

LIFE = 5000
"""Steps of one life; the last ones of all run in one long life, whose memory is looked at."""
MEASURED_STEPS = 10_000
"""With fewer steps the flood is there for a moment only, and nothing is measured by it."""
PROBE_EVERY = 50
KINDS = (("relay",), ("site",), ("relay", "site"))
sys.path.insert(0, str(BENCH.parent / "tests"))


def live(task: tuple[int, int]) -> tuple[int, str, Counter[str], Counter[str]]:
    """Play one life of (seed, steps); return its seed, what it broke (empty: nothing), what happened and which rules were broken."""
    from support.hostile import Scene

    seed, steps = task
    broken = ""
    scene = Scene(seed, KINDS[seed % len(KINDS)])
    try:
        for number in range(steps):
            scene.step()
            if number % PROBE_EVERY == PROBE_EVERY - 1:
                scene.probe()
        scene.rest()
    except Exception as err:  # whatever it is, it is what this proof looks for
        broken = f"step {scene.steps}: {type(err).__name__}: {err}"
    counted = Counter({f"did {name}": number for name, number in scene.did.items()})
    counted.update(scene.drawn)
    counted["probes"] = scene.sent
    offences: Counter[str] = Counter()
    for adversary in scene.adversaries:
        offences.update(adversary.offences)
    return seed, broken, counted, offences


def grown(steps: int, seed: int) -> tuple[float, str]:
    """Play one long life; return how many MB its second half took, and what it broke."""
    from support.hostile import Scene

    scene = Scene(seed, KINDS[2])
    peaks = []
    try:
        for _ in range(2):
            for number in range(steps // 2):
                scene.step()
                if number % PROBE_EVERY == PROBE_EVERY - 1:
                    scene.probe()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
    except Exception as err:  # as above
        return 0.0, f"step {scene.steps} of the long life: {type(err).__name__}: {err}"
    return peaks[1] - peaks[0], ""


def run(count: int, seed: int) -> Proof:
    """Prove it with `count` steps, from `seed` on: half of them in lives of their own, half in one long life."""
    proof = Proof()
    begin_s = time.monotonic()
    total: Counter[str] = Counter()
    offences: Counter[str] = Counter()
    broken: list[str] = []
    long = count // 2
    lives = max(1, (count - long) // LIFE)
    tasks = [(seed + number, steps) for number, steps in enumerate(shares(count - long, lives))]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        growth = pool.submit(grown, long, seed)
        for number, text, counted, rules in pool.map(live, tasks):
            total.update(counted)
            offences.update(rules)
            if text:
                broken.append(f"seed {number}, {text}")
        grown_mb, text = growth.result()
        if text:
            broken.append(f"seed {seed}, {text}")
    did = {name.removeprefix("did "): n for name, n in total.items() if name.startswith("did ")}
    proof.figures = {
        "steps": f"{count:,}: {len(tasks)} lives, seeds {seed} to {seed + len(tasks) - 1}, and one of {long:,}",
        "what they did in the lives of their own": ", ".join(f"{n:,} {name}" for name, n in sorted(did.items(), key=lambda item: -item[1])),
        "connections of theirs that it cost them": f"{offences.total():,}, by {len(offences)} rules",
        "times that honest sessions were heard": f"{total['probes']:,}: requests, surveys and publications between 3 relays and 2 sites",
        "calls that they may have drawn to themselves": f"{total['answered']:,} answered by members, {total['failed']:,} failed, none waits",
        "the long life's second half took": f"{grown_mb:.1f} MB more",
        "these took": f"{time.monotonic() - begin_s:,.0f} s on {os.cpu_count()} processors",
    }  # fmt: skip
    for what in broken[:5]:
        proof.promise(what, False)
    proof.promise(f"no life breaks a promise ({len(broken)} did)", not broken)
    proof.promise("memory stays flat", grown_mb < 32)
    turns, turn_s = (flood.TURNS, flood.TURN_S) if count >= MEASURED_STEPS else (1, 0.3)
    flood.prove(proof, turn_s, turns)
    return proof
