"""Append to eight partitions on two stores beside one partition on one store: `python bench/partitions.py`.

    python bench/partitions.py --quick
    python bench/partitions.py --rounds 5 --seconds 10 --writers 4

Each round runs both, in an order that alternates, with a relay and stores of its own, and measures how fast the disk
writes and syncs. Writers are processes that append 1,000 messages of 1 KiB at a time, eight times at once. Prints JSON:
messages per second, the processor time of each process for a message, in µs, and the ratio of the medians. More stores
help only if there are processors for them: compare `processors` with the number of busy processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import harness
from harness import Result, Roles
from streams.iris_ import _once_up
from streams.roles import disk

import iris
from iris.keyfiles import create_keys

STREAM: Final = "bench"
SIZE: Final = 1024
BATCH: Final = 1000
INFLIGHT: Final = 8
TIMEOUT_S: Final = 60.0
SIDES: Final = {"1 partition, 1 store": (1, 1), "8 partitions, 2 stores": (8, 2)}


async def create(socket: Path, partitions: int, stores: int) -> None:
    """Create the stream when all stores are there, and check where its partitions are."""
    async with iris.connect(socket) as client:
        while True:
            await _once_up(lambda: client.streams.create(STREAM, partitions=partitions))
            infos = await client.streams.partitions(STREAM)
            if len({info.store for info in infos}) == stores:
                return
            await client.streams.delete(STREAM)
            await asyncio.sleep(0.1)


async def write(socket: Path, seconds: float) -> None:
    """Append for some seconds from the cue on, and report."""
    messages = [bytes(SIZE)] * BATCH
    acknowledged = 0
    async with iris.connect(socket) as client:
        await client.streams.append_many(STREAM, messages, timeout=TIMEOUT_S)
        cued = harness.next_cue()
        harness.say_ready()
        await cued.wait()
        begin_s, cpu_s = time.monotonic(), time.process_time()

        async def work() -> None:
            nonlocal acknowledged
            while time.monotonic() - begin_s < seconds:
                offsets = await client.streams.append_many(STREAM, messages, timeout=TIMEOUT_S)
                acknowledged += len(offsets)

        await asyncio.gather(*(work() for _ in range(INFLIGHT)))
        spent_s = time.monotonic() - begin_s
        cpu_s = time.process_time() - cpu_s
    harness.report(
        "writer", {"acknowledged": acknowledged, "spent_s": spent_s, "cpu_s": round(cpu_s, 2)}
    )


def run(partitions: int, stores: int, args: argparse.Namespace) -> Result:
    """Run one side once."""
    with Roles(args.seconds * 4 + 60) as roles:
        root = roles.directory
        create_keys(root / "keys")
        (root / "run").mkdir(mode=0o700)
        socket = root / "run" / "relay.sock"
        env = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(root / "run"),
            "IRIS_CONFIG": str(root / "keys"),
        }
        command = [sys.executable, "-m", "relay", "--socket", str(socket), "--no-mdns", "--bind=127.0.0.1", "--port=0"]  # fmt: skip
        servers = {"relay": roles.run("relay", command, env=env)}
        while not socket.exists():
            time.sleep(0.02)
        for number in range(1, stores + 1):
            more = [sys.executable, "-m", "relay.store", "--data", str(root / f"data{number}"), "--relay", str(socket)]  # fmt: skip
            servers[f"store {number}"] = roles.run(f"store {number}", more, env=env)
        os.environ |= {"IRIS_CONFIG": env["IRIS_CONFIG"]}
        asyncio.run(create(socket, partitions, stores))
        writers = [
            roles.start(f"writer {number}", [__file__, "--write", str(socket), "--seconds", str(args.seconds)], env=env)
            for number in range(args.writers)
        ]  # fmt: skip
        for writer in writers:
            writer.wait_ready()
        before = {name: role.cpu_s() for name, role in servers.items()}
        for writer in writers:
            writer.cue()
        done = [writer.result() for writer in writers]
        processes = {name: round(role.cpu_s() - before[name], 2) for name, role in servers.items()}
        rate = sum(one["acknowledged"] / one["spent_s"] for one in done)
        count = sum(one["acknowledged"] for one in done)
        processes |= {f"writer {n}": one["cpu_s"] for n, one in enumerate(done)}
        return {
            "rate": round(rate),
            "mb_s": round(rate * SIZE / 1e6, 1),
            "us_per_message": {
                name: round(1e6 * cpu_s / count, 2) for name, cpu_s in processes.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of 1 s")
    parser.add_argument("--rounds", type=int, default=0, help="default: 3")
    parser.add_argument("--seconds", type=float, default=0.0, help="of each side; default: 5")
    parser.add_argument("--writers", type=int, default=2, help="processes that append; default: 2")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (1.0 if args.quick else 5.0)
    if args.write is not None:
        asyncio.run(write(args.write, args.seconds))
        return
    rounds = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as there:
            one: Result = {"disk_mb_s": round(disk(Path(there), 1.0)["mb_s"])}
        for name in list(SIDES)[:: -1 if number % 2 else 1]:
            one[name] = run(*SIDES[name], args)
            print(f"round {number + 1} {name}: {one[name]['rate']:,} messages/s", file=sys.stderr)
        rounds.append(one)
    medians = {name: statistics.median(one[name]["rate"] for one in rounds) for name in SIDES}
    first, second = medians.values()
    facts = {**harness.facts(), "processors": os.cpu_count()}
    print(json.dumps({"facts": facts, "rounds": rounds, "medians": medians, "ratio": round(second / first, 3)}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
