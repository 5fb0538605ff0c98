"""Pauses between tries."""

from __future__ import annotations

import random

from iris.core.backoff import Backoff


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 2.0, lambda: 1.0)
    assert [round(backoff.failed(), 3) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_pause_is_shortened_at_random_by_up_to_a_half() -> None:
    rng = random.Random(7)
    pauses = [Backoff(1.0, 8.0, rng.random).failed() for _ in range(200)]
    assert 0.5 <= min(pauses) < 0.6
    assert 0.9 < max(pauses) <= 1.0


def test_a_success_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(0.1, 2.0, lambda: 1.0)
    for _ in range(5):
        backoff.failed()
    assert backoff.failures == 5
    backoff.succeeded()
    assert (backoff.failures, backoff.failed()) == (0, 0.1)


def test_failures_without_end_do_not_overflow() -> None:
    backoff = Backoff(0.1, 2.0, lambda: 1.0)
    backoff.failures = 100_000
    assert backoff.failed() == 2.0
