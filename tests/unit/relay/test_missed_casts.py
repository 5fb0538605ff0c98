"""Who is away, and what is told to whom when they are back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relay.core import missed_casts
from relay.core.missed_casts import ABSENT_US, CLAIMED_US, MAX_CASTS, UNSURE_US, MissedCasts

ONE, TWO, NEW = bytes(16), bytes([1]) * 16, bytes([2]) * 16


class Route(SimpleNamespace):
    __hash__ = object.__hash__


def route(user: str = "ann") -> Any:
    return Route(neighbor=SimpleNamespace(user=user))


class Scene(MissedCasts):
    def __init__(self) -> None:
        self.now_us = 10 * ABSENT_US
        self.silent_us = 0
        """Time for which the most silent connection has said nothing."""
        super().__init__(lambda: self.now_us, lambda: self.now_us - self.silent_us)

    def one_sent(self, user: str = "ann") -> Any:
        began = route(user)
        self.record(began)
        return began


def test_what_each_missed_since_it_left_is_reported_to_it() -> None:
    there = Scene()
    there.disconnected(ONE, final=True)
    first = there.one_sent()
    there.disconnected(TWO, final=True)
    second = there.one_sent()
    assert there.reconnected(TWO) == [second]
    there.record(first)  # over another connection
    assert there.reconnected(ONE) == [second, first]
    assert len(there) == 0
    assert there.reconnected(ONE) == []


def test_who_is_lost_may_have_missed_what_began_a_moment_before() -> None:
    there = Scene()
    there.one_sent()
    there.now_us += UNSURE_US
    unsure = there.one_sent()
    there.now_us += UNSURE_US - 1
    there.disconnected(ONE, final=False)
    there.disconnected(TWO, final=True)
    assert there.reconnected(TWO) == []
    assert there.reconnected(ONE) == [unsure]


def test_a_process_that_stood_still_counts_from_when_it_last_received_anything() -> None:
    there = Scene()
    unsure = there.one_sent()
    there.silent_us = 60_000_000
    there.now_us += there.silent_us
    after = there.one_sent()  # before anybody notices that the connections are gone
    there.disconnected(ONE, final=False)
    assert there.reconnected(ONE) == [unsure, after]


def test_a_relay_that_was_not_known_may_be_any_of_those_that_left() -> None:
    there = Scene()
    there.disconnected(ONE, final=False)
    first = there.one_sent()
    there.disconnected(TWO, final=True)
    second = there.one_sent()
    assert there.reconnected(NEW) == [first, second]
    assert list(there._disconnected) == [ONE]  # `TWO` said goodbye: it is not back as itself
    assert there.reconnected(NEW) == [first, second]
    assert there.reconnected(NEW) == []  # more than left
    assert there.reconnected(ONE) == [first, second]  # it was another
    assert len(there) == 0


def test_who_comes_back_as_another_is_not_waited_for_as_long() -> None:
    there = Scene()
    there.disconnected(ONE, final=False)
    there.one_sent()
    there.reconnected(NEW)
    there.now_us += CLAIMED_US
    there.expire()
    assert (len(there), there._sent) == (0, {})


def test_links_of_the_relay_before_are_links_and_sites_that_this_relay_connects_to() -> None:
    there = Scene()
    for number in range(2):
        there.disconnected(number, final=True)
    began = there.one_sent()
    assert there.reconnected("ber", connected=False) == []
    assert there.reconnected("ber") == [began]
    assert there.reconnected(NEW) == [began]
    assert there.reconnected(TWO) == []


def test_what_is_kept_is_bounded_and_shared_by_users(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Scene()
    there.disconnected(ONE, final=True)
    mine = [there.one_sent() for _ in range(MAX_CASTS)]
    other = there.one_sent("bob")
    share = MAX_CASTS * 3 // 4
    assert there.unreported == MAX_CASTS - share
    assert there.reconnected(ONE) == [*mine[:share], other]
    there.now_us += UNSURE_US
    there.expire()
    assert (there._sent, there._users) == ({}, {})
    monkeypatch.setattr(missed_casts, "MAX_DISCONNECTED", 2)
    for who in (ONE, TWO, NEW):
        there.disconnected(who, final=True)
    assert list(there._disconnected) == [TWO, NEW]


def test_who_is_away_for_an_hour_is_forgotten_with_what_began() -> None:
    there = Scene()
    there.disconnected(ONE, final=True)
    there.one_sent()
    there.now_us += ABSENT_US - 1
    there.disconnected(TWO, final=True)
    assert len(there._sent) == 1
    there.now_us += 1
    there.expire()
    assert list(there._disconnected) == [TWO]
    assert (there._sent, there._users) == ({}, {})


def test_a_link_that_is_lost_takes_what_came_over_it_along() -> None:
    there = Scene()
    there.disconnected(ONE, final=True)
    passed_on, own = there.one_sent(), there.one_sent()
    there.forget(passed_on.neighbor)
    assert there.reconnected(ONE) == [own]
