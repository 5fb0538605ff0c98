"""Compare two sites of one relay each, 40 ms of round trip apart, with bare TCP and TLS: `make bench-federation`.

    python bench/federation.py --quick                        # one round
    python bench/federation.py --cells tunnel --rounds 7
    python bench/federation.py --cells request --delay-ms 75  # one way

    client ── relay of eu ── TLS ── floor/wan.py: every byte 20 ms later ── TLS ── relay of us ── member

Prints Markdown; all measurements go to bench/results/federation.json. Exits 1 if a message was wrong or lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import harness
import roundtrip
import throughput
import uvloop
from certificates import make_certificates
from harness import BENCH, IrisRelay, Result, Role, Roles
from roles import exact_timer

import iris

RESULTS: Final = BENCH / "results"
SCRIPT: Final = str(BENCH / "federation.py")
WAN: Final = str(BENCH / "floor" / "wan.py")
TOPIC: Final = "bench.wan"
NUMBER: Final = throughput.NUMBER
PROBE: Final = throughput.PROBE
PROBE_S: Final = 0.05
REACH_S: Final = 10.0
SLICE_NS: Final = 50_000_000
"""Length of a slice in which the progress of a stream is recorded, here and in floor/wan.py."""
REQUEST_BYTES: Final = 256
MESSAGE_BYTES: Final = 1024
RATES: Final = (1_000, 20_000)
SETTLE_S: Final = 1.0
"""Time after which the traffic of a run's start has left the WAN."""
FULL_SHARE: Final = 0.8
"""A stream is at its full rate from the first slice that reaches this share of the later usual rate."""
MEGABYTE: Final = 1_000_000
CELLS: Final = ("request", "publish", "idle", "tunnel")


# -- roles: public names of iris only ------------------------------------------------------------------------


async def caller(seconds: float) -> Result:
    """Send one request after the other."""
    filler = bytes(REQUEST_BYTES - NUMBER.size)
    samples_ns: list[int] = []
    wrong = 0
    async with iris.connect() as client:
        await reach(lambda: client.request(roundtrip.CLUSTER, b"", timeout=REACH_S))
        end_ns = time.perf_counter_ns() + int(seconds * 1e9)
        while (begin_ns := time.perf_counter_ns()) < end_ns:
            payload = NUMBER.pack(len(samples_ns)) + filler
            wrong += await client.request(roundtrip.CLUSTER, payload, timeout=REACH_S) != payload
            samples_ns.append(time.perf_counter_ns() - begin_ns)
    return {"samples_ns": samples_ns, "wrong": wrong}


async def reach(attempt: Callable[[], Awaitable[object]]) -> None:
    """Return when an attempt finds a member: members of another site become known with a delay."""
    async with asyncio.timeout(REACH_S):
        while True:
            try:
                await attempt()
                return
            except iris.NoMembers:
                await asyncio.sleep(PROBE_S)


def topics(count: int) -> list[str]:
    return [f"{TOPIC}.{number}" for number in range(count)]


async def subscriber(expected: int, count: int) -> Result:
    """Receive from another site until all messages arrived, or the bench stops. Each of `count` topics has every
    `count`-th number."""
    received = wrong = 0
    following = dict(zip(topics(count), range(count), strict=True))
    probed = False
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)

    def take(message: iris.Message) -> None:
        nonlocal received, wrong, probed
        (number,) = NUMBER.unpack_from(message.payload)
        if number == PROBE:
            if not probed:
                probed = True
                harness.say_ready()
            return
        wrong += number != following[message.name]
        following[message.name] = number + count
        received += 1
        if received == expected:
            done.set()

    async with iris.connect() as client, client.subscribe(f"{TOPIC}.*", take):
        harness.say_ready()
        await done.wait()
    return {"received": received, "wrong": wrong}


async def publisher(rate: float, seconds: float, size: int, count: int) -> Result:
    """Publish `rate` times a second, each when it is due, to `count` topics in turn."""
    loop = asyncio.get_running_loop()
    # Random bytes, which cannot be compressed.
    noise = os.urandom(MEGABYTE)
    offsets = len(noise) - size
    named = topics(count)
    total, sent = int(rate * seconds), 0
    finished = asyncio.Event()
    async with iris.connect() as client:
        cued = harness.next_cue()
        while not cued.is_set():
            client.offer(named[0], NUMBER.pack(PROBE))
            await asyncio.sleep(PROBE_S)
        harness.say_ready()
        cued = harness.next_cue()
        await cued.wait()
        begin_ns = time.monotonic_ns() + 10_000_000

        def tick() -> None:
            nonlocal sent
            os.read(timer, 8)
            due = min(total, int((time.monotonic_ns() - begin_ns) * rate / 1e9) + 1)
            while sent < due:
                at = sent * size % offsets
                message = NUMBER.pack(sent) + noise[at + NUMBER.size : at + size]
                if not client.offer(named[sent % count], message):
                    return  # try again at the next tick; a refused message is not lost
                sent += 1
            if sent == total:
                finished.set()

        with exact_timer(begin_ns, int(1e9 / rate)) as timer:
            loop.add_reader(timer, tick)
            await finished.wait()
            loop.remove_reader(timer)
        spent_s = (time.monotonic_ns() - begin_ns) / 1e9
        harness.say_ready()
        await harness.stop_signal()
    return {"sent": sent, "spent_s": spent_s}


async def source(seconds: float, size: int) -> Result:
    """Send through one tunnel as fast as it accepts messages."""
    filler = bytes(size - NUMBER.size)

    async def nothing() -> None:
        async with client.tunnel(throughput.CLUSTER, timeout=REACH_S):
            pass

    async with iris.connect() as client:
        await reach(nothing)
        async with client.tunnel(throughput.CLUSTER, timeout=REACH_S) as tunnel:
            sent = 0
            begin_ns = time.monotonic_ns()
            end_ns = begin_ns + int(seconds * 1e9)
            while time.monotonic_ns() < end_ns:
                await tunnel.send(NUMBER.pack(sent) + filler)
                sent += 1
            await tunnel.finish()
            async for _ in tunnel:  # until the sink, having read all, closes its side
                raise AssertionError("the member sent a message, which this bench does not expect")
    return {"begin_ns": begin_ns, "sent": sent}


async def sink(size: int) -> Result:
    """Receive one tunnel and report its progress."""
    service = iris.Service(throughput.CLUSTER)
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    @service.on_tunnel
    async def take(tunnel: iris.Tunnel) -> None:
        received = wrong = begin_ns = 0
        slices: list[int] = []
        async for message in tunnel:
            now_ns = time.monotonic_ns()
            begin_ns = begin_ns or now_ns
            wrong += NUMBER.unpack_from(message)[0] != received or len(message) != size
            received += 1
            while len(slices) <= (now_ns - begin_ns) // SLICE_NS:
                slices.append(0)
            slices[-1] += len(message)
        if not received:
            return  # a probe by which the sender finds this member
        figures = {"received": received * size, "messages": received, "wrong": wrong}
        outcome.set_result({**figures, "end_ns": now_ns, "slices": slices})

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        return await outcome


ROLES: Final[dict[str, Callable[..., Any]]] = {
    "caller": caller,
    "subscriber": subscriber,
    "publisher": publisher,
    "source": source,
    "sink": sink,
}


# -- two sites -----------------------------------------------------------------------------------------------


class Sites:
    """A relay of `eu`, which dials, and one of `us`, with the WAN between them."""

    def __init__(self, roles: Roles, delay_s: float) -> None:
        from iris.keyfiles import create_site_key

        self.roles = roles
        files = {site: roles.directory / f"{site}.toml" for site in ("eu", "us")}
        pins = {site: create_site_key(path).fingerprint for site, path in files.items()}

        def start(site: str, *more: str) -> IrisRelay:
            arguments = ["--site", site, "--site-key", str(files[site]), *more]
            return IrisRelay(roles, arguments, links=True)

        accepts = ["--gateway", "tls://127.0.0.1:0", "--peer-site", f"eu=#{pins['eu']}"]
        self.us = start("us", *accepts)
        (listening,) = self.us.logged("gateways.listening")["addresses"]
        self.wan, port = wan(roles, int(listening.rpartition(":")[2]), delay_s)
        self.eu = start("eu", "--peer-site", f"us=tls://127.0.0.1:{port}#{pins['us']}")
        self.eu.logged("gateway.up")

    def role(self, name: str, relay: IrisRelay, *, ready: bool = False, **options: Any) -> Role:
        """Start one of this file's roles at a relay."""
        command = [SCRIPT, "--role", name, "--run", json.dumps(options)]
        return self.roles.start(name, command, env=relay.env, ready=ready)

    def stop(self) -> Result:
        """Stop both relays; return the processor seconds of the processes between sender and receiver."""
        wan_s = self.wan.cpu_s()
        return {"eu_cpu_s": self.eu.stop(), "us_cpu_s": self.us.stop(), "wan_cpu_s": wan_s}


def wan(roles: Roles, port: int, delay_s: float) -> tuple[Role, int]:
    """Start a WAN in front of a port; return its process and its own port."""
    options = json.dumps({"port": port, "delay_s": delay_s})
    proxy = roles.start("wan", [WAN, "proxy", options])
    return proxy, int(proxy.line())


def watched(run: Callable[[], Result]) -> Result:
    """Run a cell, and add how many of the machine's processors other programs used."""
    begin_s, busy_s, ours_s = time.monotonic(), harness.machine_s()["busy"], _ours_s()
    result = run()
    theirs_s = harness.machine_s()["busy"] - busy_s - (_ours_s() - ours_s)
    return {**result, "others_cpus": round(theirs_s / (time.monotonic() - begin_s), 2)}


def _ours_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def alternate(rounds: int, sides: dict[str, Callable[[], Result]]) -> list[dict[str, Result]]:
    """Run as the harness does, and record the processors that others used."""
    return harness.alternate(rounds, {name: partial(watched, run) for name, run in sides.items()})


def wan_bytes(relay: IrisRelay) -> Result:
    """Return the relay's counts of its connection to the other site: encrypted bytes, and its age."""
    (connection,) = relay.status()["gateways"]["connections"]
    return {key: connection[key] for key in ("in_bytes", "out_bytes", "since_s")}


def between(before: Result, after: Result) -> Result:
    return {key: after[key] - before[key] for key in before}


# -- runs ----------------------------------------------------------------------------------------------------


def request_run(args: argparse.Namespace, *, home: bool) -> Result:
    """Send requests to a member of the other site, or of the caller's own."""
    script = str(BENCH / "roundtrip.py")
    with Roles(args.seconds + 60) as roles:
        sites = Sites(roles, args.delay_s)
        there = sites.eu if home else sites.us
        served = roles.start("server", [script, "--role", "server"], env=there.env, ready=True)
        result = sites.role("caller", sites.eu, seconds=args.seconds).result()
        served.result(stop=True)
        return {**requested(result), **sites.stop()}


def request_twin(args: argparse.Namespace) -> Result:
    """Send bytes there and back over bare TCP: the least possible round trip."""
    with Roles(args.seconds + 60) as roles:
        server = roles.start("echo", [WAN, "echo", "{}"])
        _, port = wan(roles, int(server.line()), args.delay_s)
        options = {"port": port, "size": REQUEST_BYTES, "seconds": args.seconds}
        asker = roles.start("asker", [WAN, "asker", json.dumps(options)])
        return requested(asker.result())


def requested(result: Result) -> Result:
    samples_ns = result["samples_ns"]
    shares = harness.percentiles_us(samples_ns)
    return {**shares, "wrong": result["wrong"], "samples_ns": samples_ns}


def publish_run(
    args: argparse.Namespace, rate: float
) -> Result:  # fmt: skip
    """Publish to a subscriber of the other site, and count the bytes on the WAN."""
    with Roles(args.seconds + 60) as roles:
        sites = Sites(roles, args.delay_s)
        expected = int(rate * args.seconds)
        receiver = sites.role("subscriber", sites.us, ready=True, expected=expected, count=1)
        load = {"rate": rate, "seconds": args.seconds, "size": MESSAGE_BYTES, "count": 1}
        sender = sites.role("publisher", sites.eu, **load)
        receiver.wait_ready()  # a probe has arrived
        sender.cue()
        sender.wait_ready()  # the last probe has passed
        time.sleep(SETTLE_S)
        before = wan_bytes(sites.eu)
        sender.cue()
        sender.wait_ready()
        until_s = time.monotonic() + REACH_S
        while receiver.process.poll() is None and time.monotonic() < until_s:
            time.sleep(PROBE_S)
        after = wan_bytes(sites.eu)
        got = receiver.result(stop=True)
        sent = sender.result(stop=True)
        passed = between(before, after)
        count = max(1, got["received"])
        figures = {
            "bytes": (passed["in_bytes"] + passed["out_bytes"]) / count,
            "out_bytes": passed["out_bytes"] / count,
            "in_bytes": passed["in_bytes"] / count,
            "lost": sent["sent"] - got["received"],
            "wrong": got["wrong"],
            "sent_rate": sent["sent"] / sent["spent_s"],
        }
        return {**figures, **sites.stop()}


def idle_run(args: argparse.Namespace) -> Result:
    """Count the traffic of two idle sites, with a subscriber and a member at one and a client at the other."""
    with Roles(args.idle_seconds + 60) as roles:
        sites = Sites(roles, args.delay_s)
        script = [str(BENCH / "roundtrip.py"), "--role", "server"]
        served = roles.start("server", script, env=sites.us.env, ready=True)
        receiver = sites.role("subscriber", sites.us, ready=True, expected=1, count=1)
        load = {"rate": 1.0, "seconds": 1.0, "size": MESSAGE_BYTES, "count": 1}
        sender = sites.role("publisher", sites.eu, **load)
        receiver.wait_ready()
        sender.cue()
        sender.wait_ready()
        time.sleep(SETTLE_S)
        before = wan_bytes(sites.eu)
        time.sleep(args.idle_seconds)
        passed = between(before, wan_bytes(sites.eu))
        for role in (sender, receiver, served):
            role.process.terminate()
        minutes = passed["since_s"] / 60
        out, in_ = passed["out_bytes"] / minutes, passed["in_bytes"] / minutes
        return {"bytes": out + in_, "out_bytes": out, "in_bytes": in_, "seconds": passed["since_s"]}


def tunnel_run(args: argparse.Namespace) -> Result:
    """Send through a tunnel to a member of the other site."""
    with Roles(args.seconds + 60) as roles:
        sites = Sites(roles, args.delay_s)
        receiver = sites.role("sink", sites.us, ready=True, size=args.size)
        sender = sites.role("source", sites.eu, seconds=args.seconds, size=args.size)
        sent, received = sender.result(), receiver.result()
        figures = streamed(sent, received)
        lost = sent["sent"] - received["messages"]
        return {**figures, "lost": lost, "wrong": received["wrong"], **sites.stop()}


def stream_twin(args: argparse.Namespace, *, tls: bool) -> Result:
    """Send the same over one bare connection."""
    with Roles(args.seconds + 60) as roles:
        made = make_certificates(roles.directory)
        paths = {"ca": str(made.ca), "cert": str(made.cert), "key": str(made.key)}
        options = {**paths, "tls": tls, "seconds": args.seconds}
        receiver = roles.start("bare sink", [WAN, "sink", json.dumps(options)])
        proxy, port = wan(roles, int(receiver.line()), args.delay_s)
        line = [WAN, "source", json.dumps({**options, "port": port})]
        sender = roles.start("bare source", line)
        sent, received = sender.result(), receiver.result()
        lost = sent["sent"] - received["received"]
        return {**streamed(sent, received), "lost": lost, "wrong": 0, "wan_cpu_s": proxy.cpu_s()}


def streamed(sent: Result, received: Result) -> Result:
    """Return the figures of one stream: MB/s from the first call to the last receipt, and the time to its full rate."""
    slices = received["slices"]
    later = slices[len(slices) // 2 : -1] or slices
    usual = statistics.median(later)
    full = next(i for i, size in enumerate(slices) if size >= FULL_SHARE * usual)
    spent_ns = received["end_ns"] - sent["begin_ns"]
    return {
        "rate": received["received"] / spent_ns * 1e9 / MEGABYTE,
        "later_rate": usual / SLICE_NS * 1e9 / MEGABYTE,
        "full_after_ms": full * SLICE_NS / 1e6,
        "slices_mb_s": [round(size / SLICE_NS * 1e9 / MEGABYTE) for size in slices],
        "sender_cpu_s": sent["cpu_s"],
        "receiver_cpu_s": received["cpu_s"],
    }


# -- cells ---------------------------------------------------------------------------------------------------


def request(args: argparse.Namespace) -> Result:
    sides: dict[str, Callable[[], Result]] = {
        "across": partial(request_run, args, home=False),
        "home": partial(request_run, args, home=True),
        "twin": partial(request_twin, args),
    }
    rounds = alternate(args.rounds, sides)
    pooled: dict[str, list[int]] = {side: [] for side in sides}
    for done in rounds:
        for side in sides:
            pooled[side] += done[side].pop("samples_ns")
    summary: Result = {"others_cpus": others(rounds)}
    summary |= {side: harness.percentiles_us(samples) for side, samples in pooled.items()}
    for side, samples in pooled.items():
        summary[side]["requests"] = len(samples)
    for key in ("p50_us", "p99_us"):
        over = [done["across"][key] - done["twin"][key] for done in rounds]
        summary[f"over_{key}"] = round(statistics.median(over), 1)
        summary[f"over_{key}_min_max"] = [round(min(over), 1), round(max(over), 1)]
        summary[f"pooled_over_{key}"] = round(summary["across"][key] - summary["twin"][key], 1)
    return {**summary, "rounds": rounds}


def publish(args: argparse.Namespace) -> Result:
    return published(args, {f"{rate}/s": partial(publish_run, args, rate) for rate in RATES})


def published(args: argparse.Namespace, sides: dict[str, Callable[[], Result]]) -> Result:
    rounds = alternate(args.rounds, sides)
    keys = ("bytes", "out_bytes", "in_bytes", "eu_cpu_s", "us_cpu_s")
    medians = {
        side: {key: round(statistics.median(done[side][key] for done in rounds), 2) for key in keys}
        for side in sides
    }
    return {"others_cpus": others(rounds), **medians, "rounds": rounds}


def idle(args: argparse.Namespace) -> Result:
    return watched(partial(idle_run, args))


def tunnel(args: argparse.Namespace) -> Result:
    sides: dict[str, Callable[[], Result]] = {
        "iris": partial(tunnel_run, args),
        "tcp": partial(stream_twin, args, tls=False),
        "tls": partial(stream_twin, args, tls=True),
    }
    rounds = alternate(args.rounds, sides)
    summary: Result = {"others_cpus": others(rounds)}
    summary |= harness.compare(rounds, "rate", "ratio_tcp", other="tcp")
    summary |= harness.compare(rounds, "rate", "ratio_tls", other="tls")
    for key in ("later_rate", "full_after_ms"):
        summary[key] = statistics.median(done["iris"][key] for done in rounds)
    return {**summary, "rounds": rounds}


def others(rounds: list[dict[str, Result]]) -> float:
    """Return the median over all runs of the processors that others used."""
    return statistics.median(
        figures["others_cpus"] for done in rounds for figures in done.values() if "others_cpus" in figures
    )  # fmt: skip


def rows(name: str, result: Result) -> list[str]:
    """Return a cell's lines of the table: what, median, extremes, twin, wanted."""
    if name == "idle":
        split = f"{result['out_bytes']:,.0f} out, {result['in_bytes']:,.0f} in"
        return [f"| WAN bytes per idle minute | {result['bytes']:,.0f} ({split}) | | | |"]
    rounds = result["rounds"]
    if name == "request":
        across, twin, home = (result[side] for side in ("across", "twin", "home"))
        lines = []
        for key, title in (("p50_us", "p50"), ("p99_us", "p99")):
            low, high = (f"{value / 1000:.2f}" for value in result[f"over_{key}_min_max"])
            lines.append(
                f"| request 256 B across, {title}: above the round trip | {result[f'over_{key}'] / 1000:.2f} ms | {low} to {high} "
                f"| {across[key] / 1000:.2f} and {twin[key] / 1000:.2f} ms, all rounds | ≤ 2 ms |"
            )
        at_home = f"{home['p50_us']:,.0f} and {home['p99_us']:,.0f} µs"
        return [*lines, f"| the same at home, p50 and p99, all rounds | {at_home} | | | |"]
    if name == "publish":
        lines = []
        for side in (each for each in result if each.partition(",")[0].endswith("/s")):
            each = [done[side]["bytes"] for done in rounds]
            shown, spread = result[side], f"{min(each):,.0f} to {max(each):,.0f}"
            split = f"{shown['out_bytes']:,.0f} out, {shown['in_bytes']:,.0f} in"
            what = f"WAN bytes per message of {MESSAGE_BYTES}, {side}"
            lines.append(f"| {what} | {shown['bytes']:,.0f} ({split}) | {spread} | | |")
        return lines
    lines = []
    for other, title in (("tcp", "TCP"), ("tls", "TLS")):
        low, high = result["rate_min_max"]
        lines.append(
            f"| tunnel, MB/s; beside bare {title} | {result['rate']:,.0f} | {low:,.0f} to {high:,.0f} "
            f"| {result[f'{other}_rate']:,.0f}; ratio {result[f'ratio_{other}']:.2f} | ≥ 100 |"
        )
    full = f"{result['full_after_ms']:,.0f} ms after its first message, {result['later_rate']:,.0f} MB/s"
    return [*lines, f"| tunnel at its full rate | {full} | | | |"]


def faults(result: Result) -> list[str]:
    """Return the faults that make the figures of a cell invalid."""
    return [
        f"{side}: {figures.get('wrong', 0)} wrong, {figures.get('lost', 0)} lost"
        for done in result.get("rounds", ())
        for side, figures in done.items()
        if figures.get("wrong") or figures.get("lost")
    ]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=0, seconds=0.0)
    parser.add_argument("--quick", action="store_true", help="one round, 2 s a run")
    parser.add_argument("--cells", default=",".join(CELLS), metavar="NAME,…", help="default: all")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--size", type=int, default=throughput.TUNNEL_BYTES, help="tunnel messages")
    parser.add_argument("--idle-seconds", type=float, default=0.0, help="default: 60; quick: 20")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(200)  # ends this role even if the bench is killed
        harness.report(args.role, uvloop.run(ROLES[args.role](**json.loads(args.run))))
        return
    if unknown := {*args.cells.split(",")} - {*CELLS}:
        parser.error(
            f"--cells: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(CELLS)}"
        )
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.idle_seconds = args.idle_seconds or (20.0 if args.quick else 60.0)
    args.delay_s = args.delay_ms / 1000
    # One request at a time gives few a second: p99 needs a thousand over all rounds.
    seconds = {"request": 8.0, "publish": 3.0, "idle": 0.0, "tunnel": 3.0}
    cells: dict[str, Callable[[argparse.Namespace], Result]] = {
        "request": request, "publish": publish, "idle": idle, "tunnel": tunnel
    }  # fmt: skip
    document: Result = {
        "facts": harness.facts(),
        "options": {"rounds": args.rounds, "delay_ms": args.delay_ms, "size": args.size},
    }
    table = ["| | figure | rounds | twin | wanted |", "|---|---|---|---|---|"]
    wrong: list[str] = []
    given = args.seconds or (2.0 if args.quick else 0.0)
    args.output.mkdir(exist_ok=True, parents=True)
    for name in (cell for cell in CELLS if cell in args.cells.split(",")):
        args.seconds = given or seconds[name]
        result = cells[name](args)
        document[name] = {"seconds": args.seconds, **result}
        (args.output / "federation.json").write_text(json.dumps(document, indent=1) + "\n")
        table += rows(name, result)
        wrong += [f"{name}, {fault}" for fault in faults(result)]
    busy = ", ".join(
        f"{document[name]['others_cpus']:g} ({name})" for name in CELLS if name in document
    )
    print("\n".join(table))
    print(f"\n{args.rounds} rounds; processors that others had: {busy}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
