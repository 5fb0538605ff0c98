"""Measure sessions of browsers beside python-socketio (asyncio, Redis) and NATS over WebSocket: `make bench-web`.

    python bench/web.py --quick                       # one round, 2,000 idle sessions: about two minutes
    python bench/web.py --only iris,socketio --cells fan-1000 --rounds 5

    idle-N   N sessions that only hold a subscription: memory of the server for each, and what one publication to all
             of them takes, from its begin until the last one has it
    fan-N    N subscribers: messages of 128 bytes as fast as all of them get them, `IN_FLIGHT` deliveries on their way;
             then one message every `PAUSE_S`: the time until each subscriber has it

Iris is sealed: one publisher seals, the relay passes on what it cannot read. The others read what they pass on. All
sessions are thin clients, which count messages without opening or parsing them (websessions.py). In each round every
system runs once, with servers of its own, in an order that alternates. Results go to bench/results/: web.json and
web.md. The exit code is 1 if anything failed or was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import harness
import uvloop
from certificates import make_certificates
from harness import BENCH, BenchError, IrisRelay, Result, Role, Roles
from websessions import SIZE, SPARE_DESCRIPTORS, TOPIC, Shared, allow_descriptors

RESULTS: Final = BENCH / "results"
SYSTEMS: Final = ("iris", "socketio", "nats")
TLS: Final = "iris-wss"
"""Iris over wss://, on request: a session's TLS costs the relay memory."""
NAMES: Final = {
    "iris": "Iris, sealed",
    TLS: "Iris, sealed, over TLS",
    "socketio": "python-socketio with Redis",
    "nats": "NATS",
}
CELLS: Final = ("idle-10000", "fan-100", "fan-1000")
PROCESSES: Final = 2
IN_FLIGHT: Final = 25_600
"""Deliveries that may be on their way."""
PAUSE_S: Final = 0.1
SINGLES: Final = 5
PACED: Final = 50
POLL_S: Final = 0.0005
START_S: Final = 20.0
CELL_S: Final = 400.0


# -- the publisher, a role -----------------------------------------------------------------------------------


Publish = Callable[[], Awaitable[None]]


async def connect(given: Result) -> tuple[Publish, Callable[[], Awaitable[None]]]:
    """Return what publishes one message of `SIZE` bytes, and what ends the connection."""
    if given["system"] == "socketio":
        import socketio

        manager = socketio.AsyncRedisManager(given["redis"], write_only=True)
        text = "x" * SIZE

        async def emit() -> None:
            await manager.emit("m", text, room=TOPIC)

        async def leave() -> None:
            await manager.redis.aclose()

        return emit, leave
    payload = b"x" * SIZE
    if given["system"] == "nats":
        import nats

        peer = await nats.connect(given["server"])
        return lambda: peer.publish(TOPIC, payload), peer.close
    import iris

    client = iris.connect()
    await client.__aenter__()
    return lambda: client.publish(TOPIC, payload), client.close


class Publisher:
    def __init__(self, given: Result, publish: Publish) -> None:
        self._shared = Shared(given["shared"])
        self._sessions: int = given["sessions"]
        self._publish = publish
        self._limit_s: float = given["limit_s"]
        self.published = 0

    async def send(self) -> None:
        self._shared.sent_ns[self.published] = time.monotonic_ns()
        self.published += 1
        await self._publish()

    def behind(self) -> float:
        """Return how many messages are on their way, on average over the sessions."""
        return self.published - sum(self._shared.deliveries) / self._sessions

    async def until(self, behind: int) -> None:
        """Return when no more than `behind` messages are on their way; raises TimeoutError."""
        async with asyncio.timeout(self._limit_s):
            while self.behind() > behind:  # noqa: ASYNC110 - other processes count
                await asyncio.sleep(POLL_S)

    async def fast(self, seconds: float) -> Result:
        begun_s, before = time.monotonic(), self.published
        while time.monotonic() < begun_s + seconds:
            while self.behind() * self._sessions < IN_FLIGHT:
                await self.send()
            await asyncio.sleep(POLL_S)
        await self.until(0)
        spent_s = time.monotonic() - begun_s
        return {"messages_s": (self.published - before) / spent_s}

    async def paced(self, count: int) -> None:
        for _ in range(count):
            await self.send()
            await asyncio.sleep(PAUSE_S)
        await self.until(0)

    async def singles(self, count: int) -> Result:
        spent = []
        for _ in range(count):
            begun_s = time.monotonic()
            await self.send()
            await self.until(0)
            spent.append(time.monotonic() - begun_s)
        return {"all_have_it_s": spent}


async def publish(given: Result) -> Result:
    """In a role: do what the cell asks for."""
    send, leave = await connect(given)
    publisher = Publisher(given, send)
    try:
        # Routes are ready when a first message arrives at all.
        await publisher.send()
        await publisher.until(0)
        figures: Result = {}
        if given["do"] == "singles":
            figures = await publisher.singles(SINGLES)
        elif given["do"] == "paced":
            await publisher.paced(PACED)
        else:
            figures = await publisher.fast(given["seconds"])
        return {"published": publisher.published, **figures}
    finally:
        await leave()


# -- servers -------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """What sessions and publishers connect to."""

    url: str
    pid: int
    publishers: Result
    env: dict[str, str] | None = None
    key: str = ""
    ca: str = ""
    """Path of the certificate of the authority that signed the server's; "": without TLS."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def listening(role: Role, port: int) -> None:
    """Return when something listens at the port."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and role.process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise role.failed(f"does not listen at port {port}")


def serve(system: str, roles: Roles, sessions: int) -> Server:
    """Start the servers of a system."""
    if system in ("iris", TLS):
        config = roles.directory / "relay.toml"
        config.write_text(f"max_sessions = {2 * sessions + 100}\n")
        listen, ca = ["--listen", "ws://127.0.0.1:0"], ""
        if system == TLS:
            made = make_certificates(roles.directory)
            listen = ["--listen", "wss://127.0.0.1:0", "--wss-cert", str(made.cert), "--wss-key", str(made.key)]  # fmt: skip
            ca = str(made.ca)
        relay = IrisRelay(roles, [*listen, "--config", str(config)])
        (url,) = relay.logged("web.listening")["addresses"]
        from iris.keyfiles import load_keys

        (key,) = load_keys(relay.env).for_topic(TOPIC)
        return Server(url, relay.role.process.pid, {}, relay.env, key.reveal(), ca)
    port, other = free_port(), free_port()
    if system == "nats":
        config = roles.directory / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{other}"\nwebsocket {{ listen: "127.0.0.1:{port}", no_tls: true }}\n'
        )
        beside = Path(sys.executable).with_name("nats-server")
        role = roles.run("nats-server", [str(beside), "-c", str(config)])
        listening(role, port)
        return Server(f"ws://127.0.0.1:{port}/", role.process.pid, {"server": f"nats://127.0.0.1:{other}"})  # fmt: skip
    redis = roles.run(
        "redis-server", ["redis-server", "--port", str(other), "--bind", "127.0.0.1", "--save", "", "--dir", str(roles.directory)],
    )  # fmt: skip
    listening(redis, other)
    address = f"redis://127.0.0.1:{other}/0"
    role = roles.start(
        "socketio", [str(BENCH / "websocketio.py"), "--port", str(port), "--redis", address], reports=False
    )  # fmt: skip
    listening(role, port)
    url = f"ws://127.0.0.1:{port}/socket.io/?EIO=4&transport=websocket"
    return Server(url, role.process.pid, {"redis": address})


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


# -- cells ---------------------------------------------------------------------------------------------------


@contextmanager
def opened(
    system: str, sessions: int, *, delays: bool = False
) -> Iterator[tuple[Roles, Server, Result, list[Result]]]:
    """Run servers and sessions. What the sessions counted is in the list after the block."""
    with Roles(CELL_S) as roles:
        server = serve(system, roles, sessions)
        before = resident_bytes(server.pid)
        shared = Shared.create(roles.directory / "shared")
        share = {"system": system, "url": server.url, "shared": str(shared), "limit_s": CELL_S, "key": server.key, "ca": server.ca}  # fmt: skip
        held = []
        for slot in range(PROCESSES):
            count = sessions // PROCESSES + (slot < sessions % PROCESSES)
            given = {**share, "slot": slot, "count": count, "delays": delays}
            command = [str(BENCH / "websessions.py"), json.dumps(given)]
            held.append(roles.start(f"sessions {slot}", command, env=server.env))
        for role in held:
            role.wait_ready()
        time.sleep(0.5)
        figures = {
            "server_bytes": resident_bytes(server.pid),
            "session_bytes": (resident_bytes(server.pid) - before) / sessions,
        }
        counts: list[Result] = []
        yield roles, server, figures, counts
        counts += [role.result(stop=True) for role in held]
        figures["opened_s"] = max(each["opened_s"] for each in counts)
        figures["received"] = sum(each["received"] for each in counts)
        if any(each["lost"] for each in counts):
            raise BenchError(f"sessions ended: {[each['lost'] for each in counts]}")


def publishing(roles: Roles, system: str, server: Server, sessions: int, **options: Any) -> Result:
    given = {
        "system": system, "sessions": sessions, "shared": str(roles.directory / "shared"), "limit_s": CELL_S / 4,
        **server.publishers, **options,
    }  # fmt: skip
    command = [str(BENCH / "web.py"), "--role", json.dumps(given)]
    return roles.start("publisher", command, env=server.env).result()


def idle(system: str, sessions: int) -> Result:
    with opened(system, sessions) as (roles, server, figures, _):
        done = publishing(roles, system, server, sessions, do="singles")
        figures["published"] = done["published"]
        figures["all_have_it_s"] = statistics.median(done["all_have_it_s"])
    return figures


def fan(system: str, sessions: int, seconds: float) -> Result:
    with opened(system, sessions) as (roles, server, figures, _):
        before_s = harness.cpu_s(server.pid)
        done = publishing(roles, system, server, sessions, do="fast", seconds=seconds)
        spent_s = harness.cpu_s(server.pid) - before_s
        figures["messages_s"] = done["messages_s"]
        figures["server_bytes"] = resident_bytes(server.pid)
    figures["published"] = done["published"]
    figures["server_us_per_delivery"] = 1e6 * spent_s / figures["received"]
    with opened(system, sessions, delays=True) as (roles, server, _, paced):
        publishing(roles, system, server, sessions, do="paced")
    delays = sorted(delay for each in paced for delay in each["delays_us"])
    figures["p50_ms"] = delays[len(delays) // 2] / 1000
    figures["p99_ms"] = delays[len(delays) * 99 // 100] / 1000
    return figures


def run(system: str, cell: str, seconds: float) -> Result:
    kind, _, count = cell.partition("-")
    return idle(system, int(count)) if kind == "idle" else fan(system, int(count), seconds)


# -- results -------------------------------------------------------------------------------------------------

COLUMNS: Final = {
    "idle": {"session_bytes": ("memory of a session, KiB", 1 / 1024), "all_have_it_s": ("a publication to all, ms", 1000.0)},
    "fan": {
        "messages_s": ("messages/s to all", 1.0), "p50_ms": ("p50, ms", 1.0), "p99_ms": ("p99, ms", 1.0),
        "server_us_per_delivery": ("server's processor time for a delivery, us", 1.0), "server_bytes": ("memory of the server, MB", 1e-6),
    },
}  # fmt: skip


def medians(rounds: list[Result], cell: str, system: str) -> Result:
    found = [each[cell][system] for each in rounds if "error" not in each[cell][system]]
    return {name: statistics.median(each[name] for each in found) for name in found[0]} if found else {}  # fmt: skip


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def markdown(document: Result) -> str:
    """Return the report: a table for each cell, with ratios to Iris."""
    lines = [
        "# Sessions of browsers",
        "",
        f"Commit {document['facts']['commit']}, {len(document['rounds'])} rounds, medians. In brackets: how many times that of Iris.",
    ]
    for cell in document["cells"]:
        columns = COLUMNS[cell.partition("-")[0]]
        lines += ["", f"## {cell}", "", "| | " + " | ".join(name for name, _ in columns.values()) + " |"]  # fmt: skip
        lines.append("|---|" + "---:|" * len(columns))
        ours = document["medians"][cell].get("iris", {})
        for system, found in document["medians"][cell].items():
            cells = []
            for key, (_, factor) in columns.items():
                text = digits(found[key] * factor) if key in found else "failed"
                if system != "iris" and key in found and ours.get(key):
                    text += f" ({digits(found[key] / ours[key])})"
                cells.append(text)
            lines.append(f"| {NAMES[system]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(document: Result, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "web.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "web.md").write_text(markdown(document))


def chosen(what: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in text.split(",") if name] or list(known)
    for name in names:
        kind, _, count = name.partition("-")
        if name not in known and not (what == "--cells" and kind in COLUMNS and count.isdecimal() and int(count)):  # fmt: skip
            sys.exit(f"{what}: {name!r} is not one of {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, 2,000 idle sessions")
    parser.add_argument("--rounds", type=int, default=0, help="3, or 1 with --quick")
    parser.add_argument("--seconds", type=float, default=4.0, help="of publishing as fast as it goes")  # fmt: skip
    parser.add_argument("--only", default="", help=f"of {', '.join(SYSTEMS)}, {TLS}")
    parser.add_argument("--cells", default="", help=f"of {', '.join(CELLS)}, or with other counts")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        harness.report("publisher", uvloop.run(publish(json.loads(args.role))))
        return
    cells = chosen("--cells", args.cells, ("idle-2000", *CELLS[1:]) if args.quick else CELLS)
    systems = chosen("--only", args.only, (*SYSTEMS, TLS)) if args.only else list(SYSTEMS)
    try:
        allow_descriptors(max(int(cell.partition("-")[2]) for cell in cells) + SPARE_DESCRIPTORS)
    except ValueError as error:
        sys.exit(f"{error}; raise the limit of open files, or use --cells idle-1000")
    document: Result = {"bench": "web", "facts": harness.facts(), "cells": cells, "rounds": []}
    failed = False
    for number in range(args.rounds or (1 if args.quick else 3)):
        found: Result = {cell: {} for cell in cells}
        for cell in cells:
            for system in systems if number % 2 == 0 else systems[::-1]:
                try:
                    found[cell][system] = run(system, cell, args.seconds)
                except BenchError as error:
                    failed = True
                    found[cell][system] = {"error": str(error)}
                print(f"round {number + 1}, {cell}, {system}: {json.dumps(found[cell][system])}", file=sys.stderr)  # fmt: skip
        document["rounds"].append(found)
        document["medians"] = {
            cell: {each: medians(document["rounds"], cell, each) for each in systems} for cell in cells
        }  # fmt: skip
        write(document, args.output)
    print(markdown(document), end="")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
