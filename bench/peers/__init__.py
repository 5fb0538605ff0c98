"""What a system has to do to be measured: one short file per system, the same load for all.

A `Peer` is made in the bench's process, which starts its servers, and again in every role's process, which gets `setup` as
JSON. In a role everything happens on one event loop (uvloop); who blocks the loop (`zmq_blocking`, `nng_blocking`) is alone on it.

    publisher, subscriber     W1, W2: one topic
    replier, requester        W3, W4: echo
    sender, receiver          W5: one ordered stream, whose sender waits for the receiver

Whoever sends is on side 0 and whoever receives on side 1: with two servers (`W6`) each has its own.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

Took = Callable[[bytes], None]
"""Called with every message that is received. What it gets may be any bytes-like object."""

TOPIC: Final = "bench.load"
CREDIT_TOPIC: Final = "bench.credit"
WINDOW: Final = 64
"""Messages of a stream that may be unacknowledged, where the system itself does not throttle."""
ACKNOWLEDGE: Final = 16


class NotOffered(Exception):
    """This system has no such thing: the cell is "not run", with this reason."""


@dataclass(frozen=True, slots=True)
class Server:
    """A process that the system needs; `listens` is what answers once it serves: (host, port), or a Unix socket's path."""

    name: str
    command: Sequence[str]
    listens: tuple[str, int] | str
    env: dict[str, str] = field(default_factory=dict)
    """Added to ours."""


class Publisher(ABC):
    """Sends to a topic."""

    @abstractmethod
    async def burst(self, payloads: Sequence[bytes]) -> None:
        """Send all, in order, in the way of this system that is fastest. It may wait when the system holds it back."""

    async def flush(self) -> None:  # noqa: B027 - most have nothing to flush
        """Return when nothing of it waits in this process any more, as far as the system can tell."""


class Requester(ABC):
    """Asks the one replier."""

    @abstractmethod
    async def request(self, payload: bytes) -> bytes:
        """Return the reply."""

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes] | None:
        """Blocking systems only: send all, then return all replies. None: `request` in as many tasks does better."""
        return None


class Sender(ABC):
    """One end of a stream."""

    @abstractmethod
    async def send(self, payload: bytes) -> None:
        """Send the next message; waits while the receiver is behind."""

    async def finish(self) -> None:  # noqa: B027
        """Return when all that was sent is on its way."""


class Peer(ABC):
    """One system. The methods of a role keep what they open; its process ends with it."""

    name: ClassVar[str]
    blocking: ClassVar[bool] = False
    """It blocks the event loop: no open loop with it."""
    needs: ClassVar[Sequence[str]] = ()
    """Commands that have to be installed: Debian packages, by the name of their command."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """`setup`: "directory" (private to this run), "secured" (TLS where the system has it), "servers" (1, or 2 for W6),
        and what `prepare` added."""
        self.setup = setup
        self.directory = Path(setup["directory"])
        self.secured: bool = setup["secured"]

    # -- in the bench's process ------------------------------------------------------------------------------

    def prepare(self) -> None:  # noqa: B027
        """Choose ports into `self.setup`, write configuration files. Called once, before `servers`."""

    def servers(self) -> Sequence[Server]:
        """Return what to start, in order."""
        return ()

    # -- in a role -------------------------------------------------------------------------------------------

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        raise NotOffered("no publish and subscribe")

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        """Return once the system says that it is subscribed."""
        raise NotOffered("no publish and subscribe")

    async def replier(self) -> None:
        """Return once it serves; it answers with what it was asked."""
        raise NotOffered("no requests")

    async def requester(self) -> Requester:
        """Open a connection of its own."""
        raise NotOffered("no requests")

    async def sender(self) -> Sender:
        """A stream by publications and credit, for systems that have no stream of their own."""
        return await CreditSender.open(self)

    async def receiver(self, took: Took) -> None:
        """The other end of `CreditSender`; who overrides the one overrides both."""
        credit = await self.publisher(CREDIT_TOPIC)
        acknowledged: asyncio.Queue[None] = asyncio.Queue()
        count = 0

        def take(payload: bytes) -> None:
            nonlocal count
            took(payload)
            count += 1
            if count % ACKNOWLEDGE == 0:
                acknowledged.put_nowait(None)

        async def acknowledge() -> None:
            while True:
                await acknowledged.get()
                await credit.burst([b"+"])

        await self.subscriber(take)
        self._acknowledging = background(acknowledge())

    # -- helpers ---------------------------------------------------------------------------------------------

    def port(self, name: str) -> int:
        """Return the TCP port that `prepare` chose as `name`."""
        number: int = self.setup[name]
        return number

    def choose_port(self, name: str) -> None:
        """Put a free TCP port of 127.0.0.1 into `setup`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.setup[name] = probe.getsockname()[1]


class CreditSender(Sender):
    """Up to `WINDOW` messages ahead of what the receiver acknowledged."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._room = asyncio.Semaphore(WINDOW)

    @classmethod
    async def open(cls, peer: Peer) -> CreditSender:
        sender = cls(await peer.publisher())
        await peer.subscriber(sender._more, CREDIT_TOPIC)
        return sender

    def _more(self, payload: bytes) -> None:
        for _ in range(ACKNOWLEDGE):
            self._room.release()

    async def send(self, payload: bytes) -> None:
        await self._room.acquire()
        await self._publisher.burst([payload])

    async def finish(self) -> None:
        await self._publisher.flush()


def background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run it for as long as the process lives; the event loop logs why it failed, if it does. The caller keeps it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.result())
    return task


PEERS: Final = {
    "iris": "iris_",
    "iris-waiting": "iris_waiting",
    "nats": "nats_",
    "redis": "redis_",
    "rabbitmq": "rabbitmq",
    "zeromq": "zeromq",
    "zeromq-blocking": "zeromq_blocking",
    "nng": "nng",
    "nng-blocking": "nng_blocking",
    "zenoh": "zenoh_",
    "grpc": "grpc_",
    "streams": "streams",
}
"""Name -> the module here that has `PEER`, its class. Modules are not named like the packages that they import."""


def peer_class(name: str) -> type[Peer]:
    """Return the class of one system."""
    made: type[Peer] = importlib.import_module(f"peers.{PEERS[name]}").PEER
    return made
