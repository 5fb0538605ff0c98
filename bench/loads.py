"""Run one load on one system: its servers, its roles in separate processes, and their results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import harness
from harness import BENCH, BenchError, Result, Role, Roles
from lineup import Cell, System
from peers import Peer, Server, peer_class

SCRIPT: Final = str(BENCH / "roles.py")
SERVER_S: Final = 60.0
DRAIN_S: Final = 4.0
"""Time after the end of publishing in which a subscriber may still receive; then it counts what it has."""
RUN_S: Final = 25.0
"""Time beyond its load after which a run has failed."""
SEARCH_TRIES: Final = 2


class NotRun(Exception):
    """The system does not offer this load."""


@dataclass(slots=True)
class Served:
    """A server of the current system, including all processes that it started."""

    name: str
    role: Role
    cpu_s: float = 0.0

    def begin(self) -> None:
        """Begin counting processor time and peak memory here."""
        for pid in self._tree():
            # "5" resets the peak (proc(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self.cpu_s = self._cpu_s()

    def used(self) -> Result:
        """Return the processor time and peak memory since `begin`."""
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
    """One running system: its servers, and the settings by which its roles find them."""

    system: System
    peer: Peer
    env: dict[str, str]
    servers: list[Served] = field(default_factory=list)

    def start(self, roles: Roles, name: str, role: str, **options: Any) -> Role:
        given = json.dumps({"setup": self.peer.setup, "options": options})
        command = [SCRIPT, self.system.peer, role, given]
        return roles.start(name, command, env=self.env)


# -- systems -------------------------------------------------------------------------------------------------


@contextmanager
def staged(system: System, deadline_s: float) -> Iterator[Stage]:
    """Start a system's servers; at the end, stop them and all processes that they started."""
    with Roles(deadline_s) as roles:
        setup = {
            "directory": str(roles.directory),
            "secured": system.secured,
            "servers": system.servers,
        }
        peer = peer_class(system.peer)(setup)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
        stage = Stage(system, peer, inherited)
        for command in peer.needs:
            if shutil.which(command) is None:
                raise BenchError(
                    f"{command} is not installed; install it with the system's packages, or leave the system out with --only"
                )
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
    """Return when the server answers; raises BenchError if it ends before, or does not answer in time."""
    until_s = time.monotonic() + SERVER_S
    while True:
        family = socket.AF_UNIX if isinstance(server.listens, str) else socket.AF_INET
        with socket.socket(family) as probe:
            if probe.connect_ex(server.listens) == 0:
                return
        if role.process.poll() is not None or time.monotonic() > until_s:
            raise role.failed(f"does not answer at {server.listens}")
        time.sleep(0.02)


def end(servers: Sequence[Served]) -> None:
    """Stop every server, then kill its remaining processes."""
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
                continue  # it has ended with its parent


# -- loads ---------------------------------------------------------------------------------------------------


def publish(stage: Stage, cell: Cell, seconds: float) -> Result:
    """Publish at full speed; if that loses messages, search for a rate that does not."""
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
    """Publish at `rate` (0: full speed) with new processes."""
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
            ready(role)  # a probe has arrived
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
                raise NotRun("it blocks the event loop, so it cannot send at a fixed rate")
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
    """Wait until the role is ready; raises NotRun if its system does not offer the load."""
    line = role.line()
    if line == "ready":
        return
    said = json.loads(line) if line.startswith("{") else {}
    if "not_offered" in said:
        raise NotRun(said["not_offered"])
    raise role.failed("did not report that it is ready")


def reported(role: Role, *, stop: bool = False) -> Result:
    """Return the role's result; raises NotRun as `ready` does."""
    result = role.result(stop=stop)
    if "not_offered" in result:
        raise NotRun(result["not_offered"])
    return result


def used(name: str, result: Result) -> Result:
    return {"name": name, "cpu_s": result["cpu_s"], "peak_bytes": result["peak_bytes"]}


@contextmanager
def patience(roles: Sequence[Role]) -> Iterator[None]:
    """Make roles that have not received the end in time report their results."""

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
