"""N lives of stores that share a bucket, each with its seed: real stores in virtual time, an adversarial bucket, and
clients whose histories are checked.

The code is in `tests/support/bucket_lives`, which `make test` runs with some fixed seeds. `python -m
support.bucket_lives SEED -v`, in tests/, replays a life.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from support.bucket_lives import live

from proofs.common import Proof

SHOWN = 5
"""Most failed seeds in the record."""
COVERED = {
    "a move that took place": "moves that took place",
    "a move that did not": "moves that did not",
    "a journal that was taken during a move": "fences during a move",
    "old records that moved to objects": "segment objects",
    "reads of such records": "reads of moved records",
    "objects of records that were deleted": "segment objects deleted",
    "messages that retention removed before a reader got them": "holes of retention",
    "a stream that was deleted": "deleted streams",
    "one that was created again under its name": "created again",
    "dead letters at the end": "dead letters",
    "dead letters that were delivered again": "redriven",
    "a rollback that a store noticed": "rollbacks",
    "an older copy of the bucket, restored": "older copies restored",
    "a takeover from a store that was gone": "store.took_over",
    "a store that lost its journal and ran on": "store.journal_lost",
    "two stores that served one stream": "calls with two holders",
    "a checkpoint": "checkpoints",
    "a store whose disk was lost": "disks lost",
    "a night": "nights",
}
"""What a life may have in it -> the count that shows it."""
NEEDED = (
    *COVERED.values(),
    "acknowledged",
    "acknowledged as duplicates",
    "committed batches",
    "delivered again",
    "confirmed positions",
    "fences",
    "void fences",
    "deleted",
    "moves settled",
    "moves refused",
    "reopened after a kill",
    "kills",
    "pauses",
    "cuts",
    "partitions",
)
"""What must have happened, so that a run cannot prove nothing."""
FATES = ("slow", "refused", "lost", "late", "unanswered", "twice")


def run(count: int, seed: int) -> Proof:
    """Run `count` seeds, from `seed` on."""
    proof = Proof()
    begin_s = time.monotonic()
    total: Counter[str] = Counter()
    lives: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(live, range(seed, seed + count), chunksize=4):
            total.update(outcome.counts)
            lives.update(what for what, times in outcome.counts.items() if times)
            if outcome.broken:
                broken.append((outcome.seed, outcome.broken[0]))
                print(f"seed {outcome.seed}: {outcome.broken[0]}", file=sys.stderr)
    faults = ", ".join(
        f"{sum(total[f'{what} {fate}'] for what in ('create', 'get', 'range', 'exists', 'delete')):,} {fate}"
        for fate in FATES
    )
    proof.figures = {
        "lives": f"{count:,}, seeds {seed} to {seed + count - 1}, {total['virtual ms'] / 3.6e6:,.0f} hours of virtual time",
        "in": f"{time.monotonic() - begin_s:,.0f} s on {os.cpu_count()} processors",
        "stores": f"{total['starts']:,} starts, {total['kills']:,} killed, {total['disks lost']:,} of them with their disk; {total['pauses']:,} slept, {total['nights']:,} times all of them for hours",
        "relays": f"{total['cuts']:,} lost, {total['partitions']:,} partitions; {total['calls with two holders']:,} calls found two stores that served one stream",
        "requests to the bucket that did not end well": faults,
        "journals": f"{total['journals']:,}, in which {total['objects']:,} objects; {total['fences']:,} fences, {total['void fences']:,} of them void",
        "takeovers from stores that were gone": f"{total['store.took_over']:,}; {total['store.journal_lost']:,} stores that still ran noticed it",
        "checkpoints": f"{total['checkpoints']:,}, after which {total['deleted']:,} objects were deleted",
        "streams opened again after a kill with all that their disk had": f"{total['reopened after a kill']:,}",
        "messages acknowledged": f"{total['acknowledged']:,}, {total['acknowledged as duplicates']:,} of them at a later try, and {total['committed batches']:,} batches; none lost, moved or doubled",
        "messages read": f"{total['read']:,}, each where it is at the end",
        "messages delivered to workers": f"{total['delivered']:,}, {total['delivered again']:,} of them again; {total['confirmed positions']:,} positions confirmed, none went back",
        "moves of streams": f"{total['moves asked for']:,} asked for, {total['moves that took place']:,} decided, {total['moves that did not']:,} decided against; {total['strikes']:,} times one of the two stores was struck, and {total['fences during a move']:,} journals were taken meanwhile",
    }
    proof.figures |= {
        f"lives with {what}": f"{lives[count_of] / count:.0%}, {total[count_of]:,} times"
        for what, count_of in COVERED.items()
    }
    for number, text in broken[:SHOWN]:
        proof.promise(f"{text} (replay: python -m support.bucket_lives {number} -v)", False)
    proof.promise(f"no seed breaks a promise ({len(broken)} did)", not broken)
    if count >= 100:
        missing = [what for what in NEEDED if not total[what]]
        proof.promise(f"everything happened at least once (not: {', '.join(missing)})", not missing)
    return proof
