"""A relay that nobody uses, for N seconds: its memory and its processor time."""

from __future__ import annotations

import time
from pathlib import Path

from harness import IrisRelay, Role

from proofs.common import Proof, Run, memory_mb, show_mb

SETTLE_S = 1.0
LIMIT_MB = 50.0
LIMIT_SHARE = 0.001
"""Largest share of one processor that an idle relay may use."""
MEASURED_S = 10
"""A shorter run shows the figures, but does not compare them with the limits."""
START_S = 30.0


def cpu_s(role: Role) -> float:
    """Return the processor seconds of all threads of a running process, to the nanosecond."""
    threads = Path(f"/proc/{role.process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def run(count: int, seed: int) -> Proof:
    """Run it for `count` seconds."""
    proof = Proof()
    with Run(count + START_S) as roles:
        relay = IrisRelay(roles)
        time.sleep(SETTLE_S)
        before_s = cpu_s(relay.role)
        time.sleep(count)
        used_s = cpu_s(relay.role) - before_s
        memory = memory_mb(relay.role)
        relay.stop()
    proof.figures = {
        "seconds": f"{count}",
        "processor time": f"{used_s * 1000:.2f} ms, {used_s / count:.4%} of one processor",
        "memory": f"{show_mb(memory)} (limit {LIMIT_MB:.0f} MB resident)",
    }
    proof.promise(f"under {LIMIT_MB:.0f} MB", memory[0] < LIMIT_MB)
    if count >= MEASURED_S:
        proof.promise(f"under {LIMIT_SHARE:.1%} of a processor", used_s / count < LIMIT_SHARE)
    return proof
