"""`on_cancel="cancel"`: a handler ends with its caller, and without it a handler runs to its end."""

# ruff: noqa: SIM117 - one `async with` per party shows who is inside whom

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from integration.kit import cut, named
from support.waiting import until

import iris
from iris.config import Limits
from iris.errors import ConfigError
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(60)


class Work:
    """A service whose handler waits, and what happened to each of its requests."""

    def __init__(self, *, concurrency: int = 8, cancel: bool = True, survey: bool = False) -> None:
        self.service = iris.Service("work", limits=Limits(concurrency=concurrency))
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self.go = asyncio.Event()
        on_cancel: Any = "cancel" if cancel else "finish"
        on = self.service.on_survey if survey else self.service.on_request
        on(on_cancel=on_cancel)(self._handle)

    async def _handle(self, payload: str) -> str:
        self.begun.append(payload)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(payload)
            raise
        self.ended.append(payload)
        return payload


async def stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def request(client: iris.Client, payload: str, timeout: float = 50.0) -> asyncio.Task[Any]:
    return asyncio.create_task(client.request("work", payload, timeout=timeout))


async def balanced(cluster: LocalCluster) -> None:
    """Wait until the relay has nothing in flight, and check that its account balances."""
    router = cluster.relay.router
    await until(lambda: router.under_way == (0, 0))
    assert router.accounts.balance() == 0
    assert all(neighbor.pending == 0 for neighbor in router.neighbors.values())


@pytest.mark.parametrize("how", ["task cancelled", "timeout", "client closed", "connection lost"])
async def test_a_handler_is_cancelled_when_its_caller_leaves(how: str) -> None:
    work = Work()
    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(work.service) as binding,
    ):
        async with named(cluster, "caller", drain_timeout_s=0.1) as caller:
            task = request(caller, "x", 0.2 if how == "timeout" else 50.0)
            await until(lambda: work.begun == ["x"])
            if how == "task cancelled":
                await stop(task)
            elif how == "timeout":
                with pytest.raises(iris.RequestTimeout):
                    await task
            elif how == "client closed":
                await caller.close()
                with pytest.raises(iris.ConnectionLost):
                    await task
            else:
                await cut(cluster, "caller")
                with pytest.raises(iris.ConnectionLost):
                    await task
            await until(lambda: work.cancelled == ["x"])
            await until(lambda: binding.running == 0)
        await balanced(cluster)
        assert member.counters.get("failed handlers", 0) == 0
        work.go.set()
        async with cluster.client() as other:
            assert await other.request("work", "y", timeout=5.0) == b"y"
        assert (work.begun, work.ended) == (["x", "y"], ["y"])
        await balanced(cluster)


async def test_by_default_a_handler_runs_to_its_end() -> None:
    work = Work(cancel=False)
    async with LocalCluster() as cluster, cluster.client() as member, member.serve(work.service):
        async with cluster.client() as caller, cluster.client() as other:
            task = request(caller, "x")
            await until(lambda: work.begun == ["x"])
            await stop(task)
            later = request(other, "y")  # a cancel of x would arrive before it
            await until(lambda: work.begun == ["x", "y"])
            work.go.set()
            assert await later == b"y"
        assert (work.cancelled, work.ended) == ([], ["x", "y"])
        await balanced(cluster)


async def test_a_call_that_is_still_queued_does_not_run_at_all() -> None:
    work = Work(concurrency=1)
    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(work.service) as binding,
    ):
        async with cluster.client() as caller:
            first, second, third = (request(caller, name) for name in "123")
            await until(lambda: binding.running == 3)
            await stop(second)
            await until(lambda: cluster.relay.router._calls.leaving.notified == 1)
            work.go.set()
            assert (await first, await third) == (b"1", b"3")
            await until(lambda: binding.running == 0)
        assert (work.begun, work.cancelled) == (["1", "3"], [])
        assert member.counters["caller left"] == 1
        await balanced(cluster)


async def test_the_slot_of_a_cancelled_call_is_free_when_its_handler_has_ended() -> None:
    service = iris.Service("work", limits=Limits(concurrency=1))
    stages: list[str] = []
    cleaned = asyncio.Event()

    @service.on_request(on_cancel="cancel")
    async def handle(payload: str) -> str:
        stages.append(f"begin {payload}")
        if payload == "x":
            try:
                await asyncio.Event().wait()
            finally:
                stages.append("clean up x")
                await cleaned.wait()
                stages.append("cleaned x")
        return payload

    async with LocalCluster() as cluster, cluster.client() as member, member.serve(service):
        async with cluster.client() as caller:
            task = request(caller, "x")
            await until(lambda: stages == ["begin x"])
            await stop(task)
            await until(lambda: stages[-1] == "clean up x")
            later = request(caller, "y")
            await until(lambda: sum(cluster.relay.router.under_way) == 2)
            cleaned.set()
            assert await later == b"y"
        assert stages == ["begin x", "clean up x", "cleaned x", "begin y"]
        await balanced(cluster)


async def test_a_handler_may_refuse_to_be_cancelled_and_its_worker_goes_on() -> None:
    service = iris.Service("work", limits=Limits(concurrency=1))
    seen: list[str] = []
    begun = asyncio.Event()

    @service.on_request(on_cancel="cancel")
    async def handle(payload: str) -> str:
        seen.append(payload)
        if payload == "x":
            with contextlib.suppress(asyncio.CancelledError):
                begun.set()
                await asyncio.Event().wait()
            seen.append("swallowed")
            await asyncio.sleep(0)
        async with asyncio.timeout(5.0):
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        seen.append(f"cancelling {task.cancelling()}")
        return payload

    async with LocalCluster() as cluster, cluster.client() as member, member.serve(service):
        async with cluster.client() as caller:
            task = request(caller, "x")
            await begun.wait()
            await stop(task)
            assert await caller.request("work", "y", timeout=5.0) == b"y"
        assert seen == ["x", "swallowed", "cancelling 1", "y", "cancelling 0"]
        await balanced(cluster)


async def test_an_error_while_a_cancelled_handler_cleans_up_is_logged() -> None:
    service = iris.Service("work")
    begun = asyncio.Event()

    @service.on_request(on_cancel="cancel")
    async def handle(payload: str) -> str:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            raise ValueError("the clean-up failed")

    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        async with cluster.client() as caller:
            task = request(caller, "x")
            await begun.wait()
            await stop(task)
            await until(lambda: binding.running == 0)
        assert member.counters["failed handlers"] == 1
        await balanced(cluster)


async def test_a_survey_that_is_left_cancels_its_handlers() -> None:
    work = Work(survey=True)
    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(work.service) as binding,
    ):
        async with cluster.client() as caller:
            answers = aiter(caller.survey("work", "x", timeout=50.0))
            waiting = asyncio.ensure_future(anext(answers))
            await until(lambda: work.begun == ["x"])
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            await answers.aclose()
            await until(lambda: work.cancelled == ["x"])
            await until(lambda: binding.running == 0)
        await balanced(cluster)


async def test_request_many_that_is_left_cancels_what_it_sent() -> None:
    work = Work()
    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(work.service) as binding,
    ):
        async with cluster.client() as caller:
            outcomes = caller.request_many("work", ["1", "2", "3"], timeout=50.0)
            waiting = asyncio.ensure_future(anext(outcomes))
            await until(lambda: sorted(work.begun) == ["1", "2", "3"])
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            assert work.cancelled == []  # another wait may follow
            del outcomes, waiting
            await until(lambda: sorted(work.cancelled) == ["1", "2", "3"])
            await until(lambda: binding.running == 0)
        await balanced(cluster)


async def test_the_handlers_of_a_member_that_lost_its_relay_are_cancelled() -> None:
    work = Work()
    async with (
        LocalCluster() as cluster,
        named(cluster, "member") as member,
        cluster.client() as caller,
    ):
        async with member.serve(work.service) as binding:
            task = request(caller, "x")
            await until(lambda: work.begun == ["x"])
            await cut(cluster, "member")
            with pytest.raises(iris.ConnectionLost):
                await task
            await until(lambda: work.cancelled == ["x"])
            await until(lambda: binding.running == 0)
            work.go.set()
            await caller.wait_for_members("work", 1, timeout=5.0)
            assert await caller.request("work", "y", timeout=5.0) == b"y"


async def test_a_service_that_stops_cancels_as_before() -> None:
    work = Work()
    async with LocalCluster() as cluster, cluster.client() as caller:
        async with named(cluster, "member", drain_timeout_s=0.05) as member:
            async with member.serve(work.service):
                task = request(caller, "x")
                await until(lambda: work.begun == ["x"])
            with pytest.raises(iris.RemoteError, match="the member stopped before it answered"):
                await task
        assert work.cancelled == ["x"]
        await balanced(cluster)


async def test_what_a_cancelled_handler_called_is_cancelled_too() -> None:
    back = Work()
    front = iris.Service("front")
    async with LocalCluster() as cluster, cluster.client() as member, cluster.client() as caller:

        @front.on_request(on_cancel="cancel")
        async def forward(payload: str) -> bytes:
            return await member.request("work", payload, timeout=50.0)

        async with member.serve(back.service), member.serve(front):
            task = asyncio.create_task(caller.request("front", "x", timeout=50.0))
            await until(lambda: back.begun == ["x"])
            await stop(task)
            await until(lambda: back.cancelled == ["x"])
        await balanced(cluster)


async def test_of_several_methods_only_those_that_ask_are_cancelled() -> None:
    service = iris.Service("work")
    begun: list[str] = []
    ended: list[str] = []
    go = asyncio.Event()

    async def handle(payload: str) -> None:
        begun.append(payload)
        try:
            await go.wait()
            ended.append(f"{payload} finished")
        except asyncio.CancelledError:
            ended.append(f"{payload} cancelled")
            raise

    service.on_request("count", on_cancel="cancel")(handle)
    service.on_request("pay")(handle)
    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        async with cluster.client() as caller:
            tasks = [
                asyncio.create_task(caller.request("work", name, method=name, timeout=50.0))
                for name in ("pay", "count")
            ]
            await until(lambda: sorted(begun) == ["count", "pay"])
            for task in tasks:
                await stop(task)
            await until(lambda: ended == ["count cancelled"])
            go.set()
            await until(lambda: binding.running == 0)
        assert ended == ["count cancelled", "pay finished"]
        await balanced(cluster)


def test_only_a_coroutine_function_can_be_cancelled() -> None:
    service = iris.Service("work")
    for threads in (0, 2):
        with pytest.raises(ConfigError, match="only a coroutine function can be cancelled"):

            @service.on_request(on_cancel="cancel", threads=threads)
            def plain(payload: bytes) -> bytes:
                return payload

    with pytest.raises(ConfigError, match="on_cancel must be 'finish' or 'cancel', not 'stop'"):
        service.on_request(on_cancel="stop")  # type: ignore[call-overload]  # the case under test


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_cancels_and_replies_ends_with_nothing_held(seed: int) -> None:
    import random

    rng = random.Random(seed)
    service = iris.Service("work", limits=Limits(concurrency=4))
    running: list[asyncio.Future[None]] = []

    @service.on_request(on_cancel="cancel")
    async def handle(payload: str) -> str:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.append(waiter)
        await waiter
        return payload

    async with (
        LocalCluster() as cluster,
        cluster.client() as member,
        member.serve(service) as binding,
    ):
        async with cluster.client() as caller:
            tasks: list[asyncio.Task[Any]] = []
            for number in range(200):
                tasks.append(request(caller, str(number)))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.4:
                    rng.choice(tasks).cancel()
                if running and rng.random() < 0.6:
                    waiter = running.pop(rng.randrange(len(running)))
                    if not waiter.done():
                        waiter.set_result(None)
            while not all(task.done() for task in tasks):
                while running:
                    waiter = running.pop()
                    if not waiter.done():
                        waiter.set_result(None)
                await asyncio.sleep(0)
            for number, task in enumerate(tasks):
                assert task.cancelled() or task.result() == b"%d" % number
            await until(lambda: binding.running == 0)
        assert member.counters.get("failed handlers", 0) == 0
        session = member._runtime.session
        assert session is not None
        assert session.cancels == {}, "nothing of what ended is remembered"
        await balanced(cluster)
