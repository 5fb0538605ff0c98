"""How long `iris VERB` takes from a shell, to its end: `python bench/startup.py [RUNS]`.

A relay with throw-away keys and a member run meanwhile. Prints JSON: for each verb the least and the median wall time,
and the least processor time, in milliseconds.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VERBS = (
    "--version",
    "--help",
    "request greeter world",
    "push greeter world",
    "publish news world",
    "members greeter",
    "status",
)
SERVICE = """
import iris
service = iris.Service("greeter")
@service.on_request
def greet(name: str) -> str:
    return f"hello, {name}"
@service.on_push
def note(name: str) -> None: ...
"""


def measure(command: list[str], environ: dict[str, str], runs: int) -> dict[str, float]:
    """Run a command `runs` times and return its times in milliseconds."""
    walls, processor = [], []
    for _ in range(runs):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "least_ms": round(min(walls) * 1000),
        "median_ms": round(statistics.median(walls) * 1000),
        "processor_ms": round(min(processor) * 1000),
    }


def main() -> None:
    """Start a relay and a member, measure every verb, and print the results."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    iris = [sys.executable, "-m", "iris.cli"]
    with tempfile.TemporaryDirectory(prefix="iris-bench-") as root:
        (Path(root) / "greetings.py").write_text(SERVICE)
        environ = {**os.environ, "XDG_RUNTIME_DIR": root, "XDG_CONFIG_HOME": root}
        started: list[subprocess.Popen[bytes]] = []
        try:
            for verb in (["relay", "--dev"], ["run", "greetings"]):
                started.append(
                    subprocess.Popen(
                        [*iris, *verb], env=environ, cwd=root, stderr=subprocess.DEVNULL
                    )
                )
                while not (Path(root) / "iris" / "relay.sock").exists():
                    time.sleep(0.05)
            while subprocess.run(
                [*iris, "members", "greeter"], env=environ, capture_output=True
            ).returncode:
                time.sleep(0.05)
            figures = {verb: measure([*iris, *verb.split()], environ, runs) for verb in VERBS}
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait()
    print(json.dumps({"python": sys.version.split()[0], "runs": runs, "verbs": figures}, indent=2))


if __name__ == "__main__":
    main()
