"""Bodies of requests arrive within a limit of time and one of bytes, at every server."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from support.waiting import PATIENCE_S, until
from support.web import Http, http
from unit.web.test_server import App, served

from iris.dashboard import app as dashboard
from iris.dashboard.actions import Actions
from iris.dashboard.app import EVERYTHING, Dashboard
from iris.web import connection
from iris.web.tokens import Tokens

TOKEN = "a-token-of-the-page-0123456789-0123456789"
HEAD = (
    f"POST /actions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
    "content-type: application/json\r\n"
)


def page() -> Any:
    """Return a dashboard whose actions nobody carries out."""

    def connect() -> Any:
        raise AssertionError("no action was sent whole")

    tokens = Tokens.single(TOKEN, "page", EVERYTHING)
    feed: Any = None  # no page is opened
    return Dashboard(feed, tokens, Actions(connect), hello={}).guard


async def answered(client: Http) -> bytes:
    """Return all that is answered until the connection ends."""
    async with asyncio.timeout(PATIENCE_S):
        return await client.reader.read()


async def test_an_action_whose_body_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dashboard, "BODY_S", 0.05)
    async with served(page()) as (address, _), http(address) as client:
        client.writer.write(f"{HEAD}content-length: 100\r\n\r\n{{".encode())
        answer = await answered(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.05 s" in answer


@pytest.mark.parametrize("announced", [True, False])
async def test_an_action_over_the_limit_is_refused(announced: bool) -> None:
    async with served(page()) as (address, _), http(address) as client:
        if announced:
            client.writer.write(f"{HEAD}content-length: 16385\r\n\r\n".encode())
        else:
            chunk = b"4001\r\n" + b"x" * 0x4001 + b"\r\n"
            client.writer.write(f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + chunk)
        async with asyncio.timeout(PATIENCE_S):
            assert (await client.start()).status == 413


async def test_a_body_that_trickles_for_an_application_that_does_not_read_it_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.05)
    app = App()
    refused: Counter[str] = Counter()
    async with served(app, body_s=0.05, refused=refused) as (address, _), http(address) as client:
        client.writer.write(
            b"POST /wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
        )
        ended = asyncio.ensure_future(answered(client))
        while not ended.done():
            client.writer.write(b"x")
            await asyncio.wait((ended,), timeout=0.01)
        with contextlib.suppress(ConnectionError):
            assert await ended == b""
        await until(lambda: refused == {connection.BODY: 1})
        app.go.set()


async def test_a_body_that_came_does_not_end_a_request_that_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.02)
    app = App()
    async with (
        served(app, body_s=0.02) as (address, _), http(address) as client, http(address) as slow,
    ):  # fmt: skip
        client.writer.write(b"POST /wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\na")
        await until(lambda: app.waiting == 1)
        client.writer.write(b"b")
        slow.writer.write(b"POST /wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\na")
        assert await slow.ended()  # so the time has passed
        app.go.set()
        assert (await client.answer()).body == b"/wait"
