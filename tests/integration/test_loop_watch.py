"""A handler that holds up the event loop is logged by name; one that awaits, or runs in threads, is not."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.waiting import PATIENCE_S, until

import iris
from iris import loop_watch
from iris.loop_watch import LoopWatch, handlers_of
from iris.testing import LocalCluster


class Log(logging.Handler):
    """Keeps the fields of each event about a held loop."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []
        self.arrived = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "service.loop_held":
            self.fields.append(record.fields)  # type: ignore[attr-defined]  # set by `extra`
            self.arrived.set()

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(fields["cluster"], fields["handler"]) for fields in self.fields]


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logging.getLogger("iris.service").addHandler(handler)
    yield handler
    logging.getLogger("iris.service").removeHandler(handler)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that make a test short."""
    monkeypatch.setattr(loop_watch, "TICK_S", 0.002)
    monkeypatch.setattr(loop_watch, "LIMIT_S", 0.004)
    monkeypatch.setattr(loop_watch, "TOO_LONG_S", 0.01)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """After each test no loop is watched, and the thread ends."""
    yield
    assert not loop_watch._watches
    for thread in threading.enumerate():
        if thread.name == "iris-loop-watch":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["plain", "coroutine", "middleware"])
async def test_a_handler_that_holds_the_loop_is_logged_while_it_does(
    quick: None, log: Log, kind: str
) -> None:
    async def around(request: iris.Request, call_next: iris.CallNext) -> Any:
        assert log.arrived.wait(PATIENCE_S)
        return await call_next(request)

    def plain(payload: bytes) -> None:
        assert log.arrived.wait(PATIENCE_S)

    async def coroutine(payload: bytes) -> None:
        plain(payload)

    async def nothing(payload: bytes) -> None: ...

    service = iris.Service("slow", middleware=[around] if kind == "middleware" else [])
    service.on_request({"plain": plain, "coroutine": coroutine}.get(kind, nothing))
    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await client.request("slow", b"", timeout=PATIENCE_S)
        (member,) = await client.describe("slow", timeout=PATIENCE_S)
        assert member.loop_held == 1
    assert log.names == [("slow", {"middleware": "around"}.get(kind, kind))]
    assert log.fields[0]["ms"] >= 10


async def test_a_handler_in_threads_is_not_watched() -> None:
    service = iris.Service("slow")

    @service.on_request(threads=1)
    def threaded(payload: bytes) -> None: ...

    @service.on_push("now")
    async def awaiting(payload: bytes) -> None: ...

    assert service.in_loop == [awaiting]


class Held:
    """A function of a handler that runs in this thread, while another thread looks at it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.watch = LoopWatch(self.loop)
        self.problems: list[BaseException] = []

    def run(self, looking: Callable[[], None]) -> None:
        """Run `handler` until `looking` has run in another thread."""

        def handler() -> None:
            thread.start()
            thread.join(PATIENCE_S)

        def guarded() -> None:
            try:
                looking()
            except BaseException as err:
                self.problems.append(err)

        thread = threading.Thread(target=guarded)
        self.watch._watched = [handlers_of("slow", [handler])]
        handler()
        assert not self.problems, self.problems

    def turn(self) -> None:
        """Let the loop run once."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def held() -> Iterator[Held]:
    found = Held()
    yield found
    found.loop.close()


def test_a_call_under_the_limit_is_not_logged(held: Held, log: Log) -> None:
    watch = held.watch
    kept: list[Any] = []
    held.run(lambda: kept.append(watch.look(watch.look(None, 5.0), 5.09)))
    held.turn()
    assert watch.look(kept[0], 9.0) is None
    assert log.fields == []


def test_a_call_over_the_limit_is_logged_when_it_has_ended(held: Held, log: Log) -> None:
    watch = held.watch
    kept: list[Any] = []

    def looking() -> None:
        suspect = watch.look(None, 5.0)
        for now_s in (5.05, 5.1, 5.15):
            suspect = watch.look(suspect, now_s)
        assert log.fields == []
        kept.append(suspect)

    held.run(looking)
    (suspect,) = kept
    assert watch.look(suspect, 5.2) is suspect  # the loop has not run yet
    held.turn()
    assert watch.look(suspect, 5.25) is None
    assert log.fields == [{"cluster": "slow", "handler": "handler", "ms": 150}]
    assert suspect.frame is None


def test_calls_that_are_short_each_are_not_taken_for_a_long_one(held: Held, log: Log) -> None:
    watch = held.watch
    kept: list[Any] = [None]
    for now_s in (5.0, 5.05, 5.1, 5.15, 5.2, 5.25):
        held.run(lambda now_s=now_s: kept.append(watch.look(kept[-1], now_s)))  # type: ignore[misc]
    held.turn()
    assert watch.look(kept[-1], 5.3) is None
    assert log.fields == []


def test_one_handler_is_logged_once_a_minute(held: Held, log: Log) -> None:
    watch = held.watch
    for start_s in (100.0, 159.0, 161.0):

        def looking(start_s: float = start_s) -> None:
            suspect = watch.look(None, start_s)
            for later_s in (0.5, 1.0, 1.5):
                suspect = watch.look(suspect, start_s + later_s)

        held.run(looking)
        held.turn()
    assert [fields["ms"] for fields in log.fields] == [1000, 1000]


async def test_services_of_one_loop_share_one_thread(log: Log) -> None:
    def threads() -> int:
        return sum(thread.name == "iris-loop-watch" for thread in threading.enumerate())

    first, second = iris.Service("a"), iris.Service("b")
    for service in (first, second):
        service.on_request(lambda payload: payload)
    async with LocalCluster() as cluster, cluster.client() as client:
        async with client.serve(first):
            async with client.serve(second):
                assert threads() == 1
            assert threads() == 1
        await until(lambda: threads() == 0)
