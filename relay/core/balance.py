"""Chooses the member or relay that runs the next call.

Members of this relay that have a free handler come first, the one with the fewest outstanding calls among
them. Then comes a relay that has one, the freer of two drawn at random (Mitzenmacher, "The Power of Two
Choices in Randomized Load Balancing", 1996), so that relays with figures a few milliseconds old do not all
choose the same one.

Calls queue only when no handler is free anywhere. They go where the wait is shortest, judged by the pace at
which calls end there, up to the member's byte limit. A slow member therefore gets fewer calls than a fast
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from relay.core.neighbor import Load

SAMPLE: Final = 8
"""Relays looked at for one call when neither of the first two has a free handler."""
_MIX: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it are spread evenly (Knuth, TAOCP 3, 6.4)


def pick(
    loads: Sequence[Load], peers: Sequence[Load], size: int, tried: Sequence[Load], turn: int
) -> Load | None:
    """Return the load to dispatch a call of `size` bytes to, or None when all are full.

    `loads` are members of this relay, `peers` those behind links. `tried` are left out. `turn` is any
    rising number, so that equal candidates take turns. An empty queue takes a call of any size.
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
        # The one with the fewest outstanding is saturated; another with more handlers may still have a free one.
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
    """Return a relay with a free handler, else the load with the shortest wait."""
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
