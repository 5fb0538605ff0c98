"""The model of a live network, from which `iris top` and pages for people are made.

    async with Watch() as watch:
        async for network in watch.updates():
            print(network.slow)

One watch asks the relays, members and stores once in each interval, however many viewers it has. A relay answers only
for itself, so the model has the totals of the relays that are asked (the own one, and those that `also` names), and
of all others what their links and their members tell. Nothing is added to the paths of messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from iris.checks import check_number
from iris.client import Client, connect
from iris.crypto.keyring import Keyring
from iris.errors import Closed
from iris.iterating import Items
from iris.one_process import OneProcess
from iris.watch.asking import ANSWER_S, Opener, asking
from iris.watch.model import Model
from iris.watch.network import (
    Cluster,
    Consumer,
    Drop,
    HandlerRates,
    Link,
    Member,
    Network,
    Program,
    Relay,
    Site,
    Slow,
    Stream,
    Totals,
    Trouble,
    as_dict,
    as_json,
)

__all__ = [
    "Cluster",
    "Consumer",
    "Drop",
    "HandlerRates",
    "Link",
    "Member",
    "Network",
    "Program",
    "Relay",
    "Site",
    "Slow",
    "Stream",
    "Totals",
    "Trouble",
    "Watch",
    "as_dict",
    "as_json",
]
MIN_INTERVAL_S: Final = 0.2


class Watch(OneProcess):
    """Looks at a network once in each interval, while it is open. Use it as an async context manager."""

    def __init__(
        self, relay: str | Path | Client | None = None, also: Sequence[str] = (), *, clusters: Sequence[str] = (), interval_s: float = 2.0,
        keyring: Keyring | None = None, opener: Opener | None = None,
    ) -> None:  # fmt: skip
        """`relay` and `keyring` are as for `iris.connect`; `relay` may be an open client, which is used and stays open.

        `also` names further relays to ask for their totals.

        `clusters` are followed beside those of the keyring and those that the relays know. `opener` makes the clients
        of a test. Raises ConfigError if the interval is under 0.2 s.
        """
        check_number("interval_s", interval_s, MIN_INTERVAL_S)
        self.interval_s = interval_s
        self.latest: Network | None = None
        """The newest network; None before the first sample."""
        first = str(relay) if isinstance(relay, Path) else relay
        self._relays = [*dict.fromkeys([first, *also])]
        self._clusters = tuple(clusters)
        self._keyring = keyring
        self._opener = opener or self._open
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise Closed("a watch can be entered only once; create a new one")
        self._task = asyncio.create_task(self._run(), name="iris-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        assert self._task is not None
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(ended, Exception) and error is None:
            raise ended

    def updates(self) -> Items[Network]:
        """Iterate over the networks from the latest on, until the watch is closed. A slow viewer misses some.

        Raises what ended the watch, if anything did.
        """
        return _Updates(self)

    async def _later(self, seen: int) -> Network:
        """Wait for a network other than the one with the serial number `seen`."""
        while True:
            changed = self._changed
            network = self.latest
            if network is not None and network.serial != seen:
                return network
            if self._task is None or self._task.done():
                if self._task is not None and not self._task.cancelled():
                    self._task.result()
                raise StopAsyncIteration
            await changed.wait()

    async def once(self, apart_s: float = 1.0) -> Network:
        """Look twice, `apart_s` seconds apart so that there are rates, and return the network."""
        model = Model()
        async with asking(self._relays, self._clusters, self._opener) as found:
            model.update(await found.sample(ANSWER_S))
            await asyncio.sleep(apart_s)
            return model.update(await found.sample(ANSWER_S))

    async def _run(self) -> None:
        model = Model()
        try:
            async with asking(self._relays, self._clusters, self._opener) as found:
                due_s = time.monotonic()
                while True:
                    self._publish(model.update(await found.sample(min(ANSWER_S, self.interval_s))))
                    due_s = max(due_s + self.interval_s, time.monotonic())
                    await asyncio.sleep(due_s - time.monotonic())
        finally:
            self._changed.set()

    def _publish(self, network: Network) -> None:
        self.latest = network
        self._changed.set()
        self._changed = asyncio.Event()

    def _open(self, address: str | None, keyed: bool) -> Client:
        return connect(address, keyring=self._keyring if keyed else Keyring({}))


class _Updates(Items[Network]):
    """Iterates over the networks that a watch has found."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen = 0

    @property
    def _of(self) -> str:
        return "network"

    async def __anext__(self) -> Network:
        network = await self._watch._later(self._seen)
        self._seen = network.serial
        return network
