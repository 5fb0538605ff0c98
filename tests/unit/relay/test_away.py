"""Who is away, and what is told to whom when they are back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relay.core import away
from relay.core.away import AWAY_US, MAX_BEGUN, Away

ONE, TWO, NEW = bytes(16), bytes([1]) * 16, bytes([2]) * 16


def route(user: str = "ann") -> Any:
    return Hashed(neighbor=SimpleNamespace(user=user))


class Hashed(SimpleNamespace):
    __hash__ = object.__hash__


def test_each_hears_what_began_since_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Away()
    first, second = route(), route()
    there.left(ONE, 1)
    there.began(first)
    there.left(TWO, 2)
    there.began(second)
    assert there.back(TWO, 3) == [second]
    assert there.back(TWO, 3) == [first, second]  # a relay that was not known: `ONE`, started again
    assert not there
    assert there.back(ONE, 4) == []


def test_a_relay_that_was_started_again_takes_the_place_of_who_left_first() -> None:
    there = Away()
    there.left("ber", 1)
    there.left(0, 1)  # of a relay that was started again itself
    there.left(ONE, 2)
    began = route()
    there.began(began)
    assert there.back("cph", 3) == [began]
    assert there.back(NEW, 3) == [began]
    assert there.back(TWO, 3) == []
    assert there.back("ber", 3) == [began]


def test_what_is_kept_is_bounded_and_shared_by_users(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Away()
    there.left(ONE, 1)
    mine = [route() for _ in range(MAX_BEGUN)]
    for one in mine:
        there.began(one)
    other = route("bob")
    there.began(other)
    share = MAX_BEGUN * 3 // 4
    assert there.untold == MAX_BEGUN - share
    assert there.back(ONE, 2) == [*mine[:share], other]
    assert there._users == {}
    monkeypatch.setattr(away, "MAX_AWAY", 2)
    for who in (ONE, TWO, NEW):
        there.left(who, 3)
    assert list(there._since) == [TWO, NEW]


def test_who_is_away_for_an_hour_is_forgotten_with_what_began() -> None:
    there = Away()
    there.left(ONE, 1)
    there.began(route())
    there.left(TWO, AWAY_US)
    there.expire(AWAY_US + 1)
    assert list(there._since) == [TWO]
    assert there._begun == {}
    assert there._users == {}
