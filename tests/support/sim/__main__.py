"""Replay a seed: `python -m support.sim SEED [STEPS [sites]]`, in tests/."""

from __future__ import annotations

import sys

from support.sim.chaos import play
from support.sim.network import Violation


def main() -> None:
    seed, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 360
    try:
        chaos = play(seed, steps, sites=sys.argv[3:] == ["sites"])
    except Violation as err:
        sys.exit(str(err))
    net = chaos.net
    outcomes = "".join(
        f"\n  {count:6,} {what}" for what, count in sorted(net.ledger.outcomes.items())
    )
    sys.stdout.write(
        f"seed {seed}: {steps} steps, {net.clock.events:,} events, {net.now_us / 1e6:.1f} s, "
        f"digest {net.digest:08x}\n"
        f"  {net.ledger.cast_copies:6,} copies of bundles arrived; {net.ledger.audited:,} audited, "
        f"{net.ledger.reported_lost:,} reported as lost\n"
        f"  {chaos.resyncs:6,} resyncs, {net.ledger.loops_checked:,} data frames over links{outcomes}\n"
    )


if __name__ == "__main__":
    main()
