"""N lives of a large simulated federation, each with its seed: 50 sites of 20 relays and two gateways each, every site
connected to every other.

The code is in `tests/support/sim/world.py`, which `make test` runs at a small size. Gateways are killed, frozen,
drained and cut, and sites are isolated and return. Then every replica of every site's interest at every relay must be
true, every bundle must have been sent once to each site, and messages must arrive everywhere.
`replay(seed)` runs one seed again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from support.sim import Violation, World

from proofs.common import Proof

SITES = 50
RELAYS = 20
"""Relays of each site."""
STEPS = 40
"""Events of a life before the final check."""
SHOWN = 5
"""Most failed seeds in the record."""


def live(
    seed: int, sites: int = SITES, relays: int = RELAYS
) -> tuple[int, str, float, Counter[str]]:
    """Run one life; return its seed, the violation (or ""), its processor seconds and the counts of its events."""
    gc.disable()  # each collection would visit a thousand relays
    begin_s = time.process_time()
    broken = ""
    counted: Counter[str] = Counter()
    try:
        world = World(seed, sites=sites, relays=relays)
        world.run(STEPS)
        counted = world.counted()
    except Violation as err:
        broken = str(err)
    return seed, broken, time.process_time() - begin_s, counted


def replay(seed: int) -> None:
    """Run one seed again and print its violation: python -c "from proofs.federation import replay; replay(1)" in
    bench/.
    """
    _, broken, took_s, counted = live(seed)
    sys.stdout.write(f"{broken or dict(counted)}\n{took_s:.0f} s\n")


def sim(count: int, seed: int, proof: Proof, *, sites: int = SITES, relays: int = RELAYS) -> None:
    """Run `count` seeds, from `seed` on."""
    total: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    longest_s = 0.0
    # Each life gets a new process, because its garbage is not collected.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
        for number, text, took_s, counted in pool.map(
            partial(live, sites=sites, relays=relays), range(seed, seed + count)
        ):
            total.update(counted)
            longest_s = max(longest_s, took_s)
            if text:
                broken.append((number, text))
                print(text, file=sys.stderr)
    faults = ("cut", "stop", "isolate", "crash", "freeze", "retire", "depart")
    did = ", ".join(f"{total[f'did {name}']:,} {name}" for name in faults)
    proof.figures |= {
        "federation": f"{sites} sites of {relays} relays, {total['links'] // count:,} links, {total['connections'] // count:,} WAN connections",
        "lives": f"{count:,}, seeds {seed} to {seed + count - 1}, {total['virtual ms'] / 1000 / count:.0f} s each, {total['events']:,} events",
        "a seed takes": f"at most {longest_s:.0f} s of a processor",
        "faults": did,
        "requests": _ended(total, "request"),
        "surveys": _ended(total, "survey"),
        "tunnels": _ended(total, "tunnel_open"),
        "bundles that arrived": f"{total['copies']:,}; {total['late']:,} were overtaken and dropped",
        "bundles with an unbroken way": f"{total['audited']:,}, of which {total['reported']:,} were dropped and reported",
        "data frames over links": f"{total['over links']:,}, {total['over the WAN']:,} over the WAN: one copy of a bundle for a site, none for a third",
    }
    for number, text in broken[:SHOWN]:
        proof.promise(f"{text.rsplit(chr(10), 1)[-1]} (replay: {number})", False)
    proof.promise(f"no seed breaks a promise ({len(broken)} did)", not broken)


def _ended(total: Counter[str], kind: str) -> str:
    """Return the outcomes of all calls of a kind, as text."""
    ends = {name.partition(" ")[2]: n for name, n in total.items() if name.startswith(f"{kind} ")}
    shown = ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items(), key=lambda item: -item[1]))
    return f"{sum(ends.values()):,}: {shown}"


def run(count: int, seed: int) -> Proof:
    """Run `count` seeds, from `seed` on."""
    proof = Proof()
    sim(count, seed, proof)
    return proof
