"""The page in examples/web: what it counts is what was published, though its relay is killed on the way."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from browser.kit import Pages
from support.waiting import PATIENCE_S

from iris.cli.demo.data import find_csv, rows
from iris.web import server

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATH: Final = Path(__file__).parents[2] / "examples" / "web" / "demo.py"
RATE: Final = 500.0


@pytest.fixture(scope="module")
def example(built: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("web_demo", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


async def test_a_page_misses_nothing_of_its_streams_and_shows_every_gap_elsewhere(
    example: ModuleType, pages: Pages
) -> None:
    departures = rows(find_csv(), quick=True)
    async with example.running(server.listen("listen", "127.0.0.1:0")) as (demo, client):
        page = await pages.open(f"{demo.origin}/#{demo.password}")
        await page.wait("() => document.querySelector('#state').textContent.startsWith('connected')")  # fmt: skip
        while not await page.tab.evaluate("() => counted.board.received"):
            await demo.publish(client, islice(departures, 1), rate=RATE)
        await demo.publish(client, islice(departures, 100), rate=RATE)
        await page.tab.fill("[name=text]", "<b>before</b>")
        await page.tab.click("#say button")
        await page.wait("() => document.querySelector('#room').textContent.includes('before')")

        os.kill(demo.relay_pid, signal.SIGKILL)
        await page.tab.fill("[name=text]", "while the relay was away")
        await page.tab.click("#say button")
        await demo.publish(client, islice(departures, 100), rate=RATE)
        back = demo.accounts.published
        while not await page.tab.evaluate("(back) => counted.board.last >= back", back):
            await demo.publish(client, islice(departures, 1), rate=RATE)
        published = demo.accounts.published
        await page.wait("(published) => counted.chart.flights >= published && counted.board.last === published - 1", published)  # fmt: skip
        await page.wait("() => document.querySelectorAll('#room li').length >= 2")
        await page.tab.click("#ask button")
        await page.wait("() => document.querySelector('#answer').textContent !== ''")

        counted = await page.tab.evaluate("() => counted")
        answer = await page.text("#answer")
        room = await page.tab.locator("#room li").all_inner_texts()
        shown = await page.tab.locator("#gaps li").count()
        accounts = demo.accounts
    assert counted["chart"] == {
        "flights": published,
        "carriers": accounts.carriers,
        "minutes": accounts.minutes,
        "gaps": 0,
    }
    assert [line.partition(": ")[2] for line in room] == ["<b>before</b>", "while the relay was away"]  # fmt: skip
    board = counted["board"]
    assert board["received"] + board["missed"] == published - board["first"]
    assert 0 < board["gaps"] == shown
    delay = accounts.minutes["UA"] / accounts.carriers["UA"]
    assert answer == f"{accounts.carriers['UA']} departures, {delay:.1f} min late on average"


async def test_ctrl_c_ends_the_demo_prints_its_accounts_and_leaves_nothing(
    built: str, tmp_path: Path
) -> None:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, PATH, "--port", "0", stdout=PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )  # fmt: skip
    assert demo.stdout is not None
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            said = await demo.stdout.readuntil(b"kill it if you like\n")
            demo.send_signal(signal.SIGINT)
            rest, _ = await demo.communicate()
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()
    assert demo.returncode == 0
    assert re.search(rb"^open http://127.0.0.1:[0-9]+/#.{20,}$", said, re.MULTILINE)
    assert json.loads(rest)["published"] == 0
    assert os.listdir(tmp_path) == []
