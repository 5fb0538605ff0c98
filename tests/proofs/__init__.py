"""The promises that `tests/proof.py` proves: one module per area, each with a `run` and the roles that it starts."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The harness of the benches: processes with a relay and keys of their own, and the facts of the machine.
sys.path.append(str(ROOT / "bench"))
