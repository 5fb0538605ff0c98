"""N runs, each with its seed: three workers share 10,000 messages of a stream while 50 of them are killed.

The scenario is in `proofs/scenarios/consuming.py`. Every good message must be handled, and every message that cannot
be handled must become a dead letter. A broken promise is reported with the seed of its run.
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
"""Time limit of a run."""


def run(count: int, seed: int) -> Proof:
    """Do `count` runs."""
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
