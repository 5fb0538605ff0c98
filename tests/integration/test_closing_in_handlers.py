"""A handler may close the client that serves it: the client closes when the handler has finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.waiting import until

import iris
from iris.testing import LocalCluster

pytestmark = pytest.mark.timeout(30)


async def passed_on(request: Any, call_next: Any) -> Any:
    return await call_next(request)


async def tunnel(caller: iris.Client) -> None:
    async with caller.tunnel("ends", timeout=5) as opened:
        assert await opened.recv() == b"bye"


async def survey(caller: iris.Client) -> None:
    assert [a.value async for a in caller.survey("ends", "x", timeout=5)] == [b"bye"]


CALLS: dict[str, Callable[[iris.Client], Awaitable[Any]]] = {
    "request": lambda caller: caller.request("ends", "x", timeout=5),
    "survey": survey,
    "push": lambda caller: caller.push("ends", "x"),
    "broadcast": lambda caller: caller.broadcast("ends", "x"),
    "tunnel": tunnel,
    "publish": lambda caller: caller.publish("news", "x"),
}


def closing_service(ended: asyncio.Event, *, middleware: bool) -> iris.Service:
    """Return a service whose handlers close their client, and then do something that takes a turn."""
    service = iris.Service("ends", middleware=[passed_on] if middleware else [])

    async def close(client: iris.Client) -> str:
        await client.close()
        await asyncio.sleep(0)
        ended.set()
        return "bye"

    @service.on_request
    @service.on_survey
    @service.on_push
    @service.on_broadcast
    @service.on_publish("news")
    async def end(text: str, client: iris.Client) -> str:
        return await close(client)

    @service.on_tunnel
    async def talk(tunnel: iris.Tunnel, client: iris.Client) -> None:
        await tunnel.send(await close(client))

    return service


@pytest.mark.parametrize("middleware", [False, True])
@pytest.mark.parametrize("call", CALLS)
async def test_a_client_that_a_handler_closes_is_closed_when_the_handler_has_finished(
    call: str, middleware: bool
) -> None:
    ended = asyncio.Event()
    config = iris.ClientConfig(drain_timeout_s=86_400)  # nothing here may wait for it
    async with LocalCluster() as cluster, cluster.client() as caller:
        member = cluster.client(config=config)
        await member.open()
        serving = member.serve(closing_service(ended, middleware=middleware))
        await serving.__aenter__()
        await CALLS[call](caller)
        await caller.flush()
        await ended.wait()
        await member.close()  # waits for the close that the handler began
        with pytest.raises(iris.Closed):
            await member.publish("news", "x")
        await until(lambda: len(cluster.relay.hub.ports) == 1)
        assert "failed handlers" not in member.counters
        await serving.__aexit__(None, None, None)


async def test_a_handler_cannot_wait_for_new_keys_because_they_wait_for_it() -> None:
    async with LocalCluster() as cluster, cluster.client() as caller:
        config = iris.ClientConfig(drain_timeout_s=86_400)
        async with cluster.client(config=config) as member:
            service = iris.Service("keys")

            @service.on_request
            async def reload(text: str, client: iris.Client) -> None:
                await client.reload_keys(client.keyring)

            async with member.serve(service):
                with pytest.raises(iris.RemoteError) as caught:
                    await caller.request("keys", "x", timeout=5)
    assert "reload_keys waits for all handlers, so a handler cannot await it" in str(caught.value)
