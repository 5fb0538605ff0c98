"""The areas of `tests/proof.py`: one module each, with a function `run` and the roles that it starts as processes."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For the harness of the benchmarks: processes with their own relay and keys, and the facts of the machine.
sys.path.append(str(ROOT / "bench"))
