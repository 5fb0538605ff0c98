"""Unsettled records of a consumer, and their parts (sans-IO).

A *part* is a set of unsettled messages of one record with the same state: held by a worker until a
lease ends, waiting to be delivered, or given up. A bitmap says which messages belong to it.
"""

from __future__ import annotations


class Part:
    """Unsettled messages of one record that have the same state."""

    __slots__ = (
        "bits",
        "confirmed",
        "deliveries",
        "dispatched",
        "due_us",
        "reason",
        "record",
        "tries",
        "worker",
    )

    def __init__(
        self, record: OpenRecord, bits: int, deliveries: int, due_us: int, tries: int = 0
    ) -> None:
        self.record = record
        self.bits = bits
        self.deliveries = deliveries
        """Confirmed deliveries: the worker asked for more afterwards, or settled or touched these messages."""
        self.tries = tries
        """Dispatches that were not confirmed, including the current one."""
        self.dispatched = deliveries > 0 or tries > 0
        """It was dispatched at least once."""
        self.confirmed = False
        """The worker that holds it has confirmed that it received it."""
        self.due_us = due_us
        """When the lease ends, or when to deliver it again."""
        self.worker: bytes | None = None
        self.reason: str | None = None
        """Why it was given up; None if it was not."""

    @property
    def waiting(self) -> bool:
        return self.worker is None and self.reason is None

    def split_off(self, bits: int) -> Part:
        """Move these bits into a new part with the same state, and return it."""
        self.bits ^= bits
        part = Part(self.record, bits, self.deliveries, self.due_us, self.tries)
        part.worker, part.confirmed, part.dispatched = self.worker, self.confirmed, self.dispatched
        self.record.parts.append(part)
        return part


class OpenRecord:
    """A record with unsettled messages."""

    __slots__ = ("count", "dead", "deferred", "first", "key", "parts", "queued")

    def __init__(self, first: int, count: int, key: bytes | None, deferred: bool) -> None:
        self.first = first
        self.count = count
        self.key = key
        self.deferred = deferred
        self.parts: list[Part] = []
        """Disjoint and not empty."""
        self.dead = 0
        """Bitmap of the messages that are listed as dead letters."""
        self.queued = False
        """It is in the heap `Unsettled.ready`."""

    @property
    def next(self) -> int:
        return self.first + self.count

    @property
    def open(self) -> int:
        return self.bits(self.parts) | self.dead

    @property
    def fresh(self) -> int:
        """Bitmap of the messages that were never dispatched."""
        return self.bits([part for part in self.parts if not part.dispatched])

    @staticmethod
    def bits(parts: list[Part]) -> int:
        bits = 0
        for part in parts:
            bits |= part.bits
        return bits

    def mask(self, first: int, end: int) -> int:
        """Return the bitmap of its messages from offset `first` until `end`."""
        low, high = max(first - self.first, 0), min(end - self.first, self.count)
        return (1 << high) - (1 << low) if low < high else 0


def lowest(bits: int, most: int) -> int:
    """Return the lowest `most` set bits."""
    if bits.bit_count() <= most:
        return bits
    low, high = 0, bits.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (bits & (1 << middle) - 1).bit_count() < most:
            low = middle + 1
        else:
            high = middle
    return bits & (1 << low) - 1
