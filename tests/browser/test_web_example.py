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
from typing import Any, Final, NamedTuple

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


MISSES: Final = {
    "chart.last = offset;": "chart.last = offset; if (counted.board.gaps && !globalThis.skipped) { globalThis.skipped = true; continue; }",
    'line("gaps"': 'void ("gaps"',
    "board.missed += number": "board.missed = 0 * number",
}  # fmt: skip
"""A page that misses a record after its relay was killed, shows no gap, and does not count what it missed."""
HIDES: Final = {"client.subscribe(`${topic}.>`, { onLoss })": "client.subscribe(`${topic}.>`)"}
"""A page that does not know of gaps."""


class Seen(NamedTuple):
    """What a page showed after its relay was killed, and what it had to show."""

    counted: dict[str, Any]
    room: list[str]
    answer: str
    gaps_shown: int
    accounts: Any

    def wrong(self) -> list[str]:
        """Return what does not agree with the accounts of the demo."""
        accounts, board = self.accounts, self.counted["board"]
        chart = {
            "last": accounts.published - 1,
            "flights": accounts.published,
            "carriers": accounts.carriers,
            "minutes": accounts.minutes,
            "gaps": 0,
        }
        delay = accounts.minutes["UA"] / accounts.carriers["UA"]
        answer = f"{accounts.carriers['UA']} departures, {delay:.1f} min late on average"
        texts = [line.partition(": ")[2] for line in self.room]
        right = {
            "chart": self.counted["chart"] == chart,
            "room": texts == ["<b>before</b>", "while the relay was away"],
            "board": board["received"] + board["missed"] == accounts.boards["EWR"] - board["first"],
            "gaps": 0 < board["gaps"] == self.gaps_shown,
            "answer": self.answer == answer,
        }
        return [name for name, agrees in right.items() if not agrees]


async def through_a_kill(example: ModuleType, pages: Pages, instead: dict[str, str]) -> Seen:
    """Open a page, publish, kill the relay, publish; return when the page has the last of everything."""
    departures = rows(find_csv(), quick=True)
    async with example.running(server.listen("listen", "127.0.0.1:0")) as (demo, client):
        page = await pages.open(demo.address("alice"), instead=instead)
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
        accounts = demo.accounts
        back = accounts.boards["EWR"]
        while not await page.tab.evaluate("(back) => counted.board.last >= back", back):
            await demo.publish(client, islice(departures, 1), rate=RATE)
        last = [accounts.published - 1, accounts.boards["EWR"] - 1]
        await page.wait("([chart, board]) => counted.chart.last === chart && counted.board.last === board", last)  # fmt: skip
        await page.wait("() => document.querySelectorAll('#room li').length >= 2")
        await page.tab.click("#ask button")
        await page.wait("() => document.querySelector('#answer').textContent !== ''")
        return Seen(
            await page.tab.evaluate("() => counted"),
            await page.tab.locator("#room li").all_inner_texts(),
            await page.text("#answer"),
            await page.tab.locator("#gaps li").count(),
            accounts,
        )


async def test_a_page_misses_nothing_of_its_streams_and_shows_every_gap_elsewhere(
    example: ModuleType, pages: Pages
) -> None:
    seen = await through_a_kill(example, pages, {})
    assert seen.wrong() == [], seen


@pytest.mark.parametrize(
    ("sabotages", "wrong"),
    [(MISSES, ["chart", "board", "gaps"]), (HIDES, ["gaps"])],
    ids=["misses", "hides"],
)
async def test_a_page_that_misses_a_record_or_hides_a_gap_is_noticed(
    example: ModuleType, pages: Pages, sabotages: dict[str, str], wrong: list[str]
) -> None:
    script = (WEB / "page.js").read_text()
    for find, put in sabotages.items():
        assert script.count(find) == 1, find
        script = script.replace(find, put)
    seen = await through_a_kill(example, pages, {"page.js": script})
    assert seen.wrong() == wrong, seen


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
