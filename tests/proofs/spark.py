"""Kills Spark's processes: drivers at three points, tasks, Python workers and a whole executor, N times each.
Needs Java 17.

Runs the tests of tests/spark that are marked `slow`. They check that every row of every stream is stored once, in whole
batches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from proofs import ROOT
from proofs.common import Proof

ROUND_S = 900.0
"""Time limit of a round."""
COUNTED = re.compile(r"(\d+) passed")


def run(count: int, seed: int) -> Proof:
    """Check that kills of Spark's processes neither lose nor repeat a row. The seed is not used."""
    proof = Proof()
    tests = ROOT / "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", str(tests / "spark")]  # fmt: skip
    passed = 0
    begin_s = time.monotonic()
    for number in range(1, count + 1):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "IRIS_TEST_SPARK": "required"},
            capture_output=True,
            text=True,
            check=False,
            timeout=ROUND_S,
        )
        found = COUNTED.search(done.stdout)
        passed += int(found[1]) if found else 0
        print(f"round {number}: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
        proof.promise(f"round {number}: {done.stdout[-2000:]}", done.returncode == 0)
    proof.figures["rounds"] = f"{count}, {passed} tests passed"
    proof.figures["in each"] = (
        "a driver killed before it stages, after that, and after its commit; a failing task; three workers, and an executor killed"
    )
    proof.figures["took"] = f"{time.monotonic() - begin_s:.0f} s"
    return proof
