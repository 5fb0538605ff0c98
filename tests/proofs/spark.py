"""Kills Spark's processes: drivers at three points, tasks, Python workers and a whole executor, and stores with their
disks, N times each. Needs Java 17.

Runs the tests of tests/spark that are marked `slow`. They check that every row of every stream is stored once, in whole
batches.
"""

from __future__ import annotations

from proofs import ROOT
from proofs.common import Proof, test_rounds

ROUND_S = 900.0
"""Time limit of a round."""


def run(count: int, seed: int) -> Proof:
    """Check that kills of Spark's processes neither lose nor repeat a row. The seed is not used."""
    proof = test_rounds(count, ROOT / "tests/spark", "slow", ROUND_S, IRIS_TEST_SPARK="required")
    proof.figures["in each"] = (
        "a driver killed before it stages, after that, and after its commit; a failing task; three workers, and an executor killed; "
        "a store of a bucket lost with its disk at each of eight points"
    )
    return proof
