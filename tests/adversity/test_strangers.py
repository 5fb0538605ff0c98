"""Strangers over TLS who begin and do nothing more, or do not let go: they count, and others get in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.browsers import Page
from support.strangers import Lingering
from support.waiting import PATIENCE_S, eventually, until
from support.web import certificate, http

from relay.config import dev
from relay.daemon import Relay

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that accepts sessions over wss:// and knows no tickets."""
    cert, key, _ = certificate(tmp_path)
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    made = Relay(
        replace(
            dev(directory / "relay.sock"), listen=("wss://127.0.0.1:0", "ws://127.0.0.1:0"), wss_cert=cert, wss_key=key, hello_timeout_s=60.0,
        )
    )  # fmt: skip
    await made.start()
    yield made
    await made.stop(drain_s=0)


def web(relay: Relay, figure: str) -> int:
    assert relay.web is not None
    found = relay.web.status()[figure]
    assert isinstance(found, int)
    return found


def address(relay: Relay) -> str:
    assert relay.web is not None
    return relay.web.addresses[0].removeprefix("wss://")


async def test_what_the_relay_closes_counts_among_strangers_until_it_is_gone(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets an answer and the end of TLS, and neither ends TLS nor closes the connection."""
    monkeypatch.setattr("relay.net.web.MAX_HALF_OPEN", 4)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(12):
            stranger = Lingering(await stack.enter_async_context(http(address(relay))))
            await stranger.say(b"GET / HTTP/1.1\r\nhost: relay\r\n\r\n", until=b"426")
        await until(lambda: web(relay, "connections") <= 4)
        assert relay.web is not None
        assert relay.web.refusals["too many half-open"] == 8


async def test_a_session_that_the_relay_closes_is_a_stranger_again(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has greeted, breaks a rule, and does not answer the close frame."""
    monkeypatch.setattr("relay.net.web.MAX_HALF_OPEN", 2)
    monkeypatch.setattr("relay.net.websession.CLOSE_S", 60.0)
    assert relay.web is not None
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            page = await stack.enter_async_context(Page(relay.web.addresses[1]))
            await page.greet()
            page.socket.transport.pause_reading()
            await page.socket.send("text")
        await until(lambda: relay.web is not None and relay.web.refusals.get("text frame") == 6)
        await until(lambda: web(relay, "connections") <= 3)
        assert relay.web.refusals["too many half-open"] >= 3
        async with Page(relay.web.addresses[1]) as page:
            await page.greet()


async def test_what_the_relay_closes_is_gone_soon(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.web.SHUTDOWN_S", 0.05)
    async with http(address(relay)) as plain:
        stranger = Lingering(plain)
        await stranger.say(b"GET / HTTP/1.1\r\nhost: relay\r\n\r\n", until=b"426")
        async with asyncio.timeout(PATIENCE_S):
            await stranger.gone()
        await eventually(lambda: web(relay, "connections") == 0)


async def test_silent_handshakes_make_room_for_the_next_one(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.net.web.MAX_HALF_OPEN", 4)
    async with contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(http(address(relay))) for _ in range(12)]
        async with asyncio.timeout(PATIENCE_S):
            for each in silent[:8]:
                assert await each.ended()
        await until(lambda: web(relay, "half_open") == 4)
