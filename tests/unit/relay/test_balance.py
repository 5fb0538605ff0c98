"""Which member, or which relay, takes the next message."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from iris.wire.kinds import Kind
from relay.core.balance import pick
from relay.core.neighbor import Load


def load(
    messages: int = 0, concurrency: int = 4, *, others: int = 0, limit_bytes: int = 1 << 20, pace_us: float = 0.0
) -> Load:  # fmt: skip
    neighbor: Any = SimpleNamespace()
    made = Load(neighbor, None, Kind.REQUEST, concurrency, limit_bytes)
    made.messages, made.others, made.bytes, made.pace_us = messages, others, 100 * messages, pace_us
    return made


def test_a_member_here_with_a_free_handler_comes_before_every_other_relay() -> None:
    here = load(messages=3)
    assert all(pick([here], [load(), load()], 100, [], turn) is here for turn in range(20))


def test_the_fewest_outstanding_of_those_here_comes_first() -> None:
    fewer = load(messages=1)
    assert all(pick([load(2), fewer, load(3)], [], 100, [], turn) is fewer for turn in range(9))


def test_a_relay_with_a_free_handler_comes_before_a_queue_here() -> None:
    free = load(messages=3)
    busy = load(messages=4, others=4)
    assert all(pick([load(4)], [busy, free], 100, [], turn) is free for turn in range(20))


def test_what_others_handed_over_counts() -> None:
    taken = load(messages=0, others=4)
    free = load(messages=3, others=0)
    assert all(pick([], [taken, free], 100, [], turn) is free for turn in range(20))


def test_equal_relays_share_alike() -> None:
    peers = [load() for _ in range(5)]
    chosen = Counter(id(pick([], peers, 100, [], turn)) for turn in range(5000))
    assert all(800 < count < 1200 for count in chosen.values())


def test_when_all_are_busy_a_slow_member_gets_no_queue() -> None:
    slow = load(messages=1, concurrency=1, pace_us=50_000)
    fast = load(messages=30, concurrency=8, pace_us=100)
    assert pick([slow], [fast], 100, [], 0) is fast
    assert pick([fast], [slow], 100, [], 0) is fast
    assert pick([slow, fast], [], 100, [], 0) is fast
    assert pick([], [slow, fast], 100, [], 0) is fast


def test_the_pace_is_measured_only_while_all_handlers_are_busy() -> None:
    member = load(messages=2, concurrency=1)
    for now_us in (1000, 1100):
        member.ended(0, now_us)
        member.messages += 1
    assert 0 < member.pace_us < 100
    before = member.pace_us
    member.messages = 0
    member.messages += 1
    member.concurrency = 2
    member.ended(0, 9_000_000)
    assert member.pace_us == before


def test_a_member_over_its_bytes_is_passed_over_unless_it_has_nothing() -> None:
    full = load(messages=4, limit_bytes=400)
    assert pick([full], [], 100, [], 0) is None
    empty = load(limit_bytes=10)
    assert pick([empty], [], 100, [], 0) is empty


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 9)), max_size=12),
    st.integers(0, 1 << 40),
    st.data(),
)
def test_what_was_tried_is_not_chosen_again_and_nobody_free_is_missed_here(
    here: list[tuple[int, int]], there: list[tuple[int, int, int]], turn: int, data: st.DataObject
) -> None:
    loads = [load(messages, concurrency) for messages, concurrency in here]
    peers = [load(messages, concurrency, others=others) for messages, concurrency, others in there]
    everybody = [*loads, *peers]
    tried = data.draw(st.lists(st.sampled_from(everybody), unique_by=id)) if everybody else []
    chosen = pick(loads, peers, 100, tried, turn)
    left = [one for one in everybody if one not in tried]
    assert chosen is None or chosen in left
    free_here = [one for one in loads if one not in tried and one.messages < one.concurrency]
    if free_here:
        assert chosen in free_here
    elif len(peers) <= 8:
        free = [
            one for one in peers if one not in tried and one.concurrency > one.messages + one.others
        ]
        assert not free or chosen in free
        assert (chosen is None) == (not left)


def test_a_member_that_waited_for_us_is_not_thought_slow() -> None:
    member = load(concurrency=1)
    for turn in range(1, 50):
        member.taken(10, turn * 10_000)
        member.ended(10, turn * 10_000 + 100)  # then it has nothing to do for 9.9 ms
    assert 99 < member.pace_us <= 100


def test_what_others_take_of_a_relay_is_in_the_pace_of_ours_and_not_counted_again() -> None:
    shared = load(messages=4, concurrency=4, others=4, pace_us=200)
    alone = load(messages=9, concurrency=4, pace_us=100)
    assert shared.wait_us() == alone.wait_us() == 1000
