"""A relay that is killed, or stops: what JavaScript gets back by itself, and what it reports."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from interop.js.kit import KEY, Node, Page, Raised
from support.relays import Daemon

import iris


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A relay with a store, which listens at the same port when it is started again."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tmp_path.chmod(0o700)
    arguments = ("--listen", f"ws://127.0.0.1:{port}", "--data", str(tmp_path / "data"))
    with Daemon(tmp_path, *arguments) as daemon:
        yield daemon


def url(daemon: Daemon) -> str:
    (said,) = [line for line in daemon.lines() if line["event"] == "web.listening"][-1]["addresses"]
    return str(said)


async def connected(
    node: Node, daemon: Daemon, options: str = "reconnectMinMs: 10, reconnectMaxMs: 50"
) -> Page:
    page = node.page(url(daemon))
    await page.connect(options)
    return page


def near(daemon: Daemon) -> iris.Client:
    return iris.connect(daemon.socket, keyring=iris.Keyring.single(KEY), wait=20)


async def test_after_the_relay_was_killed_everything_comes_back_and_a_stream_misses_nothing(
    node: Node, daemon: Daemon
) -> None:
    page = await connected(node, daemon)
    async with near(daemon) as client:
        await client.streams.create("log")
        await page.run(
            """s.read = []; s.heard = []; s.gaps = [];
            s.binding = await s.client.serve(new iris.Service("echo").onRequest((value) => value));
            s.sub = s.client.subscribe("news", {onLoss: (lost) => s.gaps.push(lost)});
            await s.sub.ready;
            void (async () => { for await (const { value } of s.sub) s.heard.push(value); })();
            void (async () => {
                for await (const { value } of s.client.streams.read("log", {start: "first"})) s.read.push(value);
            })().catch((error) => { s.ended = error; });"""
        )
        await client.publish("news", 1)
        for number in range(5):
            await client.streams.append("log", number)
        await page.run("await until(() => s.read.length === 5 && s.heard.length === 1)")
        hanging = asyncio.create_task(
            page.run(
                """s.slow = new iris.Service("slow").onRequest(() => new Promise(() => undefined));
                await s.client.serve(s.slow);
                await s.client.request("slow", 1, {timeoutMs: 15000});"""
            )
        )
        await client.wait_for_members("slow", 1, timeout=5)
        await page.run("await s.client.flush()")
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(Raised) as lost:
            await hanging
        assert (lost.value.name, lost.value.fields["mayHaveRun"]) == ("ConnectionLost", True)
        await page.run("await s.client.publish('news', 2)")  # held until the relay is back
        daemon.start()
    async with near(daemon) as client:
        for number in range(5, 10):
            await client.streams.append("log", number, timeout=20)
        await client.wait_for_members("echo", 1, timeout=10)
        assert await client.request("echo", 7, timeout=5) == 7
        await client.wait_for_subscribers("news", 1, timeout=5)
        await client.publish("news", 3)
        await page.run("await until(() => s.read.length === 10 && s.heard.includes(3))")
    assert await page.run("return s.read") == list(range(10))
    gaps = await page.run("return s.gaps")
    assert [gap["count"] for gap in gaps] == [None]
    assert "relay" in {lost["kind"] for lost in await page.run("return s.losses")}
    await page.close()
    await page.run("await until(() => s.ended?.name === 'Closed')")


async def test_a_relay_that_stops_waits_for_the_calls_of_javascript(
    node: Node, daemon: Daemon
) -> None:
    page = await connected(node, daemon)
    async with near(daemon) as client:
        await page.run(
            """s.began = new Promise((resolve) => { s.begin = resolve; });
            s.gaps = [];
            s.sub = s.client.subscribe("news", {onLoss: (lost) => s.gaps.push(lost)});
            await s.sub.ready;
            s.service = new iris.Service("slow").onRequest(async (value) => {
                s.begin();
                await new Promise((resolve) => { s.finish = resolve; });
                return value;
            });
            await s.client.serve(s.service);"""
        )
        asking = asyncio.create_task(client.request("slow", 1, timeout=15))
        await page.run("await s.began")
        stopping = asyncio.create_task(asyncio.to_thread(daemon.stop, signal.SIGTERM))
        await page.run("await until(() => !s.client.connected); s.finish();")
        assert await asking == 1
        assert await stopping == 0
    daemon.start()
    async with near(daemon) as client:
        await client.wait_for_members("slow", 1, timeout=10)
        await client.wait_for_subscribers("news", 1, timeout=5)
    assert [gap["count"] for gap in await page.run("return s.gaps")] == [None]
    await page.close()


async def test_a_relay_that_is_not_there_is_named_and_one_that_comes_is_waited_for(
    node: Node, daemon: Daemon
) -> None:
    page = node.page(url(daemon))
    daemon.stop(signal.SIGKILL)
    with pytest.raises(Raised, match="no relay answered at ws://") as raised:
        await page.connect()
    assert raised.value.name == "RelayUnavailable"
    waiting = asyncio.create_task(page.connect("waitMs: 20000, reconnectMaxMs: 100"))
    daemon.start()
    await waiting
    await page.close()
