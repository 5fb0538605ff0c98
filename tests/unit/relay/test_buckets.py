"""Token buckets of rate quotas, whatever the clock does."""

from __future__ import annotations

from relay.core.buckets import Bucket, Rate

HOUR_US = 3_600_000_000


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    bucket = Bucket("quota", Rate(messages=10, bytes=1000), HOUR_US)
    bucket.take(5, 500)
    assert not bucket.is_empty(0)
    bucket.take(4, 400)
    assert not bucket.is_empty(0)
    bucket.take(1, 100)
    assert bucket.is_empty(0)
    assert not bucket.is_empty(1_000_000), "it refills from the new time on"


def test_a_clock_that_jumps_ahead_gives_one_second_only() -> None:
    bucket = Bucket("quota", Rate(messages=10), 0)
    assert not bucket.is_empty(1000 * HOUR_US)
    bucket.take(10, 0)
    assert bucket.is_empty(1000 * HOUR_US)


def test_a_frame_that_overdraws_has_to_be_paid_back() -> None:
    bucket = Bucket("quota of 'a' (address_rate)", Rate(messages=10), 0)
    assert not bucket.is_empty(0)
    bucket.take(65_535, 0)
    assert bucket.is_empty(6_552_000_000)
    assert "; wait 600 ms, or raise the quota" in bucket.refuse(1)
    assert not bucket.is_empty(6_553_000_000)
