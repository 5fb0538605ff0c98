"""The cost of a bridge: programs of another protocol through it, compared with the native client in one run.

    python bench/bridges.py                      # all cells
    python bench/bridges.py --cell iris1 --rounds 3 --seconds 2

Prints JSON. Each cell has requests of 256 bytes in a closed loop, one in flight (`p50_us`, `p99_us`), and
publications of 1 KiB as fast as the system allows, to one subscriber, which checks every number (`rate` received,
`lost`). Sides: `native`, and the cell's own, with both programs behind the bridge. `ratio_p50` and `ratio_rate` are
medians over the rounds of bridge / native.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

import harness
import uvloop
from harness import BENCH, IrisRelay, Result, Roles

import iris

NUMBER: Final = struct.Struct("<Q")
LAST: Final = (1 << 64) - 1
CLUSTER: Final = "bench-echo"
TOPIC: Final = "bench-topic"
REQUEST_BYTES: Final = 256
EVENT_BYTES: Final = 1024
TIMEOUT_S: Final = 5.0
WARM_S: Final = 0.2


def event(number: int) -> bytes:
    return NUMBER.pack(number) + bytes(EVENT_BYTES - NUMBER.size)


# -- the native client ---------------------------------------------------------------------------------------------


async def native_server() -> Result:
    service = iris.Service(CLUSTER)

    @service.on_request
    def echo(payload: bytes) -> bytes:
        return payload

    async with iris.connect() as client, client.serve(service):
        harness.say_ready()
        await harness.stop_signal()
    return {}


async def native_client(seconds: float) -> Result:
    samples_ns: list[int] = []
    payload = bytes(REQUEST_BYTES)
    async with iris.connect() as client:
        await client.wait_for_members(CLUSTER, 1, timeout=TIMEOUT_S)
        for limit_s, record in ((WARM_S, None), (seconds, samples_ns.append)):
            end_ns = time.perf_counter_ns() + int(limit_s * 1e9)
            while (begin_ns := time.perf_counter_ns()) < end_ns:
                assert await client.request(CLUSTER, payload, timeout=TIMEOUT_S) == payload
                if record is not None:
                    record(time.perf_counter_ns() - begin_ns)
    return harness.percentiles_us(samples_ns)


async def native_subscriber() -> Result:
    count = Count()
    async with (
        iris.connect() as client,
        client.subscribe(TOPIC, lambda message: count.take(message.payload)),
    ):
        harness.say_ready()
        while not count.ended:  # noqa: ASYNC110 - the callback is the hot path
            await asyncio.sleep(0.01)
    return count.result()


async def native_publisher(seconds: float) -> Result:
    async with iris.connect() as client:
        end_s = time.perf_counter() + seconds
        sent = 0
        while time.perf_counter() < end_s:
            for _ in range(100):
                await client.publish(TOPIC, event(sent))
                sent += 1
        await client.publish(TOPIC, event(LAST))
        await client.flush()
    return {"sent": sent}


class Count:
    """Counts arriving events, their gaps, and the time from the first to the last."""

    def __init__(self) -> None:
        self.events = self.lost = self._next = 0
        self.ended = False
        self._begin_s = self._end_s = 0.0

    def take(self, payload: bytes | memoryview) -> None:
        (number,) = NUMBER.unpack_from(payload)
        if number == LAST:
            self.ended = True
            return
        if not self.events:
            self._begin_s = time.perf_counter()
        self.lost += number - self._next
        self._next = number + 1
        self.events += 1
        self._end_s = time.perf_counter()

    def result(self) -> Result:
        spent_s = max(self._end_s - self._begin_s, 1e-9)
        return {"rate": self.events / spent_s, "events": self.events, "lost": self.lost}


# -- the first Iris, as its bindings speak: one blocking socket ------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def blob(data: bytes) -> bytes:
    return varint(len(data)) + data


def old_connect(port: int, cluster: str = "") -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(
        b"\x00" + blob(b"iris-client-magic") + blob(b"v1.0-draft2") + blob(cluster.encode())
    )
    welcome = b"\x00" + blob(b"iris-relay-magic") + blob(b"v1.0-draft2")
    assert exactly(link, len(welcome)) == welcome
    return link


def exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError("the bridge closed the connection")
        data += part
    return data


def old_close(link: socket.socket) -> None:
    link.sendall(b"\x02")
    while link.recv(65536):
        pass
    link.close()


def old_server(port: int) -> Result:
    link = old_connect(port, CLUSTER)
    harness.say_ready()
    head = blob(bytes(REQUEST_BYTES))  # always of the same length
    for number in itertools.count():
        id = varint(number)
        size = 1 + len(id) + len(head) + 2
        try:
            frame = exactly(link, size)
            assert frame.startswith(b"\x04" + id)
            link.sendall(b"\x05" + id + b"\x01" + head)
        except (EOFError, ConnectionError, InterruptedError):
            break
    return {}


def old_client(port: int, seconds: float) -> Result:
    link = old_connect(port)
    samples_ns: list[int] = []
    numbers = itertools.count()
    payload = bytes(REQUEST_BYTES)
    middle = blob(CLUSTER.encode()) + blob(payload) + varint(int(TIMEOUT_S * 1000))
    for limit_s, record in ((WARM_S, None), (seconds, samples_ns.append)):
        end_ns = time.perf_counter_ns() + int(limit_s * 1e9)
        while (begin_ns := time.perf_counter_ns()) < end_ns:
            id = varint(next(numbers))
            link.sendall(b"\x04" + id + middle)
            wanted = b"\x05" + id + b"\x00\x01" + blob(payload)
            assert exactly(link, len(wanted)) == wanted
            if record is not None:
                record(time.perf_counter_ns() - begin_ns)
    old_close(link)
    return harness.percentiles_us(samples_ns)


def old_subscriber(port: int) -> Result:
    link = old_connect(port)
    link.sendall(b"\x06" + blob(TOPIC.encode()))
    link.sendall(b"\x04\x00" + blob(b"bench-nobody") + blob(b"x") + varint(1000))
    exactly(link, 3)  # everything sent before this has been handled
    harness.say_ready()
    head = len(b"\x08" + blob(TOPIC.encode()) + varint(EVENT_BYTES))
    size = head + EVENT_BYTES
    count = Count()
    rest = b""
    while not count.ended:
        data = rest + link.recv(1 << 18)
        whole = len(data) - len(data) % size
        with memoryview(data) as view:
            for start in range(0, whole, size):
                count.take(view[start + head : start + head + 8])
        rest = data[whole:]
    old_close(link)
    return count.result()


def old_publisher(port: int, seconds: float) -> Result:
    link = old_connect(port)
    head = b"\x08" + blob(TOPIC.encode()) + varint(EVENT_BYTES)
    end_s = time.perf_counter() + seconds
    sent = 0
    while time.perf_counter() < end_s:
        for _ in range(100):
            link.sendall(head + event(sent))
            sent += 1
    link.sendall(head + event(LAST))
    old_close(link)
    return {"sent": sent}


# -- runs ------------------------------------------------------------------------------------------------------------


def native_run(seconds: float) -> Result:
    """Run requests and publications of the native client."""
    script = str(BENCH / "bridges.py")
    with Roles(2 * seconds + 60) as roles:
        relay = IrisRelay(roles)
        limit = f"--seconds={seconds}"
        server = roles.start("server", [script, "--role=native-server"], env=relay.env, ready=True)
        asked = roles.start(
            "client", [script, "--role=native-client", limit], env=relay.env
        ).result()
        server.result(stop=True)
        subscriber = roles.start(
            "subscriber", [script, "--role=native-subscriber"], env=relay.env, ready=True
        )
        sent = roles.start(
            "publisher", [script, "--role=native-publisher", limit], env=relay.env
        ).result()
        result = figures(asked, sent, subscriber.result())
        relay.stop()
        return result


def iris1_run(seconds: float) -> Result:
    """Run the same with programs of the first Iris through the bridge."""
    script = str(BENCH / "bridges.py")
    with Roles(2 * seconds + 60) as roles:
        relay = IrisRelay(roles)
        command = ["-m", "iris.cli", "bridge", "iris1", "--listen", "127.0.0.1:0"]
        bridge = roles.start("bridge", command, env=relay.env, reports=False)
        options = [f"--seconds={seconds}", f"--port={bridge_port(bridge)}"]

        def role(name: str, *, ready: bool = False) -> harness.Role:
            return roles.start(
                name, [script, f"--role=old-{name}", *options], env=relay.env, ready=ready
            )

        server = role("server", ready=True)
        asked = role("client").result()
        cpu_s = bridge.cpu_s()
        subscriber = role("subscriber", ready=True)
        sent = role("publisher").result()
        result = figures(asked, sent, subscriber.result())
        result["bridge_cpu_us_per_event"] = (
            (bridge.cpu_s() - cpu_s) * 1e6 / max(result["events"], 1)
        )
        bridge.process.terminate()  # this ends the server, too
        bridge.process.wait(harness.START_S)
        server.process.wait(harness.START_S)
        relay.stop()
        return result


def bridge_port(bridge: harness.Role) -> int:
    """Return the address on which the bridge listens, when it does."""
    until_s = time.monotonic() + harness.START_S
    while time.monotonic() < until_s and bridge.process.poll() is None:
        for line in bridge.written().splitlines():
            if line.startswith("{") and (said := json.loads(line))["event"] == "bridge.started":
                return int(said["listen"][0].rpartition(":")[2])
        time.sleep(0.01)
    raise bridge.failed("did not print the address on which it listens")


def figures(asked: Result, sent: Result, received: Result) -> Result:
    """Return the figures of one side."""
    lost = sent["sent"] - received["events"]
    return {
        "p50_us": asked["p50_us"],
        "p99_us": asked["p99_us"],
        "rate": round(received["rate"]),
        "events": received["events"],
        "lost": lost,
    }


CELLS: Final[dict[str, Callable[[float], Result]]] = {"iris1": iris1_run}
ROLES: Final[dict[str, Callable[[argparse.Namespace], Result]]] = {
    "native-server": lambda args: uvloop.run(native_server()),
    "native-client": lambda args: uvloop.run(native_client(args.seconds)),
    "native-subscriber": lambda args: uvloop.run(native_subscriber()),
    "native-publisher": lambda args: uvloop.run(native_publisher(args.seconds)),
    "old-server": lambda args: old_server(args.port),
    "old-client": lambda args: old_client(args.port, args.seconds),
    "old-subscriber": lambda args: old_subscriber(args.port),
    "old-publisher": lambda args: old_publisher(args.port, args.seconds),
}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--cell", choices=[*CELLS], action="append", help="default: all")
    parser.add_argument("--role", choices=[*ROLES], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(90)  # ends this role even if the bench is killed
        harness.report(args.role, ROLES[args.role](args))
        return
    chosen = {name: CELLS[name] for name in args.cell or CELLS}
    sides = {"native": native_run, **chosen}
    rounds = harness.alternate(
        args.rounds, {name: lambda run=run: run(args.seconds) for name, run in sides.items()}
    )  # fmt: skip
    cells: Result = {}
    for name in chosen:
        cells[name] = {
            **harness.compare(rounds, "p50_us", "ratio_p50", side=name, other="native"),
            **harness.compare(rounds, "rate", "ratio_rate", side=name, other="native"),
        }
    about = {"bench": "bridges", "options": {"seconds": args.seconds, "rounds": args.rounds}}
    print(
        json.dumps({**about, "facts": harness.facts(), "cells": cells, "rounds": rounds}, indent=1)
    )
    if any(result[side]["lost"] for result in rounds for side in sides):
        sys.exit("events were lost; do not use these rates")


if __name__ == "__main__":
    main()
