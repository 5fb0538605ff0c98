"""The loads of the durable logs: start the processes in order and return the results. One call is one run of one
system."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import harness
from harness import BENCH, BenchError, Result, Role, Roles
from lineup import KIB, Cell, System
from loads import RUN_S, SERVER_S, NotRun, end, patience, ready, reported, used, wait_listening
from loads import Stage as PlainStage
from loads import request as requests
from peers import Server
from reports.latency import distribution, merge

from streams import Durable, Entry, durable_class

SIZE: Final = KIB
FLOOR_S: Final = 1.0
FILL_S: Final = 20.0
READ_S: Final = 60.0
WORDS: Final = {"relay.store": "store", "redis-aof": "redis-server, rewriting"}
"""Text in the command line of a process -> name of the process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a run."""

    rounds: int
    seconds: float
    messages: int
    """Number of messages that are read again."""
    number: int = 1
    """Number of the round, from 1."""

    @property
    def floor_s(self) -> float:
        return min(FLOOR_S, self.seconds)


class Watched:
    """A server and all its descendants."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self._cpu_s: dict[int, float] = {}

    def begin(self) -> None:
        """Begin counting processor time and peak memory here."""
        self._cpu_s = {}
        for pid in harness.descendants(self.role.process.pid):
            with suppress(OSError):  # "5" resets the peak (proc(5))
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            self._cpu_s[pid] = _cpu_s(pid)

    def used(self) -> list[Result]:
        """Return what each process used since `begin`."""
        return [
            {
                "name": self._called(pid),
                "cpu_s": round(_cpu_s(pid) - self._cpu_s.get(pid, 0.0), 3),
                "peak_bytes": harness.peak_bytes(pid),
            }
            for pid in harness.descendants(self.role.process.pid)
        ]

    def _called(self, pid: int) -> str:
        if pid == self.role.process.pid:
            return self.name
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            command = ""
        return next((name for word, name in WORDS.items() if word in command), "child of " + self.name)  # fmt: skip


@dataclass(slots=True)
class Stage:
    """One running system."""

    entry: Entry
    peer: Durable
    env: dict[str, str]
    roles: Roles
    commands: Sequence[Server]
    servers: list[Watched] = field(default_factory=list)

    def start(self, roles: Roles, name: str, role: str, **options: Any) -> Role:
        given = json.dumps({"setup": self.peer.setup, "options": options})
        command = ["-m", "streams.roles", self.entry.peer, role, given]
        return roles.start(name, command, env=self.env)

    def run(self, name: str, role: str, limit_s: float, /, **options: Any) -> Result:
        """Run one role to its end."""
        with Roles(limit_s + RUN_S) as roles:
            return reported(self.start(roles, name, role, **options))

    def serve(self) -> None:
        """Start the servers; restart them if they run."""
        end(self.servers)  # type: ignore[arg-type]  # all that it asks for is the role
        self.servers.clear()
        for server in self.commands:
            role = self.roles.run(server.name, server.command, env={**self.env, **server.env})
            self.servers.append(Watched(server.name, role))
            wait_listening(server, role)

    def begin(self) -> None:
        for server in self.servers:
            server.begin()

    def used(self) -> list[Result]:
        return [process for server in self.servers for process in server.used()]


@contextmanager
def staged(entry: Entry, deadline_s: float) -> Iterator[Stage]:
    """Start a system's servers; at the end, stop them and all processes that they started."""
    with Roles(deadline_s) as roles:
        setup = {
            "directory": str(roles.directory), "secured": False, "servers": 1, **entry.options
        }  # fmt: skip
        peer = durable_class(entry.peer)(setup)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
        path = os.pathsep.join(filter(None, [str(BENCH), inherited.get("PYTHONPATH", "")]))
        for command in peer.needs:
            if shutil.which(command) is None:
                raise BenchError(f"{command} is not installed")
        peer.prepare()
        stage = Stage(entry, peer, {**inherited, "PYTHONPATH": path}, roles, peer.servers())
        try:
            stage.serve()
            yield stage
        finally:
            end(stage.servers)  # type: ignore[arg-type]  # all that it asks for is the role


# -- cells ---------------------------------------------------------------------------------------------------


def append(stage: Stage, plan: Plan) -> Result:
    """Measure pipelined appends, and the rate of the disk itself."""
    disk = stage.run("disk", "disk", plan.floor_s, seconds=plan.floor_s)
    with Roles(plan.seconds * 4 + RUN_S) as roles:
        role = stage.start(roles, "appender", "appender", size=SIZE, seconds=plan.seconds)
        ready(role)
        stage.begin()
        role.cue()
        done = reported(role)
        servers = stage.used()
    processes = [*servers, used("appender", done)]
    _checked(done["acknowledged"] == done["sent"] == done["written"], "not all was stored", done)
    return {
        **_figures(done),
        "disk_mb_s": disk["mb_s"],
        "disk_ratio": done["mb_s"] / disk["mb_s"],
        "processes": processes,
    }


def single(stage: Stage, plan: Plan) -> Result:
    """Measure one append after the other, a synced put into RocksDB and, for Iris, a round trip through its relay."""
    put = stage.run("put", "put", plan.floor_s, seconds=plan.floor_s, size=SIZE)
    latency = {"put": put["latency"]}
    if stage.entry.peer == "iris":
        system = System("iris", "iris", "Iris")
        echo = PlainStage(system, stage.peer, stage.env)
        cell = Cell(id="echo", workload="", title="", shows="closed", size=SIZE)
        latency["round_trip"] = requests(echo, cell, plan.floor_s)["latency"]["uncorrected"]
    stage.begin()
    done = stage.run("appender", "single", plan.seconds * 2, size=SIZE, seconds=plan.seconds)
    servers = stage.used()
    latency["append"] = done.pop("latency")
    _checked(done["sent"] == done["written"], "not all was stored", done)
    figures = {f"{what}_{point}": value for what, text in latency.items() for point, value in points(text).items()}  # fmt: skip
    least_us = figures["put_p50_us"]
    if figures.get("round_trip_p50_us") and least_us:
        figures["least_us"] = round(least_us + figures["round_trip_p50_us"], 1)
        figures["least_ratio"] = _ratio(figures["append_p50_us"], figures["least_us"])
    return {
        **_figures(done),
        **figures,
        "latency": latency,
        "processes": [*servers, used("appender", done)],
    }


def replay(stage: Stage, plan: Plan) -> Result:
    """Write a log and read it from its first message on: at once, and from restarted servers whose files were
    dropped from the page cache."""
    limit_s = max(FILL_S, plan.seconds)
    filled = stage.run("filler", "filler", limit_s, size=SIZE, messages=plan.messages, limit_s=limit_s)  # fmt: skip
    figures: Result = {"filled": filled["acknowledged"]}
    processes = []
    for name in ("warm", "cold"):
        if name == "cold":
            if stage.peer.drops_cache:
                figures["cold"] = None
                figures["cold_reason"] = stage.peer.drops_cache
                continue
            stage.serve()
            stage.run("look", "look", SERVER_S)  # it has recovered
            figures["cold_cached_bytes"] = drop_cache(stage.peer.data)
        stage.begin()
        done = stage.run(f"{name} reader", "reader", READ_S, size=SIZE)
        processes += [*_said(stage.used(), name), used(f"reader, {name}", done)]
        whole = done["messages"] == filled["acknowledged"] == done["highest"] + 1
        _checked(whole and not done["wrong"] and not done["short"], "it read something else", done)
        figures[name] = _figures(done)
    return {**figures, "processes": processes}


def live(stage: Stage, plan: Plan, rate: float) -> Result:
    """Measure publishing at a fixed rate to one subscriber, without and with a log that records the topic."""
    if stage.peer.records_topics:
        raise NotRun(stage.peer.records_topics)
    figures: Result = {"asked_rate": rate}
    latency: dict[str, str] = {}
    processes: list[Result] = []
    turns = ("plain", "recorded")
    for name in turns if plan.number % 2 else turns[::-1]:
        done, spent, text = _publish(stage, plan, rate, record=name == "recorded")
        figures[name] = done
        latency[name] = text
        processes += _said(spent, name)
    for point in ("p50_us", "p99_us"):
        figures[f"{point[:3]}_ratio"] = _ratio(figures["recorded"][point], figures["plain"][point])
    return {**figures, "latency": latency, "processes": processes}


def _publish(
    stage: Stage, plan: Plan, rate: float, *, record: bool
) -> tuple[Result, list[Result], str]:
    with Roles(plan.seconds * 2 + RUN_S) as roles:
        receiving = stage.start(roles, "subscriber", "subscriber")
        ready(receiving)
        sending = stage.start(
            roles, "publisher", "publisher", size=SIZE, seconds=plan.seconds, rate=rate, record=record
        )  # fmt: skip
        ready(receiving)  # a probe has arrived
        stage.begin()
        sending.cue()
        ready(sending)  # it has sent all
        with patience([receiving]):
            received = reported(receiving)
        sent = reported(sending, stop=True)
        spent = [*stage.used(), used("publisher", sent), used("subscriber", received)]
    text = received.pop("latency")
    figures = {
        **_figures(sent),
        "received": received["received"],
        "lost": sent["sent"] - received["received"],
        "wrong": received["wrong"],
        **points(text),
    }
    if record:
        log = stage.run("reader", "reader", READ_S, size=SIZE, settle=True)
        figures["log"] = {
            "recorded": log["messages"],
            "not_recorded": sent["sent"] - log["messages"],
            "told": log["missing"],
            "wrong": log["wrong"],
        }
    return figures, spent, text


@dataclass(frozen=True, slots=True)
class Load:
    """A column of the run."""

    id: str
    title: str
    run: Callable[[Stage, Plan], Result]
    limit_s: Callable[[Plan], float]
    """Time limit of a run."""


def _live(name: str, rate: int) -> Load:
    return Load(
        f"live-{name}", f"live delivery at {rate:,} messages/s", lambda stage, plan: live(stage, plan, rate),
        lambda plan: plan.seconds * 6 + READ_S,
    )  # fmt: skip


LOADS: Final = (
    Load("append", "appends of 1 KiB, pipelined", append, lambda plan: plan.seconds * 6),
    Load("single", "one append of 1 KiB after the other", single, lambda plan: plan.seconds * 6),
    Load("replay", "reading a log", replay, lambda plan: plan.seconds + FILL_S + 2 * READ_S),
    _live("20k", 20_000),
    _live("100k", 100_000),
)


def run(entry: Entry, load: Load, plan: Plan) -> Result:
    """Run one load on one system, with its own servers."""
    try:
        with staged(entry, SERVER_S + load.limit_s(plan) + 6 * RUN_S) as stage:
            return load.run(stage, plan)
    except ImportError as err:
        raise BenchError(f"{err}; make bench-streams installs it") from err


# -- helpers -------------------------------------------------------------------------------------------------


def points(text: str) -> Result:
    """Return percentiles of a histogram in microseconds; None where fewer than ten samples lie beyond."""
    samples = distribution(merge([text]))
    found = {"p50_us": samples.at(2), "p99_us": samples.at(100)}
    return {name: None if at is None else round(at / 1000, 1) for name, at in found.items()}


def drop_cache(directory: Path) -> int:
    """Make the kernel write and drop all cached pages of the files below a directory; return the bytes that stayed
    cached."""
    kept = 0
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError):
            if not path.is_file() or not path.stat().st_size:
                continue
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                kept += _resident(file.fileno())
    return kept


def _resident(descriptor: int) -> int:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) as mapped:
        page = mmap.PAGESIZE
        flags = (ctypes.c_ubyte * -(-len(mapped) // page))()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), flags)
        del start
    return 0 if failed else sum(flag & 1 for flag in flags) * page


def _cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / harness.TICK


def _figures(result: Result) -> Result:
    return {k: v for k, v in result.items() if k not in ("role", "cpu_s", "peak_bytes", "latency")}


def _said(processes: Sequence[Result], name: str) -> list[Result]:
    return [{**process, "name": f"{process['name']}, {name}"} for process in processes]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, 3) if ours is not None and theirs else None


def _checked(right: bool, what: str, result: Result) -> None:
    if not right:
        raise BenchError(f"{what}: {json.dumps(_figures(result))}")
