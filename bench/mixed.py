"""Measure requests of 256 bytes over a link, without and with large messages on the same link.

    python bench/mixed.py

Caller and publisher are at one relay, member and subscriber at the other. Requests: a closed loop, one in flight.
Prints JSON: `p50_us`, `p99_us` with the large messages, `alone_…` without them, `elsewhere_…` with the same
messages over a link of two other relays, which shows the cost of the processors alone; `ratio` (p99 / alone),
`ratio_elsewhere` (p99 / elsewhere), `p50_ratio`; and the large messages on the same link: `large_rate` received,
and the number lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import struct
import time

import harness
import uvloop
from harness import BENCH, Result, Roles, iris_relays
from roundtrip import figures

import iris

SCRIPT = str(BENCH / "mixed.py")
ROUNDTRIP = str(BENCH / "roundtrip.py")
TOPIC = "bench.large"
NUMBER = struct.Struct("<Q")
PROBE = (1 << 64) - 1
PROBE_S = 0.01
SIZE = 256


# -- roles: public names of iris only ------------------------------------------------------------------------


async def publisher(size: int, rate: float) -> Result:
    """Publish `rate` messages/s of `size` bytes, from the cue until stopped; before the cue, short ones."""
    filler = bytes(size - NUMBER.size)
    async with iris.connect() as client:
        stop = asyncio.create_task(harness.stop_signal())
        cued = harness.next_cue()
        while not cued.is_set():
            client.offer(TOPIC, NUMBER.pack(PROBE))
            await asyncio.sleep(PROBE_S)
        begin_s = time.perf_counter()
        for sent in itertools.count():
            wait_s = begin_s + sent / rate - time.perf_counter()
            if wait_s > 0:
                await asyncio.wait([stop], timeout=wait_s)
            if stop.done():
                break
            await client.publish(TOPIC, NUMBER.pack(sent) + filler)
        spent_s = time.perf_counter() - begin_s
        await client.flush()
    return {"sent": sent, "sent_rate": sent / spent_s}


async def subscriber() -> Result:
    numbers: list[int] = []
    begin_s = end_s = 0.0
    probed = False

    def take(message: iris.Message) -> None:
        nonlocal begin_s, end_s, probed
        (number,) = NUMBER.unpack_from(message.payload)
        if number == PROBE:
            if not probed:
                probed = True
                harness.say_ready()
            return
        numbers.append(number)
        end_s = time.perf_counter()
        begin_s = begin_s or end_s

    async with iris.connect() as client, client.subscribe(TOPIC, take):
        harness.say_ready()
        await harness.stop_signal()
    rate = (len(numbers) - 1) / (end_s - begin_s) if len(numbers) > 1 else 0.0
    wrong = sum(after <= before for before, after in itertools.pairwise(numbers))
    missing = numbers[-1] + 1 - len(numbers) if numbers else 0
    return {"received": len(numbers), "rate": rate, "lost": missing, "wrong": wrong}


# -- runs ----------------------------------------------------------------------------------------------------


def measure(seconds: float, rate: float, size: int, *, elsewhere: bool = False) -> Result:
    """Send requests for `seconds`, while `rate` messages/s of `size` bytes (0: none) are published over the same
    link."""
    with Roles(seconds + 60) as roles:
        here, there = iris_relays(roles, 2)
        relays = [there, here]
        served = roles.start("server", [ROUNDTRIP, "--role=server"], env=there.env, ready=True)
        large: Result = {}
        if rate:
            giver, taker = iris_relays(roles, 2) if elsewhere else (here, there)
            relays += [taker, giver] if elsewhere else []
            role = [SCRIPT, f"--rate={rate}", f"--bytes={size}", "--role"]
            taking = roles.start("subscriber", [*role, "subscriber"], env=taker.env, ready=True)
            giving = roles.start("publisher", [*role, "publisher"], env=giver.env)
            taking.wait_ready()  # a probe has arrived
            giving.cue()
        asking = [ROUNDTRIP, "--role=client", f"--size={SIZE}", f"--seconds={seconds}"]
        result = roles.start("client", asking, env=here.env).result()
        if rate:
            sent = giving.result(stop=True)
            large = {**taking.result(stop=True), "sent_rate": sent["sent_rate"]}
        server_cpu_s = served.result(stop=True)["cpu_s"]
        relay_cpu_s = sum(relay.stop() for relay in relays)
    return {**figures(result, relay_cpu_s, server_cpu_s), "large": large}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="large messages per second")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a large message")
    roles = ["publisher", "subscriber"]
    parser.add_argument("--role", choices=roles, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(90)  # ends this role even if the bench is killed
        publishing = args.role == "publisher"
        role = publisher(args.bytes, args.rate) if publishing else subscriber()
        harness.report(args.role, uvloop.run(role))
        return
    options = {name: value for name, value in vars(args).items() if name != "role"}
    about = {"bench": "mixed", "options": options, "facts": harness.facts()}
    sides = {
        "iris": lambda: measure(args.seconds, args.rate, args.bytes),
        "alone": lambda: measure(args.seconds, 0.0, args.bytes),
        "elsewhere": lambda: measure(args.seconds, args.rate, args.bytes, elsewhere=True),
    }
    rounds = harness.alternate(args.rounds, sides)
    summary = harness.compare(rounds, "p99_us", other="alone")
    summary |= harness.compare(rounds, "p99_us", "ratio_elsewhere", other="elsewhere")
    summary |= harness.compare(rounds, "p50_us", "p50_ratio", other="alone")
    large = [r["iris"]["large"] for r in rounds]
    summary["large_rate"] = [round(each["rate"], 1) for each in large]
    summary["large_lost"] = sum(each["lost"] for each in large)
    print(json.dumps({**about, **summary, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
