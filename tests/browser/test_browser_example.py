"""The web page in examples/browser: it calls a cluster, and misses nothing of a stream while its bridge restarts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from browser.kit import Pages
from support.waiting import PATIENCE_S

import iris
from iris.testing import LocalCluster
from iris.web import server
from relay.bridges.http.config import HttpConfig
from relay.bridges.http.process import Front, HttpBridge

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
TOKEN = "the-token-of-the-page-0123456789-0123456789"
LINES = "() => [...document.querySelectorAll('#board li')].map((line) => line.textContent)"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def files() -> Iterator[str]:
    """Serve the files of the example; yield their origin."""
    handler = functools.partial(_Quiet, directory=str(EXAMPLE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


@contextlib.asynccontextmanager
async def bridge(client: iris.Client, front: Front, address: str) -> AsyncIterator[str]:
    """Run a bridge at an address; yield the address with its port."""
    stop = asyncio.Event()
    listener = server.listen("listen", address)
    serving = asyncio.create_task(HttpBridge(front, HttpConfig(drain_s=1), client).serve(listener, stop))  # fmt: skip
    try:
        yield server.address_of(listener)
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await serving


async def test_a_page_calls_a_cluster_and_misses_nothing_of_a_stream_while_its_bridge_restarts(
    pages: Pages, tmp_path: Path
) -> None:
    delays = iris.Service("delays")
    delays.on_request(
        lambda flight: b"12 minutes" if flight == b"DL1" else b"<b>no such flight</b>"
    )
    tokens = tmp_path / "tokens.toml"
    tokens.touch(mode=0o600)
    tokens.write_text(f'[[token]]\nname = "page"\ntoken = "{TOKEN}"\nallow.request = ["delays"]\nallow.read = ["departures"]\n')  # fmt: skip
    with files() as origin:
        pages.expected = (
            "asked: http://127.0.0.1:",
            "blocked by CORS",
            "404 (File",
            "401 (Unauthorized)",
        )
        front = Front(tokens=tokens, origins=(origin,))
        async with LocalCluster(data=tmp_path / "data") as cluster, cluster.serve(delays), cluster.client() as client:  # fmt: skip
            await client.streams.create("departures")
            await client.streams.append_many("departures", [b"one", b"<i>two</i>"])
            async with bridge(client, front, "127.0.0.1:0") as address:
                page = await pages.open(
                    f"{origin}/board.html#bridge=http://{address}&token={TOKEN}"
                )
                await page.wait("() => document.querySelectorAll('#board li').length === 2")
                await page.tab.fill("#flight", "DL1")
                await page.tab.click("button")
                await page.wait(
                    "() => document.querySelector('#answer').textContent === '12 minutes'"
                )
                await page.tab.fill("#flight", "XX9")
                await page.tab.click("button")
                await page.wait(
                    "() => document.querySelector('#answer').textContent === '<b>no such flight</b>'"
                )
            await client.streams.append("departures", b"three, while the bridge is away")
            await page.tab.click("button")
            await page.wait("() => document.querySelector('#answer').textContent.includes('etch')")
            async with bridge(client, front, address):
                await client.streams.append("departures", b"four")
                await page.wait("() => document.querySelectorAll('#board li').length >= 4")
                assert await page.tab.evaluate(LINES) == [
                    "one",
                    "<i>two</i>",
                    "three, while the bridge is away",
                    "four",
                ]
                refused = await pages.open(
                    f"{origin}/board.html#bridge=http://{address}&token=wrong"
                )
                await refused.wait(
                    "() => document.querySelector('#state').textContent.includes('token')"
                )
