"""How far the clocks of two hosts differ, by the beats between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.core.heartbeat import BEAT_US, SAMPLES, Heartbeat
from iris.wire.codec import decode_control, encode_control
from iris.wire.frames import Beat
from relay.core.clocks import clock_status

WALL_US = 1_790_000_000_000_000


class Side:
    """A relay: its clocks show the true time and something more."""

    def __init__(self, mono_us: int, wall_us: int) -> None:
        self.mono_us = mono_us
        self.wall_us = wall_us
        self.beats: Heartbeat

    def beat(self, true_us: int, *, told: bool = True) -> Beat:
        return self.beats.beat(true_us + self.mono_us, 0, true_us + self.wall_us if told else None)

    def hear(self, beat: Beat, true_us: int) -> None:
        self.beats.on_beat(beat, true_us + self.mono_us)

    def offset(self, true_us: int) -> tuple[int, int]:
        """Return what it says of the other's clock: (offset, error)."""
        found = self.beats.wall_offset(true_us + self.mono_us, true_us + self.wall_us)
        assert found is not None
        return found


def pair(rng: random.Random, wall_us: int) -> tuple[Side, Side]:
    """Return two sides; the wall clock of the second is ahead of that of the first by `wall_us`."""
    one = Side(rng.randrange(1, 10**12), WALL_US)
    two = Side(rng.randrange(1, 10**12), WALL_US + wall_us)
    one.beats, two.beats = Heartbeat(two.mono_us, one.mono_us), Heartbeat(one.mono_us, two.mono_us)
    return one, two


def exchange(
    one: Side, two: Side, rng: random.Random, begin_us: int, count: int, slow_us: int
) -> int:
    """Let both beat `count` times, with delays of up to `slow_us` for each way; return the time after that."""
    true_us = begin_us
    for _ in range(count):
        for sender, receiver in ((one, two), (two, one)):
            beat = sender.beat(true_us)
            true_us += rng.randrange(slow_us + 1)
            receiver.hear(beat, true_us)
        true_us += BEAT_US
    return true_us


@given(st.integers(0, 2**32), st.integers(-(10**13), 10**13), st.integers(0, 2_000_000))
def test_the_difference_of_two_wall_clocks_is_within_the_error_that_is_shown(
    seed: int, wall_us: int, slow_us: int
) -> None:
    rng = random.Random(seed)
    one, two = pair(rng, wall_us)
    now_us = exchange(one, two, rng, 0, 2 * SAMPLES, slow_us)
    offset_us, error_us = one.offset(now_us)
    assert abs(offset_us - wall_us) <= error_us + 1
    assert error_us <= slow_us + 1
    back_us, _ = two.offset(now_us)
    assert abs(back_us + wall_us) <= slow_us + 1


def test_a_wall_clock_that_is_set_shows_at_the_next_beat() -> None:
    rng = random.Random(1)
    one, two = pair(rng, 0)
    now_us = exchange(one, two, rng, 0, 5, 300)
    assert abs(one.offset(now_us)[0]) <= 300
    two.wall_us += 5_000_000
    now_us = exchange(one, two, rng, now_us, 1, 300)
    assert abs(one.offset(now_us)[0] - 5_000_000) <= 300
    one.wall_us += 5_000_000  # our own shows at once
    assert abs(one.offset(now_us)[0]) <= 300


def test_a_peer_that_does_not_say_its_wall_clock_has_no_offset() -> None:
    rng = random.Random(2)
    one, two = pair(rng, 0)
    for second in range(3):
        one.hear(two.beat(second * BEAT_US, told=False), second * BEAT_US + 100)
        two.hear(one.beat(second * BEAT_US + 200), second * BEAT_US + 300)
    assert one.beats.wall_offset(0, 0) is None
    assert clock_status(one.beats, 0, 0) == {"clock_offset_us": None, "clock_error_us": None}
    assert clock_status(two.beats, 0, None) == {"clock_offset_us": None, "clock_error_us": None}
    assert (
        clock_status(two.beats, 3 * BEAT_US + two.mono_us, two.wall_us)["clock_error_us"]
        is not None
    )


def test_a_beat_without_a_wall_clock_is_as_it_was_before_that_field() -> None:
    frame = encode_control(Beat(7, 6, 1, 2))
    assert b"wall_us" not in frame
    assert b"wall_us" in encode_control(Beat(7, 6, 1, 2, 8))


@pytest.mark.parametrize("most", [0, (1 << 63) - 1])
def test_times_that_cannot_be_leave_a_status_that_can_be_shown(most: int) -> None:
    beats = Heartbeat(most, 5)
    frame = encode_control(Beat(most, most or 1, most, 0, most))
    beat = decode_control(memoryview(frame), 0, len(frame))
    assert isinstance(beat, Beat)
    beats.on_beat(beat, 10)
    found = clock_status(beats, 10, WALL_US)
    assert isinstance(found["clock_offset_us"], int)
    assert abs(found["clock_offset_us"]) < 1 << 66
