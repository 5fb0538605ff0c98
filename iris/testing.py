"""Clusters inside one process, for tests: no socket, no file, and random ids that follow from a seed."""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import TYPE_CHECKING, Self

from iris.client import Client
from iris.config import ClientConfig
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey

if TYPE_CHECKING:
    from relay.embedded import EmbeddedRelay


class LocalCluster:
    """A relay and any number of clients in this process.

        async with LocalCluster() as cluster:
            async with cluster.client() as client, cluster.client() as other: ...

    All clients share one key unless they are given a keyring. On a clean exit the relay's account has to balance with
    nothing held, else AssertionError: a test cannot lose a message without noticing.
    """

    def __init__(self, *, seed: int = 0) -> None:
        # Test keys and ids only: a seeded generator is no source of secrets.
        self._entropy = random.Random(seed).randbytes
        self.keyring = Keyring.single(ClusterKey(self._entropy(32)))
        self.relay: EmbeddedRelay

    async def __aenter__(self) -> Self:
        await self.start_relay()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.relay.close()
        if error is None:
            self.check_accounts()

    def client(
        self, *, keyring: Keyring | None = None, config: ClientConfig | None = None
    ) -> Client:
        """Return a client of this cluster, connected when entered."""
        return Client(
            config or ClientConfig(),
            keyring or self.keyring,
            connector=self._connect,
            entropy=self._entropy,
        )

    async def start_relay(self) -> None:
        """Start the relay; after `stop_relay` another one, with another id, as after a restart of the daemon."""
        from relay.embedded import EmbeddedRelay

        self.relay = EmbeddedRelay(entropy=self._entropy)

    async def stop_relay(self) -> None:
        """End the relay at once, as a crash does."""
        await self.relay.close()

    async def settle(self) -> None:
        """Return when nothing is under way between the clients and the relay."""
        quiet = 0
        before = None
        while quiet < 3:
            await asyncio.sleep(0.001)
            accounts = self.relay.router.accounts
            now = (accounts.in_, accounts.out, self.relay.hub.idle)
            quiet = quiet + 1 if now == before else 0
            before = now

    def check_accounts(self) -> None:
        """Raise AssertionError unless every message that the relay took is accounted for."""
        router = self.relay.router
        account = router.accounts.report(router.held_messages)
        if router.accounts.balance() or account["held"]:
            raise AssertionError(f"the relay's account does not balance: {account}")

    async def _connect(self, factory: object) -> None:
        await self.relay.connect(factory)  # type: ignore[arg-type]  # Connector's factory
