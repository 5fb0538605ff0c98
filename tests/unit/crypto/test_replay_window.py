"""What the replay window promises: each counter is accepted once, in bounded memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.crypto.sframe import WINDOW_COUNTERS, ReplayWindow
from iris.errors import Replayed, Stale


class NaiveWindow:
    """The same promise, in sets."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.accepted: set[int] = set()

    def verdict(self, counter: int) -> str:
        if counter <= max(self.accepted, default=-1) - self.size:
            return "stale"
        return "replayed" if counter in self.accepted else "new"


def verdict(window: ReplayWindow, counter: int) -> str:
    try:
        window.check(counter)
    except Replayed:
        return "replayed"
    except Stale:
        return "stale"
    return "new"


# Near counters, so that they meet; some far jumps, so that blocks are left behind.
STEPS = st.lists(st.one_of(st.integers(-40, 40), st.integers(-5_000, 5_000)), max_size=120)


@given(
    size=st.sampled_from([1, 7, 64, 1_023, 1_024, 1_025, 4_096]),
    steps=STEPS,
)
def test_the_window_agrees_with_a_naive_one(size: int, steps: list[int]) -> None:
    window, naive = ReplayWindow(size), NaiveWindow(size)
    counter = 6_000
    for number, step in enumerate(steps):
        counter = max(0, counter + step)
        for near in (counter - size, counter - 1, counter, counter + 1):
            if near >= 0:
                assert verdict(window, near) == naive.verdict(near)
        if naive.verdict(counter) == "new" and number % 5:  # every fifth is refused, so not marked
            window.mark(counter)
            naive.accepted.add(counter)
            assert verdict(window, counter) == "replayed"


def test_an_accepted_counter_is_a_replay_and_its_neighbours_are_not() -> None:
    window = ReplayWindow()
    window.check(41)
    window.mark(41)
    with pytest.raises(Replayed):
        window.check(41)
    window.check(40)
    window.check(42)


def test_a_counter_is_accepted_once_whatever_came_between() -> None:
    window = ReplayWindow(64)
    for counter in (5, 3, 4, 9):
        window.accept(counter)
        with pytest.raises(Replayed):
            window.accept(counter)
    window.accept(100)
    with pytest.raises(Stale):
        window.accept(36)
    window.accept(37)


def test_a_refused_counter_may_come_again() -> None:
    window = ReplayWindow()
    for _ in range(3):
        window.check(7)
    window.mark(7)
    assert verdict(window, 7) == "replayed"


def test_the_window_holds_exactly_its_size() -> None:
    window = ReplayWindow()
    window.mark(1_000_000)
    window.check(1_000_000 - WINDOW_COUNTERS + 1)
    with pytest.raises(Stale):
        window.check(1_000_000 - WINDOW_COUNTERS)


def test_pruning_never_forgets_a_counter_within_the_window() -> None:
    size = 5_000
    window = ReplayWindow(size)
    for highest in range(40_000):
        window.mark(highest)
        if highest >= size:
            assert verdict(window, highest - size + 1) == "replayed"
            assert verdict(window, highest - size) == "stale"


def test_a_counter_accepted_as_the_window_left_it_behind_stays_refused() -> None:
    window = ReplayWindow(64)
    window.check(10)
    window.mark(500)  # another message overtakes between check and mark
    window.mark(10)
    assert verdict(window, 10) == "stale"
    assert verdict(window, 500) == "replayed"


def test_the_last_counters_of_a_sender_fit() -> None:
    window = ReplayWindow()
    for counter in (0, (1 << 32) - 2, (1 << 32) - 1):
        window.check(counter)
        window.mark(counter)
    assert [verdict(window, c) for c in (0, (1 << 32) - 2, (1 << 32) - 1)] == [
        "stale",
        "replayed",
        "replayed",
    ]


def test_memory_stays_bounded_however_long_and_sparse_the_sender() -> None:
    tracemalloc.start()
    try:
        idle = [ReplayWindow() for _ in range(100)]
        for window in idle:
            window.mark(3_000_000)
        idle_bytes = tracemalloc.get_traced_memory()[0] / 100
        before = tracemalloc.get_traced_memory()[0]
        busy = ReplayWindow()
        for counter in range(0, 400_000, 3):
            busy.mark(counter)
        busy_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert idle_bytes < 500
    assert busy_bytes < 60_000
    assert verdict(busy, 399_999) == "replayed"
