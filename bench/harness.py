"""The common part of the benches: roles as processes, a private relay, alternating rounds, facts of the machine.

A role prints "ready" once it listens, if its bench waits for that, and one JSON line at its end. Every wait is bounded
by the one deadline of its `Roles`: when it passes, all its processes are killed, by their own process ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from optimised import built_optimised

BENCH = Path(__file__).resolve().parent
PACKAGES = ("cryptography", "msgspec", "uvloop", "hdrhistogram")
START_S = 10.0
LONGEST_NS = 120_000_000_000
TICK = os.sysconf("SC_CLK_TCK")

Result = dict[str, Any]


class BenchError(Exception):
    """A role failed or exceeded its deadline; the message ends with the end of its stderr."""


class Role:
    """One process of a run."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.name = name
        self.process = process
        self._errors = errors

    def wait_ready(self) -> None:
        """Return when the role has printed "ready"."""
        if self.line() != "ready":
            raise self.failed("did not print 'ready'")

    def result(self, *, stop: bool = False) -> Result:
        """Return the role's result, which it prints at its end; with `stop`, stop it first."""
        if stop:
            self.process.send_signal(signal.SIGTERM)
        line = self.line()
        if self.process.wait() != 0:
            raise self.failed("failed")
        result: Result = json.loads(line)
        return result

    def cpu_s(self) -> float:
        """Return the processor seconds (user and system) of the process."""
        return cpu_s(self.process.pid)

    def cue(self) -> None:
        """Cue the role's next step."""
        self.process.send_signal(signal.SIGUSR1)

    def written(self) -> str:
        """Return the role's stderr so far."""
        return self._errors.read_text(errors="replace")

    def failed(self, what: str) -> BenchError:
        """Return an error about this role, with the end of its stderr."""
        words = self.written()[-2000:].strip() or "it wrote nothing"
        return BenchError(f"{self.name} {what} (exit {self.process.poll()}): {words}")

    def line(self) -> str:
        """Return the next line that the role prints; raises BenchError if it ends before."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line.decode().strip()
        self.process.wait()
        raise self.failed("ended without printing its result, or was killed at the deadline")


class Roles:
    """The processes of one run and their private directory; all are stopped at the end of the block or the deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._roles: list[Role] = []
        self._watchdog = threading.Timer(deadline_s, self._kill)
        self._watchdog.daemon = True
        self._temporary = tempfile.TemporaryDirectory(prefix="iris-bench-")
        self.directory = Path(self._temporary.name)

    def __enter__(self) -> Self:
        self._watchdog.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watchdog.cancel()
        self._kill()
        for role in self._roles:
            role.process.wait()
            if role.process.stdout is not None:
                role.process.stdout.close()
        self._temporary.cleanup()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        ready: bool = False,
        reports: bool = True,
    ) -> Role:
        """Start `command` with this Python; with `ready`, return when it has printed "ready".

        Without `reports`, its stdout goes to the same file as its stderr, because nothing would read the pipe.
        """
        return self.run(name, [sys.executable, *command], env=env, ready=ready, reports=reports)

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        ready: bool = False,
        reports: bool = False,
    ) -> Role:
        """Start any program; otherwise as `start`."""
        errors = self.directory / f"{name.replace(' ', '-')}-{len(self._roles)}.stderr"
        with errors.open("wb") as stderr:
            stdout = subprocess.PIPE if reports else stderr
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
        role = Role(name, process, errors)
        self._roles.append(role)
        if ready:
            role.wait_ready()
        return role

    def _kill(self) -> None:
        for role in self._roles:
            role.process.kill()  # does nothing if the process was already waited for


class IrisRelay:
    """A real relay with all its files in the directory of `roles`; the relays of one directory share new keys.

    With `links` it accepts links on 127.0.0.1, and with `join` it is linked to that relay when this returns. Without
    either it is a development relay, which has no links. `program` runs the relay.
    """

    def __init__(
        self,
        roles: Roles,
        arguments: Sequence[str] = (),
        *,
        links: bool = False,
        join: IrisRelay | None = None,
        program: Sequence[str] = ("-m", "relay"),
    ) -> None:
        directory = roles.directory / f"iris{sum(1 for _ in roles.directory.glob('iris*')) or ''}"
        directory.mkdir(mode=0o700)
        socket = directory / "relay.sock"
        keys = roles.directory / "iris" / "keys"
        if not keys.exists():
            from iris.keyfiles import (
                create_keys,
            )  # imported here, because roles of other systems import this module, too

            create_keys(keys)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("IRIS_")
        }
        self.env = {
            **inherited,
            "XDG_RUNTIME_DIR": str(directory),
            "IRIS_CONFIG": str(keys),
            "IRIS_RELAY": str(socket),
        }
        command = [*program, "--socket", str(socket), *arguments]
        linked = links or join is not None
        command += ["--no-mdns", "--port=0", "--bind=127.0.0.1"] if linked else ["--dev"]
        if join is not None:
            command += ["--join", join.link_address()]
        self.role = roles.start("relay", command, env=self.env, reports=False)
        until_s = time.monotonic() + START_S
        while not socket.exists():
            if self.role.process.poll() is not None or time.monotonic() > until_s:
                raise self.role.failed("did not open its socket")
            time.sleep(0.01)
        if join is not None:
            self.logged("link.up")

    def link_address(self) -> str:
        """Return host:port where this relay accepts links."""
        (address,) = self.logged("links.listening")["addresses"]
        return str(address)

    def logged(self, event: str) -> Result:
        """Wait for the first line with `event` in the relay's log, and return it."""
        until_s = time.monotonic() + START_S
        while True:
            for line in self.role.written().splitlines():
                if line.startswith("{") and line.endswith("}"):
                    said: Result = json.loads(line)
                    if said["event"] == event:
                        return said
            if self.role.process.poll() is not None or time.monotonic() > until_s:
                raise self.role.failed(f"did not log {event}")
            time.sleep(0.01)

    def status(self) -> Result:
        """Return the relay's `iris status --json`."""
        command = [sys.executable, "-m", "iris.cli", "status", "--json"]
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, check=False, timeout=START_S
        )
        if done.returncode:
            raise BenchError(
                f"iris status failed with exit code {done.returncode}: {done.stderr[-2000:]}"
            )
        status: Result = json.loads(done.stdout)
        return status

    def stop(self) -> float:
        """Stop the relay with SIGTERM; return the processor seconds that it used."""
        cpu_s = self.role.cpu_s()
        self.role.process.terminate()
        try:
            self.role.process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise self.role.failed(f"did not stop within {START_S} s") from None
        return cpu_s


def iris_relays(roles: Roles, count: int) -> list[IrisRelay]:
    """Start one relay, or two that are linked over TLS on 127.0.0.1."""
    if count == 1:
        return [IrisRelay(roles)]
    first = IrisRelay(roles, links=True)
    return [first, IrisRelay(roles, join=first)]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every bench takes."""
    style = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(description=doc, formatter_class=style)
    result.add_argument("--seconds", type=float, default=2.0, help="of sending, per run")
    result.add_argument("--rounds", type=int, default=5)
    return result


def twin_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every bench with a twin takes."""
    result = parser(doc)
    text = "2: sender and receiver at linked relays; runs of one relay alternate with these"
    result.add_argument("--relays", type=int, choices=[1, 2], default=1, help=text)
    result.add_argument("--only", choices=["iris", "twin"], help="run one side, once")
    buffer = system_send_buffer()
    text = "SO_SNDBUF of the twin's sockets (default: as the system sets it)"
    result.add_argument("--send-buffer", type=int, default=buffer, metavar="BYTES", help=text)
    return result


def say_ready() -> None:
    """In a role: notify the bench that it may continue."""
    print("ready", flush=True)


def report(role: str, result: Result) -> None:
    """In a role: print the one line that the bench reads."""
    text = json.dumps({"role": role, "cpu_s": round(time.process_time(), 3), **result}) + "\n"
    sys.stdout.flush()
    data = text.encode()
    while data:  # with PYTHONUNBUFFERED, print loses what a full pipe does not accept
        data = data[os.write(sys.stdout.fileno(), data) :]


def next_cue() -> asyncio.Event:
    """In a role: return an event that the bench's next cue sets. The bench must not send that cue before this call."""
    cued = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cued.set)
    return cued


def alternate(rounds: int, sides: dict[str, Callable[[], Result]]) -> list[dict[str, Result]]:
    """Run all sides `rounds` times, beginning with another side in each round, so that changes of the machine
    affect all alike."""
    results: list[dict[str, Result]] = []
    for number in range(rounds):
        first = number % len(sides)
        names = [*sides][first:] + [*sides][:first]
        load_1m = os.getloadavg()[0]
        done = {name: sides[name]() for name in names}
        results.append({**{name: done[name] for name in sides}, "machine": {"load_1m": load_1m}})
        print(f"round {number + 1} of {rounds}: {_short(results[-1])}", file=sys.stderr, flush=True)
    return results


def compare(
    rounds: list[dict[str, Result]],
    key: str,
    ratio: str = "ratio",
    *,
    side: str = "iris",
    other: str = "twin",
) -> Result:
    """Return medians and extremes of the figure `key`, and as `ratio` the median over the rounds of `side` / `other`.

    A round in which `other` is 0 has no ratio; without any ratio, the result is NaN.
    """
    ours = [r[side][key] for r in rounds]
    others = [r[other][key] for r in rounds]
    ratios = [our / them for our, them in zip(ours, others, strict=True) if them] or [math.nan]
    return {
        key: statistics.median(ours),
        f"{key}_min_max": [min(ours), max(ours)],
        f"{other}_{key}": statistics.median(others),
        f"{other}_{key}_min_max": [min(others), max(others)],
        ratio: round(statistics.median(ratios), 4),
        f"{ratio}_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
    }


async def stop_signal() -> None:
    """In a role: return when the bench stops it."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def new_histogram() -> Any:
    """Return an empty HdrHistogram: nanoseconds up to two minutes, 3 digits."""
    from hdrh.histogram import HdrHistogram

    return HdrHistogram(1, LONGEST_NS, 3)


def cpu_s(pid: int) -> float:
    """Return the processor seconds, user and system, that a running process has used; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


def descendants(pid: int) -> list[int]:
    """Return a process and all its running descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def machine_s() -> dict[str, float]:
    """Return the busy seconds of all processors since boot, and the seconds stolen by other virtual machines."""
    numbers = [
        int(word) / TICK for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ]
    user, nice, system, _, _, irq, soft_irq, stolen = numbers
    return {"busy": user + nice + system + irq + soft_irq, "stolen": stolen}


def peak_bytes(pid: int | str) -> int:
    """Return the most memory that a process has had resident since its start, or since it was reset."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else 0  # a process that is ending has none


def percentiles_us(samples_ns: Iterable[int]) -> Result:
    """Return p50, p90, p99, p99.9 and the maximum, in microseconds, by an HDR histogram of 3 digits."""
    histogram = new_histogram()
    for sample_ns in samples_ns:
        histogram.record_value(sample_ns)
    points = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p999_us": 99.9, "max_us": 100.0}
    value_at = histogram.get_value_at_percentile
    return {name: round(value_at(point) / 1000, 1) for name, point in points.items()}


def facts() -> Result:
    """Return the facts without which a figure means nothing: commit, processor, versions, load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD") or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_built": "profile-guided"
        if built_optimised()
        else "without profile-guided optimisation",
        "libc": " ".join(platform.libc_ver()),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "send_buffer_bytes": system_send_buffer(),
        "load_1m_5m_15m": [round(load, 2) for load in os.getloadavg()],
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def system_send_buffer() -> int:
    """Return the value of SO_SNDBUF that gives the system's default, because the kernel doubles the value that is
    set."""
    return int(Path("/proc/sys/net/core/wmem_default").read_text()) // 2


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(BENCH), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()  # "" outside a checkout


def _short(result: dict[str, Result]) -> str:
    keys = ("rate", "lost", "p50_us", "p99_us")
    sides = []
    for side, figures in result.items():
        if side == "machine":
            continue
        sides.append(" ".join([side, *(f"{k}={figures[k]:,.0f}" for k in keys if k in figures)]))
    return "; ".join(sides)
