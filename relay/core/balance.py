"""Which member, or which relay, takes the next message.

Members of this relay that have a free handler come first, the one with the fewest outstanding among them; then a relay
that has one, the freer of two drawn at random (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
1996), so that relays whose picture is a few milliseconds old do not all run to the same one. Only when no handler is free
anywhere does work queue: where the wait is shortest by the pace at which messages end there, up to the member's byte limit, so
that a slow member is not given as many as a fast one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from relay.core.neighbor import Load

SAMPLE: Final = 8
"""Relays looked at for one message, when none of the first two has a free handler."""
_MIX: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it are spread evenly (Knuth, TAOCP 3, 6.4)


def pick(
    loads: Sequence[Load], peers: Sequence[Load], size: int, tried: Sequence[Load], turn: int
) -> Load | None:
    """Return where to hand a message of `size` bytes, or None when all are full.

    `loads` are members of this relay, `peers` those behind links. `tried` are left out; `turn` is any rising number, so that
    equals take turns. An empty queue takes any size.
    """
    best: Load | None = None
    count = len(loads)
    first = turn % count if count else 0
    for index in range(first, first + count):
        load = loads[index if index < count else index - count]
        if load.messages == 0:
            if not tried or load not in tried:
                return load
        elif (
            (best is None or load.messages < best.messages)
            and (load.messages < load.concurrency or load.bytes + size <= load.limit_bytes)
            and load not in tried
        ):
            best = load
    if best is not None and best.messages < best.concurrency:
        return best
    if best is not None:
        # The fewest outstanding is saturated; another with more handlers may still have one free.
        for load in loads:
            if load.messages < load.concurrency and load not in tried:
                return load
        if count == 1 and not peers:
            return best
    if len(peers) == 1 and best is None:
        return peers[0] if peers[0] not in tried else None
    return _saturated(loads, peers, size, tried, turn)


def _saturated(
    loads: Sequence[Load], peers: Sequence[Load], size: int, tried: Sequence[Load], turn: int
) -> Load | None:
    """Return a relay with a free handler, else where the wait is shortest."""
    count = len(peers)
    if count > 1:
        mixed = turn * _MIX & (1 << 64) - 1
        one, other = peers[(mixed >> 32) % count], peers[(mixed >> 8) % count]
        if _free(other) > _free(one):
            one = other
        if _free(one) > 0 and one not in tried:
            return one
    best: Load | None = None
    shortest_us = math.inf
    for load in loads:
        if load.messages and load.bytes + size > load.limit_bytes:
            continue
        wait_us = load.wait_us()
        if wait_us < shortest_us and load not in tried:
            best, shortest_us = load, wait_us
    freest: Load | None = None
    most = 0
    step = 1 if count <= SAMPLE else _MIX
    for number in range(min(count, SAMPLE)):
        load = peers[(turn + number) * step % count]
        free = load.concurrency - load.messages - load.others
        if free > most:
            if load not in tried:
                freest, most = load, free
        elif freest is None:
            wait_us = load.wait_us()
            if wait_us < shortest_us and load not in tried:
                best, shortest_us = load, wait_us
    return best if freest is None else freest


def _free(load: Load) -> int:
    return load.concurrency - load.messages - load.others
