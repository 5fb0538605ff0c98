"""The bench of sessions of browsers: real processes, briefly. What is asserted are counts, never speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

pytestmark = pytest.mark.timeout(120)


def test_every_session_of_the_bench_gets_every_publication(tmp_path: Path) -> None:
    """The bench itself fails if one is missing, or if a session has ended."""
    arguments = ["--only", "iris", "--cells", "idle-3", "--rounds", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, BENCH / "web.py", *arguments], capture_output=True, text=True, check=False, timeout=110
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "web.json").read_text())
    found = document["rounds"][0]["idle-3"]["iris"]
    assert found["received"] == 3 * found["published"] > 0
    assert "| Iris, sealed |" in (tmp_path / "web.md").read_text()
