"""One limit in bytes for the queues of all ports of a relay, and what is dropped when it is reached.

    a frame must queue ── limit reached ── another queue is clearly longer?
        ├─ yes: drop its newest casts, with GAPs in their place
        └─ no: this frame is refused or dropped, as its kind requires

Ports report bytes at two moments: when a frame is queued, and when a batch is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from iris.wire.codec import (
    ALIAS,
    ALIAS_AT,
    COUNT,
    COUNT_AT,
    FIRST,
    FIRST_AT,
    KIND_AT,
    LENGTH,
    decode_control,
    encode_control,
)
from iris.wire.frames import Declare
from iris.wire.kinds import Kind
from relay.core.connection import Delivery, gap_of
from relay.core.ports import Held

QUEUE_BYTES: Final = 128 << 20
"""Default limit of bytes queued at all ports of a relay."""
NEAR: Final = 6
"""Queues that differ by less than limit / 2^6 count as equally long; at least that much is dropped at once."""
LOOK: Final = 8
"""A shed looks through at most this many times the wanted bytes."""
_CASTS: Final = (Kind.PUBLISH, Kind.BROADCAST)
Entry = tuple[bytes, int, Held | None]
"""(frames, number of messages in them, the tunnel they belong to or None). Control frames have a count of 0."""


class Queue(Protocol):
    """The queue of one port."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes in the queue."""

    def shed(self, wanted_bytes: int) -> int:
        """Drop about `wanted_bytes` of the newest casts; return the bytes freed, 0 if there are no casts."""


class Budget:
    """The bytes queued at all ports of a relay, and their limit."""

    __slots__ = (
        "_longest",
        "_without_casts",
        "bytes",
        "full",
        "limit_bytes",
        "near_bytes",
        "shed",
        "waiting",
    )

    def __init__(self, limit_bytes: int = QUEUE_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.near_bytes = max(1, limit_bytes >> NEAR)
        self.bytes = 0
        self.full = 0
        """Frames that found no room."""
        self.shed = 0
        """Queued messages that were dropped to make room."""
        self.waiting: dict[Queue, None] = {}
        """Queues that are not empty."""
        self._longest = sys.maxsize
        """Length of the longest queue at the last search."""
        self._without_casts: dict[Queue, int] = {}
        """Queues without casts -> their length when that was found."""

    def released(self, size: int) -> None:
        """Subtract bytes that were written or dropped."""
        self.bytes -= size
        if self.bytes < self.limit_bytes - self.near_bytes:
            self._longest = sys.maxsize
            if self._without_casts:
                self._without_casts.clear()

    def ended(self, queue: Queue) -> None:
        """Forget a queue that is empty."""
        self.waiting.pop(queue, None)
        self._without_casts.pop(queue, None)

    def make_room(self, queue: Queue, size: int, *, own: bool = False) -> bool:
        """Make room for `size` bytes by shortening the longest queue, unless it is this one.

        Returns whether there is room. `own`: what is added may replace this queue's own casts.
        """
        length = 0 if own else queue.waiting_bytes + size + self.near_bytes
        while length < self._longest or own:
            longest = None
            most = 0
            for each in self.waiting:
                waiting = each.waiting_bytes
                if waiting > most and waiting >= self._without_casts.get(each, 0):
                    longest, most = each, waiting
            if not own:
                self._longest = most
            if longest is None or most <= length:
                break
            if not longest.shed(max(size, self.near_bytes)):
                self._without_casts[longest] = most + self.near_bytes
                continue
            if self.bytes + size <= self.limit_bytes:
                return True
        self.full += 1
        return False

    def report(self) -> dict[str, int]:
        """Return the figures, ready for JSON."""
        return {
            "bytes": self.bytes,
            "limit_bytes": self.limit_bytes,
            "full": self.full,
            "shed": self.shed,
        }


def cut(
    newest: Iterable[Entry], wanted_bytes: int, key_of: Callable[[int], Delivery | None]
) -> tuple[list[Entry], list[tuple[Delivery, int]], int, int]:
    """Drop casts from the end of a queue until `wanted_bytes` are free, and put GAPs in their place.

    `newest` yields the entries of the queue, the last one first; the caller removes them as it reads.
    `key_of` returns what an alias stands for at the end of the queue. Returns the entries to put back in
    order, the lost messages per delivery, the number of entries read, and the bytes freed (0 or less if
    nothing must change).
    """
    kept: list[Entry] = []  # newest first
    lost: dict[Delivery, int] = {}
    # Aliases declared further on: what they stood for before is not known.
    later: set[int] = set()
    gaps: list[
        tuple[Delivery, list[int]]
    ] = []  # first, count, and number of kept entries behind it
    latest: dict[Delivery, list[int]] = {}
    read = freed = seen = 0
    for entry in newest:
        data, count, held = entry
        read += 1
        rest: list[bytes] = []
        for start, end in reversed(_frames(data)) if held is None else ():
            kind = data[start + KIND_AT]
            if kind == Kind.DECLARE:
                declared = decode_control(memoryview(data), start, end)
                assert isinstance(declared, Declare)
                later.add(declared.alias)
            delivery = None
            if kind in _CASTS:
                alias = ALIAS.unpack_from(data, start + ALIAS_AT)[0]
                delivery = key_of(alias) if alias not in later else None
            if delivery is None:
                rest.append(data[start:end])
                continue
            first = FIRST.unpack_from(data, start + FIRST_AT)[0]
            number = COUNT.unpack_from(data, start + COUNT_AT)[0]
            lost[delivery] = lost.get(delivery, 0) + number
            count -= number
            freed += end - start
            gap = latest.get(delivery)
            if gap is not None and (not delivery[4] or first + number == gap[0]):
                gap[:] = first, gap[1] + number, len(kept)
            else:
                gap = latest[delivery] = [first, number, len(kept)]
                gaps.append((delivery, gap))
        if held is not None:
            kept.append(entry)
        elif rest:
            kept.append((b"".join(reversed(rest)), count, None))
        seen += len(data)
        if freed >= wanted_bytes or seen >= LOOK * wanted_bytes:
            break
    gaps.reverse()  # at the same position, the gap found last goes first
    gaps.sort(key=lambda one: -one[1][2])
    for delivery, (first, number, index) in gaps:
        frame = encode_control(gap_of(delivery, first, number, "slow receiver"))
        kept.insert(index, (frame, 0, None))
        freed -= len(frame)
    kept.reverse()
    return kept, list(lost.items()), read, freed


def _frames(data: bytes) -> list[tuple[int, int]]:
    """Return the (start, end) of each frame in an entry."""
    spans = []
    start = 0
    while start < len(data):
        end = start + 4 + LENGTH.unpack_from(data, start)[0]
        spans.append((start, end))
        start = end
    return spans
