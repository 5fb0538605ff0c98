"""Test a promise of Iris at a given scale, and write the measured figures down: `python tests/proof.py AREA N`.

    AREA            example N  what N counts
    tunnels         10000      idle tunnels between one relay and one member
    connections     1000       sessions at once at one relay
    http            10000      event streams over HTTP at one bridge, some of which do not read
    order           200000     publications; checks order, duplicates and reports of losses
    rotation        2000       requests and broadcasts while the key changes
    idle            10         seconds of a relay that nobody uses
    sim             2000       lives of simulated networks, each with its seed
    scale           1000       simulated relays in full mesh, with 100 memberships each
    discovery       20         starts of a relay, alone and beside another host's (needs root)
    streams         200        kills of a store under load, with power cuts, damage and a full disk (root, cc)
    workers         8          runs in which 50 workers of a stream are killed
    spark           3          rounds in which Spark's drivers, workers and executors are killed (Java 17)
    sites           50         cuts of the WAN between three sites, and as many dead gateways, with 20,000
                               messages for each (root)
    federation      20         lives of a simulated federation of 50 sites with 20 relays each
    mutations       all        checks in our code that are removed one at a time; a test must fail for each
    hostile         100000     steps of a hostile relay and a hostile site among honest ones
    drains          200        drains of a relay under load, linked, and alone with a store; checks that every
                               loss is reported
    restarts        100        restarts of a relay under load, alone and while it looks for others
    histories       1800       seconds of random faults among processes of two sites, whose histories are
                               checked, then as many leaves of a queue group under load, 500 at most (root)
    gateway-drains  100        drains of the gateways of two sites under load
    bucket          10000    lives of stores that share a bucket, in virtual time, whose histories are checked
    direct          200        direct tunnels broken under load by the end of a process, the relay or the pair
    bucket-kills    200        kills and freezes of the store that serves a stream in a bucket, under load
    web             10000      connections to the port for browsers that say nothing, while browsers work
    points          1          rounds in which a store of a bucket fails at each request of a takeover and a move

Exits 1 if the promise does not hold. The figures go to docs/proof.md, or to the file that `--record` names: one
section per area and N, which replaces the previous one. The areas sim, scale, federation, bucket and mutations, and the
steps of hostile, run in this process or in memory. All others run real processes, with their own relay, keys and
sockets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import proofs
import uvloop
from harness import BenchError, facts, report
from proofs.common import Proof
from support import alone

AREAS = (
    "tunnels",
    "connections",
    "http",
    "order",
    "rotation",
    "idle",
    "sim",
    "scale",
    "discovery",
    "streams",
    "workers",
    "spark",
    "federation",
    "sites",
    "mutations",
    "hostile",
    "restarts",
    "drains",
    "gateway-drains",
    "histories",
    "direct",
    "bucket-kills",
    "bucket",
    "points",
    "web",
)
RECORD = proofs.ROOT / "docs" / "proof.md"
SEED = 20_241
HEAD = """# What was proved, and when

Written by `make proof AREA=… N=…`. Each section is one area at one count; the next run at that count replaces it.
`make test` runs the same code at small counts. `bench/README.md` says what each area does. MB are 10^6 bytes.
"""


def commit() -> str:
    """Return the commit, with a note if any file except the record differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(proofs.ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!docs/proof.md")
    return (git("rev-parse", "--short", "HEAD") or "none") + (", modified" if changed else "")


def section(area: str, count: int, seed: int, proof: Proof) -> str:
    """Return the section of the record for one run."""
    here = facts()
    machine = f"{here['cpu']}, {here['cpus']} cores, Python {here['python']}"
    verdict = "**Did not hold:** " + "; ".join(proof.broken) if proof.broken else "Held"
    rows = "".join(f"| {name} | {value} |\n" for name, value in proof.figures.items())
    return (
        f"## {area} {count:,}\n\n{here['utc']}, commit {commit()}, seed {seed}; {machine}.\n"
        f"{verdict}.\n\n| | |\n|---|---|\n{rows}"
    )


def record(path: Path, text: str) -> None:
    """Write a section into the file; it replaces the one with the same heading."""
    before = path.read_text() if path.exists() else ""
    found = {part.split("\n", 1)[0]: part for part in re.split(r"^(?=## )", before, flags=re.M)[1:]}
    found[text.split("\n", 1)[0]] = text

    def rank(heading: str) -> tuple[int, int]:
        _, area, count = heading.split()
        return AREAS.index(area), int(count.replace(",", ""))

    parts = [found[heading].rstrip() + "\n" for heading in sorted(found, key=rank)]
    path.write_text("\n".join([HEAD, *parts]))


def play(name: str, deadline_s: str, options: str) -> None:
    """Run one role, "area.function", in this process."""
    signal.alarm(int(deadline_s))
    area, _, function = name.partition(".")
    role = getattr(importlib.import_module(_module(area)), function)
    report(name, uvloop.run(role(json.loads(options))))


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("count", type=_count, metavar="N")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    args = parser.parse_args()
    if args.count is not None and args.count < 1:
        parser.error("N is at least 1")
    area = importlib.import_module(_module(args.area))
    most: int | None = getattr(area, "MOST", None)
    if args.count is None and most is None:
        parser.error(f"{args.area} has no end: N must be a number")
    count = min(args.count or most, most or args.count)
    # Handle it as Ctrl-C, so that all processes end and their directory is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begin_s = time.monotonic()
    alone_in = alone.leave_the_host()
    try:
        proof = area.run(count, args.seed)
    except BenchError as err:
        sys.exit(f"{args.area} {count}: {err}")
    finally:
        alone.come_back(alone_in)
    text = section(args.area, count, args.seed, proof)
    record(args.record, text)
    print(text)
    print(f"took {time.monotonic() - begin_s:.1f} s; written to {args.record}", file=sys.stderr)
    if proof.broken:
        sys.exit(f"{args.area} {count}: did not hold: {'; '.join(proof.broken)}")


def _module(area: str) -> str:
    return f"proofs.{area.replace('-', '_')}"


def _count(text: str) -> int | None:
    """Parse N; None stands for "all"."""
    return None if text == "all" else int(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        play(*sys.argv[2:])
    else:
        main()
