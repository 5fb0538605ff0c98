"""A service's lifespan: entered before it joins, left after it has drained, kept through reconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from integration.kit import cut, named, port_of
from support.waiting import PATIENCE_S, until

import iris
from iris.testing import LocalCluster


class Pool:
    """A resource that says when it is used after it was closed."""

    closed = False


class Settings:
    pass


class Recorder:
    """A lifespan that yields a pool and records what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pool = Pool()

    @contextlib.asynccontextmanager
    async def lifespan(self, client: iris.Client) -> AsyncIterator[Pool]:
        assert len(await client.members("orders")) == 0
        self.events.append("entered")
        yield self.pool
        assert len(await client.members("orders")) == 0
        self.pool.closed = True
        self.events.append("left")


async def test_it_is_entered_before_the_service_joins_and_left_after_it_has_drained() -> None:
    recorder = Recorder()
    service = iris.Service("orders", lifespan=recorder.lifespan)
    started, finish = asyncio.Event(), asyncio.Event()

    @service.on_request
    async def place(number: int, pool: Pool) -> bool:
        started.set()
        await finish.wait()
        return pool.closed

    async with LocalCluster() as cluster, cluster.client() as client, asyncio.timeout(PATIENCE_S):
        async with client.serve(service):
            asking = asyncio.create_task(client.request("orders", 7, timeout=PATIENCE_S))
            await started.wait()
            asyncio.get_running_loop().call_soon(finish.set)
        assert await asking is False
        assert recorder.events == ["entered", "left"]


async def test_handlers_receive_each_object_of_a_tuple() -> None:
    pool, settings = Pool(), Settings()

    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[tuple[Pool, Settings]]:
        yield pool, settings

    service = iris.Service("orders", lifespan=lifespan)
    got: list[Any] = []

    @service.on_request
    def place(number: int, settings: Settings, pool: Pool, client: iris.Client) -> None:
        got.extend((pool, settings, client))

    async with LocalCluster() as cluster, cluster.client() as client, client.serve(service):
        await client.request("orders", 7, timeout=PATIENCE_S)
        assert got == [pool, settings, client]


async def test_an_exception_at_its_start_ends_serve_before_anything_has_joined() -> None:
    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        raise OSError("no database")
        yield

    service = iris.Service("orders", lifespan=lifespan)
    service.on_request(lambda payload: payload)
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(OSError, match="no database"):
            async with client.serve(service):
                pytest.fail("it is served")
        assert len(await client.members("orders")) == 0


async def test_it_is_left_if_a_handler_cannot_be_resolved() -> None:
    recorder = Recorder()
    service = iris.Service("orders", lifespan=recorder.lifespan)

    @service.on_request
    def place(number: int, settings: Settings) -> None: ...

    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(
            iris.ConfigError, match=r"'settings: Settings'.*available are Client, Pool"
        ):
            async with client.serve(service):
                pytest.fail("it is served")
    assert recorder.events == ["entered", "left"]


async def test_what_follows_its_yield_runs_when_the_program_fails_or_is_cancelled() -> None:
    for error in (ValueError, asyncio.CancelledError):
        recorder = Recorder()
        service = iris.Service("orders", lifespan=recorder.lifespan)
        service.on_request(lambda payload: payload)
        async with LocalCluster() as cluster, cluster.client() as client:
            serving = asyncio.Event()

            async def program(
                client: iris.Client, service: iris.Service, serving: asyncio.Event, error: type[BaseException]
            ) -> None:  # fmt: skip
                async with client.serve(service):
                    serving.set()
                    if error is ValueError:
                        raise ValueError
                    await asyncio.Event().wait()

            task = asyncio.create_task(program(client, service, serving, error))
            await serving.wait()
            if error is asyncio.CancelledError:
                task.cancel()
            with pytest.raises(error):
                await task
            assert recorder.events == ["entered", "left"]


async def test_its_end_is_bounded_by_the_drain_timeout() -> None:
    cancelled: list[bool] = []

    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        yield
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    service = iris.Service("orders", lifespan=lifespan)
    service.on_request(lambda payload: payload)
    async with LocalCluster() as cluster, named(cluster, "s", drain_timeout_s=0.05) as client:
        with pytest.raises(TimeoutError, match=r"service 'orders' did not end within 0.05 s"):
            async with client.serve(service):
                pass
    assert cancelled == [True]


async def test_a_cancellation_while_it_ends_is_no_timeout() -> None:
    ending = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        yield
        ending.set()
        await asyncio.Event().wait()

    service = iris.Service("orders", lifespan=lifespan)
    service.on_request(lambda payload: payload)
    async with LocalCluster() as cluster, cluster.client() as client:

        async def program() -> None:
            async with client.serve(service):
                pass

        task = asyncio.create_task(program())
        await ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_it_stays_entered_through_reconnects() -> None:
    recorder = Recorder()
    service = iris.Service("orders", lifespan=recorder.lifespan)

    @service.on_request
    def place(number: int, pool: Pool) -> bool:
        return pool is recorder.pool and not pool.closed

    async with LocalCluster() as cluster, cluster.client() as caller:
        server = named(cluster, "server")
        async with server, server.serve(service):
            before = port_of(cluster, "server")
            await cut(cluster, "server")
            await until(lambda: any(p.session.label == "server" for p in cluster.relay.hub.ports))
            await caller.wait_for_members("orders", 1, timeout=PATIENCE_S)
            assert port_of(cluster, "server") is not before
            assert await caller.request("orders", 7, timeout=PATIENCE_S) is True
            assert recorder.events == ["entered"]
    assert recorder.events == ["entered", "left"]


def test_an_async_generator_function_is_named_at_once() -> None:
    async def lifespan(client: iris.Client) -> AsyncIterator[None]:
        yield

    with pytest.raises(
        iris.ConfigError, match="'orders' must return an async context manager; decorate"
    ):
        iris.Service("orders", lifespan=lifespan)  # type: ignore[arg-type]  # the case under test


async def test_a_dict_cannot_be_yielded() -> None:
    @contextlib.asynccontextmanager
    async def lifespan(client: iris.Client) -> AsyncIterator[dict[str, int]]:
        yield {}

    service = iris.Service("orders", lifespan=lifespan)
    service.on_request(lambda payload: payload)
    async with LocalCluster() as cluster, cluster.client() as client:
        with pytest.raises(iris.ConfigError, match="cannot provide an object of type dict"):
            async with client.serve(service):
                pytest.fail("it is served")
