"""The bench of streams in a bucket: real processes, briefly. What is asserted are counts, never speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"

pytestmark = pytest.mark.timeout(240)


def run(*arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(BENCH)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=230, env=environ
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_puts_are_counted_at_the_bucket_beside_bare_ones(tmp_path: Path) -> None:
    printed = run(
        str(BENCH / "bucket.py"), "--cells", "append,trickle", "--rounds", "1", "--seconds", "0.3", "--output", str(tmp_path),
    )  # fmt: skip
    document = json.loads((tmp_path / "bucket.json").read_text())
    found: dict[str, Any] = {
        f"{one['cell']} {one['variant']}": one["figures"] for one in document["runs"]
    }
    assert found.keys() == {"append file", "append s3", "trickle file"}
    for name in ("append file", "append s3"):
        figures = found[name]
        assert figures["missing"] == 0
        assert figures["puts_per_million"] == pytest.approx(
            figures["puts"] / figures["acknowledged"] * 1e6
        )
        # The message is in the bucket once, with what seals it.
        assert figures["acknowledged"] * 1024 < figures["puts"] * figures["object_bytes"] * 1.5
        assert figures["ratio"] == pytest.approx(figures["mb_s"] / figures["bare_mb_s"])
    assert found["append file"]["synced_mb_s"] > 0
    assert "| S3 (moto) |" in printed


def test_a_kill_is_accounted_for_message_by_message() -> None:
    given = json.dumps({"system": "iris", "bucket": "file"})
    figures = json.loads(run("-m", "streams.kills", given))
    assert figures["acknowledged"] > 0
    assert (figures["lost"], figures["doubled"], figures["strangers"]) == (0, 0, 0)
