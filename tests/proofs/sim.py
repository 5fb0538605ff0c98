"""N lives of simulated networks, each with its seed: 5 to 8 relays, members that join and leave, links that flap,
and relays that crash.

The code is in `tests/support/sim`, which `make test` runs with ten fixed seeds. If a life breaks a promise, its seed
and its last events are shown. `python -m support.sim SEED STEPS`, in tests/, replays it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from support.sim import Chaos, Violation

from proofs.common import Proof

STEPS = 360
SHOWN = 5
"""Most failed seeds in the record."""


def live(seed: int) -> tuple[int, str, Counter[str]]:
    """Run one life; return its seed, the violation (or "") and the counts of its events."""
    chaos = Chaos(seed)
    broken = ""
    try:
        chaos.run(STEPS)
    except Violation as err:
        broken = str(err)
    ledger = chaos.net.ledger
    counted = Counter(ledger.outcomes)
    counted |= Counter(
        {
            "relays": len(chaos.net.relays),
            "events": chaos.net.clock.events,
            "virtual ms": chaos.net.now_us // 1000,
            "copies": ledger.cast_copies,
            "audited": ledger.audited,
            "reported": ledger.reported_lost,
            "over links": ledger.loops_checked,
            "garbled": chaos.garbled,
            "rests": chaos.rounds,
            "aimed": ledger.aimed_runs,
            "cancels": ledger.cancels,
        }
    )
    counted.update({f"did {name}": number for name, number in chaos.did.items()})
    return seed, broken, counted


def ended(total: Counter[str], kind: str) -> str:
    """Return the outcomes of all calls of a kind, as text."""
    ends = {name.partition(" ")[2]: n for name, n in total.items() if name.startswith(f"{kind} ")}
    shown = ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items(), key=lambda item: -item[1]))
    return f"{sum(ends.values()):,}: {shown}"


def run(count: int, seed: int) -> Proof:
    """Run `count` seeds, from `seed` on."""
    proof = Proof()
    begin_s = time.monotonic()
    total: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for number, text, counted in pool.map(live, range(seed, seed + count), chunksize=4):
            total.update(counted)
            if text:
                broken.append((number, text))
                print(text, file=sys.stderr)
    faults = ("cut", "stop", "crash", "freeze", "stall", "die", "garble")
    did = ", ".join(f"{total[f'did {name}']:,} {name}" for name in faults)
    proof.figures = {
        "lives": f"{count:,}, seeds {seed} to {seed + count - 1}, {STEPS} steps each, {total['relays'] / count:.1f} relays each",
        "virtual time": f"{total['virtual ms'] / 3.6e6:,.1f} hours, {total['events']:,} events",
        "in": f"{time.monotonic() - begin_s:,.0f} s on {os.cpu_count()} processors",
        "faults": f"{did}; {total['garbled']:,} changes of interest lost or repeated",
        "requests": ended(total, "request"),
        "pushes": ended(total, "push"),
        "surveys": ended(total, "survey"),
        "tunnels": ended(total, "tunnel_open"),
        "calls to one member that ran": f"{total['aimed']:,}, all of them there",
        "calls that ended because their caller left": f"{total['cancels']:,}",
        "bundles that arrived": f"{total['copies']:,}",
        "bundles with an unbroken way": f"{total['audited']:,}, of which {total['reported']:,} were dropped and reported",
        "data frames over links": f"{total['over links']:,}, none of which went on over another",
        "times at rest with all copies true": f"{total['rests']:,}",
    }
    for number, text in broken[:SHOWN]:
        what = text.rsplit("\n", 1)[-1]
        proof.promise(f"{what} (replay: python -m support.sim {number} {STEPS})", False)
    proof.promise(f"no seed breaks a promise ({len(broken)} did)", not broken)
    return proof
