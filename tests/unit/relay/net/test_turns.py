"""Turns: who is handled how long, and in which order, by a clock of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from relay.net import turns
from relay.net.turns import PEER, ROUND_NS, SHARE_NS, TURN, Turn, Turns


class Clock:
    """The monotonic clock, which stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1_000_000_000
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.ns)


class Busy:
    """A connection that takes `takes_ns` each time, and has something for `times` times."""

    def __init__(self, user: str, clock: Clock, times: int, log: list[str], takes_ns: int) -> None:
        self.turn_user = user
        self._clock = clock
        self._times = times
        self._log = log
        self._takes_ns = takes_ns

    def go_on(self) -> bool:
        self._log.append(self.turn_user)
        self._clock.ns += self._takes_ns
        self._times -= 1
        return self._times > 0


async def turn() -> None:
    await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_connections_that_wait_get_a_part_of_a_turn_together(clock: Clock) -> None:
    log: list[str] = []
    waiting = Turns()
    for _ in range(20):
        waiting.wait(Busy("eve", clock, 3, log, SHARE_NS))
    await turn()
    assert len(log) == ROUND_NS // SHARE_NS
    for _ in range(20):
        await turn()
    assert len(log) == 60
    assert not len(waiting)


async def test_a_connection_is_handled_once_a_turn(clock: Clock) -> None:
    log: list[str] = []
    waiting = Turns()
    waiting.wait(Busy("eve", clock, 3, log, 1))
    seen = []
    for _ in range(4):
        await turn()
        seen.append(len(log))
    assert seen == [1, 2, 3, 3]
    assert waiting.pauses == 3


async def test_users_take_turns_however_many_connections_one_of_them_has(clock: Clock) -> None:
    log: list[str] = []
    waiting = Turns()
    for _ in range(50):
        waiting.wait(Busy("eve", clock, 100, log, SHARE_NS))
    waiting.wait(Busy("alice", clock, 5, log, SHARE_NS))
    for _ in range(5):
        await turn()
    assert log.count("alice") == 5


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.closing = False

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing


class Owner:
    turn_user = "alice"

    def __init__(self, turns: Turns) -> None:
        self.turn = Turn(turns)
        self.transport = Transport()
        self.turn.begin(self, self.transport)
        self.went_on = 0
        self.then: Callable[[], bool] = lambda: False

    def go_on(self) -> bool:
        self.went_on += 1
        return self.then()


async def test_a_share_ends_and_what_is_read_again_in_the_same_turn_counts_in_it(
    clock: Clock,
) -> None:
    owner = Owner(Turns())
    begun_us = clock.ns // 1000
    assert owner.turn.has_time(begun_us)
    owner.turn.hold(begun_us)
    clock.ns += SHARE_NS
    assert not owner.turn.has_time(clock.ns // 1000)
    await turn()  # the event loop has made a turn
    assert owner.turn.has_time(clock.ns // 1000)


async def test_who_waits_for_its_turn_is_not_read_and_goes_on_in_the_next(clock: Clock) -> None:
    owner = Owner(Turns())
    owner.turn.wait()
    assert owner.turn.paused
    assert not owner.transport.reading
    await turn()
    assert owner.went_on == 1
    owner.turn.resume(TURN)
    assert owner.transport.reading


async def test_who_does_not_read_is_not_handled_until_it_does(clock: Clock) -> None:
    owner = Owner(Turns())
    owner.turn.pause(PEER)
    owner.turn.wait()
    assert owner.turn.peer_is_behind
    assert not owner.turn.has_time(clock.ns // 1000)
    await turn()
    assert not owner.went_on
    owner.turn.resume(PEER)
    await turn()
    assert owner.went_on == 1
    assert not owner.transport.reading  # it still waits for its turn
    owner.turn.resume(TURN)
    assert owner.transport.reading


async def test_a_transport_that_closes_is_left_alone(clock: Clock) -> None:
    owner = Owner(Turns())
    owner.turn.pause(TURN)
    owner.transport.closing = True
    owner.turn.resume(TURN)
    assert not owner.transport.reading


def test_the_shares_are_what_the_pages_say() -> None:
    assert (turns.SHARE_NS, turns.ROUND_NS) == (1_000_000, 4_000_000)
