"""What leaves a store rests on objects that are in the bucket, in the order of their numbers."""

from __future__ import annotations

import random

import pytest

from iris.crypto.keys import GroupKey
from relay.store.bucket.sealing import NO_HASH, Intent, Numbered, Sealer, hash_of
from relay.store.bucket.writer import FLUSH_US, GATHER_US, Flying, Writer

SEALER = Sealer(GroupKey(bytes(32)), lambda size: bytes(size))
ENTRY = Intent("0" * 32)


class Answer:
    """An output that writes down what became of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def release(self) -> None:
        self.log.append(self.name)

    def withdraw(self, reason: str) -> None:
        self.log.append(f"{self.name}: {reason}")


@pytest.fixture
def log() -> list[str]:
    return []


def writer(**settings: int) -> Writer:
    return Writer("f" * 32, SEALER, NO_HASH, **settings)


def written(to: Writer, count: int) -> list[Flying]:
    """Write `count` objects of one entry each; return them as they take off."""
    flying = []
    for _ in range(count):
        to.add(ENTRY, 10, 0)
        to.close_object()
        flying += to.take_off(0)
    return flying


def test_an_object_leaves_when_its_time_or_its_size_is_reached() -> None:
    ours = writer(max_bytes=100)
    assert ours.add(ENTRY, 10, 1000) == 1
    assert ours.next_us == 1000 + GATHER_US
    assert not ours.take_off(1000 + GATHER_US - 1)
    assert [one.number for one in ours.take_off(1000 + GATHER_US)] == [1]
    assert [ours.add(ENTRY, 60, 0) for _ in range(3)] == [2, 2, 3]
    assert [one.number for one in ours.take_off(0)] == [2]


def test_writes_that_go_on_leave_in_one_object_for_each_flush_time() -> None:
    ours = writer()
    left = []
    for at_us in range(0, 10 * FLUSH_US, 1000):
        ours.add(ENTRY, 10, at_us)
        for flying in ours.take_off(at_us):
            left.append(at_us)
            ours.landed(flying)
    assert left == list(range(GATHER_US, 10 * FLUSH_US, FLUSH_US))


def test_a_write_waits_no_longer_than_the_flush_time_whatever_came_before() -> None:
    rng = random.Random(1)
    ours = writer()
    now_us = 0
    for _ in range(200):
        now_us += rng.randrange(3 * FLUSH_US)
        ours.add(ENTRY, 10, now_us)
        assert ours.next_us <= now_us + FLUSH_US
        now_us = max(now_us, ours.next_us)
        assert ours.take_off(now_us)[0].number == ours.number - 1
        ours.landed(ours.flying[0])


def test_what_fills_an_object_does_not_make_the_rest_wait() -> None:
    ours = writer(max_bytes=100)
    ours.add(ENTRY, 100, 0)
    ours.add(ENTRY, 10, 0)
    assert ours.next_us == GATHER_US


def test_an_object_that_can_leave_at_once_leaves_before_it_is_full() -> None:
    ours = writer(max_bytes=100, early_bytes=30, window=2)
    flying = []
    for _ in range(4):
        ours.add(ENTRY, 30, 0)
        flying += ours.take_off(0)
    assert [one.number for one in flying] == [1, 2], "two fly, so the third grows"
    ours.landed(flying[0])
    (third,) = ours.take_off(0)
    content = SEALER.open(third.key, third.sealed)
    assert isinstance(content, Numbered)
    assert content.entries == [ENTRY, ENTRY]


def test_whoever_puts_objects_learns_of_each_change_but_not_of_each_write() -> None:
    ours = writer(max_bytes=100)
    changes: list[str] = []

    def changed(why: str) -> None:
        ours.on_change = lambda: changes.append(why)

    changed("the first write")
    ours.add(ENTRY, 10, 0)
    ours.add(ENTRY, 10, 0)
    changed("full")
    ours.add(ENTRY, 100, 0)
    (flying,) = ours.take_off(0)
    changed("known")
    ours.landed(flying)
    changed("ended")
    ours.end("taken")
    assert changes == ["the first write", "full", "known", "ended"]


def test_objects_name_the_one_before() -> None:
    flying = written(writer(), 3)
    before = NO_HASH
    for one in flying:
        content = SEALER.open(one.key, one.sealed)
        assert isinstance(content, Numbered)
        assert content.before == before
        before = hash_of(one.sealed)


def test_answers_leave_in_the_order_of_numbers_whatever_lands_first(log: list[str]) -> None:
    ours = writer()
    flying = written(ours, 3)
    for number in (3, 1, 2):
        ours.hold(number, Answer(log, f"on {number}"))
    ours.landed(flying[2])
    ours.landed(flying[1])
    assert (log, ours.known) == ([], 0)
    ours.landed(flying[0])
    assert (log, ours.known) == (["on 1", "on 2", "on 3"], 3)
    ours.hold(3, Answer(log, "at once"))
    assert log[-1] == "at once"


def test_an_object_leaves_only_a_few_numbers_ahead_of_what_is_known_to_be_there() -> None:
    ours = writer(window=2)
    flying = written(ours, 4)
    assert [one.number for one in flying] == [1, 2]
    ours.landed(flying[1])
    assert not ours.take_off(0), "object 1 is still absent"
    ours.landed(flying[0])
    assert [one.number for one in ours.take_off(0)] == [3, 4]
    assert [one.number for one in ours.flying] == [3, 4]


def test_a_journal_that_ended_withdraws_what_waits_and_lets_nothing_out(log: list[str]) -> None:
    ours = writer()
    flying = written(ours, 2)
    ours.hold(2, Answer(log, "second"))
    ours.landed(flying[0])
    ours.end("taken")
    ours.end("again")
    ours.landed(flying[1])
    ours.hold(1, Answer(log, "later"))
    assert log == ["second: taken", "later: taken"]
    assert not ours.take_off(1 << 60)


def test_a_full_backlog_is_noticed_and_passes(log: list[str]) -> None:
    ours = writer(backlog_bytes=25)
    flying = written(ours, 2)
    assert not ours.full
    flying += written(ours, 1)
    assert ours.full
    for one in flying:
        ours.landed(one)
    assert not ours.full
    assert ours.idle
