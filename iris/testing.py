"""Test support: a relay and clients in one process, without sockets and files, with random ids drawn from a seed.

`pytest_iris` has these as pytest fixtures.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from iris.client import Client
from iris.config import ClientConfig
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConfigError, RelayUnavailable
from iris.middleware import Middleware
from iris.one_process import OneProcess
from iris.service import Service
from iris.tracer import Tracer

if TYPE_CHECKING:
    from relay.embedded import EmbeddedRelay, MemoryTransport
    from relay.store.process import StoreProcess


class _Wire:
    """How one client reaches the relay, and what the test does to its connection."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._ends: tuple[MemoryTransport, MemoryTransport] | None = None
        self.lost = False
        self.held = False

    async def connect(self, factory: Callable[[], asyncio.BufferedProtocol]) -> None:
        if self.lost:
            raise RelayUnavailable(
                "the test has lost this client; LocalCluster.restore brings it back"
            )
        self._ends = self._cluster.relay.attach(factory)
        self.hold(self.held)

    def cut(self) -> None:
        if self._ends is not None:
            self._ends[0].abort()

    def hold(self, held: bool) -> None:
        self.held = held
        for end in self._ends or ():
            end.hold(held)


class LocalCluster(OneProcess):
    """A relay and any number of clients in this process, for tests.

        async with LocalCluster() as cluster:
            async with cluster.serve(service), cluster.client() as client: ...

    All clients share one key unless they get a keyring. With a directory `data`, a store for durable streams
    runs, too; `stop_store` and `start_store` restart it.

    Faults: `lose` and `restore` a client, `cut` its connection, `hold` its messages so that they are late, and
    `restart_relay`.

    When the block ends without an error, the relay's account of messages is checked. AssertionError is raised
    unless it balances and no message is held, so that a test cannot lose a message without noticing.
    """

    def __init__(self, *, seed: int = 0, data: Path | None = None) -> None:
        # For test keys and ids only: a seeded generator must not make real secrets.
        self._entropy = random.Random(seed).randbytes
        self.keyring = Keyring.single(ClusterKey(self._entropy(32)))
        self.relay: EmbeddedRelay
        self.data = data
        self.store: StoreProcess
        self._storing: asyncio.Task[None] | None = None
        self._wires: dict[Client, _Wire] = {}

    async def __aenter__(self) -> Self:
        await self.start_relay()
        if self.data is not None:
            await self.start_store()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop_store()
        await self.relay.close()
        if error is None:
            self.check_accounts()

    def client(
        self, *, keyring: Keyring | None = None, config: ClientConfig | None = None, middleware: Sequence[Middleware] = (),
        tracing: bool | Tracer | None = None,
    ) -> Client:  # fmt: skip
        """Return a client of this cluster, which connects when entered. By default it has the shared key."""
        wire = _Wire(self)
        client = Client(
            config or ClientConfig(),
            keyring or self.keyring,
            connector=wire.connect,
            entropy=self._entropy,
            middleware=middleware,
            tracing=tracing,
        )
        self._wires[client] = wire
        return client

    @contextlib.asynccontextmanager
    async def serve(self, service: Service) -> AsyncIterator[Client]:
        """Serve `service` while the block runs, from a client of its own, as a process of its own would.

        `async with cluster.serve(service) as member`: pass `member` to `lose`, `cut` or `hold`.
        """
        async with self.client() as client, client.serve(service):
            yield client

    # -- faults ----------------------------------------------------------------------------------------------

    def lose(self, client: Client) -> None:
        """Lose a client, as if its process were killed: its connection ends and it cannot connect again.

        Callers with a request at one of its members get ConnectionLost. `restore` lets it connect again.
        """
        self._wire(client).lost = True
        self._wire(client).cut()

    def restore(self, client: Client) -> None:
        """Let a client that was lost connect again, which it does by itself after a moment."""
        self._wire(client).lost = False

    def cut(self, client: Client) -> None:
        """End the connection of a client once, as a network would. It reconnects by itself."""
        self._wire(client).cut()

    @contextlib.contextmanager
    def hold(self, client: Client) -> Iterator[None]:
        """Hold everything that a client sends and receives while the block runs; after it, it arrives late.

        with cluster.hold(member):
            reply = asyncio.create_task(client.request("orders", b"", timeout=0.1))
            ...
        """
        wire = self._wire(client)
        wire.hold(True)
        try:
            yield
        finally:
            wire.hold(False)

    def _wire(self, client: Client) -> _Wire:
        wire = self._wires.get(client)
        if wire is None:
            raise ConfigError(
                "this client does not belong to this LocalCluster; make it with LocalCluster.client or LocalCluster.serve"
            )
        return wire

    # -- relay and store -------------------------------------------------------------------------------------

    async def start_relay(self) -> None:
        """Start a relay. After `stop_relay` it is a new one with a new id, as after a restart of the daemon."""
        from relay.embedded import EmbeddedRelay

        self.relay = EmbeddedRelay(entropy=self._entropy)

    async def stop_relay(self) -> None:
        """End the relay at once, as a crash does."""
        await self.relay.close()

    async def restart_relay(self) -> None:
        """Crash the relay and start another. Clients connect to it by themselves after a moment."""
        await self.stop_relay()
        await self.start_relay()

    async def start_store(self) -> None:
        """Start a store on the directory `data`; return when the relay has registered its streams."""
        from relay.store.process import StoreProcess

        if self.data is None:
            raise ConfigError(
                "a store needs a directory; create the cluster with LocalCluster(data=...)"
            )
        self.store = StoreProcess(self.data, self._connect, entropy=self._entropy)
        self.store.open()
        self._storing = asyncio.create_task(self.store.run(), name="iris-store")
        await self.store.up.wait()
        await self.settle()

    async def stop_store(self) -> None:
        """Stop the store gracefully, as SIGTERM does. Idempotent."""
        storing, self._storing = self._storing, None
        if storing is not None:
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)
            await self.store.close()

    async def settle(self) -> None:
        """Return when no message is on the way between the clients and the relay."""
        quiet = 0
        before = None
        while quiet < 3:
            await asyncio.sleep(0.001)
            accounts = self.relay.router.accounts
            now = (accounts.in_, accounts.out, self.relay.hub.idle)
            quiet = quiet + 1 if now == before else 0
            before = now

    def check_accounts(self) -> None:
        """Raise AssertionError unless the relay accounts for every message that it accepted, and holds none."""
        router = self.relay.router
        account = router.accounts.report(router.held_messages)
        if router.accounts.balance() or account["held"]:
            raise AssertionError(
                f"the relay's account of messages does not balance, or it holds some: {account}"
            )

    async def _connect(self, factory: Callable[[], asyncio.BufferedProtocol]) -> None:
        await self.relay.connect(factory)
