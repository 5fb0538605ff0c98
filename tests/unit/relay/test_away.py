"""Who is away, and what is told to whom when they are back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relay.core import away
from relay.core.away import AWAY_US, CLAIMED_US, MAX_BEGUN, UNSURE_US, Away

ONE, TWO, NEW = bytes(16), bytes([1]) * 16, bytes([2]) * 16


class Route(SimpleNamespace):
    __hash__ = object.__hash__


def route(user: str = "ann") -> Any:
    return Route(neighbor=SimpleNamespace(user=user))


class Scene(Away):
    def __init__(self) -> None:
        self.now_us = 10 * AWAY_US
        self.silent_us = 0
        """Time for which the most silent connection has said nothing."""
        super().__init__(lambda: self.now_us, lambda: self.now_us - self.silent_us)

    def one_began(self, user: str = "ann") -> Any:
        began = route(user)
        self.began(began)
        return began


def test_each_hears_what_was_sent_since_it_left() -> None:
    there = Scene()
    there.left(ONE, final=True)
    first = there.one_began()
    there.left(TWO, final=True)
    second = there.one_began()
    assert there.back(TWO) == [second]
    there.began(first)  # over another connection
    assert there.back(ONE) == [second, first]
    assert len(there) == 0
    assert there.back(ONE) == []


def test_who_is_lost_may_have_missed_what_began_a_moment_before() -> None:
    there = Scene()
    there.one_began()
    there.now_us += UNSURE_US
    unsure = there.one_began()
    there.now_us += UNSURE_US - 1
    there.left(ONE, final=False)
    there.left(TWO, final=True)
    assert there.back(TWO) == []
    assert there.back(ONE) == [unsure]


def test_a_process_that_stood_still_counts_from_when_it_last_heard_anybody() -> None:
    there = Scene()
    unsure = there.one_began()
    there.silent_us = 60_000_000
    there.now_us += there.silent_us
    after = there.one_began()  # before anybody notices that the connections are gone
    there.left(ONE, final=False)
    assert there.back(ONE) == [unsure, after]


def test_a_relay_that_was_not_known_may_be_any_of_those_that_left() -> None:
    there = Scene()
    there.left(ONE, final=False)
    first = there.one_began()
    there.left(TWO, final=True)
    second = there.one_began()
    assert there.back(NEW) == [first, second]
    assert list(there._left) == [ONE]  # `TWO` said goodbye: it is not back as itself
    assert there.back(NEW) == [first, second]
    assert there.back(NEW) == []  # more than left
    assert there.back(ONE) == [first, second]  # it was another
    assert len(there) == 0


def test_who_comes_back_as_another_is_not_waited_for_as_long() -> None:
    there = Scene()
    there.left(ONE, final=False)
    there.one_began()
    there.back(NEW)
    there.now_us += CLAIMED_US
    there.expire()
    assert (len(there), there._begun) == (0, {})


def test_links_of_the_relay_before_are_links_and_sites_that_this_relay_connects_to() -> None:
    there = Scene()
    for number in range(2):
        there.left(number, final=True)
    began = there.one_began()
    assert there.back("ber", connected=False) == []
    assert there.back("ber") == [began]
    assert there.back(NEW) == [began]
    assert there.back(TWO) == []


def test_what_is_kept_is_bounded_and_shared_by_users(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Scene()
    there.left(ONE, final=True)
    mine = [there.one_began() for _ in range(MAX_BEGUN)]
    other = there.one_began("bob")
    share = MAX_BEGUN * 3 // 4
    assert there.untold == MAX_BEGUN - share
    assert there.back(ONE) == [*mine[:share], other]
    there.now_us += UNSURE_US
    there.expire()
    assert (there._begun, there._users) == ({}, {})
    monkeypatch.setattr(away, "MAX_AWAY", 2)
    for who in (ONE, TWO, NEW):
        there.left(who, final=True)
    assert list(there._left) == [TWO, NEW]


def test_who_is_away_for_an_hour_is_forgotten_with_what_began() -> None:
    there = Scene()
    there.left(ONE, final=True)
    there.one_began()
    there.now_us += AWAY_US - 1
    there.left(TWO, final=True)
    assert len(there._begun) == 1
    there.now_us += 1
    there.expire()
    assert list(there._left) == [TWO]
    assert (there._begun, there._users) == ({}, {})


def test_a_link_that_is_gone_takes_what_came_over_it_along() -> None:
    there = Scene()
    there.left(ONE, final=True)
    passed_on, own = there.one_began(), there.one_began()
    there.forget(passed_on.neighbor)
    assert there.back(ONE) == [own]
