"""N event streams of topics over HTTP, at one bridge, some of which do not read: each gets everything or is told."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from pathlib import Path
from typing import Any, cast

import harness
from harness import IrisRelay, Result

import iris
from iris.accepting import RESERVED
from iris.web import server
from iris.web.tokens import hash_token
from proofs.common import (
    TIMEOUT_S,
    Cues,
    Proof,
    Run,
    cue,
    cue_and_wait,
    deadline_s,
    memory_mb,
    shares,
    show_mb,
    start,
)
from proofs.connections import allow_descriptors
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.process import Front, HttpBridge
from relay.bridges.http.topics import BRIDGE_FULL, SLOW_READER

TOKEN = "a-token-that-the-proof-made-0123456789"
SMALL, SMALL_BYTES = 100, 1024
BULK, BULK_BYTES = 400, 64 << 10
"""Messages to everybody; and messages to the slow readers, many more than their queues and sockets hold."""
PROCESSES = 2
EVENT = re.compile(rb'"payload":"([0-9]{8})|"count":([0-9]+)')


def slow_of(count: int) -> int:
    """Return how many of `count` readers do not read for a while."""
    return max(2, count // 200)


# -- roles ---------------------------------------------------------------------------------------------------


async def bridge(options: dict[str, Any]) -> Result:
    """Serve; write the address to a file."""
    room = options["readers"] * 4 // 3 + 64  # its one token may have three quarters
    allow_descriptors(room + RESERVED + 256)
    cues = Cues()
    tokens = _write_tokens(options["directory"])
    config = HttpConfig(max_readers=room, max_connections=room, heartbeat_s=5.0)
    async with iris.connect() as client:
        made = HttpBridge(Front(tokens=tokens), config, client)
        listener = server.listen("listen", "127.0.0.1:0")
        _write_address(options["directory"], server.address_of(listener))
        stop = asyncio.Event()
        serving = asyncio.create_task(made.serve(listener, stop))
        harness.say_ready()
        await cues.stop.wait()
        stop.set()
        await serving
        application = made.application
        return {
            "dropped": application.topics.lost[SLOW_READER] + application.topics.lost[BRIDGE_FULL],
            "failed": dict(application.failed),
        }


def _write_tokens(directory: str) -> Path:
    path = Path(directory, "http-tokens.toml")
    path.write_text(
        f'[[token]]\nname = "proof"\nsha256 = "{hash_token(TOKEN)}"\nallow.subscribe = [">"]\n'
    )
    path.chmod(0o600)
    return path


def _write_address(directory: str, address: str) -> None:
    Path(directory, "address").write_text(address)


class Reader(asyncio.Protocol):
    """One event stream. It counts what it gets and what it is told to have lost, and notices what is out of order."""

    def __init__(self, topic: str, whole: int, done: asyncio.Semaphore) -> None:
        self.open = asyncio.get_running_loop().create_future()
        self.got = self.lost = 0
        self.wrong: str = ""
        self.transport: asyncio.Transport
        self._topic = topic
        self._whole = whole
        self._done = done
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(
            f"GET /topics/{self._topic} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        if not self.open.done():
            if data.startswith(b"HTTP/1.1 200"):
                self.open.set_result(None)
            else:
                self.open.set_exception(RuntimeError(data[:200].decode("latin-1")))
        data = self._rest + data
        whole, end, self._rest = data.rpartition(b"\n\n")
        for number, count in EVENT.findall(whole + end):
            if count:
                self.lost += int(count)
                continue
            if int(number) != self.got + self.lost:
                self.wrong = self.wrong or f"{int(number)} after {self.got} and {self.lost} lost"
            self.got += 1
        if self._whole and self.got + self.lost >= self._whole:
            self._whole = 0
            self._done.release()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.open.done():
            self.open.set_exception(ConnectionError("closed before the answer"))
        if self._whole:
            self.wrong = self.wrong or "ended early"
            self._done.release()


async def readers(options: dict[str, Any]) -> Result:
    """Open event streams; the slow ones read nothing until the last cue."""
    allow_descriptors(options["fast"] + options["slow"] + 256)
    cues = Cues()
    loop = asyncio.get_running_loop()
    host, _, port = options["address"].rpartition(":")
    quick, late = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def open_one(topic: str, whole: int, done: asyncio.Semaphore) -> Reader:
        connection = socket.socket()
        connection.setblocking(False)
        if topic == "bulk":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(connection, (host, int(port)))
        _, reader = await loop.create_connection(
            lambda: Reader(topic, whole, done), sock=connection
        )
        await reader.open
        return reader

    harness.say_ready()
    await cues.next()
    fast: list[Reader] = []
    for at in range(0, options["fast"], 100):
        fast += await asyncio.gather(
            *(open_one("small", SMALL, quick) for _ in range(min(100, options["fast"] - at)))
        )
    slow = await asyncio.gather(*(open_one("bulk", BULK, late) for _ in range(options["slow"])))
    for reader in slow:
        reader.transport.pause_reading()
    harness.say_ready()
    for _ in fast:  # ends when all have everything, while the slow ones read nothing
        await quick.acquire()
    harness.say_ready()
    await cues.next()
    for reader in slow:
        reader.transport.resume_reading()
    for _ in slow:
        await late.acquire()
    harness.say_ready()
    await cues.next()
    for reader in (*fast, *slow):
        reader.transport.abort()
    wrong = [reader.wrong for reader in (*fast, *slow) if reader.wrong]
    return {
        "fast_lost": sum(reader.lost for reader in fast), "fast_got": sum(reader.got for reader in fast),
        "slow_lost": sum(reader.lost for reader in slow), "slow_got": sum(reader.got for reader in slow), "wrong": wrong[:5],
    }  # fmt: skip


async def publisher(options: dict[str, Any]) -> Result:
    """Publish to the slow readers, then to everybody."""
    cues = Cues()
    async with iris.connect() as client:
        harness.say_ready()
        await cues.next()
        for number in range(BULK):
            await client.publish("bulk", b"%08d" % number + b"x" * BULK_BYTES)
            await client.flush(timeout=TIMEOUT_S)
        for number in range(SMALL):
            await client.publish("small", b"%08d" % number + b"x" * SMALL_BYTES)
        await client.flush(timeout=TIMEOUT_S)
        harness.say_ready()
        await cues.stop.wait()
    return {}


# -- the proof -----------------------------------------------------------------------------------------------


def run(count: int, seed: int) -> Proof:
    """Run it with `count` readers."""
    proof = Proof()
    allow_descriptors(count + 256)
    slow = slow_of(count)
    with Run(deadline_s(count)) as roles:
        relay = IrisRelay(roles)
        served = start(
            roles, "http.bridge", relay.env, {"directory": str(roles.directory), "readers": count}
        )
        address = (roles.directory / "address").read_text()
        clients = [
            start(
                roles, "http.readers", relay.env, {"address": address, "fast": fast, "slow": late}
            )
            for fast, late in zip(
                shares(count - slow, PROCESSES), shares(slow, PROCESSES), strict=True
            )
        ]
        sender = start(roles, "http.publisher", relay.env, {})
        before = memory_mb(served)
        begin_s = time.monotonic()
        cue_and_wait(*clients)
        opened_s = time.monotonic() - begin_s
        idle = memory_mb(served)
        cue_and_wait(sender)
        begin_s = time.monotonic()
        for client in clients:
            client.wait_ready()
        handed_s = time.monotonic() - begin_s
        full = memory_mb(served)
        cue_and_wait(*clients)
        cue(*clients)
        results = [client.result() for client in clients]
        sender.result(stop=True)
        stats = served.result(stop=True)
        relay.stop()
    sums = {
        key: sum(result[key] for result in results)
        for key in ("fast_got", "fast_lost", "slow_got", "slow_lost")
    }
    wrong = [text for result in results for text in result["wrong"]]
    proof.figures = {
        "event streams at once": f"{count:,} from {len(clients)} processes, opened in {opened_s:.2f} s",
        "events to those that read": f"{sums['fast_got']:,} of {SMALL * (count - slow):,}, the last one {handed_s:.2f} s after all were published",
        f"the {slow:,} that did not read": f"{sums['slow_got']:,} received + {sums['slow_lost']:,} reported as lost = {BULK * slow:,} published",
        "dropped, as the bridge counts it": f"{stats['dropped']:,}",
        "bridge before": show_mb(before),
        "bridge with all": show_mb(idle),
        "a reader": f"{(idle[0] - before[0]) * 1e6 / count:,.0f} bytes in the bridge",
        "bridge with full queues": show_mb(full),
        "wrong": f"{len(wrong)}" + (f", such as {wrong[0]}" if wrong else ""),
    }
    proof.promise(
        "a client that reads gets everything",
        sums["fast_got"] == SMALL * (count - slow) and not sums["fast_lost"],
    )
    proof.promise(
        "a client that does not read gets the number of what it lost",
        sums["slow_got"] + sums["slow_lost"] == BULK * slow,
    )
    proof.promise(
        "slow readers lose messages, and the number they get is what the bridge dropped",
        0 < sums["slow_lost"] == stats["dropped"],
    )
    proof.promise("order is kept, and a loss is reported at the point where it happened", not wrong)
    return proof
