"""N steps of a hostile relay and a hostile site among honest relays and sessions, with any frames of valid framing.

The hostile relay holds the network key, and the hostile site is pinned. The adversaries are those of
`tests/support/hostile`, which `make test` runs for some seconds. If a life breaks a promise, its seed and step are
named. That part runs in memory and in virtual time. `proofs/flood.py` measures in real processes how much a flood of
a hostile relay slows the others down, and `proofs/siege.py` the same of attacks from sessions.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from support.hostile import Scene

from proofs import flood, siege
from proofs.attacks import ATTACKS
from proofs.common import Proof, shares

LIFE = 5000
"""Steps of one life. The second half of all steps runs in one long life, whose memory is measured."""
MEASURED_STEPS = 10_000
"""With fewer steps the flood and the attacks run only for a moment, and no time is judged."""
PROBE_EVERY = 50
KINDS = (("relay",), ("site",), ("relay", "site"))


def live(task: tuple[int, int]) -> tuple[int, str, Counter[str], Counter[str]]:
    """Run one life, given as (seed, steps).

    Return the seed, the violated promise or "", and how often each event and each broken rule occurred.
    """
    seed, steps = task
    broken = ""
    scene = Scene(seed, KINDS[seed % len(KINDS)])
    try:
        for number in range(steps):
            scene.step()
            if number % PROBE_EVERY == PROBE_EVERY - 1:
                scene.probe()
        scene.rest()
    except Exception as err:  # any exception is a broken promise
        broken = f"step {scene.steps}: {type(err).__name__}: {err}"
    counted = Counter({f"did {name}": number for name, number in scene.did.items()})
    counted.update(scene.drawn)
    counted["probes"] = scene.sent
    offences: Counter[str] = Counter()
    for adversary in scene.adversaries:
        offences.update(adversary.offences)
    return seed, broken, counted, offences


def grown(steps: int, seed: int) -> tuple[float, str]:
    """Run one long life; return the growth of memory in its second half, in MB, and the violated promise or ""."""
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
    """Run `count` steps, from `seed` on: half of them in short lives, half in one long life."""
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
    did = Counter({name.removeprefix("did "): n for name, n in total.items() if name.startswith("did ")})  # fmt: skip
    proof.figures = {
        "steps": f"{count:,}: {len(tasks)} lives, seeds {seed} to {seed + len(tasks) - 1}, and one of {long:,}",
        "steps in short lives": ", ".join(f"{n:,} {name}" for name, n in did.most_common()),
        "adversaries' connections that were ended": f"{offences.total():,}, by {len(offences)} rules",
        "checks of honest sessions": f"{total['probes']:,}: requests, surveys, publications, between 3 relays and 2 sites",
        "calls that adversaries may have attracted": f"{total['answered']:,} answered, {total['failed']:,} failed, none waits",
        "memory growth in the second half of the long life": f"{grown_mb:.1f} MB",
        "time": f"{time.monotonic() - begin_s:,.0f} s on {os.cpu_count()} processors",
    }  # fmt: skip
    for what in broken[:5]:
        proof.promise(what, False)
    proof.promise(f"no life breaks a promise ({len(broken)} did)", not broken)
    proof.promise("memory stays flat", grown_mb < 32)
    turns, turn_s = (flood.TURNS, flood.TURN_S) if count >= MEASURED_STEPS else (1, 0.3)
    flood.prove(proof, turn_s, turns)
    siege.try_all(proof)
    if count >= MEASURED_STEPS:
        siege.prove(proof, [*ATTACKS])
    return proof
