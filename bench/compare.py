"""Compare Iris with what Python teams use today, in one interleaved run: `make bench`, `make bench-full`.

    python bench/compare.py --quick               # Iris, NATS, Zenoh, ZeroMQ; one round
    python bench/compare.py --only iris,nats --cells w3-1,w4-1k-3000 --rounds 5
    python bench/compare.py --full                # open loops of 30 s

Every system is started again in each round, and all systems run before the next round begins. Results go to
bench/results/: latest.json, report.md, report.html and a plot for each open loop. A run that failed is "failed" in
the tables, with the reason below them, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

import harness
import twin
from harness import BENCH, BenchError, Result
from lineup import CELLS, QUICK, SYSTEMS, Cell, System
from loads import LOADS, RUN_S, SERVER_S, NotRun, Stage, staged
from peers import peer_class

RESULTS: Final = BENCH / "results"
SATURATED: Final = 0.05
"""An open loop that leaves more than this share unanswered is not repeated."""
Skipped = dict[tuple[str, str], str]
"""(system, cell) -> why it is not repeated."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of one comparison."""

    systems: Sequence[System]
    cells: Sequence[Cell]
    rounds: int
    burst_s: float
    """Seconds of W1, W2, W3 and W5."""
    load_s: float
    """Seconds of W4."""

    def seconds(self, cell: Cell) -> float:
        return self.load_s if cell.shows == "open" else self.burst_s


def run_system(plan: Plan, system: System, number: int, skipped: Skipped) -> list[Result]:
    """Run all cells of one system once, except those that are not worth repeating."""
    about = {"round": number, "peer": system.name}
    runs: list[Result] = []
    cells = []
    for cell in plan.cells:
        if reason := skipped.get((system.name, cell.id)):
            runs.append({**about, "cell": cell.id, "status": "not run", "reason": reason})
        elif system.runs(cell):
            cells.append(cell)
    if not cells:
        return runs
    if system.peer == "twin":
        for cell in cells:
            if cell.shows not in twin.RUNS:
                done = {"status": "not run", "reason": "there is no twin of an open loop"}
            else:
                done = attempt(partial(twin.run, cell, plan.seconds(cell)))
            runs.append({**about, "cell": cell.id, **done})
        return runs
    deadline_s = SERVER_S + sum(plan.seconds(cell) * 4 + RUN_S for cell in cells)
    try:
        with staged(system, deadline_s) as stage:
            for cell in cells:
                runs.append(
                    {**about, "cell": cell.id, **attempt(partial(run_cell, stage, cell, plan))}
                )
    except (BenchError, OSError, ImportError, subprocess.SubprocessError) as err:
        done = {run["cell"] for run in runs}
        failed = {"status": "failed", "reason": f"{type(err).__name__}: {err}"[-600:]}
        runs += [{**about, "cell": c.id, **failed} for c in cells if c.id not in done]
    return runs


def run_cell(stage: Stage, cell: Cell, plan: Plan) -> Result:
    for served in stage.servers:
        served.begin()
    result = LOADS[cell.shows](stage, cell, plan.seconds(cell))
    result["processes"] = [*(served.used() for served in stage.servers), *result["processes"]]
    return result


def attempt(run: Callable[[], Result]) -> Result:
    """Return a run's figures in the form of the report; for a failed run, the reason."""
    before = harness.machine_s()
    try:
        figures = run()
    except NotRun as err:
        return {"status": "not run", "reason": str(err)}
    except (BenchError, OSError, KeyError, ValueError) as err:
        return {"status": "failed", "reason": f"{type(err).__name__}: {err}"[-600:]}
    after = harness.machine_s()
    processes = figures.pop("processes")
    latency = figures.pop("latency", {})
    ours_s = sum(process["cpu_s"] for process in processes)
    return {
        "status": "ok",
        "reason": "",
        "figures": figures,
        "processes": processes,
        "latency": latency,
        "stolen_s": round(after["stolen"] - before["stolen"], 3),
        "others_s": round(max(0.0, after["busy"] - before["busy"] - ours_s), 3),
    }


def saturated(figures: Result, number: int) -> str:
    """Return why an open loop is not repeated: it was far beyond the reach of the system, so another run shows
    nothing new; "" if it is repeated."""
    share = figures.get("unanswered", 0) / max(1, figures.get("requests", 1))
    if share <= SATURATED:
        return ""
    return f"saturated in round {number}: {share:.0%} unanswered; not repeated"


def run_all(plan: Plan, keep: Callable[[list[Result]], None] | None = None) -> list[Result]:
    """Run every system in every round, beginning with another system each time; call `keep` with the results after
    each round."""
    runs: list[Result] = []
    skipped: Skipped = {}
    for number in range(1, plan.rounds + 1):
        first = (number - 1) % len(plan.systems)
        for system in [*plan.systems[first:], *plan.systems[:first]]:
            begin_s = time.monotonic()
            done = run_system(plan, system, number, skipped)
            runs += done
            for run in done:
                if run["status"] == "ok" and (reason := saturated(run["figures"], number)):
                    skipped[system.name, run["cell"]] = reason
            spent_s = time.monotonic() - begin_s
            print(
                f"round {number} {system.name} ({spent_s:.0f} s): {brief(done)}",
                file=sys.stderr,
                flush=True,
            )
        if keep is not None:
            keep(runs)
    return runs


def brief(runs: Sequence[Result]) -> str:
    words = []
    for run in runs:
        if run["status"] != "ok":
            words.append(f"{run['cell']} {run['status']}: {run['reason'][-200:]}")
            continue
        figures = run["figures"]
        for key in ("received_rate", "rate_mb_s", "rate", "answered"):
            if key in figures:
                lost = f" lost {figures['lost']:,}" if figures.get("lost") else ""
                words.append(f"{run['cell']} {figures[key]:,.0f}{lost}")
                break
    return "; ".join(words)


def versions(system: System) -> str:
    """Return the versions of a system's packages, and of the servers that Debian packages."""
    said = []
    needs = peer_class(system.peer).needs if system.peer != "twin" else ()
    for package in needs:
        version = ""
        if shutil.which("dpkg-query"):
            query = ["dpkg-query", "-W", "-f", "${Version}", package]
            version = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        said.append(f"{package} {version or 'of unknown version'}")
    for name in system.packages:
        try:
            said.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            said.append(f"{name} not installed")
    return ", ".join(said)


def document(
    plan: Plan, facts: Result, options: Result, runs: list[Result], spent_s: float
) -> Result:
    """Return all results in the form that report.py reads."""
    return {
        "facts": facts,
        "options": options,
        "spent_s": round(spent_s, 1),
        "peers": [
            {
                "name": system.name,
                "title": system.title,
                "secured": system.says,
                "version": versions(system),
                "floor": system.floor,
            }
            for system in plan.systems
        ],
        "cells": [
            {"id": c.id, "workload": c.workload, "title": c.title, "shows": c.shows} for c in plan.cells
        ],
        "runs": runs,
    }  # fmt: skip


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the choices that the arguments make; exit with code 2 on an unknown name."""
    names = args.only.split(",") if args.only else list(QUICK) if args.quick else None
    known = {system.name: system for system in SYSTEMS}
    cells = {cell.id: cell for cell in CELLS}
    usual = [cell.id for cell in CELLS if args.full or not cell.full]
    chosen = args.cells.split(",") if args.cells else usual
    for what, given, there in (("--only", names or [], known), ("--cells", chosen, cells)):
        if unknown := [name for name in given if name not in there]:
            sys.exit(f"{what}: unknown: {', '.join(unknown)}; choose from {', '.join(there)}")
    systems = [known[name] for name in names] if names else list(SYSTEMS)
    rounds = args.rounds or (1 if args.quick else 3)
    load_s = args.seconds or (30.0 if args.full else 5.0)
    return Plan(systems, [cells[name] for name in chosen], rounds, args.burst, load_s)


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--quick", action="store_true", help=f"one round of {', '.join(QUICK)}")
    parser.add_argument("--full", action="store_true", help="open loops of 30 s")
    parser.add_argument("--only", default="", metavar="NAME,…", help="these systems")
    parser.add_argument("--cells", default="", metavar="ID,…", help="these loads")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="of an open loop")
    parser.add_argument("--burst", type=float, default=1.0, help="seconds of every other load")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIRECTORY")
    args = parser.parse_args()
    plan = plan_of(args)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    facts = harness.facts()
    print(f"Python {facts['python']}, {facts['python_built']}", file=sys.stderr)
    begin_s = time.monotonic()
    options = {
        "rounds": plan.rounds,
        "load_s": plan.load_s,
        "burst_s": plan.burst_s,
        "quick": args.quick,
        "full": args.full,
    }
    args.output.mkdir(exist_ok=True, parents=True)

    def keep(runs: list[Result]) -> None:
        """Write the figures after each round, so that a run of hours that is interrupted keeps its finished rounds."""
        made = document(plan, facts, options, runs, time.monotonic() - begin_s)
        (args.output / "latest.json").write_text(json.dumps(made, indent=1) + "\n")

    runs = run_all(plan, keep)
    import report

    report.write(json.loads((args.output / "latest.json").read_text()), args.output)
    print((args.output / "report.md").read_text())
    if failed := [
        f"{r['peer']} {r['cell']}: {r['reason']}" for r in runs if r["status"] == "failed"
    ]:
        sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
