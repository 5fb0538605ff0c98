"""The proofs that need hosts, at their smallest counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROOF = Path(__file__).resolve().parents[1] / "proof.py"


@pytest.mark.net
@pytest.mark.timeout(120)
def test_the_proof_of_discovery_runs_and_writes_its_figures_down(tmp_path: Path) -> None:
    record = tmp_path / "proof.md"
    # The proof itself has a deadline, at which it ends its processes.
    done = subprocess.run(
        [sys.executable, PROOF, "discovery", "1", "--record", record],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = record.read_text()
    assert "## discovery 1\n" in text
    for figure in ("alone and serving", "linked to the other host", "idle, alone"):
        assert figure in text


@pytest.mark.net
@pytest.mark.timeout(180)
def test_the_proof_of_histories_holds_and_writes_its_figures_down(tmp_path: Path) -> None:
    record = tmp_path / "proof.md"
    done = subprocess.run(
        [sys.executable, PROOF, "histories", "4", "--seed", "3", "--record", record],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = record.read_text()
    assert "## histories 4\n" in text
    for figure in ("| faults |", "| appends read |", "| violations | 0 |"):
        assert figure in text
