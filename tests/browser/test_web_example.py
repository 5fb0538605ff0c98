"""The page in examples/web: what it counts is what was published, though its relay is killed on the way."""

from __future__ import annotations

import asyncio
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
from support.examples import WEB, load
from support.waiting import PATIENCE_S

from iris.cli.demo.data import find_csv, rows
from iris.web import server

pytestmark = pytest.mark.asyncio(loop_scope="session")

RATE: Final = 500.0


@pytest.fixture(scope="module")
def example(built: str) -> ModuleType:
    return load("demo")


async def test_a_page_misses_nothing_of_its_streams_and_shows_every_gap_elsewhere(
    example: ModuleType, pages: Pages
) -> None:
    departures = rows(find_csv(), quick=True)
    async with example.running(server.listen("listen", "127.0.0.1:0")) as (demo, client):
        page = await pages.open(demo.address("alice"))
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
        back = demo.accounts.boards["EWR"]
        while not await page.tab.evaluate("(back) => counted.board.last >= back", back):
            await demo.publish(client, islice(departures, 1), rate=RATE)
        published, board_has = demo.accounts.published, demo.accounts.boards["EWR"]
        await page.wait("([published, boardHas]) => counted.chart.flights >= published && counted.board.last === boardHas - 1", [published, board_has])  # fmt: skip
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
    assert board["received"] + board["missed"] == board_has - board["first"]
    assert 0 < board["gaps"] == shown
    delay = accounts.minutes["UA"] / accounts.carriers["UA"]
    assert answer == f"{accounts.carriers['UA']} departures, {delay:.1f} min late on average"


async def test_ctrl_c_ends_the_demo_prints_its_accounts_and_leaves_nothing(
    built: str, tmp_path: Path
) -> None:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, WEB / "demo.py", "--port", "0", stdout=PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
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
    opened = re.findall(rb"^open http://127.0.0.1:[0-9]+/#([a-z]+):.{16,} as \1,", said, re.MULTILINE)  # fmt: skip
    assert opened == [b"alice", b"bob", b"carol"]
    assert json.loads(rest)["published"] == 0
    assert os.listdir(tmp_path) == []
