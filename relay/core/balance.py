"""Which member takes the next message.

Members that have a free handler come first, the one with the fewest outstanding among them; work queues only when no
handler is free anywhere, at the member with the shortest queue, up to its byte limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.core.interest import Load


def pick(loads: Sequence[Load], size: int, tried: Sequence[Load], turn: int) -> Load | None:
    """Return the member to hand a message of `size` bytes, or None when all are full.

    `tried` are left out; `turn` is any rising number, so that equals take turns. An empty queue takes any size.
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
    if best is not None and best.messages >= best.concurrency:
        # The fewest outstanding is saturated; another with more handlers may still have one free.
        for load in loads:
            if load.messages < load.concurrency and load not in tried:
                return load
    return best
