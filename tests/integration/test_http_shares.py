"""One token does not take every place of the HTTP bridge: the last quarter stays for others."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from integration.http_kit import ALL, OTHER, TWO, Bridge, bridged
from support.waiting import PATIENCE_S, until
from support.web import Answer, Http, http

import iris

pytestmark = pytest.mark.timeout(90)
SHARE = "share of a token"


def refused(answer: Answer) -> bool:
    """Whether the bridge had no place in the token's share."""
    return answer.status == 503 and "'all' has" in answer.json["detail"]


async def posting(bridge: Bridge, stack: contextlib.AsyncExitStack) -> Http:
    """Begin a request with the token for everything, whose body does not end."""
    client = await stack.enter_async_context(http(bridge.address))
    head = f"POST /topics/a HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALL}\r\ncontent-length: 20\r\n\r\n"
    client.writer.write(head.encode() + b"0123456789")
    return client


async def test_calls(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, tokens=TWO, max_calls=4) as bridge,
        contextlib.AsyncExitStack() as stack,
    ):
        room = bridge.application.room
        clients = [await posting(bridge, stack) for _ in range(3)]
        await until(lambda: room.calls.total == 3)
        assert refused(await bridge.post("/topics/a", b"x"))
        assert (await bridge.post("/topics/a", b"x", token=OTHER)).status == 202
        assert room.refused == {SHARE: 1}
        for client in clients:
            client.writer.write(b"0123456789")
            assert (await client.answer()).status == 202
        assert (await bridge.post("/topics/a", b"x")).status == 202
        await until(lambda: room.calls.held == {})


async def test_bytes_of_bodies(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, tokens=TWO, calls_bytes=40) as bridge,
        contextlib.AsyncExitStack() as stack,
    ):
        room = bridge.application.room
        for _ in range(3):
            await posting(bridge, stack)
        await until(lambda: room.bytes == 30)
        assert refused(await bridge.post("/topics/a", b"x"))
        assert (await bridge.post("/topics/a", b"x" * 10, token=OTHER)).status == 202
        assert room.refused == {SHARE: 1}


async def test_connections_in_use(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, tokens=TWO, max_connections=4) as bridge,
        contextlib.AsyncExitStack() as stack,
    ):
        room = bridge.application.room
        for kind in ("/topics/a", "/topics/b"):
            await stack.enter_async_context(bridge.events(kind))
        await posting(bridge, stack)
        await until(lambda: room.connections.total == 3)
        assert refused(await bridge.get("/topics/c"))
        assert refused(await bridge.post("/topics/a", b"x"))
        assert (await bridge.post("/topics/a", b"x", token=OTHER)).status == 202
        assert room.refused == {SHARE: 2}


async def test_event_streams_of_topics(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, tokens=TWO, max_readers=4) as bridge,
        bridge.events("/topics/a"), bridge.events("/topics/a"), bridge.events("/topics/a"),
    ):  # fmt: skip
        assert refused(await bridge.get("/topics/a"))
        async with bridge.events("/topics/a", token=OTHER):
            pass
        assert bridge.application.topics.lost == {SHARE: 1}


async def test_filters(tmp_path: Path) -> None:
    async with bridged(tmp_path, tokens=TWO, max_filters=4) as bridge, contextlib.AsyncExitStack() as stack:  # fmt: skip
        for name in ("a", "b", "c"):
            await stack.enter_async_context(bridge.events(f"/topics/{name}"))
        assert refused(await bridge.get("/topics/d"))
        async with bridge.events("/topics/d", token=OTHER), bridge.events("/topics/d"):
            pass  # a filter that is read already takes no other place
        assert bridge.application.topics.lost == {SHARE: 1}


async def test_a_filter_counts_for_who_still_reads_it(tmp_path: Path) -> None:
    async with bridged(tmp_path, tokens=TWO) as bridge:
        filters = bridge.application.topics._filters
        async with bridge.events("/topics/a") as first:
            async with bridge.events("/topics/a", token=OTHER):
                assert filters.held == {"all": 1}
                first.connection.writer.close()
                await until(lambda: filters.held == {"other": 1})
            await until(lambda: filters.held == {})


async def test_readers_of_streams(tmp_path: Path) -> None:
    async with bridged(tmp_path, tokens=TWO, data=True, max_stream_readers=4) as bridge:
        async with bridge.cluster.client() as other:
            await other.streams.create("orders")
        async with (
            bridge.events("/streams/orders"), bridge.events("/streams/orders"), bridge.events("/streams/orders"),
        ):  # fmt: skip
            assert refused(await bridge.get("/streams/orders"))
            async with bridge.events("/streams/orders", token=OTHER):
                pass
        assert bridge.application.streams.lost == {SHARE: 1}


async def test_requests_without_a_token_have_a_share_too(tmp_path: Path) -> None:
    service = iris.Service("shop")
    async with bridged(tmp_path, tokens=TWO, service=service, max_connections=4) as bridge:
        room = bridge.application.room
        room.connections.take("", 3)
        answer = await bridge.get("/ready", token="")
        assert (answer.status, "requests without a token have 3" in answer.json["detail"]) == (503, True)  # fmt: skip
        async with asyncio.timeout(PATIENCE_S):
            assert (await bridge.get("/ready", token=OTHER)).status == 200
        room.connections.give("", 3)
