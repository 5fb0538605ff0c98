"""How relays balance requests over members: a slow member beside a fast one, and equal members spread unevenly.

    python bench/balance.py slow      # 2 relays, one fast and one slow member (50 ms, one at a time), 32 callers
    python bench/balance.py shares    # 4 equal members, 3 at one relay and 1 at the other, 16 callers at each

Prints JSON. `slow`: `RELAY_rate`, `alone_RELAY_rate` (without the slow member), `RELAY_ratio` of both and
`RELAY_errors` by name, where RELAY, at which the callers are, is that of the `fast` member, of the `slow` one, or
`both`. `shares`: each member's share of the requests, also with all callers at the relay with one member, and the
`largest` of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

import harness
import uvloop
from harness import BENCH, Result, Role, Roles, iris_relays

import iris

SCRIPT = str(BENCH / "balance.py")
CLUSTER = "bench-balance"
TIMEOUT_S = 5.0
ROLE_S = 150
SLOW_S = 0.05
CALLERS = 32
MEMBER_S = 0.002
MEMBERS = (0, 0, 0, 1)
"""Index of the relay of each of the equal members."""
CALLERS_AT = {"fast": (CALLERS, 0), "slow": (0, CALLERS), "both": (CALLERS // 2, CALLERS // 2)}
"""Callers at the fast member's relay and at the slow one's."""
SPREADS = {"16 callers at each": (16, 16), "32 callers at the relay with one member": (0, 32)}


@dataclass(frozen=True, slots=True)
class Serving:
    """A member: seconds that it works on a request (0: a plain function answers at once), and its concurrency."""

    relay: int
    busy_s: float
    concurrency: int


# -- roles: public names of iris only ------------------------------------------------------------------------


async def member(serving: Serving) -> Result:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    service = iris.Service(CLUSTER, limits=iris.Limits(concurrency=serving.concurrency))
    handled = 0

    if serving.busy_s:

        @service.on_request
        async def work(payload: bytes) -> bytes:
            nonlocal handled
            handled += 1
            await asyncio.sleep(serving.busy_s)
            return payload

    else:

        @service.on_request
        def echo(payload: bytes) -> bytes:
            nonlocal handled
            handled += 1
            return payload

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await stop.wait()
    return {"handled": handled}


async def callers(count: int, members: int, enough: int) -> Result:
    """Send requests from `count` tasks, from the cue until stopped. "ready" when all members are there, and after
    `enough` requests."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    samples_ns: list[int] = []
    errors: Counter[str] = Counter()
    async with iris.connect() as client:
        await client.wait_for_members(CLUSTER, members, timeout=TIMEOUT_S)

        async def work() -> None:
            while not stop.is_set():
                begin_ns = time.perf_counter_ns()
                try:
                    await client.request(CLUSTER, b"ask", timeout=TIMEOUT_S)
                except iris.RequestError as err:
                    errors[type(err).__name__] += 1
                    continue
                samples_ns.append(time.perf_counter_ns() - begin_ns)
                if len(samples_ns) == enough:
                    harness.say_ready()

        cued = harness.next_cue()
        harness.say_ready()
        await cued.wait()
        begin_ns = time.perf_counter_ns()
        await asyncio.gather(*(work() for _ in range(count)))
        spent_s = (time.perf_counter_ns() - begin_ns) / 1e9
    return {"samples_ns": samples_ns, "spent_s": spent_s, "errors": errors}


# -- runs ----------------------------------------------------------------------------------------------------


def start_all(
    roles: Roles, serving: list[Serving], counts: tuple[int, int], enough: int
) -> tuple[list[Role], list[Role]]:
    """Start two relays, members and callers, and cue the callers."""
    relays = iris_relays(roles, 2)
    members = [
        roles.start(
            "member",
            [SCRIPT, "--role=member", "--run", json.dumps(asdict(one))],
            env=relays[one.relay].env,
            ready=True,
        )
        for one in serving
    ]
    asking = []
    for relay, count in zip(relays, counts, strict=True):
        if count:
            run = json.dumps({"count": count, "members": len(serving), "enough": enough})
            command = [SCRIPT, "--role=callers", "--run", run]
            asking.append(roles.start("callers", command, env=relay.env, ready=True))
    for role in asking:
        role.cue()
    return members, asking


def stop_all(members: list[Role], asking: list[Role]) -> Result:
    """Stop callers, then members; return their results together."""
    for role in asking:
        role.process.send_signal(signal.SIGTERM)
    asked = [role.result() for role in asking]
    handled = [role.result(stop=True)["handled"] for role in members]
    errors: Counter[str] = Counter()
    for result in asked:
        errors.update(result["errors"])
    return {
        "rate": sum(len(result["samples_ns"]) / result["spent_s"] for result in asked),
        "requests": sum(len(result["samples_ns"]) for result in asked),
        "handled": handled,
        "errors": dict(errors),
        **harness.percentiles_us(ns for result in asked for ns in result["samples_ns"]),
    }


def fast_and_slow(counts: tuple[int, int], seconds: float, *, slow: bool) -> Result:
    """Send requests for `seconds` to a fast member at one relay and, with `slow`, a slow one at the other."""
    serving = [Serving(0, 0.0, 8)]
    if slow:
        serving.append(Serving(1, SLOW_S, 1))
    with Roles(seconds + 60) as roles:
        members, asking = start_all(roles, serving, counts, 0)
        time.sleep(seconds)
        return stop_all(members, asking)


def equal_members(counts: tuple[int, int], requests: int) -> Result:
    """Send at least `requests` requests to four equal members; each group of callers sends at least its part."""
    total = sum(counts)
    with Roles(60 + requests / 200) as roles:
        enough = -(-requests // sum(count > 0 for count in counts))
        serving = [Serving(relay, MEMBER_S, 4) for relay in MEMBERS]
        members, asking = start_all(roles, serving, counts, enough)
        for role in asking:
            role.wait_ready()
        result = stop_all(members, asking)
    everything = sum(result["handled"])
    shares = [round(count / everything, 4) for count in result["handled"]]
    return {"callers": total, "shares": shares, "largest": max(shares), **result}


def show(name: str, result: Result) -> None:
    """Print a run to stderr."""
    print(f"{name}: {json.dumps(result)}", file=sys.stderr, flush=True)


def run_slow(rounds: int, seconds: float) -> Result:
    """Run with the callers at each relay, alternating with and without the slow member."""
    summary: Result = {}
    results: Result = {}
    for relay, counts in CALLERS_AT.items():
        sides = {
            "iris": lambda counts=counts: fast_and_slow(counts, seconds, slow=True),
            "alone": lambda counts=counts: fast_and_slow(counts, seconds, slow=False),
        }
        done = harness.alternate(rounds, sides)
        results[relay] = done
        compared = harness.compare(done, "rate", other="alone")
        for key, value in compared.items():
            alone = key.startswith("alone_")
            name = f"alone_{relay}_{key.removeprefix('alone_')}" if alone else f"{relay}_{key}"
            summary[name] = value
        errors: Counter[str] = Counter()
        for one in done:
            errors.update(one["iris"]["errors"])
        summary[f"{relay}_errors"] = dict(errors)
    return {**summary, "rounds": results}


def run_shares(rounds: int, requests: int) -> Result:
    """Run both distributions of the callers `rounds` times."""
    results = []
    for _ in range(rounds):
        results.append({name: equal_members(counts, requests) for name, counts in SPREADS.items()})
        for name, result in results[-1].items():
            show(name, {"shares": result["shares"], "rate": round(result["rate"])})
    summary = {}
    for name in SPREADS:
        largest = [result[name]["largest"] for result in results]
        summary[name] = {
            "shares": [result[name]["shares"] for result in results],
            "largest": max(largest),
            "errors": [result[name]["errors"] for result in results],
        }
    return {"spreads": [*SPREADS], **summary, "rounds": results}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("what", choices=["slow", "shares"], nargs="?")
    parser.add_argument("--requests", type=int, default=10_000, help="of a run of shares, at least")
    parser.add_argument("--role", choices=["member", "callers"], help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(ROLE_S)  # ends this role even if the bench is killed
        options = json.loads(args.run)
        role = member(Serving(**options)) if args.role == "member" else callers(**options)
        harness.report(args.role, uvloop.run(role))
        return
    if args.what is None:
        parser.error("name the bench: slow or shares")
    about = {"bench": f"balance {args.what}", "facts": harness.facts()}
    if args.what == "slow":
        result = run_slow(args.rounds, args.seconds)
    else:
        result = run_shares(args.rounds, args.requests)
    print(json.dumps({**about, **result}, indent=1))


if __name__ == "__main__":
    main()
