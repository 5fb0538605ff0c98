"""The interface of a system that is measured: one short file per system, the same load for all.

A `Peer` is created in the bench's process, which starts its servers, and again in the process of each role, which
gets `setup` as JSON. A role runs on one event loop (uvloop); a peer that blocks the loop (`zmq_blocking`,
`nng_blocking`) is alone on it.

    publisher, subscriber     W1, W2: one topic
    replier, requester        W3, W4: echo
    sender, receiver          W5: one ordered stream, whose sender waits for the receiver

Senders are on side 0 and receivers on side 1; with two servers (`W6`) each side has its own.
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
"""Function called with every received message, which may be any bytes-like object."""

TOPIC: Final = "bench.load"
CREDIT_TOPIC: Final = "bench.credit"
WINDOW: Final = 64
"""Unacknowledged messages that a stream may have, if the system itself does not throttle."""
ACKNOWLEDGE: Final = 16


class NotOffered(Exception):
    """The system does not offer this; the cell is "not run", with this reason."""


@dataclass(frozen=True, slots=True)
class Server:
    """A process that the system needs; `listens` is its address, (host, port) or the path of a Unix socket."""

    name: str
    command: Sequence[str]
    listens: tuple[str, int] | str
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, added to those of the bench."""


class Publisher(ABC):
    """A publisher to one topic."""

    @abstractmethod
    async def burst(self, payloads: Sequence[bytes]) -> None:
        """Send all messages in order, in the fastest way of this system; wait if the system throttles."""

    async def flush(self) -> None:  # noqa: B027 - most have nothing to flush
        """Return when no message waits in this process any more, as far as the system shows it."""


class Requester(ABC):
    """A caller of the one replier."""

    @abstractmethod
    async def request(self, payload: bytes) -> bytes:
        """Send a request and return the reply."""

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes] | None:
        """Send all requests, then return all replies; blocking systems only. None if `request` in as many tasks is
        faster."""
        return None


class Sender(ABC):
    """The sending end of a stream."""

    @abstractmethod
    async def send(self, payload: bytes) -> None:
        """Send the next message; wait while the receiver is behind."""

    async def finish(self) -> None:  # noqa: B027
        """Return when everything has left this process."""


class Peer(ABC):
    """One system. What the methods of a role open stays open until its process ends."""

    name: ClassVar[str]
    blocking: ClassVar[bool] = False
    """True if it blocks the event loop, so that it cannot run an open loop."""
    needs: ClassVar[Sequence[str]] = ()
    """Commands that must be installed: command -> its Debian package."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """`setup`: "directory" (private to this run), "secured" (TLS where the system has it), "servers" (1, or 2
        for W6), and what `prepare` added."""
        self.setup = setup
        self.directory = Path(setup["directory"])
        self.secured: bool = setup["secured"]

    # -- in the bench's process ------------------------------------------------------------------------------

    def prepare(self) -> None:  # noqa: B027
        """Put ports into `self.setup` and write configuration files. Called once, before `servers`."""

    def servers(self) -> Sequence[Server]:
        """Return the servers to start, in order."""
        return ()

    # -- in a role -------------------------------------------------------------------------------------------

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        raise NotOffered("this system does not publish and subscribe")

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        """Subscribe; return when the system confirms it."""
        raise NotOffered("this system does not publish and subscribe")

    async def replier(self) -> None:
        """Serve requests, echoing each; return when it serves."""
        raise NotOffered("this system does not have requests")

    async def requester(self) -> Requester:
        """Open a new connection."""
        raise NotOffered("this system does not have requests")

    async def sender(self) -> Sender:
        """Open a stream of publications with credit, for systems without streams."""
        return await CreditSender.open(self)

    async def receiver(self, took: Took) -> None:
        """Receive what a `CreditSender` sends; a peer that overrides one of the two overrides both."""
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
    """A sender of a stream, at most `WINDOW` messages ahead of the receiver's acknowledgement."""

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
    """Run a coroutine until the process ends; the event loop logs its failure. The caller must keep the task."""
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
"""Peer name -> module in this package, whose `PEER` is the class. Modules do not have the names of the packages
that they import."""


def peer_class(name: str) -> type[Peer]:
    """Return the class of a peer."""
    made: type[Peer] = importlib.import_module(f"peers.{PEERS[name]}").PEER
    return made
