"""Every bench, beside its twin, in one table: `make bench`.

    python bench/run.py                 # three to seven minutes
    python bench/run.py --rounds 1      # under a minute and a half; the spread is unknown

Prints Markdown to stdout and progress to stderr; everything the benches said goes to bench/results/latest.json. Exits 1 if a
bench failed, after the others.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from typing import Any, Final

import harness
from harness import BENCH, Result

RESULTS: Final = BENCH / "results" / "latest.json"
PUBLISH: Final = "publish 1 KiB, "
REQUEST: Final = "request 256 B, "
Row = tuple[str, list[str], str, str, str]
"""what, command, figure, its ratio, unit"""
ROWS: Final[tuple[Row, ...]] = (
    (PUBLISH + "callback", ["throughput.py"], "rate", "ratio", "msg/s"),
    (PUBLISH + "async for", ["throughput.py", "--mode", "async-for"], "rate", "ratio", "msg/s"),
    (PUBLISH + "8 subscribers", ["throughput.py", "--subscribers", "8"], "rate", "ratio", "msg/s"),
    (PUBLISH + "1,000 topics", ["throughput.py", "--topics", "1000"], "rate", "ratio", "msg/s"),
    ("tunnel, 64 KiB messages", ["throughput.py", "--tunnel"], "rate", "ratio", "MB/s"),
    (REQUEST + "1 in flight, p50", ["roundtrip.py"], "p50_us", "ratio", "µs"),
    (REQUEST + "1 in flight, p99", ["roundtrip.py"], "p99_us", "p99_ratio", "µs"),
    (REQUEST + "64 in flight", ["roundtrip.py", "--inflight", "64"], "rate", "ratio", "req/s"),
)


class Failed(Exception):
    """A bench failed; the text says which and how."""


def measure(command: list[str], rounds: int, seconds: float) -> Result:
    """Run one bench; return what it printed. Interrupted, it ends what the bench started, too."""
    line = [sys.executable, str(BENCH / command[0]), *command[1:]]
    line += [f"--rounds={rounds}", f"--seconds={seconds}"]
    print(f"{' '.join(command)}:", file=sys.stderr, flush=True)
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if process.returncode:
        raise Failed(f"{' '.join(command)}: exit {process.returncode}, see above")
    result: Result = json.loads(output)
    return result


def show(row: Row, result: Result | None) -> str:
    """Return one line of the table."""
    what, _, key, ratio, unit = row
    if result is None:
        return f"| {what} | failed | | | |"
    low, high = result[f"{ratio}_min_max"]
    ours, twin = result[key], result[f"twin_{key}"]
    return f"| {what} | {ours:,.0f} {unit} | {twin:,.0f} {unit} | {result[ratio]:.2f} | {low:.2f}-{high:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of sending, per run")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    facts = harness.facts()
    results: dict[str, Result | None] = {}
    failures: list[str] = []
    for _, command, *_ in ROWS:
        name = " ".join(command)
        if name in results:
            continue
        try:
            results[name] = measure(command, args.rounds, args.seconds)
        except Failed as err:
            results[name] = None
            failures.append(str(err))
    document: dict[str, Any] = {"facts": facts, "rounds": args.rounds, "results": results}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print("| what | Iris | twin | Iris / twin, median | min-max |\n|---|---|---|---|---|")
    for row in ROWS:
        print(show(row, results[" ".join(row[1])]))
    changed = ", modified" if facts["uncommitted_changes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    print(
        f"\n{facts['utc']}, commit {facts['commit']}{changed}; {facts['cpu']}, {facts['cpus']} cores, "
        f"Linux {facts['kernel']}, Python {facts['python']}, {packages}; "
        f"{args.rounds} rounds of {args.seconds:g} s. Ratios: of rates, more is better; of µs, less."
    )
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
