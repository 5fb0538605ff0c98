"""Rates, trends and percentiles from what was seen at several times."""

from __future__ import annotations

import random
import time

import pytest

from iris.tally import BUCKETS, Tally, bucket_end, bucket_of
from iris.watch.history import KEEP_S, WINDOW_S, History, merged, percentile


def at(history: History, now_s: float) -> History:
    history.begin(now_s)
    return history


def test_a_rate_is_what_a_counter_grew_by_in_a_second() -> None:
    history = History()
    assert at(history, 1.0).rate("a", 10) is None
    assert at(history, 3.0).rate("a", 16) == 3.0


def test_a_counter_that_began_again_has_no_rate_once() -> None:
    history = History()
    at(history, 1.0).rate("a", 10)
    assert at(history, 2.0).rate("a", 4) is None
    assert at(history, 3.0).rate("a", 6) == 2.0


def test_a_rate_is_by_the_clock_of_what_is_counted() -> None:
    history = History()
    at(history, 1.0).rate("a", 0, at_s=100.0)
    assert at(history, 9.0).rate("a", 10, at_s=102.0) == 5.0
    assert at(history, 10.0).rate("a", 11, at_s=0.5) is None, "its process began again"


def test_a_trend_covers_the_last_seconds_only() -> None:
    history = History()
    for second in range(30):
        trend = at(history, float(second)).trend("a", second if second < 15 else 15)
    assert trend == 0.0
    assert at(History(), 0.0).trend("a", 5) is None


def test_what_does_not_hold_any_more_begins_at_zero_again() -> None:
    history = History()
    assert at(history, 1.0).since("a", True) == 0.0
    assert at(history, 4.0).since("a", True) == 3.0
    assert at(history, 5.0).since("a", False) == 0.0
    assert at(history, 6.0).since("a", True) == 0.0


def test_growth_is_that_of_the_last_minute() -> None:
    history = History()
    assert at(history, 0.0).grown("a", 100) == 0
    assert at(history, 50.0).grown("a", 103) == 3
    assert at(history, 115.0).grown("a", 103) == 0


def test_growth_covers_the_whole_minute_also_with_many_samples_in_it() -> None:
    history = History()
    for number in range(300):
        grown = at(history, number / 5).grown("a", number)
    assert grown == 299


def test_calls_of_the_last_seconds_are_told_from_earlier_ones() -> None:
    history = History()
    assert at(history, 0.0).lately("a", {1000: 5}) == {}, "nobody knows when the first were"
    assert at(history, 2.0).lately("a", {1000: 7, 2000: 1}) == {1000: 2, 2000: 1}
    late = at(history, 2.0 + WINDOW_S).lately("a", {1000: 8, 2000: 1})
    assert late == {1000: 1}
    assert at(history, 3.0 + WINDOW_S).lately("a", {1000: 1}) == {1000: 1}, (
        "the process began again"
    )


def test_what_is_not_asked_for_is_forgotten() -> None:
    history = History()
    history.begin(0.0)
    for number in range(1000):
        history.rate(("r", number), 1)
        history.since(("s", number), True)
        history.lately(("t", number), {5: 1})
        history.trend(("l", number), 1)
    history.begin(KEEP_S + 1)
    assert (history._latest, history._levels, history._since, history._times) == ({}, {}, {}, {})


def test_every_time_has_a_bucket_that_it_fits_to_within_a_quarter() -> None:
    for power in range(63):
        for spent_ns in {1 << power, (1 << power) + (1 << power) // 3, (2 << power) - 1}:
            bucket = bucket_of(spent_ns)
            assert 0 <= bucket < BUCKETS
            assert spent_ns < bucket_end(bucket) <= (spent_ns + 4) * 1.25


def test_every_way_to_record_a_call_counts_it_in_its_bucket() -> None:
    tally = Tally()
    tally.returned(time.monotonic_ns())
    tally.took(time.monotonic_ns() - 10**9)
    tally.timing(lambda argument: argument)(None)
    assert sum(tally.times) == tally.timed == 3
    assert tally.times[bucket_of(10**9)] == 1
    assert max(tally.shown_times()) >= 10**9


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_percentile_from_buckets_is_right_to_within_an_eighth(share: float) -> None:
    rng = random.Random(7)
    spent_ns = [round(rng.lognormvariate(14, 1.5)) for _ in range(20_000)]
    tally = Tally()
    for each in spent_ns:
        tally.times[bucket_of(each)] += 1
    exact_ms = sorted(spent_ns)[round(share * len(spent_ns))] / 1e6
    found_ms = percentile(tally.shown_times(), share)
    assert found_ms is not None
    assert abs(found_ms - exact_ms) <= exact_ms / 8 + 1e-6


def test_the_times_of_several_members_add_up() -> None:
    assert merged([{1: 2, 5: 1}, {5: 3}, {}]) == {1: 2, 5: 4}
    assert percentile({}, 0.99) is None
