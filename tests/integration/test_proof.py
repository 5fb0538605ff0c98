"""The proofs, at small counts: the code of `make proof`, in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROOF = Path(__file__).resolve().parents[2] / "bench" / "proof.py"
COUNTS = {"tunnels": 200, "connections": 40, "order": 4000, "rotation": 200, "idle": 1}


def prove(area: str, count: int, record: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a proof that makes its files in `directory`."""
    # Bounded by the proof itself: it ends its processes, which a kill from here would not.
    return subprocess.run(
        [sys.executable, PROOF, area, str(count), "--seed", "7", "--record", record],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(directory)},
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize("area", COUNTS)
def test_each_promise_holds_at_a_small_count_and_leaves_nothing(area: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    record = tmp_path / "proof.md"
    done = prove(area, COUNTS[area], record, made)
    assert done.returncode == 0, done.stdout + done.stderr
    text = record.read_text()
    assert f"## {area} {COUNTS[area]:,}\n" in text
    assert "seed 7;" in text
    assert "\nHeld.\n" in text
    assert list(made.iterdir()) == []


@pytest.mark.timeout(150)
def test_a_run_replaces_the_section_of_its_area_and_count_and_no_other(tmp_path: Path) -> None:
    record = tmp_path / "proof.md"
    sections = [f"## {head}\n\nof before\n" for head in ("tunnels 9", "idle 1", "idle 2")]
    record.write_text("# Title\n\n" + "\n".join(sections))
    assert prove("idle", 1, record, tmp_path).returncode == 0
    text = record.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["tunnels 9", "idle 1", "idle 2"]
    assert text.count("of before") == 2
    assert "Held." in text.partition("## idle 1\n")[2].partition("## idle 2\n")[0]


def test_an_unknown_area_is_a_usage_error(tmp_path: Path) -> None:
    done = prove("everything", 1, tmp_path / "proof.md", tmp_path)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr
