"""A handler knows the deadline of its request, and the calls that it makes itself end no later."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from integration.kit import freeze, named
from support.waiting import until

import iris
import iris.blocking
from iris.deadlines import HANDLED, carried
from iris.logs import event_of
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)

SHORT = 5.0
"""Timeout of the caller."""
LONG = 50.0
"""Timeout of what its handler calls."""


@pytest.fixture(autouse=True)
def nothing_stays_handled() -> Any:
    yield
    assert HANDLED == {}


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster() as made:
        yield made


def clock() -> iris.Service:
    """Return a service that answers every request and survey with the seconds that it has left."""
    service = iris.Service("clock")

    async def left(request: iris.Request) -> float:
        return request.remaining()

    service.on_request(left)
    service.on_survey(left)

    @service.on_tunnel
    async def tunnel(line: iris.Tunnel) -> None:
        await line.recv()

    return service


def front(work: Callable[[iris.Request], Awaitable[Any]], **limits: Any) -> iris.Service:
    service = iris.Service("front", **limits)

    @service.on_request
    async def handle(request: iris.Request) -> Any:
        return await work(request)

    return service


async def ask(
    cluster: LocalCluster, work: Callable[[iris.Client, iris.Request], Awaitable[Any]]
) -> Any:
    """Return what a handler gets that runs `work` for a request with a short timeout."""
    async with cluster.client() as client, cluster.client() as other, cluster.client() as caller:
        async with other.serve(clock()):
            async with client.serve(front(lambda request: work(client, request))):
                return await caller.request("front", b"", timeout=SHORT)


async def test_a_request_says_when_its_caller_stops_waiting(cluster: LocalCluster) -> None:
    seen: list[iris.Request] = []
    service = iris.Service("db")
    service.on_request(seen.append)
    service.on_push(seen.append)
    service.on_broadcast(seen.append)
    for handler in service.handlers.values():
        handler.wanted = iris.Request
    async with cluster.client() as client, client.serve(service):
        before = time.monotonic()
        await client.request("db", b"", timeout=SHORT)
        await client.push("db", b"", timeout=LONG)
        await client.broadcast("db", b"")
        await until(lambda: len(seen) == 3)
        after = time.monotonic()
    asked, pushed, cast = seen
    assert asked.deadline is not None
    assert pushed.deadline is not None
    assert before + SHORT - 0.002 <= asked.deadline <= after + SHORT
    assert before + LONG - 0.002 <= pushed.deadline <= after + LONG
    assert 0 < asked.remaining() <= SHORT
    assert (cast.deadline, cast.remaining()) == (None, math.inf)
    asked.deadline = before - 1
    assert asked.remaining() == 0.0


async def test_a_request_made_by_a_handler_ends_with_that_of_its_caller(
    cluster: LocalCluster,
) -> None:
    async def work(client: iris.Client, request: iris.Request) -> list[float]:
        mine = await client.request("clock", b"", timeout=LONG, type=float)
        async with asyncio.timeout(LONG):
            nested = await client.request("clock", b"", timeout=LONG, type=float)
        own = await client.request("clock", b"", timeout=1.0, type=float)
        return [mine, nested, own]

    mine, nested, own = await ask(cluster, work)
    assert 0 < mine <= SHORT
    assert 0 < nested <= SHORT
    assert 0 < own <= 1.0


async def test_a_handler_whose_caller_has_stopped_waiting_is_no_error_of_the_service(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    never = asyncio.Event()
    slow = iris.Service("slow")

    @slow.on_request
    async def wait(question: str) -> None:
        await never.wait()

    async def work(request: iris.Request) -> Any:
        return await between.request("slow", "x", timeout=LONG)

    async with cluster.client() as last, cluster.client() as between, cluster.client() as caller:
        async with last.serve(slow), between.serve(front(work)):
            with pytest.raises(iris.RequestTimeout):
                await caller.request("front", b"", timeout=0.2)
            await until(lambda: between.counters.get("failed handlers") == 1)
            never.set()
    (line,) = [r for r in caplog.records if event_of(r).startswith("client.handler")]
    assert (event_of(line), line.levelname, line.exc_info) == (
        "client.handler_late",
        "WARNING",
        None,
    )
    assert (
        "was not done when its caller stopped waiting: RequestTimeout: slow: " in line.getMessage()
    )


async def test_surveys_and_many_requests_inherit_it_too(cluster: LocalCluster) -> None:
    async def work(client: iris.Client, request: iris.Request) -> list[float]:
        many = client.request_many("clock", [b""] * 3, timeout=LONG, type=float)
        found = [outcome.result() async for outcome in many]
        survey = client.survey("clock", b"", timeout=LONG, type=float)
        return found + [answer async for answer in survey]

    left = await ask(cluster, work)
    assert len(left) == 4
    assert all(0 < each <= SHORT for each in left)


async def test_tasks_that_a_handler_starts_do_not_inherit_it(cluster: LocalCluster) -> None:
    later: list[asyncio.Task[float]] = []

    async def work(client: iris.Client, request: iris.Request) -> list[float]:
        async def call() -> float:
            return await client.request("clock", b"", timeout=LONG, type=float)

        later.append(asyncio.create_task(call()))
        return [*await asyncio.gather(call(), call()), await later[0]]

    assert all(SHORT < each <= LONG for each in await ask(cluster, work))


async def test_a_worker_forgets_the_deadline_of_its_last_request(cluster: LocalCluster) -> None:
    async with cluster.client() as client, client.serve(clock()):
        tasks: set[asyncio.Task[Any] | None] = set()

        async def work(request: iris.Request) -> float:
            tasks.add(asyncio.current_task())
            return await client.request("clock", b"", timeout=LONG, type=float)

        async with client.serve(front(work, limits=iris.Limits(concurrency=1))):
            left = [
                await client.request("front", b"", timeout=timeout, type=float)
                for timeout in (SHORT, 2 * LONG, SHORT)
            ]
        assert len(tasks) == 1
    assert left[0] <= SHORT < left[1] <= LONG
    assert left[2] <= SHORT


async def test_pushes_neither_pass_on_a_deadline_nor_get_one(cluster: LocalCluster) -> None:
    left: asyncio.Queue[float] = asyncio.Queue()
    async with cluster.client() as client, client.serve(clock()):
        jobs = iris.Service("jobs")

        @jobs.on_push
        async def run(request: iris.Request) -> None:
            left.put_nowait(request.remaining())
            left.put_nowait(await client.request("clock", b"", timeout=2 * LONG, type=float))

        async def work(request: iris.Request) -> None:
            await client.push("jobs", b"", timeout=LONG)

        async with client.serve(jobs), client.serve(front(work)):
            await client.request("front", b"", timeout=SHORT)
            assert SHORT < await left.get() <= LONG
            assert LONG < await left.get() <= 2 * LONG


async def test_the_error_of_a_call_that_was_cut_short_says_so(cluster: LocalCluster) -> None:
    caught: list[iris.RequestTimeout] = []
    done = asyncio.Event()
    async with (
        cluster.client() as client,
        named(cluster, "frozen") as frozen,
        frozen.serve(clock()),
    ):

        async def work(request: iris.Request) -> None:
            try:
                await asyncio.gather(*(try_each(call) for call in calls))
            finally:
                done.set()

        async def try_each(call: Callable[[], Awaitable[Any]]) -> None:
            task = asyncio.current_task()
            assert task is not None
            HANDLED[task] = handled[0]  # as in the handler's own task, but all at once
            try:
                await call()
            except iris.RequestTimeout as err:
                caught.append(err)
            finally:
                del HANDLED[task]

        async def many() -> None:
            async for outcome in client.request_many("clock", [b""], timeout=LONG):
                outcome.result()

        calls = (
            lambda: client.request("clock", b"", timeout=LONG),
            lambda: client.open_tunnel("clock", timeout=LONG),
            many,
        )
        handled: list[int] = []

        async def note(request: iris.Request) -> None:
            task = asyncio.current_task()
            assert task is not None
            handled.append(HANDLED[task])
            await work(request)

        async with client.serve(front(note)):
            thaw = freeze(cluster, "frozen")
            with pytest.raises(iris.RequestTimeout, match=r"no reply within 0\.3 s$"):
                await client.request("front", b"", timeout=0.3)
            await done.wait()
            thaw()
    assert len(caught) == 3
    for err in caught:
        assert (
            "the timeout of 50 s was cut to what was left of the request that this handler"
            in str(err)
        )
        assert err.detail in str(err)
        assert err.may_have_run


async def test_a_call_with_its_own_short_timeout_does_not_say_that_it_was_cut(
    cluster: LocalCluster,
) -> None:
    async with (
        cluster.client() as client,
        named(cluster, "frozen") as frozen,
        frozen.serve(clock()),
    ):

        async def work(request: iris.Request) -> str:
            with pytest.raises(iris.RequestTimeout) as caught:
                await client.request("clock", b"", timeout=0.05)
            return str(caught.value)

        async with client.serve(front(work)):
            thaw = freeze(cluster, "frozen")
            said = await client.request("front", b"", timeout=LONG)
            thaw()
        assert said == b"clock: no reply within 0.05 s"


async def test_a_call_after_the_deadline_is_not_sent(cluster: LocalCluster) -> None:
    async with cluster.client() as client, client.serve(clock()):
        task = asyncio.current_task()
        assert task is not None
        HANDLED[task] = time.monotonic_ns() // 1000 - 1
        sent = client.sent_messages
        for call in (
            client.request("clock", b"", timeout=LONG),
            client.open_tunnel("clock", timeout=LONG),
            anext(aiter(client.survey("clock", b"", timeout=LONG))),
        ):
            with pytest.raises(iris.RequestTimeout, match="not sent: the deadline of") as caught:
                await call
            assert not caught.value.may_have_run
        async for outcome in client.request_many("clock", [b"", b""], timeout=LONG):
            assert "not sent: the deadline of" in str(outcome.error)
        assert client.sent_messages == sent
        del HANDLED[task]


async def test_a_thread_has_the_deadline_that_is_carried_to_it(cluster: LocalCluster) -> None:
    blocking = await asyncio.to_thread(iris.blocking.connect, embedded=True)
    serving = blocking.serve(clock())
    await asyncio.to_thread(serving.__enter__)

    def call() -> float:
        return blocking.request("clock", b"", timeout=LONG, type=float)

    async def work(request: iris.Request) -> list[float]:
        return [await asyncio.to_thread(carried(call)), await asyncio.to_thread(call)]

    try:
        async with cluster.client() as client, client.serve(front(work)):
            inside, outside = await client.request("front", b"", timeout=SHORT)
    finally:
        await asyncio.to_thread(serving.__exit__, None, None, None)
        await asyncio.to_thread(blocking.close)
    assert 0 < inside <= SHORT < outside <= LONG


async def test_a_service_that_stops_leaves_no_deadline_behind(cluster: LocalCluster) -> None:
    started = asyncio.Event()

    async def work(request: iris.Request) -> None:
        started.set()
        await asyncio.Event().wait()

    async with named(cluster, "member", drain_timeout_s=0.01) as client, cluster.client() as caller:
        async with client.serve(front(work)):
            waiting = asyncio.create_task(caller.request("front", b"", timeout=LONG))
            await started.wait()
            assert len(HANDLED) == 1
        with pytest.raises(iris.RemoteError, match="the member stopped"):
            await waiting


async def test_a_request_right_after_a_publication_has_all_of_its_timeout(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.serve(clock()):
        with monkeypatch.context() as an_hour_ago:
            then_ns = time.monotonic_ns() - 3600 * 10**9
            an_hour_ago.setattr(time, "monotonic_ns", lambda: then_ns)
            client = cluster.client()
            await client.open()
            await client.request("clock", b"", timeout=SHORT)
        try:
            await client.publish("clock.ticks", b"")  # both in one turn of the event loop
            left_s = await client.request("clock", b"", timeout=SHORT)
        finally:
            await client.close()
    assert 0 < left_s <= SHORT
