"""A relay, bridges and foreign programs as processes, in one directory with a short path."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support import warm
from support.commands import command

import iris
from iris.keyfiles import create_keys, load_keys

WAIT_S = 20.0
"""Limit of every wait of a test."""
NNGCAT = shutil.which("nngcat")


class Process:
    """A program whose log is read as JSON lines."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = warm.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
            )

    def written(self) -> str:
        return self._log.read_text(errors="replace")

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return all lines of the log with `event`."""
        text = self.written()
        whole = text[: text.rfind("\n") + 1].splitlines()  # the last may be half written
        lines = [json.loads(line) for line in whole if line[:1] == "{"]
        return [line for line in lines if line["event"] == event]

    def logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Return the log lines with `event` when there are `count`."""
        until(lambda: len(self.events(event)) >= count or self.process.poll() is not None)
        found = self.events(event)
        assert len(found) >= count, self.written()
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Bridge(Process):
    """`iris bridge sp`, ready."""

    def __init__(
        self,
        world: World,
        entries: str,
        *,
        ready: bool = True,
        environ: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        number = world.number()
        config = world.root / f"{number}.toml"
        config.write_text(entries)
        bridge = command("bridge", "sp", "--config", str(config), *arguments)
        super().__init__(bridge, environ or world.environ, world.root / f"{number}.log")
        world.processes.append(self)
        if ready:
            self.logged("bridge.ready")

    @property
    def hit_by_nng(self) -> bool:
        """Whether nng's fault over ws ended the process; see `docs/bridges-sp.md`."""
        aborted = self.process.poll() == -signal.SIGABRT
        return aborted and "panic: pthread_mutex_lock" in self.written()

    def url(self, socket: str) -> str:
        """Return the URL of an entry."""
        (line,) = [line for line in self.events("bridge.open") if line["socket"] == socket]
        url: str = line["url"]
        return url

    def statuses(self) -> list[dict[str, Any]]:
        """Return the current account of every entry."""
        before = len(self.events("bridge.status"))
        entries = len(self.events("bridge.open"))
        self.process.send_signal(signal.SIGUSR1)
        return self.logged("bridge.status", before + entries)[before:]

    def status(self, socket: str) -> dict[str, Any]:
        """Return the account of one entry."""
        (line,) = [line for line in self.statuses() if line["socket"] == socket]
        return line

    async def until_peers(self, socket: str, count: int) -> None:
        """Return when an entry has `count` connections."""
        await eventually(lambda: self.status(socket)["peers"] == count)

    async def until_serving(self, socket: str, peers: int = 1) -> None:
        """Return when an entry has `peers` connections and is a member, which it remains while they last.

        Membership outlasts the last connection for a while, so other members may see one that is about to end.
        """

        def serving() -> bool:
            status = self.status(socket)
            return status["peers"] == peers and bool(status["serving"])

        await eventually(serving)

    def until_alone(self) -> None:
        """Return when no entry has a connection."""

        def peers() -> list[int]:
            return [line["peers"] for line in self.statuses()]

        until(lambda: not any(peers()))
        assert not any(peers()), self.statuses()

    async def until_lost(self, socket: str, cause: str, count: int = 1) -> None:
        """Return when an entry has counted `count` losses of this cause."""
        await eventually(lambda: self.status(socket)["losses"].get(cause, 0) >= count)


class World:
    """A directory, its keys and its relay."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="iris-sp-"))
        self.socket = self.root / "relay.sock"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTHONASYNCIO"))}
        self.environ = {
            **kept,
            "XDG_RUNTIME_DIR": str(self.root),
            "IRIS_CONFIG": str(self.root / "keys"),
            "IRIS_RELAY": str(self.socket),
        }
        self.processes: list[Process] = []
        self._numbers = iter(range(10_000))
        create_keys(self.root / "keys")
        make_certificate(self.root, "server")
        self.start_relay()

    def number(self) -> int:
        return next(self._numbers)

    def ipc(self, name: str) -> str:
        return f"ipc://{self.root}/{name}"

    def start_relay(self) -> None:
        self.socket.unlink(missing_ok=True)  # of a relay that was killed: the new one is waited for
        command = [sys.executable, "-m", "relay", "--socket", str(self.socket), "--dev"]
        self.relay = Process(command, self.environ, self.root / f"relay-{self.number()}.log")
        self.processes.append(self.relay)
        until(lambda: self.socket.exists() or self.relay.process.poll() is not None)
        assert self.socket.exists(), self.relay.written()

    def client(self, **settings: Any) -> iris.Client:
        config = iris.ClientConfig(relay=self.socket, label="test", **settings)
        return iris.connect(keyring=load_keys(self.environ), config=config)

    def close(self) -> None:
        for process in self.processes:
            if process.process.poll() is None:
                process.kill()
        shutil.rmtree(self.root)


def until(condition: Callable[[], object]) -> None:
    """Return when `condition` holds, or after WAIT_S. The caller must check it again."""
    end_s = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)


async def eventually(condition: Callable[[], object]) -> None:
    """Return when `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.02)


class Nngcat:
    """A foreign program: its lines on stdout are what it received."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        """Return the next message (--quoted, without the quotes)."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            line = await self.process.stdout.readline()
        return line.decode().strip().strip('"')

    async def rest(self) -> list[str]:
        """Wait until the program ends by itself, and return the remaining messages."""
        async with asyncio.timeout(WAIT_S):
            out, _ = await self.process.communicate()
        return [line.strip('"') for line in out.decode().splitlines()]


@contextlib.asynccontextmanager
async def nngcat(*arguments: str) -> AsyncIterator[Nngcat]:
    """Run nngcat, and end it with the block."""
    assert NNGCAT is not None
    process = await asyncio.create_subprocess_exec(
        NNGCAT, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield Nngcat(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def make_certificate(root: Path, file: str) -> None:
    """Write FILE.pem and FILE.key: a certificate of localhost that is its own authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (root / f"{file}.pem").write_bytes(certificate.public_bytes(pem))
    plain = serialization.NoEncryption()
    (root / f"{file}.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    (root / f"{file}.key").chmod(0o600)


def a_world() -> Iterator[World]:
    """For fixtures: create a world, and remove it completely."""
    made = World()
    try:
        yield made
    finally:
        made.close()


def make_ws_bridge(world: World) -> Bridge:
    """Return a bridge that listens over ws and wss."""
    tls = f'tls_cert = "{world.root}/server.pem"\ntls_key = "{world.root}/server.key"'
    return Bridge(
        world,
        "\n".join(
            f"[[socket]]\n{entry}\ntimeout_s = 3\n"
            for entry in (
                'protocol = "rep"\ncluster = "answers"\nname = "rep-ws"\nlisten = "ws://127.0.0.1:0/iris"',
                f'protocol = "rep"\ncluster = "answers"\nname = "rep-wss"\nlisten = "wss://localhost:0/iris"\n{tls}',
                'protocol = "respondent"\ncluster = "crowd"\nname = "respondent-ws"\nlisten = "ws://127.0.0.1:0/crowd"',
                'protocol = "surveyor"\ncluster = "surveyed-ws"\nname = "surveyor-ws"\nlisten = "ws://127.0.0.1:0/asked"',
            )
        ),
    )


def outlives_nng(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Repeat a test of ws with a new bridge, at most twice, if nng's fault ended the bridge."""

    @functools.wraps(test)
    async def run(world: World, ws_bridge: Bridge, **others: Any) -> None:
        for _ in range(2):
            try:
                return await test(world=world, ws_bridge=ws_bridge, **others)
            except Exception:
                if not ws_bridge.hit_by_nng:
                    raise
            ws_bridge = make_ws_bridge(world)
        return await test(world=world, ws_bridge=ws_bridge, **others)

    return run
