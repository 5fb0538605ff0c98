"""Measure request and reply of 256 bytes through a relay, and the bare twin.

    python bench/roundtrip.py --inflight 1
    python bench/roundtrip.py --inflight 64
    python bench/roundtrip.py --relays 2

Prints JSON. One in flight, a closed loop: `p50_us`, `p99_us`, `twin_p50_us`, `twin_p99_us`, and `ratio` of the p50
(below 1 is faster than the twin). More in flight, each a task that awaits its reply: `rate`, `twin_rate`, and
`ratio` of the rates. Two relays, caller and member at one each: also `one_relay_…` and `ratio_one_relay`
(`p99_ratio_one_relay`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import struct
import sys
import time
from collections.abc import Callable

import harness
import uvloop
from harness import BENCH, Result, Roles, iris_relays

import iris

NUMBER = struct.Struct("<Q")
CLUSTER = "bench-echo"
TIMEOUT_S = 5.0
WARM_S = 0.1


# -- roles: public names of iris only ------------------------------------------------------------------------


async def server() -> Result:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    service = iris.Service(CLUSTER)

    @service.on_request
    def echo(payload: bytes) -> bytes:
        return payload

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await stop.wait()
    return {}


async def client(size: int, seconds: float, inflight: int) -> Result:
    numbers = itertools.count()
    filler = bytes(size - NUMBER.size)
    samples_ns: list[int] = []
    wrong = 0
    async with iris.connect() as session:
        await session.wait_for_members(CLUSTER, 1, timeout=TIMEOUT_S)

        async def work(end_ns: int, record: Callable[[int], object]) -> None:
            nonlocal wrong
            while (begin_ns := time.perf_counter_ns()) < end_ns:
                payload = NUMBER.pack(next(numbers)) + filler
                wrong += await session.request(CLUSTER, payload, timeout=TIMEOUT_S) != payload
                record(time.perf_counter_ns() - begin_ns)

        # Warm up before the measurement: aliases, sealers, first allocations.
        await work(time.perf_counter_ns() + int(WARM_S * 1e9), id)
        begin_ns = time.perf_counter_ns()
        end_ns = begin_ns + int(seconds * 1e9)
        await asyncio.gather(*(work(end_ns, samples_ns.append) for _ in range(inflight)))
        spent_s = (time.perf_counter_ns() - begin_ns) / 1e9
    return {"samples_ns": samples_ns, "spent_s": spent_s, "wrong": wrong}


# -- runs ----------------------------------------------------------------------------------------------------


def iris_run(args: argparse.Namespace, relays: int) -> Result:
    """Run Iris once, with new processes."""
    script = str(BENCH / "roundtrip.py")
    sizes = [f"--size={args.size}", f"--seconds={args.seconds}", f"--inflight={args.inflight}"]
    with Roles(args.seconds + 60) as roles:
        started = iris_relays(roles, relays)
        here, there = started[0].env, started[-1].env
        served = roles.start("server", [script, "--role", "server"], env=there, ready=True)
        result = roles.start("client", [script, "--role", "client", *sizes], env=here).result()
        server_cpu_s = served.result(stop=True)["cpu_s"]
        return figures(result, sum(relay.stop() for relay in reversed(started)), server_cpu_s)


def twin_run(args: argparse.Namespace) -> Result:
    """Run the bare twin once."""
    script = str(BENCH / "floor" / "request.py")
    with Roles(args.seconds + 60) as roles:
        options = {"size": args.size, "seconds": args.seconds, "inflight": args.inflight}
        sockets = {"path": str(roles.directory / "twin"), "sndbuf": args.send_buffer}
        run = json.dumps({**options, **sockets})
        relay = roles.start("relay", [script, "relay", run], ready=True)
        served = roles.start("server", [script, "server", run], ready=True)
        result = roles.start("client", [script, "client", run]).result()
        server_cpu_s = served.result(stop=True)["cpu_s"]
        return figures(result, relay.result(stop=True)["cpu_s"], server_cpu_s)


def figures(result: Result, relay_cpu_s: float, server_cpu_s: float) -> Result:
    """Return rate and percentiles of one run."""
    samples_ns = result["samples_ns"]
    return {
        "rate": len(samples_ns) / result["spent_s"],
        **harness.percentiles_us(samples_ns),
        "requests": len(samples_ns),
        "wrong": result["wrong"],
        "client_cpu_s": result["cpu_s"],
        "relay_cpu_s": relay_cpu_s,
        "server_cpu_s": server_cpu_s,
    }


def main() -> None:
    parser = harness.twin_parser(__doc__)
    parser.add_argument("--inflight", type=int, default=1)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--role", choices=["server", "client"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(90)  # ends this role even if the bench is killed
        role = server() if args.role == "server" else client(args.size, args.seconds, args.inflight)
        harness.report(args.role, uvloop.run(role))
        return
    options = {name: value for name, value in vars(args).items() if name != "role"}
    about = {"bench": "roundtrip", "options": options, "facts": harness.facts()}
    if args.only:
        result = iris_run(args, args.relays) if args.only == "iris" else twin_run(args)
        print(json.dumps({**about, args.only: result}, indent=1))
        return
    sides = {"iris": lambda: iris_run(args, args.relays), "twin": lambda: twin_run(args)}
    if args.relays == 2:
        sides["one_relay"] = lambda: iris_run(args, 1)
    rounds = harness.alternate(args.rounds, sides)
    summary: Result = {}
    keys = {"p50_us": "", "p99_us": "p99_"} if args.inflight == 1 else {"rate": ""}
    for key, prefix in keys.items():
        summary |= harness.compare(rounds, key, f"{prefix}ratio")
        if args.relays == 2:
            ratio = f"{prefix}ratio_one_relay"
            summary |= harness.compare(rounds, key, ratio, other="one_relay")
    print(json.dumps({**about, **summary, "rounds": rounds}, indent=1))
    if any(r[side]["wrong"] for r in rounds for side in sides):
        sys.exit("replies were wrong; do not use these figures")


if __name__ == "__main__":
    main()
