"""Where things go: a key to one of a stream's partitions, and partitions to the stores of a site (pure functions).

Both are computed from hashes, so every client gets the same answer and nothing has to be agreed on or stored.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

_MULTIPLIER: Final = 2862933555777941757
"""Multiplier of the random number generator in the paper on jump hashing."""
_LABEL: Final = "iris-placement-1"


def jump(key: int, count: int) -> int:
    """Return which of `count` buckets a hash of 64 bits belongs to.

    If buckets are added at the end, as few keys move as possible, and only to new buckets. (Lamping and Veach: A Fast,
    Minimal Memory, Consistent Hash Algorithm, 2014, section 2.)
    """
    bucket, following = -1, 0
    while following < count:
        bucket = following
        key = (key * _MULTIPLIER + 1) & 0xFFFFFFFFFFFFFFFF
        following = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


def ranked(stream: str, partition: int, stores: Collection[str]) -> list[str]:
    """Return stores in the order in which a partition prefers them: rendezvous hashing, highest score first.

    `stream` is the stream's name, so clients that create one at the same time choose the same stores. A store that is
    added or lost changes no preference between two others. (Thaler and Ravishankar: Using Name-Based Mappings to
    Increase Hit Rates, 1998.)
    """

    def score(store: str) -> tuple[bytes, str]:
        said = f"{_LABEL} {store} {partition} {stream}"
        return hashlib.sha256(said.encode()).digest(), store

    return sorted(stores, key=score, reverse=True)


def place(
    stream: str, partitions: Sequence[int], stores: Collection[str], held: Mapping[int, str] = {}
) -> dict[int, str]:
    """Return the store for each of the new `partitions`; `held` says where the stream's other partitions are.

    Each goes to the store that it prefers among those with room. Afterwards no two stores differ by more than one
    partition, unless `held` does. Raises ValueError without stores.
    """
    if not stores:
        raise ValueError("placement needs at least one store")
    taken = Counter(dict.fromkeys(stores, 0))
    taken.update(store for store in held.values() if store in taken)
    share, rest = divmod(len(partitions) + taken.total(), len(stores))
    placed: dict[int, str] = {}
    for partition in partitions:
        order = ranked(stream, partition, stores)
        above = sum(max(0, count - share) for count in taken.values())
        room = share + (above < rest)  # as many stores as the rest is large get one more
        store = next((one for one in order if taken[one] < room), None)
        store = store or min(order, key=taken.__getitem__)
        placed[partition] = store
        taken[store] += 1
    return placed


def moves(
    stream: str, held: Mapping[int, str], stores: Collection[str]
) -> dict[int, tuple[str, str]]:
    """Return partition -> (from, to): the fewest moves after which no two `stores` differ by more than one partition.

    A partition at a store that is not among `stores` stays where it is.
    """
    here = {partition: store for partition, store in held.items() if store in stores}
    count = Counter(here.values())
    found: dict[int, tuple[str, str]] = {}
    while here:
        fullest = max(count[store] for store in stores)
        least = min(count[store] for store in stores)
        if fullest - least < 2:
            break
        emptiest = {store for store in stores if count[store] == least}
        # Of the partitions that could leave, the one that prefers an empty store most.
        choices = [
            (ranked(stream, partition, stores), partition)
            for partition, store in here.items()
            if count[store] == fullest and partition not in found
        ]
        position, partition, target = min(
            (order.index(store), partition, store)
            for order, partition in choices
            for store in emptiest
        )
        del position
        found[partition] = (here[partition], target)
        count[here[partition]] -= 1
        count[target] += 1
        here[partition] = target
    return found
