"""The stream of events of a page: the newest state, within memory that no page decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from iris.dashboard import app, feed
from iris.dashboard.feed import POINTS, Feed, figures
from iris.watch import Network, Relay, Totals, Watch
from iris.web.guard import CUT

RELAY = Relay(id="1" * 32, host="a", site="", asked=True)


def network(serial: int, **more: Any) -> Network:
    return Network(serial=serial, time_us=0, interval_s=1.0, relays=[RELAY], **more)


class Looks:
    """A watch whose states the test makes."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[Network] = asyncio.Queue()

    async def updates(self) -> AsyncIterator[Network]:
        while True:
            yield await self.states.get()
            self.states.task_done()


class Followed:
    """A feed that follows a watch of the test."""

    def __init__(self) -> None:
        self.watch = Looks()
        self.feed = Feed(cast(Watch, self.watch))
        self._task = asyncio.ensure_future(self.feed.run())

    async def show(self, *states: Network) -> None:
        """Return when the feed has taken these states."""
        for state in states:
            self.watch.states.put_nowait(state)
        await self.watch.states.join()

    async def __aenter__(self) -> Followed:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def parsed(event: bytes) -> tuple[str, Any]:
    name, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_a_page_that_is_slow_misses_states_and_gets_the_newest() -> None:
    async with Followed() as followed:
        await followed.show(network(1))
        events = followed.feed.events({"version": "1"})
        assert parsed(await anext(events)) == ("hello", {"version": "1", "history": []})
        assert parsed(await anext(events))[1]["serial"] == 1
        await followed.show(*(network(n) for n in range(2, 50)))
        assert parsed(await anext(events))[1]["serial"] == 49
        await events.aclose()


async def test_a_page_that_waits_gets_a_state_when_it_is_there() -> None:
    async with Followed() as followed:
        events = followed.feed.events({})
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await followed.show(network(7))
        assert parsed(await waiting)[1]["serial"] == 7
        await events.aclose()


async def test_a_page_is_told_that_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "BEAT_S", 0.001)
    async with Followed() as followed:
        events = followed.feed.events({})
        await anext(events)
        assert (await anext(events)).startswith(b":")
        await events.aclose()


async def test_a_feed_that_is_closed_ends_its_pages() -> None:
    async with Followed() as followed:
        events = followed.feed.events({})
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        followed.feed.close()
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_the_last_minutes_are_kept_and_no_more() -> None:
    async with Followed() as followed:
        await followed.show(*(network(n) for n in range(POINTS + 20)))
        events = followed.feed.events({})
        _, hello = parsed(await anext(events))
        assert len(hello["history"]) == POINTS - 1
        await events.aclose()


def test_the_lines_of_a_page_are_the_totals_of_the_network() -> None:
    totals = Totals(in_rate=10.0, out_rate=14.0, handled_rate=3.0, refused_rate=2.0, dropped_rate=1.0, unwanted_rate=8.0)  # fmt: skip
    shown = Network(serial=1, time_us=0, interval_s=1.0, totals=totals)
    assert figures(shown) == [10.0, 14.0, 3.0, 2.0, 1.0, 8.0]
    assert figures(network(1)) == [None] * 6


async def test_the_stream_of_a_page_that_takes_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "STALLED_S", 0.001)
    ended: list[bool] = []
    cut: list[bool] = []

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with Followed() as followed:
        stream = app._EventStream(followed.feed.events({}), lambda: ended.append(True))
        scope = {"state": {CUT: lambda: cut.append(True)}}
        await stream(scope, receive, cast(Any, send))
    assert (ended, cut) == ([True], [True]), "to close it would wait for the page"


async def test_the_stream_of_a_page_that_left_is_ended() -> None:
    ended: list[bool] = []

    async def send(message: dict[str, Any]) -> None:
        pass

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async with Followed() as followed:
        stream = app._EventStream(followed.feed.events({}), lambda: ended.append(True))
        await stream({}, receive, cast(Any, send))
    assert ended == [True]
