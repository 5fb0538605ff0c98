"""What the benches share: roles as processes, a relay of their own, rounds that alternate with the twin, the machine's facts.

A role prints "ready" once it listens, if its bench waits for that, and one JSON line at its end. Every wait is bounded
by the one deadline of its `Roles`: when it passes, all its processes are killed, by their own process ids.
"""

from __future__ import annotations

import argparse
import json
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

from hdrh.histogram import HdrHistogram

from iris.keyfiles import create_keys

BENCH = Path(__file__).resolve().parent
PACKAGES = ("cryptography", "msgspec", "uvloop", "hdrhistogram")
START_S = 10.0
TICK = os.sysconf("SC_CLK_TCK")

Result = dict[str, Any]


class BenchError(Exception):
    """A role failed or ran over its deadline; the text has its last words."""


class Role:
    """One process of a run."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.name = name
        self.process = process
        self._errors = errors

    def wait_ready(self) -> None:
        """Return when the role has printed "ready"."""
        if self._line() != "ready":
            raise self.failed("did not get ready")

    def result(self, *, stop: bool = False) -> Result:
        """Return what the role reports at its end; with `stop`, ask it to end now."""
        if stop:
            self.process.send_signal(signal.SIGTERM)
        line = self._line()
        if self.process.wait() != 0:
            raise self.failed("failed")
        result: Result = json.loads(line)
        return result

    def cpu_s(self) -> float:
        """Return the processor seconds, user and system, that the running process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def failed(self, what: str) -> BenchError:
        """Return the error that tells of this role, with the end of what it wrote to stderr."""
        words = self._errors.read_text(errors="replace")[-2000:].strip() or "it wrote nothing"
        return BenchError(f"{self.name} {what} (exit {self.process.poll()}): {words}")

    def _line(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line.decode().strip()
        self.process.wait()
        raise self.failed("ended early, or was killed at the deadline")


class Roles:
    """The processes of one run and their private directory. When the block ends, or the deadline passes, none is left."""

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
        """Start `command` with this Python; with `ready`, return when it has said so.

        Without `reports` what it prints is kept with its errors: nobody would read the pipe.
        """
        errors = self.directory / f"{name}-{len(self._roles)}.stderr"
        with errors.open("wb") as stderr:
            stdout = subprocess.PIPE if reports else stderr
            line = [sys.executable, *command]
            process = subprocess.Popen(line, stdout=stdout, stderr=stderr, env=env)
        role = Role(name, process, errors)
        self._roles.append(role)
        if ready:
            role.wait_ready()
        return role

    def _kill(self) -> None:
        for role in self._roles:
            role.process.kill()  # does nothing to one that was waited for


class IrisRelay:
    """A real relay with new keys, everything of it inside the directory of `roles`."""

    def __init__(self, roles: Roles, arguments: Sequence[str] = ()) -> None:
        directory = roles.directory / "iris"
        directory.mkdir(mode=0o700)
        socket = directory / "relay.sock"
        create_keys(directory / "keys")
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("IRIS_")
        }
        self.env = {
            **inherited,
            "XDG_RUNTIME_DIR": str(directory),
            "IRIS_CONFIG": str(directory / "keys"),
            "IRIS_RELAY": str(socket),
        }
        command = ["-m", "relay", "--dev", "--socket", str(socket), *arguments]
        self.role = roles.start("relay", command, env=self.env, reports=False)
        until_s = time.monotonic() + START_S
        while not socket.exists():
            if self.role.process.poll() is not None or time.monotonic() > until_s:
                raise self.role.failed("did not open its socket")
            time.sleep(0.01)

    def stop(self) -> float:
        """End the relay as an operator would; return the processor seconds it used."""
        cpu_s = self.role.cpu_s()
        self.role.process.terminate()
        try:
            self.role.process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise self.role.failed(f"did not stop within {START_S} s") from None
        return cpu_s


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every bench takes."""
    style = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(description=doc, formatter_class=style)
    result.add_argument("--seconds", type=float, default=2.0, help="of sending, per run")
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--only", choices=["iris", "twin"], help="run one side, once")
    buffer = system_send_buffer()
    text = "SO_SNDBUF of the twin's sockets (default: as the system sets it)"
    result.add_argument("--send-buffer", type=int, default=buffer, metavar="BYTES", help=text)
    return result


def say_ready() -> None:
    """In a role: tell the bench that it may go on."""
    print("ready", flush=True)


def report(role: str, result: Result) -> None:
    """In a role: print the one line that the bench reads."""
    print(json.dumps({"role": role, "cpu_s": round(time.process_time(), 3), **result}), flush=True)


def alternate(
    rounds: int, iris: Callable[[], Result], twin: Callable[[], Result]
) -> list[dict[str, Result]]:
    """Run both `rounds` times, each first in every other round, so that drift of the machine meets both alike."""
    sides = {"iris": iris, "twin": twin}
    results: list[dict[str, Result]] = []
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        load_1m = os.getloadavg()[0]
        results.append({**{name: sides[name]() for name in names}, "machine": {"load_1m": load_1m}})
        print(f"round {number + 1} of {rounds}: {_short(results[-1])}", file=sys.stderr, flush=True)
    return results


def compare(rounds: list[dict[str, Result]], key: str, ratio: str = "ratio") -> Result:
    """Return medians and extremes of the figure `key`, and as `ratio` the median of the rounds' own iris / twin."""
    ours = [r["iris"][key] for r in rounds]
    twins = [r["twin"][key] for r in rounds]
    ratios = [our / twin for our, twin in zip(ours, twins, strict=True)]
    return {
        key: statistics.median(ours),
        f"{key}_min_max": [min(ours), max(ours)],
        f"twin_{key}": statistics.median(twins),
        f"twin_{key}_min_max": [min(twins), max(twins)],
        ratio: round(statistics.median(ratios), 4),
        f"{ratio}_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
    }


def percentiles_us(samples_ns: Iterable[int]) -> Result:
    """Return p50, p90, p99, p99.9 and the maximum, in microseconds, by an HDR histogram of 3 digits."""
    histogram = HdrHistogram(1, 60_000_000_000, 3)
    for sample_ns in samples_ns:
        histogram.record_value(sample_ns)
    points = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p999_us": 99.9, "max_us": 100.0}
    value_at = histogram.get_value_at_percentile
    return {name: round(value_at(point) / 1000, 1) for name, point in points.items()}


def facts() -> Result:
    """Return what a figure means nothing without: commit, processor, versions, load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD") or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "cpu": cpu[0] if cpu else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "send_buffer_bytes": system_send_buffer(),
        "load_1m_5m_15m": [round(load, 2) for load in os.getloadavg()],
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def system_send_buffer() -> int:
    """Return what SO_SNDBUF must be set to for the system's default: the kernel doubles what it is told."""
    return int(Path("/proc/sys/net/core/wmem_default").read_text()) // 2


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(BENCH), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()  # empty outside a checkout


def _short(result: dict[str, Result]) -> str:
    keys = ("rate", "lost", "p50_us", "p99_us")
    sides = []
    for side in ("iris", "twin"):
        figures = result[side]
        sides.append(" ".join([side, *(f"{k}={figures[k]:,.0f}" for k in keys if k in figures)]))
    return "; ".join(sides)
