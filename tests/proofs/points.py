"""Fails a store of a bucket at every request of a takeover and of a move, N rounds.

It runs the unit tests of that: those that are marked `slow`, and those that `make test` runs.
"""

from __future__ import annotations

from proofs import ROOT
from proofs.common import Proof, test_rounds

ROUND_S = 1800.0
"""Time limit of a round."""


def run(count: int, seed: int) -> Proof:
    """Check that a stream is with one store, whole, whatever request was the last one. The seed is not used."""
    proof = test_rounds(count, ROOT / "tests/unit/relay/store/bucket", "slow or not slow", ROUND_S)
    proof.figures["points"] = (
        "a store that is killed, sleeps or gets no answer at each request of a takeover and of a move"
    )
    return proof
