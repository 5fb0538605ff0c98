"""Replays a life: `python -m support.bucket_lives SEED [SEED ...] [-v]`, in tests/."""

from __future__ import annotations

import sys
import time

from support.bucket_lives.life import live


def main() -> int:
    broken = 0
    verbose = "-v" in sys.argv
    for text in sys.argv[1:]:
        if text == "-v":
            continue
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            began_s = time.perf_counter()
            outcome = live(seed, print if verbose else None)
            said = "; ".join(outcome.broken[:3]) or "held"
            sys.stdout.write(f"seed {seed}: {said} ({time.perf_counter() - began_s:.2f} s)\n")
            if verbose:
                sys.stdout.write(f"{dict(outcome.counts)}\n")
            broken += bool(outcome.broken)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
