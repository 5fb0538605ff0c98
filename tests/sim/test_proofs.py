"""The proofs of the simulator at small counts: the code of `make proof AREA=sim` and `AREA=scale`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(120)


def prove(area: str, count: int, record: Path) -> str:
    command = [
        sys.executable,
        str(TESTS / "proof.py"),
        area,
        str(count),
        "--record",
        str(record),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    return record.read_text()


def test_the_proof_of_lives_runs_and_is_written_down(tmp_path: Path) -> None:
    written = prove("sim", 2, tmp_path / "proof.md")
    assert "## sim 2\n" in written
    assert "\nHeld.\n" in written
    assert "| lives | 2, seeds 20241 to 20242, 360 steps each" in written


def test_the_proof_of_scale_runs_and_is_written_down(tmp_path: Path) -> None:
    written = prove("scale", 8, tmp_path / "proof.md")
    assert "\nHeld.\n" in written
    assert "| relays | 8 in full mesh, 28 links |" in written
    assert "all agree after 1." in written
