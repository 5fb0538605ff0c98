"""Compare durable streams with JetStream and Redis Streams, in one interleaved run: `make bench-streams`.

    python bench/streams.py --quick                          # one round of 1 s
    python bench/streams.py --only iris,nats-always --cells append,single --rounds 5
    python bench/streams.py --directory /mnt/data            # the disk that is measured

In each round, every system runs every load with servers of its own. Results go to bench/results/: streams.json
(every run, process and histogram) and streams.md. Loads without a result are "not run" or "failed" in the tables,
with the reason below. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import harness
from compare import attempt, versions
from harness import BENCH, Result
from lineup import System
from streams import ENTRIES, Entry
from streams.cells import LOADS, Load, Plan, run
from streams.report import markdown

RESULTS: Final = BENCH / "results"


def run_all(plan: Plan, entries: list[Entry], loads: list[Load], document: Result, keep: Path) -> None:  # fmt: skip
    """Run everything into `document` and write it after every round, so that an interrupted run keeps its finished
    rounds."""
    begin_s = time.monotonic()
    for number in range(1, plan.rounds + 1):
        first = (number - 1) % len(entries)
        for load in loads:
            for entry in [*entries[first:], *entries[:first]]:
                since_s = time.monotonic()
                done = attempt(partial(run, entry, load, replace(plan, number=number)))
                document["runs"].append(
                    {"round": number, "system": entry.name, "cell": load.id, **done}
                )
                spent_s = time.monotonic() - since_s
                said = f"round {number} {load.id} {entry.name} ({spent_s:.0f} s): {brief(done)}"
                print(said, file=sys.stderr, flush=True)
        document["spent_s"] = round(time.monotonic() - begin_s, 1)
        write(document, keep)


def brief(done: Result) -> str:
    """Return one line about a run."""
    if done["status"] != "ok":
        return f"{done['status']}: {done['reason']}"
    figures = done["figures"]
    if "warm" in figures:
        shown = {
            name: figures[name]["rate"] if figures[name] else None for name in ("warm", "cold")
        }
    else:
        names = ("rate", "mb_s", "disk_ratio", "append_p50_us", "least_ratio", "p50_ratio", "p99_ratio")  # fmt: skip
        shown = {name: figures[name] for name in names if name in figures}
    return ", ".join(f"{name} {value:,.2f}" for name, value in shown.items() if value is not None)


def write(document: Result, directory: Path) -> None:
    """Write both files."""
    (directory / "streams.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "streams.md").write_text(markdown(document), encoding="utf-8")


def version(entry: Entry) -> str:
    """Return the versions of a system's packages."""
    try:
        return versions(System(entry.name, entry.peer, entry.title, entry.packages))
    except ImportError as err:
        return f"not installed: {err}"


def disk_facts() -> Result:
    """Return the file system of the logs."""
    asked = ["df", "--output=source,fstype", tempfile.gettempdir()]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return {"directory": tempfile.gettempdir(), "disk": " ".join(said.split()[2:])}


def chosen(what: str, text: str, known: list[str]) -> list[str]:
    """Return the names in `text`, or all if it is empty; exit on an unknown name."""
    names = text.split(",") if text else known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{what}: unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return [name for name in known if name in names]


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument(
        "--quick", action="store_true", help="one round of 1 s, logs of 20,000 messages"
    )
    parser.add_argument("--only", default="", metavar="NAME,…", help="these systems")
    parser.add_argument("--cells", default="", metavar="ID,…", help="these loads")
    parser.add_argument("--rounds", type=int, default=0, help="default: 3")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="of a load in a round; default: 5"
    )
    parser.add_argument(
        "--messages", type=int, default=0, help="in the log that is read; default: 200,000"
    )
    parser.add_argument(
        "--directory", type=Path, help="where logs are written; default: the temporary directory"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIRECTORY")
    args = parser.parse_args()
    names = chosen("--only", args.only, [entry.name for entry in ENTRIES])
    ids = chosen("--cells", args.cells, [load.id for load in LOADS])
    entries = [entry for entry in ENTRIES if entry.name in names]
    loads = [load for load in LOADS if load.id in ids]
    plan = Plan(
        rounds=args.rounds or (1 if args.quick else 3),
        seconds=args.seconds or (1.0 if args.quick else 5.0),
        messages=args.messages or (20_000 if args.quick else 200_000),
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.directory is not None:
        tempfile.tempdir = str(args.directory.absolute())
    args.output.mkdir(exist_ok=True, parents=True)
    document: Result = {
        "facts": {**harness.facts(), **disk_facts(), "root": os.geteuid() == 0},
        "options": {"rounds": plan.rounds, "seconds": plan.seconds, "messages": plan.messages},
        "spent_s": 0.0,
        "systems": [
            {"name": e.name, "title": e.title, "durability": e.durability, "version": version(e)} for e in entries
        ],
        "cells": [{"id": load.id, "title": load.title} for load in loads],
        "runs": [],
    }  # fmt: skip
    run_all(plan, entries, loads, document, args.output)
    print((args.output / "streams.md").read_text())
    failed = [
        f"{r['system']} {r['cell']}: {r['reason']}" for r in document["runs"] if r["status"] == "failed"
    ]  # fmt: skip
    if failed:
        sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
