"""The pictures of docs/dashboard.md, of a real network.

To make them again: IRIS_TEST_SCREENSHOTS=docs/dashboard .venv/bin/pytest tests/browser -k pictures
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from browser.kit import Pages, named, running
from support.dashboards import Dashboard
from support.links import Host
from support.waiting import PATIENCE_S

import iris

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOLDER: Final = "IRIS_TEST_SCREENSHOTS"
"""Environment variable: where the pictures are kept. Without it they are made and thrown away."""
NEW_UTS: Final = 0x04000000


def call_host(name: str) -> Callable[[], None] | None:
    """Return what gives a process a host name of its own; None if only root could."""
    if os.geteuid():
        return None
    libc = ctypes.CDLL(None)
    encoded = name.encode()

    def before() -> None:
        if libc.unshare(NEW_UTS) == 0:
            libc.sethostname(encoded, len(encoded))

    return before


def service(name: str, low_s: float, high_s: float, chance: random.Random) -> iris.Service:
    """A service whose handlers take as long as chance says."""
    made = iris.Service(name, limits=iris.Limits(concurrency=8))

    @made.on_request
    async def handle(payload: bytes) -> bytes:
        await asyncio.sleep(chance.uniform(low_s, high_s))
        return payload

    return made


async def call(caller: iris.Client, cluster: str, pause_s: float) -> None:
    while True:
        with contextlib.suppress(iris.IrisError):  # a relay is killed for a picture
            await caller.request(cluster, b"x" * 200, timeout=2.0)
        await asyncio.sleep(pause_s)


async def publish(publisher: iris.Client) -> None:
    while True:
        await publisher.publish("orders.new", b'{"order": 1}')
        await asyncio.sleep(0.01)


async def consume(worker: iris.Client) -> None:
    async with worker.streams.consumer("orders", "invoices", shared=True, max_deliver=1) as work:
        async for message in work:
            if message.offset % 400 == 7:
                work.nack(message, reason="no such customer")
            else:
                work.ack(message)


async def test_the_pictures_of_the_documentation_are_of_a_real_network(
    tmp_path: Path, pages: Pages
) -> None:
    folder = Path(os.environ.get(FOLDER) or tmp_path)
    assert folder.is_dir()  # noqa: ASYNC240 - a look at a local folder
    chance = random.Random(7)
    with contextlib.ExitStack() as relays:
        hosts = [Host(tmp_path / "shop-1", "--data", str(tmp_path / "data"), before=call_host("shop-1"))]  # fmt: skip
        relays.enter_context(hosts[0].daemon)
        for name in ("shop-2", "store-1"):
            join = ("--join", hosts[0].address)
            hosts.append(Host(tmp_path / name, *join, before=call_host(name)))
            relays.enter_context(hosts[-1].daemon)
        first, second, third = (host.daemon for host in hosts)
        dashboard = relays.enter_context(
            Dashboard(tmp_path / "page", first.socket, "--also", str(second.socket))
        )
        async with (
            named(first, "pricing.py") as one,
            named(second, "pricing.py") as two,
            named(second, "pricing-slow.py") as slow,
            named(third, "stock.py") as three,
            named(first, "web.py") as web,
            one.serve(service("pricing", 0.001, 0.004, chance)),
            two.serve(service("pricing", 0.001, 0.005, chance)),
            slow.serve(service("pricing", 0.08, 0.3, chance)),
            three.serve(service("stock", 0.002, 0.01, chance)),
        ):
            await web.wait_for_members("pricing", 3, timeout=PATIENCE_S)
            await web.wait_for_members("stock", 1, timeout=PATIENCE_S)
            await web.streams.create("orders", topic="orders.>", timeout=PATIENCE_S)
            works = [call(web, "pricing", 0.004), call(two, "pricing", 0.004), call(slow, "pricing", 0.01)]  # fmt: skip
            works += [call(web, "stock", 0.02), publish(web), consume(two)]
            async with running(works):
                page = await pages.open(dashboard.url, height=1010)
                small = await pages.open(dashboard.url, width=375, height=900, dark=True, scale=1.5)
                for each in (page, small):
                    await each.shown()
                    await each.wait("() => /pricing-slow/.test(document.querySelector('#slow-table').textContent)")  # fmt: skip
                    await each.wait("() => /dead letter/.test(document.querySelector('#alerts').textContent)")  # fmt: skip
                await page.tab.get_by_role("button", name="pricing", exact=True).click()
                await page.wait(
                    "() => document.querySelector('#tiles polyline').points.length > 20"
                )
                await page.tab.mouse.move(0, 0)
                await page.tab.screenshot(path=folder / "overview.png")
                await small.tab.screenshot(path=folder / "small.png")
                third.stop(signal.SIGKILL)
                await page.tab.locator("#drawing .host[data-state=bad]").wait_for()
                await page.tab.locator("#map").screenshot(path=folder / "map.png")
    for name in ("overview", "small", "map"):
        picture = (folder / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert 10_000 < len(picture) < 300_000
