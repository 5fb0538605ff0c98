"""N runs, a seed each: three workers share 10,000 messages of a stream while 50 of them are killed.

The scenario is that of `proofs/scenarios/consuming.py`. Every message is handled or a dead letter, each poison is
one, and no good message is. What is broken is told with the seed of its run.
"""

from __future__ import annotations

import sys
import time

from proofs.common import Proof
from proofs.scenarios.consuming import workers
from proofs.streams import play

MESSAGES = 10_000
KILLS = 50
RUN_S = 300.0
"""A run that takes longer is given up."""


def run(count: int, seed: int) -> Proof:
    """Prove it in `count` runs."""
    proof = Proof()
    for turn in range(count):
        begin_s = time.monotonic()
        outcome = play(RUN_S, lambda rig, seed=seed + turn: workers(rig, MESSAGES, KILLS, seed))
        took_s = time.monotonic() - begin_s
        print(f"run {turn + 1}: {took_s:.0f} s", file=sys.stderr, flush=True)
        figures = outcome.figures
        proof.figures[f"run {turn + 1}: messages"] = figures["messages"]
        proof.figures[f"run {turn + 1}: handled"] = figures["handled"]
        proof.figures[f"run {turn + 1}: dead letters"] = figures["dead letters"]
        proof.figures[f"run {turn + 1}: took"] = f"{took_s:.0f} s"
        for text in outcome.broken:
            proof.promise(f"run {turn + 1}: {text}", False)
    return proof
