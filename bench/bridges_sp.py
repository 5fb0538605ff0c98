"""The bridge to Scalability Protocols, compared with the native client and with bare pynng in one interleaved run.

    python bench/bridges_sp.py --seconds 1 --rounds 3

Requests of 256 bytes: `nng` is pynng's REQ to its REP; `bridge_in` that REQ to a member of Iris, `bridge_out` an
Iris caller to that REP; `iris` caller and member. p50 of one in flight, and the rate with 64. Publications of 1
KiB: the same four, PUB to SUB; `rate` is the highest of RATES at which nothing was lost. All on one host, SP over
ipc. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import harness
import pynng
import uvloop
from harness import BENCH, IrisRelay, Result, Role, Roles

import iris

SCRIPT = str(BENCH / "bridges_sp.py")
SIDES = {"iris": ("iris", "iris"), "bridge_in": ("nng", "iris"), "bridge_out": ("iris", "nng"), "nng": ("nng", "nng")}  # fmt: skip
"""The program that sends requests or publishes, and the one that answers or subscribes."""
RATES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
TOPIC = "bench.sp"
HEAD = TOPIC.encode() + b" "
NUMBER = struct.Struct("<Q")
PROBE = (1 << 64) - 1
SIZE, LARGE = 256, 1024
DEPTH = 64
TIMEOUT_S = 10.0
ROLE_S = 120


# -- roles ---------------------------------------------------------------------------------------------------


async def answer(kind: str, url: str) -> Result:
    if kind == "iris":
        service = iris.Service("bench-sp", limits=iris.Limits(concurrency=DEPTH))
        service.on_request(_echo)
        async with iris.connect() as client, client.serve(service):
            harness.say_ready()
            await harness.stop_signal()
        return {}
    with pynng.Rep0(listen=url) as socket:

        async def work(context: pynng.Context) -> None:
            while True:
                await context.asend(await context.arecv())

        contexts = [socket.new_context() for _ in range(DEPTH)]
        tasks = [asyncio.create_task(work(context)) for context in contexts]
        harness.say_ready()
        await harness.stop_signal()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for context in contexts:
            context.close()
    return {}


def _echo(payload: bytes) -> bytes:
    return payload


async def ask(kind: str, url: str, seconds: float) -> Result:
    payload = bytes(SIZE)
    if kind == "iris":
        async with iris.connect() as client:
            await client.wait_for_members("bench-sp", 1, timeout=TIMEOUT_S)
            requests = [lambda: client.request("bench-sp", payload, timeout=TIMEOUT_S)] * DEPTH
            return await _closed_loops(requests, seconds)
    with pynng.Req0(dial=url, recv_timeout=int(TIMEOUT_S * 1000)) as socket:
        contexts = [socket.new_context() for _ in range(DEPTH)]

        def request(context: pynng.Context) -> Callable[[], Awaitable[object]]:
            async def run() -> object:
                await context.asend(payload)
                return await context.arecv()

            return run

        try:
            return await _closed_loops([request(context) for context in contexts], seconds)
        finally:
            for context in contexts:
                context.close()


async def _closed_loops(requests: list[Callable[[], Awaitable[object]]], seconds: float) -> Result:
    samples_ns: list[int] = []

    async def loop(request: Callable[[], Awaitable[object]], until_s: float) -> None:
        while time.perf_counter() < until_s:
            begin_ns = time.perf_counter_ns()
            await request()
            samples_ns.append(time.perf_counter_ns() - begin_ns)

    await loop(requests[0], time.perf_counter() + 0.2)
    samples_ns.clear()
    await loop(requests[0], time.perf_counter() + seconds)
    p50_us = statistics.median(samples_ns) / 1000
    samples_ns.clear()
    until_s = time.perf_counter() + seconds
    await asyncio.gather(*(loop(request, until_s) for request in requests))
    return {"p50_us": round(p50_us, 1), "rate": round(len(samples_ns) / seconds)}


async def publish(kind: str, url: str, rate: float) -> Result:
    """Publish at a rate from the cue until stopped; before the cue, probes."""
    stop = asyncio.create_task(harness.stop_signal())
    cued = harness.next_cue()
    filler = bytes(LARGE - NUMBER.size)
    async with _Publisher(kind, url) as put:
        while not cued.is_set():
            put(NUMBER.pack(PROBE))
            await asyncio.sleep(0.01)
        begin_s = time.perf_counter()
        sent = 0
        while not stop.done():
            due = int((time.perf_counter() - begin_s) * rate)
            while sent < due and put(NUMBER.pack(sent) + filler):
                sent += 1
            await asyncio.wait([stop], timeout=0.001)
        spent_s = time.perf_counter() - begin_s
    return {"sent": sent, "rate": sent / spent_s}


class _Publisher:
    def __init__(self, kind: str, url: str) -> None:
        self._kind, self._url = kind, url
        self._socket: Any = None
        self._client: Any = None

    async def __aenter__(self) -> Callable[[bytes], bool]:
        if self._kind == "nng":
            self._socket = socket = pynng.Pub0(send_buffer_size=8192)
            # The bridge listens; without a bridge, this process does.
            if self._url.endswith("-self"):
                socket.listen(self._url)
            else:
                socket.dial(self._url, block=False)
            send = socket.send

            def put(data: bytes) -> bool:
                send(HEAD + data)
                return True

            return put
        self._client = await iris.connect().__aenter__()
        client = self._client
        return lambda data: client.offer(TOPIC, data)  # type: ignore[no-any-return]

    async def __aexit__(self, *error: object) -> None:
        if self._socket is not None:
            await asyncio.sleep(0.2)  # nng does not send what is queued at close
            self._socket.close()
        else:
            await self._client.flush()
            await self._client.close()


async def subscribe(kind: str, url: str) -> Result:
    stop = asyncio.create_task(harness.stop_signal())
    numbers: list[int] = []
    probed = False

    def take(data: bytes) -> None:
        nonlocal probed
        (number,) = NUMBER.unpack_from(data)
        if number != PROBE:
            numbers.append(number)
        elif not probed:
            probed = True
            harness.say_ready()

    if kind == "iris":
        async with iris.connect() as client, client.subscribe(TOPIC, lambda m: take(m.payload)):
            harness.say_ready()
            await stop
            await asyncio.sleep(0.3)
    else:
        with pynng.Sub0(topics=HEAD, recv_buffer_size=8192, recv_timeout=100) as socket:
            socket.dial(url, block=False)
            harness.say_ready()
            begin = len(HEAD)
            quiet = 0
            while quiet < 3:
                try:
                    for _ in range(500):
                        take(socket.recv()[begin:])
                    await asyncio.sleep(0)
                except pynng.Timeout:
                    await asyncio.sleep(0)
                    quiet = quiet + 1 if stop.done() else 0
    wrong = sum(after <= before for before, after in itertools.pairwise(numbers))
    return {"received": len(numbers), "wrong": wrong}


# -- runs ----------------------------------------------------------------------------------------------------


def start_bridge(roles: Roles, relay: IrisRelay, entry: str) -> Role:
    """Start a bridge with one entry; return when it is ready."""
    config = roles.directory / f"{len(list(roles.directory.iterdir()))}.toml"
    config.write_text(f"[[socket]]\n{entry}\n")
    command = ["-m", "iris.cli", "bridge", "sp", "--config", str(config)]
    role = roles.start("bridge", command, env=relay.env, reports=False)
    end_s = time.monotonic() + TIMEOUT_S
    while "bridge.ready" not in role.written():
        if role.process.poll() is not None or time.monotonic() > end_s:
            raise role.failed("did not get ready")
        time.sleep(0.01)
    return role


def request_run(side: str, seconds: float) -> Result:
    asker, answerer = SIDES[side]
    with Roles(ROLE_S) as roles:
        relay = IrisRelay(roles)
        front = f"ipc://{roles.directory}/front"
        back = f"ipc://{roles.directory}/back"
        common = [SCRIPT, f"--seconds={seconds}"]
        url = front if side == "nng" else back
        answering = roles.start("answerer", [*common, "--role=answer", f"--kind={answerer}", f"--url={url}"], env=relay.env, ready=True)  # fmt: skip
        if side == "bridge_in":
            start_bridge(roles, relay, f'protocol = "rep"\ncluster = "bench-sp"\nlisten = "{front}"')  # fmt: skip
        elif side == "bridge_out":
            start_bridge(roles, relay, f'protocol = "req"\ncluster = "bench-sp"\ndial = "{back}"')
        asking = roles.start("asker", [*common, "--role=ask", f"--kind={asker}", f"--url={front}"], env=relay.env)  # fmt: skip
        result = asking.result()
        answering.result(stop=True)
    return result


def publish_run(side: str, seconds: float, rate: float) -> Result:
    publisher, subscriber = SIDES[side]
    with Roles(ROLE_S) as roles:
        relay = IrisRelay(roles)
        own = f"ipc://{roles.directory}/own-self"
        bridged = f"ipc://{roles.directory}/bridge"
        if side == "bridge_in":
            start_bridge(roles, relay, f'protocol = "sub"\nlisten = "{bridged}"\nqueue_messages = 8192')  # fmt: skip
        elif side == "bridge_out":
            start_bridge(roles, relay, f'protocol = "pub"\ntopics = ["{TOPIC}"]\nlisten = "{bridged}"\nqueue_messages = 8192')  # fmt: skip
        url = own if side == "nng" else bridged
        common = [SCRIPT, f"--rate={rate}", f"--url={url}"]
        taking = roles.start("subscriber", [*common, "--role=subscribe", f"--kind={subscriber}"], env=relay.env, ready=True)  # fmt: skip
        giving = roles.start("publisher", [*common, "--role=publish", f"--kind={publisher}"], env=relay.env)  # fmt: skip
        taking.wait_ready()  # a probe has arrived
        giving.cue()
        time.sleep(seconds)
        sent = giving.result(stop=True)
        time.sleep(0.2)
        received = taking.result(stop=True)
    return {
        "offered": rate,
        "sent_rate": round(sent["rate"]),
        "lost": sent["sent"] - received["received"],
        "wrong": received["wrong"],
    }


def highest(side: str, seconds: float) -> Result:
    """Return the highest of RATES that was reached without loss, and the runs that were made to find it."""
    runs: list[Result] = []
    rate = 0
    for offered in RATES:
        runs.append(publish_run(side, seconds, offered))
        if runs[-1]["lost"] or runs[-1]["wrong"] or runs[-1]["sent_rate"] < 0.95 * offered:
            break
        rate = offered
    return {"publish_rate": rate, "runs": runs}


def main() -> None:
    parser = harness.parser(__doc__)
    for name in ("--role", "--kind", "--url"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(ROLE_S)  # ends this role even if the bench is killed
        role = {
            "answer": lambda: answer(args.kind, args.url),
            "ask": lambda: ask(args.kind, args.url, args.seconds),
            "publish": lambda: publish(args.kind, args.url, args.rate),
            "subscribe": lambda: subscribe(args.kind, args.url),
        }[args.role]()
        harness.report(args.role, uvloop.run(role))
        return
    sides: dict[str, Callable[[], Result]] = {
        side: (lambda side=side: {**request_run(side, args.seconds), **highest(side, args.seconds)})  # type: ignore[misc]
        for side in SIDES
    }
    rounds = harness.alternate(args.rounds, sides)
    summary = {
        f"{side}_{figure}": statistics.median(r[side][figure] for r in rounds)
        for side in SIDES
        for figure in ("p50_us", "rate", "publish_rate")
    }
    about = {"bench": "bridges_sp", "options": {"seconds": args.seconds, "rounds": args.rounds}}
    facts = {**harness.facts(), "pynng": pynng.__version__}
    print(json.dumps({**about, "facts": facts, **summary, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
