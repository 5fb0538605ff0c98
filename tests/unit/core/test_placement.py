"""Where keys and partitions go: evenly, the same for everybody, and as few as possible move."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from iris.core.placement import jump, moves, place, ranked

STORES = [f"{number:032x}" for number in range(50)]


def test_keys_are_even_over_partitions_and_only_to_new_ones_do_they_move() -> None:
    rng = random.Random(7)
    keys = [rng.getrandbits(64) for _ in range(12_000)]
    counts = Counter(jump(key, 8) for key in keys)
    assert sorted(counts) == list(range(8))
    assert min(counts.values()) > 1350
    moved = [jump(key, 12) for key in keys if jump(key, 12) != jump(key, 8)]
    assert 3700 < len(moved) < 4300
    assert min(moved) == 8
    assert {jump(key, 1) for key in keys[:100]} == {0}


def test_the_partitions_of_one_stream_are_shared_out_evenly() -> None:
    for stores, count in ((2, 8), (3, 8), (50, 8), (50, 256), (1, 5)):
        placed = place("orders", range(count), STORES[:stores])
        held = Counter(placed.values())
        assert max(held.values()) == -(-count // stores)
        assert min(held[store] for store in STORES[:stores]) == count // stores
        assert moves("orders", placed, STORES[:stores]) == {}
        assert list(placed) == list(range(count))


def test_the_streams_of_fifty_stores_are_within_a_fifth_of_even() -> None:
    held: Counter[str] = Counter()
    for stream in range(200):
        held.update(place(f"stream{stream}", range(32), STORES).values())
    even = 32 * 200 / 50
    assert even * 0.8 < min(held.values()) <= max(held.values()) < even * 1.2


def test_partitions_that_are_added_go_where_few_are() -> None:
    first = place("orders", range(4), STORES[:2])
    more = place("orders", range(4, 6), STORES[:3], first)
    assert set(more.values()) == {STORES[2]}
    assert place("orders", range(4, 6), STORES[:3], first) == more


def test_the_order_of_two_stores_does_not_depend_on_a_third() -> None:
    for partition in range(20):
        order = ranked("orders", partition, STORES)
        without = [store for store in order if store != STORES[7]]
        assert ranked("orders", partition, [s for s in STORES if s != STORES[7]]) == without


def test_balancing_moves_as_few_as_possible_and_nothing_that_is_even() -> None:
    held = place("orders", range(8), STORES[:2])
    assert moves("orders", held, STORES[:2]) == {}
    found = moves("orders", held, STORES[:4])
    assert len(found) == 4
    after = {**held, **{partition: to for partition, (_, to) in found.items()}}
    assert set(Counter(after.values()).values()) == {2}
    assert all(held[partition] == source for partition, (source, _) in found.items())
    assert len(moves("orders", held, STORES[:3])) == 2
    wide = place("orders", range(256), STORES[:49])
    assert len(moves("orders", wide, STORES)) == 5
    assert {to for _, to in moves("orders", wide, STORES).values()} == {STORES[49]}
    assert moves("orders", {0: "gone"}, STORES[:2]) == {}


def test_there_is_no_place_without_stores() -> None:
    with pytest.raises(ValueError, match="at least one store"):
        place("orders", range(2), [])
