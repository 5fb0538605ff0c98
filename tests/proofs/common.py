"""Helpers of all areas: the outcome, cues from the proof to its roles, memory, and the deadline of a run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Result, Role, Roles

import iris
from proofs import ROOT

TIMEOUT_S = 60.0
"""Limit of every wait in a role. It can make a proof fail, but never slows one down."""


@dataclass(slots=True)
class Proof:
    """The outcome of one run: the figures for the record, and each promise that did not hold."""

    figures: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def promise(self, text: str, holds: bool) -> None:
        """Note whether the promise `text` holds."""
        if not holds:
            self.broken.append(text)


def test_rounds(count: int, tests: Path, marked: str, limit_s: float, **env: str) -> Proof:
    """Run the tests in `tests` with the marks `marked` `count` times, each time for `limit_s` seconds at most."""
    proof = Proof()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, str(tests)]  # fmt: skip
    passed = 0
    begin_s = time.monotonic()
    for number in range(1, count + 1):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
        found = re.search(r"(\d+) passed", done.stdout)
        passed += int(found[1]) if found else 0
        print(f"round {number}: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
        proof.promise(f"round {number}: {done.stdout[-2000:]}", done.returncode == 0)
    proof.figures["rounds"] = f"{count}, {passed} tests passed"
    proof.figures["took"] = f"{time.monotonic() - begin_s:.0f} s"
    return proof


def deadline_s(count: int) -> float:
    """Return the seconds after which a run of this size is aborted and all its processes are killed."""
    return 60.0 + count / 100


class Run(Roles):
    """The processes of one proof. Each role ends at the deadline, even if the proof was killed."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.deadline_s = deadline_s


def start(
    roles: Run, name: str, env: dict[str, str], options: dict[str, Any], *, ready: bool = True
) -> Role:
    """Start the role `name` ("area.function") with `options`. `ready`: return when it has reported that it is ready."""
    command = [
        str(ROOT / "tests" / "proof.py"),
        "--role",
        name,
        str(int(roles.deadline_s) + 1),
        json.dumps(options),
    ]
    return roles.start(name, command, env=env, ready=ready)


def settings(roles: Roles, **values: int | float) -> list[str]:
    """Write a settings file for a relay; return the arguments that make the relay read it."""
    path = roles.directory / "relay.toml"
    path.write_text("".join(f"{name} = {value}\n" for name, value in values.items()))
    return ["--config", str(path)]


class Cues:
    """The cues that a role receives from the proof: SIGUSR1 for the next step, SIGTERM for the end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = asyncio.Semaphore(0)
        self.stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, self._next.release)
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)

    async def next(self) -> None:
        """Return at the next cue."""
        await self._next.acquire()

    async def next_or_stop(self) -> bool:
        """Return True at the next cue, or False at the end."""
        waits = [asyncio.create_task(self._next.acquire()), asyncio.create_task(self.stop.wait())]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return waits[0] in done


async def echo(options: dict[str, Any]) -> Result:
    """The role of a member of `options["cluster"]` that echoes requests until the cue to stop."""
    cues = Cues()
    service = iris.Service(options["cluster"])
    service.on_request(lambda payload: payload)
    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await cues.stop.wait()
    return {}


def cue(*roles: Role) -> None:
    """Send each of `roles` the cue for its next step."""
    for role in roles:
        role.process.send_signal(signal.SIGUSR1)


def cue_and_wait(*roles: Role) -> None:
    """Send each of `roles` the cue for its next step, and return when all have finished it."""
    cue(*roles)
    for role in roles:
        role.wait_ready()


def memory_mb(*roles: Role) -> tuple[float, float]:
    """Return the sums of resident and proportional memory of running processes, in MB (10^6 bytes)."""
    resident = proportional = 0
    for role in roles:
        lines = Path(f"/proc/{role.process.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        resident += sizes["Rss"] * 1024
        proportional += sizes["Pss"] * 1024
    return resident / 1e6, proportional / 1e6


def show_mb(memory: tuple[float, float]) -> str:
    """Return memory as text for the record."""
    return f"{memory[0]:.1f} MB resident, {memory[1]:.1f} MB proportional"


def total(results: list[Result], key: str) -> int:
    """Return the sum of one figure over several roles."""
    return sum(int(result[key]) for result in results)


def shares(count: int, parts: int) -> list[int]:
    """Split `count` into at most `parts` positive integers that differ by at most 1."""
    parts = min(parts, count)
    return [count // parts + (number < count % parts) for number in range(parts)]
