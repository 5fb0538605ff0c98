"""Records for consumers of a log, and the deliveries that they get."""

from __future__ import annotations

from iris.wire.codec import END
from relay.store.consumer import Consumer
from relay.store.cursor import Settings
from relay.store.dispatch import Delivery, Taken
from relay.store.log import Log
from relay.store.records import Entry

MANY = 1 << 30
ANN, BOB = b"ann", b"bob"
SECOND = 1_000_000
TIMEOUT = 30 * SECOND


def entry(
    body: bytes = b"sealed",
    *,
    count: int = 1,
    key: int | None = None,
    expires_us: int = 0,
    due_us: int = 0,
) -> Entry:
    return Entry(
        1,
        "orders",
        bytes(16),
        bytes(16),
        END.pack(0, 0, count, 0),
        body,
        key_hash=None if key is None else bytes([key]) * 32,
        expires_us=expires_us,
        due_us=due_us,
    )


def deliveries_of(taken: Taken) -> list[tuple[int, int, int]]:
    """Return the deliveries as (first offset of the record, bitmap of messages, number of deliveries)."""
    return [
        (item.record.first, item.wanted, item.deliveries)
        for item in taken.items
        if isinstance(item, Delivery)
    ]


def firsts(taken: Taken) -> list[int]:
    return [delivery[0] for delivery in deliveries_of(taken)]


def holes(taken: Taken) -> list[object]:
    return [item for item in taken.items if not isinstance(item, Delivery)]


def consumer(log: Log, start: int = 0, **fields: object) -> Consumer:
    return Consumer(log, "c", Settings(**fields), start, 1)  # type: ignore[arg-type]


def all_of(consumer: Consumer, now_us: int = 1, worker: bytes = ANN) -> Taken:
    """Dispatch all due messages to `worker`, which confirms that it received them."""
    taken = consumer.take(worker, MANY, MANY, now_us)
    consumer.confirm(worker)
    return taken
