"""Count the instructions that a message costs its sender, relay and receiver together, with valgrind's callgrind.

    python bench/instructions.py
    python bench/instructions.py --only request,publish --against ../before/.venv/bin/python

The three run in one process over a Unix socket, so that counts hardly depend on the machine or on what else it does.
Starts and connections are not counted, nor are threads beside the event loop. Prints JSON: instructions per message,
and with `--against` those of the Iris that another interpreter imports, and the `ratio` to them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import uvloop

import iris
from relay.config import RelayConfig
from relay.daemon import Relay

CLUSTER: Final = "bench-echo"
TOPIC: Final = "bench.topic"
STREAM: Final = "bench-log"
TIMEOUT_S: Final = 300.0
BURST: Final = 64
PAYLOAD: Final = bytes(256)
RECORD: Final = bytes(1024)
SLOWER: Final = 100
"""Valgrind slows a relay at most by this factor. Connections wait for no turn that they would not need otherwise."""
MARK: Final = "Py_SetRecursionLimit"
"""A function of the interpreter that only `mark` calls: valgrind begins a new count there."""
TOTALS: Final = re.compile(r"^totals: (\d+)", re.MULTILINE)


# -- loads: public names of iris only --------------------------------------------------------------------------


def plain(payload: bytes) -> bytes:
    return payload


async def coroutine(payload: bytes) -> bytes:
    return payload


async def lone(client: iris.Client, count: int) -> None:
    """Send requests one after the other."""
    for _ in range(count):
        await client.request(CLUSTER, PAYLOAD, timeout=TIMEOUT_S)


async def together(client: iris.Client, count: int) -> None:
    """Send requests from `BURST` tasks."""
    await asyncio.gather(*(lone(client, count // BURST) for _ in range(BURST)))


async def pushes(client: iris.Client, count: int) -> None:
    """Push from `BURST` tasks."""

    async def push() -> None:
        for _ in range(count // BURST):
            await client.push(CLUSTER, PAYLOAD, timeout=TIMEOUT_S)
            await asyncio.sleep(0)

    await asyncio.gather(*(push() for _ in range(BURST)))
    await client.flush()


async def publish(client: iris.Client, count: int) -> None:
    """Publish `BURST` messages in a turn, to one subscriber."""
    for _ in range(count // BURST):
        for _ in range(BURST):
            await client.publish(TOPIC, RECORD)
        await asyncio.sleep(0)
    await client.request(CLUSTER, PAYLOAD, timeout=TIMEOUT_S)  # the subscriber has all before it


async def append(client: iris.Client, count: int) -> None:
    """Append `BURST` messages in a turn, to a stream with one partition."""
    await client.streams.create(STREAM)
    for _ in range(count // BURST):
        await asyncio.gather(*(client.streams.append(STREAM, RECORD) for _ in range(BURST)))


async def consume(client: iris.Client, count: int) -> None:
    """Append as `append`, then consume all messages, and acknowledge each of them."""
    await append(client, count)
    async with client.streams.consumer(STREAM, "bench") as work:
        left = count
        async for message in work:
            work.ack(message)
            left -= 1
            if not left:
                break


async def read(client: iris.Client, count: int) -> None:
    """Append as `append`, then read as many messages from the first on."""
    await append(client, count)
    async with client.streams.read(STREAM, start="first") as messages:
        left = count
        async for _ in messages:
            left -= 1
            if not left:
                break


Load = Callable[[iris.Client, int], Awaitable[None]]
LOADS: Final[dict[str, tuple[Load, Callable[[bytes], object], int]]] = {
    "request": (lone, plain, 1_000),
    "request of a coroutine handler": (lone, coroutine, 1_000),
    "64 requests": (together, plain, 40 * BURST),
    "64 requests of a coroutine handler": (together, coroutine, 40 * BURST),
    "push": (pushes, plain, 40 * BURST),
    "publish": (publish, plain, 400 * BURST),
    "append": (append, plain, 100 * BURST),
    "append and consume": (consume, plain, 100 * BURST),
    "append and read": (read, plain, 100 * BURST),
}
"""Name -> the load, the handler of the member, messages."""


async def run(names: list[str]) -> None:
    """Run loads one after the other, each with a relay and connections of its own."""
    if importlib.util.find_spec("relay.net.turns"):
        turns = importlib.import_module("relay.net.turns")
        turns.SHARE_NS *= SLOWER
    for name in names:
        load, handler, count = LOADS[name]
        service = iris.Service(CLUSTER)
        service.on_request(handler)
        service.on_push(handler)
        with tempfile.TemporaryDirectory(prefix="iris-bench-") as root:
            relay = Relay(RelayConfig(socket_path=Path(root) / "relay", dev=True))
            await relay.start()
            store = (
                await start_store(Path(root), relay) if load in (append, consume, read) else None
            )
            keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
            config = iris.ClientConfig(relay=relay.config.socket_path)
            member, caller = (iris.connect(keyring=keyring, config=config) for _ in range(2))
            async with member, member.serve(service), caller, member.subscribe(TOPIC, id):
                await load(caller, 4 * BURST)  # addresses become known, and caches are filled
                gc.collect()
                gc.freeze()  # or a full collection would cost what the program has loaded
                mark()
                await load(caller, count)
                mark()
            if store is not None:
                store.cancel()
                await asyncio.gather(store, return_exceptions=True)
            await relay.stop()


async def start_store(root: Path, relay: Relay) -> asyncio.Task[None]:
    """Run a store of the relay in this process; its disk writes are in threads, which are not counted."""
    from relay.store.process import StoreProcess  # needs the extra `store`, and only this load does

    loop = asyncio.get_running_loop()
    directory = root / "data"
    directory.mkdir(mode=0o700)
    store = StoreProcess(
        directory, lambda made: loop.create_unix_connection(made, str(relay.config.socket_path))
    )
    store.open()
    task = loop.create_task(store.run())
    await store.up.wait()
    return task


# -- counting --------------------------------------------------------------------------------------------------


def mark() -> None:
    """Have valgrind write what it has counted since the last mark."""
    sys.setrecursionlimit(sys.getrecursionlimit())


def instructions(python: str, names: list[str]) -> list[int]:
    """Return the instructions of a message of each load, in the main thread of one process."""
    with tempfile.TemporaryDirectory(prefix="iris-callgrind-") as root:
        command = [
            "valgrind", "--tool=callgrind", "--separate-threads=yes", f"--dump-before={MARK}",
            f"--callgrind-out-file={root}/out", python, __file__, "--run", ",".join(names),
        ]  # fmt: skip
        environ = {**os.environ, "PYTHONHASHSEED": "0", "IRIS_CONFIG_HOME": root}
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            sys.exit(f"the run failed (exit {done.returncode}): {done.stderr[-2000:]}")
        parts = sorted(Path(root).glob("out.*-01"))
        assert len(parts) == 2 * len(names), f"{MARK} is called by something else, too"
        counts = []
        for number, name in enumerate(names):
            totals = TOTALS.search(Path(root, f"out.{2 * number + 2}-01").read_text())
            assert totals is not None
            counts.append(round(int(totals[1]) / LOADS[name][2]))
        return counts


def main() -> None:
    """Measure each load, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"loads, of: {', '.join(LOADS)}")
    parser.add_argument("--against", metavar="PYTHON", help="an interpreter with another Iris")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        uvloop.run(run(args.run.split(",")))
        return
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed (Debian: apt-get install valgrind)")
    names = args.only.split(",") if args.only else list(LOADS)
    if unknown := [name for name in names if name not in LOADS]:
        parser.error(f"--only: unknown load {unknown[0]!r}; loads are {', '.join(LOADS)}")
    counts = instructions(sys.executable, names)
    results: dict[str, dict[str, float]] = {
        name: {"instructions": count} for name, count in zip(names, counts, strict=True)
    }
    if args.against:
        for result, before in zip(results.values(), instructions(args.against, names), strict=True):
            result |= {"before": before, "ratio": round(result["instructions"] / before, 4)}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
