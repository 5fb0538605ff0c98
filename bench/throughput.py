"""Measure the highest rate without loss, of publishing or of a tunnel, through a relay, and that of the bare twin.

    python bench/throughput.py --mode callback
    python bench/throughput.py --subscribers 8
    python bench/throughput.py --topics 1000
    python bench/throughput.py --tunnel
    python bench/throughput.py --relays 2

Prints JSON: `rate` (messages/s delivered, with --tunnel MB/s), `twin_rate`, `ratio` (median of the rounds' ratios)
and the rounds; with two relays also `one_relay_rate` and `ratio_one_relay`. A relay does not slow down a publisher
for a slow subscriber: it drops messages and reports them. So the bench first offers as fast as it can and, if that
loses messages, searches for the highest rate without loss.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import harness
import uvloop
from harness import BENCH, Result, Roles, iris_relays

import iris
from iris.core.credit import WhenFull, WhenQueueFull

NUMBER = struct.Struct("<Q")
MARKER = (1 << 64) - 1
PROBE = MARKER - 1
MARKER_PAUSE_S = 0.05
PROBE_PAUSE_S = 0.01
SUBSCRIBE_S = 10.0
TURN_MESSAGES = 256
"""Messages offered between two turns of the loop, by Iris and by the twin."""
TICK_S = 0.002
SEARCH_TRIES = 5
CLOSE_ENOUGH = 1.05
TUNNEL_BYTES = 65_536
CLUSTER = "bench-sink"
VERB = "how Iris publishes: offer, and publish what is refused; or publish everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one run, passed to its roles as JSON."""

    mode: str
    verb: str
    subscribers: int
    topics: int
    size: int
    seconds: float
    tunnel: bool
    unbundled: bool
    """True if the twin seals every message singly, because no topic gets two in one turn."""
    send_buffer: int
    relays: int
    """1, or 2 with senders at one relay and receivers at the other."""
    wait: bool = False
    """Whether the publisher waits for its subscribers."""
    rate: float = 0.0
    """Messages/s to offer; 0 for full speed."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        size = args.size or (TUNNEL_BYTES if args.tunnel else 1024)
        return cls(
            mode=args.mode,
            verb=args.verb,
            subscribers=args.subscribers,
            topics=args.topics,
            size=size,
            seconds=args.seconds,
            tunnel=args.tunnel,
            unbundled=args.topics >= TURN_MESSAGES,
            send_buffer=args.send_buffer,
            relays=args.relays,
            wait=args.wait,
        )

    def json(self, **changes: Any) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, **changes})


# -- roles: public names of iris only ------------------------------------------------------------------------


class Check:
    """Count the messages of one subscriber, and check that each topic's numbers arrive in order without a gap."""

    def __init__(self, topics: int) -> None:
        self.received = 0
        self.wrong = 0
        self.end_ns = 0
        self.sent = 0
        self.probed = False
        self.done = asyncio.Event()
        self._expected = list(range(topics))

    def message(self, message: iris.Message) -> None:
        (number,) = NUMBER.unpack_from(message.payload)
        if number == MARKER:
            if not self.end_ns:
                self.end_ns = time.monotonic_ns()
                (self.sent,) = NUMBER.unpack_from(message.payload, NUMBER.size)
                self.done.set()
            return
        if number == PROBE:
            if not self.probed:
                self.probed = True
                harness.say_ready()
            return
        expected = self._expected
        topic = number % len(expected)
        if number != expected[topic]:
            self.wrong += 1
        expected[topic] = number + len(expected)
        self.received += 1

    def result(self) -> Result:
        lost = self.sent - self.received
        return {"received": self.received, "lost": lost, "wrong": self.wrong, "end_ns": self.end_ns}


async def subscriber(options: Options) -> Result:
    check = Check(options.topics)
    when_full: WhenQueueFull = "wait" if options.wait else "drop-new"
    async with iris.connect() as client:
        if options.mode == "callback":
            async with client.subscribe("bench.*", check.message, when_full=when_full):
                harness.say_ready()
                await check.done.wait()
        else:
            take = check.message
            async with client.subscribe("bench.*", when_full=when_full) as messages:
                harness.say_ready()
                async for message in messages:
                    take(message)
                    if check.end_ns:
                        break
    return check.result()


async def publisher(options: Options) -> Result:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    topics = [f"bench.{number}" for number in range(options.topics)]
    filler = bytes(options.size - NUMBER.size)
    async with iris.connect() as client:
        publish = client.publish
        offer = client.offer if options.verb == "offer" else None
        when_full: WhenFull = "wait" if options.wait else "drop"

        async def send(first: int, after: int) -> None:
            for number in range(first, after):
                topic = topics[number % len(topics)]
                payload = NUMBER.pack(number) + filler
                if offer is None or not offer(topic, payload, when_full=when_full):
                    await publish(topic, payload, when_full=when_full)

        # The local relay knows a subscription at once, another relay a moment later.
        cued = harness.next_cue()
        while not cued.is_set():
            client.offer(topics[0], NUMBER.pack(PROBE))
            await asyncio.sleep(PROBE_PAUSE_S)
        sent = 0
        begin_ns = time.monotonic_ns()
        while (spent_s := (time.monotonic_ns() - begin_ns) / 1e9) < options.seconds:
            if options.rate:
                due = min(int(spent_s * options.rate), sent + TURN_MESSAGES)
                await send(sent, due)
                behind = due == sent + TURN_MESSAGES
                sent = due
                await asyncio.sleep(0 if behind else TICK_S - spent_s % TICK_S)
            else:
                await send(sent, sent + TURN_MESSAGES)
                sent += TURN_MESSAGES
                await asyncio.sleep(0)
        end_ns = time.monotonic_ns()
        await asyncio.sleep(0)  # one turn, so that the marker follows the bundle of every topic
        marker = NUMBER.pack(MARKER) + NUMBER.pack(sent)
        # The marker may be dropped, too, so it is repeated until the bench stops this role.
        while not stop.is_set():
            client.offer(topics[0], marker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MARKER_PAUSE_S):
                    await stop.wait()
    return {"begin_ns": begin_ns, "sent": sent, "offered_rate": sent / ((end_ns - begin_ns) / 1e9)}


async def sink(options: Options) -> Result:
    service = iris.Service(CLUSTER)
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    @service.on_tunnel
    async def take(tunnel: iris.Tunnel) -> None:
        received = wrong = 0
        async for message in tunnel:
            wrong += NUMBER.unpack_from(message)[0] != received or len(message) != options.size
            received += 1
        outcome.set_result({"received": received, "wrong": wrong, "end_ns": time.monotonic_ns()})

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        return await outcome


async def source(options: Options) -> Result:
    filler = bytes(options.size - NUMBER.size)
    async with iris.connect() as client:
        await client.wait_for_members(CLUSTER, 1, timeout=SUBSCRIBE_S)
        async with client.tunnel(CLUSTER, timeout=SUBSCRIBE_S) as tunnel:
            sent = 0
            begin_ns = time.monotonic_ns()
            end_ns = begin_ns + int(options.seconds * 1e9)
            while time.monotonic_ns() < end_ns:
                await tunnel.send(NUMBER.pack(sent) + filler)
                sent += 1
            await tunnel.finish()
            async for _ in tunnel:  # until the sink, having read all, closes its side
                raise AssertionError("the member sent a message, which this bench does not expect")
    return {"begin_ns": begin_ns, "sent": sent}


ROLES = {"subscriber": subscriber, "publisher": publisher, "sink": sink, "source": source}


# -- runs ----------------------------------------------------------------------------------------------------


def iris_publish(options: Options, rate: float) -> Result:
    """Offer `rate` messages/s (0: full speed) once, with new processes; return the numbers delivered and lost."""
    script = str(BENCH / "throughput.py")
    run = options.json(rate=rate)
    with Roles(options.seconds + 60) as roles:
        relays = iris_relays(roles, options.relays)
        command = [script, "--run", run, "--role"]
        receivers = [
            roles.start("subscriber", [*command, "subscriber"], env=relays[-1].env, ready=True)
            for _ in range(options.subscribers)
        ]
        sender = roles.start("publisher", [*command, "publisher"], env=relays[0].env)
        for role in receivers:
            role.wait_ready()  # a probe has arrived
        sender.cue()
        received = [role.result() for role in receivers]
        sent = sender.result(stop=True)
        relays_cpu_s = [relay.stop() for relay in reversed(relays)]
    figures = delivered(sent, received)
    return {
        **figures,
        "offered_rate": sent["offered_rate"],
        "relay_cpu_s": sum(relays_cpu_s),
        "relays_cpu_s": relays_cpu_s[::-1],
    }


def delivered(sent: Result, received: list[Result]) -> Result:
    """Return the figures of one run: messages/s between the first call and the last receipt, over all subscribers."""
    total = sum(r["received"] for r in received)
    spent_s = (max(r["end_ns"] for r in received) - sent["begin_ns"]) / 1e9
    return {
        "rate": total / spent_s,
        "sent": sent["sent"],
        "received": total,
        "lost": sent["sent"] * len(received) - total,
        "wrong": sum(r["wrong"] for r in received),
        "sender_cpu_s": sent["cpu_s"],
        "receiver_cpu_s": max(r["cpu_s"] for r in received),
    }


def search(run: Callable[[float], Result], share: float) -> Result:
    """Return the run with the highest offered rate that lost nothing, and all tries.

    `share` is the number of deliveries per message. The first guess is the rate that a lossy run delivered to each
    subscriber.
    """
    tries = [run(0.0)]
    best: Result | None = tries[0] if not tries[0]["lost"] else None
    low, high = 0.0, tries[0]["offered_rate"]
    guess = tries[0]["rate"] / share
    while tries[0]["lost"] and len(tries) <= SEARCH_TRIES:
        if low and high / low <= CLOSE_ENOUGH:
            break
        guess = min(guess, high * 0.97)
        result = run(guess)
        tries.append(result)
        if result["lost"]:
            high = guess
            guess = (low + high) / 2 if low else guess * 0.85
        else:
            low = guess
            if best is None or result["rate"] > best["rate"]:
                best = result
            guess = (low + high) / 2
    keys = ("offered_rate", "rate", "lost", "wrong")
    brief = [{key: result[key] for key in keys} for result in tries]
    nothing = {"rate": 0.0, "lost": min(result["lost"] for result in tries), "wrong": 0}
    return {**(best or nothing), "tries": brief}


def iris_tunnel(options: Options) -> Result:
    """Send through one Iris tunnel for a while; `rate` is MB/s."""
    script = str(BENCH / "throughput.py")
    with Roles(options.seconds + 60) as roles:
        relays = iris_relays(roles, options.relays)
        command = [script, "--run", options.json(), "--role"]
        receiver = roles.start("sink", [*command, "sink"], env=relays[-1].env, ready=True)
        sender = roles.start("source", [*command, "source"], env=relays[0].env)
        figures = delivered(sender.result(), [receiver.result()])
        relays_cpu_s = [relay.stop() for relay in reversed(relays)][::-1]
    figures = {**figures, "relay_cpu_s": sum(relays_cpu_s), "relays_cpu_s": relays_cpu_s}
    return in_megabytes(figures, options.size)


def twin_publish(options: Options) -> Result:
    """Run the bare twin once."""
    script = str(BENCH / "floor" / "publish.py")
    with Roles(options.seconds + 60) as roles:
        run = options.json(path=str(roles.directory / "twin"), sndbuf=options.send_buffer)
        relay = roles.start("relay", [script, "relay", run], ready=True)
        receivers = [
            roles.start("subscriber", [script, "subscriber", run], ready=True)
            for _ in range(options.subscribers)
        ]
        sent = roles.start("publisher", [script, "publisher", run]).result()
        received = [role.result() for role in receivers]
        return {**delivered(sent, received), "relay_cpu_s": relay.result(stop=True)["cpu_s"]}


def twin_tunnel(options: Options) -> Result:
    """Run the bare twin of a tunnel once; `rate` is MB/s."""
    script = str(BENCH / "floor" / "tunnel.py")
    with Roles(options.seconds + 60) as roles:
        run = options.json(path=str(roles.directory / "twin"), sndbuf=options.send_buffer)
        relay = roles.start("relay", [script, "relay", run], ready=True)
        receiver = roles.start("receiver", [script, "receiver", run], ready=True)
        sent = roles.start("sender", [script, "sender", run]).result()
        figures = delivered(sent, [receiver.result(stop=True)])
        relay_cpu_s = relay.result(stop=True)["cpu_s"]
    return {**in_megabytes(figures, options.size), "relay_cpu_s": relay_cpu_s}


def twin_pair(options: Options) -> Result:
    """Run the bare twin of a direct tunnel once; `rate` is MB/s."""
    script = str(BENCH / "floor" / "pair.py")
    with Roles(options.seconds + 60) as roles:
        run = options.json(path=str(roles.directory / "twin"), sndbuf=options.send_buffer)
        receiver = roles.start("receiver", [script, "receiver", run], ready=True)
        sent = roles.start("sender", [script, "sender", run]).result()
        return in_megabytes(delivered(sent, [receiver.result()]), options.size)


def in_megabytes(figures: Result, size: int) -> Result:
    """Return `figures` with messages of `size` bytes per second turned into MB/s."""
    return {**figures, "message_rate": figures["rate"], "rate": figures["rate"] * size / 1e6}


def main() -> None:
    parser = harness.twin_parser(__doc__)
    parser.add_argument("--mode", choices=["callback", "async-for"], default="callback")
    parser.add_argument("--verb", choices=["offer", "publish"], default="offer", help=VERB)
    parser.add_argument("--subscribers", type=int, default=1)
    parser.add_argument("--topics", type=int, default=1)
    parser.add_argument("--size", type=int, default=0, help="bytes (1024; with --tunnel 65536)")
    parser.add_argument("--tunnel", action="store_true", help="one tunnel; rates are MB/s")
    parser.add_argument(
        "--wait", action="store_true", help="the publisher waits for its subscribers"
    )
    parser.add_argument(
        "--direct", action="store_true", help="with --tunnel: the twin has no relay, either"
    )
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(90)  # ends this role even if the bench is killed
        harness.report(args.role, uvloop.run(ROLES[args.role](Options(**json.loads(args.run)))))
        return
    options = Options.of(args)

    def run_iris(relays: int = options.relays) -> Result:
        these = replace(options, relays=relays)
        if these.tunnel:
            return iris_tunnel(these)
        return search(lambda rate: iris_publish(these, rate), these.subscribers)

    def run_twin() -> Result:
        if not options.tunnel:
            return twin_publish(options)
        return twin_pair(options) if args.direct else twin_tunnel(options)

    about = {
        "bench": "throughput",
        "unit": "MB/s" if options.tunnel else "messages/s",
        "options": json.loads(options.json()),
        "facts": harness.facts(),
    }
    if args.only:
        result = run_iris() if args.only == "iris" else run_twin()
        print(json.dumps({**about, args.only: result}, indent=1))
        return
    sides = {"iris": run_iris, "twin": run_twin}
    if options.relays == 2:
        sides["one_relay"] = lambda: run_iris(1)
    rounds = harness.alternate(args.rounds, sides)
    summary = harness.compare(rounds, "rate")
    if options.relays == 2:
        summary |= harness.compare(rounds, "rate", "ratio_one_relay", other="one_relay")
    print(json.dumps({**about, **summary, "rounds": rounds}, indent=1))
    if any(r[side]["wrong"] or r["twin"]["lost"] for r in rounds for side in sides):
        sys.exit(
            "messages were wrong or out of order, or the twin lost some; do not use these figures"
        )


if __name__ == "__main__":
    main()
